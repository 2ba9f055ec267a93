"""The boundary to the core: what calls return."""

from array import array

import numpy as np
import pytest
from native import DEPTH, PROMPT, engine, make, publish, reserve, running, store
from radixstate import _native
from radixstate._native import Namespace, PendingHandle, Skipped, Started, StartRequest, Stored

# Results


def test_a_first_request_clears_its_slot_and_stores() -> None:
    cache = make()
    started = cache.start(PROMPT)
    assert (started.load_from, started.slot) == (None, 1)
    assert repr(started) == (
        "Started(match=Match(length=0, kv_length=0, branch=None, reason='no_prefix'), load_from=None, slot=1)"
    )
    cache.loaded(started.sequence)
    pending = reserve(cache, started)
    assert repr(pending) == "PendingHandle(slot=1, depth=8, used=False)"
    stored = cache.commit(started.sequence, pending)
    assert isinstance(stored, Stored)
    assert (stored.depth, stored.slot, stored.step, stored.replaced) == (8, pending.slot, None, None)
    assert repr(stored) == f"Stored(depth=8, slot=1, serial={stored.serial}, step=None, replaced=None)"


def test_a_second_request_loads_what_the_first_stored() -> None:
    cache = make()
    stored = store(cache)
    started = cache.start(PROMPT)
    assert started.load_from == stored.slot
    assert started.match == cache.lookup(PROMPT)
    assert repr(started.match) == "Match(length=8, kv_length=8, branch=None, reason='hit')"


def test_a_match_says_where_a_state_would_have_helped() -> None:
    cache = make()
    store(cache)
    match = cache.lookup([*PROMPT[:6], 99, 99])
    assert (match.length, match.kv_length, match.branch, match.reason) == (0, 6, 4, "no_state")


@pytest.mark.parametrize("max_length", [8, 7])
def test_max_length_caps_the_match(max_length: int) -> None:
    cache = make()
    store(cache)
    expected = 8 if max_length == 8 else 0
    assert cache.lookup(PROMPT, max_length=max_length).length == expected
    assert cache.start(PROMPT, max_length=max_length).match.length == expected


def test_what_a_sequence_holds_is_read_from_the_cache() -> None:
    cache = make()
    store(cache)
    seq = running(cache, [*PROMPT, 50], reserve=12).sequence
    assert cache.slot(seq) == 1
    assert (cache.reused(seq), cache.length(seq), cache.claimed(seq), cache.leased(seq)) == (8, 10, 12, 8)
    assert len(cache.pages(seq)) == 6
    assert cache.tokens(seq) == [*PROMPT, 50]
    assert cache.take_slot(seq) == 2
    assert cache.slots(seq) == [1, 2]


def test_grow_append_and_shrink_move_the_claim() -> None:
    cache = make()
    seq = running(cache).sequence
    cache.grow(seq, 5)
    cache.append(seq, array("q", [70, 71]))
    assert (cache.length(seq), cache.claimed(seq), len(cache.pages(seq))) == (11, 14, 7)
    cache.shrink(seq)
    assert (cache.claimed(seq), len(cache.pages(seq))) == (11, 6)
    assert cache.tokens(seq)[-2:] == [70, 71]


def test_no_read_reuses_nothing_and_no_store_stores_nothing() -> None:
    cache = make()
    store(cache)
    assert cache.start(PROMPT, no_read=True).match.length == 0
    started = running(cache, no_store=True)
    skipped = cache.reserve_checkpoint(started.sequence, 8, 1)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.wanted) == ("no_store", None)
    assert repr(skipped) == "Skipped(reason='no_store')"


@pytest.mark.parametrize(("depth", "reason"), [(0, "not_aligned"), (8, "duplicate")])
def test_a_skip_names_its_reason(depth: int, reason: str) -> None:
    cache = make()
    store(cache)
    started = running(cache, no_read=True)
    skipped = cache.reserve_checkpoint(started.sequence, depth, 1)
    assert isinstance(skipped, Skipped)
    assert skipped.reason == reason


def test_a_skip_for_want_of_room_has_the_numbers() -> None:
    cache = make(checkpoint_slots=1)
    started = running(cache)
    pending = reserve(cache, started, 4)
    skipped = cache.reserve_checkpoint(started.sequence, 8, 1)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.wanted, skipped.free, skipped.evictable) == ("no_room", 1, 0, 0)
    assert repr(skipped) == "Skipped(reason='no_room', wanted=1, free=0, evictable=0)"
    assert not pending.used


def test_what_a_sequence_older_than_a_reset_commits_is_skipped() -> None:
    cache = make()
    started = running(cache)
    pending = reserve(cache, started)
    cache.reset()
    skipped = cache.commit(started.sequence, pending)
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "reset"


def test_a_commit_names_the_tokens_whose_pages_were_replaced() -> None:
    cache = make()
    first, second = running(cache), running(cache)
    cache.commit(first.sequence, reserve(cache, first, 4))
    before = cache.pages(second.sequence)
    stored = cache.commit(second.sequence, reserve(cache, second, 8))
    assert isinstance(stored, Stored)
    assert stored.replaced == (0, 4)
    assert cache.pages(second.sequence)[:2] == cache.pages(first.sequence)[:2] != before[:2]


def test_evict_says_what_it_freed_in_all_pools() -> None:
    cache = make()
    store(cache)
    freed = cache.evict("checkpoint", 1)
    assert (freed.kv, freed.checkpoints) == (4, 1)
    assert repr(freed) == "Freed(kv=4, checkpoints=1)"
    assert freed == cache.stats().evictions.asked
    assert cache.evict("kv", 1) == cache.evict("active", 1) != freed


def test_usage_counts_every_slot_of_a_pool() -> None:
    cache = make()
    store(cache)
    running(cache, [5, 6, 7])
    usage = cache.usage("kv")
    assert usage.as_dict() == {
        "capacity": 16,
        "free": 12,
        "held": 0,
        "evictable": 4,
        "pinned": 0,
        "retiring": 0,
        "outbox": 0,
    }
    assert repr(usage) == ("Usage(capacity=16, free=12, held=0, evictable=4, pinned=0, retiring=0, outbox=0)")
    assert repr(cache) == "Cache(kv=4/16, active=0/2, checkpoints=1/2)"


def test_stats_are_also_nested_dicts() -> None:
    cache = make(kv_page_bytes=10, active_bytes=100, checkpoint_bytes=50)
    store(cache)
    started = running(cache)
    stats = cache.stats()
    assert (stats.starts, stats.hits, stats.hit_tokens, stats.misses.no_prefix, stats.stored) == (
        2,
        1,
        8,
        1,
        1,
    )
    assert (stats.bytes.kv, stats.bytes.active, stats.bytes.checkpoints) == (50, 100, 50)
    plain = stats.as_dict()
    assert plain["misses"] == {"no_prefix": 1, "no_state": 0, "unaligned": 0, "not_ready": 0}
    assert plain["evictions"]["for_kv"] == {"kv": 0, "checkpoints": 0}
    assert set(plain) == {name for name in dir(stats) if not name.startswith("_")} - {"as_dict"}
    assert repr(stats).startswith("Stats(lookups=0, starts=2, hits=1, hit_tokens=8,")
    assert stats == cache.stats()
    cache.finish(started.sequence)
    assert stats != cache.stats()


def test_legal_depths_are_multiples_of_the_lcm() -> None:
    cache = make(page_size=6, checkpoint_stride=4)
    assert [cache.legal_depth(n) for n in (11, 12, 25)] == [0, 12, 24]


def test_namespaces_never_match_each_other() -> None:
    cache = make()
    german = Namespace(adapter=7, tenant="acme", weights=2)
    store(cache)
    assert cache.lookup(PROMPT, german).length == 0
    assert cache.lookup(PROMPT, Namespace()).length == DEPTH
    assert (german.adapter, german.tenant, german.weights) == (7, "acme", 2)
    assert repr(german) == "Namespace(adapter=7, tenant='acme', weights=2)"
    assert {german: 1}[Namespace(7, "acme", 2)] == 1
    assert german != Namespace(7, "acme", 3)


# A step's worth of starts


def test_start_many_returns_a_result_or_an_exception_for_each() -> None:
    cache = make()
    store(cache)
    requests = [StartRequest(PROMPT), StartRequest([]), StartRequest([1], no_read=True), StartRequest([2])]
    hit, empty, miss, busy = cache.start_many(iter(requests))
    assert isinstance(hit, Started)
    assert hit.match.length == DEPTH
    assert isinstance(miss, Started)
    assert isinstance(empty, _native.EmptyPromptError)
    assert isinstance(busy, _native.OutOfSlotsError)
    assert (busy.pool, busy.wanted) == ("active", 1)
    cache.finish(hit.sequence)
    assert isinstance(cache.start_many(requests[3:])[0], Started)


def test_a_request_keeps_its_own_tokens() -> None:
    cache = make()
    store(cache)
    tokens = array("I", PROMPT)
    request = StartRequest(tokens, Namespace(), reserve=12, max_length=8)
    tokens[0] = 99
    (started,) = cache.start_many((request,))
    assert isinstance(started, Started)
    assert (started.match.length, cache.claimed(started.sequence)) == (8, 12)
    assert (len(request), repr(request)) == (9, "StartRequest(9 tokens)")


# Steps


def test_a_checkpoint_is_ready_when_its_step_retires() -> None:
    cache = make()
    step = cache.begin_step()
    stored = store(cache)
    assert stored.step == step
    assert cache.lookup(PROMPT).reason == "not_ready"
    assert cache.usage("active").retiring == 1
    cache.retire_step(step)
    assert cache.lookup(PROMPT).length == DEPTH
    assert cache.usage("active").free == 2


def test_a_refused_checkpoint_is_withdrawn() -> None:
    cache = make()
    step = cache.begin_step()
    cache.retire_step(step, iter([store(cache)]))
    assert cache.lookup(PROMPT).length == 0
    again = store(cache)
    assert cache.lookup(PROMPT).length == DEPTH
    cache.invalidate(again)
    assert cache.lookup(PROMPT).length == 0
    assert cache.stats().skipped.non_finite == 2


def test_a_step_counts_as_its_number() -> None:
    cache = make()
    step, later = cache.begin_step(), cache.begin_step()
    assert (step.id, int(step), hash(step), repr(step)) == (1, 1, hash(1), "Step(1)")
    assert step == 1 == cache.begin_step().id - 2
    assert len({step, later, 1, 2}) == 2
    assert step != later
    assert step != "1"


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_what_was_stored_in_a_step_is_withdrawn_when_nobody_reports_it(how: str) -> None:
    cache = make()
    steps = [cache.begin_step()]
    store(cache)
    if how == "cancel":
        cache.cancel_step(steps[0])
    steps.clear()
    assert cache.lookup(PROMPT).reason == "no_prefix"
    assert (cache.usage("active").free, cache.usage("kv").free, cache.usage("checkpoint").free) == (2, 16, 2)
    assert cache.stats().skipped.non_finite == 1


def test_a_step_that_was_retired_is_dropped_without_effect() -> None:
    cache = make()
    steps = [cache.begin_step()]
    store(cache)
    cache.retire_step(steps[0].id)
    steps.clear()
    assert cache.lookup(PROMPT).length == DEPTH


@pytest.mark.parametrize("finite", [True, False])
def test_a_state_that_is_not_proven_is_ready_when_its_ticket_is_completed(finite: bool) -> None:
    cache = make()
    started = running(cache)
    stored = cache.commit(started.sequence, reserve(cache, started), proven=False)
    assert isinstance(stored, Stored)
    assert (stored.step, stored.ticket) == (None, 1)
    assert cache.lookup(PROMPT).reason == "not_ready"
    for _ in range(2):
        cache.complete(1, finite)
    assert cache.lookup(PROMPT).length == (DEPTH if finite else 0)
    assert cache.stats().skipped.non_finite == (not finite)
    assert store(make()).ticket is None


def test_a_store_is_skipped_whose_pages_another_request_is_still_writing() -> None:
    cache = make()
    step = cache.begin_step()
    first, second = running(cache), running(cache)
    pages = cache.pages(second.sequence)
    cache.commit(first.sequence, reserve(cache, first, 4))
    skipped = cache.reserve_checkpoint(second.sequence, DEPTH, second.slot or 0)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, cache.stats().skipped.not_ready) == ("not_ready", 1)
    assert cache.pages(second.sequence) == pages
    cache.retire_step(step)
    assert isinstance(cache.commit(second.sequence, reserve(cache, second)), Stored)


def test_a_path_that_was_refused_twice_is_kept_until_its_writer_is_done() -> None:
    cache = make()
    upper, started = store(cache, depth=4), running(cache)
    lower = cache.commit(started.sequence, reserve(cache, started), proven=False)
    cache.finish(started.sequence)
    assert isinstance(lower, Stored)
    assert lower.ticket
    cache.invalidate(lower)
    cache.invalidate(upper)
    assert cache.usage("kv").pinned == 4
    cache.complete(lower.ticket, True)
    assert cache.usage("kv").free == 16


def test_a_cache_draws_what_lookups_can_reach() -> None:
    cache = make()
    empty = cache.draw()
    store(cache)
    assert len(cache.draw().splitlines()) == len(empty.splitlines()) + 2, (
        f"a namespace and a run: {cache.draw()}"
    )


# The lower layer


def test_publishing_adopts_the_engines_pages_once() -> None:
    cache = engine()
    first = publish(cache, [5, 6, 7, 8])
    assert isinstance(first.outcome, Stored)
    assert repr(first) == f"Published(outcome={first.outcome!r}, replaced=None)"
    lease = cache.lease(cache.lookup(PROMPT))
    assert cache.lease_state(lease) == first.outcome.slot
    assert (cache.lease_depth(lease), cache.lease_pages(lease)) == (8, [5, 6, 7, 8])
    cache.lease_loaded(lease)
    assert cache.lease_state(lease) is None
    cache.release(lease)
    assert cache.evict("kv", 1).kv == 4
    assert sorted(cache.take_freed()) == [5, 6, 7, 8]
    assert cache.take_freed() == []


def test_pages_that_are_cached_already_stay_the_engines() -> None:
    cache = engine()
    match = cache.lookup(PROMPT)
    late = cache.lease(match)
    pending = cache.reserve(late, PROMPT[:DEPTH], [1, 2, 3, 4])
    assert isinstance(pending, PendingHandle)
    publish(cache, [5, 6, 7, 8])
    published = cache.publish(late, np.array(PROMPT[:DEPTH]), array("I", [1, 2, 3, 4]), pending)
    assert isinstance(published.outcome, Skipped)
    assert published.outcome.reason == "duplicate"
    assert published.replaced == (0, 8)
    assert cache.lease_pages(late) == [5, 6, 7, 8]


def test_pages_that_another_lease_is_still_writing_are_named_to_nobody() -> None:
    cache = engine()
    late = cache.lease(cache.lookup(PROMPT))
    pending = cache.reserve(late, PROMPT[:DEPTH], [1, 2, 3, 4])
    assert isinstance(pending, PendingHandle)
    step = cache.begin_step()
    early = cache.lease(cache.lookup(PROMPT))
    first = cache.reserve(early, PROMPT[:4], [5, 6])
    assert isinstance(first, PendingHandle)
    cache.publish(early, PROMPT[:4], [5, 6], first)
    published = cache.publish(late, PROMPT[:DEPTH], [1, 2, 3, 4], pending)
    assert isinstance(published.outcome, Skipped)
    assert published.outcome.reason == "not_ready"
    assert (published.replaced, cache.lease_depth(late)) == (None, 0)
    cache.retire_step(step)


def test_pages_are_shared_without_a_state_and_a_state_is_attached_to_them() -> None:
    cache = engine()
    lease = cache.lease(cache.lookup(PROMPT))
    extended = cache.extend(lease, PROMPT[:6], array("i", [5, 6, 7]))
    assert repr(extended) == "Extended(skipped=None, replaced=None)"
    assert (cache.lease_depth(lease), cache.lease_pages(lease, 2)) == (6, [6, 7])
    pending = cache.reserve(lease, PROMPT[:4])
    assert isinstance(pending, PendingHandle)
    assert isinstance(cache.attach(lease, PROMPT[:4], pending), Stored)
    step = cache.begin_step()
    other = cache.lease(cache.lookup(PROMPT, max_length=0))
    again = cache.extend(other, PROMPT[:8], [1, 2, 3, 4])
    assert again.replaced == (0, 6)
    late = cache.extend(cache.lease(cache.lookup(PROMPT, max_length=0)), PROMPT[:8], [9, 10, 11, 12])
    assert (late.skipped.reason if late.skipped else None, late.replaced) == ("not_ready", None)
    assert repr(late) == "Extended(skipped=Skipped(reason='not_ready'), replaced=None)"
    cache.retire_step(step)


def test_a_batch_is_reserved_as_a_whole_or_not_at_all() -> None:
    cache = make()
    started = running(cache)
    seq, slot = started.sequence, started.slot
    with pytest.raises(_native.UnalignedError):
        cache.reserve_checkpoints([(seq, 8, slot), (seq, 7, slot)])
    assert cache.usage("checkpoint").free == 2
    reserved = cache.reserve_checkpoints([(seq, 8, slot), (seq, 8, slot)])
    assert [type(it) for it in reserved] == [PendingHandle, PendingHandle]
    cache.finish(seq)
    with pytest.raises(_native.UseAfterFinishError, match="finished or aborted"):
        cache.reserve_checkpoints([(seq, 8, slot)])
