"""Prefix reuse on real model code, compared state for state with plain transformers in the same pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from radixstate import PrefixCache, StateSpec
from radixstate.errors import BudgetError, ConfigError, MisuseError, NeverFitsError
from radixstate.integrations.transformers import (
    KvPages,
    KvShape,
    PrefixServer,
    Request,
    RunningState,
    state_spec,
)
from radixstate.reference import codec
from transformers import (
    DynamicCache,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache, LinearAttentionLayer

PAGE, STRIDE = 8, 16
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def qwen() -> PreTrainedModel:
    config = Qwen3_5TextConfig(
        **SIZES,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return Qwen3_5ForCausalLM(config)


def olmo() -> PreTrainedModel:
    """The one with d_k != d_v."""
    config = OlmoHybridConfig(
        **SIZES,
        **NO_SPECIAL_TOKENS,
        num_hidden_layers=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
    )
    return OlmoHybridForCausalLM(config)


def kimi() -> PreTrainedModel:
    """Kimi delta attention and multi-head latent attention, whose two latents differ in size."""
    config = KimiLinearConfig(
        **SIZES,
        **NO_SPECIAL_TOKENS,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_key_value_heads=4,
        moe_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
    )
    return KimiLinearForCausalLM(config)


@pytest.fixture(scope="module", params=[qwen, olmo, kimi], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Random weights whose heads remember: drawn as usual, nearly all forget within a few tokens."""
    torch.manual_seed(0)
    made: PreTrainedModel = request.param().float().eval()
    for name, bias in made.named_parameters():
        if name.endswith("dt_bias"):
            dt = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            bias.data = dt + torch.log(-torch.expm1(-dt))  # softplus(bias) == dt
    return made


MakeServer = Callable[..., PrefixServer]


@pytest.fixture
def serve(model: PreTrainedModel) -> Iterator[MakeServer]:
    """Makes servers; when the test is over, each cache must be sound and hold nothing for any request."""
    servers = []

    def make(fmt: str = "native", *, kv_pages: int = 64, chunk: int = 512) -> PrefixServer:
        cache = PrefixCache(
            state_spec(model),
            active_slots=3,
            checkpoint_slots=8,
            kv_pages=kv_pages,
            page_size=PAGE,
            checkpoint_stride=STRIDE,
            format=fmt,
        )
        servers.append(PrefixServer(model, cache, chunk=chunk))
        return servers[-1]

    yield make
    for server in servers:
        server.cache.check()
        assert [server.cache.usage(pool).held for pool in ("kv", "active", "checkpoint")] == [0, 0, 0]


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class Layer(NamedTuple):
    """A copy of what a layer keeps: (recurrent state, conv window), or (keys, values)."""

    linear: bool
    first: torch.Tensor
    second: torch.Tensor


def layers(cache: Cache) -> list[Layer]:
    return [
        Layer(True, layer.recurrent_states[0].clone(), layer.conv_states[0].clone())
        if isinstance(layer, LinearAttentionLayer)
        else Layer(False, layer.keys.clone(), layer.values.clone())
        for layer in cache.layers
    ]


def assert_same(found: Sequence[Layer], expected: Sequence[Layer]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.first, other.first), f"layer {index}: state or keys"
        assert torch.equal(one.second, other.second), f"layer {index}: conv window or values"


class Cold:
    """Plain transformers, fed in pieces."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.logits = torch.empty(0)

    @torch.no_grad()
    def feed(self, piece: Sequence[int]) -> Cold:
        ids = torch.tensor([list(piece)])
        out = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.logits = out.logits[0, -1]
        return self

    def prefill(self, prompt: Sequence[int], *cuts: int) -> Cold:
        for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
            self.feed(prompt[start:end])
        return self

    def decode(self, n: int) -> list[int]:
        made: list[int] = []
        for _ in range(n):
            if made:
                self.feed(made[-1:])
            made.append(int(self.logits.argmax()))
        return made

    def replace_states(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Cold:
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.recurrent_states[0].copy_(change(layer.recurrent_states[0]))
        return self


def running(request: Request) -> list[Layer]:
    return layers(state_of(request).model_cache)


def state_of(request: Request) -> RunningState:
    return request._state


PREFIX = 4 * STRIDE
WARM = tokens(PREFIX + 6, seed=1)
PROBE = WARM[:PREFIX] + tokens(9, seed=2)


def test_a_hit_equals_a_cold_run_cut_at_the_same_depth(model: PreTrainedModel, serve: MakeServer) -> None:
    server, cold = serve("native"), Cold(model)
    assert [stored.depth for stored in server.generate(WARM).checkpoints] == [PREFIX]
    with server.start(PROBE, decode=5) as request:
        assert request.position == PREFIX
        assert_same(running(request), layers(cold.feed(PROBE[:PREFIX]).cache))
        request.prefill()
        assert torch.equal(request.logits, cold.feed(PROBE[PREFIX:]).logits)
        assert_same(running(request), layers(cold.cache))
        assert request.decode(5) == cold.decode(5)
        assert torch.equal(request.logits, cold.logits)
        assert_same(running(request), layers(cold.cache))


def within_half_a_step(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """|x - x'| <= scale / 2 for each k-channel, and one part in a million for three roundings in float32."""
    scale = exact.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
    return bool(((found - exact).abs() <= scale / 2 * (1 + 1e-6) + exact.abs() * 1e-6).all())


def through_int8(state: torch.Tensor) -> torch.Tensor:
    q, scale = codec.encode(state, k_axis=-2)
    return codec.decode(q, scale, k_axis=-2, dtype=state.dtype)


def test_an_int8_hit_is_within_the_codec_of_a_cold_run(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("int8")
    server.generate(WARM)
    exact = layers(Cold(model).feed(PROBE[:PREFIX]).cache)
    rounded = Cold(model).feed(PROBE[:PREFIX]).replace_states(through_int8)
    with server.start(PROBE) as request:
        restored = running(request)
        for found, true in zip(restored, exact, strict=True):
            assert torch.equal(found.second, true.second)
            if found.linear:
                assert within_half_a_step(found.first, true.first)
                assert not torch.equal(found.first, true.first), "int8 rounds something"
            else:
                assert torch.equal(found.first, true.first)
        assert_same(restored, layers(rounded.cache))
        request.prefill()
        assert torch.equal(request.logits, rounded.feed(PROBE[PREFIX:]).logits)


def test_a_bf16_hit_is_a_cold_run_rounded_to_bf16(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("bf16")
    server.generate(WARM)
    rounded = Cold(model).feed(PROBE[:PREFIX]).replace_states(lambda state: state.bfloat16().float())
    with server.start(PROBE) as request:
        assert_same(running(request), layers(rounded.cache))


@pytest.mark.parametrize("part", ["state", "conv", "kv"])
def test_whatever_is_zeroed_shows_in_the_logits(model: PreTrainedModel, serve: MakeServer, part: str) -> None:
    """The control: exactness above means something only if each part of a checkpoint is needed for it."""
    server, cold = serve("native"), Cold(model).prefill(PROBE, PREFIX)
    [stored] = server.generate(WARM).checkpoints
    if part == "state":
        server.cache.checkpoints.state(stored.slot).zero_()
    elif part == "conv":
        server.cache.checkpoints.conv(0, stored.slot).zero_()
    else:
        for keys, values in server.kv.tensors:
            keys.zero_(), values.zero_()
    assert (server.generate(PROBE).logits - cold.logits).abs().max() > 1e-3


def test_int8_moves_the_logits_far_less_than_a_lost_state(model: PreTrainedModel, serve: MakeServer) -> None:
    cold = Cold(model).prefill(PROBE, PREFIX).logits
    errors = []
    for zeroed in (False, True):
        server = serve("int8")
        [stored] = server.generate(WARM).checkpoints
        if zeroed:
            server.cache.checkpoints.state(stored.slot).zero_()
        errors.append((server.generate(PROBE).logits - cold).abs().max())
    assert 0 < errors[0] < errors[1] / 10


def test_the_branch_point_is_stored_and_reused(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("native")
    shared = tokens(2 * STRIDE + 5, seed=3)
    branch = 2 * STRIDE
    first, second, third = (shared + tokens(40, seed=seed) for seed in (4, 5, 6))
    server.generate(first)
    found = server.generate(second)
    assert (found.reused, found.reason) == (0, "no_state")
    assert [stored.depth for stored in found.checkpoints] == [branch, 4 * STRIDE]
    cold = Cold(model).feed(third[:branch])
    with server.start(third) as request:
        assert request.position == branch
        for restored, true in zip(running(request), layers(cold.cache), strict=True):
            # The keys and values are those of `first`, which ran past the branch in one piece.
            exact = {"rtol": 0, "atol": 0} if restored.linear else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(restored.first, true.first, **exact)
            torch.testing.assert_close(restored.second, true.second, **exact)
        request.prefill()
        torch.testing.assert_close(request.logits, cold.feed(third[branch:]).logits, rtol=1e-4, atol=1e-5)


def test_a_retracted_request_resumes_where_it_stored(model: PreTrainedModel, serve: MakeServer) -> None:
    server, prompt = serve("native"), tokens(2 * STRIDE + 8, seed=7)
    expected = server.generate(prompt, 20, no_store=True).tokens
    retracted = server.start(prompt, decode=20)
    retracted.prefill()
    made = retracted.decode(12, checkpoint=True)
    retracted.abort()
    assert server.cache.usage("active").free == 3
    assert [stored.depth for stored in retracted.checkpoints] == [2 * STRIDE, 3 * STRIDE]
    with server.start(prompt + made, decode=8) as resumed:
        assert resumed.position == 3 * STRIDE
        resumed.prefill()
        assert made + resumed.decode(8) == expected


def test_a_prompt_shorter_than_the_stride_is_served_and_not_stored(
    model: PreTrainedModel, serve: MakeServer
) -> None:
    server, prompt = serve("int8"), tokens(STRIDE - 1, seed=8)
    cold = Cold(model).feed(prompt)
    for _ in range(2):
        result = server.generate(prompt, 3)
        assert (result.reused, result.checkpoints) == (0, ())
        assert torch.equal(result.logits, cold.logits)
    assert result.tokens == cold.decode(3)
    assert server.cache.usage("kv").free == 64


def test_a_prompt_of_one_token_is_served(model: PreTrainedModel, serve: MakeServer) -> None:
    result = serve("int8").generate([7], 4)
    assert result.tokens == Cold(model).feed([7]).decode(4)


def test_a_prompt_that_ends_at_a_legal_depth_keeps_one_token_to_run(
    model: PreTrainedModel, serve: MakeServer
) -> None:
    server, prompt = serve("native"), tokens(2 * STRIDE, seed=9)
    server.generate(prompt)
    again = server.generate(prompt)
    assert again.reused == STRIDE
    assert torch.equal(again.logits, Cold(model).prefill(prompt, STRIDE).logits)


def test_interleaved_requests_do_not_touch_each_other(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("native", chunk=24)
    prompts = [tokens(70, seed=10), tokens(55, seed=11)]
    requests = [server.start(prompt, decode=6) for prompt in prompts]
    unfinished = list(requests)
    while unfinished:
        unfinished = [request for request in unfinished if request.prefill_piece()]
    made: list[list[int]] = [[], []]
    for _ in range(6):
        for request, so_far in zip(requests, made, strict=True):
            so_far += request.decode(1)
    for request, prompt, cuts, so_far in zip(requests, prompts, [(24, 48, 64), (24, 48)], made, strict=True):
        cold = Cold(model).prefill(prompt, *cuts)
        assert so_far == cold.decode(6)
        assert_same(running(request), layers(cold.cache))
        request.finish()


def test_a_request_hits_what_another_stored_while_both_run(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("native")
    with server.start(WARM, decode=2) as first:
        first.prefill()
        with server.start(PROBE) as second:
            assert second.position == PREFIX
            second.prefill()
            assert torch.equal(second.logits, Cold(model).prefill(PROBE, PREFIX).logits)
        assert first.decode(2) == Cold(model).prefill(WARM, PREFIX).decode(2)


def test_two_requests_that_store_the_same_prefix_share_its_pages(
    model: PreTrainedModel, serve: MakeServer
) -> None:
    server = serve("native")
    with server.start(WARM) as first, server.start(PROBE) as second:
        first.prefill()
        second.prefill()
        assert [outcome.reason for outcome in second.checkpoints] == ["duplicate"]
    assert server.cache.usage("kv").evictable == PREFIX // PAGE
    assert server.generate(PROBE).reused == PREFIX


def test_a_hit_that_stores_deeper_leaves_the_pages_it_shares_alone(serve: MakeServer) -> None:
    server = serve("native")
    server.generate(WARM)
    with server.start(PROBE + tokens(2 * STRIDE, seed=14)) as request:
        shared = request.sequence.pages[: PREFIX // PAGE]
        for keys, values in server.kv.tensors:
            keys[shared], values[shared] = 7.0, 7.0  # as if another request were reading something there
        request.prefill()
        assert [stored.depth for stored in request.checkpoints] == [6 * STRIDE]
        for keys, values in server.kv.tensors:
            assert keys[shared].eq(7.0).all()
            assert values[shared].eq(7.0).all()


def test_the_end_of_a_turn_can_be_stored_for_the_next(model: PreTrainedModel, serve: MakeServer) -> None:
    server, prompt = serve("native"), tokens(STRIDE + 3, seed=12)
    turn = server.generate(prompt, 2 * STRIDE, checkpoint_end=True)
    assert [stored.depth for stored in turn.checkpoints] == [STRIDE, 3 * STRIDE]
    assert server.generate(prompt + turn.tokens + tokens(5, seed=13)).reused == 3 * STRIDE


def test_generating_nothing_still_prefills_and_stores(model: PreTrainedModel, serve: MakeServer) -> None:
    server = serve("native")
    result = server.generate(WARM, 0)
    assert result.tokens == []
    assert torch.equal(result.logits, Cold(model).prefill(WARM, PREFIX).logits)
    assert server.generate(PROBE, 0).reused == PREFIX


def test_no_read_and_no_store_are_obeyed(serve: MakeServer) -> None:
    server = serve("native")
    server.generate(WARM, no_store=True)
    assert server.generate(WARM).reused == 0
    assert server.generate(WARM, no_read=True).reused == 0
    assert server.generate(WARM).reused == PREFIX


def test_decoding_before_the_prefill_is_refused_and_gives_everything_back(serve: MakeServer) -> None:
    server = serve("native")
    with pytest.raises(MisuseError, match="after 0 of"), server.start(WARM) as request:
        request.decode(1)
    assert server.cache.usage("active").free == 3


def test_decoding_past_the_pool_generates_nothing(serve: MakeServer) -> None:
    server = serve("native", kv_pages=10)
    with server.start(WARM) as request:
        request.prefill()
        with pytest.raises(NeverFitsError):
            request.decode(12)
        assert request.tokens == []
        assert len(request.decode(11)) == 11


def test_the_measured_spec_is_the_preset_of_the_config(model: PreTrainedModel) -> None:
    assert state_spec(model) == StateSpec.from_config(model.config, dtype="float32")


def test_a_cache_of_another_model_is_refused(model: PreTrainedModel, serve: MakeServer) -> None:
    spec = StateSpec(layers=1, heads=1, d_k=8, d_v=8, layout="v_last")
    with pytest.raises(ConfigError, match="the model keeps"):
        PrefixServer(model, PrefixCache(spec, active_slots=1, checkpoint_slots=1, kv_pages=8))


def test_a_cache_without_pages_and_a_chunk_of_zero_are_refused(serve: MakeServer) -> None:
    with pytest.raises(ConfigError, match="0 kv pages"):
        serve("native", kv_pages=0)
    with pytest.raises(ConfigError, match="chunk of 0"):
        serve("native", chunk=0)


def test_the_bytes_of_the_pages_are_known_and_checked_before_they_are_allocated(serve: MakeServer) -> None:
    server = serve("native")
    [(keys, values), *_] = server.kv.tensors
    shape = KvShape(tuple(keys.shape[2:]), tuple(values.shape[2:]), keys.dtype)
    assert shape.nbytes * (64 + 1) * PAGE == keys.nbytes + values.nbytes
    with pytest.raises(BudgetError, match="lower kv_pages first"):
        KvPages([shape], 10**12, PAGE, keys.device)


def test_a_model_without_linear_layers_is_refused() -> None:
    config = Qwen3Config(**SIZES, num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match="0 linear layers"):
        state_spec(Qwen3ForCausalLM(config))
