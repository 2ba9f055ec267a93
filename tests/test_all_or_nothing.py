"""Failures between two native calls, pools that can never work, and states that nobody wrote.

An operation that fails gives back everything it took, at once: whoever keeps its exception (a log, a future,
`sys.last_exc`) keeps the frames of its traceback, and with them every handle in their variables.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from radixstate import (
    ActivePool,
    ConvSpec,
    EngineCache,
    PrefixCache,
    Skipped,
    StartRequest,
    StateSpec,
    Stored,
)
from radixstate.errors import (
    CacheError,
    DepthPassedError,
    MisuseError,
    NotLoadedError,
    OutOfSlotsError,
    TensorError,
)

SPEC = StateSpec(
    layers=2, heads=2, d_k=4, d_v=4, dtype="float32", layout="v_last", conv=(ConvSpec((3, 2), "float32"),)
)
PROMPT = list(range(20))
POOLS = ("kv", "active", "checkpoint")


def make(**changes: Any) -> PrefixCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 6, "kv_pages": 32, "page_size": 4, "checkpoint_stride": 8}
    return PrefixCache(SPEC, **(sizes | changes))


def make_engine() -> EngineCache:
    return EngineCache(
        SPEC, active_slots=3, checkpoint_slots=6, kv_pages=32, page_size=4, checkpoint_stride=8
    )


def cached(cache: PrefixCache, depth: int = 8) -> PrefixCache:
    with cache.start(PROMPT[: depth + 1]) as seq:
        seq.checkpoint(depth)
    return cache


# --- all or nothing ---


class Injected(BaseException):
    """What no code expects: a signal's exception, or a driver's."""


class Watched:
    """Passes calls on to `target`, and tells about each before and after it ran."""

    def __init__(self, target: Any, tell: Callable[[str], None]) -> None:
        self._target, self._tell = target, tell

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            try:
                self._tell(f"before {name}")
            except Injected:
                del args, options  # which a native call that fails drops with its frame
                raise
            result = found(*args, **options)
            try:
                self._tell(f"after {name}")
            except Injected:
                del result  # as an interrupt drops what a call has just returned
                raise
            return result

        return call


@contextmanager
def failing(cache: PrefixCache, point: str, nth: int = 1) -> Iterator[list[str]]:
    """Raises at the n-th `point`, "before load" or "after load", of a cache and its pools; yields all points passed.

    The point "" never fails. Points are the native calls, and load, fill, store and poison of the states.
    """
    passed: list[str] = []

    def tell(here: str) -> None:
        passed.append(here)
        if point in ("any", here) and (len(passed) if point == "any" else passed.count(here)) == nth:
            raise Injected(here)

    native, active, transfer = cache._native, cache.active, cache._transfer
    cache._native = Watched(native, tell)
    codec, transfer.codec = transfer.codec, Watched(transfer.codec, tell)
    active.poison = Watched(active, tell).poison
    try:
        yield passed
    finally:
        cache._native, transfer.codec = native, codec
        del active.poison


def start_a_hit(cache: PrefixCache) -> Any:
    return cache.start(PROMPT)


def start_a_miss(cache: PrefixCache) -> Any:
    return cache.start([99, *PROMPT])


def start_with_further_slots(cache: PrefixCache) -> Any:
    return cache.start(PROMPT, slots=3)


def start_many(cache: PrefixCache) -> Any:
    return cache.start_many([StartRequest(PROMPT), StartRequest([]), StartRequest([99, *PROMPT])])


def checkpoint(cache: PrefixCache, seqs: list[Any]) -> Any:
    return seqs[0].checkpoint(16)


def checkpoint_many(cache: PrefixCache, seqs: list[Any]) -> Any:
    return cache.checkpoint_many([(seq, 16, seq.slot) for seq in seqs])


def take_slot(cache: PrefixCache, seqs: list[Any]) -> Any:
    return seqs[0].take_slot()


STARTS = (start_a_hit, start_a_miss, start_with_further_slots, start_many)
ON_SEQUENCES = (checkpoint, checkpoint_many)


def publish(cache: EngineCache) -> Any:
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.load(1)
        return lease.publish(PROMPT[:16], source=1, pages=[5, 6])


def held(cache: PrefixCache | EngineCache) -> list[tuple[int, int, int]]:
    """What requests hold of each pool: what a failed operation must leave as it was."""
    found = [cache.usage(pool) for pool in POOLS]
    return [(it.held, it.pinned, it.retiring) for it in found]


def fails(
    cache: PrefixCache | EngineCache, call: Callable[[], Any], point: str, nth: int = 1
) -> BaseException | None:
    """The exception of `call`, kept alive with its traceback; None if it did not get as far as `point`."""
    with failing(cache, point, nth):
        try:
            result = call()
        except Injected as error:
            return error
    for it in result if isinstance(result, list) else [result]:
        if hasattr(it, "finish"):
            it.finish()
    return None


def gives_everything_back(cache: PrefixCache, call: Callable[[], Any], point: str, nth: int = 1) -> bool:
    """Whether `call` got as far as the point; it then must have failed there and given back what it took."""
    before = held(cache)
    error = fails(cache, call, point, nth)
    gc.disable()  # or a collection might hide what the exception keeps
    try:
        assert held(cache) == before, f"{error!r} keeps slots"
    finally:
        gc.enable()
    cache.check()
    return error is not None


BOTH = ("before", "after")


@pytest.mark.parametrize("when", BOTH)
@pytest.mark.parametrize(
    ("start", "name", "nth"),
    [
        (start_a_hit, "fill", 1),
        (start_a_hit, "start", 1),
        (start_a_miss, "fill", 1),
        (start_a_miss, "start", 1),
        (start_with_further_slots, "poison", 1),
        (start_with_further_slots, "poison", 2),
        (start_with_further_slots, "slots", 1),
        (start_many, "load", 1),
        (start_many, "fill", 1),
        (start_many, "loaded", 1),
        (start_many, "loaded", 2),
    ],
)
def test_a_start_that_fails_gives_its_slots_back_while_the_error_is_kept(
    start: Callable[[PrefixCache], Any], name: str, nth: int, when: str
) -> None:
    assert gives_everything_back(cache := cached(make()), lambda: start(cache), f"{when} {name}", nth)


@pytest.mark.parametrize("when", BOTH)
@pytest.mark.parametrize(
    ("store", "name", "nth"),
    [
        (checkpoint, "store", 1),
        (checkpoint, "commit", 1),
        (checkpoint_many, "reserve_checkpoints", 1),
        (checkpoint_many, "store", 1),
        (checkpoint_many, "commit", 1),
        (checkpoint_many, "commit", 2),
    ],
)
def test_a_checkpoint_that_fails_gives_its_slots_back_while_the_error_is_kept(
    store: Callable[[PrefixCache, list[Any]], Any], name: str, nth: int, when: str
) -> None:
    cache = make()
    with cache.start(PROMPT) as one, cache.start([99, *PROMPT]) as two:
        before = cache.usage("checkpoint")
        error = fails(cache, lambda: store(cache, [one, two]), f"{when} {name}", nth)
        assert error is not None
        after = cache.usage("checkpoint")
        assert (after.held, after.retiring) == (before.held, before.retiring), f"{error!r} keeps slots"
        assert after.free + after.evictable + after.pinned == after.capacity
        cache.check()


@pytest.mark.parametrize("when", BOTH)
def test_a_checkpoint_whose_state_is_refused_gives_its_slot_back_when_that_fails(when: str) -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        cache.active.state(seq.slot).fill_(torch.nan)
        assert gives_everything_back(cache, lambda: seq.checkpoint(16), f"{when} discard")


@pytest.mark.parametrize("when", BOTH)
@pytest.mark.parametrize("name", ["reserve", "store", "publish"])
def test_a_publish_that_fails_gives_its_slot_back_while_the_error_is_kept(name: str, when: str) -> None:
    cache = make_engine()
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.publish(PROMPT[:8], source=1, pages=[1, 2])
    before = cache.usage("checkpoint").held
    error = fails(cache, lambda: publish(cache), f"{when} {name}")
    assert error is not None
    assert cache.usage("checkpoint").held == before, f"{error!r} keeps a slot"
    cache.check()


@pytest.mark.parametrize("operation", [*STARTS, *ON_SEQUENCES])
def test_an_operation_that_fails_at_any_native_call_gives_its_slots_back(
    operation: Callable[..., Any],
) -> None:
    nth, reached = 1, True
    while reached:
        cache = cached(make(active_slots=5))
        with cache.start([98, *PROMPT]) as one, cache.start([99, *PROMPT]) as two:
            more = ([one, two],) if operation in ON_SEQUENCES else ()
            before = held(cache)
            error = fails(cache, lambda args=(cache, *more): operation(*args), "any", nth)
            for (was, *_), (now, *_) in zip(before, held(cache), strict=True):
                assert now <= was, f"{error!r} at call {nth} keeps slots"  # pages may have been published
            cache.check()
        reached, nth = error is not None, nth + 1
    assert nth > 4


@pytest.mark.parametrize("kept", [start_a_hit, start_a_miss])
def test_a_cache_whose_starts_failed_has_room_for_another(kept: Callable[[PrefixCache], Any]) -> None:
    cache = cached(make())
    errors = [fails(cache, lambda: kept(cache), "before fill") for _ in range(3)]
    assert None not in errors
    with suppress(Injected):
        cache.start(PROMPT).finish()


# --- extra slots ---


@pytest.mark.parametrize("when", BOTH)
def test_a_slot_that_cannot_be_poisoned_is_given_back(when: str) -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        for point in (f"{when} poison", f"{when} take_slot"):
            assert gives_everything_back(cache, seq.take_slot, point)
        assert seq.slots == [seq.slot]


def test_a_taken_slot_can_be_given_back_alone() -> None:
    cache = make(active_slots=2)
    with cache.start(PROMPT) as seq:
        taken = seq.take_slot()
        seq.give_back_slot(taken)
        assert cache.usage("active").free == 1
        with pytest.raises(MisuseError):
            seq.checkpoint(16, source=taken)
        with pytest.raises(MisuseError):
            seq.give_back_slot(seq.slot)


def test_a_start_takes_its_further_slots_or_evicts_nothing() -> None:
    cache = cached(make(kv_pages=7))
    with cache.start([99] * 8), pytest.raises(OutOfSlotsError):
        cache.start([98] * 20, slots=3)
    assert cache.lookup(PROMPT).length == 8, "nothing was evicted for a start that had no slots"
    with cache.start([98] * 8, slots=3) as seq:
        assert len(seq.slots) == 3


@pytest.mark.parametrize("how", ["start", "start_many"])
@pytest.mark.parametrize("prompt", [PROMPT, [99, *PROMPT]], ids=["a hit", "a miss"])
def test_the_further_slots_of_a_start_hold_nothing_that_could_be_cached(how: str, prompt: list[int]) -> None:
    cache = cached(make())
    for slot in (1, 2, 3):
        cache.active.state(slot).fill_(7)
    if how == "start":
        seq: Any = cache.start(prompt, slots=3)
    else:
        (seq,) = cache.start_many([StartRequest(prompt, slots=3)])
    with seq:
        slot, *further = seq.slots
        assert slot == seq.slot
        assert cache.active.state(slot).isfinite().all()
        assert [seq.checkpoint(16, source=it) for it in further] == [Skipped("non_finite")] * 2


def test_a_start_of_many_counts_the_further_slots_of_each() -> None:
    cache = make()
    outcomes = cache.start_many([StartRequest([n] * 9, slots=2) for n in (97, 98)])
    started, refused = outcomes
    assert isinstance(refused, OutOfSlotsError)
    assert (refused.pool, refused.wanted, refused.free) == ("active", 2, 1)
    assert not isinstance(started, CacheError)
    started.finish()


def test_a_slot_given_back_in_a_step_is_nobody_elses_before_the_step_has_retired() -> None:
    cache = make(active_slots=2)
    with cache.start(PROMPT, slots=2) as seq:
        with cache.step():
            seq.give_back_slot(seq.slots[1])
            with pytest.raises(OutOfSlotsError) as short:
                cache.start([99])
            assert short.value.retiring == 1
        cache.start([99]).finish()


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (lambda seq: seq.give_back_slot(seq.slot), "holds the running state"),
        (lambda seq: seq.give_back_slot(0), "active slot 0 is not one of this request's slots"),
        (lambda seq: seq.give_back_slot(-1), "slot -1 is outside"),
    ],
)
def test_a_slot_that_cannot_be_given_back_stays(wrong: Callable[[Any], Any], rule: str) -> None:
    cache = make()
    with cache.start(PROMPT, slots=2) as seq:
        with pytest.raises(MisuseError, match=rule):
            wrong(seq)
        assert len(seq.slots) == 2


@pytest.mark.parametrize("slots", [0, -1, 2**70])
def test_a_number_of_slots_that_no_request_can_have_is_refused(slots: int) -> None:
    cache = make()
    with pytest.raises(MisuseError, match="slots"):
        cache.start(PROMPT, slots=slots)
    assert cache.usage("active").held == 0


# --- pools that can or cannot work ---


def test_a_cache_made_in_inference_mode_works_outside_it() -> None:
    with torch.inference_mode():
        cache = make()
    with cache.start(PROMPT) as seq:
        cache.active.state(seq.slot).fill_(2)
        seq.take_slot()
        assert isinstance(seq.checkpoint(16), Stored)
    with torch.inference_mode(), cache.start(PROMPT) as seq:
        assert (cache.active.state(seq.slot) == 2).all()


@pytest.mark.parametrize("layers", ["one tensor", "a tensor per layer"])
def test_an_engines_tensors_made_in_inference_mode_work_outside_it(layers: str) -> None:
    with torch.inference_mode():
        state = torch.zeros(2, 4, 2, 4, 4)
        conv = torch.zeros(2, 4, 3, 2)
        given = (state, [conv]) if layers == "one tensor" else ([*state], [[*conv]])
    cache = make(active=ActivePool.bind(SPEC, state=given[0], conv=given[1]), active_slots=3)
    for _ in range(2):
        with cache.start(PROMPT) as seq:
            seq.take_slot()
            assert isinstance(seq.checkpoint(16), Stored | Skipped)


SHAPE = (2, 4, 2, 4, 4)
WINDOWS = torch.zeros(2, 4, 3, 2)


def never_work() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Tensors (state, conv) with the right shapes over which no start can succeed."""
    one = torch.zeros(SHAPE)[0]
    return {
        "state needs a gradient": lambda: (torch.zeros(SHAPE, requires_grad=True), WINDOWS),
        "a window needs a gradient": lambda: (torch.zeros(SHAPE), WINDOWS.clone().requires_grad_()),
        "rows are one row, expanded": lambda: (torch.zeros(2, 1, 2, 4, 4).expand(SHAPE), WINDOWS),
        "layers are one layer, expanded": lambda: (torch.zeros(1, 4, 2, 4, 4).expand(SHAPE), WINDOWS),
        "windows are one row, expanded": lambda: (torch.zeros(SHAPE), WINDOWS[:, :1].expand(2, 4, 3, 2)),
        "two layers are one tensor": lambda: ([one, one], WINDOWS),
        "rows overlap": lambda: (torch.zeros(2000).as_strided(SHAPE, (1000, 16, 16, 4, 1)), WINDOWS),
    }


@pytest.mark.parametrize("what", never_work())
def test_tensors_that_can_never_work_are_refused_when_the_cache_is_made(what: str) -> None:
    state, conv = never_work()[what]()
    with pytest.raises(TensorError):
        make(active=ActivePool.bind(SPEC, state=state, conv=[conv]), active_slots=3)


def test_layers_that_share_memory_with_a_window_are_refused_when_the_cache_is_made() -> None:
    spec = StateSpec(
        layers=1, heads=1, d_k=4, d_v=4, dtype="float32", layout="v_last", conv=(ConvSpec((4, 4), "float32"),)
    )
    state = torch.zeros(1, 4, 1, 4, 4)
    with pytest.raises(TensorError):
        PrefixCache(spec, active=ActivePool.bind(spec, state=state, conv=[state[:, :, 0]]))


# --- forked children ---

LEAVES: dict[str, Callable[[], Any]] = {
    "a sequence": lambda: (cache := make(), cache.start(PROMPT)),
    "a lease": lambda: (cache := make_engine(), cache.lease(cache.lookup(PROMPT))),
    "a step": lambda: (cache := make(), cache.step()),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("what", list(LEAVES))
def test_a_body_that_fails_in_a_forked_child_fails_with_its_own_exception(what: str) -> None:
    cache, block = LEAVES[what]()
    child = 1
    seen = 2
    try:
        with block:
            child = os.fork()
            if child == 0:
                raise KeyError("the body's own")
    except KeyError:
        seen = 0
    except BaseException:
        seen = 1
    if child == 0:
        os._exit(seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.check()


# --- a state that nobody wrote ---


def test_a_taken_slot_gives_the_state_of_one_depth_once() -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        taken = seq.take_slot()
        cache.active.state(taken).fill_(8)
        cache.active.conv(0, taken).fill_(8)
        assert isinstance(seq.checkpoint(8, source=taken), Stored)
        assert seq.checkpoint(16, source=taken) == Skipped("non_finite"), "nobody wrote the state of 16"
        cache.active.state(taken).fill_(16)
        assert seq.checkpoint(16, source=taken) == Skipped("non_finite"), "nor its window"
        cache.active.state(taken).fill_(16)
        cache.active.conv(0, taken).fill_(16)
        assert isinstance(seq.checkpoint(16, source=taken), Stored)
    assert cache.lookup(PROMPT).length == 16


@pytest.mark.parametrize("skipped", ["duplicate", "no_store", "no_room"])
def test_a_taken_slot_whose_state_was_skipped_does_not_give_it_for_another_depth(skipped: str) -> None:
    cache = make(checkpoint_slots=1)
    if skipped == "duplicate":
        cached(cache)
    if skipped == "no_room":
        cached(cache, 16)
    pin = cache._native.lease(cache.lookup(PROMPT[:17] if skipped == "no_room" else [99]))
    with cache.start(PROMPT, no_read=True, no_store=skipped == "no_store") as seq:
        taken = seq.take_slot()
        cache.active.state(taken).fill_(8)
        assert seq.checkpoint(8, source=taken).reason == skipped
        assert not cache.active.state(taken).isfinite().all()
    cache._native.release(pin)


def test_a_batch_poisons_the_slots_that_were_taken_and_no_running_one() -> None:
    cache = make(active_slots=4)
    with cache.start(PROMPT) as one, cache.start([99, *PROMPT]) as two:
        taken = one.take_slot()
        for slot in (one.slot, two.slot, taken):
            cache.active.state(slot).fill_(slot)
        cache.checkpoint_many([(one, 8, taken), (one, 16, one.slot), (two, 16, two.slot)])
        assert not cache.active.state(taken).isfinite().all(dim=(1, 2, 3)).any(), "in every layer"
        for slot in (one.slot, two.slot):
            assert (cache.active.state(slot) == slot).all()


def test_a_window_that_nobody_wrote_is_not_the_previous_owners() -> None:
    cache = make()
    for slot in (1, 2, 3):
        cache.active.conv(0, slot).fill_(7)
    with cache.start(PROMPT) as seq:
        taken = seq.take_slot()
        cache.active.state(taken).fill_(8)
        seq.checkpoint(8, source=taken)
    with cache.start(PROMPT[:9]) as seq:
        assert not (cache.active.conv(0, seq.slot) == 7).any()


def test_a_window_that_nobody_wrote_is_not_cached() -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        taken = seq.take_slot()
        cache.active.state(taken).fill_(8)
        assert seq.checkpoint(8, source=taken) == Skipped("non_finite")


def test_a_sequence_has_no_state_above_what_it_started_from() -> None:
    cache = cached(make(), 16)
    cache.evict("checkpoint", 0)
    with cache.start(PROMPT) as seq:
        assert seq.reused == 16
        for source in (seq.slot, seq.take_slot()):
            with pytest.raises(DepthPassedError, match=rf"depth 8 is behind .* {source}, .* 16 tokens"):
                seq.checkpoint(8, source=source)


def test_a_running_slot_never_goes_back_to_a_shallower_state() -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        seq.checkpoint(16)
        with pytest.raises(DepthPassedError, match="depth 8 is behind active slot 1"):
            seq.checkpoint(8)


def test_a_batch_names_one_depth_for_each_slot() -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        for depths in ((8, 16), (16, 8)):
            with pytest.raises(
                DepthPassedError, match="depth 8 is behind active slot 1, whose state is of 16 tokens"
            ):
                cache.checkpoint_many([(seq, depth, seq.slot) for depth in depths])
        assert cache.usage("checkpoint").free == 6, "nothing was stored"
        assert isinstance(seq.checkpoint(8), Stored), "nothing was said of the slot"


def test_a_lease_that_never_loaded_its_state_publishes_nothing_deeper() -> None:
    cache = make_engine()
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.publish(PROMPT[:8], source=1, pages=[1, 2])
    with cache.lease(cache.lookup(PROMPT)) as lease, pytest.raises(NotLoadedError):
        lease.publish(PROMPT[:16], source=1, pages=[3, 4])
    with cache.lease(cache.lookup(PROMPT)) as lease:
        lease.load(1)
        assert isinstance(lease.publish(PROMPT[:16], source=1, pages=[3, 4]).outcome, Stored)
