"""The two pools of tensors that hold states by slot. Slots are 1..=slots; row 0 is the padding sink."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Self
from weakref import ref

from radixstate import _native
from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.states.formats import Format
from radixstate.states.rows import Rows
from radixstate.states.spec import StateSpec

if TYPE_CHECKING:
    import torch

    from radixstate.states.rows import Device, Given


class StateTensors:
    """Tensors by slot, of one spec, on one device.

    Attributes:
        spec: what a slot holds.
        slots: usable ones.
        device: of all tensors.
        rows: the tensors by name, see `StateSpec.tensors`: a slot is one row of each.
    """

    def __init__(self, spec: StateSpec, rows: dict[str, Rows]) -> None:
        """Takes rows of one device and one number of slots.

        Raises:
            TensorError: a tensor lies outside its storage, or is a view that negates its memory.
        """
        self._held = _native.HeldTensors(
            (name, tensor)
            for name, each in rows.items()
            for tensor in ((each.whole,) if each.whole is not None else each.layers)
        )
        first = rows["state"].layers[0]
        self.spec = spec
        self.slots = first.shape[0] - 1
        self.device = first.device
        self.rows = rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding sinks included."""
        return sum(rows.nbytes for rows in self.rows.values())

    @property
    def windows(self) -> list[Rows]:
        """The convolution windows, in the order of the spec."""
        return [self.rows[f"conv.{i}"] for i in range(len(self.spec.conv))]

    def state(self, slot: int) -> torch.Tensor:
        """A view (layers, heads, *matrix) of the recurrent state in a slot, as it is kept here."""
        return self.rows["state"].row(self.require(slot))

    def conv(self, index: int, slot: int) -> torch.Tensor:
        """A view (layers, *shape) of one convolution window of a slot."""
        return self.windows[index].row(self.require(slot))

    def require(self, slot: int) -> int:
        """Returns `slot` as an int.

        Raises:
            SlotError: the pool has no such slot.
            TensorError: a tensor of the pool is no longer where it was.
        """
        slot = index(slot)
        self._held.check()
        if not 1 <= slot <= self.slots:
            raise SlotError(f"slot {slot} is not in 1..={self.slots} (row 0 is the padding sink)")
        return slot


class ActivePool(StateTensors):
    """Full-precision states of running sequences, by slot. One cache hands them out.

    Either the pool allocates its tensors, or `bind` takes an engine's:
    state (layers, slots + 1, heads, *matrix) and conv[i] (layers, slots + 1, *shape).
    """

    _cache: ref[object] | None = None

    def __init__(self, spec: StateSpec, slots: int, *, device: Device = "cpu") -> None:
        """Allocates zeroed tensors.

        Raises:
            ConfigError: `slots` is below 1.
        """
        _require_slots("active", slots)
        super().__init__(spec, _zeros(spec, slots, "native", device))

    def belong_to(self, cache: object) -> None:
        """Makes this the pool of a cache, until that is gone: two would give one slot to two sequences.

        Raises:
            ConfigError: the pool belongs to another cache, which somebody still refers to.
        """
        # No variable refers to the other cache: whoever keeps the exception keeps this frame.
        if self._cache is not None and self._cache() not in (None, cache):
            raise ConfigError(
                f"an active pool belongs to one cache: this one, of {self.slots} slots, has one already. "
                "Drop that and its sequences first, or give each cache a pool of its own"
            )
        self._cache = ref(cache)

    @classmethod
    def bind(cls, spec: StateSpec, *, state: Given, conv: Sequence[Given] = ()) -> Self:
        """A pool over an engine's tensors, which are used in place and must not move any more.

        Resizing them, pointing them elsewhere (`data`, `set_`) and sharing them with another process
        (`share_memory_`, a queue) must come before.

        Args:
            spec: what a slot holds.
            state: (layers, slots + 1, heads, *matrix), or a list, one (slots + 1, heads, *matrix) per layer.
            conv: for each window of the spec (layers, slots + 1, *shape), or a list, one tensor per layer.

        Raises:
            TensorError: a number of tensors, shape, type, device or stride is not as the spec says, or a tensor
                lies outside its storage or is a view that negates its memory.
        """
        if len(conv) != len(spec.conv):
            raise TensorError(f"{len(conv)} conv tensors given, the spec has {len(spec.conv)} windows")
        specs = spec.tensors()
        rows = {"state": Rows.bind(f"state ({spec.layout})", state, spec.layers, specs["state"])}
        for i, window in enumerate(conv):
            rows[f"conv.{i}"] = Rows.bind(f"conv[{i}]", window, spec.layers, specs[f"conv.{i}"])
        pool = cls.__new__(cls)
        StateTensors.__init__(pool, spec, rows)
        for i, bound in enumerate(pool.windows):
            other = bound.layers[0]
            if (other.device, other.shape[0]) != (pool.device, pool.slots + 1):
                raise TensorError(
                    f"conv[{i}]: {other.shape[0]} rows on {other.device}, but state has {pool.slots + 1} "
                    f"on {pool.device}"
                )
        return pool

    def clear(self, slot: int) -> None:
        """Zeroes a slot: the state before the first token."""
        slot = self.require(slot)
        for rows in self.rows.values():
            rows.fill(slot, 0)

    def poison(self, slot: int) -> None:
        """Fills a slot with NaN, windows too: a checkpoint of it is refused until a kernel wrote its state."""
        slot = self.require(slot)
        for rows in self.rows.values():
            rows.fill(slot, float("nan"))

    def spend(self, slot: int) -> None:
        """Makes a stored state unusable: a NaN in each layer and window, until a kernel writes the slot."""
        slot = self.require(slot)
        for rows in self.rows.values():
            rows.mark(slot)


class CheckpointPool(StateTensors):
    """Encoded states of cached prefixes, by slot.

    Tensors (layers, slots + 1, *shape) with the names, shapes and types of `StateSpec.tensors(format)`.

    Attributes:
        format: how states are kept.
    """

    def __init__(
        self, spec: StateSpec, slots: int, *, format: Format = "int8", device: Device = "cpu"
    ) -> None:
        """Allocates zeroed tensors.

        Raises:
            ConfigError: `slots` is below 1, or the format is unknown.
        """
        _require_slots("checkpoint", slots)
        super().__init__(spec, _zeros(spec, slots, format, device))
        self.format = format

    def scale(self, slot: int) -> torch.Tensor:
        """A view (layers, heads, d_k) of the scales of a slot.

        Raises:
            TensorError: the format has no scales.
        """
        if "scale" not in self.rows:
            raise TensorError(f"a pool of format {self.format} has no scales")
        return self.rows["scale"].row(self.require(slot))


def require_alike(active: ActivePool, checkpoints: CheckpointPool) -> None:
    """Raises TensorError if two pools differ in spec or device."""
    if active.spec != checkpoints.spec:
        raise TensorError(f"the active pool holds {active.spec}, the checkpoint pool {checkpoints.spec}")
    if active.device != checkpoints.device:
        raise TensorError(
            f"the active pool is on {active.device}, the checkpoint pool on {checkpoints.device}"
        )


def _zeros(spec: StateSpec, slots: int, format: Format, device: Device) -> dict[str, Rows]:
    return {
        name: Rows.zeros(tensor, spec.layers, slots, device) for name, tensor in spec.tensors(format).items()
    }


def _require_slots(pool: str, slots: int) -> None:
    if slots < 1:
        raise ConfigError(f"the {pool} pool needs at least 1 slot, got {slots}")
