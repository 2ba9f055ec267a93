"""The library and the reference driven by the same random calls, and what that would find."""

import doctest
import os
from typing import Any

import pytest
import radixstate.testing
import torch
from radixstate import EngineCache, Lease, PrefixCache, Sequence, StateSpec, Stored
from radixstate.errors import NotYourSlotError, OutOfSlotsError, SlotError
from radixstate.reference.cache import ReferenceCache
from radixstate.testing import (
    NAMESPACES,
    CheckedCache,
    CheckedEngineCache,
    CheckedLease,
    CheckedSequence,
    Disagreement,
    EngineMachine,
    Figures,
    SchedulerMachine,
)
from radixstate.testing.base_machine import pattern
from radixstate.testing.pages import EnginePages

SECONDS = float(os.environ.get("RADIXSTATE_FUZZ_SECONDS", "0")) / 2  # the two machines share them
ROUND = 25 if SECONDS else 150  # examples: short rounds end when they should
SPEC = StateSpec(layers=2, heads=1, d_k=2, d_v=3, dtype="float32", layout="v_last")
PROMPT = list(range(9))


def make(**changes: Any) -> CheckedCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 2, "kv_pages": 12, "page_size": 2, "checkpoint_stride": 4}
    return CheckedCache(SPEC, **(sizes | changes))


def make_engine(**changes: Any) -> CheckedEngineCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 2, "kv_pages": 12, "page_size": 2, "checkpoint_stride": 4}
    return CheckedEngineCache(SPEC, **(sizes | changes))


@pytest.fixture
def cache() -> CheckedCache:
    return make()


def compute(cache: CheckedCache | CheckedEngineCache, slot: int, value: float = 1.0) -> None:
    """Stands for the model."""
    cache.active.state(slot).fill_(value)


def cached(cache: CheckedCache, prompt: list[int] = PROMPT) -> Stored:
    with cache.start(prompt) as seq:
        compute(cache, seq.slot)
        stored = seq.checkpoint(cache.legal_depth(len(prompt)))
    assert isinstance(stored, Stored)
    return stored


def test_a_scheduler_and_the_reference_agree(figures: Figures) -> None:
    figures.fuzz(SchedulerMachine, examples=ROUND, seconds=SECONDS)


def test_an_engine_that_allocates_its_pages_and_the_reference_agree(figures: Figures) -> None:
    figures.fuzz(EngineMachine, examples=ROUND, seconds=SECONDS)


def test_no_call_that_changes_something_goes_unchecked() -> None:
    unchecked = {
        name
        for checked, plain in (
            (CheckedCache, PrefixCache),
            (CheckedSequence, Sequence),
            (CheckedEngineCache, EngineCache),
            (CheckedLease, Lease),
        )
        for name in dir(plain)
        if callable(getattr(plain, name)) and not name.startswith("_") and name not in dir(checked)
    }
    reads = {"check", "copy_pages", "digest", "draw", "legal_depth", "pieces", "stats", "usage"}
    # On a CPU every verdict is there at once, so `settle` has nothing to do.
    assert unchecked == reads | {"settle"}


def test_the_example_of_the_documentation_runs() -> None:
    result = doctest.testmod(radixstate.testing)
    assert (result.failed, result.attempted > 8) == (0, True)


@pytest.mark.parametrize("layout", ["v_last", "k_last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
def test_a_checked_cache_answers_as_a_cache_does(layout: Any, dtype: str, format: str) -> None:
    spec = StateSpec(layers=2, heads=1, d_k=2, d_v=3, dtype=dtype, layout=layout)
    cache = CheckedCache(spec, kv_pages=12, page_size=2, checkpoint_stride=4, format=format)
    torch.manual_seed(0)
    with cache.start(PROMPT) as seq:
        cache.active.state(seq.slot).normal_()
        assert isinstance(seq.checkpoint(8), Stored)
    with cache.start(PROMPT) as seq:
        assert (seq.reused, isinstance(seq, CheckedSequence), len(seq.pages)) == (8, True, 5)


def test_refusals_of_a_checked_cache_are_the_librarys(cache: CheckedCache) -> None:
    running = [cache.start(PROMPT[:3]) for _ in range(3)]
    with pytest.raises(OutOfSlotsError) as short:
        cache.start(PROMPT)
    assert (short.value.pool, short.value.wanted) == ("active", 1)
    with pytest.raises(NotYourSlotError):
        running[0].checkpoint(0, source=running[1].slot)


def test_a_slot_written_after_it_was_given_back_is_found(cache: CheckedCache) -> None:
    seq = cache.start(PROMPT)
    slot = seq.slot
    seq.finish()
    compute(cache, slot)
    with pytest.raises(Disagreement, match=r"^active slot 1 was written while nobody owned it$"):
        cache.lookup(PROMPT)


def test_a_step_in_flight_may_still_write_what_was_given_back(cache: CheckedCache) -> None:
    with cache.step():
        seq = cache.start(PROMPT)
        slot = seq.slot
        seq.finish()
        compute(cache, slot)
    cache.lookup(PROMPT)
    compute(cache, slot)
    with pytest.raises(Disagreement, match="written while nobody owned it"):
        cache.lookup(PROMPT)


def test_a_checkpoint_that_somebody_overwrites_is_found(cache: CheckedCache) -> None:
    cache.checkpoints.state(cached(cache).slot)[0, 0, 0, 0] = 0
    with pytest.raises(Disagreement, match="was written by somebody else than the cache"):
        cache.lookup(PROMPT)


def test_what_nobody_owns_is_nan(cache: CheckedCache) -> None:
    stored = cached(cache)
    assert cache.active.state(1).isnan().all()
    cache.evict("checkpoint", 1)
    assert cache.checkpoints.scale(stored.slot).isnan().all()


def test_a_state_of_another_prefix_is_found(cache: CheckedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(cache)
    codec = cache.library._transfer.codec

    class OfTheOther:
        def fill(self, source: int, slot: int) -> None:
            codec.fill(3 - source, slot)

    monkeypatch.setattr(cache.library._transfer, "codec", OfTheOther())
    with pytest.raises(Disagreement, match="active slot 1 does not hold the state of"):
        cache.start(PROMPT)


def test_another_answer_than_the_references_is_found(cache: CheckedCache) -> None:
    cache._model.reference = ReferenceCache(
        page_size=2, checkpoint_stride=8, kv_pages=12, active_slots=3, checkpoint_slots=2
    )
    with pytest.raises(Disagreement, match=r"^usage of the kv pool: \(12, 9, 3, .*, expected \(12, 12, 0,"):
        cache.start(PROMPT[:5])


def test_ranks_that_diverged_are_found(cache: CheckedCache) -> None:
    cache.rank.evict("kv", 1)
    with pytest.raises(Disagreement, match=r"^digests of two ranks"):
        cache.lookup(PROMPT)


def test_a_slot_beyond_the_pool_holds_up_no_checkpoint() -> None:
    cache = make_engine()
    lease = cache.lease(cache.lookup(PROMPT))
    with pytest.raises(SlotError) as kept:
        lease.publish(PROMPT[:4], source=9, pages=[1, 2])
    assert (kept.value.__traceback__ is not None, cache.usage("checkpoint").held) == (True, 0)


def test_a_wrong_state_among_several_holds_up_no_checkpoint(cache: CheckedCache) -> None:
    first, second = cache.start(PROMPT), cache.start(PROMPT[::-1])
    with pytest.raises(NotYourSlotError) as kept:
        cache.checkpoint_many([(first, 4, first.slot), (second, 4, first.slot)])
    assert (kept.value.__traceback__ is not None, cache.usage("checkpoint").held) == (True, 0)


def leased(cache: CheckedEngineCache, prompt: list[int] = PROMPT) -> CheckedLease:
    """One whose state was loaded into slot 2."""
    lease = cache.lease(cache.lookup(prompt))
    lease.load(2)
    return lease


@pytest.mark.parametrize("logical", [False, True])
def test_a_checked_cache_of_an_engine_answers_as_a_cache_does(logical: bool) -> None:
    cache = make_engine(logical=logical)
    compute(cache, 1)
    with leased(cache) as lease:
        made = lease.publish(PROMPT[:4], source=1, pages=None if logical else [2, 1])
        assert (isinstance(made.outcome, Stored), lease.depth, len(lease.pages)) == (True, 4, 2)
        assert lease.extend(PROMPT[:8], None if logical else [5, 6]).replaced is None
        assert isinstance(lease.attach(PROMPT[:8], source=1), Stored)
    with leased(cache) as lease:
        assert (lease.match.length, lease.pages) == (8, [1, 2, 3, 4] if logical else [2, 1, 5, 6])
    cache.evict("kv", 4)
    assert sorted(cache.take_freed()) == ([1, 2, 3, 4] if logical else [1, 2, 5, 6])


def test_a_slot_that_a_lease_gave_back_is_nobodys() -> None:
    cache = make_engine(own_slots=True)
    with cache.lease(cache.lookup(PROMPT)) as lease:
        slot = lease.take_slot()
        assert (slot, cache.active.state(slot).isnan().all()) == (1, True)
        lease.give_back_slot(slot)
    compute(cache, slot)
    with pytest.raises(Disagreement, match=r"^active slot 1 was written while nobody owned it$"):
        cache.lookup(PROMPT)


def test_another_number_than_the_references_is_found() -> None:
    cache = make_engine(logical=True)
    lease = leased(cache)
    cache.reference.pools["kv"].free.reverse()
    with pytest.raises(Disagreement, match=r"^pages of a lease: \[1, 2\], expected \[12, 11\]$"):
        lease.extend(PROMPT[:4])


def pages_of_an_engine(logical: bool) -> tuple[EnginePages, list[int]]:
    """Two pages that the cache has, as it calls them."""
    pages = EnginePages(make_engine(logical=logical))
    ids = [7, 8] if logical else [1, 2]
    pages.hand_over(pages.compute(NAMESPACES[0], PROMPT[:4], 0), ids, None)
    return pages, ids


@pytest.mark.parametrize("logical", [False, True])
def test_pages_hold_the_tokens_that_they_were_computed_from(logical: bool) -> None:
    pages, ids = pages_of_an_engine(logical)
    pages.require(ids, NAMESPACES[0], PROMPT)
    with pytest.raises(Disagreement, match="does not hold the tokens up to 4"):
        pages.require(ids, NAMESPACES[0], [*PROMPT[:3], 9])
    with pytest.raises(Disagreement, match="does not hold the tokens up to 2"):
        pages.require(ids, NAMESPACES[1], PROMPT)
    pages.take_back(ids[1:])
    with pytest.raises(Disagreement, match="does not hold the tokens up to 4"):
        pages.require(ids, NAMESPACES[0], PROMPT)


def test_replaced_pages_stay_with_the_engine_and_hold_nothing() -> None:
    pages, ids = pages_of_an_engine(logical=True)
    mine = pages.compute(NAMESPACES[0], PROMPT[:6], 0)
    pages.hand_over(mine, [*ids, 9], (0, 4))
    pages.require([*ids, 9], NAMESPACES[0], PROMPT)
    assert set(mine[:2]) <= set(pages.free)


def test_a_number_that_is_given_before_it_was_taken_back_is_found() -> None:
    pages, ids = pages_of_an_engine(logical=True)
    with pytest.raises(Disagreement, match=r"^number 7 names a page before the engine took it back$"):
        pages.hand_over(pages.compute(NAMESPACES[0], PROMPT[:2], 0), ids[:1], None)


def test_a_page_that_the_cache_calls_by_another_id_is_found() -> None:
    pages, _ = pages_of_an_engine(logical=False)
    with pytest.raises(Disagreement, match=r"^the engine gave page 3, and the cache calls it 4$"):
        pages.hand_over(pages.compute(NAMESPACES[0], PROMPT[:2], 0), [4], None)


@pytest.mark.parametrize("layout", ["v_last", "k_last"])
def test_patterns_tell_prefixes_apart_and_survive_int8(layout: Any) -> None:
    spec = StateSpec(layers=2, heads=1, d_k=2, d_v=3, dtype="bfloat16", layout=layout)
    keys = [(NAMESPACES[0], tuple(PROMPT[:n])) for n in range(9)]
    states = [pattern(spec, key)[0] for key in keys]
    assert len({state.numpy().tobytes() for state in states}) == 9
    v_axis = -1 if layout == "v_last" else -2
    assert all((state.abs().amax(dim=v_axis) == 127).all() for state in states)
