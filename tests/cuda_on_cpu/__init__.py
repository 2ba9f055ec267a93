"""The CUDA kernels on a CPU: compiles the unmodified .cu files with g++ and runs them in place of a GPU.

Needs g++ 11 or newer. Libraries are kept in out/cuda_on_cpu, by a hash of all that went into them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from radixstate.cuda.specialise import SOURCES, Direction, Program
from radixstate.errors import MisuseError

from cuda_on_cpu import banks

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "out" / "cuda_on_cpu"
FLAGS = (
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    "-Wno-maybe-uninitialized",  # what a thread without work leaves alone
)
NOTING = ("-O0", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
"""Announces every access to memory as the source has it; banks.cpp listens."""

SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fsanitize-sections=shared_memory",
)


class Order(IntEnum):
    """In which order the threads of a block run between two barriers."""

    FORWARD = 0
    BACKWARD = 1
    SHUFFLED = 2


class LaunchError(Exception):
    """A kernel that does not compile, or did what no device would do right."""


@dataclass(frozen=True)
class Mutation:
    """A seeded bug: the one `old` in a kernel file becomes `new`."""

    file: str
    old: str
    new: str


@cache
def build(
    program: Program, mutation: Mutation | None = None, *, sanitize: bool = False, note: bool = False
) -> ctypes.CDLL:
    """Compiles a program, unless that was done, and loads it. If asked, it notes accesses to shared memory."""
    _machine(sanitize)
    defines = {
        "KERNEL_FILE": f'"{program.file}"',
        "STORE": program.kernel("store"),
        "LOAD": program.kernel("load"),
        **dict(program.defines),
    }
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    library = _compile("launch.cpp", _sources(mutation), flags, sanitize, note)
    for kernel in (library.store, library.load):
        kernel.restype = ctypes.c_char_p
        kernel.argtypes = [ctypes.c_void_p, *(ctypes.c_uint,) * 3, ctypes.c_int, ctypes.c_uint]
    return library


@cache
def _machine(sanitize: bool) -> ctypes.CDLL:
    """What runs the threads; loaded first, for the kernels to find."""
    return _compile("machine.cpp", {}, [], sanitize)


def _sources(mutation: Mutation | None) -> dict[str, str]:
    """The kernel files by name."""
    sources = {path.name: path.read_text() for path in SOURCES.glob("*.cu*")}
    if mutation is not None:
        text = sources[mutation.file]
        if (n := text.count(mutation.old)) != 1:
            raise LaunchError(f"{mutation.old!r} must be once in {mutation.file}, it is there {n} times")
        sources[mutation.file] = text.replace(mutation.old, mutation.new)
    return sources


def _compile(
    main: str, sources: Mapping[str, str], flags: Sequence[str], sanitize: bool, note: bool = False
) -> ctypes.CDLL:
    flags = [*FLAGS, *(SANITIZERS if sanitize else ()), *(NOTING if note else ()), *flags]
    files = [main, "cuda.h", *(["banks.cpp"] if note else [])]
    code = [(HERE / name).read_text() for name in files]
    folder = BUILT / hashlib.sha256(repr((flags, sources, code)).encode()).hexdigest()[:20]
    library = folder / "library.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in sources.items():
            (folder / name).write_text(text)
        unfinished = folder / f"{os.getpid()}.so"
        include = [f"-I{folder}", f"-I{HERE}"]
        if note:
            # What announces is compiled apart from what listens, and linked without the sanitizer's runtime.
            announcing = unfinished.with_suffix(".o")
            _run_compiler([*flags, *include, "-c", str(HERE / main), "-o", str(announcing)])
            _run_compiler([*FLAGS, *include, str(HERE / "banks.cpp"), str(announcing), "-o", str(unfinished)])
        else:
            _run_compiler([*flags, *include, str(HERE / main), "-o", str(unfinished)])
        unfinished.rename(library)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL if main == "machine.cpp" else ctypes.RTLD_LOCAL)


def _run_compiler(arguments: Sequence[str]) -> None:
    command = ["g++", *arguments]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        raise LaunchError(f"{' '.join(command)}\n{compiled.stderr}")


@dataclass(frozen=True)
class Launch:
    """What CuPy would have been given."""

    program: Program
    direction: Direction
    grid: tuple[int, int]
    threads: int
    arguments: np.ndarray[Any, Any]


@dataclass
class _Copy:
    """What a store has said; there at once, unless the device is told to lag."""

    device: CpuDevice
    values: torch.Tensor

    def __call__(self) -> list[int]:
        self.device.waits += 1
        # A buffer, since reading this tensor waits for no device.
        read: list[int] = np.from_dlpack(self.values).tolist()
        return read

    def done(self) -> bool:
        return not self.device.lags


class CpuDevice:
    """A `radixstate.cuda.Device` over CPU tensors. What is launched runs at once; its results are read later.

    Attributes:
        launches: everything launched so far, outside of a capture.
        copies: how often something was copied to the device.
        waits: how often the host waited for a result.
        lags: whether results are there only when somebody waits for them.
    """

    def __init__(
        self,
        *,
        order: Order = Order.FORWARD,
        mutation: Mutation | None = None,
        sanitize: bool = False,
        note: bool = False,
    ) -> None:
        self.launches: list[Launch] = []
        self.copies = 0
        self.waits = 0
        self.lags = False
        self._captured: list[Launch] | None = None
        self._order = order
        self._mutation = mutation
        self._sanitize = sanitize
        self._note = note

    @contextmanager
    def capture(self) -> Iterator[list[Launch]]:
        """Notes launches instead of running them, and refuses all else, as a device does."""
        self._captured = []
        yield self._captured
        self._captured = None

    def replay(self, captured: Sequence[Launch]) -> None:
        for launch in captured:
            self._run(launch)

    def put(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        self._require_no_capture()
        self.copies += 1
        return torch.from_numpy(values.copy())

    def refill(self, memory: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        self._require_no_capture()
        self.copies += 1
        memory.copy_(torch.from_numpy(values))

    def prepare(self, program: Program) -> None:
        self._require_no_capture()
        self._build(program)

    def launch(
        self,
        program: Program,
        direction: Direction,
        grid: tuple[int, int],
        threads: int,
        arguments: np.ndarray[Any, Any],
    ) -> None:
        launch = Launch(program, direction, grid, threads, arguments)
        if self._captured is not None:
            self._captured.append(launch)
        else:
            self._run(launch)

    def _build(self, program: Program) -> ctypes.CDLL:
        return build(program, self._mutation, sanitize=self._sanitize, note=self._note)

    def noted(self, program: Program) -> np.ndarray[Any, Any]:
        """The accesses to shared memory since the last time that they were asked for; see `banks`."""
        return banks.noted(self._build(program))

    def _run(self, launch: Launch) -> None:
        self.launches.append(launch)
        library = self._build(launch.program)
        kernel = library.store if launch.direction == "store" else library.load
        where = (*launch.grid, launch.threads, self._order, len(self.launches))
        fault = kernel(launch.arguments.ctypes.data, *where)
        if fault:
            raise LaunchError(fault.decode())

    def fetch(self, values: torch.Tensor) -> _Copy:
        self._require_no_capture()
        return _Copy(self, values.clone())

    def _require_no_capture(self) -> None:
        if self._captured is not None:
            raise MisuseError("a graph is being captured")
