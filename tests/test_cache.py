"""PrefixCache with real pools: states come back as they were stored, and everything is given back."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from radixstate import (
    ActivePool,
    ConvSpec,
    EngineCache,
    Namespace,
    PrefixCache,
    Sequence,
    Skipped,
    StartRequest,
    StateSpec,
    Stored,
)
from radixstate.errors import (
    AlreadyLoadedError,
    BudgetError,
    ConfigError,
    EmptyPromptError,
    LengthMismatchError,
    NeverFitsError,
    NotYourSlotError,
    OutOfSlotsError,
    TensorError,
    UnalignedError,
)
from radixstate.reference.codec import decode, encode

SPEC = StateSpec(
    layers=2, heads=3, d_k=4, d_v=6, dtype="float32", layout="v_last", conv=(ConvSpec((5, 3), "bfloat16"),)
)
PROMPT = list(range(20))
POOLS = ("kv", "active", "checkpoint")


def make(**changes: Any) -> PrefixCache:
    sizes = {"active_slots": 3, "kv_pages": 16, "page_size": 4, "checkpoint_stride": 8}
    return PrefixCache(SPEC, **(sizes | changes))


def make_engine(**changes: Any) -> EngineCache:
    sizes = {"active_slots": 3, "kv_pages": 16, "page_size": 4, "checkpoint_stride": 8}
    return EngineCache(SPEC, **(sizes | changes))


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    """A small cache, sound when the test is done."""
    cache = make()
    yield cache
    cache.check()


def compute(seq: Sequence, cache: PrefixCache, seed: int = 0) -> torch.Tensor:
    """Stands for the model: puts a random state into the sequence's slot and returns it."""
    generator = torch.Generator().manual_seed(seed)
    cache.active.state(seq.slot).copy_(torch.randn(2, 3, 4, 6, generator=generator))
    cache.active.conv(0, seq.slot).copy_(torch.randn(2, 5, 3, generator=generator))
    return cache.active.state(seq.slot).clone()


def cached(cache: PrefixCache, prompt: list[int] = PROMPT, depth: int = 16, seed: int = 0) -> torch.Tensor:
    """A whole request that caches the state at `depth`."""
    with cache.start(prompt) as seq:
        state = compute(seq, cache, seed)
        assert isinstance(seq.checkpoint(depth), Stored)
    return state


def usage(cache: PrefixCache) -> list[Any]:
    return [cache.usage(pool) for pool in POOLS]


@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
def test_a_hit_starts_from_the_cached_state(format: str) -> None:
    cache = make(format=format)
    state = cached(cache)
    expected = {
        "int8": lambda: decode(*encode(state, k_axis=-2), k_axis=-2, dtype=torch.float32),
        "bf16": lambda: state.bfloat16().float(),
        "native": lambda: state,
    }[format]()
    with cache.start(PROMPT) as seq:
        assert (seq.reused, seq.match.reason) == (16, "hit")
        assert torch.equal(cache.active.state(seq.slot), expected)


def test_conv_windows_come_back_bit_for_bit(cache: PrefixCache) -> None:
    with cache.start(PROMPT) as first:
        compute(first, cache)
        window = cache.active.conv(0, first.slot).clone()
        first.checkpoint(16)
    with cache.start(PROMPT) as second:
        assert torch.equal(cache.active.conv(0, second.slot), window)


def test_a_miss_starts_from_nothing_whatever_the_slot_held(cache: PrefixCache) -> None:
    for slot in range(1, 4):
        cache.active.state(slot).fill_(torch.nan)
        cache.active.conv(0, slot).fill_(torch.nan)
    with cache.start(PROMPT) as seq:
        assert seq.reused == 0
        assert (cache.active.state(seq.slot) == 0).all()
        assert (cache.active.conv(0, seq.slot) == 0).all()


def test_leaving_the_context_gives_everything_back(cache: PrefixCache) -> None:
    before = usage(cache)
    with cache.start(PROMPT, reserve=30) as seq:
        seq.take_slot()
        assert cache.usage("active").held == 2
        assert len(seq.pages) == 8
    assert usage(cache) == before


def test_an_exception_ends_the_request_and_passes_through(cache: PrefixCache) -> None:
    before = usage(cache)
    with pytest.raises(RuntimeError, match="out of luck"), cache.start(PROMPT):
        raise RuntimeError("out of luck")
    assert usage(cache) == before


def test_a_dropped_sequence_gives_everything_back(cache: PrefixCache) -> None:
    before = usage(cache)
    seq = cache.start(PROMPT)
    assert usage(cache) != before
    del seq
    assert usage(cache) == before


def test_finishing_inside_the_context_is_enough(cache: PrefixCache) -> None:
    with cache.start(PROMPT) as seq:
        seq.finish()
    with cache.start(PROMPT) as seq:
        seq.abort()
    assert cache.usage("active").free == 3


def test_a_sequence_grows_fills_and_shrinks(cache: PrefixCache) -> None:
    with cache.start(PROMPT[:6]) as seq:
        seq.grow(5)
        assert (seq.length, seq.claimed, len(seq.pages)) == (6, 11, 3)
        seq.append([6, 7])
        seq.shrink()
        assert (seq.tokens, seq.claimed, len(seq.pages)) == (PROMPT[:8], 8, 2)


def test_pages_are_copied_into_a_page_table(cache: PrefixCache) -> None:
    table = torch.zeros(2, 8, dtype=torch.int32)
    with cache.start(PROMPT) as seq:
        compute(seq, cache)
        seq.checkpoint(16)
        assert seq.copy_pages(table[1].numpy()) == 5
        assert table[1].tolist() == [*seq.pages, 0, 0, 0]


def test_without_a_depth_the_state_is_of_all_known_tokens(cache: PrefixCache) -> None:
    with cache.start(PROMPT[:13]) as seq:
        seq.grow(3)
        assert seq.checkpoint() == Skipped("not_aligned"), "13 is not legal, 8 is not what the slot holds"
        seq.append(PROMPT[13:16])
        assert seq.checkpoint().depth == 16
    assert cache.lookup(PROMPT).length == 16


def test_a_state_that_is_not_finite_is_not_stored(cache: PrefixCache) -> None:
    before = usage(cache)
    with cache.start(PROMPT) as seq:
        compute(seq, cache)[0]
        cache.active.state(seq.slot)[1, 2, 3, 4] = torch.nan
        assert seq.checkpoint(16) == Skipped("non_finite")
    assert usage(cache) == before, "its slot went back"
    assert cache.stats().skipped.non_finite == 1
    assert cache.lookup(PROMPT).reason == "no_prefix"


def test_a_second_state_of_the_same_prefix_is_a_duplicate(cache: PrefixCache) -> None:
    state = cached(cache)
    with cache.start(PROMPT, no_read=True) as seq:
        assert seq.reused == 0
        compute(seq, cache, seed=1)
        assert seq.checkpoint(16) == Skipped("duplicate")
    with cache.start(PROMPT) as seq:
        torch.testing.assert_close(cache.active.state(seq.slot), state, rtol=0, atol=0.05)


def test_want_of_room_is_a_result_with_numbers() -> None:
    cache = make(checkpoint_slots=1)
    cached(cache)
    step = cache.begin_step()
    reader = cache.start(PROMPT)
    with cache.start(list(range(50, 60))) as seq:
        assert seq.checkpoint(8) == Skipped("no_room", wanted=1, free=0, evictable=0)
    reader.finish()
    cache.retire_step(step)
    with cache.start(list(range(50, 60))) as seq:
        assert isinstance(seq.checkpoint(8), Stored), "the older state has made room"


def test_several_states_are_encoded_together(cache: PrefixCache) -> None:
    with cache.start(PROMPT) as one, cache.start(list(range(40, 60)), no_store=True) as two:
        spare = one.take_slot()
        compute(one, cache)
        cache.active.state(spare).fill_(torch.inf)
        outcomes = cache.checkpoint_many([(one, 16, one.slot), (two, 8, two.slot), (one, 8, spare)])
    reasons = [getattr(outcome, "reason", "stored") for outcome in outcomes]
    assert reasons == ["stored", "no_store", "non_finite"]
    assert cache.checkpoint_many([]) == []


def test_several_requests_start_together_each_on_its_own(cache: PrefixCache) -> None:
    cached(cache)
    cache.active.rows["state"].whole.fill_(torch.nan)
    wanted = [
        StartRequest(PROMPT),
        StartRequest([1]),
        StartRequest([]),
        StartRequest(PROMPT),
        StartRequest(PROMPT),
    ]
    hit, miss, empty, again, busy = cache.start_many(wanted)
    assert [hit.reused, miss.reused, again.reused] == [16, 0, 16]
    assert torch.equal(cache.active.state(hit.slot), cache.active.state(again.slot))
    assert (cache.active.state(miss.slot) == 0).all()
    assert isinstance(empty, EmptyPromptError)
    assert isinstance(busy, OutOfSlotsError)
    assert cache.start_many([]) == []


def test_a_state_can_come_from_a_further_slot(cache: PrefixCache) -> None:
    with cache.start(PROMPT) as seq:
        spare = seq.take_slot()
        compute(seq, cache)
        cache.active.state(spare).fill_(3)
        cache.active.conv(0, spare).fill_(3)
        seq.checkpoint(8, source=spare)
    with cache.start(PROMPT[:9]) as seq:
        assert (cache.active.state(seq.slot) == 3).all()


def test_pages_cached_meanwhile_replace_the_sequences_own(cache: PrefixCache) -> None:
    with cache.start(PROMPT) as one, cache.start(PROMPT) as two:
        compute(one, cache)
        one.checkpoint(8)
        stored = two.checkpoint(16)
        assert stored.replaced == (0, 8)
        assert one.pages[:2] == two.pages[:2]
        assert one.pages[2:] != two.pages[2:]


def test_namespaces_never_match(cache: PrefixCache) -> None:
    cached(cache)
    assert cache.lookup(PROMPT, namespace=Namespace(adapter=1)).length == 0
    assert cache.lookup(PROMPT, namespace=Namespace()).length == 16
    with cache.start(PROMPT, namespace=Namespace(tenant="a")) as seq:
        assert seq.reused == 0


def test_a_branch_says_where_a_state_would_have_helped(cache: PrefixCache) -> None:
    cached(cache)
    assert cache.lookup([*PROMPT[:10], 99]).branch == 8
    assert cache.lookup(PROMPT, max_length=15).branch == 8


def test_evicting_makes_room_that_is_usable_at_once(cache: PrefixCache) -> None:
    cached(cache)
    freed = cache.evict("kv", 1)
    assert (freed.kv, freed.checkpoints) == (4, 1)
    assert cache.usage("kv").free == 16


def test_a_state_is_ready_when_the_step_that_writes_it_retires(cache: PrefixCache) -> None:
    with cache.step() as step:
        with cache.start(PROMPT) as seq:
            stored = seq.checkpoint(16)
        assert stored.step == step
        assert cache.lookup(PROMPT).reason == "not_ready"
        assert cache.usage("active").retiring == 1
    assert cache.lookup(PROMPT).length == 16
    assert cache.usage("active").free == 3


def test_a_step_is_retired_when_its_body_fails(cache: PrefixCache) -> None:
    with pytest.raises(RuntimeError, match="kernel"), cache.step(), cache.start(PROMPT):
        raise RuntimeError("kernel")
    assert cache.usage("active").free == 3


def test_a_state_can_be_refused_later(cache: PrefixCache) -> None:
    first, second = cache.begin_step(), cache.begin_step()
    with cache.start(PROMPT) as seq:
        early, late = seq.checkpoint(8), seq.checkpoint(16)
    cache.retire_step(first)
    cache.retire_step(second, invalid=[late])
    assert cache.lookup(PROMPT).length == 8
    cache.invalidate(early)
    assert cache.lookup(PROMPT).reason == "no_prefix"


def test_after_a_reset_requests_finish_but_store_nothing(cache: PrefixCache) -> None:
    cached(cache)
    with cache.start(PROMPT) as seq:
        pages = seq.pages
        cache.reset()
        assert cache.lookup(PROMPT).reason == "no_prefix"
        assert seq.pages == pages
        assert seq.checkpoint(16) == Skipped("reset")
    assert [pool.free for pool in usage(cache)] == [16, 3, 6]


def test_stats_count_hits_tokens_and_bytes(cache: PrefixCache) -> None:
    cached(cache)
    cache.start(PROMPT).finish()
    stats = cache.stats()
    assert (stats.starts, stats.hits, stats.hit_tokens, stats.stored) == (2, 1, 16, 1)
    assert stats.misses.no_prefix == 1
    assert stats.bytes.checkpoints == SPEC.slot_bytes("int8")
    with cache.start(PROMPT):
        assert cache.stats().bytes.active == SPEC.slot_bytes("native")


def test_an_engine_with_its_own_allocators_leases_and_publishes() -> None:
    cache = make_engine()
    cache.active.state(2).fill_(5)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        made = lease.publish(PROMPT[:16], source=2, pages=[3, 5, 7, 9])
        assert isinstance(made.outcome, Stored)
        assert made.replaced is None, "the cache took all of them over"
        assert (lease.depth, lease.pages) == (16, [3, 5, 7, 9])
    with cache.lease(cache.lookup(PROMPT)) as lease:
        assert lease.match.length == 16
        lease.load(1)
        assert lease.state is None
    assert (cache.active.state(1) == 5).all()
    cache.check(engine_free=[1, 2, 4])
    cache.evict("kv", 4)
    assert sorted(cache.take_freed()) == [3, 5, 7, 9]


def test_pages_that_an_engine_offers_twice_stay_its_own() -> None:
    cache = make_engine()
    lease, late = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    lease.publish(PROMPT[:8], source=1, pages=[1, 2])
    made = late.publish(PROMPT[:16], source=1, pages=[3, 4, 5, 6])
    assert made.replaced == (0, 8), "pages 3 and 4 are to be freed"
    assert late.pages == [1, 2, 5, 6]
    again = late.publish(PROMPT[:16], source=1)
    assert (again.outcome, again.replaced) == (Skipped("duplicate"), None)


def test_an_engine_keeps_its_pages_when_a_state_is_not_finite() -> None:
    cache = make_engine()
    cache.active.state(1).fill_(torch.nan)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        made = lease.publish(PROMPT[:8], source=1, pages=[1, 2])
        assert lease.depth == 0
    assert (made.outcome, made.replaced) == (Skipped("non_finite"), None)
    assert cache.usage("checkpoint").free == 6
    cache.check(engine_free=list(range(1, 17)))


def test_two_requests_with_one_prompt_end_on_one_copy_of_its_pages() -> None:
    cache = make_engine()
    first, second = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    first.publish(PROMPT[:16], source=1, pages=[1, 2, 3, 4])
    made = second.publish(PROMPT[:16], source=2, pages=[5, 6, 7, 8])
    assert (made.outcome, made.replaced) == (Skipped("duplicate"), (0, 16))
    assert second.pages == [1, 2, 3, 4]
    cache.check(engine_free=[5, 6, 7, 8])


def test_pages_are_shared_before_a_state_is_and_kept_by_it() -> None:
    cache = make_engine()
    cache.active.state(1).fill_(5)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        extended = lease.extend(PROMPT[:12], [1, 2, 3])
        assert (extended.skipped, extended.replaced, lease.depth) == (None, None, 12)
        assert cache.lookup(PROMPT).kv_length == 12
        with pytest.raises(LengthMismatchError):
            lease.attach(PROMPT[:16], source=1)
        assert isinstance(lease.attach(PROMPT[:8], source=1), Stored)
        assert lease.attach(PROMPT[:8], source=1) == Skipped("duplicate")
    assert cache.take_freed() == [3], "no state stands on the last page"
    assert cache.lookup(PROMPT).length == 8
    cache.check()


def test_a_forked_lease_keeps_the_pages_of_the_first() -> None:
    cache = make_engine()
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.publish(PROMPT[:16], source=1, pages=[1, 2, 3, 4])
        forked = lease.fork()
    assert (forked.depth, forked.pages, forked.state) == (16, [1, 2, 3, 4], None)
    assert cache.evict("kv", 4).kv == 0
    assert forked.extend(PROMPT, [5]).replaced is None
    forked.release()
    assert cache.evict("kv", 4).kv == 4
    assert sorted(cache.take_freed()) == [1, 2, 3, 4, 5]


def test_tokens_that_are_no_prompt_are_found_as_a_whole(cache: PrefixCache) -> None:
    cached(cache)
    assert cache.lookup(PROMPT[:16]).length == 0
    found = cache.lookup(PROMPT[:16], whole=True)
    assert (found.length, found.kv_length, found.branch) == (16, 16, None)
    assert cache.lookup(PROMPT, max_length=11).kv_length == 8
    with pytest.raises(ConfigError, match="max_length=8 contradicts it"):
        cache.lookup(PROMPT, whole=True, max_length=8)


def test_a_touched_state_is_not_the_next_to_go() -> None:
    cache = make(checkpoint_slots=2)
    waiting = list(range(30, 40))
    cached(cache, waiting, 8)
    cached(cache, PROMPT, 16)
    assert cache.touch(waiting) == 8
    assert cache.touch([99]) == 0
    cache.evict("checkpoint", 1)
    assert (cache.lookup(waiting).length, cache.lookup(PROMPT).length) == (8, 0)


def test_ids_go_both_ways_through_buffers() -> None:
    cache = make_engine()
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.publish(PROMPT[:16], source=1, pages=torch.tensor([4, 3, 2, 1], dtype=torch.int32))
        table = torch.zeros(6, dtype=torch.int32)
        assert lease.copy_pages(table.numpy()) == 4
        assert table.tolist() == [4, 3, 2, 1, 0, 0]
        assert lease.copy_pages(table.numpy(), start=8) == 2
        assert table.tolist() == [2, 1, 2, 1, 0, 0]
        with pytest.raises(UnalignedError):
            lease.copy_pages(table.numpy(), start=6)
    cache.evict("kv", 4)
    freed = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(LengthMismatchError, match="4 are to be written, the buffer has room for 3"):
        cache.copy_freed(freed.numpy())
    freed = torch.zeros(cache.usage("kv").outbox, dtype=torch.int32)
    assert cache.copy_freed(freed.numpy()) == 4
    assert sorted(freed.tolist()) == [1, 2, 3, 4]
    assert cache.take_freed() == []


def test_an_engine_whose_ids_live_on_a_device_names_no_page() -> None:
    cache, pages = make_engine(logical=True), torch.zeros(17, dtype=torch.int64)
    rows = {1: torch.tensor([90, 91, 92, 93]), 2: torch.tensor([80, 81, 82, 83])}
    for request, row in rows.items():
        with cache.lease(cache.lookup(PROMPT, max_length=0)) as lease:
            made = lease.publish(PROMPT[:16] if request == 1 else [*PROMPT[:8], *PROMPT[:8]], source=1)
            numbers = torch.tensor(lease.pages)
            known = (made.replaced[1] - made.replaced[0]) // 4 if made.replaced else 0
            pages[numbers[known:]] = row[known:]
            assert pages[numbers].tolist() == [90, 91, *row[2:].tolist()]
            with pytest.raises(LengthMismatchError, match="2 pages given, 0 expected"):
                lease.extend(PROMPT[:16], [1, 2])
    cache.evict("kv", 6)
    assert sorted(pages[torch.tensor(cache.take_freed())].tolist()) == [82, 83, 90, 91, 92, 93]
    cache.check()


def test_an_engine_with_pages_alone_takes_its_slots_from_the_cache() -> None:
    cache = make_engine(own_slots=True)
    with cache.lease(cache.lookup(PROMPT)) as one, cache.lease(cache.lookup(PROMPT)) as two:
        running, theirs = one.take_slot(), two.take_slot()
        assert one.slots == [running]
        assert one.publish(PROMPT[:8], source=running, pages=[1, 2]).outcome == Skipped("non_finite"), (
            "unwritten"
        )
        one.load(running)
        assert isinstance(one.publish(PROMPT[:8], source=running, pages=[1, 2]).outcome, Stored)
        for use in (
            lambda: one.load(theirs),
            lambda: one.publish(PROMPT[:8], source=theirs),
            lambda: one.give_back_slot(theirs),
        ):
            with pytest.raises(NotYourSlotError, match=f"slot {theirs} is not one of this"):
                use()
        further = one.take_slot()
        with pytest.raises(OutOfSlotsError):
            two.take_slot()
        one.give_back_slot(further)
    assert cache.usage("active").free == 3
    cache.check()


def test_an_engine_with_slots_of_its_own_gets_none() -> None:
    with (cache := make_engine()).lease(cache.lookup(PROMPT)) as lease, pytest.raises(NeverFitsError):
        lease.take_slot()


def test_a_lease_loads_its_state_once() -> None:
    cache = make_engine()
    cache.active.state(1).fill_(3)
    cache.lease(cache.lookup(PROMPT)).publish(PROMPT[:8], source=1, pages=[1, 2])
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.load(2)
        with pytest.raises(AlreadyLoadedError, match="state at depth 8 was loaded before"):
            lease.load(2)
    assert cache.active.state(2).eq(3).all(), "and does not clear the slot instead"


def test_a_lease_with_tokens_and_no_state_does_not_load_the_empty_one() -> None:
    cache = make_engine()
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.load(1)
        cache.active.state(1).fill_(3)
        lease.extend(PROMPT[:8], pages=[1, 2])
        for each in (lease, lease.fork()):
            with pytest.raises(AlreadyLoadedError, match="has 8 tokens and no state to load"):
                each.load(1)
    assert cache.active.state(1).eq(3).all(), "the slot was not cleared"


def test_what_may_not_be_published_evicts_nothing() -> None:
    cache = make_engine()
    for n in range(6):
        tokens = [n * 100 + i for i in range(8)]
        cache.lease(cache.lookup(tokens)).publish(tokens, source=1, pages=[2 * n + 1, 2 * n + 2])
    before = cache.usage("checkpoint"), cache.stats().stored
    assert before[0].free == 0
    with cache.lease(cache.lookup(PROMPT)) as lease, pytest.raises(LengthMismatchError):
        lease.publish(PROMPT[:8], source=1, pages=[13])
    assert (cache.usage("checkpoint"), cache.stats().stored) == before


def test_a_batch_with_one_bad_checkpoint_evicts_nothing() -> None:
    cache = make(checkpoint_slots=1)
    cached(cache, PROMPT, depth=8)
    with cache.start([5, *PROMPT]) as seq:
        with pytest.raises(UnalignedError):
            cache.checkpoint_many([(seq, 8, seq.slot), (seq, 9, seq.slot)])
        assert cache.lookup(PROMPT).length == 8


def test_a_lease_of_a_miss_loads_the_empty_state() -> None:
    cache = make_engine()
    cache.active.state(3).fill_(torch.nan)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.load(3)
    assert (cache.active.state(3) == 0).all()


def test_an_engines_tensors_are_used(cache: PrefixCache) -> None:
    state, conv = torch.zeros(2, 6, 3, 4, 6), torch.zeros(2, 6, 5, 3, dtype=torch.bfloat16)
    bound = make(active=ActivePool.bind(SPEC, state=state, conv=[conv]), active_slots=None)
    assert (bound.usage("active").capacity, bound.usage("checkpoint").capacity) == (5, 10)
    with bound.start(PROMPT) as seq:
        state[:, seq.slot] = 4
        seq.checkpoint(16)
        state[:, seq.slot] = 0
    with bound.start(PROMPT) as seq:
        assert (state[:, seq.slot] == 4).all()


def test_default_sizes() -> None:
    cache = PrefixCache(SPEC)
    assert [pool.capacity for pool in usage(cache)] == [0, 16, 32]


def test_a_purely_linear_model_has_no_pages() -> None:
    cache = make(kv_pages=0, page_size=1)
    cached(cache)
    with cache.start(PROMPT) as seq:
        assert (seq.reused, seq.pages) == (16, [])


def test_a_shortage_has_the_fields_a_scheduler_needs(cache: PrefixCache) -> None:
    running = [cache.start(prompt) for prompt in (PROMPT, [1], [2])]
    with pytest.raises(OutOfSlotsError) as short:
        cache.start([3])
    assert len(running) == 3
    assert (short.value.pool, short.value.wanted, short.value.free) == ("active", 1, 0)


def test_sizes_that_contradict_the_engines_tensors_are_refused() -> None:
    active = ActivePool(SPEC, 5)
    with pytest.raises(ConfigError, match="active_slots is 3, but the active pool has 5 slots"):
        make(active=active)
    other = StateSpec(layers=1, heads=1, d_k=1, d_v=1, layout="v_last")
    with pytest.raises(TensorError, match="layers=1"):
        PrefixCache(other, active=active)


def test_memory_is_checked_before_anything_is_allocated() -> None:
    with pytest.raises(BudgetError, match="lower checkpoint_slots first"):
        make(checkpoint_slots=2**31)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, radixstate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("policy", ["lru", "hit-density"])
def test_a_policy_is_chosen_by_its_name_and_serves(policy: str) -> None:
    cache = make(policy=policy, checkpoint_slots=2)
    for prompt in (range(9), range(20, 29), range(40, 49), range(40, 49)):
        with cache.start([*prompt]) as seq:
            reused = seq.reused
            if reused == 0:
                compute(seq, cache)
                assert isinstance(seq.checkpoint(8), Stored)
    assert reused == 8
    stats = cache.stats()
    assert (stats.starts, stats.hits, stats.evictions.for_checkpoint.checkpoints) == (4, 1, 1)
    cache.check()
    engine = make_engine(policy=policy)
    engine.lease(engine.lookup([1, 2, 3])).release()
    engine.check()


def test_a_policy_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match='policy must be one of lru, hit-density, got "mru"'):
        make(policy="mru")
