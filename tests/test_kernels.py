"""The CUDA kernels, run on a CPU, against the CPU codec bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import CpuDevice, LaunchError, Mutation, Order
from kernel_cases import (
    Case,
    Pools,
    cpu_codec,
    cuda_codec,
    out_of_range_problems,
    reference_problems,
    round_trip,
    scale_problems,
    tie_problems,
)
from radixstate.cuda import specialise
from radixstate.cuda.specialise import Heads, Windows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = (BF16, FP16, FP32)
LAYOUTS = ("k_last", "v_last")

MAIN = [
    Case(dtype=dtype, layout=layout, d_k=d, d_v=d, layers=1, slots=2, conv=((8, 8),), values="finite", seed=d)
    for dtype in TYPES
    for layout in LAYOUTS
    for d in (64, 128, 256)
]
ODD = [
    Case(dtype=TYPES[i % 3], layout=layout, d_k=d_k, d_v=d_v, seed=i)
    for i, (d_k, d_v) in enumerate(
        [(1, 1), (3, 5), (63, 63), (100, 36), (36, 100), (7, 300), (300, 7), (257, 2), (1, 130), (24, 1)]
    )
    for layout in LAYOUTS
]
ALIGNMENT = [
    Case(dtype=dtype, layout=layout, d_k=64, d_v=64, gap=gap, offset=offset, conv=((gap + 3, 5),), seed=gap)
    for dtype, layout, gap, offset in [
        (BF16, "k_last", 8, 0),
        (BF16, "k_last", 4, 4),
        (BF16, "v_last", 2, 0),
        (FP16, "k_last", 2, 6),
        (FP16, "v_last", 1, 0),
        (BF16, "v_last", 0, 1),
        (FP32, "k_last", 2, 0),
        (FP32, "v_last", 1, 3),
    ]
]
LONG = [
    Case(dtype=BF16, d_k=24, d_v=2100, heads=1, layers=1),
    Case(dtype=FP32, d_k=20, d_v=1100, heads=1, layers=1, gap=4),
    Case(dtype=FP16, d_k=3, d_v=2500, heads=1, layers=1),
    Case(dtype=BF16, layout="v_last", d_k=5, d_v=2304, heads=1, layers=1),
    Case(dtype=FP32, layout="v_last", d_k=3, d_v=1100, heads=1, layers=1),
    Case(dtype=FP16, layout="v_last", d_k=9, d_v=301, heads=1, layers=1),
]
POOLS = [
    Case(d_k=32, d_v=32, tables=True, layers=5, heads=3, conv=((24, 3), (96,))),
    Case(d_k=32, d_v=32, slots=64, layers=1, heads=1, conv=((8,),)),
    Case(d_k=32, d_v=32, slots=70, pairs=tuple((70 - i, 3 * i + 1) for i in range(23))),
    Case(d_k=32, d_v=32, pairs=((2, 2),), conv=((8192, 3), (5, 1, 7)), layers=1),
    Case(d_k=32, d_v=32, pairs=()),
    Case(d_k=32, d_v=32, dtype=FP32, layout="v_last", tables=True, gap=3, offset=1, conv=((4, 4),)),
    Case(d_k=32, d_v=32, values="any", slots=12),
    Case(d_k=32, d_v=32, dtype=FP32, values="any", slots=12, layout="v_last"),
    Case(d_k=32, d_v=32, dtype=FP16, values="any", slots=12),
]
PLAIN = [
    Case(
        dtype=dtype, format=format, d_k=d_k, d_v=d_v, gap=gap, offset=gap // 2, values=values, conv=((6, 4),)
    )
    for format, dtype, d_k, d_v, gap, values in [
        ("native", BF16, 128, 128, 0, "any"),
        ("native", FP16, 63, 5, 0, "edges"),
        ("native", FP32, 100, 36, 2, "any"),
        ("bf16", BF16, 64, 64, 4, "any"),
        ("bf16", FP16, 128, 128, 0, "any"),
        ("bf16", FP16, 33, 7, 1, "edges"),
        ("bf16", FP32, 128, 128, 0, "any"),
        ("bf16", FP32, 10, 3, 6, "finite"),
    ]
]
FLAT = [  # windows in the place of a state: one head of one row
    Case(dtype=dtype, format="native", layout="v_last", d_k=1, d_v=d_v, heads=1, gap=gap, tables=gap > 0)
    for dtype, d_v, gap in [(BF16, 2048 * 3, 0), (FP32, 64 * 4, 4), (FP16, 5 * 3, 1)]
]
WINDOWS = [
    Case(
        dtype=dtype,
        format=format,
        d_k=8,
        d_v=8,
        slots=40,
        conv=conv,
        conv_types=types,
        conv_values="any",
        values="usual",
    )
    for dtype, format, conv, types in [
        (BF16, "int8", ((6, 4),), (BF16,)),
        (BF16, "native", ((24,), (4,)), (FP32, FP16)),
        (FP32, "bf16", ((5,), (4, 3), (7,)), (FP16, FP32, BF16)),  # vectors shorter than an element
    ]
]
CASES = [*MAIN, *ODD, *ALIGNMENT, *LONG, *POOLS, *PLAIN, *FLAT, *WINDOWS]

SANITIZED = [
    ALIGNMENT[1],
    ALIGNMENT[6],
    LONG[0],
    LONG[4],
    ODD[4],
    ODD[7],
    POOLS[0],
    POOLS[5],
    PLAIN[2],
    PLAIN[5],
]


def on_cpu(case: Case, **device: object) -> list[str]:
    """Where the kernels and the CPU codec differ."""
    machine = CpuDevice(**device)
    mine = round_trip(case, cuda_codec(machine))
    return mine.differences(round_trip(case, cpu_codec))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_equal_the_cpu_codec(case: Case) -> None:
    order = Order(CASES.index(case) % len(Order))
    assert on_cpu(case, order=order) == []


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("case", [MAIN[1], MAIN[10], LONG[0], LONG[3]], ids=str)
def test_the_result_does_not_depend_on_the_order_of_threads(case: Case, order: Order) -> None:
    assert on_cpu(replace(case, values="edges"), order=order) == []


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_largest_value_of_a_channel_gets_the_right_scale(dtype: torch.dtype) -> None:
    assert scale_problems(CpuDevice(), dtype) == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_quotients_next_to_a_tie_are_rounded_as_by_true_division(dtype: torch.dtype, seed: int) -> None:
    assert tie_problems(CpuDevice(), dtype, seed) == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_equal_the_torch_reference(dtype: torch.dtype, layout: str) -> None:
    assert reference_problems(CpuDevice(), dtype, layout) == []


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_state_is_finite_only_if_its_windows_are(case: Case) -> None:
    finite = round_trip(case, cuda_codec(CpuDevice())).finite
    pools = Pools(case, "cpu")
    rows = [layer for window, _, _ in pools.windows for layer in window.rows.layers]
    wanted = [all(bool(layer[slot].isfinite().all()) for layer in rows) for slot, _ in case.store_pairs]
    assert finite == wanted
    assert {*finite} == {True, False}


def test_a_slot_out_of_range_moves_nothing_and_says_so() -> None:
    machine = CpuDevice()
    assert out_of_range_problems(machine) == []


def test_a_vector_wider_than_the_alignment_is_reported() -> None:
    case = Case(d_k=16, d_v=16, offset=1)
    pools, machine = Pools(case, "cpu"), CpuDevice()
    codec = cuda_codec(machine)(pools, pools.active, [])
    heads = Heads(dtype="bfloat16", kept="int8", matrix=(16, 16), k_last=True, vector=8, windows=Windows())
    codec._program = specialise.int8(heads)
    with pytest.raises(LaunchError, match="misaligned"):
        codec.store([(1, 1)]).wait()


def test_no_case_touches_memory_that_is_not_its_own() -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, in a process that starts with them."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{len(SANITIZED)} cases, and an overrun was found"


def run_sanitized() -> None:
    """The body of that process."""
    for case in SANITIZED:
        if found := on_cpu(case, sanitize=True):
            sys.exit(f"{case}: {found}")
    child = os.fork()
    if child == 0:
        overrun = Mutation("int8.cu", "Channels::row(at, sweep, i) < ROWS && ", "")
        on_cpu(Case(d_k=24, d_v=37, heads=1, layers=1, slots=1, dtype=FP32), sanitize=True, mutation=overrun)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 77:
        sys.exit("an overrun was not found")
    print(f"{len(SANITIZED)} cases, and an overrun was found")


if __name__ == "__main__":
    run_sanitized()
