"""Moves states between an active and a checkpoint pool, with the codec that fits their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from radixstate import _native
from radixstate.errors import TensorError
from radixstate.states.pools import require_alike

if TYPE_CHECKING:
    from radixstate.states import ActivePool, CheckpointPool

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


class Transfer:
    """The way between two pools, made once.

    Attributes:
        active: states of running sequences.
        checkpoints: encoded states of cached prefixes.
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
        self._codec = codec(active, checkpoints)

    def store(self, pairs: Pairs) -> Sequence[bool]:
        """Encodes active slots into checkpoint slots, all layers and windows of all pairs at once.

        Args:
            pairs: (active slot, checkpoint slot) each.

        Returns:
            For each pair whether the state reloads finite; one that does not must not become a checkpoint.
            On cuda nothing has waited for the store when this returns, and the first access does.

        Raises:
            SlotError: a slot is not in its pool, or two pairs write the same one; nothing was written.
            TensorError: a tensor of the pools is no longer where it was; nothing was written.
            MisuseError: a CUDA graph is being captured: `radixstate.cuda.build(...).batch` is for that.
        """
        return self._codec.store(list(pairs))

    def load(self, pairs: Pairs) -> None:
        """Decodes checkpoint slots into active slots; `pairs` are (checkpoint slot, active slot) each.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        self._codec.load(list(pairs))


def codec(active: ActivePool, checkpoints: CheckpointPool) -> Codec:
    """The codec for two pools of one spec on one device."""
    if active.device.type == "cuda":
        # It imports torch, which importing the package must not.
        from radixstate import cuda

        return cuda.build(active, checkpoints)
    if active.device.type != "cpu":
        raise TensorError(f"no codec for pools on {active.device}: states are moved on cpu and cuda")
    scale = checkpoints.rows.get("scale")
    conv = zip(active.windows, checkpoints.windows, strict=True)
    return _native.CodecPlan(
        active=active.rows["state"].given,
        checkpoint=checkpoints.rows["state"].given,
        scale=scale.given if scale else None,
        conv=[(source.given, kept.given) for source, kept in conv],
        layout=active.spec.layout,
        format=checkpoints.format,
    )
