"""The codec for CUDA tensors: describes pools to a kernel and launches it on torch's current stream.

Nothing here waits for the device, except reading a verdict. The kernels' contract is in kernels/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import numpy as np
import torch

from radixstate import programs
from radixstate.errors import SlotError, TensorError
from radixstate.programs import MAX_WINDOWS, VECTOR_BYTES, Direction, Program, Windows, arguments_type

if TYPE_CHECKING:
    from radixstate.states import ActivePool, CheckpointPool, Layout, Rows

    Array = np.ndarray[Any, Any]
    Pairs = Sequence[tuple[int, int]]


class Device(Protocol):
    """What the codec needs of a device; all work goes on the current stream."""

    def put(self, values: Array) -> torch.Tensor:
        """Copies an array to the device."""
        ...

    def prepare(self, program: Program) -> None:
        """Compiles and loads a program, which must not happen while a graph is captured."""
        ...

    def launch(
        self, program: Program, direction: Direction, grid: tuple[int, int], threads: int, arguments: Array
    ) -> None:
        """Starts the kernel of a prepared program with one struct, of shape (1,), as its argument."""
        ...

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """Begins to copy integers to the host; calling the result waits for them."""
        ...


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

    def put(self, values: Array) -> torch.Tensor:
        """See `Device`. Torch keeps the page-locked source until the copy is done."""
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def prepare(self, program: Program) -> None:
        """See `Device`."""
        if (program, "store") in self._kernels:
            return
        module = self._cupy.RawModule(code=program.source, options=program.options)
        with self._cupy.cuda.Device(self._device.index):
            for direction in ("store", "load"):
                kernel = module.get_function(program.kernel(direction))
                kernel.compile()
                self._kernels[program, direction] = kernel

    def launch(
        self, program: Program, direction: Direction, grid: tuple[int, int], threads: int, arguments: Array
    ) -> None:
        """See `Device`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._cupy.cuda.Device(self._device.index), self._cupy.cuda.ExternalStream(stream):
            self._kernels[program, direction](grid, (threads,), (arguments,))

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """See `Device`."""
        with torch.cuda.device(self._device):
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()

        def wait() -> list[int]:
            copied.synchronize()
            fetched: list[int] = host.tolist()
            return fetched

        return wait


class Verdicts(Sequence[bool]):
    """For each pair of a store whether its state reloads finite. The first reading waits for the store."""

    def __init__(self, pairs: int, fetch: Callable[[], list[int]]) -> None:
        """`fetch` waits for the status words of `pairs` pairs and returns them."""
        self._pairs = pairs
        self._fetch = fetch
        self._finite: list[bool] | None = None

    def wait(self) -> list[bool]:
        """All verdicts, when the store has run."""
        if self._finite is None:
            self._finite = [status == 0 for status in self._fetch()]
        return self._finite

    def __len__(self) -> int:
        """Number of pairs; waits for nothing."""
        return self._pairs

    @overload
    def __getitem__(self, index: int) -> bool: ...
    @overload
    def __getitem__(self, index: slice) -> list[bool]: ...
    def __getitem__(self, index: int | slice) -> bool | list[bool]:
        """The verdict on one pair; waits for the store."""
        return self.wait()[index]


@dataclass(frozen=True)
class _Memory:
    """Where the rows of a pool are.

    Attributes:
        record: a `Pool` of transfer.cuh.
        table: the tensor that `record` points into, if there is one.
        alignment: bytes that divide every address and stride.
        slots: rows of a layer, the padding sink included.
    """

    record: tuple[int, ...]
    table: torch.Tensor | None
    alignment: int
    slots: int

    @classmethod
    def of(cls, rows: Rows, axes: int, device: Device) -> Self:
        """Describes rows of which the first `axes` axes may have any stride, and the others are contiguous.

        Raises:
            TensorError: they are not, or an element lies across its own alignment.
        """
        first = rows.layers[0]
        width = first.element_size()
        if not first[(0,) * axes].is_contiguous():
            raise TensorError(f"axes from {axes} on must be contiguous, got strides {first.stride()}")
        strides = [first.stride(axis) * width if first.shape[axis] > 1 else 0 for axis in range(axes)]
        addresses = [layer.data_ptr() for layer in rows.layers]
        alignment = gcd(*addresses, *strides)
        if alignment % width:
            raise TensorError(f"addresses must be multiples of an element's {width} bytes")
        table = None if rows.whole is not None else device.put(np.array(addresses, dtype=np.int64))
        where = (0, addresses[0], addresses[-1] - addresses[-2] if len(addresses) > 1 else 0)
        if table is not None:
            where = (table.data_ptr(), 0, 0)
        return cls((*where, *strides, *(0,) * (3 - axes)), table, alignment, first.shape[0])


@dataclass(frozen=True)
class _Window:
    """One conv window, copied as bytes."""

    active: _Memory
    checkpoint: _Memory
    nbytes: int

    @classmethod
    def of(cls, active: Rows, checkpoint: Rows, device: Device) -> Self:
        row = active.layers[0][0]
        nbytes = row.numel() * row.element_size()
        return cls(_Memory.of(active, 1, device), _Memory.of(checkpoint, 1, device), nbytes)

    @property
    def alignment(self) -> int:
        return gcd(self.nbytes, self.active.alignment, self.checkpoint.alignment)


class CudaCodec:
    """Moves slots between two pools: one launch for all layers, heads, pairs and windows.

    `store` and `load` take pairs from the host. While a graph is captured, or for slots that a kernel
    computes, use `enqueue_store` and `enqueue_load`, which launch and do nothing else.
    """

    def __init__(
        self,
        *,
        active: Rows,
        checkpoint: Rows,
        scale: Rows | None,
        conv: Sequence[tuple[Rows, Rows]],
        layout: Layout,
        device: Device,
    ) -> None:
        """Describes the pools and compiles the kernels that serve them.

        Args:
            active: (slots, heads, *matrix) of each layer.
            checkpoint: the same, in int8 if there are scales.
            scale: (slots, heads, d_k) of each layer, for int8.
            conv: each window in the active and in the checkpoint pool, (slots, *shape) of each layer.
            layout: which axis of a matrix is the k-channel.
            device: where all of them are.

        Raises:
            TensorError: an inner axis is not contiguous, or there are more windows than a launch takes.
        """
        if len(conv) > MAX_WINDOWS:
            raise TensorError(f"a launch takes at most {MAX_WINDOWS} conv windows, got {len(conv)}")
        self._device = device
        self._layers = len(active.layers)
        self._active = _Memory.of(active, 3, device)
        self._checkpoint = _Memory.of(checkpoint, 3, device)
        self._scale = None if scale is None else _Memory.of(scale, 2, device)
        self._windows = [_Window.of(a, b, device) for a, b in conv]
        self._program = self._specialise(active.layers[0], checkpoint.layers[0], layout)
        self._state_blocks = active.layers[0].shape[1] * self._program["CHUNKS"]
        device.prepare(self._program)

    def _specialise(self, active: torch.Tensor, checkpoint: torch.Tensor, layout: Layout) -> Program:
        """The program for layers like these two, with the widest vectors that all addresses allow."""
        dtype, kept = (str(tensor.dtype).removeprefix("torch.") for tensor in (active, checkpoint))
        rows, columns = active.shape[-2:]
        elements = gcd(
            columns,
            VECTOR_BYTES // max(active.element_size(), checkpoint.element_size()),
            self._active.alignment // active.element_size(),
            self._checkpoint.alignment // checkpoint.element_size(),
        )
        width = gcd(VECTOR_BYTES, *(window.alignment for window in self._windows))
        windows = Windows(len(self._windows), width)
        if self._scale is None:
            return programs.plain(dtype, kept, (rows, columns), vector=elements, windows=windows)
        k_last = layout == "k_last"
        return programs.int8(dtype, (rows, columns), k_last=k_last, vector=elements, windows=windows)

    def store(self, pairs: Pairs) -> Verdicts:
        """Encodes (active slot, checkpoint slot) pairs; the result is read when it is needed.

        Raises:
            SlotError: a slot is not in its pool, or two pairs write the same one; nothing was launched.
        """
        slots = self.slots(pairs, "store")
        self.enqueue_store(slots)
        return Verdicts(len(pairs), self._device.fetch(slots[2]))

    def load(self, pairs: Pairs) -> None:
        """Decodes (checkpoint slot, active slot) pairs.

        Raises:
            SlotError: as `store`.
        """
        self.enqueue_load(self.slots(pairs, "load"))

    def slots(self, pairs: Pairs, direction: Direction) -> torch.Tensor:
        """Puts pairs on the device: int32 (3, pairs) of sources, destinations and zeroed status words.

        Raises:
            SlotError: as `store`.
        """
        active, checkpoint = ("active pool", self._active.slots), ("checkpoint pool", self._checkpoint.slots)
        source, target = (active, checkpoint) if direction == "store" else (checkpoint, active)
        _require_pairs(pairs, source, target)
        words = np.zeros((3, len(pairs)), dtype=np.int32)
        words[:2] = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
        return self._device.put(words)

    def enqueue_store(self, slots: torch.Tensor) -> None:
        """Launches a store, and nothing else.

        Args:
            slots: int32 (3, pairs), contiguous, on the device: active slots, checkpoint slots, status words.
                Destinations must be distinct. A status word gains `programs.NON_FINITE` or
                `programs.OUT_OF_RANGE` and loses nothing: clear it before it is used again. A slot that is
                0 or past the end moves nothing, so a captured batch may be padded with zeros.

        Raises:
            TensorError: `slots` has another shape or type.
        """
        self._launch("store", slots, self._active, self._checkpoint)

    def enqueue_load(self, slots: torch.Tensor) -> None:
        """Launches a load; `slots` as in `enqueue_store`, with checkpoint slots first.

        Raises:
            TensorError: `slots` has another shape or type.
        """
        self._launch("load", slots, self._checkpoint, self._active)

    def _launch(self, direction: Direction, slots: torch.Tensor, source: _Memory, target: _Memory) -> None:
        if slots.dtype != torch.int32 or slots.ndim != 2 or len(slots) != 3 or not slots.is_contiguous():
            raise TensorError(
                f"slots must be contiguous int32 (3, pairs), got {slots.dtype} {tuple(slots.shape)}"
            )
        pairs = slots.shape[1]
        if not pairs:
            return
        arguments = np.zeros(1, dtype=arguments_type(len(self._windows)))
        arguments["pairs"], arguments["pair_count"] = slots.data_ptr(), pairs
        arguments["source"], arguments["target"] = source.record, target.record
        arguments["source_slots"], arguments["target_slots"] = source.slots, target.slots
        if self._scale is not None:
            arguments["scale"] = self._scale.record
        units = self._state_blocks + self._describe_windows(direction, arguments["windows"][0])
        arguments["state_blocks"], arguments["units"] = self._state_blocks, units
        grid = (units * pairs, self._layers)
        self._device.launch(self._program, direction, grid, self._program["THREADS"], arguments)

    def _describe_windows(self, direction: Direction, records: Array) -> int:
        """Fills in the windows and returns how many blocks they take."""
        total, width = 0, self._program["WINDOW_VECTOR"]
        for i, window in enumerate(self._windows):
            ends = (window.active, window.checkpoint)
            source, target = ends if direction == "store" else ends[::-1]
            blocks = programs.window_blocks(self._program, window.nbytes)
            records[i] = (source.record, target.record, window.nbytes // width, blocks)
            total += blocks
        return total


def _require_pairs(pairs: Pairs, source: tuple[str, int], target: tuple[str, int]) -> None:
    """Refuses what the CPU codec refuses, in the same words."""
    written: dict[int, int] = {}
    for i, pair in enumerate(pairs):
        for slot, (pool, rows) in zip(pair, (source, target), strict=True):
            if slot == 0:
                raise SlotError(f"pair {i}: slot 0 of the {pool} is the padding sink")
            if not 0 < slot < rows:
                raise SlotError(f"pair {i}: slot {slot} is not in the {pool}, whose last slot is {rows - 1}")
        first = written.setdefault(pair[1], i)
        if first != i:
            raise SlotError(f"pairs {first} and {i} both write slot {pair[1]}; destinations must be distinct")


@cache
def _device(index: int) -> CupyDevice:
    return CupyDevice(index)


def build(active: ActivePool, checkpoints: CheckpointPool) -> CudaCodec:
    """The codec for two pools of one spec on one CUDA device.

    Raises:
        ModuleNotFoundError: CuPy is missing.
    """
    return describe(active, checkpoints, _device(active.device.index))


def describe(active: ActivePool, checkpoints: CheckpointPool, device: Device) -> CudaCodec:
    """The codec for two pools of one spec on `device`."""
    return CudaCodec(
        active=active.state_rows,
        checkpoint=checkpoints.state_rows,
        scale=checkpoints.scale_rows,
        conv=list(zip(active.conv_rows, checkpoints.conv_rows, strict=True)),
        layout=active.spec.layout,
        device=device,
    )
