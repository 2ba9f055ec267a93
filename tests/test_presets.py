"""Presets: the spec of a transformers config has the shapes of the model's own cache, whole or on one rank."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from radixstate import ConvSpec, StateSpec
from radixstate.errors import ConfigError
from radixstate.states import presets
from transformers.cache_utils import DynamicCache

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 5}
ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
LINEAR_FULL = ["linear_attention", "full_attention"]
CONV_FULL = ["conv", "full_attention", "conv", "conv", "full_attention"]
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3Next": (transformers.Qwen3NextConfig, ATTENTION | DELTA_NET | EXPERTS),
    "Qwen3_5": (transformers.Qwen3_5TextConfig, ATTENTION | DELTA_NET),
    "Qwen3_5Moe": (transformers.Qwen3_5MoeTextConfig, ATTENTION | DELTA_NET | EXPERTS),
    "OlmoHybrid": (transformers.OlmoHybridConfig, ATTENTION | NO_SPECIAL_TOKENS),
    "KimiLinear": (
        transformers.KimiLinearConfig,
        ATTENTION
        | NO_SPECIAL_TOKENS
        | {"linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
        | {"moe_intermediate_size": 16},
    ),
    "Mamba2": (
        transformers.Mamba2Config,
        {"num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8},
    ),
    "NemotronH": (
        transformers.NemotronHConfig,
        ATTENTION
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 24, "n_groups": 2, "conv_kernel": 3}
        | {"chunk_size": 8, "head_dim": 16},
    ),
    "FalconH1": (transformers.FalconH1Config, ATTENTION | MAMBA | {"mamba_d_ssm": 64}),
    "GraniteMoeHybrid": (
        transformers.GraniteMoeHybridConfig,
        ATTENTION
        | MAMBA
        | {"layer_types": [*LINEAR_FULL, *LINEAR_FULL, "linear_attention"], "shared_intermediate_size": 16}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Bamba": (transformers.BambaConfig, ATTENTION | MAMBA | {"attn_layer_indices": [1, 3]}),
    "Zamba2": (
        transformers.Zamba2Config,
        ATTENTION
        | {
            "layers_block_type": [
                "linear_attention",
                "hybrid",
                "linear_attention",
                "hybrid",
                "linear_attention",
            ]
        }
        | {"n_mamba_heads": 4, "mamba_d_state": 24, "mamba_ngroups": 2, "mamba_d_conv": 3, "chunk_size": 8}
        | {"adapter_rank": 4},
    ),
    "Lfm2": (transformers.Lfm2Config, ATTENTION | NO_SPECIAL_TOKENS | {"layer_types": CONV_FULL}),
    "Lfm2Moe": (
        transformers.Lfm2MoeConfig,
        ATTENTION | NO_SPECIAL_TOKENS | EXPERTS | {"layer_types": CONV_FULL, "conv_L_cache": 4},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_shapes_of_the_models_own_cache(name: str) -> None:
    config_class, arguments = MODELS[name]
    config = config_class(**SMALL, **arguments, dtype="bfloat16")
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(7)[None], cache=cache)
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    spec = StateSpec.from_config(config)
    assert spec.layers == len(layers)
    for layer in layers:
        recurrent, conv = layer.recurrent_states[0], layer.conv_states[0]
        assert (recurrent is None) == spec.windows_only
        if recurrent is not None:
            assert tuple(recurrent.shape[1:]) == (spec.heads, *spec.matrix)
            assert str(recurrent.dtype) == f"torch.{spec.dtype}"
        assert (tuple(conv.shape[1:]), str(conv.dtype)) == (spec.conv[0].shape, f"torch.{spec.conv[0].dtype}")


def test_the_text_part_of_a_multimodal_config_is_taken() -> None:
    config = transformers.Qwen3_5Config(dtype="bfloat16")
    assert StateSpec.from_config(config) == StateSpec.from_config(config.text_config, dtype="bfloat16")


def test_an_unknown_model_or_type_is_named() -> None:
    with pytest.raises(ConfigError, match="no preset for model type 'llama', only for qwen3_next"):
        StateSpec.from_config(transformers.LlamaConfig())
    with pytest.raises(ConfigError, match="qwen3_next config names no dtype"):
        StateSpec.from_config(transformers.Qwen3NextConfig())


def test_every_preset_is_compared_with_its_model() -> None:
    compared = {config_class.model_type for config_class, _ in MODELS.values()}
    assert compared == set(presets._READERS)


def test_a_model_without_recurrent_layers_is_refused() -> None:
    config = transformers.Lfm2Config(**SMALL, **ATTENTION, layer_types=["full_attention"] * 5)
    with pytest.raises(ConfigError, match="layers must be at least 1, got 0"):
        StateSpec.from_config(config, dtype="bfloat16")


# Heads, channels of the window: on paper, from the sizes of the published models.
RANKS = [
    # 32 value heads of 128, 16 key heads of 128: q and k of the rank's key heads, v of its value heads
    ("Qwen3Next", {}, 1, 32, 2 * 16 * 128 + 32 * 128),
    ("Qwen3Next", {}, 8, 4, 2 * 2 * 128 + 4 * 128),
    ("KimiLinear", {}, 4, 8, 3 * 8 * 128),
    # 128 heads of 64; 8 groups of 128, x, B and C of each
    ("NemotronH", {}, 1, 128, 128 * 64 + 2 * 8 * 128),
    ("NemotronH", {}, 4, 32, 32 * 64 + 2 * 2 * 128),
    ("NemotronH", {}, 8, 16, 16 * 64 + 2 * 1 * 128),
    # more ranks than groups: each group is on two ranks
    ("NemotronH", {}, 16, 8, 8 * 64 + 2 * 1 * 128),
    # 128 heads of 8 and one group of 256, which every rank has
    ("FalconH1", {}, 4, 32, 32 * 8 + 2 * 1 * 256),
    ("Bamba", {}, 2, 64, 64 * 64 + 2 * 1 * 256),
    ("Lfm2", {"layer_types": CONV_FULL, "num_hidden_layers": 5}, 4, 0, 2560 // 4),
]


@pytest.mark.parametrize(("name", "sizes", "ranks", "heads", "channels"), RANKS)
def test_a_rank_keeps_its_heads_and_their_channels(
    name: str, sizes: dict[str, Any], ranks: int, heads: int, channels: int
) -> None:
    config = MODELS[name][0](**sizes)
    whole = StateSpec.from_config(config, dtype="bfloat16")
    spec = StateSpec.from_config(config, dtype="bfloat16", tensor_parallel=ranks)
    window = ConvSpec((channels, whole.conv[0].shape[1]), "bfloat16")
    assert spec == dataclasses.replace(whole, heads=heads, conv=(window,))


@pytest.mark.parametrize(
    ("name", "sizes", "ranks", "message"),
    [
        ("Qwen3Next", {}, 3, "qwen3_next: linear_num_value_heads=32 .* tensor_parallel=3 ranks"),
        ("Qwen3Next", {}, 32, "qwen3_next: linear_num_key_heads=16 .* tensor_parallel=32 ranks"),
        ("NemotronH", {}, 3, "nemotron_h: mamba_num_heads=128 .* tensor_parallel=3 ranks"),
        # a rank would read one group and half of the next
        (
            "NemotronH",
            {"n_groups": 3, "mamba_num_heads": 96},
            2,
            "nemotron_h: n_groups=3 .* tensor_parallel=2",
        ),
        (
            "Lfm2",
            {"layer_types": CONV_FULL, "num_hidden_layers": 5},
            3,
            "lfm2: hidden_size=2560 .* tensor_parallel=3",
        ),
        ("Lfm2", {}, 0, "tensor_parallel must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_divided_among_ranks_is_named(
    name: str, sizes: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StateSpec.from_config(MODELS[name][0](**sizes), dtype="bfloat16", tensor_parallel=ranks)
