"""Bugs seeded into the kernels, each of which a comparison with the CPU codec must catch.

A bug may break the process it runs in, so each has one of its own: this file is also a program.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import CpuDevice, LaunchError, Mutation, Order
from kernel_cases import Case, cpu_codec, cuda_codec, out_of_range_problems, round_trip
from test_kernels import WINDOWS

ESCAPED, CAUGHT = 0, 3

SYNC = "    __syncthreads();\n"
STORED = f"    partials.put(at, largest);\n{SYNC}"
SCALED = "const bool clamp = __syncthreads_or(found.exceeding);"
FETCHED = f"arguments.scale.at(work.layer, work.source, head));\n{SYNC}"
SUM = "add(quotient, 12582912.0f)"
QUOTIENT = "multiply_add(multiply_add(estimate, by.minus_scale, x), by.reciprocal, estimate)"
MAGNITUDES = "word & (E::BYTES == 4 ? 0x7fffffff : 0x7fff7fff)"
TO_BF16 = "return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;"
MOVED = "const Vector<To, VECTOR> moved"
CLAMPED = "min(max(code, ZERO - 127), ZERO + 127)"
SMALLEST = "max(__float_as_uint(amax), SMALLEST_AMAX)"
SWEPT = "(sweep * HELD + i)"
TARGET = "pairs[arguments.pair_count + work.pair]"
SOME_SYNC = "    if (threadIdx.x < 9) __syncthreads();\n"

MUTANTS = {
    "no barrier before the reduction": ("int8.cu", STORED, STORED.replace(SYNC, "")),
    "no barrier after the scales": ("int8.cu", SCALED, "const bool clamp = found.exceeding;"),
    "no barrier before the scales are used": ("int8.cu", FETCHED, FETCHED.replace(SYNC, "")),
    "a barrier that some threads miss": ("int8.cu", STORED, STORED.replace(SYNC, SOME_SYNC)),
    "rows beyond the end": ("int8.cu", "Channels::row(at, sweep, i) < ROWS && ", ""),
    "columns beyond the end": ("int8.cu", " && Channels::column(at, sweep) < COLUMNS", ""),
    "threads beyond the chunk": ("int8.cu", "at.down < DOWN && Channels::row", "Channels::row"),
    "one contributor too few": ("int8.cu", "i < Channels::CONTRIBUTORS", "i < Channels::CONTRIBUTORS - 1"),
    "a contribution is read twice": ("int8.cu", "turned : turned - ACROSS", "turned : 0"),
    "the runs of a thread share a place": ("int8.cu", "channel % VECTOR / RUN * APART", "0 * APART"),
    "contiguous rows": ("int8.cu", "row_stride(pool.row_stride)", "row_stride(COLUMNS / VECTOR * BYTES)"),
    "a second sweep reads the first": ("int8.cu", SWEPT, SWEPT.replace("sweep", "0")),
    "codes of a bad channel stay": ("int8.cu", " & finite;", ";"),
    "bad channels are not reported": ("int8.cu", "found.finite &= by.is_finite();", ""),
    "the head is forgotten": ("transfer.cuh", " + head * head_stride", ""),
    "the layer is forgotten": ("transfer.cuh", " : base + layer * layer_stride", " : base"),
    "the table is not indexed": ("transfer.cuh", "table[layer]", "table[0]"),
    "a slot is copied onto itself": ("transfer.cuh", TARGET, "pairs[work.pair]"),
    "the padding sink is read": ("transfer.cuh", "work.source - 1 < arguments.source_slots - 1", "true"),
    "the padding sink is written": ("transfer.cuh", "work.target - 1 < arguments.target_slots - 1", "true"),
    "the padding sink is not reported": ("transfer.cuh", "work.unit == 0 && threadIdx.x == 0", "false"),
    "the wrong status word": ("transfer.cuh", "pairs + 2 * pair_count + pair", "pairs + 2 * pair_count"),
    "a window's tail is cut": ("transfer.cuh", ">= window.vectors) continue;", ">= 2) continue;"),
    "half of a window's word is asked": ("transfer.cuh", "window.width == 2 &&", "false &&"),
    "a window of floats is asked by halves": ("transfer.cuh", "window.width == 2 &&", "true &&"),
    "a narrow window is asked at every vector": ("transfer.cuh", "if (end % window.width) return false;", ""),
    "Inf in a window": ("transfer.cuh", "finite &= !has_special(held[i], window)", "(void)0"),
    "Inf in a narrow window": ("transfer.cuh", "finite &= !has_special(source, vector, window)", "(void)0"),
    "only the first window": ("transfer.cuh", "unit -= window.blocks;", "break;"),
    "truncation for rounding": ("element.cuh", SUM, "12582912.0f + static_cast<int>(quotient)"),
    "half away from zero": ("element.cuh", SUM, "__builtin_roundf(quotient) + 12582912.0f"),
    "a reciprocal for a division": ("element.cuh", QUOTIENT, "estimate"),
    "no clamp": ("int8.cu", CLAMPED, CLAMPED.replace("127", "128")),
    "never clamped": ("element.cuh", "return E::Scale::BYTES == 2 &&", "return false &&"),
    "half of a word": ("int8.cu", "max(words[own] >> 16, words[own] & 0xffff)", "words[own] & 0xffff"),
    "no smallest scale": ("element.cuh", SMALLEST, "__float_as_uint(amax)"),
    "the largest value overflows": ("element.cuh", "? bits : bits - 1", "? bits : bits"),
    "the sign counts": ("element.cuh", MAGNITUDES, "word"),
    "NaN is ignored": ("element.cuh", MAGNITUDES, "word & (E::BYTES == 4 ? 0x7f800000 : 0x7f807f80)"),
    "bf16 truncated": ("ptx.cuh", TO_BF16, "return bits >> 16;"),
    "bf16 ties away": ("ptx.cuh", TO_BF16, "return (bits + 0x8000) >> 16;"),
    "a plain tail is lost": ("plain.cu", MOVED, f"if (i == HELD - 1) continue;\n{MOVED}"),
    "Inf in a plain state": ("plain.cu", "is_finite(vector[j])", "vector[j] == vector[j]"),
}

HUNT = [
    Case(d_k=40, d_v=24, conv=((24, 3), (7,)), slots=6, layers=3, heads=3),
    Case(d_k=63, d_v=61, gap=1, layers=1),
    Case(dtype=torch.float32, layout="v_last", d_k=24, d_v=40, gap=4, tables=True, conv=((7,),)),
    Case(d_k=300, d_v=12, slots=8),
    Case(layout="v_last", d_k=700, d_v=24),
    Case(layout="v_last", d_k=20, d_v=6),
    Case(dtype=torch.float32, d_k=6, d_v=1100, heads=1),
    Case(format="bf16", dtype=torch.float32, d_k=33, d_v=70, values="any"),
    Case(format="native", d_k=16, d_v=16, heads=1, layers=1, slots=60),
    Case(format="native", d_k=64, d_v=130),
    *WINDOWS,
]


@pytest.fixture(scope="module")
def fates() -> dict[str, int]:
    """How the process of each bug ended."""
    command = [sys.executable, Path(__file__)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_caught(name: str, fates: dict[str, int]) -> None:
    crashed = fates[name] < 0
    assert crashed or fates[name] == CAUGHT


def hunt(name: str) -> None:
    """Ends with ESCAPED or CAUGHT; anything else but a crash is a mistake of the hunt."""
    torch.set_num_threads(1)
    device = CpuDevice(mutation=Mutation(*MUTANTS[name]), order=Order.SHUFFLED)
    try:
        differs = out_of_range_problems(device) or any(
            round_trip(case, cuda_codec(device)).differences(round_trip(case, cpu_codec)) for case in HUNT
        )
    except LaunchError as error:
        if "barrier" not in str(error):
            raise
        differs = True
    sys.exit(CAUGHT if differs else ESCAPED)


def main() -> None:
    """Prints the exit code of each bug's process. Two run at a time."""
    processes = multiprocessing.get_context("fork")
    waiting, fates = list(MUTANTS), {}
    running: dict[str, multiprocessing.Process] = {}
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop()
            running[name] = processes.Process(target=hunt, args=(name,))
            running[name].start()
        wait([process.sentinel for process in running.values()])
        for name in [name for name, process in running.items() if not process.is_alive()]:
            fates[name] = running.pop(name).exitcode
    print(json.dumps(fates))


if __name__ == "__main__":
    main()
