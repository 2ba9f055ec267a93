"""What a model keeps per sequence, and the two pools of tensors that hold it by slot.

Row 0 of every tensor is the padding sink: it exists, and nobody ever owns it. Slots are 1..=slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Self, get_args
from weakref import WeakKeyDictionary

from radixstate.errors import ConfigError, SlotError, TensorError

if TYPE_CHECKING:
    import torch

    from radixstate.codec import Codec

Layout = Literal["k_last", "v_last"]
"""`k_last`: a head's matrix is (d_v, d_k), as in sglang and vLLM. `v_last`: (d_k, d_v), as in transformers."""

Format = Literal["int8", "bf16", "native"]
"""How checkpoints are kept: int8 with one scale per k-channel, rounded once to bfloat16, or bit for bit."""

Pairs = Iterable[tuple[int, int]]
"""(source slot, destination slot) of each copy."""

_STATE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SCALE_DTYPE = {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32"}


@dataclass(frozen=True)
class ConvSpec:
    """One convolution window of a layer, copied as it is.

    Attributes:
        shape: of one layer and slot, usually (channels, columns).
        dtype: name of a torch type.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty shape or an unknown type."""
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a conv window needs at least one element, got shape {self.shape}")
        _require_dtype("conv window", self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one layer and slot."""
        return prod(self.shape) * _STATE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The recurrent state of one sequence: what an active slot holds for all layers.

    Attributes:
        layers: recurrent layers; attention layers do not count.
        heads: state heads per layer (value heads, where keys have fewer).
        d_k: k-channels of a head; each gets a scale of its own in int8.
        d_v: elements of a k-channel.
        dtype: `bfloat16`, `float16` or `float32`.
        layout: order of the last two axes.
        conv: convolution windows that belong to the state.
    """

    layers: int
    heads: int
    d_k: int
    d_v: int
    dtype: str = "bfloat16"
    layout: Layout
    conv: tuple[ConvSpec, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1, an unknown type or an unknown layout."""
        for name in ("layers", "heads", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        _require_dtype("state", self.dtype)
        if self.layout not in get_args(Layout):
            raise ConfigError(f"layout must be one of {', '.join(get_args(Layout))}, got {self.layout!r}")

    @classmethod
    def from_config(cls, config: Any, *, dtype: str | None = None) -> Self:
        """The spec of a transformers model, in the shapes of transformers' own cache.

        Known are Qwen3-Next, Qwen3.5 (dense and MoE), OlmoHybrid, Kimi Linear and Mamba2. Their recurrent states
        are float32 whatever the model's type; the conv window has the model's type and as many columns as the kernel.

        Args:
            config: a transformers config; of a multimodal one the text part is taken.
            dtype: the model's type, when the config does not name it.

        Raises:
            ConfigError: the model is not known, has no recurrent layer, or its type is not given.
        """
        text = getattr(config, "text_config", config)
        read = _READERS.get(text.model_type)
        if read is None:
            raise ConfigError(
                f"no preset for model type {text.model_type!r}, only for {', '.join(_READERS)}: "
                "give the shapes to StateSpec itself"
            )
        named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
        if named is None:
            raise ConfigError(f"the {text.model_type} config names no dtype: pass dtype=, the model's type")
        heads = read(text)
        window = ConvSpec((heads.channels, heads.kernel), str(named).removeprefix("torch."))
        layers = list(text.layer_types).count("linear_attention")
        return cls(
            layers=layers,
            heads=heads.heads,
            d_k=heads.d_k,
            d_v=heads.d_v,
            dtype="float32",
            layout=heads.layout,
            conv=(window,),
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one head's state: (d_v, d_k) or (d_k, d_v), by layout."""
        return (self.d_v, self.d_k) if self.layout == "k_last" else (self.d_k, self.d_v)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers, at its own type."""
        return self._elements * _STATE_BYTES[self.dtype]

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's convolution windows, all layers."""
        return self.layers * sum(window.nbytes for window in self.conv)

    @property
    def scale_dtype(self) -> str:
        """Type of the int8 scales: the state's own, but float32 for float16, in which small scales vanish."""
        return _SCALE_DTYPE[self.dtype]

    def slot_bytes(self, format: Format = "native") -> int:
        """Bytes of one slot of a checkpoint pool; of an active pool with `native`."""
        _require_format(format)
        if format == "int8":
            scales = self.layers * self.heads * self.d_k
            return self._elements + scales * _STATE_BYTES[self.scale_dtype] + self.conv_bytes
        width = _STATE_BYTES["bfloat16" if format == "bf16" else self.dtype]
        return self._elements * width + self.conv_bytes

    @property
    def _elements(self) -> int:
        return self.layers * self.heads * self.d_k * self.d_v


@dataclass(frozen=True)
class _Heads:
    heads: int
    d_k: int
    d_v: int
    layout: Layout
    channels: int
    kernel: int


def _gated_delta_net(config: Any) -> _Heads:
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * d_k, config.linear_num_value_heads * d_v
    kernel = config.linear_conv_kernel_dim
    return _Heads(config.linear_num_value_heads, d_k, d_v, "v_last", 2 * keys + values, kernel)


def _kimi_delta_attention(config: Any) -> _Heads:
    heads, d = config.linear_num_heads, config.linear_head_dim
    return _Heads(heads, d, d, "v_last", 3 * heads * d, config.linear_conv_kernel_dim)


def _mamba2(config: Any) -> _Heads:
    d_k, d_v = config.state_size, config.head_dim
    channels = config.num_heads * d_v + 2 * config.n_groups * d_k
    return _Heads(config.num_heads, d_k, d_v, "k_last", channels, config.conv_kernel)


_READERS: dict[str, Callable[[Any], _Heads]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
    "mamba2": _mamba2,
}


class ActivePool:
    """Full-precision states of running sequences, by slot.

    Either the pool allocates its tensors, or `bind` takes an engine's.
    """

    def __init__(self, spec: StateSpec, slots: int, *, device: str | torch.device = "cpu") -> None:
        """Allocates zeroed tensors: state (layers, slots + 1, heads, *matrix), conv[i] (layers, slots + 1, *shape).

        Raises:
            ConfigError: `slots` is below 1.
        """
        self._hold(spec, slots, _zeros(spec, slots, spec.dtype, device), _conv_zeros(spec, slots, device))

    @classmethod
    def bind(
        cls,
        spec: StateSpec,
        *,
        state: torch.Tensor | Sequence[torch.Tensor],
        conv: Sequence[torch.Tensor | Sequence[torch.Tensor]] = (),
    ) -> Self:
        """A pool over an engine's tensors, which are used in place.

        Args:
            spec: what a slot holds.
            state: (layers, slots + 1, heads, *matrix), or one tensor (slots + 1, heads, *matrix) per layer.
            conv: for each window of the spec (layers, slots + 1, *shape), or one tensor per layer.

        Raises:
            TensorError: a shape, type, device or stride is not what `spec` says; the message has both.
        """
        rows = (state if hasattr(state, "shape") else state[0]).shape
        slots = rows[1 if hasattr(state, "shape") else 0] - 1 if len(rows) > 1 else 0
        if len(conv) != len(spec.conv):
            raise TensorError(f"{len(conv)} conv tensors given, the spec has {len(spec.conv)} windows")
        layers = _per_layer("state", state, spec.layers, (slots + 1, spec.heads, *spec.matrix), spec.dtype)
        windows = [
            _per_layer(f"conv[{i}]", given, spec.layers, (slots + 1, *window.shape), window.dtype)
            for i, (given, window) in enumerate(zip(conv, spec.conv, strict=True))
        ]
        devices = sorted({str(tensor.device) for tensors in (layers, *windows) for tensor in tensors})
        if len(devices) > 1:
            raise TensorError(f"state and conv must share one device, got {', '.join(devices)}")
        pool = cls.__new__(cls)
        pool._hold(spec, slots, state if hasattr(state, "shape") else layers, conv)
        return pool
