"""What the compiler makes of the CUDA kernels, for each architecture: needs no GPU.

Prints a table of the main shapes and writes it to out/kernels.json. Run it from the repository's root:

    python -m benchmarks.kernels [--nvrtc VERSION] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from radixstate.cuda import specialise
from radixstate.cuda.specialise import Heads, Program, Windows

from benchmarks.nvrtc import ARCHITECTURES, CUDA_12, architectures, compile_program

WIDEST = {"bfloat16": 8, "float16": 8, "float32": 4}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# Of a multiprocessor: threads, blocks, KiB of shared memory.
LIMITS = {
    "sm_75": (1024, 16, 64),
    "sm_80": (2048, 32, 164),
    "sm_86": (1536, 16, 100),
    "sm_89": (1536, 24, 100),
    "sm_90": (2048, 32, 228),
    "sm_100": (2048, 32, 228),
    "sm_120": (1536, 24, 100),
}
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture.

    Attributes:
        spills: bytes that a thread spills or keeps on a stack.
        shared: bytes of shared memory of a block.
        blocks: that fit a multiprocessor.
        loads: instructions that read global memory, by their bits.
        stores: the same for writing.
        shared_loads: the same for reading shared memory.
        flushing: arithmetic instructions that flush subnormals.
        main: whether it is one of the main shapes.
    """

    arch: str
    kernel: str
    registers: int
    spills: int
    shared: int
    threads: int
    blocks: int
    loads: dict[str, int]
    stores: dict[str, int]
    shared_loads: dict[str, int]
    flushing: list[str]
    main: bool


def main_programs() -> dict[str, Program]:
    """The shapes of real models, each with a conv window, by name."""
    windows = Windows(count=1)
    found = {}
    for dtype, vector in WIDEST.items():
        for d in (64, 128, 256):
            for layout in ("k_last", "v_last"):
                heads = Heads(
                    dtype=dtype,
                    kept="int8",
                    matrix=(d, d),
                    k_last=layout == "k_last",
                    vector=vector,
                    windows=windows,
                )
                found[f"{SHORT[dtype]} {layout} {d}x{d}"] = specialise.int8(heads)
            for kept in {dtype, "bfloat16"}:
                name = f"{SHORT[dtype]} as {SHORT[kept]} {d}x{d}"
                found[name] = specialise.plain(replace(heads, kept=kept))
    return found


def compiled(
    given: Mapping[str, Program],
    *,
    main: bool,
    architectures: Sequence[str] = ARCHITECTURES,
    nvrtc: str | None = None,
) -> list[Row]:
    """Compiles programs for all architectures in two processes, with torch's NVRTC or one of `CUDA_12`."""
    tasks = [(name, program, arch, main, nvrtc) for arch in architectures for name, program in given.items()]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return [row for rows in pool.map(_rows, tasks, chunksize=8) for row in rows]


def _rows(task: tuple[str, Program, str, bool, str | None]) -> list[Row]:
    """The two kernels of one program; only those of main shapes are disassembled."""
    name, program, arch, main, nvrtc = task
    binary = compile_program(program, arch, nvrtc)
    code = binary.instructions() if main else {}
    rows = []
    for direction in ("store", "load"):
        kernel = program.kernel(direction)
        usage, operations = binary.usage(kernel), code.get(kernel, [])
        rows.append(
            Row(
                arch=arch,
                kernel=f"{kernel} {name}",
                registers=usage.registers,
                spills=usage.spills,
                shared=usage.shared,
                threads=program["THREADS"],
                blocks=_resident_blocks(arch, program["THREADS"], usage.registers, usage.shared),
                loads=_widths(operations, ("LDG", "LD")),
                stores=_widths(operations, ("STG", "ST")),
                shared_loads=_widths(operations, ("LDS",)),
                flushing=[op for op in operations if op.startswith(("FMUL", "FFMA", "F2F")) and ".FTZ" in op],
                main=main,
            )
        )
    return rows


def _resident_blocks(arch: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that fit: a warp's registers come in pieces of 256, and each block reserves 1 KiB of its own."""
    most_threads, most_blocks, shared_kib = LIMITS[arch]
    warp_registers = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // warp_registers * 32 // threads
    return min(most_threads // threads, most_blocks, by_registers, shared_kib * 1024 // (shared + 1024))


def _widths(operations: Sequence[str], names: tuple[str, ...]) -> dict[str, int]:
    """How many instructions there are of each width."""
    bits = Counter[str]()
    for operation in operations:
        name, *modifiers = operation.split(".")
        if name in names:
            width = next((m for m in modifiers if m in ("U8", "S8", "U16", "S16", "64", "128")), "32")
            bits[width.lstrip("US")] += 1
    return dict(sorted(bits.items(), key=lambda item: -int(item[0])))


def _print_table(rows: Sequence[Row]) -> None:
    head = ("arch", "kernel", "registers", "spills", "shared", "threads", "blocks/SM", "loads", "stores")
    line = "{:7} {:34} {:>9} {:>6} {:>6} {:>7} {:>9}  {:22} {}"
    print(line.format(*head))
    for row in rows:
        widths = (" ".join(f"{n}x{bits}" for bits, n in each.items()) for each in (row.loads, row.stores))
        numbers = (row.registers, row.spills, row.shared, row.threads, row.blocks)
        print(line.format(row.arch, row.kernel, *numbers, *widths))


def main() -> None:
    """Prints and writes the table; exits with an error if a main shape spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/kernels.json"), help="default: %(default)s")
    parser.add_argument("--nvrtc", choices=CUDA_12, help="one that `make nvrtc12` fetched; default: torch's")
    given = parser.parse_args()
    out: Path = given.out
    rows = compiled(main_programs(), main=True, architectures=architectures(given.nvrtc), nvrtc=given.nvrtc)
    _print_table(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    spilling = sum(row.spills > 0 for row in rows)
    print(f"{len(rows)} kernels, {spilling} with spills; written to {out}")
    sys.exit(spilling > 0)


if __name__ == "__main__":
    main()
