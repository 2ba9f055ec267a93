"""Moves states between an active and a checkpoint pool, with the codec that fits their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, overload, runtime_checkable

from radixstate import _native
from radixstate.errors import TensorError
from radixstate.indices import numbers, require_pairs
from radixstate.states.groups import parts
from radixstate.states.pools import require_alike

if TYPE_CHECKING:
    import torch

    from radixstate.states import ActivePool, CheckpointPool
    from radixstate.states.groups import Part

Pairs = Iterable[tuple[int, int]]
"""(source slot, destination slot) of each copy."""


class Codec(Protocol):
    """What a device does for two pools."""

    def store(self, pairs: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """See `Transfer.store`."""
        ...

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Transfer.load`."""
        ...

    def fill(self, source: int | None, slot: int) -> None:
        """See `Transfer.fill`."""
        ...


@runtime_checkable
class IndexedCodec(Codec, Protocol):
    """A codec to which tensors of its device can name the slots."""

    def store_at(self, sources: torch.Tensor, targets: torch.Tensor) -> Sequence[bool]:
        """See `Transfer.store_at`."""
        ...

    def load_at(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `Transfer.load_at`."""
        ...


class Transfer:
    """The way between two pools, made once.

    Attributes:
        active: states of running sequences.
        checkpoints: encoded states of cached prefixes.
        codec: what moves them.
    """

    def __init__(self, active: ActivePool, checkpoints: CheckpointPool) -> None:
        """Describes the pools to a codec. On cuda that compiles the kernels and waits for the device.

        Raises:
            TensorError: the pools differ in spec or device, no codec knows their device, or their memory
                overlaps.
            ModuleNotFoundError: the pools are on cuda, and CuPy is missing.
            MisuseError: a CUDA graph is being captured.
        """
        require_alike(active, checkpoints)
        self.active = active
        self.checkpoints = checkpoints
        self.codec = codec(active, checkpoints)

    def store(self, pairs: Pairs) -> Sequence[bool]:
        """Encodes active slots into checkpoint slots, all layers and windows of all pairs at once.

        Args:
            pairs: (active slot, checkpoint slot) each.

        Returns:
            For each pair whether the state reloads finite, its windows included; one that does not must not become
            a checkpoint.
            On cuda nothing has waited for the store when this returns, and the first access does.

        Raises:
            SlotError: a slot is not in its pool, or two pairs write the same one; nothing was written.
            TensorError: a tensor of the pools is no longer where it was; nothing was written.
            MisuseError: a CUDA graph is being captured: `radixstate.cuda.build(...).batch` is for that.
        """
        return self.codec.store(list(pairs))

    def load(self, pairs: Pairs) -> None:
        """Decodes checkpoint slots into active slots; `pairs` are (checkpoint slot, active slot) each.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        self.codec.load(list(pairs))

    def fill(self, source: int | None, slot: int) -> None:
        """Makes one active slot hold a checkpoint slot, or the empty state if that is None.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`, for a load.
        """
        self.codec.fill(source, slot)

    def store_at(self, sources: torch.Tensor, targets: torch.Tensor) -> Sequence[bool]:
        """As `store`, for slots that are known to the device alone: on cuda no number is copied to the host.

        Args:
            sources: active slots, int64 (n,) on the device of the pools.
            targets: checkpoint slots, the same; no two are equal.

        Returns:
            As `store`. On cuda a slot that is not in its pool moves nothing, and the verdict of its pair is False.

        Raises:
            SlotError: on the CPU, as `store`.
            TensorError: the tensors have other types, shapes or devices, or as `store`.
            MisuseError: as `store`.
        """
        require_pairs(sources, targets, self.active.device)
        return _store_at(self.codec, sources, targets)

    def load_at(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """As `load`, for slots that are known to the device alone.

        Args:
            sources: checkpoint slots, int64 (n,) on the device of the pools.
            targets: active slots, the same; no two are equal. On cuda a slot that is not in its pool moves nothing.

        Raises:
            SlotError, TensorError, MisuseError: as `store_at`.
        """
        require_pairs(sources, targets, self.active.device)
        _load_at(self.codec, sources, targets)


def _store_at(codec: Codec, sources: torch.Tensor, targets: torch.Tensor) -> Sequence[bool]:
    """On the CPU the numbers are read where they are."""
    if isinstance(codec, IndexedCodec):
        return codec.store_at(sources, targets)
    return codec.store(list(zip(numbers(sources), numbers(targets), strict=True)))


def _load_at(codec: Codec, sources: torch.Tensor, targets: torch.Tensor) -> None:
    if isinstance(codec, IndexedCodec):
        codec.load_at(sources, targets)
    else:
        codec.load(list(zip(numbers(sources), numbers(targets), strict=True)))


class GroupCodecs:
    """A codec for each group of layers; a state is moved by all of them."""

    def __init__(self, groups: Sequence[Part], codecs: Sequence[Codec]) -> None:
        """Takes groups of one pair of pools and their codecs, in order.

        Raises:
            TensorError: memory of two groups overlaps.
        """
        self._held = _native.HeldTensors.of_groups([group.given for group in groups])
        self._codecs = codecs

    def store(self, pairs: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """See `Transfer.store`. A state is finite if all its groups are."""
        self._held.check()  # of all groups first, so that none is written when another has moved
        return self._all_of([codec.store(pairs) for codec in self._codecs])

    @staticmethod
    def _all_of(stored: Sequence[Sequence[bool]]) -> Sequence[bool]:
        if all(isinstance(verdicts, list) for verdicts in stored):
            return [all(of_pair) for of_pair in zip(*stored, strict=True)]
        return AllOf(stored)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Transfer.load`."""
        self._held.check()
        for codec in self._codecs:
            codec.load(pairs)

    def store_at(self, sources: torch.Tensor, targets: torch.Tensor) -> Sequence[bool]:
        """See `Transfer.store_at`."""
        self._held.check()
        return self._all_of([_store_at(codec, sources, targets) for codec in self._codecs])

    def load_at(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `Transfer.load_at`."""
        self._held.check()
        for codec in self._codecs:
            _load_at(codec, sources, targets)

    def fill(self, source: int | None, slot: int) -> None:
        """See `Transfer.fill`."""
        self._held.check()
        for codec in self._codecs:
            codec.fill(source, slot)


class AllOf(Sequence[bool]):
    """Verdicts on the groups of each state, read when they are asked for: whether all are finite."""

    def __init__(self, groups: Sequence[Sequence[bool]]) -> None:
        """Takes at least one group; all have as many pairs."""
        self._groups = groups

    def done(self) -> bool:
        """Whether all stores have run; waits for nothing."""
        # What is no list is a device's answer, which says when it is there.
        return all(isinstance(group, list) or group.done() for group in self._groups)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Number of pairs; waits for nothing."""
        return len(self._groups[0])

    @overload
    def __getitem__(self, index: int) -> bool: ...
    @overload
    def __getitem__(self, index: slice) -> list[bool]: ...
    def __getitem__(self, index: int | slice) -> bool | list[bool]:
        """The verdict on one pair; waits for the store."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return all(verdicts[index] for verdicts in self._groups)


def codec(active: ActivePool, checkpoints: CheckpointPool) -> Codec:
    """The codec for two pools of one spec on one device."""
    groups = parts(active, checkpoints)
    if active.device.type == "cuda":
        # It imports torch, which importing the package must not.
        from radixstate import cuda

        return join(groups, [cuda.build(active, checkpoints, group=number) for number in range(len(groups))])
    if active.device.type != "cpu":
        raise TensorError(f"no codec for pools on {active.device}: states are moved on cpu and cuda")
    return join(groups, [_native.CodecPlan(**group.given) for group in groups])


def join(groups: Sequence[Part], codecs: Sequence[Codec]) -> Codec:
    """One codec of those of each group of layers.

    Raises:
        TensorError: memory of two groups overlaps.
    """
    return codecs[0] if len(codecs) == 1 else GroupCodecs(groups, codecs)
