"""The reference against hand-worked cases: the oracle must not need an oracle."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from radixstate.reference.base import ReferenceBase
from radixstate.reference.cache import ReferenceCache
from radixstate.reference.codec import decode, encode, scale_dtype
from radixstate.reference.engine import ReferenceEngineCache
from radixstate.reference.records import (
    Extended,
    Lease,
    Misuse,
    NeverFits,
    Pending,
    Published,
    Running,
    Shortage,
    Skipped,
    Stored,
)

PROMPT = list(range(1, 10))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def small_cache(**sizes: int) -> ReferenceCache:
    defaults = {
        "page_size": 2,
        "checkpoint_stride": 4,
        "kv_pages": 8,
        "active_slots": 2,
        "checkpoint_slots": 2,
    }
    return ReferenceCache(**(defaults | sizes))


def run(cache: ReferenceCache, tokens: list[int], depth: int, *, no_read: bool = False) -> Stored | Skipped:
    """A whole request which caches the state at `depth`."""
    seq = cache.start(tokens, no_read=no_read)
    cache.loaded(seq)
    outcome = store(cache, seq, depth)
    cache.finish(seq)
    return outcome


def store(cache: ReferenceCache, seq: Running, depth: int) -> Stored | Skipped:
    pending = cache.reserve_checkpoint(seq, depth, seq.slots[0])
    return pending if isinstance(pending, Skipped) else cache.commit(seq, pending)


def engine_cache(**changes: Any) -> ReferenceEngineCache:
    sizes = {"page_size": 2, "checkpoint_stride": 4, "kv_pages": 8, "checkpoint_slots": 2}
    return ReferenceEngineCache(**(sizes | changes))


def lease(cache: ReferenceBase, tokens: list[int]) -> Lease:
    """One whose state was loaded."""
    leased = cache.lease(cache.lookup(tokens))
    cache.lease_loaded(leased)
    return leased


def publish(
    cache: ReferenceEngineCache, leased: Lease, tokens: list[int], pages: Sequence[int] = ()
) -> Published:
    pending = cache.reserve(leased, tokens, pages)
    assert isinstance(pending, Pending)
    return cache.publish(leased, tokens, pages, pending)


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    cache = small_cache()
    run(cache, [1, 2, 3, 4, 5], 4)
    assert cache.lookup([1, 2, 3, 4]).length == 0
    assert cache.lookup([1, 2, 3, 4, 9]).length == 4


def test_a_state_counts_how_often_it_was_encoded() -> None:
    cache = small_cache()
    assert run(cache, list(range(5)), 4).encodings == 1
    assert run(cache, list(range(9)), 8).encodings == 2, "it continued one that had been encoded once"
    assert [cache.lookup(list(range(n))).encodings for n in (4, 5, 9)] == [0, 1, 2]


def test_reasons_of_a_miss() -> None:
    cache = small_cache()
    run(cache, list(range(9)), 8)
    assert cache.lookup([7, 8, 9]).reason == "no_prefix"
    assert cache.lookup([0, 1, 9]).reason == "unaligned"
    branch = cache.lookup([0, 1, 2, 3, 9])
    assert (branch.reason, branch.branch, branch.kv_length) == ("no_state", 4, 4)


def test_a_branch_is_not_named_where_a_state_is_being_written() -> None:
    cache = small_cache()
    run(cache, list(range(9)), 8)
    step = cache.begin_step()
    run(cache, list(range(9)), 4, no_read=True)
    waiting = cache.lookup([0, 1, 2, 3, 9])
    assert (waiting.reason, waiting.branch) == ("not_ready", None)
    cache.retire_step(step)
    assert cache.lookup([0, 1, 2, 3, 9]).length == 4


def test_duplicate_pages_are_replaced_and_named() -> None:
    cache = small_cache()
    first, second = cache.start([1, 2, 3, 4, 5]), cache.start([1, 2, 3, 4, 5])
    for seq in (first, second):
        cache.loaded(seq)
    pending = cache.reserve_checkpoint(second, 4, second.slots[0])
    assert store(cache, first, 4).replaced is None
    assert cache.commit(second, pending) == Skipped("duplicate")
    assert cache.pages_of(second)[:2] == cache.pages_of(first)[:2]
    assert cache.usage("kv") == (8, 4, 2, 0, 2, 0, 0)


def test_evicting_a_state_keeps_pages_that_others_need() -> None:
    cache = small_cache()
    run(cache, list(range(9)), 4)
    run(cache, list(range(9)), 8)
    assert cache.evict("checkpoint", 1) == (0, 1), "the older one is inside the path: only the state goes"
    assert cache.lookup(list(range(9))).length == 8
    assert cache.evict("checkpoint", 1) == (4, 1), "the last one takes the whole path along"


def test_a_hit_renews_only_the_state_it_loads() -> None:
    cache = small_cache()
    run(cache, [1, 2, 3, 4, 5], 4)
    run(cache, [6, 7, 8, 9, 5], 4)
    cache.finish(cache.start([1, 2, 3, 4, 5]))
    cache.evict("kv", 1)
    assert cache.lookup([1, 2, 3, 4, 5]).length == 4
    assert cache.lookup([6, 7, 8, 9, 5]).length == 0


def test_the_pin_on_a_state_ends_when_it_was_loaded() -> None:
    cache = small_cache()
    run(cache, [1, 2, 3, 4, 5], 4)
    seq = cache.start([1, 2, 3, 4, 5])
    assert cache.usage("checkpoint").pinned == 1
    cache.loaded(seq)
    assert cache.evict("checkpoint", 1) == (0, 1), "its pages are still in use"
    cache.finish(seq)
    assert cache.usage("kv").free == 8, "a bare path goes with its last pin"


def test_a_shortage_changes_nothing() -> None:
    cache = small_cache(kv_pages=5)
    run(cache, [1, 2, 3, 4, 5], 4)
    cache.start([6, 7, 8, 9])
    before = [cache.usage(pool) for pool in ("kv", "active", "checkpoint")]
    with pytest.raises(Shortage) as short:
        cache.start([1, 2, 3, 4, 5, 6, 7])
    assert vars(short.value) == {"pool": "kv", "wanted": 2, "free": 1, "evictable": 0, "retiring": 0}
    assert before == [cache.usage(pool) for pool in ("kv", "active", "checkpoint")]
    with pytest.raises(NeverFits):
        cache.start(list(range(11)))


def test_a_start_evicts_exactly_the_shortfall() -> None:
    cache = small_cache(kv_pages=6)
    run(cache, [1, 2, 3, 4, 5], 4)
    run(cache, [6, 7, 8, 9, 5], 4)
    cache.start([5] * 8)
    assert cache.usage("kv") == (6, 0, 4, 2, 0, 0, 0)


def test_what_is_given_back_waits_for_the_steps_begun_before() -> None:
    cache = small_cache()
    first, second = cache.begin_step(), cache.begin_step()
    run(cache, [1, 2, 3, 4, 5], 4)
    cache.retire_step(second)
    assert cache.usage("active").retiring == 1
    assert cache.lookup([1, 2, 3, 4, 5]).reason == "not_ready", "a step before the one that wrote it is out"
    assert cache.usage("kv").pinned == 2
    cache.retire_step(first)
    cache.retire_step(first)
    assert cache.lookup([1, 2, 3, 4, 5]).length == 4
    assert cache.usage("active").free == 2
    assert cache.usage("kv").evictable == 2


def test_a_refused_state_is_withdrawn() -> None:
    cache = small_cache()
    step = cache.begin_step()
    stored = run(cache, [1, 2, 3, 4, 5], 4)
    cache.retire_step(step, [stored.serial])
    assert cache.lookup([1, 2, 3, 4, 5]).reason == "no_prefix"
    assert cache.usage("checkpoint").free == 2
    assert not cache.invalidate(stored.serial)


def two_of(cache: ReferenceCache, tokens: list[int]) -> tuple[Running, Running]:
    first, second = cache.start(tokens), cache.start(tokens)
    for seq in (first, second):
        cache.loaded(seq)
    return first, second


def test_pages_are_shared_once_their_writer_is_done() -> None:
    cache = small_cache(kv_pages=16, active_slots=3, checkpoint_slots=4)
    step = cache.begin_step()
    first, second = two_of(cache, list(range(9)))
    before = cache.pages_of(second)
    late = cache.reserve_checkpoint(second, 8, second.slots[0])
    assert isinstance(late, Pending)
    further = cache.take_slot(second)
    store(cache, first, 4)
    assert cache.commit(second, late) == store(cache, second, 8) == Skipped("not_ready")
    assert cache.reserve_checkpoint(second, 4, further) == Skipped("duplicate")
    assert isinstance(store(cache, first, 8), Stored), "it stands on its own pages"
    assert cache.pages_of(second) == before
    cache.retire_step(step, failed=True)
    stored = store(cache, second, 8)
    assert isinstance(stored, Stored)
    assert (stored.replaced, cache.pages_of(second)) == (None, before)


def test_a_state_without_pages_waits_for_nobody() -> None:
    cache = small_cache(kv_pages=0)
    cache.begin_step()
    first, second = two_of(cache, list(range(9)))
    assert isinstance(store(cache, first, 4), Stored)
    assert isinstance(store(cache, second, 8), Stored)


def test_a_state_is_ready_with_its_proof_and_all_before_it() -> None:
    cache = small_cache(kv_pages=16)
    first, second = cache.start([1, 2, 3, 4, 5]), cache.start([6, 7, 8, 9, 5])
    tickets = []
    for seq in (first, second):
        cache.loaded(seq)
        pending = cache.reserve_checkpoint(seq, 4, seq.slots[0])
        assert isinstance(pending, Pending)
        stored = cache.commit(seq, pending, proven=False)
        assert isinstance(stored, Stored)
        assert stored.ticket
        tickets.append(stored.ticket)
    cache.complete(tickets[1], finite=True)
    assert cache.lookup([6, 7, 8, 9, 5]).reason == "not_ready"
    for _ in range(2):
        cache.complete(tickets[0], finite=False)
    assert [cache.lookup(list(it)).length for it in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 5))] == [0, 4]
    cache.finish(first)
    assert cache.usage("active").free == 1, "a proof holds no slot up"
    with pytest.raises(Misuse, match="unknown_step"):
        cache.complete(3, finite=True)


def test_a_refusal_that_comes_after_an_eviction_is_too_late() -> None:
    cache = small_cache()
    early = run(cache, list(range(9)), 4)
    run(cache, list(range(9)), 8)
    cache.evict("checkpoint", 1)
    assert isinstance(early, Stored)
    assert cache.invalidate(early.serial) == 0
    assert cache.lookup(list(range(9))).length == 8, "the pages that came with it serve another state"


def test_a_path_that_was_refused_twice_is_kept_until_its_writer_is_done() -> None:
    cache = small_cache()
    upper = run(cache, list(range(9)), 4)
    seq = cache.start(list(range(9)))
    cache.loaded(seq)
    pending = cache.reserve_checkpoint(seq, 8, seq.slots[0])
    assert isinstance(pending, Pending)
    lower = cache.commit(seq, pending, proven=False)
    cache.finish(seq)
    assert isinstance(lower, Stored)
    assert isinstance(upper, Stored)
    assert (cache.invalidate(lower.serial), cache.invalidate(upper.serial)) == (1, 1)
    assert cache.usage("kv").pinned == 4
    assert lower.ticket
    cache.complete(lower.ticket, finite=True)
    assert cache.usage("kv").free == 8


def test_reset_lets_live_sequences_finish_and_refuses_their_states() -> None:
    cache = small_cache()
    run(cache, [1, 2, 3, 4, 5], 4)
    match = cache.lookup([1, 2, 3, 4, 5])
    seq = cache.start([1, 2, 3, 4, 5, 6, 7, 8])
    pages = cache.pages_of(seq)
    cache.reset()
    cache.loaded(seq)
    assert cache.lookup([1, 2, 3, 4, 5]).reason == "no_prefix"
    assert cache.pages_of(seq) == pages
    assert store(cache, seq, 8) == Skipped("reset")
    with pytest.raises(Misuse, match="stale"):
        cache.lease(match)
    cache.finish(seq)
    assert cache.usage("kv").free == 8
    assert cache.usage("checkpoint").free == 2


def test_claiming_filling_and_shrinking() -> None:
    cache = small_cache()
    seq = cache.start([1, 2, 3], reserve=2)
    assert len(seq.private) == 1
    cache.grow(seq, 6)
    assert (seq.claimed, len(seq.private)) == (8, 4)
    cache.append(seq, [4, 5])
    with pytest.raises(Misuse, match="not_claimed"):
        cache.append(seq, [6, 7, 8, 9])
    cache.shrink(seq)
    assert (seq.claimed, len(seq.private)) == (5, 3)


def test_an_engine_learns_what_was_adopted_and_what_was_evicted() -> None:
    cache = engine_cache()
    first, second = lease(cache, PROMPT), lease(cache, PROMPT)
    assert publish(cache, first, PROMPT[:4], [3, 5]).replaced is None
    with pytest.raises(Misuse, match="page_ownership"):
        cache.reserve(second, PROMPT[:8], [1, 2, 3, 4])
    longer = publish(cache, second, PROMPT[:8], [1, 2, 7, 8])
    assert (longer.replaced, cache.lease_pages(second)) == ((0, 4), [3, 5, 7, 8]), "1 and 2 stay the engine's"
    cache.release(first)
    cache.release(second)
    cache.evict("kv", 4)
    assert sorted(cache.take_freed()) == [3, 5, 7, 8]
    assert cache.take_freed() == []


def test_numbers_are_the_lowest_that_the_engine_knows_to_be_free() -> None:
    cache = engine_cache(owner="logical")
    first, second = lease(cache, PROMPT), lease(cache, PROMPT)
    publish(cache, first, PROMPT[:4])
    assert cache.lease_pages(first) == [1, 2]
    assert publish(cache, second, PROMPT[:8]).replaced == (0, 4)
    assert cache.lease_pages(second) == [1, 2, 5, 6], "3 and 4 were for pages that were cached already"
    third = lease(cache, [9] * 9)
    cache.extend(third, [9] * 4)
    assert cache.lease_pages(third) == [3, 4]
    cache.release(third)
    assert cache.usage("kv") == (8, 2, 0, 0, 4, 0, 2)
    with pytest.raises(Misuse, match="too_many_pages"):
        cache.extend(lease(cache, [8] * 9), [8] * 6)
    assert cache.take_freed() == [3, 4]
    assert cache.usage("kv").free == 4


def test_pages_are_shared_without_a_state_while_somebody_leases_them() -> None:
    cache = engine_cache()
    leased = lease(cache, PROMPT)
    assert cache.extend(leased, PROMPT[:6], [1, 2, 3]) == Extended(None, None)
    assert (cache.lookup(PROMPT).kv_length, cache.lookup(PROMPT).reason) == (6, "no_state")
    with pytest.raises(Misuse, match="unaligned"):
        cache.extend(leased, PROMPT[:7], [])
    with pytest.raises(Misuse, match="prefix_mismatch"):
        cache.extend(leased, PROMPT[::-1][:8], [4])
    pending = cache.reserve(leased, PROMPT[:4])
    assert isinstance(pending, Pending)
    assert isinstance(cache.attach(leased, PROMPT[:4], pending), Stored)
    cache.release(leased)
    assert cache.take_freed() == [3], "no state stands on the last page"
    assert cache.lookup(PROMPT).length == 4


def test_a_state_is_attached_to_what_is_leased_alone() -> None:
    cache = engine_cache(owner="logical")
    leased, other = lease(cache, PROMPT), lease(cache, PROMPT)
    cache.extend(leased, PROMPT[:4])
    pending = cache.reserve(leased, PROMPT[:8])
    assert isinstance(pending, Pending)
    with pytest.raises(Misuse, match="length_mismatch"):
        cache.attach(leased, PROMPT[:8], pending)
    with pytest.raises(Misuse, match="not_your_pending"):
        cache.publish(other, PROMPT[:8], [], pending)
    assert (cache.lookup(PROMPT).kv_length, cache.usage("kv").free) == (4, 6)


def test_pages_that_a_step_is_writing_are_not_shared_and_go_with_it() -> None:
    cache = engine_cache()
    step = cache.begin_step()
    writer, late = lease(cache, PROMPT), lease(cache, PROMPT)
    cache.extend(writer, PROMPT[:4], [1, 2])
    not_yet = Skipped("not_ready")
    assert cache.extend(late, PROMPT[:4], [3, 4]) == Extended(not_yet, None)
    assert cache.reserve(late, PROMPT[:4], [3, 4]) == not_yet
    cache.extend(writer, PROMPT[:6], [5])
    cache.release(writer)
    assert cache.usage("kv").pinned == 3, "they are being written"
    cache.retire_step(step, failed=True)
    assert cache.lookup(PROMPT).kv_length == 0
    assert sorted(cache.take_freed()) == [1, 2, 5]
    assert cache.extend(late, PROMPT[:4], [3, 4]) == Extended(None, None)


def test_a_lease_of_pages_that_a_step_lost_shares_nothing_more() -> None:
    cache = engine_cache()
    step = cache.begin_step()
    leased = lease(cache, PROMPT)
    cache.extend(leased, PROMPT[:4], [1, 2])
    cache.retire_step(step, failed=True)
    assert cache.extend(leased, PROMPT[:6], [3]) == Extended(Skipped("reset"), None)
    assert (cache.lease_pages(leased), cache.usage("kv").pinned) == ([1, 2], 2)


def test_pages_that_wait_for_a_proof_are_kept_after_their_lease_has_ended() -> None:
    cache = engine_cache()
    first, second = lease(cache, PROMPT), lease(cache, PROMPT[::-1])
    pending = cache.reserve(first, PROMPT[:4], [1, 2])
    assert isinstance(pending, Pending)
    stored = cache.publish(first, PROMPT[:4], [1, 2], pending, proven=False).outcome
    assert isinstance(stored, Stored)
    cache.extend(second, PROMPT[::-1][:4], [3, 4])
    cache.release(second)
    assert (cache.usage("kv").pinned, cache.take_freed()) == (4, [])
    assert stored.ticket
    cache.complete(stored.ticket, finite=True)
    assert (cache.usage("kv").pinned, cache.take_freed()) == (2, [3, 4])


def test_slots_of_a_lease_come_back_with_it_or_earlier() -> None:
    cache = engine_cache(active_slots=2)
    leased, other = lease(cache, PROMPT), lease(cache, PROMPT)
    assert [cache.take_slot(leased), cache.take_slot(leased)] == [1, 2]
    with pytest.raises(NeverFits):
        cache.take_slot(leased)
    with pytest.raises(Shortage):
        cache.take_slot(other)
    with pytest.raises(Misuse, match="not_your_slot"):
        cache.give_back_slot(other, 1)
    cache.give_back_slot(leased, 1)
    assert cache.take_slot(other) == 1
    step = cache.begin_step()
    cache.release(leased)
    assert cache.usage("active") == (2, 0, 1, 0, 0, 1, 0)
    cache.retire_step(step)
    assert cache.usage("active").free == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_axis", [-1, -2])
def test_each_k_channel_has_its_own_scale(dtype: torch.dtype, k_axis: int) -> None:
    state = torch.ones(2, 3, 5).to(dtype)
    channel = state.movedim(k_axis, 0)
    channel[1] *= 64
    q, scale = encode(state, k_axis=k_axis)
    assert scale.shape == (2, state.shape[k_axis])
    assert scale.dtype == scale_dtype(dtype)
    assert (q == 127).all(), "every channel is constant, so each element is its largest"
    torch.testing.assert_close(decode(q, scale, k_axis=k_axis, dtype=dtype), state, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_stays_within_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    state = torch.randn(4, 16, 8).to(dtype)
    q, scale = encode(state, k_axis=-1)
    error = (q.float() * scale.float().unsqueeze(-2) - state.float()).abs()
    assert (error <= scale.float().unsqueeze(-2) * 0.5001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_round_trip_changes_no_code(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, scale = encode(torch.randn(4, 16, 8).to(dtype), k_axis=-2)
    again, _ = encode(decode(q, scale, k_axis=-2, dtype=dtype), k_axis=-2)
    assert torch.equal(again, q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_value_reloads_finite(dtype: torch.dtype) -> None:
    state = torch.full((1, 2, 3), torch.finfo(dtype).max, dtype=dtype)
    loaded = decode(*encode(state, k_axis=-1), k_axis=-1, dtype=dtype)
    assert loaded.isfinite().all()
    torch.testing.assert_close(loaded.float(), state.float(), rtol=2**-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_channel_that_is_not_finite_is_marked_and_empty(bad: float) -> None:
    state = torch.ones(1, 4, 3)
    state[0, 2, 1] = bad
    q, scale = encode(state, k_axis=-1)
    assert scale.isnan().tolist() == [[False, True, False]]
    assert (q[..., 1] == 0).all()
    assert (q[..., 0] == 127).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_channels_are_exact_and_tiny_ones_vanish(dtype: torch.dtype) -> None:
    tiny = 1e-8 / 127 / 2 * 0.99  # under half a step of the smallest scale
    for value in (0.0, tiny):
        state = torch.full((1, 2, 2), value).to(dtype)
        q, scale = encode(state, k_axis=-1)
        assert (q == 0).all()
        assert scale.isfinite().all()
