"""Every byte of a pool by slot, and what the codec's contract says should be there."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from radixstate.errors import ConfigError
from radixstate.reference import codec
from radixstate.states import ActivePool, CheckpointPool, Format, StateSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_POISON = 0xFF  # a NaN in every float type, and no encoded state: a scale of NaN is never stored


class Memory:
    """The tensors of a pool as rows of bytes, one row for each slot. For pools on the CPU.

    Attributes:
        slots: 1..=slots of the pool.
        poison: a row of NaNs, which a slot holds while nobody owns it.
    """

    def __init__(self, pool: ActivePool | CheckpointPool) -> None:
        """Views the tensors of `pool`.

        Raises:
            ConfigError: the pool is not on the CPU.
        """
        if pool.device.type != "cpu":
            raise ConfigError(
                f"the bytes of a pool are watched on the cpu only, this one is on {pool.device}"
            )
        self._parts = [_as_bytes(layer) for rows in pool.rows.values() for layer in rows.layers]
        self.slots = range(1, pool.slots + 1)
        self.poison = bytes([_POISON]) * sum(part.shape[1] for part in self._parts)

    def read(self, slot: int) -> bytes:
        """All bytes of a slot."""
        return b"".join(part[slot].tobytes() for part in self._parts)

    def read_all(self) -> dict[int, bytes]:
        """All bytes of every slot."""
        return {slot: self.read(slot) for slot in self.slots}

    def write(self, slot: int, row: bytes) -> None:
        """Overwrites a slot."""
        start = 0
        for part in self._parts:
            width = part.shape[1]
            part[slot] = np.frombuffer(row, np.uint8, width, start)
            start += width


def _as_bytes(layer: torch.Tensor) -> Bytes:
    """A view (slots + 1, bytes of a slot) of one layer; a slot is contiguous."""
    view: Bytes = layer.view(torch.uint8).flatten(1).numpy()
    return view


class Contract:
    """What storing and loading a row should give, worked out by the reference codec in torch."""

    def __init__(self, spec: StateSpec, format: Format) -> None:
        """Rows of pools of `spec`, with checkpoints in `format`."""
        self._active, self._kept = ActivePool(spec, 1), CheckpointPool(spec, 1, format=format)
        self._active_row, self._kept_row = Memory(self._active), Memory(self._kept)
        self._k_axis: Literal[-1, -2] = -1 if spec.layout == "k_last" else -2
        self.empty = bytes(len(self._active_row.poison))

    def encode(self, row: bytes) -> bytes | None:
        """The checkpoint of an active row; none if it would not reload finite."""
        self._active_row.write(1, row)
        state, kept = self._active.state(1), self._kept.state(1)
        if self._kept.format == "int8":
            encoded, scale = codec.encode(state, k_axis=self._k_axis)
            kept.copy_(encoded)
            self._kept.scale(1).copy_(scale)
        else:
            kept.copy_(state)
        self._copy_windows(self._active, self._kept)
        return self._kept_row.read(1) if self._load().isfinite().all() else None

    def decode(self, row: bytes) -> bytes:
        """The active row that a checkpoint stands for."""
        self._kept_row.write(1, row)
        self._active.state(1).copy_(self._load())
        self._copy_windows(self._kept, self._active)
        return self._active_row.read(1)

    def _load(self) -> torch.Tensor:
        kept, dtype = self._kept.state(1), self._active.state(1).dtype
        if self._kept.format != "int8":
            return kept.to(dtype)
        return codec.decode(kept, self._kept.scale(1), k_axis=self._k_axis, dtype=dtype)

    @staticmethod
    def _copy_windows(source: ActivePool | CheckpointPool, target: ActivePool | CheckpointPool) -> None:
        """Windows keep their own type: no bit changes, NaNs included."""
        for given, taken in zip(source.windows, target.windows, strict=True):
            for layer, other in zip(given.layers, taken.layers, strict=True):
                _as_bytes(other)[1] = _as_bytes(layer)[1]
