"""Slots that a tensor names. On a device nobody reads them back: they go from tensor to kernel."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, TypeAlias

from radixstate.errors import TensorError

if TYPE_CHECKING:
    import torch

    Slot: TypeAlias = int | torch.Tensor
    """A slot, or an int64 tensor of one element, on the device of the pools, that names it."""


def require_pairs(sources: torch.Tensor, targets: torch.Tensor, device: torch.device) -> None:
    """Raises TensorError unless both are int64 (n,) tensors of one length on `device`."""
    for indices in (sources, targets):
        _require(indices, device)
    if sources.shape != targets.shape or sources.ndim != 1:
        raise TensorError(
            f"slots must be two tensors (n,) of one length, got {tuple(sources.shape)} and {tuple(targets.shape)}"
        )


def as_slot(slot: Slot, device: torch.device) -> Slot:
    """The slot that is named: as a number, unless it is in a tensor of a device that would have to be waited for.

    Raises:
        TensorError: a tensor is not int64 of one element, or not on `device`.
    """
    if isinstance(slot, int) or not hasattr(slot, "device"):
        return index(slot)
    _require(slot, device)
    if slot.numel() != 1:
        raise TensorError(f"one slot is wanted, got a tensor {tuple(slot.shape)}")
    return numbers(slot.reshape(1))[0] if device.type == "cpu" else slot.reshape(1)


def numbers(indices: torch.Tensor) -> list[int]:
    """The numbers in a tensor of the CPU, read in place."""
    import numpy as np

    read: list[int] = np.from_dlpack(indices).tolist()
    return read


def _require(indices: torch.Tensor, device: torch.device) -> None:
    import torch

    if indices.dtype != torch.int64 or indices.device != device:
        raise TensorError(f"slots must be int64 on {device}, got {indices.dtype} on {indices.device}")
