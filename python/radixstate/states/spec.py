"""What a model keeps per sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, get_args

from radixstate.errors import ConfigError
from radixstate.states.formats import Format, Tensors, require_format, tensors_of
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

    Layers of one shape are a group. Most models have one, and the attributes describe it; where shapes differ,
    they describe the first group, and `more` the others. Layers that keep convolution windows and no matrix are
    made by `of_windows`.

    Attributes:
        layers: recurrent layers; attention layers do not count.
        heads: state heads per layer (value heads, where keys have fewer).
        d_k: k-channels of a head; each gets a scale of its own in int8.
        d_v: elements of a k-channel.
        dtype: `bfloat16`, `float16` or `float32`.
        layout: order of the last two axes.
        conv: convolution windows that belong to the state.
        more: further groups of layers, each without `more` of its own.
    """

    layers: int
    heads: int
    d_k: int
    d_v: int
    dtype: str = "bfloat16"
    layout: Layout
    conv: tuple[ConvSpec, ...] = ()
    more: tuple[StateSpec, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1, an unknown type or layout, or groups within groups."""
        without = ("heads", "d_k", "d_v") if self.windows_only else ()
        for name in ("layers", "heads", "d_k", "d_v"):
            if getattr(self, name) < 1 and name not in without:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        _require_dtype("state", self.dtype)
        if self.layout not in get_args(Layout):
            raise ConfigError(f"layout must be one of {', '.join(get_args(Layout))}, got {self.layout!r}")
        for number, group in enumerate(self.more, 1):
            if group.more:
                raise ConfigError(
                    f"group {number} has {len(group.more)} groups of its own: put all into one list"
                )

    @classmethod
    def of_windows(cls, *, layers: int, conv: tuple[ConvSpec, ...], more: tuple[StateSpec, ...] = ()) -> Self:
        """Layers that keep convolution windows only, such as the short convolutions of LFM2.

        Every format keeps the windows bit for bit. The first one is looked at as a matrix is elsewhere: where it
        is not finite, nothing is stored.

        Args:
            layers: how many there are.
            conv: the windows of each, at least one.
            more: as the attribute.

        Raises:
            ConfigError: there is no layer or no window.
        """
        if not conv:
            raise ConfigError("layers without a matrix need at least 1 conv window, got 0")
        return cls(
            layers=layers, heads=0, d_k=0, d_v=0, dtype=conv[0].dtype, layout="v_last", conv=conv, more=more
        )

    @classmethod
    def from_config(cls, config: Any, *, dtype: str | None = None, tensor_parallel: int = 1) -> Self:
        """The spec of a transformers model, in the shapes of transformers' own cache.

        Known are Qwen3-Next, Qwen3.5 (dense and MoE), OlmoHybrid, Kimi Linear, Mamba2, NemotronH, FalconH1,
        GraniteMoeHybrid, Bamba, Zamba2 and LFM2 (dense and MoE). Their recurrent states are float32 whatever the
        model's type; the conv window has the model's type and as many columns as the kernel.

        With `tensor_parallel` it is what one rank keeps where heads are divided among the ranks, as vLLM and sglang
        do. The conv window has the channels of that rank's heads: keys are divided like values, and groups of B and
        C (Mamba2) are divided where there are enough; where there are fewer than ranks, each rank has the one that
        its heads read. An engine that keeps a column less, or has the axes the other way round, needs a spec of its
        own.

        Args:
            config: a transformers config; of a multimodal one the text part is taken.
            dtype: the model's type, when the config does not name it.
            tensor_parallel: ranks among which heads and channels are divided.

        Raises:
            ConfigError: the model is not known, has no recurrent layer, its type is not given, or its heads, groups
                or channels cannot be divided among the ranks.
        """
        text = getattr(config, "text_config", config)
        sizes = read_sizes(text, tensor_parallel)
        named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
        if named is None:
            raise ConfigError(f"the {text.model_type} config names no dtype: pass dtype=, the model's type")
        window = ConvSpec((sizes.channels, sizes.kernel), str(named).removeprefix("torch."))
        layers = sum(kind in sizes.kinds for kind in text.layer_types)
        if not sizes.heads:
            return cls.of_windows(layers=layers, conv=(window,))
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
    def groups(self) -> tuple[StateSpec, ...]:
        """All groups of layers, each as a spec with that group alone."""
        return (replace(self, more=()), *self.more) if self.more else (self,)

    @property
    def windows_only(self) -> bool:
        """Whether layers of the first group keep convolution windows and no matrix."""
        return bool(self.conv) and self.heads == self.d_k == self.d_v == 0

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one head's state: (d_v, d_k) or (d_k, d_v), by layout."""
        return (self.d_v, self.d_k) if self.layout == "k_last" else (self.d_k, self.d_v)

    def tensors(self, format: Format = "native") -> Tensors:
        """What one layer and slot of a checkpoint pool has, by name; of an active pool with `native`.

        The state's tensors are those of the format; window `i` is `conv.i` in every pool. Names of the second
        group begin with `1.`, those of the third with `2.`, and so on.

        Raises:
            ConfigError: the format is unknown.
        """
        return {
            group_prefix(number) + name: tensor
            for number, group in enumerate(self.groups)
            for name, tensor in group._tensors(format).items()
        }

    def _tensors(self, format: Format) -> Tensors:
        """Those of the first group."""
        require_format(format)
        windows: Tensors = {f"conv.{i}": window for i, window in enumerate(self.conv)}
        return windows if self.windows_only else tensors_of(self, format) | windows

    def slot_bytes(self, format: Format = "native") -> int:
        """Bytes of one slot of a checkpoint pool; of an active pool with `native`.

        Raises:
            ConfigError: the format is unknown.
        """
        return sum(
            group.layers * tensor.nbytes
            for group in self.groups
            for tensor in group._tensors(format).values()
        )

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's convolution windows, all layers."""
        return sum(group.layers * window.nbytes for group in self.groups for window in group.conv)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers, at its own type."""
        return self.slot_bytes("native") - self.conv_bytes


def group_prefix(number: int) -> str:
    """What the names of a group's tensors begin with: nothing in the first group."""
    return f"{number}." if number else ""


def _require_dtype(what: str, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(f"{what}: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
