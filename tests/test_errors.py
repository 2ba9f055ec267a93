"""Bad input: every mistake names the rule and the numbers, and changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from radixstate import EngineCache, PrefixCache, Sequence, StateSpec, errors

SPEC = StateSpec(layers=1, heads=2, d_k=3, d_v=4, dtype="float32", layout="v_last")
PROMPT = list(range(20))


def make(**changes: Any) -> PrefixCache:
    sizes = {"active_slots": 2, "checkpoint_slots": 3, "kv_pages": 8, "page_size": 4, "checkpoint_stride": 8}
    return PrefixCache(SPEC, **(sizes | changes))


def make_engine() -> EngineCache:
    return EngineCache(SPEC, active_slots=2, checkpoint_slots=3, kv_pages=8, page_size=4, checkpoint_stride=8)


@pytest.fixture
def engine() -> EngineCache:
    """An engine's cache with one prefix cached."""
    cache = make_engine()
    cache.active.state(1).fill_(1)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.publish(PROMPT[:8], source=1, pages=[1, 2])
    return cache


@pytest.fixture
def cache() -> PrefixCache:
    """A cache in use: one prefix cached, one request running."""
    cache = make()
    with cache.start(PROMPT[:8]) as seq:
        cache.active.state(seq.slot).fill_(1)
        seq.checkpoint(8)
    return cache


@pytest.fixture
def seq(cache: PrefixCache) -> Sequence:
    """A running request of that cache, with 20 tokens and 20 positions."""
    return cache.start(PROMPT)


def everything(cache: PrefixCache | EngineCache) -> list[Any]:
    """All that a refused call must leave as it was."""
    tensors = [cache.active.rows["state"].whole, cache.checkpoints.rows["state"].whole]
    bytes_of = [tensor.flatten().tolist() for tensor in tensors if tensor is not None]
    return [*(cache.usage(pool).as_dict() for pool in ("kv", "active", "checkpoint")), *bytes_of]


@contextmanager
def refused(cache: PrefixCache | EngineCache, error: type[Exception], message: str) -> Iterator[None]:
    before = everything(cache)
    with pytest.raises(error, match=message) as caught:
        yield
    assert isinstance(caught.value, errors.CacheError)
    del caught  # its traceback holds what the call had taken
    assert everything(cache) == before
    cache.check()


def test_misuse_is_a_value_error_and_shortage_is_not() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, errors.CacheError) for kind in kinds)
    misuse = {kind for kind in kinds if issubclass(kind, ValueError)}
    assert misuse == {kind for kind in kinds if issubclass(kind, errors.MisuseError)}
    assert {errors.OutOfSlotsError, errors.NeverFitsError, errors.PoisonedError}.isdisjoint(misuse)


@pytest.mark.parametrize("call", ["lookup", "start"])
def test_an_empty_prompt(cache: PrefixCache, call: str) -> None:
    with refused(cache, errors.EmptyPromptError, "at least one token, got 0"):
        getattr(cache, call)([])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_out_of_range(cache: PrefixCache, token: int) -> None:
    with refused(cache, errors.TokenRangeError, str(token)):
        cache.start([1, token])


def test_a_prompt_longer_than_all_pages(cache: PrefixCache) -> None:
    with refused(cache, errors.NeverFitsError, "kv pool: wanted 9, capacity 8") as _:
        cache.start(list(range(33)))
    with refused(cache, errors.NeverFitsError, "kv pool: wanted 9, capacity 8"):
        cache.start(PROMPT, reserve=33)


def test_a_pool_that_is_busy(cache: PrefixCache, seq: Sequence) -> None:
    with refused(cache, errors.OutOfSlotsError, "kv pool: wanted 5, 3 free, 0 evictable, 0 retiring"):
        cache.start(list(range(50, 70)))
    other = cache.start([1])
    with refused(cache, errors.OutOfSlotsError, "kv pool: wanted 3, 2 free, 0 evictable, 0 retiring"):
        seq.grow(12)
    with refused(cache, errors.OutOfSlotsError, "active pool: wanted 1, 0 free, 0 evictable, 0 retiring"):
        other.take_slot()
    with refused(cache, errors.OutOfSlotsError, "active pool: wanted 1, 0 free, 0 evictable, 0 retiring"):
        cache.start([1])


def test_a_depth_off_the_grid(cache: PrefixCache, seq: Sequence) -> None:
    with refused(cache, errors.UnalignedError, "depth 12 is not a multiple of 8"):
        seq.checkpoint(12)


def test_a_depth_past_the_known_tokens(cache: PrefixCache, seq: Sequence) -> None:
    seq.grow(4)
    with refused(cache, errors.DepthPastEndError, "depth 24 is past the 20 tokens"):
        seq.checkpoint(24)


@pytest.mark.parametrize("source", [0, 2, 99])
def test_a_slot_of_somebody_else(cache: PrefixCache, seq: Sequence, source: int) -> None:
    assert seq.slot != source
    with refused(cache, errors.NotYourSlotError, f"active slot {source}"):
        seq.checkpoint(16, source=source)


def test_more_tokens_than_claimed(cache: PrefixCache, seq: Sequence) -> None:
    with refused(cache, errors.NotClaimedError, "reach 21 tokens, only 20 are claimed"):
        seq.append([1])


@pytest.mark.parametrize(
    "use",
    [
        lambda seq: seq.finish(),
        lambda seq: seq.abort(),
        lambda seq: seq.grow(1),
        lambda seq: seq.append([1]),
        lambda seq: seq.shrink(),
        lambda seq: seq.take_slot(),
        lambda seq: seq.checkpoint(8),
        lambda seq: seq.checkpoint(),
        lambda seq: seq.pages,
        lambda seq: seq.tokens,
        lambda seq: seq.length,
        lambda seq: seq.claimed,
    ],
)
def test_a_sequence_used_after_its_end(
    cache: PrefixCache, seq: Sequence, use: Callable[[Sequence], Any]
) -> None:
    seq.finish()
    with refused(cache, errors.UseAfterFinishError, "finished or aborted"):
        use(seq)


def test_a_lease_used_after_its_end(engine: EngineCache) -> None:
    lease = engine.lease(engine.lookup(PROMPT))
    lease.release()
    for use in (
        lease.release,
        lease.loaded,
        lambda: lease.load(1),
        lambda: lease.pages,
        lambda: lease.state,
        lambda: lease.depth,
        lambda: lease.slots,
        lambda: lease.extend(PROMPT[:8]),
        lambda: lease.attach(PROMPT[:8], source=1),
        lambda: lease.publish(PROMPT[:8], source=1),
        lease.take_slot,
    ):
        with refused(engine, errors.UseAfterFinishError, "released"):
            use()


def test_things_of_another_cache(cache: PrefixCache, seq: Sequence, engine: EngineCache) -> None:
    other = make()
    stored = seq.checkpoint(16)
    for target, use in (
        (engine, lambda: engine.lease(cache.lookup(PROMPT))),
        (other, lambda: other.invalidate(stored)),
        (other, lambda: other.checkpoint_many([(seq, 8, 1)])),
        (other, lambda: other.retire_step(other.begin_step(), invalid=[stored])),
    ):
        with refused(target, errors.WrongCacheError, "another cache"):
            use()
    cache.check()


def test_a_match_that_was_evicted_or_reset(engine: EngineCache) -> None:
    match = engine.lookup(PROMPT)
    engine.evict("checkpoint", 1)
    with refused(engine, errors.StaleError, "evicted after the lookup"):
        engine.lease(match)
    match = engine.lookup(PROMPT)
    engine.reset()
    with refused(engine, errors.StaleError, "reset after the lookup"):
        engine.lease(match)


def test_a_match_whose_state_was_replaced(engine: EngineCache) -> None:
    match = engine.lookup(PROMPT)
    engine.evict("checkpoint", 1)
    engine.lease(engine.lookup(PROMPT)).publish(PROMPT[:8], source=1, pages=[3, 4])
    assert engine.lookup(PROMPT).length == match.length
    with refused(engine, errors.StaleError, "evicted after the lookup"):
        engine.lease(match)


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_was_never_begun(cache: PrefixCache, step: int) -> None:
    cache.begin_step()
    with refused(cache, errors.UnknownStepError, f"step {step} was never begun, the newest is 1"):
        cache.retire_step(step)


@pytest.mark.parametrize(
    ("tokens", "pages", "error", "message"),
    [
        (PROMPT[:12], [1, 2, 3], errors.UnalignedError, "depth 12 is not a multiple of 8"),
        ([9, *PROMPT[1:16]], [3, 4], errors.PrefixMismatchError, "8 tokens of the leased prefix"),
        (PROMPT[:16], [3], errors.LengthMismatchError, "1 pages given, 2 expected"),
        (PROMPT[:16], [3, 3], errors.PageOwnershipError, "page 3 is given twice"),
        (PROMPT[:16], [3, 9], errors.PageOwnershipError, r"page 9 is outside 1\.\.=capacity"),
        (PROMPT[:16], [0, 3], errors.PageOwnershipError, r"page 0 is outside 1\.\.=capacity"),
        (PROMPT[:16], [1, 3], errors.PageOwnershipError, "page 1 already belongs to the cache"),
    ],
)
def test_publishing_what_does_not_fit(
    engine: EngineCache, tokens: list[int], pages: list[int], error: type[Exception], message: str
) -> None:
    cache = engine
    with cache.lease(cache.lookup(PROMPT)) as lease:
        tensors = cache.checkpoints.rows["state"].whole.clone()
        before = [cache.usage(pool).as_dict() for pool in ("kv", "active", "checkpoint")]
        with pytest.raises(error, match=message) as caught:
            lease.publish(tokens, source=1, pages=pages)
        del caught
        assert before == [cache.usage(pool).as_dict() for pool in ("kv", "active", "checkpoint")]
        slot = lease.state
        assert torch.equal(cache.checkpoints.state(slot), tensors[:, slot]), "what is cached is untouched"
        cache.check(engine_free=[3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("slot", [0, 3])
def test_loading_a_lease_into_no_slot(engine: EngineCache, slot: int) -> None:
    with engine.lease(engine.lookup(PROMPT)) as lease:
        with refused(engine, errors.SlotError, f"slot {slot}"):
            lease.load(slot)
        assert lease.state is not None, "it can still be loaded"


@pytest.mark.parametrize(
    ("use", "error", "name"),
    [
        (lambda cache, seq: cache.legal_depth(-1), errors.MisuseError, "tokens"),
        (lambda cache, seq: cache.evict("kv", -1), errors.MisuseError, "n"),
        (lambda cache, seq: cache.retire_step(-1), errors.UnknownStepError, "step"),
        (lambda cache, seq: cache.start(PROMPT, reserve=-1), errors.MisuseError, "reserve"),
        (lambda cache, seq: cache.lookup(PROMPT, max_length=-1), errors.MisuseError, "max_length"),
        (lambda cache, seq: seq.grow(-1), errors.MisuseError, "n"),
        (lambda cache, seq: seq.checkpoint(-1), errors.MisuseError, "depth"),
        (lambda cache, seq: seq.checkpoint(8, source=-1), errors.NotYourSlotError, "source"),
    ],
)
def test_a_negative_number(
    cache: PrefixCache,
    seq: Sequence,
    use: Callable[[PrefixCache, Sequence], Any],
    error: type[Exception],
    name: str,
) -> None:
    with refused(cache, error, rf"^{name} -1 is outside 0\.\."):
        use(cache, seq)


def test_an_unknown_pool(cache: PrefixCache) -> None:
    with refused(cache, errors.MisuseError, "swap"):
        cache.usage("swap")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page size 0"),
        ({"page_size": 2**32}, r"page_size 4294967296 is outside 0\.\.2\*\*32 - 1"),
        ({"checkpoint_stride": -1}, r"checkpoint_stride -1 is outside 0\.\.2\*\*32 - 1"),
        ({"kv_pages": -1}, r"kv_pages -1 is outside 0\.\.2\*\*32 - 1"),
        ({"page_bytes": -1}, r"kv_page_bytes -1 is outside 0\.\.2\*\*64 - 1"),
        ({"checkpoint_stride": 0}, "checkpoint stride 0"),
        ({"checkpoint_slots": 0}, "checkpoint_slots must be at least 1, got 0"),
        ({"active_slots": 0}, "active_slots must be at least 1, got 0"),
        ({"kv_pages": 1}, "1 kv pages of 4 tokens hold 4 tokens, no more than the first legal depth 8"),
        ({"format": "fp8"}, "int8, bf16, native, got 'fp8'"),
    ],
)
def test_a_configuration_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make(**change)
