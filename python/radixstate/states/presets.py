"""The sizes of the recurrent layers of known transformers models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from radixstate.errors import ConfigError

Layout = Literal["k_last", "v_last"]
"""`k_last`: a head's matrix is (d_v, d_k), as in sglang and vLLM; `v_last`: (d_k, d_v), as transformers."""


@dataclass(frozen=True)
class Sizes:
    """Of one recurrent layer.

    Attributes:
        channels: of the convolution window.
        kernel: columns of the convolution window.
    """

    heads: int
    d_k: int
    d_v: int
    layout: Layout
    channels: int
    kernel: int


def _gated_delta_net(config: Any) -> Sizes:
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * d_k, config.linear_num_value_heads * d_v
    kernel = config.linear_conv_kernel_dim
    return Sizes(config.linear_num_value_heads, d_k, d_v, "v_last", 2 * keys + values, kernel)


def _kimi_delta_attention(config: Any) -> Sizes:
    heads, d = config.linear_num_heads, config.linear_head_dim
    return Sizes(heads, d, d, "v_last", 3 * heads * d, config.linear_conv_kernel_dim)


def _mamba2(config: Any) -> Sizes:
    d_k, d_v = config.state_size, config.head_dim
    channels = config.num_heads * d_v + 2 * config.n_groups * d_k
    return Sizes(config.num_heads, d_k, d_v, "k_last", channels, config.conv_kernel)


_READERS: dict[str, Callable[[Any], Sizes]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
    "mamba2": _mamba2,
}


def read_sizes(config: Any) -> Sizes:
    """The sizes in a transformers config, of which the text part is given.

    Raises:
        ConfigError: the model is not known.
    """
    reader = _READERS.get(config.model_type)
    if reader is None:
        raise ConfigError(
            f"no preset for model type {config.model_type!r}, only for {', '.join(_READERS)}: "
            "give the shapes to StateSpec itself"
        )
    return reader(config)
