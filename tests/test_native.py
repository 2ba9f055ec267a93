"""The boundary to the core: conversions, results, errors, handles, threads."""

import copy
import gc
import pickle
import threading
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from radixstate import _native
from radixstate._native import Cache, Namespace, PendingHandle, Request, Skipped, Started, Stored
from torch._subclasses.fake_tensor import FakeTensorMode

PROMPT = list(range(9))  # 4 pages of 2 tokens and one token more
DEPTH = 8


def make(**sizes: Any) -> Cache:
    """Pages of 2 tokens, checkpoints at multiples of 4."""
    defaults: dict[str, Any] = {
        "page_size": 2,
        "checkpoint_stride": 4,
        "kv_pages": 16,
        "active_slots": 2,
        "checkpoint_slots": 2,
    }
    return Cache(**(defaults | sizes))


def external(**sizes: Any) -> Cache:
    return make(kv_external=True, active_external=True, **sizes)


def running(cache: Cache, tokens: Iterable[int] = PROMPT, **options: Any) -> Started:
    started = cache.start(tokens, **options)
    cache.loaded(started.sequence)
    return started


def reserve(cache: Cache, started: Started, depth: int = DEPTH) -> PendingHandle:
    pending = cache.reserve_checkpoint(started.sequence, depth, started.slot or 1)
    assert isinstance(pending, PendingHandle)
    return pending


def store(cache: Cache, tokens: Iterable[int] = PROMPT, depth: int = DEPTH) -> Stored:
    """A whole request that caches its state at `depth`."""
    started = running(cache, tokens)
    stored = cache.commit(started.sequence, reserve(cache, started, depth))
    assert isinstance(stored, Stored)
    cache.finish(started.sequence)
    return stored


def publish(cache: Cache, pages: list[int]) -> _native.Published:
    """The same for an engine with allocators of its own."""
    lease = cache.lease(cache.lookup(PROMPT))
    pending = cache.reserve(lease, PROMPT[:DEPTH])
    assert isinstance(pending, PendingHandle)
    published = cache.publish(lease, PROMPT[:DEPTH], pages, pending)
    cache.release(lease)
    return published


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
    skipped = cache.reserve_checkpoint(started.sequence, 4, 1)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.wanted) == ("no_store", None)
    assert repr(skipped) == "Skipped(reason='no_store')"


@pytest.mark.parametrize(("depth", "reason"), [(0, "not_aligned"), (8, "duplicate")])
def test_a_skip_names_its_reason(depth: int, reason: str) -> None:
    cache = make()
    store(cache)
    started = running(cache)
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
    german = Namespace(adapter=7, tenant="acme", epoch=2)
    store(cache)
    assert cache.lookup(PROMPT, german).length == 0
    assert cache.lookup(PROMPT, Namespace()).length == DEPTH
    assert (german.adapter, german.tenant, german.epoch) == (7, "acme", 2)
    assert repr(german) == "Namespace(adapter=7, tenant='acme', epoch=2)"
    assert {german: 1}[Namespace(7, "acme", 2)] == 1
    assert german != Namespace(7, "acme", 3)


# A step's worth of starts


def test_start_many_returns_a_result_or_an_exception_for_each() -> None:
    cache = make()
    store(cache)
    requests = [Request(PROMPT), Request([]), Request([1], no_read=True), Request([2])]
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
    request = Request(tokens, Namespace(), reserve=12, max_length=8)
    tokens[0] = 99
    (started,) = cache.start_many((request,))
    assert isinstance(started, Started)
    assert (started.match.length, cache.claimed(started.sequence)) == (8, 12)
    assert (len(request), repr(request)) == (9, "Request(9 tokens)")


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
    cache.refuse(again)
    assert cache.lookup(PROMPT).length == 0
    assert cache.stats().refusals.non_finite == 2


# The lower layer


def test_publishing_adopts_the_engines_pages_once() -> None:
    cache = external()
    first = publish(cache, [5, 6, 7, 8])
    assert isinstance(first.outcome, Stored)
    assert (first.canonical, first.duplicates) == ([5, 6, 7, 8], [])
    assert repr(first) == f"Published(outcome={first.outcome!r}, canonical=[5, 6, 7, 8], duplicates=[])"
    lease = cache.lease(cache.lookup(PROMPT))
    assert cache.lease_state(lease) == first.outcome.slot
    assert (cache.lease_depth(lease), cache.lease_pages(lease)) == (8, [5, 6, 7, 8])
    cache.lease_loaded(lease)
    assert cache.lease_state(lease) is None
    cache.release(lease)
    assert cache.evict("kv", 1).kv == 4
    assert sorted(cache.take_freed("kv")) == [5, 6, 7, 8]
    assert cache.take_freed("kv") == []


def test_pages_that_are_cached_already_stay_the_engines() -> None:
    cache = external()
    match = cache.lookup(PROMPT)
    late = cache.lease(match)
    pending = cache.reserve(late, PROMPT[:DEPTH])
    assert isinstance(pending, PendingHandle)
    publish(cache, [5, 6, 7, 8])
    published = cache.publish(late, np.array(PROMPT[:DEPTH]), array("I", [1, 2, 3, 4]), pending)
    assert isinstance(published.outcome, Skipped)
    assert published.outcome.reason == "duplicate"
    assert (published.canonical, published.duplicates) == ([5, 6, 7, 8], [1, 2, 3, 4])


def test_a_sequence_commits_the_engines_pages() -> None:
    cache = external()
    started = running(cache)
    assert (started.slot, cache.slots(started.sequence)) == (None, [])
    pending = reserve(cache, started)
    published = cache.commit_pages(started.sequence, torch.tensor([4, 3, 2, 1]), pending)
    assert isinstance(published.outcome, Stored)
    assert published.canonical == cache.pages(started.sequence) == [4, 3, 2, 1]


# Errors


def errors_of(parent: type[BaseException]) -> set[type[BaseException]]:
    return {error for error in parent.__subclasses__() if error.__module__ == "radixstate._native"}


def test_shortage_bug_and_misuse_never_mix() -> None:
    assert errors_of(_native.CacheError) == {
        _native.OutOfSlotsError,
        _native.NeverFitsError,
        _native.PoisonedError,
        _native.CheckError,
        _native.MisuseError,
    }
    assert issubclass(_native.MisuseError, ValueError)
    assert not issubclass(_native.OutOfSlotsError, ValueError)
    exported = {getattr(_native, name) for name in _native.__all__ if name.endswith("Error")}
    assert exported == errors_of(_native.CacheError) | errors_of(_native.MisuseError) | {_native.CacheError}
    assert all(error.__doc__ for error in exported)


def test_a_shortage_has_the_numbers_to_act_on() -> None:
    cache = make(kv_pages=6)
    store(cache)
    first = running(cache, [7, 8, 9])
    with pytest.raises(_native.OutOfSlotsError) as caught:
        cache.start([1] * 12)
    error = caught.value
    assert (error.pool, error.wanted, error.free, error.evictable) == ("kv", 6, 0, 4)
    assert str(error) == "kv pool: wanted 6, 0 free, 4 evictable"
    with pytest.raises(_native.NeverFitsError) as never:
        cache.grow(first.sequence, 10)
    assert (never.value.pool, never.value.wanted, never.value.capacity) == ("kv", 7, 6)
    assert str(never.value) == "kv pool: wanted 7, capacity 6: this can never fit"
    for shortage in (error, never.value):
        restored = pickle.loads(pickle.dumps(shortage))
        assert (str(restored), vars(restored)) == (str(shortage), vars(shortage))


def test_check_lists_every_violation() -> None:
    cache = external()
    publish(cache, [5, 6, 7, 8])
    cache.check()
    cache.check(engine_free={1, 2, 3, 4})
    with pytest.raises(_native.CheckError, match="2 invariants broken") as caught:
        cache.check(engine_free=[4, 5, 6])
    assert caught.value.violations == [
        "EngineFree: kv page 5 is free in the engine and Cached here",
        "EngineFree: kv page 6 is free in the engine and Cached here",
    ]


def misuse_config() -> None:
    make(checkpoint_slots=0)


def misuse_unaligned() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 6, 1)


def misuse_depth_past_end() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 12, 1)


def misuse_not_your_slot() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 8, 2)


def misuse_not_loaded() -> None:
    cache = make()
    cache.reserve_checkpoint(cache.start(PROMPT).sequence, 8, 1)


def misuse_already_loaded() -> None:
    cache = make()
    cache.loaded(running(cache).sequence)


def misuse_not_claimed() -> None:
    cache = make()
    cache.append(running(cache).sequence, [1, 2])


def misuse_length_mismatch() -> None:
    publish(external(), [1, 2, 3])


def misuse_not_your_pending() -> None:
    cache = make()
    first, second = running(cache), running(cache)
    cache.commit(second.sequence, reserve(cache, first))


def misuse_stale_after_eviction() -> None:
    cache = make()
    store(cache)
    match = cache.lookup(PROMPT)
    cache.evict("checkpoint", 1)
    cache.lease(match)


def misuse_stale_after_reset() -> None:
    cache = make()
    match = cache.lookup(PROMPT)
    cache.reset()
    cache.lease(match)


def misuse_unknown_step() -> None:
    cache = make()
    cache.begin_step()
    cache.retire_step(7)


def misuse_page_range() -> None:
    publish(external(), [1, 2, 3, 17])


def misuse_page_sign() -> None:
    publish(external(), [1, 2, -3, 4])


def misuse_page_twice() -> None:
    publish(external(), [1, 2, 3, 3])


def misuse_prefix_mismatch() -> None:
    cache = external()
    publish(cache, [5, 6, 7, 8])
    cache.reserve(cache.lease(cache.lookup(PROMPT)), [9] * DEPTH)


def misuse_internal_pages() -> None:
    publish(make(), [1, 2, 3, 4])


def misuse_external_slots() -> None:
    cache = external()
    cache.take_slot(running(cache).sequence)


def misuse_pool_name() -> None:
    make().usage("kvs")  # type: ignore[arg-type]


MISUSES: list[tuple[str, str, Callable[[], object]]] = [
    ("Config", "the checkpoint pool has 0 slots: nothing could ever be reused", misuse_config),
    ("EmptyPrompt", "a prompt has at least one token, got 0", lambda: make().start([])),
    (
        "Unaligned",
        "checkpoint depth 6 is not a multiple of 4 = lcm(page size, checkpoint stride)",
        misuse_unaligned,
    ),
    (
        "DepthPastEnd",
        "checkpoint depth 12 is past the 9 tokens this sequence has written",
        misuse_depth_past_end,
    ),
    ("NotYourSlot", "active slot 2 is not one of this sequence's slots", misuse_not_your_slot),
    (
        "NotLoaded",
        "a slot is a source only after its load or clear was reported by loaded()",
        misuse_not_loaded,
    ),
    ("AlreadyLoaded", "loaded() is reported once for each sequence", misuse_already_loaded),
    ("NotClaimed", "append would reach 11 tokens, only 9 are claimed: grow first", misuse_not_claimed),
    ("LengthMismatch", "3 pages given, 4 expected", misuse_length_mismatch),
    (
        "NotYourPending",
        "this pending checkpoint was reserved by another sequence or lease",
        misuse_not_your_pending,
    ),
    ("Stale", "stale match: its checkpoint was evicted after the lookup", misuse_stale_after_eviction),
    ("Stale", "stale match: the cache was reset after the lookup", misuse_stale_after_reset),
    ("UnknownStep", "step 7 was never begun, the newest is 1", misuse_unknown_step),
    ("PageOwnership", "kv page 17 is outside 1..=capacity", misuse_page_range),
    ("PageOwnership", "kv page -3 at position 2 is outside 1..=capacity", misuse_page_sign),
    ("PageOwnership", "kv page 3 is given twice", misuse_page_twice),
    (
        "PrefixMismatch",
        "the tokens do not begin with the 8 tokens of the leased prefix",
        misuse_prefix_mismatch,
    ),
    ("PoolMode", "the cache owns the kv pages: commit a sequence instead", misuse_internal_pages),
    ("PoolMode", "the engine allocates active slots: take one there", misuse_external_slots),
    ("Misuse", "pool 'kvs' is none of 'kv', 'active', 'checkpoint'", misuse_pool_name),
]


@pytest.mark.parametrize(("name", "message", "misuse"), MISUSES)
def test_a_misuse_names_the_rule_and_the_numbers(
    name: str, message: str, misuse: Callable[[], object]
) -> None:
    with pytest.raises(_native.MisuseError) as caught:
        misuse()
    assert (type(caught.value).__name__, str(caught.value)) == (f"{name}Error", message)


# Handles


def test_a_finished_sequence_refuses_every_use() -> None:
    cache = make()
    started = running(cache)
    seq, pending = started.sequence, reserve(cache, started)
    cache.finish(seq)
    assert seq.used
    assert repr(seq) == "SequenceHandle(used=True)"
    uses: list[Callable[[], object]] = [
        lambda: cache.finish(seq),
        lambda: cache.abort(seq),
        lambda: cache.loaded(seq),
        lambda: cache.pages(seq),
        lambda: cache.grow(seq, 1),
        lambda: cache.append(seq, [1]),
        lambda: cache.shrink(seq),
        lambda: cache.take_slot(seq),
        lambda: cache.reserve_checkpoint(seq, 4, 1),
        lambda: cache.commit(seq, pending),
    ]
    for use in uses:
        with pytest.raises(_native.UseAfterFinishError, match="this sequence was finished or aborted"):
            use()
    assert not pending.used


def test_abort_gives_everything_back() -> None:
    cache = make()
    cache.abort(running(cache).sequence)
    assert (cache.usage("kv").free, cache.usage("active").free) == (16, 2)


def test_a_released_lease_refuses_every_use() -> None:
    cache = make()
    lease = cache.lease(cache.lookup(PROMPT))
    assert repr(lease) == "LeaseHandle(used=False)"
    cache.release(lease)
    assert lease.used
    for use in (cache.release, cache.lease_state, cache.lease_depth, cache.lease_pages, cache.lease_loaded):
        with pytest.raises(_native.UseAfterFinishError, match="this lease was released"):
            use(lease)


def test_a_pending_checkpoint_is_committed_once() -> None:
    cache = make()
    started = running(cache)
    pending = reserve(cache, started)
    cache.commit(started.sequence, pending)
    assert pending.used
    assert (pending.slot, pending.depth) == (1, 8)
    with pytest.raises(_native.UseAfterFinishError, match="this pending checkpoint was committed"):
        cache.commit(started.sequence, pending)


def test_the_wrong_cache_consumes_no_handle() -> None:
    mine, other = make(), make()
    started, lease = running(mine), mine.lease(mine.lookup(PROMPT))
    seq, pending = started.sequence, reserve(mine, started)
    uses: list[Callable[[], object]] = [
        lambda: other.finish(seq),
        lambda: other.abort(seq),
        lambda: other.pages(seq),
        lambda: other.commit(seq, pending),
        lambda: other.commit_pages(seq, [], pending),
        lambda: other.release(lease),
        lambda: other.publish(lease, PROMPT[:DEPTH], [], pending),
        lambda: other.lease(mine.lookup(PROMPT)),
    ]
    for use in uses:
        with pytest.raises(_native.WrongCacheError, match="this handle belongs to another cache"):
            use()
    assert (seq.used, lease.used, pending.used) == (False, False, False)
    assert isinstance(mine.commit(seq, pending), Stored)
    mine.release(lease)
    mine.finish(seq)
    with pytest.raises(_native.WrongCacheError):
        other.refuse(store(mine, [3] * 5, 4))


def test_what_owns_slots_is_neither_copied_nor_sent_elsewhere() -> None:
    cache = make()
    started = running(cache)
    lease = cache.lease(cache.lookup(PROMPT))
    for owner in (cache, started, started.sequence, lease, reserve(cache, started)):
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot pickle .*object"):
                duplicate(owner)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError):
                pickle.loads(pickle.dumps(owner, protocol))


def test_results_are_frozen() -> None:
    cache = make()
    results = {"length": cache.lookup(PROMPT), "hits": cache.stats(), "epoch": Namespace()}
    for known, result in results.items():
        for name in (known, "invented"):
            with pytest.raises(AttributeError):
                setattr(result, name, 1)


# Threads


def test_a_sequence_dropped_by_another_thread_gives_everything_back() -> None:
    cache = make()
    held = [running(cache)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert (cache.usage("kv").free, cache.usage("active").free) == (16, 2)
    cache.check()


def test_a_handle_in_a_reference_cycle_is_given_back_by_the_collector() -> None:
    cache = make()
    started = running(cache)
    cycle: list[object] = [started, reserve(cache, started)]
    cycle.append(cycle)
    del started, cycle
    assert cache.usage("active").held == 1
    gc.collect()
    assert (cache.usage("active").free, cache.usage("checkpoint").free) == (2, 2)


def test_threads_share_a_cache() -> None:
    cache = make(kv_pages=64, active_slots=4, checkpoint_slots=4)
    failures: list[BaseException] = []

    def work(salt: int) -> None:
        try:
            for turn in range(100):
                started = running(cache, [salt, turn % 3, *PROMPT])
                pending = cache.reserve_checkpoint(started.sequence, DEPTH, started.slot or 0)
                if isinstance(pending, PendingHandle):
                    cache.commit(started.sequence, pending)
                cache.finish(started.sequence)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(salt,)) for salt in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check()
    stats = cache.stats()
    assert (failures, stats.starts, cache.usage("active").free) == ([], 400, 4)
    assert stats.stored + stats.duplicates + stats.refusals.no_room == 400


# Tokens

SOURCES: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "numpy ints": lambda tokens: [np.int32(token) for token in tokens],
    "array I": lambda tokens: array("I", tokens),
    "array i": lambda tokens: array("i", tokens),
    "array q": lambda tokens: array("q", tokens),
    "array Q": lambda tokens: array("Q", tokens),
    "array l": lambda tokens: array("l", tokens),
    "memoryview": lambda tokens: memoryview(array("I", [77, *tokens]))[1:],
    "read-only numpy": lambda tokens: np.frombuffer(array("q", tokens).tobytes(), np.int64),
    "numpy uint32": lambda tokens: np.array(tokens, np.uint32),
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
    "numpy uint64": lambda tokens: np.array(tokens, np.uint64),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "torch int64": lambda tokens: torch.tensor([77, *tokens])[1:],
    "torch uint32": lambda tokens: torch.tensor(tokens, dtype=torch.uint32),
    "torch uint64": lambda tokens: torch.tensor(tokens, dtype=torch.uint64),
}


@pytest.mark.parametrize("source", SOURCES)
def test_tokens_are_read_from(source: str) -> None:
    tokens = [0, 1, 2**31 - 1, *range(100, 140)]
    cache = make(kv_pages=64)
    started = running(cache, SOURCES[source](tokens))
    assert cache.tokens(started.sequence) == tokens
    cache.commit(started.sequence, reserve(cache, started, 40))
    assert cache.lookup(SOURCES[source](tokens)).length == 40
    assert len(Request(SOURCES[source](tokens))) == 43


@pytest.mark.parametrize(
    "make_tokens",
    [
        list,
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: torch.tensor(tokens, dtype=torch.int64),
        lambda tokens: torch.tensor(tokens, dtype=torch.uint32),
    ],
)
def test_the_largest_token_and_no_token_at_all(make_tokens: Callable[[list[int]], Any]) -> None:
    cache = make()
    assert cache.tokens(cache.start(make_tokens([2**32 - 1])).sequence) == [2**32 - 1]
    with pytest.raises(_native.EmptyPromptError):
        cache.lookup(make_tokens([]))


OUT_OF_RANGE: list[tuple[Any, int, int]] = [
    ([1, -1], 1, -1),
    ((2**32,), 0, 2**32),
    ([5, 10**30], 1, 10**30),
    (array("i", [3, 4, -2]), 2, -2),
    (array("q", [3, 2**40, -2]), 1, 2**40),
    (array("Q", [2**64 - 1]), 0, 2**64 - 1),
    (np.array([7, 8, 2**32]), 2, 2**32),
    (np.array([-(2**63)]), 0, -(2**63)),
    (torch.tensor([1, 2, 3, -100]), 3, -100),
    (torch.tensor([-1], dtype=torch.int32), 0, -1),
]


@pytest.mark.parametrize(("tokens", "position", "value"), OUT_OF_RANGE)
def test_a_token_out_of_range_is_named(tokens: Any, position: int, value: int) -> None:
    cache = make()
    started = running(cache, reserve=20)
    for use in (cache.lookup, cache.start, Request, lambda bad: cache.append(started.sequence, bad)):
        with pytest.raises(_native.TokenRangeError) as caught:
            use(tokens)
        assert str(caught.value) == f"token {value} at position {position} is outside 0..2**32 - 1"
    assert cache.length(started.sequence) == 9


EXPECTED = "native int32, int64, uint32 or uint64 expected, got"
UNFIT: list[tuple[Any, str]] = [
    (b"abcd", f"{EXPECTED} B"),
    (np.array([1.0]), f"{EXPECTED} d"),
    (np.array([1], np.int16), f"{EXPECTED} h"),
    (np.array([1], ">i8"), f"{EXPECTED} >q"),
    (np.array([True]), f"{EXPECTED} ?"),
    (np.array([[1, 2]]), "1 dimension expected, got 2"),
    (np.array(5), "no readable buffer: shape is null"),
    (np.arange(10)[::2], "contiguous memory expected, got a strided view"),
    (np.arange(10, dtype=np.uint32)[::-1], "contiguous memory expected, got a strided view"),
    (np.zeros(17, np.uint8)[1:].view(np.int64), "can't be of 8 bytes"),
    (torch.tensor([1.0]), f"{EXPECTED} torch.float32"),
    (torch.tensor([1], dtype=torch.int16), f"{EXPECTED} torch.int16"),
    (torch.tensor([[1, 2]]), "1 dimension expected, got 2"),
    (torch.tensor(5), "1 dimension expected, got 0"),
    (torch.arange(10)[::2], "contiguous memory expected, got a strided view"),
    (torch.empty(3, dtype=torch.int64, device="meta"), "a cpu tensor expected, got one on meta"),
]


@pytest.mark.parametrize(("tokens", "message"), UNFIT)
def test_memory_that_does_not_hold_tokens_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(_native.TensorError) as caught:
        make().lookup(tokens)
    assert str(caught.value).startswith("tokens: ")
    assert str(caught.value).endswith(message)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.tensor([1, 2, 3])
    with pytest.raises(_native.TensorError, match="3 numbers at address 0x0"):
        make().lookup(fake)


class Pretender:
    """Has an address like a tensor, and is none."""

    def data_ptr(self) -> int:
        return 1


@pytest.mark.parametrize("tokens", [5, None, "abc", [1, "a"], [1.5], [None], Pretender()])
def test_what_holds_no_integers_is_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError):
        make().lookup(tokens)


def test_an_array_is_free_to_grow_after_the_call() -> None:
    cache = make()
    tokens = array("I", PROMPT)
    store(cache, tokens)
    tokens.append(9)
    assert cache.lookup(tokens).length == DEPTH


def numbers(cache: Cache) -> dict[str, Callable[[Any], object]]:
    """Every argument that is an integer of 64 bits, by name and where it is given."""
    sequence = cache.start(PROMPT).sequence
    return {
        "tokens of legal_depth": cache.legal_depth,
        "n of evict": lambda number: cache.evict("kv", number),
        "n of grow": lambda number: cache.grow(sequence, number),
        "depth of reserve_checkpoint": lambda number: cache.reserve_checkpoint(sequence, number, 1),
        "step of retire_step": cache.retire_step,
        "max_length of lookup": lambda number: cache.lookup(PROMPT, max_length=number),
        "reserve of start": lambda number: cache.start(PROMPT, reserve=number),
        "max_length of start": lambda number: cache.start(PROMPT, max_length=number),
        "reserve of Request": lambda number: Request(PROMPT, reserve=number),
        "max_length of Request": lambda number: Request(PROMPT, max_length=number),
        "adapter of Namespace": Namespace,
        "epoch of Namespace": lambda number: Namespace(epoch=number),
        "kv_page_bytes of Cache": lambda number: make(kv_page_bytes=number),
        "active_bytes of Cache": lambda number: make(active_bytes=number),
        "checkpoint_bytes of Cache": lambda number: make(checkpoint_bytes=number),
    }


NUMBERS = sorted(numbers(make()))


@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("number", [-1, 2**64, np.int32(-7)])
def test_a_number_that_does_not_fit_is_misuse_with_its_name(argument: str, number: Any) -> None:
    name = argument.split()[0]
    with pytest.raises(_native.MisuseError) as refused:
        numbers(make())[argument](number)
    assert str(refused.value) == f"{name} {number} is outside 0..2**64 - 1"


@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("number", [1.0, "1", []])
def test_a_number_is_an_integer(argument: str, number: Any) -> None:
    with pytest.raises(TypeError, match=f"'{argument.split()[0]}'"):
        numbers(make())[argument](number)


@pytest.mark.parametrize(
    "size", ["page_size", "checkpoint_stride", "kv_pages", "active_slots", "checkpoint_slots"]
)
@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_size_that_does_not_fit_is_a_configuration_that_cannot_work(size: str, number: int) -> None:
    with pytest.raises(_native.ConfigError) as refused:
        make(**{size: number})
    assert str(refused.value) == f"{size} {number} is outside 0..2**32 - 1"


def test_a_source_that_does_not_fit_is_not_a_slot_of_the_sequence() -> None:
    cache = make()
    sequence = cache.start(PROMPT).sequence
    with pytest.raises(_native.NotYourSlotError, match=r"^source -1 is outside 0\.\.2\*\*32 - 1$"):
        cache.reserve_checkpoint(sequence, DEPTH, -1)


def test_numbers_of_numpy_are_numbers() -> None:
    assert make().legal_depth(np.uint8(DEPTH)) == DEPTH


def test_a_number_that_python_does_not_print() -> None:
    with pytest.raises(_native.MisuseError, match=r"^n \(too long to print\) is outside"):
        make().evict("kv", 10**5000)
    with pytest.raises(
        _native.TokenRangeError, match=r"^token \(too long to print\) at position 1 is outside"
    ):
        make().lookup([1, 10**5000])
