"""Which specialisation of a kernel serves a state, and how its blocks divide a head. Knows no tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

SOURCES = Path(__file__).with_name("kernels")
OPTIONS = ("-std=c++17", "--fmad=false")

NON_FINITE = 1
"""Status bit of a pair: its state does not reload finite and must not become a checkpoint."""

OUT_OF_RANGE = 2
"""Status bit of a pair: a slot is the padding sink or past the end of its pool, and nothing was moved."""

VECTOR_BYTES = 16
"""The widest access of a thread."""

MAX_WINDOWS = 32
"""Windows whose addresses fit into the 4 KiB of a kernel's arguments."""

MAX_LAYERS = 65535
"""Rows of a grid."""

Direction = Literal["store", "load"]

_TYPES = {"bfloat16": "Bf16", "float16": "Fp16", "float32": "Fp32"}
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
_HELD = 8  # vectors in the registers of a thread
_THREADS = 256  # of a block, at most
_FEW = 64  # threads that a block has at least, where there is work for them
_RESIDENT = 1024  # threads of a multiprocessor, which leaves each 64 registers
_SECTOR = 32  # bytes that a memory access moves at least

_AXES = ("layer", "slot", "head", "row")
_POOL = np.dtype([("table", "u8"), ("base", "u8"), *((f"{axis}_stride", "i8") for axis in _AXES)], align=True)
_WINDOW = np.dtype([("source", _POOL), ("target", _POOL), ("vectors", "i8"), ("blocks", "i8")], align=True)


def arguments_type(windows: int) -> np.dtype[Any]:
    """The struct `Arguments` of transfer.cuh."""
    counts = ("pair_count", "source_slots", "target_slots", "state_blocks", "units")
    return np.dtype(
        [
            ("pairs", "u8"),
            *((name, "u4") for name in counts),
            *((name, _POOL) for name in ("source", "target", "scale")),
            ("windows", _WINDOW, (max(windows, 1),)),
        ],
        align=True,
    )


@dataclass(frozen=True)
class Program:
    """One specialisation of a kernel file: what is compiled once for each device.

    Attributes:
        file: name of the .cu file, whose kernels are `<stem>_store` and `<stem>_load`.
        defines: macros of the specialisation.
    """

    file: str
    defines: tuple[tuple[str, int | str], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments of the compiler, the architecture excepted."""
        return (*OPTIONS, *(f"-D{name}={value}" for name, value in self.defines))

    @property
    def source(self) -> str:
        """The file with its headers in place: CuPy's cache of binaries does not see what is included."""
        seen = set[str]()

        def text(file: str) -> str:
            if file in seen:
                return ""
            seen.add(file)
            code = (SOURCES / file).read_text().replace("#pragma once\n", "")
            return re.sub(r'^#include "(.*)"$', lambda found: text(found[1]), code, flags=re.MULTILINE)

        return text(self.file)

    def kernel(self, direction: Direction) -> str:
        """Name of the kernel that goes in a direction."""
        return f"{Path(self.file).stem}_{direction}"

    def __getitem__(self, name: str) -> int:
        """Value of a macro that is a number."""
        return int(dict(self.defines)[name])


@dataclass(frozen=True)
class Windows:
    """How many conv windows move along, and the bytes of the vectors they are copied in."""

    count: int = 0
    vector: int = VECTOR_BYTES


def window_blocks(program: Program, nbytes: int) -> int:
    """Blocks that copy one window of `nbytes`."""
    return _ceil(nbytes, program["WINDOW_VECTOR"] * program["THREADS"] * _HELD)


def int8(dtype: str, matrix: tuple[int, int], *, k_last: bool, vector: int, windows: Windows) -> Program:
    """The program for int8 checkpoints of heads of shape `matrix`, in vectors of `vector` elements."""
    rows, columns = matrix
    across = columns // vector
    sector = max(1, _SECTOR // (vector * _WIDTH[dtype]))
    tile = Tile.of_columns(rows, across, sector) if k_last else Tile.of_rows(rows, across)
    special: dict[str, int | str] = {"K_LAST": int(k_last), "ACROSS": tile.across, "SWEEPS": tile.sweeps}
    return _program("int8.cu", dtype, matrix, vector, tile, windows, special)


def plain(dtype: str, kept: str, matrix: tuple[int, int], *, vector: int, windows: Windows) -> Program:
    """The program for checkpoints of type `kept` without scales."""
    tile = Tile.flat(matrix[0] * matrix[1] // vector)
    return _program("plain.cu", dtype, matrix, vector, tile, windows, {"KEPT": _TYPES[kept]})


def _program(
    file: str,
    dtype: str,
    matrix: tuple[int, int],
    vector: int,
    tile: Tile,
    windows: Windows,
    special: dict[str, int | str],
) -> Program:
    defines: dict[str, int | str] = {
        "STATE": _TYPES[dtype],
        "ROWS": matrix[0],
        "COLUMNS": matrix[1],
        "VECTOR": vector,
        "THREADS": tile.threads,
        "HELD": tile.held,
        "CHUNKS": tile.chunks,
        "MIN_BLOCKS": tile.resident // tile.threads,
        "WINDOWS": windows.count,
        "WINDOW_VECTOR": windows.vector,
        "ARGUMENT_BYTES": arguments_type(windows.count).itemsize,
    }
    return Program(file, tuple((defines | special).items()))


@dataclass(frozen=True)
class Tile:
    """How blocks divide a head's matrix.

    Attributes:
        threads: of a block.
        across: threads beside each other along a row; `threads // across` are below each other.
        held: vectors in the registers of a thread, below each other.
        sweeps: how often a block moves on along its channels; 1 where they fit into registers.
        chunks: blocks of a head.
    """

    threads: int
    across: int
    held: int
    sweeps: int
    chunks: int

    @property
    def resident(self) -> int:
        """Threads that a multiprocessor is to hold: loops need more registers, and half the threads."""
        return _RESIDENT if self.sweeps == 1 else _RESIDENT // 2

    @classmethod
    def of_columns(cls, rows: int, across: int, sector: int) -> Self:
        """Channels are columns of `rows` elements; a row has `across` vectors, 32 bytes have `sector`."""
        down = _ceil(rows, _HELD)
        widest = _THREADS // down
        if widest < min(sector, across):
            return cls._swept_columns(rows, across, min(across, 4 * sector))
        chunks = _ceil(across, widest)
        width = _ceil(across, chunks)
        threads = _warps(width * max(down, min(rows, _FEW // width)))
        return cls(threads, width, _ceil(rows, threads // width), 1, chunks)

    @classmethod
    def _swept_columns(cls, rows: int, across: int, width: int) -> Self:
        """The same for channels too long for registers."""
        down = _THREADS // width
        return cls(_warps(down * width), width, _HELD, _ceil(rows, down * _HELD), _ceil(across, width))

    @classmethod
    def of_rows(cls, rows: int, across: int) -> Self:
        """Channels are `rows` rows of `across` vectors."""
        width = min(across, _THREADS)
        wanted = max(_ceil(rows, _HELD), min(rows, _FEW // width))
        threads = _warps(width * min(wanted, _THREADS // width))
        down = threads // width
        held = min(_HELD, _ceil(rows, down))
        return cls(threads, width, held, _ceil(across, width), _ceil(rows, down * held))

    @classmethod
    def flat(cls, vectors: int) -> Self:
        """There are no channels; a block takes the next of a head's `vectors`, which each need an address."""
        held = _HELD // 2
        threads = min(_THREADS, _warps(_ceil(vectors, held)))
        return cls(threads, 1, held, 1, _ceil(vectors, threads * held))


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _warps(threads: int) -> int:
    return _ceil(threads, 32) * 32
