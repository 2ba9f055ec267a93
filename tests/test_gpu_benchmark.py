"""The benchmark of the kernels, as far as it can be run without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CpuDevice
from radixstate import ConvSpec, StateSpec, cuda

from benchmarks import gpu
from benchmarks.gpu import DIRECTIONS, MAIN, SETUPS, Row, Setup

GOOD = Row(
    setup=MAIN,
    direction="store",
    pairs=16,
    milliseconds=1.0,
    gb_per_s=1000.0,
    copy_fraction=0.95,
    same_size_fraction=0.95,
    torch_ratio=12.0,
)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"copy_fraction": 0.89}, ["0.89 of a long copy, wanted 0.9"]),
        ({"pairs": 4, "copy_fraction": 0.5}, []),
        ({"pairs": 4, "same_size_fraction": 0.89}, ["0.89 of a copy of the same size, wanted 0.9"]),
        ({"pairs": 1, "copy_fraction": 0.1, "same_size_fraction": 0.1, "torch_ratio": 1.0}, []),
        ({"torch_ratio": 9.0}, ["9.0 times as fast as torch, wanted 10.0"]),
        ({"torch_ratio": 9.0, "direction": "load"}, []),
        ({"torch_ratio": 1.0, "setup": Setup(format="native")}, []),
        ({"torch_ratio": 1.0, "setup": Setup(dtype="float32")}, []),
        ({"torch_ratio": None}, []),
    ],
)
def test_a_row_names_the_goals_that_it_misses(changed: dict[str, Any], missed: list[str]) -> None:
    assert replace(GOOD, **changed).missed() == missed


def ended(monkeypatch: pytest.MonkeyPatch, out: Path, *rows: Row, tests: int = 0) -> int:
    """Exit code of the benchmark, had it measured these."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out)])
    monkeypatch.setattr(gpu, "run_tests", lambda: tests)
    measured = [asdict(row) | {"missed": row.missed()} for row in rows]
    monkeypatch.setattr(gpu, "benchmark", lambda: {"rows": measured})
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return int(end.value.code or 0)


def test_a_missed_goal_or_a_failed_test_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "missing", lambda: None)
    assert ended(monkeypatch, out, GOOD, GOOD) == 0
    assert ended(monkeypatch, out, GOOD, replace(GOOD, copy_fraction=0.5)) == 1
    assert json.loads(out.read_text())["rows"][1]["missed"] == ["0.50 of a long copy, wanted 0.9"]
    assert ended(monkeypatch, out, GOOD, tests=2) == 2


def test_a_machine_without_a_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "missing", lambda: "no GPU")
    assert ended(monkeypatch, tmp_path / "gpu.json", replace(GOOD, copy_fraction=0.5)) == 0
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"missing": "no GPU"}


def test_every_kind_of_pool_is_measured() -> None:
    assert {"native", "int8"} == {setup.format for setup in SETUPS}
    assert {"k_last", "v_last"} == {setup.layout for setup in SETUPS}
    assert {True, False} == {setup.by_layer for setup in SETUPS}
    assert len({str(setup) for setup in SETUPS}) == len(SETUPS)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_torchs_operations_move_the_states_that_the_kernels_move(setup: Setup) -> None:
    conv = (ConvSpec((4,), "bfloat16"),)
    spec = StateSpec(layers=2, heads=2, d_k=8, d_v=16, dtype=setup.dtype, layout=setup.layout, conv=conv)
    torch.manual_seed(0)
    active, kept = setup.pools(spec, 3, "cpu")
    torch.manual_seed(0)
    same_active, same_kept = replace(setup, by_layer=False).pools(spec, 3, "cpu")
    assert (active.rows["state"].whole is None) == setup.by_layer
    codec = cuda.describe(active, kept, CpuDevice())
    codec.store([(1, 1), (2, 2)])
    DIRECTIONS["store"](same_active, same_kept, torch.tensor([1, 2]))
    codec.load([(1, 3)])
    DIRECTIONS["load"](same_active, same_kept, torch.tensor([1, 2]))
    for layer in range(spec.layers):
        mine, theirs = (pool.rows["state"].layers[layer] for pool in (active, same_active))
        assert mine[3].any()
        assert torch.equal(mine[3], theirs[1])
        stored = (pool.rows["state"].layers[layer][1:3] for pool in (kept, same_kept))
        assert torch.equal(*stored)
