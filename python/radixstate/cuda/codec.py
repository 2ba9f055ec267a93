"""The codec for CUDA tensors: describes two pools to a kernel and launches it on torch's current stream.

Making a codec waits for the device, once for each pair of pools. After that nothing does, except reading a verdict.
The kernels' contract is in kernels/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch

from radixstate import _native
from radixstate.cuda import specialise
from radixstate.cuda.batch import Batch, Verdicts
from radixstate.cuda.device import CupyDevice, Device
from radixstate.cuda.specialise import (
    CHANGING,
    EXPONENT,
    MAX_LAYERS,
    MAX_WINDOWS,
    VECTOR_BYTES,
    Direction,
    Heads,
    Program,
    Windows,
    arguments_type,
)
from radixstate.errors import SlotError, TensorError
from radixstate.states.groups import part
from radixstate.states.pools import require_alike

if TYPE_CHECKING:
    from radixstate.states import ActivePool, CheckpointPool, Format, Layout, Rows

    Array = np.ndarray[Any, Any]
    Pairs = Sequence[tuple[int, int]]


_NO_SLOT = 2**31 - 1
"""Past the end of every pool."""


@dataclass(frozen=True)
class _Memory:
    """Where the rows of a pool are.

    Attributes:
        record: a `Strided` of transfer.cuh.
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
    """One conv window, copied as bytes; its elements are asked whether they are finite."""

    active: _Memory
    checkpoint: _Memory
    nbytes: int
    width: int
    exponent: int

    @classmethod
    def of(cls, active: Rows, checkpoint: Rows, device: Device) -> Self:
        row = active.layers[0][0]
        width, dtype = row.element_size(), str(row.dtype).removeprefix("torch.")
        return cls(
            active=_Memory.of(active, 1, device),
            checkpoint=_Memory.of(checkpoint, 1, device),
            nbytes=row.numel() * width,
            width=width,
            exponent=EXPONENT[dtype],
        )

    @property
    def alignment(self) -> int:
        return gcd(self.nbytes, self.active.alignment, self.checkpoint.alignment)


class CudaCodec:
    """Moves slots between two pools: one launch for all layers, heads, pairs and windows.

    `store` and `load` take pairs from the host, and so cannot be captured in a graph. For that make a `batch`
    before, or, for slots that a kernel computes, use `enqueue_store` and `enqueue_load`.
    """

    def __init__(
        self,
        *,
        active: Rows,
        checkpoint: Rows,
        scale: Rows | None,
        conv: Sequence[tuple[Rows, Rows]],
        layout: Layout | Literal["flat"],
        format: Format,
        device: Device,
    ) -> None:
        """Describes the pools and compiles the kernels that serve them.

        Args:
            active: (slots, heads, *matrix) of each layer.
            checkpoint: the same, as the format keeps it.
            scale: (slots, heads, d_k) of each layer, in a format with scales.
            conv: each window in the active and in the checkpoint pool, (slots, *shape) of each layer.
            layout: which axis of a matrix is the k-channel; `flat` for one row without channels.
            format: of the checkpoints.
            device: where all of them are.

        Raises:
            TensorError: an inner axis is not contiguous, memory overlaps, or there are more windows or layers than
                a launch takes.
            MisuseError: a graph is being captured.
        """
        if len(conv) > MAX_WINDOWS:
            raise TensorError(f"a launch takes at most {MAX_WINDOWS} conv windows, got {len(conv)}")
        if len(active.layers) > MAX_LAYERS:
            raise TensorError(f"a launch takes at most {MAX_LAYERS} layers, got {len(active.layers)}")
        self._held = _native.HeldTensors.of_pools(
            active=active.given,
            checkpoint=checkpoint.given,
            scale=scale.given if scale else None,
            conv=[(source.given, kept.given) for source, kept in conv],
            layout=layout,
            format=format,
        )
        self._running = [active, *(source for source, _ in conv)]
        self._device = device
        self._layers = len(active.layers)
        self._where = active.layers[0].device
        self._active = _Memory.of(active, 3, device)
        self._checkpoint = _Memory.of(checkpoint, 3, device)
        self._scale = None if scale is None else _Memory.of(scale, 2, device)
        self._windows = [_Window.of(a, b, device) for a, b in conv]
        self._program = self._specialise(active.layers[0], checkpoint.layers[0], layout, format)
        self._threads = self._program["THREADS"]
        self._struct = arguments_type(len(self._windows))
        self._state_blocks = active.layers[0].shape[1] * self._program["CHUNKS"]
        blocks = [specialise.window_blocks(self._program, window.nbytes) for window in self._windows]
        self._units = self._state_blocks + sum(blocks)
        self._packed = {direction: self._pack(direction, blocks) for direction in get_args(Direction)}
        device.prepare(self._program)

    def _specialise(
        self, active: torch.Tensor, checkpoint: torch.Tensor, layout: str, format: Format
    ) -> Program:
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
        heads = Heads(
            dtype=dtype,
            kept=kept,
            matrix=(rows, columns),
            k_last=layout == "k_last",
            vector=elements,
            windows=windows,
        )
        return specialise.FORMATS[format](heads)

    def store(self, pairs: Pairs) -> Sequence[bool]:
        """Encodes (active slot, checkpoint slot) pairs; the result is read when it is needed.

        Raises:
            SlotError: a slot is not in its pool, or two pairs write the same one; nothing was launched.
            TensorError: a tensor of the pools is no longer where it was; nothing was launched.
            MisuseError: a graph is being captured.
        """
        if not pairs:
            return []
        batch = self._batch("store", pairs, len(pairs))
        batch.enqueue()
        return batch.verdicts()

    def load(self, pairs: Pairs) -> None:
        """Decodes (checkpoint slot, active slot) pairs.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        if pairs:
            self._batch("load", pairs, len(pairs)).enqueue()

    def store_at(self, sources: torch.Tensor, targets: torch.Tensor) -> Sequence[bool]:
        """Encodes active slots into checkpoint slots that int64 (n,) tensors of the device name.

        Raises:
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        if not len(sources):
            return []
        slots = self._table(sources, targets)
        self.enqueue_store(slots)
        return Verdicts(len(sources), self._device.fetch(slots[2]))

    def load_at(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Decodes checkpoint slots into active slots that int64 (n,) tensors of the device name.

        Raises:
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        if len(sources):
            self.enqueue_load(self._table(sources, targets))

    def _table(self, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Slots for a launch, written by the device itself. Those that an int32 cannot hold become no slot."""
        slots = self._device.put(np.zeros((3, len(sources)), dtype=np.int32))
        for row, named in zip(slots, (sources, targets), strict=False):
            row.copy_(named.clamp(0, _NO_SLOT))
        return slots

    def fill(self, source: int | None, slot: int) -> None:
        """Decodes one checkpoint slot into an active slot; None zeroes it, windows included.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`, for a load.
        """
        if source is not None:
            self.load([(source, slot)])
            return
        self._held.check()
        slot = index(slot)
        # In the words of the CPU codec, which names the sink as the source.
        _require_pairs([(1, slot)], ("checkpoint pool", 2), ("active pool", self._active.slots))
        for rows in self._running:
            rows.fill(slot, 0)

    def batch(self, direction: Direction, capacity: int) -> Batch:
        """Room on the device for `capacity` pairs, none yet: what a captured graph stores or loads.

        Waits for the device, so that any stream may use the batch. Every launch starts the blocks of `capacity` pairs,
        filled in or not: see `Batch`.

        Raises:
            MisuseError: a graph is being captured.
        """
        batch = self._batch(direction, (), capacity)
        self._device.prepare(self._program)
        return batch

    def _batch(self, direction: Direction, pairs: Pairs, capacity: int) -> Batch:
        launch = self.enqueue_store if direction == "store" else self.enqueue_load
        blocks = self._units * self._layers
        return Batch(self._device, partial(self._words, direction), launch, pairs, capacity, blocks)

    def _words(self, direction: Direction, pairs: Pairs, capacity: int) -> Array:
        """Checked pairs as int32 (3, capacity): sources, destinations, status words. Padding is zero.

        Raises:
            SlotError: as `store`, or there are more pairs than `capacity`.
            TensorError: as `store`.
        """
        self._held.check()
        pairs = [(index(source), index(target)) for source, target in pairs]
        if len(pairs) > capacity:
            raise SlotError(f"the batch has room for {capacity} pairs, got {len(pairs)}")
        active, checkpoint = ("active pool", self._active.slots), ("checkpoint pool", self._checkpoint.slots)
        source, target = (active, checkpoint) if direction == "store" else (checkpoint, active)
        _require_pairs(pairs, source, target)
        words = np.zeros((3, capacity), dtype=np.int32)
        words[:2, : len(pairs)] = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
        return words

    def enqueue_store(self, slots: torch.Tensor) -> None:
        """Launches a store, and nothing else: this may be captured.

        Args:
            slots: int32 (3, pairs), contiguous, on the device: active slots, checkpoint slots, status words.
                They are read when the kernel runs, and must live until it has; in a graph, as long as that.
                Destinations must be distinct. A status word gains `specialise.NON_FINITE`
                or `specialise.OUT_OF_RANGE` and loses nothing: clear it before it is used again. A slot that is
                0 or past the end moves nothing, so there may be padding.

        Raises:
            TensorError: `slots` has another shape or type, is on another device than the pools or larger than its
                storage, or a tensor of the pools is no longer where it was.
        """
        self._launch("store", slots)

    def enqueue_load(self, slots: torch.Tensor) -> None:
        """Launches a load; `slots` as in `enqueue_store`, with checkpoint slots first.

        Raises:
            TensorError: as `enqueue_store`.
        """
        self._launch("load", slots)

    def _launch(self, direction: Direction, slots: torch.Tensor) -> None:
        if slots.dtype != torch.int32 or slots.ndim != 2 or len(slots) != 3 or not slots.is_contiguous():
            raise TensorError(
                f"slots must be contiguous int32 (3, pairs), got {slots.dtype} {tuple(slots.shape)}"
            )
        if slots.device != self._where:
            raise TensorError(f"slots must be on {self._where} with the pools, got {slots.device}")
        needed = (slots.storage_offset() + slots.numel()) * slots.element_size()
        if slots.is_neg() or slots.untyped_storage().nbytes() < needed:
            raise TensorError(
                f"slots must be in their storage, {needed} bytes, and not a view that negates it"
            )
        self._held.check()
        pairs = slots.shape[1]
        if not pairs:
            return
        # NumPy takes 27 us to copy such a struct, and a microsecond to look at bytes as one.
        packed = bytearray(self._packed[direction])
        CHANGING.pack_into(packed, 0, slots.data_ptr(), pairs)
        arguments = np.frombuffer(packed, dtype=self._struct)
        grid = (self._units * pairs, self._layers)
        self._device.launch(self._program, direction, grid, self._threads, arguments)

    def _pack(self, direction: Direction, blocks: Sequence[int]) -> bytes:
        """The arguments of every launch in a direction, without its pairs; `blocks` are those of each window."""

        def ends(active: _Memory, checkpoint: _Memory) -> tuple[_Memory, _Memory]:
            return (active, checkpoint) if direction == "store" else (checkpoint, active)

        arguments = np.zeros(1, dtype=self._struct)
        source, target = ends(self._active, self._checkpoint)
        arguments["source"], arguments["target"] = source.record, target.record
        arguments["source_slots"], arguments["target_slots"] = source.slots, target.slots
        arguments["state_blocks"], arguments["units"] = self._state_blocks, self._units
        if self._scale is not None:
            arguments["scale"] = self._scale.record
        for i, window in enumerate(self._windows):
            source, target = ends(window.active, window.checkpoint)
            vectors = window.nbytes // self._program["WINDOW_VECTOR"]
            sizes = (vectors, blocks[i], window.width, window.exponent)
            arguments["windows"][0, i] = (source.record, target.record, *sizes)
        return arguments.tobytes()


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


def build(active: ActivePool, checkpoints: CheckpointPool, *, group: int | None = None) -> CudaCodec:
    """The codec for two pools, for an engine that captures its batches; a `Transfer` makes its own.

    Args:
        active: states of running sequences.
        checkpoints: encoded states.
        group: of layers, in the order of `StateSpec.groups`; a state of several groups needs a batch of each.

    Raises:
        TensorError: the pools differ in spec or device, or are not on cuda.
        ConfigError: there are several groups and none is named, or there is no such group.
        ModuleNotFoundError: CuPy is missing.
        MisuseError: a graph is being captured.
    """
    require_alike(active, checkpoints)
    if active.device.type != "cuda":
        raise TensorError(f"the pools must be on cuda, they are on {active.device}")
    return describe(active, checkpoints, _device(active.device.index), group=group)


def describe(
    active: ActivePool, checkpoints: CheckpointPool, device: Device, *, group: int | None = None
) -> CudaCodec:
    """The codec for one group of layers of two pools of one spec on `device`."""
    return CudaCodec(**vars(part(active, checkpoints, group)), device=device)
