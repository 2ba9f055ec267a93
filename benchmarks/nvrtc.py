"""Compiles kernel programs with NVRTC, which needs neither a GPU nor a driver, and reads what came of them.

NVRTC comes with torch for CUDA 13, and so does a disassembler, within triton. Those of CUDA 12, which compile for users
of radixstate[cuda12], are fetched by `make nvrtc12`.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from radixstate.cuda.specialise import Program

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

CUDA_12 = ("12.1.105", "12.9.86")
"""Versions of NVRTC, about the oldest and the newest of CUDA 12."""

FETCHED = Path(__file__).parents[1] / "out" / "nvrtc"
"""Where `make nvrtc12` puts them."""

CUPY_OPTIONS = ("-ftz=true",)
"""What CuPy appends to the options of a RawModule: the kernels must be right in spite of it."""

SPARE_CONSTANTS = "-diag-suppress=177"
"""A constant in a header that one of the two kernel files does not use is no fault."""


class CompileError(Exception):
    """The compiler's log."""


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, bytes that a thread spills or keeps on a stack, shared bytes of a block."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Binary:
    """A compiled program and the compiler's log."""

    cubin: bytes
    log: str

    def usage(self, kernel: str) -> Usage:
        """Resources of a kernel, as ptxas reports them."""
        found = re.search(rf"Function properties for {kernel}\n(.*\n.*)", self.log)
        if found is None:
            raise CompileError(f"no report on {kernel} in: {self.log}")

        def total(what: str) -> int:
            return sum(int(n) for n in re.findall(rf"(\d+) {what}", found[1]))

        return Usage(
            total("registers"), total("bytes (?:stack frame|spill stores|spill loads)"), total("bytes smem")
        )

    def instructions(self) -> dict[str, list[str]]:
        """The operations of each kernel with their modifiers, such as `LDG.E.EF.128`."""
        disassembler = _package("triton") / "backends" / "nvidia" / "bin" / "nvdisasm"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            run = subprocess.run([disassembler, "-c", file.name], check=True, capture_output=True, text=True)
        operation = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
        sections = re.split(r"^\.text\.(\w+):$", run.stdout, flags=re.MULTILINE)
        return {
            name: operation.findall(body) for name, body in zip(sections[1::2], sections[2::2], strict=True)
        }


def fetched(version: str) -> bool:
    """Whether an NVRTC of CUDA 12 is here."""
    return _folder(version).is_dir()


def architectures(version: str | None = None) -> list[str]:
    """Those of `ARCHITECTURES` that an NVRTC knows; by default the one of torch."""
    nvrtc, count = _library(version), ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    return [each for each in ARCHITECTURES if int(each.removeprefix("sm_")) in known]


def compile_program(program: Program, architecture: str, version: str | None = None) -> Binary:
    """Compiles for one architecture such as `sm_90`, with CuPy's options.

    Args:
        version: of `CUDA_12`; by default it is the NVRTC of torch.

    Raises:
        CompileError: with the compiler's log.
    """
    nvrtc, handle = _library(version), ctypes.c_void_p()
    flags = (*program.options, *CUPY_OPTIONS, f"-arch={architecture}", "--ptxas-options=-v", SPARE_CONSTANTS)
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    name = program.file.encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(handle), program.source.encode(), name, 0, None, None)
    try:
        failed = nvrtc.nvrtcCompileProgram(handle, len(flags), given)
        log = _output(nvrtc, handle, "ProgramLog").decode().rstrip("\0")
        if failed:
            raise CompileError(f"{program} for {architecture}:\n{log}")
        return Binary(_output(nvrtc, handle, "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _folder(version: str | None) -> Path:
    """Where the libraries of an NVRTC are."""
    if version is None:
        return _package("nvidia") / "cu13" / "lib"
    return FETCHED / version / "nvidia" / "cuda_nvrtc" / "lib"


@cache
def _library(version: str | None) -> ctypes.CDLL:
    """NVRTC, with its builtins loaded first: it looks for them by name alone."""
    folder = _folder(version)
    builtins, library = (sorted(folder.glob(f"{name}.so.*")) for name in ("libnvrtc-builtins", "libnvrtc"))
    if not (builtins and library):
        remedy = "install torch for CUDA 13" if version is None else "run `make nvrtc12`"
        raise CompileError(f"NVRTC is not in {folder}: {remedy}")
    ctypes.CDLL(str(builtins[0]), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library[0]))


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"the package {name} is not installed; torch for CUDA 13 brings it")
    return Path(next(iter(spec.submodule_search_locations)))


def _output(nvrtc: ctypes.CDLL, handle: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(handle, buffer)
    return buffer.raw
