"""The two pools of tensors that hold states by slot. Slots are 1..=slots; row 0 is the padding sink."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Self
from weakref import ref

from radixstate import _native
from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.states.formats import Format
from radixstate.states.rows import Rows
from radixstate.states.spec import StateSpec, group_prefix

if TYPE_CHECKING:
    import torch

    from radixstate.states.rows import Device, Given


@dataclass(frozen=True)
class Group:
    """The tensors by slot of one group of layers.

    Attributes:
        spec: of this group alone.
        state: rows of every head's matrix, where layers have one.
        scale: the factors to read them with, in a format with scales.
        windows: convolution windows, in the order of the spec.
    """

    spec: StateSpec
    state: Rows | None
    scale: Rows | None
    windows: list[Rows]


class StateTensors:
    """Tensors by slot, of one spec, on one device.

    `rows[name]` has the tensors of a name: `rows["state"].whole` is (layers, slots + 1, heads, *matrix) and
    `rows["conv.0"].whole` (layers, slots + 1, *shape), for all slots, the padding sink first. Where an engine bound
    one tensor per layer, `whole` is None and `layers` has them. `state(slot)` and `conv(i, slot)` are views of one
    slot. A second group of layers has `rows["1.state"]`, `rows["1.conv.0"]`, and so on.

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
        first = next(iter(rows.values())).layers[0]
        self.spec = spec
        self.slots = first.shape[0] - 1
        self.device = first.device
        self.rows = rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding sinks included."""
        return sum(rows.nbytes for rows in self.rows.values())

    @property
    def groups(self) -> list[Group]:
        """The tensors of each group of layers."""
        return [self._group(number, spec) for number, spec in enumerate(self.spec.groups)]

    @property
    def windows(self) -> list[Rows]:
        """The convolution windows of the first group of layers, in the order of the spec."""
        return self._group(0, self.spec).windows

    def _group(self, number: int, spec: StateSpec) -> Group:
        prefix = group_prefix(number)
        windows = [self.rows[f"{prefix}conv.{i}"] for i in range(len(spec.conv))]
        return Group(spec, self.rows.get(f"{prefix}state"), self.rows.get(f"{prefix}scale"), windows)

    def _require_group(self, number: int) -> Group:
        """Raises ConfigError if the spec has no such group."""
        specs = self.spec.groups
        if not 0 <= number < len(specs):
            raise ConfigError(f"group {number} is not in 0..={len(specs) - 1}")
        return self._group(number, specs[number])

    def state(self, slot: int, *, group: int = 0) -> torch.Tensor:
        """A view (layers, heads, *matrix) of the recurrent state in a slot, as it is kept here.

        Raises:
            SlotError: the pool has no such slot.
            TensorError: one tensor per layer was bound, a tensor is no longer where it was, or layers of the group
                keep no matrix.
            ConfigError: the spec has no such group.
        """
        rows = self._require_group(group).state
        if rows is None:
            raise TensorError(f"group {group} keeps conv windows and no matrix: use conv(index, slot)")
        return rows.row(self.require(slot))

    def conv(self, index: int, slot: int, *, group: int = 0) -> torch.Tensor:
        """A view (layers, *shape) of one convolution window of a slot.

        Raises:
            SlotError, TensorError, ConfigError: as `state`.
            IndexError: the group has no such window.
        """
        return self._require_group(group).windows[index].row(self.require(slot))

    def slot_index(self, slot: int) -> torch.Tensor:
        """The number of a slot as int64 (1,) on the device, for `Transfer.load_at`: a view, so nothing is copied.

        Raises:
            SlotError, TensorError: as `require`.
        """
        slot = self.require(slot)
        return self._indices[slot : slot + 1]

    @cached_property
    def _indices(self) -> torch.Tensor:
        """All rows by number."""
        import torch

        with torch.inference_mode(False):
            return torch.arange(self.slots + 1, device=self.device)

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


@dataclass(frozen=True)
class GroupTensors:
    """An engine's tensors of one group of layers, see `ActivePool.bind`.

    Attributes:
        state: (layers, slots + 1, heads, *matrix), or a list, one (slots + 1, heads, *matrix) per layer; None for
            layers without a matrix.
        conv: for each window (layers, slots + 1, *shape), or a list, one tensor per layer.
    """

    state: Given | None = None
    conv: Sequence[Given] = ()


class ActivePool(StateTensors):
    """Full-precision states of running sequences, by slot. One cache hands them out.

    Either the pool allocates its tensors, or `bind` takes an engine's. Kernels read and write the whole tensors,
    `rows["state"].whole` and `rows["conv.0"].whole`, at the row that is the slot.
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
    def bind(
        cls,
        spec: StateSpec,
        *,
        state: Given | None = None,
        conv: Sequence[Given] = (),
        more: Sequence[GroupTensors] = (),
    ) -> Self:
        """A pool over an engine's tensors, which are used in place and must not move any more.

        Resizing them, pointing them elsewhere (`data`, `set_`) and sharing them with another process
        (`share_memory_`, a queue) must come before.

        Args:
            spec: what a slot holds.
            state: (layers, slots + 1, heads, *matrix), or a list, one (slots + 1, heads, *matrix) per layer; left out
                where layers keep no matrix. The pool has it as `rows["state"]`.
            conv: for each window of the spec (layers, slots + 1, *shape), or a list, one tensor per layer. The pool
                has window `i` as `rows["conv.i"]`.
            more: the same for each group of `spec.more`.

        Raises:
            TensorError: a number of tensors, shape, type, device or stride is not as the spec says, or a tensor
                lies outside its storage or is a view that negates its memory.
        """
        given = (GroupTensors(state, conv), *more)
        if len(given) != len(spec.groups):
            raise TensorError(f"{len(given)} groups of layers given, the spec has {len(spec.groups)}")
        bound = [
            it
            for number, (group, tensors) in enumerate(zip(spec.groups, given, strict=True))
            for it in _bind_group(number, group, tensors)
        ]
        pool = cls.__new__(cls)
        StateTensors.__init__(pool, spec, {name: rows for name, _, rows in bound})
        for _, label, rows in bound:
            other = rows.layers[0]
            if (other.device, other.shape[0]) != (pool.device, pool.slots + 1):
                raise TensorError(
                    f"{label}: {other.shape[0]} rows on {other.device}, but {bound[0][1].partition(' (')[0]} has "
                    f"{pool.slots + 1} on {pool.device}"
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

    `rows[name].whole` is (layers, slots + 1, *shape), with the names, shapes and types of
    `StateSpec.tensors(format)`: `state`, in int8 `scale`, and `conv.i`.

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

    def scale(self, slot: int, *, group: int = 0) -> torch.Tensor:
        """A view (layers, heads, d_k) of the scales of a slot.

        Raises:
            SlotError, ConfigError: as `state`.
            TensorError: the format has no scales, or as `state`.
        """
        found = self._require_group(group)
        if found.scale is None:
            what = (
                f"a pool of format {self.format}" if found.state else f"group {group}, which keeps no matrix,"
            )
            raise TensorError(f"{what} has no scales")
        return found.scale.row(self.require(slot))


def require_alike(active: ActivePool, checkpoints: CheckpointPool) -> None:
    """Raises TensorError if two pools differ in spec or device."""
    if active.spec != checkpoints.spec:
        raise TensorError(f"the active pool holds {active.spec}, the checkpoint pool {checkpoints.spec}")
    if active.device != checkpoints.device:
        raise TensorError(
            f"the active pool is on {active.device}, the checkpoint pool on {checkpoints.device}"
        )


def _bind_group(number: int, spec: StateSpec, given: GroupTensors) -> Iterable[tuple[str, str, Rows]]:
    """Name in the pool, name in errors, and rows of an engine's tensors of one group."""
    prefix, label = group_prefix(number), f"group {number}: " if number else ""
    specs = spec.tensors()
    if (given.state is None) != spec.windows_only:
        rule = "keeps conv windows and no matrix" if spec.windows_only else f"has {spec.heads} heads"
        raise TensorError(f"{label}state: {'none' if given.state is None else 'one'} given, the spec {rule}")
    if len(given.conv) != len(spec.conv):
        raise TensorError(
            f"{label}{len(given.conv)} conv tensors given, the spec has {len(spec.conv)} windows"
        )
    if given.state is not None:
        named = f"{label}state ({spec.layout})"
        yield f"{prefix}state", named, Rows.bind(named, given.state, spec.layers, specs["state"])
    for i, window in enumerate(given.conv):
        named = f"{label}conv[{i}]"
        yield f"{prefix}conv.{i}", named, Rows.bind(named, window, spec.layers, specs[f"conv.{i}"])


def _zeros(spec: StateSpec, slots: int, format: Format, device: Device) -> dict[str, Rows]:
    return {
        group_prefix(number) + name: Rows.zeros(tensor, group.layers, slots, device)
        for number, group in enumerate(spec.groups)
        for name, tensor in group.tensors(format).items()
    }


def _require_slots(pool: str, slots: int) -> None:
    if slots < 1:
        raise ConfigError(f"the {pool} pool needs at least 1 slot, got {slots}")
