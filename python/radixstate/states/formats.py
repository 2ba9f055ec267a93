"""Which tensors hold the recurrent state of a slot: one function for each format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from radixstate.errors import ConfigError
from radixstate.states.rows import TensorSpec

Format = Literal["int8", "bf16", "native"]
"""How checkpoints are kept: int8 with one scale per k-channel, rounded once to bfloat16, or bit for bit."""

Tensors = dict[str, TensorSpec]
"""By name: `state` has the rows of every head's matrix, `scale` the factors to read it with."""


class Heads(Protocol):
    """What a format reads of a `StateSpec`."""

    @property
    def heads(self) -> int:
        """State heads of a layer."""
        ...

    @property
    def d_k(self) -> int:
        """Channels of a head."""
        ...

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one head's state."""
        ...

    @property
    def dtype(self) -> str:
        """Type of a running state."""
        ...


def int8(spec: Heads) -> Tensors:
    """One byte per element and one scale per k-channel. In float16 small scales would vanish: those are float32."""
    return {
        "state": TensorSpec((spec.heads, *spec.matrix), "int8"),
        "scale": TensorSpec((spec.heads, spec.d_k), "bfloat16" if spec.dtype == "bfloat16" else "float32"),
    }


def bf16(spec: Heads) -> Tensors:
    """Every element rounded once."""
    return {"state": TensorSpec((spec.heads, *spec.matrix), "bfloat16")}


def native(spec: Heads) -> Tensors:
    """The state's own type; also how running states are kept."""
    return {"state": TensorSpec((spec.heads, *spec.matrix), spec.dtype)}


FORMATS: dict[Format, Callable[[Heads], Tensors]] = {"int8": int8, "bf16": bf16, "native": native}


def tensors_of(spec: Heads, format: Format) -> Tensors:
    """The tensors of a slot in a format.

    Raises:
        ConfigError: the format is unknown.
    """
    require_format(format)
    return FORMATS[format](spec)


def require_format(format: Format) -> None:
    """Raises ConfigError if the format is unknown."""
    if format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
