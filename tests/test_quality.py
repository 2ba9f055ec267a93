"""What a checkpoint costs a trained model: the KL divergence of its predictions from the exact state's.

The loss is no gate: it moves by less than 1e-4 nats per byte under nearly every codec, while KL tells int8
from a forgotten state by five orders of magnitude. The model soon overwrites what a codec did to its state,
so the first few bytes tell codecs apart best. The README's figures are what these tests print.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from radixstate import ActivePool, CheckpointPool, StateSpec, Transfer
from radixstate.states import Format
from transformers import DynamicCache, Qwen3_5ForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from benchmarks.tiny import corpus_prompts, load_tiny_model

PAIRS, PREFIX, CONTINUATION, SOON = 64, 512, 256, 16


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
    """Prefixes that the model has read, and the bytes that follow each.

    text: (pairs, PREFIX + CONTINUATION); cache and state: after PREFIX bytes; exact: the logits from there.
    """

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.model = model
        self.text = torch.tensor(corpus_prompts(PAIRS, PREFIX + CONTINUATION, seed=0))
        self.cache = DynamicCache(config=model.config)
        model(self.text[:, :PREFIX], cache=self.cache, logits_to_keep=1)
        self.state = State.of(self.cache)
        self.exact = self.resume(self.state, CONTINUATION)

    def resume(self, state: State, n: int) -> torch.Tensor:
        """Logits (pairs, n, 256) over n bytes of the continuations, from `state` and the prefixes' KV."""
        cache = copy.deepcopy(self.cache)
        state.put(cache)
        return self.model(self.text[:, PREFIX : PREFIX + n], cache=cache).logits

    def kl(self, state: State, n: int) -> float:
        """Mean KL(exact || resumed) over n bytes, in nats per byte.

        In double precision, for int8's is as small as a float's rounding.
        """
        exact, resumed = (x.double().log_softmax(-1) for x in (self.exact[:, :n], self.resume(state, n)))
        return (exact.exp() * (exact - resumed)).sum(-1).mean().item()

    def error(self, state: State) -> float:
        """Mean relative error of a layer's recurrent state."""
        exact, restored = self.state.recurrent.flatten(2), state.recurrent.flatten(2)
        return ((restored - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def prefixes(inference: None) -> Prefixes:
    return Prefixes(load_tiny_model())


@pytest.fixture(scope="module")
def spec(prefixes: Prefixes) -> StateSpec:
    return StateSpec.from_config(prefixes.model.config, dtype="float32")


@pytest.fixture(scope="module")
def int8(prefixes: Prefixes, spec: StateSpec) -> State:
    return through_checkpoints(prefixes.state, spec, "int8")


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
    assert all(Transfer(running, checkpoints).store(zip(slots, reversed(slots), strict=True)))
    Transfer(restored, checkpoints).load(zip(reversed(slots), slots, strict=True))
    return State(
        torch.stack([restored.state(slot) for slot in slots], dim=1),
        torch.stack([restored.conv(0, slot) for slot in slots], dim=1),
    )


def per_tensor(state: State) -> State:
    """int8 with a single scale for each layer's whole state."""
    scale = state.recurrent.abs().amax((-3, -2, -1), keepdim=True) / 127
    return dataclasses.replace(state, recurrent=(state.recurrent / scale).round() * scale)


def test_a_native_checkpoint_resumes_bit_for_bit(prefixes: Prefixes, spec: StateSpec) -> None:
    restored = through_checkpoints(prefixes.state, spec, "native")
    assert torch.equal(prefixes.resume(restored, CONTINUATION), prefixes.exact)


def test_resuming_says_what_reading_everything_at_once_says(prefixes: Prefixes) -> None:
    some = slice(0, 8)
    whole = prefixes.model(prefixes.text[some], use_cache=False).logits[:, PREFIX:]
    torch.testing.assert_close(prefixes.exact[some], whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", ["recurrent", "conv"])
def test_a_forgotten_part_of_the_state_is_noticed(prefixes: Prefixes, part: str) -> None:
    zeros = torch.zeros_like(getattr(prefixes.state, part))
    forgotten = dataclasses.replace(prefixes.state, **{part: zeros})
    assert prefixes.kl(forgotten, SOON) > 0.01


def test_an_int8_checkpoint_costs_next_to_nothing(prefixes: Prefixes, int8: State) -> None:
    cost = prefixes.kl(int8, CONTINUATION)
    print(f"\nint8 costs {cost:.0e} nats per byte over {CONTINUATION} bytes")
    assert cost < 2e-6
    assert torch.equal(int8.conv, prefixes.state.conv)


def test_one_scale_per_tensor_is_ten_times_worse(prefixes: Prefixes, int8: State) -> None:
    one, many = prefixes.kl(per_tensor(prefixes.state), SOON), prefixes.kl(int8, SOON)
    print(f"\none scale per tensor costs {one / many:.0f} times as much over {SOON} bytes")
    assert one > 10 * many


def test_scales_along_the_other_axis_are_worse(prefixes: Prefixes, spec: StateSpec, int8: State) -> None:
    """As when the layout is named wrongly, which the shapes of square heads don't show."""
    transposed = through_checkpoints(prefixes.state, dataclasses.replace(spec, layout="k_last"), "int8")
    assert prefixes.error(transposed) > 1.2 * prefixes.error(int8)
    assert prefixes.kl(transposed, SOON) > prefixes.kl(int8, SOON)
