"""Which specialisation of a kernel serves a state, and how its blocks divide a head. Knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Literal, Self

import numpy as np

from radixstate.states.formats import Format

SOURCES = Path(__file__).parent.with_name("kernels")
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
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80}
"""The exponent of a type within the last 16 bits of an element."""

_HELD = 8  # vectors in the registers of a thread
_THREADS = 256  # of a block, at most
_FEW = 64  # threads that a block has at least, where there is work for them
_RESIDENT = 1024  # threads of a multiprocessor, which leaves each 64 registers
_SECTOR = 32  # bytes that a memory access moves at least

_AXES = ("layer", "slot", "head", "row")
_STRIDED = np.dtype(
    [("table", "u8"), ("base", "u8"), *((f"{axis}_stride", "i8") for axis in _AXES)], align=True
)
_WINDOW = np.dtype(
    [
        *(("source", _STRIDED), ("target", _STRIDED), ("vectors", "i8"), ("blocks", "i8")),
        *(("width", "u4"), ("exponent", "u4")),
    ],
    align=True,
)


CHANGING = Struct("=QI")
"""What differs between launches of one direction, the first bytes of `Arguments`: `pairs` and `pair_count`."""


def arguments_type(windows: int) -> np.dtype[Any]:
    """The struct `Arguments` of transfer.cuh."""
    counts = ("pair_count", "source_slots", "target_slots", "state_blocks", "units")
    return np.dtype(
        [
            ("pairs", "u8"),
            *((name, "u4") for name in counts),
            *((name, _STRIDED) for name in ("source", "target", "scale")),
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


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What a program is made for.

    Attributes:
        dtype: of the active states.
        kept: of the checkpoints.
        matrix: of one head.
        k_last: whether a channel is a column.
        vector: elements that a thread moves at once.
        windows: that move along.
    """

    dtype: str
    kept: str
    matrix: tuple[int, int]
    k_last: bool
    vector: int
    windows: Windows


def int8(heads: Heads) -> Program:
    """The program for int8 checkpoints."""
    rows, columns = heads.matrix
    across = columns // heads.vector
    if heads.k_last:
        sector = max(1, _SECTOR // (heads.vector * _WIDTH[heads.dtype]))
        geometry = Geometry.of_columns(rows, across, sector)
    else:
        geometry = Geometry.of_rows(rows, across)
    channels = "Columns" if heads.k_last else "Rows"
    special: dict[str, int | str] = {
        "CHANNELS": channels,
        "ACROSS": geometry.across,
        "SWEEPS": geometry.sweeps,
    }
    return _program("int8.cu", heads, geometry, special)


def plain(heads: Heads) -> Program:
    """The program for checkpoints without scales."""
    rows, columns = heads.matrix
    geometry = Geometry.flat(rows * columns // heads.vector)
    return _program("plain.cu", heads, geometry, {"KEPT": _TYPES[heads.kept]})


FORMATS: dict[Format, Callable[[Heads], Program]] = {"int8": int8, "bf16": plain, "native": plain}
"""What makes the program of a format."""


def _program(file: str, heads: Heads, geometry: Geometry, special: Mapping[str, int | str]) -> Program:
    defines: dict[str, int | str] = {
        "STATE": _TYPES[heads.dtype],
        "ROWS": heads.matrix[0],
        "COLUMNS": heads.matrix[1],
        "VECTOR": heads.vector,
        "THREADS": geometry.threads,
        "HELD": geometry.held,
        "CHUNKS": geometry.chunks,
        "MIN_BLOCKS": geometry.resident // geometry.threads,
        "WINDOWS": heads.windows.count,
        "WINDOW_VECTOR": heads.windows.vector,
        "ARGUMENT_BYTES": arguments_type(heads.windows.count).itemsize,
    }
    return Program(file, tuple({**defines, **special}.items()))


@dataclass(frozen=True)
class Geometry:
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
