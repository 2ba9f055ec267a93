"""Tensors by slot. Row 0 is the padding sink: it exists, and nobody ever owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Self

from radixstate.errors import TensorError
from radixstate.memory import zeros

if TYPE_CHECKING:
    import torch

    Device = str | torch.device
    Given = torch.Tensor | Sequence[torch.Tensor]

WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}
"""Bytes of an element."""


@dataclass(frozen=True)
class TensorSpec:
    """What one layer and slot has of a tensor.

    Attributes:
        shape: without layers and slots.
        dtype: name of a torch type.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one layer and slot."""
        return prod(self.shape) * WIDTH[self.dtype]


@dataclass(frozen=True)
class Rows:
    """Tensors by slot: one of shape (slots + 1, *shape) for each layer.

    Attributes:
        layers: the tensors, all with the same strides.
        whole: the tensor (layers, slots + 1, *shape) they are views of, if there is one.
        inference: whether one was made under `torch.inference_mode`, where alone it can be written.
        origin: the rows whose `layers` these are in another shape, if there are any: what may move is theirs.
    """

    layers: tuple[torch.Tensor, ...]
    whole: torch.Tensor | None
    inference: bool = False
    origin: Rows | None = None

    @classmethod
    def zeros(cls, spec: TensorSpec, layers: int, slots: int, device: Device) -> Self:
        """Allocates one zeroed tensor for all layers, with a row for the padding sink. Any mode may write it."""
        import torch

        with torch.inference_mode(False):
            whole = zeros((layers, slots + 1, *spec.shape), getattr(torch, spec.dtype), device)
            return cls(whole.unbind(0), whole)

    @classmethod
    def bind(cls, name: str, given: Given, layers: int, spec: TensorSpec) -> Self:
        """Takes an engine's tensors if they are as `spec` says behind the row axis and have even strides."""
        whole = None if isinstance(given, Sequence) else given
        tensors = tuple(given)
        if len(tensors) != layers:
            raise TensorError(f"{name}: {len(tensors)} layers given, the spec has {layers}")
        for tensor in tensors:
            _require_tensor(name, tensor, like=tensors[0], spec=spec)
        return cls(tensors, whole, inference=any(tensor.is_inference() for tensor in tensors))

    @property
    def given(self) -> torch.Tensor | list[torch.Tensor]:
        """The tensor of all layers, or else one per layer: what the codecs take."""
        rows = self.origin or self
        return list(rows.layers) if rows.whole is None else rows.whole

    def flat(self) -> Self:
        """The same with a slot as a state of one head and one row: layers of (slots + 1, 1, 1, elements)."""
        layers = tuple(layer.view(layer.shape[0], 1, 1, -1) for layer in self.layers)
        return replace(self, layers=layers, origin=self)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, the padding sink's included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.layers)

    def row(self, slot: int) -> torch.Tensor:
        """A view (layers, *shape) of one slot."""
        if self.whole is None:
            raise TensorError(
                "the pool is bound to one tensor per layer: no view covers a slot of all layers"
            )
        return self.whole[:, slot]

    def fill(self, slot: int, value: float) -> None:
        """Fills one slot of all layers: by one operation where one tensor holds them."""
        for view in self._views(slot):
            self._write(view, value)

    def mark(self, slot: int) -> None:
        """Makes the first element of each layer of a slot NaN."""
        axes = self.layers[0].dim() - 1  # of a slot, which is contiguous, so that this is a view
        for view in self._views(slot):
            self._write(view.flatten(-axes)[..., 0], float("nan"))

    def _views(self, slot: int) -> list[torch.Tensor]:
        """One slot of all layers, (layers, *shape), or of each, (*shape)."""
        return [self.whole[:, slot]] if self.whole is not None else [layer[slot] for layer in self.layers]

    def _write(self, view: torch.Tensor, value: float) -> None:
        if not self.inference:
            view.fill_(value)
            return
        import torch

        with torch.inference_mode():
            view.fill_(value)


def _require_tensor(name: str, tensor: torch.Tensor, *, like: torch.Tensor, spec: TensorSpec) -> None:
    """Refuses a tensor that cannot be one layer of a pool, giving the rule and what was found."""
    found = tuple(tensor.shape)
    if found[1:] != spec.shape or found[0] < 2:
        wanted = ", ".join(map(str, spec.shape))
        raise TensorError(f"{name}: a layer must be (slots + 1, {wanted}) with at least 1 slot, got {found}")
    if str(tensor.dtype) != f"torch.{spec.dtype}":
        raise TensorError(
            f"{name}: the spec says {spec.dtype}, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if tensor.device != like.device:
        raise TensorError(f"{name}: all layers must share one device, got {like.device} and {tensor.device}")
    if tensor.shape[0] != like.shape[0]:
        raise TensorError(f"{name}: all layers must have {like.shape[0]} rows, got {tensor.shape[0]}")
    if tensor.stride() != like.stride():
        raise TensorError(
            f"{name}: all layers must have the strides of the first, {like.stride()}, got {tensor.stride()}"
        )
    if tensor.requires_grad:
        raise TensorError(f"{name}: states are written in place, but a layer requires a gradient")
    if not tensor[0].is_contiguous():
        raise TensorError(
            f"{name}: a slot must be contiguous, got shape {found} with strides {tensor.stride()}"
        )
