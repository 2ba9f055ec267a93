"""What a checkpoint costs a trained model: the KL divergence of its predictions from those of the exact state.

The loss is no gate: it moves by less than 1e-4 nats per byte under nearly every codec. The KL divergence over the
256 bytes after a restore spans five orders of magnitude between int8 and a forgotten state.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import pytest
import torch
from benchmarks.tiny import corpus_prompts, load_tiny_model
from radixstate import ActivePool, CheckpointPool, StateSpec
from radixstate.states import Format
from transformers import DynamicCache, Qwen3_5ForCausalLM
from transformers.cache_utils import LinearAttentionLayer

PAIRS, PREFIX, CONTINUATION = 96, 512, 256


@dataclasses.dataclass(frozen=True)
class State:
    """What the linear layers keep of all prefixes.

    recurrent: (layers, pairs, heads, d_k, d_v); conv: (layers, pairs, channels, kernel).
    """

    recurrent: torch.Tensor
    conv: torch.Tensor

    @classmethod
    def of(cls, cache: DynamicCache) -> State:
        layers = linear_layers(cache)
        return cls(
            torch.stack([layer.recurrent_states[0] for layer in layers]),
            torch.stack([layer.conv_states[0] for layer in layers]),
        )

    def put(self, cache: DynamicCache) -> None:
        for layer, recurrent, conv in zip(linear_layers(cache), self.recurrent, self.conv, strict=True):
            layer.recurrent_states[0].copy_(recurrent)
            layer.conv_states[0].copy_(conv)


def linear_layers(cache: DynamicCache) -> list[LinearAttentionLayer]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


class Prefixes:
    """Prefixes the model has read, and the bytes that follow each: (pairs, PREFIX) and (pairs, CONTINUATION)."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.model = model
        self.text = torch.tensor(corpus_prompts(PAIRS, PREFIX + CONTINUATION, seed=0))
        self.cache = DynamicCache(config=model.config)
        model(self.text[:, :PREFIX], cache=self.cache, logits_to_keep=1)
        self.state = State.of(self.cache)
        self.exact = self.resume(self.state)

    def resume(self, state: State) -> torch.Tensor:
        """Logits (pairs, CONTINUATION, 256) over the continuations, read from `state` and the prefixes' KV."""
        cache = copy.deepcopy(self.cache)
        state.put(cache)
        return cast(torch.Tensor, self.model(self.text[:, PREFIX:], cache=cache).logits)

    def kl(self, state: State) -> float:
        """Mean KL(exact || resumed) in nats per byte. In double precision: int8's is below a float's epsilon."""
        exact, resumed = (x.double().log_softmax(-1) for x in (self.exact, self.resume(state)))
        return (exact.exp() * (exact - resumed)).sum(-1).mean().item()

    def kl_of(self, recurrent: torch.Tensor) -> float:
        return self.kl(dataclasses.replace(self.state, recurrent=recurrent))


@pytest.fixture(scope="module", autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def prefixes(inference: None) -> Prefixes:
    return Prefixes(load_tiny_model())


@pytest.fixture(scope="module")
def spec(prefixes: Prefixes) -> StateSpec:
    return StateSpec.from_config(prefixes.model.config, dtype="float32")


@pytest.fixture(scope="module")
def int8_kl(prefixes: Prefixes, spec: StateSpec) -> float:
    return prefixes.kl(through_checkpoints(prefixes.state, spec, "int8"))


def through_checkpoints(state: State, spec: StateSpec, format: Format) -> State:
    """Stores every prefix in a checkpoint pool and loads it again, into slots in another order."""
    slots = range(1, PAIRS + 1)
    running, restored = ActivePool(spec, PAIRS), ActivePool(spec, PAIRS)
    for row, slot in enumerate(slots):
        running.state(slot).copy_(state.recurrent[:, row])
        running.conv(0, slot).copy_(state.conv[:, row])
        restored.state(slot).fill_(torch.nan)
        restored.conv(0, slot).fill_(torch.nan)
    checkpoints = CheckpointPool(spec, PAIRS, format=format)
    assert all(checkpoints.store(running, zip(slots, reversed(slots), strict=True)))
    checkpoints.load(restored, zip(reversed(slots), slots, strict=True))
    return State(
        torch.stack([restored.state(slot) for slot in slots], dim=1),
        torch.stack([restored.conv(0, slot) for slot in slots], dim=1),
    )


def per_tensor(state: torch.Tensor) -> torch.Tensor:
    """int8 with a single scale for each layer's whole state."""
    scale = state.abs().amax((-3, -2, -1), keepdim=True) / 127
    return (state / scale).round() * scale


def test_a_native_checkpoint_resumes_bit_for_bit(prefixes: Prefixes, spec: StateSpec):
    restored = through_checkpoints(prefixes.state, spec, "native")
    assert torch.equal(prefixes.resume(restored), prefixes.exact)


def test_resuming_says_what_reading_everything_at_once_says(prefixes: Prefixes):
    some = slice(0, 8)
    whole = prefixes.model(prefixes.text[some], use_cache=False).logits[:, PREFIX:]
    torch.testing.assert_close(prefixes.exact[some], whole, rtol=0, atol=5e-5)


def test_a_forgotten_state_is_noticed(prefixes: Prefixes):
    assert prefixes.kl_of(torch.zeros_like(prefixes.state.recurrent)) > 1e-3


def test_a_forgotten_conv_window_is_noticed(prefixes: Prefixes):
    state = dataclasses.replace(prefixes.state, conv=torch.zeros_like(prefixes.state.conv))
    assert prefixes.kl(state) > 1e-3


def test_int8_checkpoints_cost_next_to_nothing(int8_kl: float):
    assert int8_kl < 2e-6


def test_one_scale_per_tensor_is_ten_times_worse(prefixes: Prefixes, int8_kl: float):
    assert prefixes.kl_of(per_tensor(prefixes.state.recurrent)) > 10 * int8_kl


def test_scales_along_the_other_axis_are_worse(prefixes: Prefixes, spec: StateSpec, int8_kl: float):
    """What happens when the layout is wrong, which square heads do not show otherwise."""
    transposed = dataclasses.replace(spec, layout="k_last")
    assert prefixes.kl(through_checkpoints(prefixes.state, transposed, "int8")) > 1.5 * int8_kl
