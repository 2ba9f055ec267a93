"""Handles of the native cache: used once, with their own cache, from any thread, and never copied."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable

import pytest
from native import DEPTH, PROMPT, engine, make, reserve, running, store
from radixstate import _native
from radixstate._native import Namespace, PendingHandle, Stored


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
        lambda: other.release(lease),
        lambda: engine().publish(lease, PROMPT[:DEPTH], [], pending),
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
        other.invalidate(store(mine, [3] * 5, 4))


def test_what_owns_slots_is_neither_copied_nor_sent_elsewhere() -> None:
    cache = make()
    started = running(cache)
    lease = cache.lease(cache.lookup(PROMPT))
    for owner in (cache, started, started.sequence, lease, reserve(cache, started), cache.begin_step()):
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot pickle .*object"):
                duplicate(owner)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError):
                pickle.loads(pickle.dumps(owner, protocol))


def test_results_are_frozen() -> None:
    cache = make()
    results = {"length": cache.lookup(PROMPT), "hits": cache.stats(), "weights": Namespace()}
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
    assert stats.stored + stats.duplicates + stats.skipped.no_room == 400
