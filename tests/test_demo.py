"""The reuse experiment in miniature: its rows, its knees, its files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks import reuse, reuse_report
from benchmarks.reuse import Contestant, Knee, Prompts, Row, Settings

N = 4
SETTINGS = Settings(N, prefix=32, suffix=4, counts=(2, 4, 6, 8, 12), stride=16, page=8)
CACHES = ["native-fp32", "bf16", "int8-2n", "int8-bytes-of-native-fp32", "int8-bytes-of-bf16"]


@pytest.fixture(scope="module")
def caches() -> list[Contestant]:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    return reuse.contestants(Qwen3_5ForCausalLM(config).eval(), SETTINGS)


@pytest.fixture(scope="module")
def prompts() -> list[Prompts]:
    return reuse.make_prompts(SETTINGS)


@pytest.fixture(scope="module")
def served() -> Counter[str]:
    return Counter()


@pytest.fixture(scope="module")
def rows(caches: list[Contestant], prompts: list[Prompts], served: Counter[str]) -> list[Row]:
    return reuse.run(SETTINGS, caches, prompts, lambda: served.update(["request"]))


@pytest.fixture(scope="module")
def knees(rows: list[Row]) -> list[Knee]:
    return reuse.knees(rows, SETTINGS)


def test_there_is_a_row_for_every_cache_count_and_order(rows: list[Row]) -> None:
    expected = {
        (cache, k, order) for cache in CACHES for k in SETTINGS.counts for order in ("same", "random")
    }
    assert {(row.cache, row.k, row.order) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert 0 <= row.reuse <= SETTINGS.greatest_reuse
        assert 0 < row.p50_ms <= row.p90_ms
        assert row.rps > 0


def test_every_request_is_told(rows: list[Row], caches: list[Contestant], served: Counter[str]) -> None:
    assert served["request"] == reuse.requests(SETTINGS, caches)


def test_the_knee_is_at_the_slots_and_moves_from_n_to_2n(knees: list[Knee]) -> None:
    same = {knee.cache: knee.same for knee in knees}
    assert (same["native-fp32"], same["bf16"], same["int8-2n"]) == (N, N, 2 * N)
    for knee in knees:
        fitting = [k for k in SETTINGS.counts if k <= knee.slots]
        assert knee.same == max(fitting)
        assert knee.random >= knee.same


def test_reuse_is_all_or_nothing_in_the_same_order_and_partial_in_random_order(rows: list[Row]) -> None:
    for row in rows:
        if row.k <= row.slots:
            assert row.reuse == pytest.approx(SETTINGS.greatest_reuse)
        elif row.order == "same":
            assert row.reuse == 0
    between = [row.reuse for row in rows if (row.cache, row.k, row.order) == ("bf16", 6, "random")]
    assert all(0 < reuse < SETTINGS.greatest_reuse for reuse in between)


def test_equal_bytes_buy_as_many_int8_slots_as_fit(caches: list[Contestant]) -> None:
    size = {cache.name: cache.bytes for cache in caches}
    slots = {cache.name: cache.slots for cache in caches}
    for name in ("native-fp32", "bf16"):
        bought = f"int8-bytes-of-{name}"
        assert slots[bought] > N
        assert size[bought] <= size[name] < size[bought] * (slots[bought] + 2) / (slots[bought] + 1)


def test_each_prefix_takes_exactly_one_checkpoint(caches: list[Contestant], prompts: list[Prompts]) -> None:
    cache = caches[-1].server.cache
    cache.reset()
    for prefix, suffixes in prompts[:3]:
        for suffix in suffixes:
            caches[-1].server.generate(prefix + suffix)
    assert cache.usage("checkpoint").evictable == 3


def test_prefixes_differ_within_their_first_stride(prompts: list[Prompts]) -> None:
    assert len({tuple(each.prefix[: SETTINGS.stride]) for each in prompts}) == max(SETTINGS.counts)
    assert {len(each.prefix) for each in prompts} == {SETTINGS.prefix}
    assert {tuple(map(len, each.suffixes)) for each in prompts} == {(SETTINGS.suffix,) * reuse.ROUNDS}


def test_the_files_hold_what_was_measured(rows: list[Row], knees: list[Knee], tmp_path: Path) -> None:
    reuse_report.write(tmp_path / "demo", rows, knees, SETTINGS)
    content = json.loads((tmp_path / "demo" / "reuse.json").read_text())
    fields = {"cache", "slots", "bytes", "k", "order", "reuse", "p50_ms", "p90_ms", "rps"}
    assert all(set(row) == fields for row in content["rows"])
    assert [Row(**row) for row in content["rows"]] == rows
    assert content["knees"] == {each.cache: {"same": each.same, "random": each.random} for each in knees}
    assert (tmp_path / "demo" / "reuse.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_show_every_row_and_the_pull_request_beside(rows: list[Row], knees: list[Knee]) -> None:
    text = reuse_report.tables(rows, knees, SETTINGS)
    assert all(text.count(f"{cache} ") >= 2 * len(SETTINGS.counts) for cache in CACHES)
    assert "4 -> 8" in text
    assert "204.1 -> 150.5" in text


def test_help_explains_the_caches_and_the_knee(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        reuse.parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in [*CACHES, "knee", "--full", "--slots"])
