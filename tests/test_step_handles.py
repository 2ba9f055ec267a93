"""Steps that do not end as they should: interrupted, failed, forgotten."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from interrupts import interrupt
from radixstate import PrefixCache, StateSpec, Stored
from radixstate.errors import OutOfSlotsError, UnknownStepError, WrongCacheError
from radixstate.testing import CheckedCache

SPEC = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
PROMPT = list(range(9))


def make(kind: type[PrefixCache] = CheckedCache, **changes: Any) -> PrefixCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 4, "kv_pages": 16, "page_size": 2, "checkpoint_stride": 4}
    return kind(SPEC, **(sizes | changes))


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    """Compares every call with the reference; sound when the test is done."""
    cache = make()
    yield cache
    cache.check()


def cached(cache: PrefixCache, prompt: list[int] = PROMPT, depth: int = 8) -> Stored:
    with cache.start(prompt) as seq:
        cache.active.state(seq.slot).fill_(1.0)
        stored = seq.checkpoint(depth)
    assert isinstance(stored, Stored)
    return stored


def retiring(cache: PrefixCache) -> list[int]:
    """What waits for a step: nothing, unless one is in flight."""
    gc.collect()
    cache.start(PROMPT, no_read=True).finish()
    return [cache.usage(pool).retiring for pool in ("kv", "active", "checkpoint")]


NOTHING = [0, 0, 0]


# --- a step whose work failed ---


def test_a_state_stored_in_a_step_whose_body_raises_is_not_found(cache: PrefixCache) -> None:
    def serve() -> None:
        with cache.step():
            cached(cache)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    assert cache.lookup(PROMPT).length == 0
    assert cache.stats().skipped.non_finite == 1
    assert retiring(cache) == NOTHING


def test_a_body_that_raises_takes_no_state_of_another_step(cache: PrefixCache) -> None:
    before = cached(cache, PROMPT[::-1])
    outer = cache.begin_step()
    mine = cached(cache, [7] * 9)

    def serve() -> None:
        with cache.step():
            cached(cache)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    cache.retire_step(outer)
    found = [cache.lookup(it).length for it in (PROMPT, PROMPT[::-1], [7] * 9)]
    assert found == [0, before.depth, mine.depth]


def test_a_step_that_failed_withdraws_all_that_was_stored_in_it(cache: PrefixCache) -> None:
    step = cache.begin_step()
    with cache.start(PROMPT) as seq:
        cache.active.state(seq.slot).fill_(1.0)
        outcomes = [seq.checkpoint(4), seq.checkpoint(8)]
    assert all(isinstance(it, Stored) for it in outcomes)
    cached(cache, PROMPT[::-1])
    cache.retire_step(step, failed=True)
    assert [cache.lookup(it).length for it in (PROMPT, PROMPT[::-1])] == [0, 0]
    assert cache.usage("checkpoint").free == 4


def test_a_failure_told_after_the_step_has_retired_changes_nothing(cache: PrefixCache) -> None:
    step = cache.begin_step()
    cached(cache)
    cache.retire_step(step)
    cache.retire_step(step, failed=True)
    assert cache.lookup(PROMPT).length == 8


def test_a_failure_of_a_step_that_was_never_begun_is_refused(cache: PrefixCache) -> None:
    with pytest.raises(UnknownStepError):
        cache.retire_step(1, failed=True)


def test_a_step_that_is_left_by_dropping_its_block_has_failed(cache: PrefixCache) -> None:
    block = cache.step()
    block.__enter__()
    cached(cache)
    del block
    assert cache.lookup(PROMPT).length == 0
    assert retiring(cache) == NOTHING


# --- a step is retired in any case ---


@pytest.mark.parametrize("kind", [PrefixCache, CheckedCache])
def test_a_step_ends_when_the_list_of_refused_states_cannot_be_made(kind: type[PrefixCache]) -> None:
    cache = make(kind)
    other = cached(cache, [7] * 9)
    step = cache.begin_step()
    cached(cache)

    def refused() -> Iterator[Stored]:
        yield other
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.retire_step(step, refused())
    assert [cache.lookup(it).length for it in (PROMPT, [7] * 9)] == [0, 0], "unknown, and known to be bad"
    assert retiring(cache) == NOTHING


def test_a_refused_state_of_another_cache_is_misuse_and_leaves_the_step_as_it_was() -> None:
    cache, other = make(PrefixCache), make(PrefixCache)
    step = cache.begin_step()
    cached(cache)
    with pytest.raises(WrongCacheError):
        cache.retire_step(step, [cached(other)])
    assert cache.lookup(PROMPT).reason == "not_ready"
    cache.retire_step(step, failed=True)
    assert cache.lookup(PROMPT).length == 0, "what was stored in it was not forgotten"


def test_an_interrupted_step_is_over_when_its_block_is() -> None:
    for place in itertools.count():
        cache = make(PrefixCache)

        def serve(cache: PrefixCache = cache) -> None:
            with cache.step():
                pass

        if not interrupt(serve, place):
            break
        assert retiring(cache) == NOTHING, f"interrupted at place {place}"


def test_a_step_that_is_interrupted_while_it_retires_is_over_when_its_handle_is_gone() -> None:
    for place in itertools.count():
        cache = make(PrefixCache)
        step = [cache.begin_step()]
        interrupted = interrupt(lambda cache=cache, step=step: cache.retire_step(step.pop()), place)
        assert retiring(cache) == NOTHING, f"interrupted at place {place}"
        if not interrupted:
            break


@pytest.mark.parametrize("stores", [False, True])
def test_a_step_that_nobody_has_any_more_is_over(stores: bool) -> None:
    cache = make(PrefixCache)
    steps = [cache.begin_step()]
    if stores:
        cached(cache)
    steps.clear()
    assert retiring(cache) == NOTHING
    assert cache.lookup(PROMPT).reason != "not_ready"


# --- a shortage tells what to do ---


def test_a_shortage_says_what_waits_for_a_step(cache: PrefixCache) -> None:
    step = cache.begin_step()
    cache.start(PROMPT).finish()
    running = [cache.start([it]) for it in (1, 2)]
    with pytest.raises(OutOfSlotsError) as short:
        cache.start([3])
    assert vars(short.value) == {"pool": "active", "wanted": 1, "free": 0, "evictable": 0, "retiring": 1}
    with pytest.raises(OutOfSlotsError, match=r"^kv pool: wanted 10, 9 free, 0 evictable, 5 retiring$"):
        running[0].grow(20)
    cache.retire_step(step)
    running[0].grow(20)
    cache.start([3]).finish()
