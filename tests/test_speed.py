"""The speed benchmark's own logic: its clock, its rows, its page, and every workload in miniature."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.reuse import Knee
from benchmarks.reuse import Row as ReuseRow
from benchmarks.speed import (
    __main__,
    admission,
    backends,
    boundary,
    clock,
    codec,
    front,
    growth,
    page,
    plots,
    profile,
    report,
    reuse,
    rows,
    run,
    rust,
    tree,
    worker,
    workloads,
)
from benchmarks.speed.backends import Backend, Process
from benchmarks.speed.clock import Clock
from benchmarks.speed.figures import Figure, medians
from benchmarks.speed.ours import OurRequests, Ours
from benchmarks.speed.rows import Row
from benchmarks.speed.targets import TARGETS, Target
from benchmarks.speed.workloads import Workload

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


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "ratio"),
    [("us", 2.0, 10.0, 5.0), ("GB/s", 10.0, 2.0, 5.0), ("B", 8.0, 4.0, 0.5), ("us", 0.0, 1.0, None)],
)
def test_a_ratio_above_one_means_that_ours_is_better(
    unit: str, ours: float, theirs: float, ratio: float | None
) -> None:
    assert rows.ratio(ours, theirs, unit) == ratio


def test_a_target_is_met_missed_or_without_its_peer() -> None:
    faster, flat = Target(5, "peer"), Target(2)
    assert [faster.met(1.0, 5.0), faster.met(1.0, 4.9), faster.met(1.0, None)] == [True, False, None]
    assert [flat.met(2.0, None), flat.met(2.1, None)] == [True, False]


def test_rows_stand_beside_every_peer_and_no_target_is_left_out() -> None:
    ours = [Figure("s", "match", 2.0, "us"), Figure("s", "flat", 3.0, "x"), Figure("s", "plain", 1.0, "us")]
    peers = {
        "quick": [Figure("s", "match", 4.0, "us"), Figure("s", "other", 1.0, "us")],
        "slow": [Figure("s", "match", 20.0, "us")],
    }
    targets = {"match": (Target(5, "quick"), Target(9, "absent")), "flat": (Target(2),)}
    found = [(row.name, row.peer, row.ratio, row.target, row.met) for row in rows.build(ours, peers, targets)]
    assert found == [
        ("match", None, None, ">= 9x absent", None),
        ("match", "quick", 2.0, ">= 5x quick", False),
        ("match", "slow", 10.0, None, None),
        ("flat", None, None, "<= 2", False),
        ("plain", None, None, None, None),
    ]


def test_every_target_is_about_a_figure_that_is_measured(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    growing = [*growth.LEAVES, *growth.TURNS, growth.DIVERGING]
    names = {
        *(f"{name} {what}" for name in TINY for what in [*tree.SINGLE, "whole workload"]),
        *(f"{name} bytes per cached token" for name in TINY),
        *(
            f"{one} among leaves, {n} leaves"
            for one in ("evict one state", "evict one page")
            for n in growing
        ),
        *(
            f"{one} among leaves: {growth.LEAVES[-1]} leaves over {growth.LEAVES[0]}{misses}"
            for one in ("evict one state", "evict one page")
            for misses in ("", " and 4 cache misses")
        ),
        f"match, chain of 16-token turns, {growth.TURNS[-1]} turns",
        f"match, chain of 16-token turns: {growth.TURNS[-1]} turns over reading the key once and a cache miss for each",
        f"match a key of 1000 tokens: after {growth.DIVERGING} diverging lookups over before",
        *(
            f"{direction} {str(dtype).removeprefix('torch.')}, N={n}, threads={threads}"
            for direction in ("store", "load")
            for dtype in codec.DTYPES
            for n in codec.STATES
            for threads in (1, 2)
        ),
        *(
            f"load float32, N={n}, threads={threads}: over writing the states alone"
            for n in codec.STATES
            for threads in (1, 2)
        ),
    }
    assert set(TARGETS) <= names


@pytest.mark.parametrize(
    ("latency", "shown", "verdict"), [(1.0, "flat and misses", "limit"), (2.0, None, "MISSED")]
)
def test_a_missed_target_is_excused_by_a_limit_that_is_reached(
    latency: float, shown: str | None, verdict: str
) -> None:
    ours = [Figure("growth", "flat", 3.0, "x"), Figure("growth", "flat and misses", latency, "x")]
    targets = {"flat": (Target(2, limit="flat and misses"),), "flat and misses": (Target(1.25),)}
    flat, _ = found = rows.build(ours, {}, targets)
    assert (flat.met, flat.limit) == (False, shown)
    assert f"{verdict}: flat: 3 x, target <= 2" in report.summary(found)
    assert report.table(found).splitlines()[2].endswith(verdict)


def test_a_met_target_needs_no_limit() -> None:
    ours = [Figure("growth", "flat", 1.0, "x"), Figure("growth", "flat and misses", 1.0, "x")]
    targets = {"flat": (Target(2, limit="flat and misses"),), "flat and misses": (Target(1.25),)}
    assert [(row.met, row.limit) for row in rows.build(ours, {}, targets)] == [(True, None)] * 2


def test_every_limit_is_a_row_with_a_target_of_its_own() -> None:
    limits = {target.limit for several in TARGETS.values() for target in several if target.limit}
    assert limits <= set(TARGETS)
    assert all(target.peer is None for limit in limits for target in TARGETS[limit])


ROWS = [
    Row("W1", "W1 match", 1.5, "us", "sglang-rust", 9.0, 6.0, ">= 5x sglang-rust", True),
    Row("W1", "W1 match", 1.5, "us", "sglang-old", 30.0, 20.0),
    Row("growth", "evict, 1024 leaves", 1.0, "us"),
    Row("growth", "evict: 1048576 leaves over 1024", 2.5, "x", target="<= 2", met=False),
    Row("codec", "store", 20.0, "GB/s", target=">= 0.8x memcpy", met=None),
]


def test_the_table_shows_every_row_and_what_was_missed() -> None:
    text = report.table(ROWS)
    match = next(line for line in text.splitlines() if line.startswith("W1 match"))
    assert "9 (6x)" in match
    assert "30 (20x)" in match
    assert match.endswith("met")
    assert "MISSED" in text
    assert "no peer" in text
    summary = report.summary(ROWS)
    assert summary.startswith("1 of 3 targets met, 0 more at a limit")
    assert "MISSED: evict: 1048576 leaves over 1024: 2.5 x, target <= 2" in summary
    assert "1 not judged" in summary


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0012, "1.2e-03"), (3.14159, "3.14"), (66123.4, "66,123"), (8.5e8, "850.0M")],
)
def test_numbers_have_three_digits_and_no_needless_exponent(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_page_gets_its_marked_tables_and_keeps_the_rest() -> None:
    before = (
        "top\n<!-- figures: growth -->\nold\n<!-- end of figures -->\n"
        "<!-- figures: setting -->\nkept\n<!-- end of figures -->\n"
    )
    contents = {"growth": page.tables(ROWS)["growth"]}
    after = page.refresh(before, contents)
    assert after.startswith("top\n<!-- figures: growth -->\n| name | unit | ours |")
    assert "old" not in after
    assert "kept" in after
    assert "evict: 1048576" in after
    assert "evict, 1024 leaves" not in after  # has no target
    assert page.refresh(after, contents) == after
    with pytest.raises(ValueError, match="no marker for W9"):
        page.refresh(before, {"W9": ""})


def test_the_page_of_the_documentation_has_a_place_for_everything() -> None:
    places = {match[2] for match in page.MARKED.finditer(page.PAGE.read_text())}
    assert places == {*report.TITLES, "setting", "profile"}


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
    figures = worker.task(name)(OURS)
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


@pytest.mark.parametrize("name", backends.GROWTH)
def test_a_curve_has_all_its_points(tiny: None, name: str) -> None:
    figures = worker.task(name)(OURS)
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
    found = admission.measure(Backend("ours", "0", OurRequests), documents=4)
    assert [figure.name for figure in found] == ["admit a miss", "publish", "admit a hit", "end a hit"]
    monkeypatch.setattr(boundary, "batch_ns", partial(clock.batch_ns, batch=3, batches=2))
    python = {figure.name for figure in boundary.measure(OURS)}
    bench = Path("rust/core/benches/calls.rs").read_text()
    assert all(f'"{name}"' in bench for name in python)


def test_the_front_is_measured_beside_the_native_layer() -> None:
    found = front.measure(OURS, documents=16)
    assert {figure.name for figure in found if figure.of == "native"} == {
        "lookup",
        "start",
        "checkpoint",
        "finish",
    }


def test_criterions_medians_are_read(tmp_path: Path) -> None:
    new = tmp_path / "usage" / "new"
    new.mkdir(parents=True)
    (new / "benchmark.json").write_text(json.dumps({"function_id": "usage"}))
    (new / "estimates.json").write_text(json.dumps({"median": {"point_estimate": 12.5}}))
    assert rust.read(tmp_path) == [Figure("boundary", "usage", 12.5, "ns", of="rust")]


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
    found, missing = backends.available({"SGLANG_NEW": str(tmp_path), "PEER_PYTHON": "python-of-peers"})
    assert [process.name for process in found] == ["ours", "sglang-python", "sglang-rust"]
    assert [process.python for process in found] == [sys.executable, *["python-of-peers"] * 2]
    assert found[2].environment == {"SGLANG_NEW": str(tmp_path)}
    assert missing == ["sglang-old: SGLANG_OLD is not set", "tokenspeed: TOKENSPEED is not set"]
    assert found[0].does("boundary")
    assert not found[1].does("boundary")
    with pytest.raises(SystemExit, match="SGLANG_OLD is no folder: /nowhere"):
        backends.available({"SGLANG_OLD": "/nowhere"})


def test_backends_take_turns_and_a_process_may_measure_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def start(process: Process, task: str) -> dict[str, object]:
        started.append((process.name, task))
        own = Figure("s", task, float(len(started)), "us")
        beside = Figure("s", task, 9.0, "us", of="memcpy")
        return {"version": "1", "figures": [own.as_dict(), beside.as_dict()]}

    monkeypatch.setattr(run, "start", start)
    results = run.Results()
    peers = [Process("ours", "p"), Process("sglang-rust", "p"), Process("tokenspeed", "p")]
    run.run(results, peers, ["W1", "W2"], 2, lambda line: None)
    assert started == [("ours", "W1"), ("sglang-rust", "W1"), ("ours", "W2"), ("sglang-rust", "W2")] * 2
    assert {it.label: it.value for it in results.medians("ours")} == {"W1": 3.0, "W2": 5.0}
    assert {it.value for it in results.medians("memcpy")} == {9.0}
    assert results.versions == {"ours": "1", "sglang-rust": "1"}


def test_a_peer_that_fails_is_noted_and_a_failure_of_ours_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: Process, task: str) -> dict[str, object]:
        raise subprocess.CalledProcessError(1, task)

    monkeypatch.setattr(run, "start", start)
    results = run.Results()
    run.run(results, [Process("sglang-rust", "p")], ["W1"], 1, lambda line: None)
    assert results.failures == ["sglang-rust: W1 failed"]
    assert not results.runs
    with pytest.raises(subprocess.CalledProcessError):
        run.run(results, [Process("ours", "p")], ["W1"], 1, lambda line: None)


def test_a_worker_answers_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["worker", "ours", "fragments"])
    monkeypatch.setattr(growth, "DIVERGING", 3)
    monkeypatch.setattr(worker.logging, "disable", lambda level: None)
    worker.main()
    answer = json.loads(capsys.readouterr().out)
    assert [Figure.from_dict(it).at for it in answer["figures"]] == [0, 3, None]


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    figures = {
        "ours": [Figure("growth", "evict", 1.0, "us", at, "leaves") for at in (1, 2)],
        "sglang-rust": [Figure("growth", "evict", 9.0, "us", 1, "leaves")],
    }
    names = {path.name for path in plots.write(tmp_path, figures, ROWS)}
    assert names == {"growth.png", "trees.png"}  # no codec was compared with
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_json_has_the_setting_and_all_fields(tmp_path: Path) -> None:
    report.write(tmp_path / "new" / "bench.json", ROWS, {"missing": ["a peer"]})
    content = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert content["missing"] == ["a peer"]
    assert [Row(**row) for row in content["rows"]] == ROWS


def test_a_kept_run_refreshes_the_results_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    page.PAGE.write_text(text)
    results = run.Results(versions={"ours": "9.9"}, failures=["sglang-old: W1 failed"])
    results.take(
        "ours", [Figure("W1", "W1 match", 1.25, "us"), Figure("growth", "evict", 1.0, "us", 4, "leaves")]
    )
    results.take("sglang-rust", [Figure("W1", "W1 match", 10.0, "us")])
    monkeypatch.setattr(__main__, "measure", lambda *arguments: results)
    monkeypatch.setattr(backends, "available", lambda: ([], ["tokenspeed: TOKENSPEED is not set"]))
    monkeypatch.setattr(plots, "write", lambda *arguments: [])  # slow, and tested above
    monkeypatch.setattr(sys, "argv", ["speed", "--keep"])
    __main__.main()
    kept = {path.name for path in (tmp_path / "benchmarks" / "results").iterdir()}
    assert kept == {"bench.json", "bench.txt"}
    assert "| W1 match | us | 1.25 | 10 (8x) | >= 5x sglang-rust | met |" in page.PAGE.read_text()
    assert "ours 9.9" in page.PAGE.read_text()
    shown = capsys.readouterr().out
    assert "no tokenspeed: TOKENSPEED is not set" in shown
    assert "no sglang-old: W1 failed" in shown


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
