"""The speed benchmark: the bounds on the kept figures, its clock and table, and every workload in miniature."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.reuse import Knee
from benchmarks.reuse import Row as ReuseRow
from benchmarks.speed import (
    __main__,
    clock,
    codec,
    growth,
    layers,
    plots,
    profile,
    reuse,
    table,
    tree,
    workers,
    workloads,
)
from benchmarks.speed.clock import Clock
from benchmarks.speed.ours import OurRequests, Ours
from benchmarks.speed.table import BOUNDS, Bound, Figure, Row, medians
from benchmarks.speed.workers import Process, Results
from benchmarks.speed.workloads import Backend, Workload

KEPT = {row.name: row for row in table.read(__main__.KEPT / "bench.json")}
OURS = Backend("ours", "0", Ours)
TINY: dict[str, Workload] = {
    "W1": workloads.documents(n=8, length=20),
    "W2": workloads.chat(sessions=3, turns=4, turn=8),
    "W3": workloads.churn(requests=60, prompts=20, states=5, length=10),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workloads and curves, small enough for a test."""
    for name, workload in TINY.items():
        monkeypatch.setitem(workloads.WORKLOADS, name, lambda workload=workload: workload)
    monkeypatch.setattr(workloads, "gc", SimpleNamespace(collect=lambda: 0))  # takes a second beside torch
    monkeypatch.setattr(growth, "LEAVES", (4, 8))
    monkeypatch.setattr(growth, "PEER_LEAVES", (4,))
    monkeypatch.setattr(growth, "TURNS", (2, 4))
    monkeypatch.setattr(growth, "PINNED", (0, 3))
    monkeypatch.setattr(growth, "PINNED_DOCUMENTS", 8)
    monkeypatch.setattr(growth, "PROMPTS", (16,))
    monkeypatch.setattr(growth, "DIVERGING", 9)
    monkeypatch.setattr(growth, "SAMPLES", 32)
    monkeypatch.setattr(clock, "FAR_BYTES", 1 << 16)


def stepping(steps: list[int]) -> Callable[[], int]:
    """A clock that has gone on by the next of `steps` at each reading, over and over."""
    now, turn = 0, 0

    def read() -> int:
        nonlocal now, turn
        now += steps[turn % len(steps)]
        turn += 1
        return now

    return read


def test_the_clock_takes_its_own_cost_off_and_counts_what_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "thread_time_ns", stepping([500]))
    timed = Clock()
    monkeypatch.setattr(clock, "thread_time_ns", stepping([0, 2500, 0, 2500, 0, 8500]))
    for _ in range(3):
        assert timed("call", max, 1, 2) == 2
    assert timed.mean_us("call") == 4.0
    assert timed.median_us("call") == 2.0
    assert timed.seconds(["call", "never called"]) == pytest.approx(12e-6)


def test_a_call_shorter_than_the_clocks_noise_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "thread_time_ns", stepping([500]))
    timed = Clock()
    monkeypatch.setattr(clock, "thread_time_ns", stepping([400]))
    timed("call", int)
    assert timed.mean_us("call") == 0


def test_a_repeated_call_ends_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(clock, "clock_cost", lambda: 0.0)
    monkeypatch.setattr(clock, "thread_time_ns", stepping([3000]))
    assert clock.median_us(lambda: calls.append(0), seconds=0, least=5) == 3.0
    assert len(calls) == 5
    clock.median_us(lambda: calls.append(0), seconds=1, least=3, most=7)
    assert len(calls) == 12


def test_medians_are_over_runs_and_curves_keep_their_points() -> None:
    first = [Figure("s", "a", 1.0, "us"), Figure("s", "b", 5.0, "us", 4, "leaves")]
    second = [Figure("s", "a", 9.0, "us"), Figure("s", "b", 7.0, "us", 8, "leaves")]
    third = [Figure("s", "a", 2.0, "us")]
    found = {figure.label: figure.value for figure in medians([first, second, third])}
    assert found == {"a": 2.0, "b, 4 leaves": 5.0, "b, 8 leaves": 7.0}


def test_growth_is_the_last_point_over_the_first() -> None:
    curve = [Figure("s", "evict", value, "us", at, "leaves") for value, at in ((2.0, 1), (3.0, 4), (5.0, 9))]
    (found,) = growth.growth(curve, 1, 9)
    assert (found.label, found.value, found.unit) == ("evict: 9 leaves over 1", 2.5, "x")
    assert growth.growth(curve, 1, 16) == []


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.figure} {bound}")
def test_a_kept_figure_keeps_its_bound(bound: Bound) -> None:
    assert KEPT[bound.figure].keeps(bound)


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "ratio"),
    [("us", 2.0, 10.0, 5.0), ("GB/s", 10.0, 2.0, 5.0), ("B", 8.0, 4.0, 0.5), ("us", 0.0, 1.0, None)],
)
def test_a_ratio_above_one_means_that_ours_is_better(
    unit: str, ours: float, theirs: float, ratio: float | None
) -> None:
    assert Row("s", "match", unit, ours, {"peer": theirs}).ratio("peer") == ratio


def test_bounds_are_on_the_ratio_to_a_peer_or_on_our_own_figure() -> None:
    row = Row("W1", "match", "us", 2.0, {"quick": 4.0})
    bounds = [Bound("match", peer, at) for peer, at in (("quick", 2), ("quick", 2.1), (None, 2), (None, 1.9))]
    assert [row.keeps(bound) for bound in bounds] == [True, False, True, False]
    bounds += [Bound("match", "absent", 1), Bound("no such figure", None, 1)]
    missed, unknown = table.check([row], bounds)
    assert missed == ["match: 2x, >= 2.1x quick", "match: 2 us, <= 1.9"]
    assert unknown == ["match: >= 1x absent", "no such figure: <= 1"]


def test_a_row_has_our_figure_and_that_of_every_peer() -> None:
    figures = {
        "quick": [Figure("s", "match", 4.0, "us"), Figure("s", "other", 1.0, "us")],
        "ours": [Figure("s", "match", 2.0, "us"), Figure("s", "evict", 3.0, "us", 4, "leaves")],
        "slow": [Figure("s", "match", 20.0, "us")],
    }
    assert table.build(figures) == [
        Row("s", "match", "us", 2.0, {"quick": 4.0, "slow": 20.0}),
        Row("s", "evict, 4 leaves", "us", 3.0),
    ]


EVICTION = "evict one state among leaves: 1048576 leaves over 1024"
ROWS = [
    Row("W1", "W1 match", "us", 1.5, {"sglang-rust": 9.0, "sglang-old": 30.0}),
    Row("growth", "evict, 1024 leaves", "us", 1.0),
    Row("growth", EVICTION, "x", 9.0),
]


def test_the_table_shows_every_row_with_its_bound_and_what_is_missed() -> None:
    match = next(line for line in table.text(ROWS).splitlines() if line.startswith("| W1 match"))
    cells = [cell.strip() for cell in match.strip("|").split("|")]
    assert cells == ["W1 match", "us", "1.5", "9 (6x)", "30 (20x)", ">= 5x sglang-rust"]
    evict = next(line for line in table.text(ROWS).splitlines() if EVICTION in line)
    assert evict.endswith("<= 2.5 MISSED |")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0012, "1.2e-03"), (3.14159, "3.14"), (66123.4, "66,123"), (8.5e8, "850.0M")],
)
def test_numbers_have_three_digits_and_no_needless_exponent(value: float, text: str) -> None:
    assert table.number(value) == text


def test_the_page_gets_its_marked_tables_and_keeps_the_rest() -> None:
    before = (
        "top\n<!-- figures: growth -->\nold\n<!-- end of figures -->\n"
        "<!-- figures: setting -->\nkept\n<!-- end of figures -->\n"
    )
    contents = {"growth": table.sections(table.bounded(ROWS, "growth"))["growth"]}
    after = table.refresh(before, contents)
    assert after.startswith("top\n<!-- figures: growth -->\n| name ")
    assert "old" not in after
    assert "kept" in after
    assert EVICTION in after
    assert "evict, 1024 leaves" not in after  # has no bound
    assert table.refresh(after, contents) == after
    with pytest.raises(ValueError, match="no place for W9"):
        table.refresh(before, {"W9": ""})


def test_the_page_shows_the_kept_figures() -> None:
    shown = table.sections(table.bounded(list(KEPT.values()), "growth"))
    assert shown.keys() == table.TITLES.keys()
    text = table.PAGE.read_text()
    assert table.refresh(text, shown) == text
    assert table.refresh(text, {"setting": "", "profile": ""}) != text


def test_a_profile_is_read_from_perfs_report() -> None:
    text = (
        "# a comment\n    54.57%|_native.abi3.so|[.] core::walk|-|-\n\n     2.00%|libc.so.6|[.] memcmp|-|-\n"
    )
    samples = profile.parse(text)
    assert samples == [(54.57, "_native.abi3.so", "core::walk"), (2.0, "libc.so.6", "memcmp")]
    assert "| 55 | core::walk | _native.abi3.so |" in profile.table("W1", samples)


@pytest.mark.parametrize("scenario", profile.SCENARIOS)
def test_what_is_profiled_runs(
    scenario: Callable[[], profile.Round], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "DOCUMENTS", 8)
    monkeypatch.setattr(profile, "TURNS", 4)
    repeat = scenario()
    repeat()
    repeat()


@pytest.mark.parametrize("name", TINY)
def test_a_workload_runs_end_to_end_on_our_cache(tiny: None, name: str) -> None:
    figures = workers.task(name)(OURS)
    labels = {figure.label for figure in figures}
    assert {f"{name} {what}" for what in ("match", "insert", "lease + release", "start + finish")} <= labels
    assert all(figure.value >= 0 for figure in figures if "bytes" not in figure.name)
    assert all(figure.value > 0 for figure in figures if figure.unit == "tokens/s")


def test_the_churn_hits_evicts_and_fills_its_states(tiny: None) -> None:
    timed, cache = Clock(), Ours(TINY["W3"].size)
    TINY["W3"].run(cache, timed, lambda: None)
    assert "evict state" in timed
    assert cache.native.stats().hits > 0
    assert cache.evictable()[1] == TINY["W3"].size.states
    cache.native.check()


def test_a_cache_that_finds_something_else_is_not_measured(tiny: None) -> None:
    class Forgetful(Ours):
        def matched(self, match: object) -> int:
            return 0

    with pytest.raises(AssertionError, match="expected 20, found 0"):
        tree.measure("W1", Backend("ours", "0", Forgetful))


@pytest.mark.parametrize("name", ["leaves", "chain", "pinned", "fragments", "prompt"])
def test_a_curve_has_all_its_points(tiny: None, name: str) -> None:
    figures = workers.task(name)(OURS)
    points = {
        "leaves": {4, 8},
        "chain": {2, 4},
        "pinned": {0, 3},
        "fragments": {0, 9},
        "prompt": {16},
    }[name]
    assert {figure.at for figure in figures if figure.at is not None} == points


def test_a_curve_ends_where_its_time_is_spent(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXSTATE_BENCH_FULL", raising=False)
    monkeypatch.setattr(growth, "SECONDS", 1e-9)
    assert {figure.at for figure in growth.chain(OURS) if figure.at is not None} == {2}
    monkeypatch.setenv("RADIXSTATE_BENCH_FULL", "1")
    assert {figure.at for figure in growth.chain(OURS) if figure.at is not None} == {2, 4}


def test_a_chain_is_held_against_what_it_must_read(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "cache_miss_us", lambda: 0.5)
    figures = {figure.label: figure.value for figure in growth.chain(OURS)}
    spent, read = figures["match, chain of 16-token turns, 4 turns"], figures["match, 64 tokens in one node"]
    over = "match, chain of 16-token turns: 4 turns over reading the key once and a cache miss for each"
    assert figures[over] == pytest.approx(spent / (read + 4 * 0.5))


def test_an_eviction_is_held_against_its_cache_misses(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "cache_miss_us", lambda: 0.5)
    figures = {figure.label: figure.value for figure in growth.leaves(OURS)}
    for one in ("evict one state among leaves", "evict one page among leaves"):
        first, last = figures[f"{one}, 4 leaves"], figures[f"{one}, 8 leaves"]
        assert figures[f"{one}: 8 leaves over 4 and 4 cache misses"] == pytest.approx(last / (first + 2.0))


def test_a_cache_miss_is_what_a_large_walk_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {clock.NEAR_BYTES: 30.0, clock.FAR_BYTES: 230.0}
    monkeypatch.setattr(clock, "_step_ns", lambda size: steps[size])
    assert clock.cache_miss_us() == pytest.approx(0.2)


def test_requests_and_both_sides_of_the_boundary_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tree.admission(Backend("ours", "0", OurRequests), documents=4)
    assert [figure.name for figure in found] == ["admit a miss", "publish", "admit a hit", "end a hit"]
    monkeypatch.setattr(layers, "batch_ns", partial(clock.batch_ns, batch=3, batches=2))
    python = {figure.name for figure in layers.boundary(OURS)}
    bench = Path("rust/core/benches/calls.rs").read_text()
    assert all(f'"{name}"' in bench for name in python)


def test_the_front_is_measured_beside_the_native_layer() -> None:
    found = layers.front(OURS, documents=16)
    beside = {figure.name for figure in found if figure.of == "native"}
    assert beside == set(layers.FRONT)
    assert {figure.name for figure in found if not figure.of} == {
        *beside,
        "start_many of 16, each",
        "checkpoint_many of 16, each",
    }


def test_criterions_medians_are_read(tmp_path: Path) -> None:
    new = tmp_path / "usage" / "new"
    new.mkdir(parents=True)
    (new / "benchmark.json").write_text(json.dumps({"function_id": "usage"}))
    (new / "estimates.json").write_text(json.dumps({"median": {"point_estimate": 12.5}}))
    assert layers.read_criterion(tmp_path) == [Figure("boundary", "usage", 12.5, "ns", of="rust")]


def test_the_codec_is_measured_beside_memcpy_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(codec, "SECONDS", 0.0)
    shape = codec.Shape(layers=1, heads=1, d_v=8, d_k=8)
    found = codec.measure(OURS, threads=2, shape=shape)
    cases = {f"store {dtype}, N=1, threads=2" for dtype in ("bfloat16", "float16", "float32")}
    for owner in ("", "memcpy", "torch"):
        assert cases <= {figure.name for figure in found if figure.of == owner}
    over = next(figure for figure in found if figure.name.endswith("over writing the states alone"))
    assert over.value > 0
    assert over.unit == "x"
    assert shape.moved_bytes(torch.bfloat16, torch.bfloat16, 2) == 2 * 8 * (8 * 3 + 2)


def test_the_reuse_experiment_becomes_rows_at_equal_bytes() -> None:
    def probe(cache: str, k: int, reused: float) -> ReuseRow:
        return ReuseRow(cache, 4, 100, k, "random", reused, 10.0, 20.0, 5.0)

    probes = [
        probe(cache, k, reused)
        for k in (4, 6, 8)
        for cache, reused in (("bf16", 0.5), ("int8-bytes-of-bf16", 0.9))
    ]
    knees = [Knee("bf16", 4, 4, 4), Knee("int8-bytes-of-bf16", 7, 6, 8)]
    found = {(it.name, it.of): it.value for it in reuse.figures(probes, knees, slots=4)}
    assert found["reuse, 6 prefixes, random order, bytes of bf16", ""] == 0.9
    assert found["reuse, 6 prefixes, random order, bytes of bf16", "bf16"] == 0.5
    assert found["knee, random order, bytes of bf16", ""] == 8


def test_a_peer_is_there_when_its_variable_is_set(tmp_path: Path) -> None:
    found, missing = workers.available({"SGLANG_NEW": str(tmp_path), "PEER_PYTHON": "python-of-peers"})
    assert [process.name for process in found] == ["ours", "sglang-python", "sglang-rust"]
    assert [process.python for process in found] == [sys.executable, *["python-of-peers"] * 2]
    assert found[2].environment == {"SGLANG_NEW": str(tmp_path)}
    assert missing == ["sglang-old: SGLANG_OLD is not set", "tokenspeed: TOKENSPEED is not set"]
    assert found[0].does("boundary")
    assert not found[1].does("boundary")
    with pytest.raises(SystemExit, match="SGLANG_OLD is no folder: /nowhere"):
        workers.available({"SGLANG_OLD": "/nowhere"})


def test_backends_take_turns_and_a_process_may_measure_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def start(process: Process, task: str) -> dict[str, object]:
        started.append((process.name, task))
        own = Figure("s", task, float(len(started)), "us")
        beside = Figure("s", task, 9.0, "us", of="memcpy")
        return {"version": "1", "figures": [asdict(own), asdict(beside)]}

    monkeypatch.setattr(Process, "start", start)
    results = Results()
    peers = [Process("ours", "p"), Process("sglang-rust", "p"), Process("tokenspeed", "p")]
    results.run(peers, ["W1", "W2"], 2)
    assert started == [("ours", "W1"), ("sglang-rust", "W1"), ("ours", "W2"), ("sglang-rust", "W2")] * 2
    found = results.medians()
    assert {it.label: it.value for it in found["ours"]} == {"W1": 3.0, "W2": 5.0}
    assert {it.value for it in found["memcpy"]} == {9.0}
    assert results.versions == {"ours": "1", "sglang-rust": "1"}


def test_a_peer_that_fails_is_noted_and_a_failure_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: Process, task: str) -> dict[str, object]:
        raise subprocess.CalledProcessError(1, task)

    monkeypatch.setattr(Process, "start", start)
    results = Results()
    results.run([Process("sglang-rust", "p")], ["W1"], 1)
    assert results.failures == ["sglang-rust: W1 failed"]
    assert not results.runs
    with pytest.raises(subprocess.CalledProcessError):
        results.run([Process("ours", "p")], ["W1"], 1)


def test_a_worker_answers_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["worker", "ours", "fragments"])
    monkeypatch.setattr(growth, "DIVERGING", 3)
    monkeypatch.setattr(workers.logging, "disable", lambda level: None)
    workers.main()
    answer = json.loads(capsys.readouterr().out)
    assert [Figure(**it).at for it in answer["figures"]] == [0, 3, None]


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    figures = {
        "ours": [Figure("growth", "evict", 1.0, "us", at, "leaves") for at in (1, 2)],
        "sglang-rust": [Figure("growth", "evict", 9.0, "us", 1, "leaves")],
    }
    names = {path.name for path in plots.write(tmp_path, figures, ROWS)}
    assert names == {"growth.png", "trees.png"}  # no codec was compared with
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_json_has_the_setting_and_all_rows(tmp_path: Path) -> None:
    table.write(tmp_path / "bench.json", ROWS, {"missing": ["a peer"]})
    assert json.loads((tmp_path / "bench.json").read_text())["missing"] == ["a peer"]
    assert table.read(tmp_path / "bench.json") == ROWS


def test_a_kept_run_refreshes_the_results_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = table.PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    table.PAGE.write_text(text)
    results = Results(versions={"ours": "9.9"}, failures=["sglang-old: W1 failed"])
    results.take(
        "ours", [Figure("W1", "W1 match", 1.25, "us"), Figure("growth", "evict", 1.0, "us", 4, "leaves")]
    )
    results.take("sglang-rust", [Figure("W1", "W1 match", 10.0, "us")])
    monkeypatch.setattr(__main__, "measure", lambda *arguments: results)
    monkeypatch.setattr(workers, "available", lambda: ([], ["tokenspeed: TOKENSPEED is not set"]))
    monkeypatch.setattr(plots, "write", lambda *arguments: [])  # slow, and tested above
    monkeypatch.setattr(sys, "argv", ["speed", "--keep"])
    assert __main__.main() == 0
    kept = {path.name for path in (tmp_path / "benchmarks" / "results").iterdir()}
    assert kept == {"bench.json"}
    assert re.search(
        r"W1 match +\| us +\| +1.25 \| +10 \(8x\) \| >= 5x sglang-rust \|", table.PAGE.read_text()
    )
    assert "ours 9.9" in table.PAGE.read_text()
    shown = capsys.readouterr().out
    assert "Not there: tokenspeed: TOKENSPEED is not set; sglang-old: W1 failed." in shown
    assert "0 of 1 bounds missed; 76 without a figure" in shown


def test_a_run_that_misses_a_bound_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results()
    results.take("ours", [Figure("growth", EVICTION, 9.0, "x")])
    monkeypatch.setattr(__main__, "measure", lambda *arguments: results)
    monkeypatch.setattr(plots, "write", lambda *arguments: [])
    monkeypatch.setattr(sys, "argv", ["speed", "--out", str(tmp_path)])
    assert __main__.main() == 1
    assert f"MISSED {EVICTION}: 9 x, <= 2.5" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], ["--keep", "trees"]])
def test_unknown_sections_and_half_runs_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.parse(arguments)


def test_tokens_are_seeded_and_in_range() -> None:
    import numpy as np

    one, two = (workloads.tokens(np.random.default_rng(5), 50) for _ in range(2))
    assert one == two
    assert isinstance(one, array)
    assert 0 <= min(one) <= max(one) < workloads.VOCABULARY
