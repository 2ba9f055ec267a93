"""A CUDA device: memory, kernels, and the current stream, on which all work goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np
import torch

from radixstate.cuda.specialise import Direction, Program
from radixstate.errors import MisuseError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


class Fetched(Protocol):
    """Integers on their way to the host."""

    def __call__(self) -> list[int]:
        """Waits for them."""
        ...

    def done(self) -> bool:
        """Whether they are there; waits for nothing."""
        ...


class Device(Protocol):
    """What the codec needs of a device; all work goes on the current stream.

    While a graph is captured only `launch` is allowed, and the others raise MisuseError: replaying would repeat
    the values of the capture, and allocating or waiting would end it.
    """

    def put(self, values: Array) -> torch.Tensor:
        """Copies an array to new memory of the device."""
        ...

    def refill(self, memory: torch.Tensor, values: Array) -> None:
        """Copies an array over what `put` returned; work enqueued before still reads the old values."""
        ...

    def prepare(self, program: Program) -> None:
        """Compiles and loads a program, and waits until any stream may use what `put` has copied."""
        ...

    def launch(
        self, program: Program, direction: Direction, grid: tuple[int, int], threads: int, arguments: Array
    ) -> None:
        """Starts the kernel of a prepared program with one struct, of shape (1,), as its argument."""
        ...

    def fetch(self, values: torch.Tensor) -> Fetched:
        """Begins to copy integers to the host; calling the result waits for them."""
        ...


@dataclass(frozen=True)
class _Stream:
    """A stream of torch's in CUDA's stream protocol, which torch's own class has in late versions only."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol and handle."""
        return (0, self.pointer)


@dataclass(frozen=True)
class _Copy:
    """A copy to the host, and the event behind it."""

    host: torch.Tensor
    copied: torch.cuda.Event

    def __call__(self) -> list[int]:
        self.copied.synchronize()
        fetched: list[int] = self.host.tolist()
        return fetched

    def done(self) -> bool:
        return bool(self.copied.query())  # type: ignore[no-untyped-call]  # torch's stub


class CupyDevice:
    """A CUDA device through CuPy; streams, memory and events are torch's."""

    def __init__(self, index: int) -> None:
        """Takes the CUDA device `index`.

        Raises:
            ModuleNotFoundError: CuPy is missing.
        """
        try:
            self._cupy = import_module("cupy")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tensors on cuda need CuPy: install radixstate[cuda12] or radixstate[cuda13]", name="cupy"
            ) from error
        self._device = torch.device("cuda", index)
        self._kernels: dict[tuple[Program, Direction], Any] = {}

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """Makes the device torch's current one, unless a graph is being captured there."""
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise MisuseError(
                    "a graph is being captured: make a batch of the codec before, and capture its enqueue() alone"
                )
            yield

    def put(self, values: Array) -> torch.Tensor:
        """See `Device`. Torch keeps the page-locked source until the copy is done."""
        with self._eager():
            return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def refill(self, memory: torch.Tensor, values: Array) -> None:
        """See `Device`. The source is new each time, since an earlier copy may not have begun."""
        with self._eager():
            memory.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def prepare(self, program: Program) -> None:
        """See `Device`."""
        with self._eager():
            if (program, "store") not in self._kernels:
                self._load(program)
            torch.cuda.synchronize(self._device)

    def _load(self, program: Program) -> None:
        module = self._cupy.RawModule(code=program.source, options=program.options)
        loaded: dict[tuple[Program, Direction], Any] = {}
        with self._cupy.cuda.Device(self._device.index):
            for direction in get_args(Direction):
                kernel = module.get_function(program.kernel(direction))
                kernel.compile()
                # CUDA loads a kernel at its first use, which may not be in a capture; to ask for its size is a use.
                _ = kernel.num_regs
                loaded[program, direction] = kernel
        self._kernels |= loaded

    def launch(
        self, program: Program, direction: Direction, grid: tuple[int, int], threads: int, arguments: Array
    ) -> None:
        """See `Device`."""
        current = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
        stream = self._cupy.cuda.Stream.from_external(current)
        with self._cupy.cuda.Device(self._device.index), stream:
            self._kernels[program, direction](grid, (threads,), (arguments,))

    def fetch(self, values: torch.Tensor) -> Fetched:
        """See `Device`."""
        with self._eager():
            # Said, since the default device may be another, and the store has been launched by now.
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            copied.record()
        return _Copy(host, copied)
