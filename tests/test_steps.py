"""Steps in flight: what a step may still touch is nobody else's, and all of it comes back exactly once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from radixstate import PrefixCache, Sequence, Skipped, StateSpec, Stored
from radixstate.errors import OutOfSlotsError, UnknownStepError
from radixstate.testing import CheckedCache

SPEC = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
PROMPT = list(range(9))
POOLS = ("kv", "active", "checkpoint")


def make(**changes: Any) -> CheckedCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 2, "kv_pages": 12, "page_size": 2, "checkpoint_stride": 4}
    return CheckedCache(SPEC, **(sizes | changes))


@pytest.fixture
def cache() -> Iterator[CheckedCache]:
    """Compares every call with the reference; sound when the test is done."""
    cache = make()
    yield cache
    cache.check()


def compute(cache: PrefixCache, seq: Sequence, value: float = 1.0) -> None:
    """Stands for the model."""
    cache.active.state(seq.slot).fill_(value)


def cached(cache: PrefixCache, prompt: list[int], depth: int = 8) -> Stored:
    with cache.start(prompt) as seq:
        compute(cache, seq)
        stored = seq.checkpoint(depth)
    assert isinstance(stored, Stored)
    return stored


def free(cache: PrefixCache) -> dict[str, int]:
    return {pool: cache.usage(pool).free + cache.usage(pool).evictable for pool in POOLS}


def retiring(cache: PrefixCache) -> dict[str, int]:
    return {pool: cache.usage(pool).retiring for pool in POOLS}


def test_a_step_holds_what_was_given_back_until_it_has_run(cache: CheckedCache) -> None:
    with cache.step():
        cache.start(PROMPT).finish()
        assert retiring(cache) == {"kv": 5, "active": 1, "checkpoint": 0}
    assert retiring(cache) == dict.fromkeys(POOLS, 0)
    assert free(cache) == {"kv": 12, "active": 3, "checkpoint": 2}


def test_nothing_given_back_is_reused_while_a_step_that_may_touch_it_is_in_flight(
    cache: CheckedCache,
) -> None:
    with cache.step():
        first = cache.start(PROMPT)
        slot, pages = first.slot, set(first.pages)
        first.finish()
        others = [cache.start(list(range(5))) for _ in range(2)]
        assert slot not in {seq.slot for seq in others}
        assert pages.isdisjoint(page for seq in others for page in seq.pages)
        with pytest.raises(OutOfSlotsError):
            cache.start([1])
    assert cache.start([1]).slot == slot


def test_a_step_that_began_later_does_not_hold_what_was_given_back_before(cache: CheckedCache) -> None:
    early = cache.begin_step()
    cache.start(PROMPT).finish()
    late = cache.begin_step()
    cache.retire_step(early)
    assert retiring(cache) == dict.fromkeys(POOLS, 0)
    cache.retire_step(late)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_reordered_results_settle_when_the_oldest_step_has_run(
    cache: CheckedCache, order: tuple[int, ...]
) -> None:
    steps = []
    for _ in range(3):
        steps.append(cache.begin_step())
        cache.start([1, 2, 3]).finish()
    for done, which in enumerate(order, 1):
        cache.retire_step(steps[which])
        oldest = min({0, 1, 2} - set(order[:done]), default=3)
        assert retiring(cache) == {"kv": 2 * (3 - oldest), "active": 3 - oldest, "checkpoint": 0}


def test_a_repeated_result_changes_nothing(cache: CheckedCache) -> None:
    step = cache.begin_step()
    stored = cached(cache, PROMPT)
    cache.retire_step(step)
    before = cache.digest()
    cache.retire_step(step, [stored])
    assert (cache.digest(), cache.lookup(PROMPT).length) == (before, 8)


def test_a_result_of_a_step_that_was_never_begun_is_refused(cache: CheckedCache) -> None:
    with cache.step() as step, pytest.raises(UnknownStepError):
        cache.retire_step(step.id + 1)


def test_a_late_result_finds_its_requests_gone(cache: CheckedCache) -> None:
    step = cache.begin_step()
    stored = cached(cache, PROMPT)
    cache.reset()
    cache.start(PROMPT).abort()
    cache.retire_step(step, [stored])
    assert free(cache) == {"kv": 12, "active": 3, "checkpoint": 2}


def test_a_refusal_that_comes_after_the_state_was_evicted_hits_no_other(cache: CheckedCache) -> None:
    stored = cached(cache, PROMPT)
    cache.evict("checkpoint", 1)
    assert cached(cache, PROMPT[::-1]).slot == stored.slot
    with cache.step() as step:
        cache.retire_step(step, [stored])
    assert cache.lookup(PROMPT[::-1]).length == 8


def test_a_state_is_found_when_its_step_and_all_before_it_have_run(cache: CheckedCache) -> None:
    early, late = cache.begin_step(), cache.begin_step()
    assert cached(cache, PROMPT).step == late
    for step, reason in ((late, "not_ready"), (early, "hit")):
        cache.retire_step(step)
        assert cache.lookup(PROMPT).reason == reason


def test_a_refused_state_is_never_found(cache: CheckedCache) -> None:
    step = cache.begin_step()
    cache.retire_step(step, [cached(cache, PROMPT)])
    assert (cache.lookup(PROMPT).length, cache.usage("checkpoint").free) == (0, 2)


POINTS: list[Callable[[Sequence], object]] = [
    lambda seq: None,
    lambda seq: seq.grow(4),
    lambda seq: seq.append([7, 7]),
    lambda seq: seq.take_slot(),
    lambda seq: seq.checkpoint(4),
    lambda seq: seq.checkpoint(8),
    lambda seq: seq.shrink(),
]


@pytest.mark.parametrize("end", ["finish", "abort", "leave", "fail", "drop"])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("point", range(1, len(POINTS) + 1))
def test_a_request_that_ends_at_any_point_gives_everything_back_once(
    cache: CheckedCache, point: int, overlapped: bool, end: str
) -> None:
    steps = [cache.begin_step()] if overlapped else []
    live = [cache.start(PROMPT)]
    compute(cache, live[0])
    for act in POINTS[:point]:
        act(live[0])
    {
        "finish": live[0].finish,
        "abort": live[0].abort,
        "leave": lambda: live[0].__exit__(None, None, None),
        "fail": lambda: live[0].__exit__(RuntimeError, RuntimeError(), None),
        "drop": live.clear,
    }[end]()
    live.clear()
    for step in steps * 2:
        cache.retire_step(step)
    cache.lookup(PROMPT)
    assert retiring(cache) == dict.fromkeys(POOLS, 0)
    assert free(cache) == {"kv": 12, "active": 3, "checkpoint": 2}


@pytest.mark.parametrize(("pages", "short"), [(12, "for_kv"), (40, "for_checkpoint")])
def test_a_cache_that_always_has_a_step_in_flight_still_evicts_and_reuses(pages: int, short: str) -> None:
    cache = make(kv_pages=pages)
    reused, in_flight = [], cache.begin_step()
    for i in range(60):
        following = cache.begin_step()
        with cache.start([i // 3 % 5] * 9) as seq:  # three times in a row, in turn with four others
            compute(cache, seq, i)
            seq.checkpoint(8)
            reused.append(seq.reused)
        cache.retire_step(in_flight)
        in_flight = following
    assert reused == [0, 0, 8] * 20  # at the second time the step that writes the state is in flight
    assert cache.stats().evictions.as_dict()[short]["checkpoints"] >= 18  # at most two of 20 are left


def test_a_state_that_is_not_finite_keeps_its_slot_until_the_step_has_run(cache: CheckedCache) -> None:
    with cache.step():
        seq = cache.start(PROMPT)
        compute(cache, seq, float("nan"))
        assert seq.checkpoint(8) == Skipped("non_finite")
        assert retiring(cache)["checkpoint"] == 1
        seq.finish()
    assert free(cache)["checkpoint"] == 2


def test_a_step_is_over_when_its_body_raises(cache: CheckedCache) -> None:
    def serve() -> None:
        with cache.step():
            cache.start(PROMPT).finish()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    assert retiring(cache) == dict.fromkeys(POOLS, 0)
