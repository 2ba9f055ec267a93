"""Moves states between an active and a checkpoint pool, with the backend that fits their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from radixstate import _native
from radixstate.errors import TensorError

if TYPE_CHECKING:
    from radixstate.states import ActivePool, CheckpointPool


class Codec(Protocol):
    """What a backend does for one pair of pools."""

    def store(self, pairs: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Encodes (active slot, checkpoint slot) pairs; for each, whether its state reloads finite.

        On a device the result is unread: the first access waits for the store.
        """
        ...

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Decodes (checkpoint slot, active slot) pairs."""
        ...


def require_alike(active: ActivePool, checkpoints: CheckpointPool) -> None:
    """Raises TensorError if two pools differ in spec or device."""
    if active.spec != checkpoints.spec:
        raise TensorError(f"the active pool holds {active.spec}, the checkpoint pool {checkpoints.spec}")
    if active.device != checkpoints.device:
        raise TensorError(
            f"the active pool is on {active.device}, the checkpoint pool on {checkpoints.device}"
        )


def build(active: ActivePool, checkpoints: CheckpointPool) -> Codec:
    """The codec for two pools.

    Raises:
        TensorError: the pools differ in spec or device, or no backend knows their device.
        ModuleNotFoundError: the pools are on cuda, and CuPy is missing.
    """
    require_alike(active, checkpoints)
    if active.device.type == "cuda":
        from radixstate import cuda

        return cuda.build(active, checkpoints)
    if active.device.type != "cpu":
        raise TensorError(f"no codec for pools on {active.device}: states are moved on cpu and cuda")
    conv = zip(active.conv_rows, checkpoints.conv_rows, strict=True)
    return _native.CodecPlan(
        active=list(active.state_rows.layers),
        checkpoint=list(checkpoints.state_rows.layers),
        scale=list(checkpoints.scale_rows.layers) if checkpoints.scale_rows else None,
        conv=[(list(source.layers), list(kept.layers)) for source, kept in conv],
        layout=active.spec.layout,
        format=checkpoints.format,
    )
