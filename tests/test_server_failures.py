"""A server whose model or memory fails halfway."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from radixstate import PrefixCache
from radixstate.errors import MisuseError
from radixstate.integrations import transformers as glue
from radixstate.integrations.transformers import PrefixServer, Request, RunningState, state_spec
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

PROMPT = [i * 7 % 250 for i in range(40)]


class Injected(BaseException):
    """A kernel or an allocation that failed."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).eval()


@pytest.fixture
def server(model: PreTrainedModel) -> PrefixServer:
    cache = PrefixCache(
        state_spec(model),
        active_slots=1,
        checkpoint_slots=8,
        kv_pages=32,
        page_size=8,
        checkpoint_stride=16,
        format="native",
    )
    return PrefixServer(model, cache, chunk=16)


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise Injected(name)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(
    ("owner", "name"), [(RunningState, "restore"), (RunningState, "__init__"), (Request, "__init__")]
)
def test_a_start_that_cannot_restore_gives_its_slot_back_while_the_error_is_kept(
    server: PrefixServer, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    server.generate(PROMPT, 1)
    with monkeypatch.context() as patch:
        failing(patch, owner, name)
        with pytest.raises(Injected) as kept:
            server.start(PROMPT)
    assert server.cache.usage("active").free == 1, f"{kept.value!r} keeps its slot"
    assert server.generate(PROMPT, 1).reused == 32
    server.cache.check()


def after_its_layers_ran(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The n-th forward pass from now on runs, and then fails."""
    forward, passed = glue._forward, [0]

    def fail(*args: Any, **options: Any) -> torch.Tensor:
        logits = forward(*args, **options)
        passed[0] += 1
        if passed[0] == n:
            raise Injected("in the last layer")
        return logits

    monkeypatch.setattr(glue, "_forward", fail)


@pytest.mark.parametrize(
    "use", [lambda it: it.prefill(), lambda it: it.prefill_piece(), lambda it: it.checkpoint()]
)
def test_a_request_whose_prefill_failed_only_ends(
    server: PrefixServer, monkeypatch: pytest.MonkeyPatch, use: Callable[[Request], Any]
) -> None:
    after_its_layers_ran(monkeypatch, 3)
    request = server.start(PROMPT)
    with pytest.raises(Injected):
        request.prefill()
    with pytest.raises(MisuseError, match="a forward pass failed"):
        use(request)
    request.abort()
    assert server.cache.usage("active").free == 1
    assert server.cache.lookup(PROMPT).length == 32, "what was stored before is sound"


def test_a_request_whose_decode_failed_only_ends(
    server: PrefixServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_its_layers_ran(monkeypatch, 5)
    with server.start(PROMPT, decode=20) as request:
        request.prefill()
        with pytest.raises(Injected):
            request.decode(4)
        with pytest.raises(MisuseError, match="a forward pass failed"):
            request.decode(4, checkpoint=True)
    assert server.cache.usage("active").free == 1


def test_a_decode_whose_checkpoint_failed_goes_on_with_the_right_state(
    server: PrefixServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server.generate(PROMPT, 12, no_store=True).tokens
    with server.start(PROMPT, decode=12, no_read=True) as request:
        request.prefill()
        with monkeypatch.context() as patch:
            failing(patch, type(request.sequence), "checkpoint")
            with pytest.raises(Injected):
                request.decode(12, checkpoint=True)
        request.decode(12 - len(request.tokens))
        assert request.tokens == expected
