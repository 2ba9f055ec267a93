"""The sizes of the recurrent layers of known transformers models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from radixstate.errors import ConfigError

Layout = Literal["k_last", "v_last"]
"""`k_last`: a head's matrix is (d_v, d_k), as in sglang and vLLM; `v_last`: (d_k, d_v), as transformers."""

_RECURRENT = ("linear_attention", "hybrid", "hybrid_sliding")
"""Layer types of transformers that keep a matrix: alone, or beside attention in the same layer."""


@dataclass(frozen=True)
class Sizes:
    """Of one recurrent layer, as one rank keeps it.

    Attributes:
        heads: of the matrix; 0 in a layer that keeps a convolution window only, as are then d_k and d_v.
        channels: of the convolution window.
        kernel: columns of the convolution window.
        kinds: layer types of transformers that keep this.
    """

    heads: int
    d_k: int
    d_v: int
    layout: Layout
    channels: int
    kernel: int
    kinds: tuple[str, ...] = _RECURRENT


@dataclass(frozen=True)
class Reader:
    """Reads sizes in a config and divides them among ranks.

    Attributes:
        config: of the text model.
        ranks: of the tensor-parallel group.
    """

    config: Any
    ranks: int

    def size(self, name: str) -> int:
        """A size that every rank has whole."""
        return int(getattr(self.config, name))

    def share(self, name: str) -> int:
        """What one rank has of a size.

        Raises:
            ConfigError: it cannot be divided.
        """
        size = self.size(name)
        if size % self.ranks:
            raise self._indivisible(name, size)
        return size // self.ranks

    def groups(self, name: str) -> int:
        """Groups of B and C on one rank. Where there are fewer than ranks, each has the one that its heads read.

        Raises:
            ConfigError: the heads of a rank would read parts of several groups.
        """
        count = self.size(name)
        if count % self.ranks and self.ranks % count:
            raise self._indivisible(name, count)
        return max(1, count // self.ranks)

    def _indivisible(self, name: str, size: int) -> ConfigError:
        return ConfigError(
            f"{self.config.model_type}: {name}={size} cannot be divided among tensor_parallel={self.ranks} ranks"
        )


def _gated_delta_net(read: Reader) -> Sizes:
    d_k, d_v = read.size("linear_key_head_dim"), read.size("linear_value_head_dim")
    heads = read.share("linear_num_value_heads")
    channels = 2 * read.share("linear_num_key_heads") * d_k + heads * d_v
    return Sizes(heads, d_k, d_v, "v_last", channels, read.size("linear_conv_kernel_dim"))


def _kimi_delta_attention(read: Reader) -> Sizes:
    heads, d = read.share("linear_num_heads"), read.size("linear_head_dim")
    return Sizes(heads, d, d, "v_last", 3 * heads * d, read.size("linear_conv_kernel_dim"))


def _mamba2(*, heads: str, d_v: str, d_k: str, groups: str, kernel: str) -> Callable[[Reader], Sizes]:
    """The reader for a Mamba2 layer whose config has these names. Its window has the channels of x, B and C."""

    def sizes(read: Reader) -> Sizes:
        columns, rows, count = read.size(d_k), read.size(d_v), read.share(heads)
        channels = count * rows + 2 * read.groups(groups) * columns
        return Sizes(count, columns, rows, "k_last", channels, read.size(kernel))

    return sizes


def _short_conv(read: Reader) -> Sizes:
    return Sizes(0, 0, 0, "v_last", read.share("hidden_size"), read.size("conv_L_cache"), kinds=("conv",))


_MAMBA2_HYBRID = _mamba2(
    heads="mamba_n_heads",
    d_v="mamba_d_head",
    d_k="mamba_d_state",
    groups="mamba_n_groups",
    kernel="mamba_d_conv",
)

_READERS: dict[str, Callable[[Reader], Sizes]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
    "mamba2": _mamba2(
        heads="num_heads", d_v="head_dim", d_k="state_size", groups="n_groups", kernel="conv_kernel"
    ),
    "nemotron_h": _mamba2(
        heads="mamba_num_heads",
        d_v="mamba_head_dim",
        d_k="ssm_state_size",
        groups="n_groups",
        kernel="conv_kernel",
    ),
    "falcon_h1": _MAMBA2_HYBRID,
    "granitemoehybrid": _MAMBA2_HYBRID,
    "bamba": _MAMBA2_HYBRID,
    "zamba2": _mamba2(
        heads="n_mamba_heads",
        d_v="mamba_headdim",
        d_k="mamba_d_state",
        groups="mamba_ngroups",
        kernel="mamba_d_conv",
    ),
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
}


def read_sizes(config: Any, ranks: int = 1) -> Sizes:
    """The sizes in a transformers config, of which the text part is given, on one of `ranks` ranks.

    Raises:
        ConfigError: the model is not known, or what it keeps cannot be divided among the ranks.
    """
    if ranks < 1:
        raise ConfigError(f"tensor_parallel must be at least 1, got {ranks}")
    reader = _READERS.get(config.model_type)
    if reader is None:
        raise ConfigError(
            f"no preset for model type {config.model_type!r}, only for {', '.join(_READERS)}: "
            "give the shapes to StateSpec itself"
        )
    return reader(Reader(config, ranks))
