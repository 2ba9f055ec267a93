"""What of a cache may be called from several threads, as the documentation of the package says."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from radixstate import EngineCache, PrefixCache, Sequence, StartRequest, StateSpec, Stored
from radixstate.errors import (
    MisuseError,
    OutOfSlotsError,
    PageOwnershipError,
    StaleError,
    UseAfterFinishError,
)
from test_concurrency import in_threads

SPEC = StateSpec(layers=1, heads=1, d_k=4, d_v=4, dtype="float32", layout="v_last")
SIZES = {"checkpoint_slots": 4, "kv_pages": 24, "page_size": 2, "checkpoint_stride": 4}
THREADS = 4
TURNS = 150


class Dice(random.Random):
    """What a thread does next, and the active slot that an engine would have given it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.slot = 1 + number


Call = Callable[[Any, Dice], object]


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads take turns after a few bytecodes each."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make(**changes: Any) -> PrefixCache:
    return PrefixCache(SPEC, **({"active_slots": 6} | SIZES | changes))


def prompt(rng: Dice) -> list[int]:
    """One of a few, so that threads meet in the tree."""
    return [rng.randrange(2) for _ in range(2)] + [7] * rng.randrange(3, 9)


def engine(**changes: Any) -> EngineCache:
    return EngineCache(SPEC, **({"active_slots": 6} | SIZES | changes))


def serve(cache: PrefixCache, rng: Dice) -> None:
    with cache.start(prompt(rng), no_read=rng.random() < 0.2) as seq:
        for _, end, keep in seq.pieces(4):
            if keep:
                seq.checkpoint(end)
        if rng.random() < 0.3:
            seq.grow(2)
            seq.append([9])
            seq.shrink()
        seq.copy_pages(memoryview(bytearray(4 * 24)).cast("i"))


def serve_many(cache: PrefixCache, rng: Dice) -> None:
    started = cache.start_many([StartRequest(prompt(rng)), StartRequest(prompt(rng), slots=2)])
    running = [it for it in started if isinstance(it, Sequence)]
    legal = [(seq, cache.legal_depth(seq.length), seq.slot) for seq in running]
    cache.checkpoint_many(it for it in legal if it[1] > it[0].reused)
    for seq in running:
        seq.finish()


def step(cache: PrefixCache, rng: Dice) -> None:
    with suppress(ZeroDivisionError), cache.step():
        serve(cache, rng)
        if rng.random() < 0.3:
            raise ZeroDivisionError


def overlap(cache: Any, rng: Dice) -> None:
    first, second = cache.begin_step(), cache.begin_step()
    cache.retire_step(second, failed=rng.random() < 0.3)
    cache.retire_step(first)


def withdraw(cache: PrefixCache, rng: Dice) -> None:
    tokens = prompt(rng)
    with cache.start(tokens) as seq:
        stored = seq.checkpoint(cache.legal_depth(len(tokens)))
    if isinstance(stored, Stored):
        cache.invalidate(stored)


def publish(cache: EngineCache, rng: Dice) -> Stored | None:
    """An engine's: its allocator gives any pages, so it gives some that the cache has."""
    tokens = prompt(rng)[:4]
    with cache.lease(cache.lookup(tokens)) as lease:
        lease.load(rng.slot)
        pages = rng.sample(range(1, 25), 2 - len(lease.pages))
        with suppress(PageOwnershipError):
            outcome = lease.publish(tokens, source=rng.slot, pages=pages).outcome
            return outcome if isinstance(outcome, Stored) else None
    return None


def publish_in_a_step(cache: EngineCache, rng: Dice) -> None:
    with suppress(ZeroDivisionError), cache.step():
        publish(cache, rng)
        if rng.random() < 0.3:
            raise ZeroDivisionError


def publish_and_withdraw(cache: EngineCache, rng: Dice) -> None:
    if stored := publish(cache, rng):
        cache.invalidate(stored)


def copy_freed(cache: EngineCache, rng: Dice) -> None:
    cache.copy_freed(memoryview(bytearray(4 * 24)).cast("i"))


def read(cache: EngineCache, rng: Dice) -> None:
    with cache.lease(cache.lookup(prompt(rng))) as lease:
        assert len(lease.pages) * 2 == lease.match.length


READS: dict[str, Call] = {
    "touch": lambda cache, rng: cache.touch(prompt(rng)),
    "settle": lambda cache, rng: cache.settle(),
    "lookup": lambda cache, rng: cache.lookup(prompt(rng)).length,
    "legal_depth": lambda cache, rng: cache.legal_depth(9),
    "stats": lambda cache, rng: cache.stats(),
    "usage": lambda cache, rng: cache.usage("kv"),
    "digest": lambda cache, rng: cache.digest(),
    "draw": lambda cache, rng: cache.draw(),
    "check": lambda cache, rng: cache.check(),
    "evict": lambda cache, rng: cache.evict(rng.choice(["kv", "checkpoint"]), 1),
    "reset": lambda cache, rng: cache.reset() if rng.random() < 0.1 else None,
    "begin_step": overlap,
    "retire_step": overlap,
}
STARTS: dict[str, Call] = {
    "start": serve,
    "start_many": serve_many,
    "checkpoint_many": serve_many,
    "step": step,
    "invalidate": withdraw,
}
ENGINE: dict[str, Call] = {
    "lease": lambda cache, rng: (publish if rng.random() < 0.5 else read)(cache, rng),
    "step": publish_in_a_step,
    "invalidate": publish_and_withdraw,
    "copy_freed": copy_freed,
    "take_freed": lambda cache, rng: cache.take_freed(),
}


def methods(cache: type) -> set[str]:
    return {name for name in dir(cache) if not name.startswith("_")}


def hammer(cache: Any, calls: dict[str, Call]) -> None:
    """Every thread makes all of the calls, in an order of its own. Shortages and stale matches are normal."""

    def work(number: int) -> None:
        rng = Dice(number)
        for _ in range(TURNS):
            with suppress(OutOfSlotsError, StaleError):
                calls[rng.choice(list(calls))](cache, rng)

    in_threads(THREADS, work)
    cache.check()


def test_every_method_of_a_cache_may_be_called_from_several_threads() -> None:
    assert methods(PrefixCache) == READS.keys() | STARTS.keys()
    cache = make()
    hammer(cache, READS | STARTS)
    assert cache.stats().hits > 0
    assert [cache.usage(pool).held + cache.usage(pool).retiring for pool in ("kv", "active")] == [0, 0]


def test_every_method_of_an_engines_cache_may_be_called_from_several_threads() -> None:
    assert methods(EngineCache) == READS.keys() | ENGINE.keys()
    cache = engine()
    hammer(cache, READS | ENGINE)
    assert cache.stats().stored > 0


def test_a_page_that_was_freed_is_told_to_one_thread() -> None:
    cache = engine(kv_pages=400, checkpoint_slots=100)
    for n in range(100):
        with cache.lease(cache.lookup([n, 1, 2, 3])) as lease:
            lease.load(1)
            lease.publish([n, 1, 2, 3], source=1, pages=[2 * n + 1, 2 * n + 2])
    told: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            cache.evict("kv", 1)
            told.extend(cache.take_freed())

    in_threads(THREADS, work)
    assert sorted(told) == list(range(1, 201))


def test_a_sequence_is_handed_from_thread_to_thread() -> None:
    cache = make()
    held = [cache.start([1, 2, 3], reserve=24)]
    for token in range(8):
        in_threads(1, lambda _, token=token: held[0].append([token]))
    assert held[0].tokens == [1, 2, 3, *range(8)]
    in_threads(1, lambda _: held.pop().finish())
    assert cache.usage("active").free == 6


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_of_threads_that_end_one_sequence_one_does(end: str) -> None:
    cache = make()
    for _ in range(50):
        seq = cache.start([1, 2, 3])
        refused: list[MisuseError] = []

        def work(number: int, seq: Sequence = seq, refused: list[MisuseError] = refused) -> None:
            try:
                getattr(seq, end)()
            except UseAfterFinishError as error:
                refused.append(error)

        in_threads(THREADS, work)
        assert len(refused) == THREADS - 1
    cache.check()
    assert cache.usage("active").free == 6


def test_what_any_thread_gives_back_waits_for_a_step_of_another() -> None:
    cache = make()
    seq = cache.start([1, 2, 3])
    with cache.step():
        in_threads(1, lambda _: seq.finish())
        assert cache.usage("active").retiring == 1
    assert cache.usage("active").free == 6


def test_what_any_thread_stores_goes_with_a_step_of_another_that_fails() -> None:
    cache = make()
    stored: list[object] = []

    def work(_: int) -> None:
        with cache.start([1, 2, 3, 4, 5]) as seq:
            stored.append(seq.checkpoint(4))

    step = cache.begin_step()
    in_threads(1, work)
    assert isinstance(stored[0], Stored)
    assert stored[0].step == step.id
    cache.retire_step(step, failed=True)
    assert cache.lookup([1, 2, 3, 4, 5]).length == 0
    cache.check()
