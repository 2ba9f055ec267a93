"""Verdicts and steps between threads, caches and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from radixstate import PrefixCache, Skipped, Stored
from radixstate.errors import WrongCacheError
from test_finiteness import PROMPT, LateCache, put, reused

OTHER = list(range(100, 109))


def test_a_skipped_store_forgets_no_verdict_on_the_next_state_of_its_slot() -> None:
    cache = LateCache()
    forget, store = cache._proofs.forget, cache._transfer.store
    made = []

    def overtaken(pairs: list[tuple[int, int]]) -> Any:
        # Another thread stores the same prefix while this one encodes.
        cache._transfer.store = store  # type: ignore[method-assign]
        assert isinstance(second.checkpoint(8), Stored)
        cache._proofs.forget = forgets  # type: ignore[method-assign]
        return store(pairs)

    def forgets(*skipped: Any) -> None:
        # It takes the slot that has just come back.
        cache._proofs.forget = forget  # type: ignore[method-assign]
        made.append(put(cache, OTHER))
        forget(*skipped)

    with cache.start(PROMPT, no_read=True) as first, cache.start(PROMPT, no_read=True) as second:
        for seq in (first, second):
            cache.active.state(seq.slot).fill_(1.0)
        cache._transfer.store = overtaken  # type: ignore[method-assign]
        assert first.checkpoint(8) == Skipped("duplicate")
    assert isinstance(made[0], Stored)
    assert reused(cache, OTHER) == 8
    cache.check()


def test_a_report_overtaken_by_another_takes_no_verdict_on_a_later_state() -> None:
    cache = LateCache()
    put(cache)
    second = put(cache, OTHER)
    assert isinstance(second, Stored)
    later = [[n, *PROMPT[1:]] for n in (1, 2)]

    def overtake() -> None:
        # Another thread reads all that is out, evicts, and stores in the same slots.
        cache.evict("checkpoint", 8)
        assert second.slot in {stored.slot for stored in map(put_into, later)}

    def put_into(prompt: list[int]) -> Stored:
        stored = put(cache, prompt)
        assert isinstance(stored, Stored)
        return stored

    cache.at_wait = [overtake]
    cache.lookup(PROMPT)
    assert [reused(cache, prompt) for prompt in later] == [8, 8]
    cache.check()


@pytest.mark.parametrize("how", ["failed", "dropped"])
def test_nothing_is_to_be_read_of_a_step_that_failed(how: str) -> None:
    cache = LateCache()
    step = cache.begin_step()
    put(cache)
    if how == "failed":
        cache.retire_step(step, failed=True)
    del step
    cache.stats()
    assert not cache._proofs
    lookups = cache.stats().lookups
    assert reused(cache, OTHER) == 0
    assert cache.stats().lookups == lookups


def test_a_batch_that_needs_the_slots_of_unproven_states_waits_for_them() -> None:
    cache = LateCache()
    for n in range(8):
        put(cache, [n, *PROMPT[1:]])
    with cache.start(OTHER, no_read=True) as seq:
        cache.active.state(seq.slot).fill_(1.0)
        (made,) = cache.checkpoint_many([(seq, 8, seq.slot)])
    assert isinstance(made, Stored)
    cache.check()


END: list[Callable[[PrefixCache, object], None]] = [
    lambda cache, step: cache.retire_step(step),  # type: ignore[arg-type]
    lambda cache, step: cache.retire_step(step, failed=True),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("end", END)
def test_a_step_of_another_cache_ends_none_here(end: Callable[[PrefixCache, object], None]) -> None:
    cache, other = LateCache(), LateCache()
    here, there = cache.begin_step(), other.begin_step()
    cache.start(PROMPT).finish()
    with pytest.raises(WrongCacheError):
        end(cache, there)
    assert cache.usage("active").retiring == 1
    cache.retire_step(here)
    assert cache.usage("active").retiring == 0


def test_a_state_stored_between_the_last_verdict_of_a_step_and_its_end_is_asked_about() -> None:
    cache = LateCache()
    step = cache.begin_step()
    put(cache)
    report = cache._proofs.report

    def overtaken(number: int | None) -> None:
        cache._proofs.report = report  # type: ignore[method-assign]
        report(number)
        put(cache, OTHER)  # by another thread

    cache._proofs.report = overtaken  # type: ignore[method-assign]
    cache.retire_step(step)
    assert [reused(cache, prompt) for prompt in (PROMPT, OTHER)] == [8, 8]
