"""What a model keeps per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, get_args

from radixstate.errors import ConfigError
from radixstate.states.formats import Format, Tensors, tensors_of
from radixstate.states.presets import Layout, read_sizes
from radixstate.states.rows import TensorSpec

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ConvSpec(TensorSpec):
    """One convolution window of a layer, copied as it is.

    Attributes:
        shape: of one layer and slot, usually (channels, columns).
        dtype: name of a torch type.
    """

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty shape or an unknown type."""
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a conv window needs at least one element, got shape {self.shape}")
        _require_dtype("conv window", self.dtype)


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

        Known are Qwen3-Next, Qwen3.5 (dense and MoE), OlmoHybrid, Kimi Linear and Mamba2. Their recurrent
        states are float32 whatever the model's type; the conv window has the model's type and as many columns
        as the kernel.

        Args:
            config: a transformers config; of a multimodal one the text part is taken.
            dtype: the model's type, when the config does not name it.

        Raises:
            ConfigError: the model is not known, has no recurrent layer, or its type is not given.
        """
        text = getattr(config, "text_config", config)
        sizes = read_sizes(text)
        named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
        if named is None:
            raise ConfigError(f"the {text.model_type} config names no dtype: pass dtype=, the model's type")
        window = ConvSpec((sizes.channels, sizes.kernel), str(named).removeprefix("torch."))
        layers = list(text.layer_types).count("linear_attention")
        return cls(
            layers=layers,
            heads=sizes.heads,
            d_k=sizes.d_k,
            d_v=sizes.d_v,
            dtype="float32",
            layout=sizes.layout,
            conv=(window,),
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one head's state: (d_v, d_k) or (d_k, d_v), by layout."""
        return (self.d_v, self.d_k) if self.layout == "k_last" else (self.d_k, self.d_v)

    def tensors(self, format: Format = "native") -> Tensors:
        """What one layer and slot of a checkpoint pool has, by name; of an active pool with `native`.

        The state's tensors are those of the format; window `i` is `conv.i` in every pool.

        Raises:
            ConfigError: the format is unknown.
        """
        windows: Tensors = {f"conv.{i}": window for i, window in enumerate(self.conv)}
        return tensors_of(self, format) | windows

    def slot_bytes(self, format: Format = "native") -> int:
        """Bytes of one slot of a checkpoint pool; of an active pool with `native`.

        Raises:
            ConfigError: the format is unknown.
        """
        return self.layers * sum(tensor.nbytes for tensor in self.tensors(format).values())

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's convolution windows, all layers."""
        return self.layers * sum(window.nbytes for window in self.conv)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers, at its own type."""
        return self.slot_bytes("native") - self.conv_bytes


def _require_dtype(what: str, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(f"{what}: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
