"""Whether a state is finite is known late: until then, and when nobody could ask, it must not be reused.

Stores say so when they are asked, as those of a device do. The state of a request is NaN where a test says `bad`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ABCSequence
from typing import Any

import numpy as np
import pytest
from interrupts import interrupt
from radixstate import EngineCache, PrefixCache, Skipped, StartRequest, StateSpec, Stored, Transfer

SPEC = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
PROMPT = list(range(9))


class DeviceError(RuntimeError):
    """As torch raises it for an error of CUDA."""


class Late(ABCSequence[bool]):
    """Verdicts on a store. Reading one waits."""

    def __init__(self, finite: ABCSequence[bool], wait: Callable[[], None]) -> None:
        self.finite, self.wait = finite, wait

    def __len__(self) -> int:
        return len(self.finite)

    def __getitem__(self, index: Any) -> Any:
        self.wait()
        return self.finite[index]


SIZES: dict[str, Any] = {
    "active_slots": 3,
    "checkpoint_slots": 8,
    "kv_pages": 64,
    "page_size": 2,
    "checkpoint_stride": 4,
}


class Waits:
    """Verdicts are `Late`; the next wait does what `at_wait` has, once."""

    _transfer: Transfer

    def slow_down(self) -> None:
        """Puts a slow device in the place of this one."""
        self.at_wait: list[Callable[[], None]] = []
        store = self._transfer.store
        self._transfer.store = lambda pairs: Late(store(pairs), self._wait)  # type: ignore[method-assign]  # a slow device

    def _wait(self) -> None:
        if self.at_wait:
            self.at_wait.pop()()

    def fail_once(self, error: type[BaseException]) -> None:
        """The next wait raises."""

        def fail() -> None:
            raise error

        self.at_wait = [fail]


class LateCache(PrefixCache, Waits):
    """A cache whose verdicts come late."""

    def __init__(self) -> None:
        super().__init__(SPEC, **SIZES)
        self.slow_down()


class LateEngineCache(EngineCache, Waits):
    """The same for an engine that allocates the pages."""

    def __init__(self) -> None:
        super().__init__(SPEC, **SIZES)
        self.slow_down()


@pytest.fixture
def cache() -> Iterator[LateCache]:
    """Sound when the test is done."""
    cache = LateCache()
    yield cache
    cache.check()


def put(
    cache: PrefixCache, prompt: list[int] = PROMPT, *, bad: bool = False, depth: int = 8
) -> Stored | Skipped:
    """A whole request, which stores its state."""
    with cache.start(prompt, no_read=True) as seq:
        cache.active.state(seq.slot).fill_(float("nan") if bad else 1.0)
        return seq.checkpoint(depth)


def reused(cache: PrefixCache, prompt: list[int] = PROMPT) -> int:
    """Tokens that a start reuses; never a state that is not finite."""
    with cache.start(prompt) as seq:
        assert cache.active.state(seq.slot).isfinite().all(), "a state that is not finite was reused"
        return seq.reused


ERRORS = pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])


# --- the wait raises ---


@ERRORS
@pytest.mark.parametrize("bad", [False, True])
def test_a_state_whose_verdict_could_not_be_read_is_withdrawn(
    cache: LateCache, error: type[BaseException], bad: bool
) -> None:
    put(cache, bad=bad)
    cache.fail_once(error)
    with pytest.raises(error):
        cache.lookup(PROMPT)
    assert reused(cache) == 0
    assert cache.stats().skipped.non_finite == 1


@ERRORS
def test_an_error_in_one_wait_leaves_the_other_verdicts_to_be_read(
    cache: LateCache, error: type[BaseException]
) -> None:
    good, bad = [1] * 9, [2] * 9
    for prompt in (PROMPT, good, bad):
        put(cache, prompt, bad=prompt is bad)
    cache.fail_once(error)
    with pytest.raises(error):
        cache.start_many([])
    assert [reused(cache, prompt) for prompt in (PROMPT, good, bad)] == [0, 8, 0]


@ERRORS
def test_a_step_whose_verdicts_could_not_be_read_is_over_and_its_states_are_withdrawn(
    cache: LateCache, error: type[BaseException]
) -> None:
    step = cache.begin_step()
    for prompt in (PROMPT, [1] * 9, [2] * 9):
        put(cache, prompt)
    cache.fail_once(error)
    with pytest.raises(error):
        cache.retire_step(step)
    assert [reused(cache, prompt) for prompt in (PROMPT, [1] * 9, [2] * 9)] == [0, 0, 0]
    assert [cache.usage(pool).retiring for pool in ("kv", "active", "checkpoint")] == [0, 0, 0]


@ERRORS
def test_a_store_that_needs_the_slots_of_unproven_states_waits_for_them(
    cache: LateCache, error: type[BaseException]
) -> None:
    prompts = [[n] * 9 for n in range(2, 11)]
    for prompt in prompts[:8]:
        put(cache, prompt, bad=True)
    cache.fail_once(error)
    with pytest.raises(error):
        put(cache, prompts[8])
    put(cache, prompts[8])
    assert [reused(cache, prompt) for prompt in prompts] == [0] * 8 + [8]


# --- others come in between ---


def test_a_second_thread_does_not_find_a_state_while_the_first_waits_for_its_verdict(
    cache: LateCache,
) -> None:
    put(cache, bad=True)
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        assert go_on.wait(10)

    cache.at_wait = [wait]
    first = threading.Thread(target=cache.lookup, args=(PROMPT,))
    first.start()
    try:
        assert waiting.wait(10)
        assert cache.lookup(PROMPT).length == 0
    finally:
        go_on.set()
        first.join(10)
    assert not first.is_alive()


def test_two_threads_that_settle_at_once_lose_no_verdict(cache: LateCache) -> None:
    prompts = [[i] * 9 for i in range(4)]
    for i, prompt in enumerate(prompts):
        put(cache, prompt, bad=i in {1, 3})
    both = threading.Barrier(2, timeout=10)
    cache.at_wait = [both.wait, both.wait]  # type: ignore[list-item]  # both wait for the first verdict
    threads = [threading.Thread(target=cache.start_many, args=([],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [reused(cache, prompt) for prompt in prompts] == [8, 0, 8, 0]
    assert cache.stats().skipped.non_finite == 2


def test_requests_that_store_while_they_are_listed_reuse_nothing_unasked(cache: LateCache) -> None:
    def requests() -> Iterator[StartRequest]:
        put(cache, bad=True)
        yield StartRequest(PROMPT)

    (started,) = cache.start_many(requests())
    assert started.reused == 0
    started.abort()


def test_a_state_stored_while_a_prompt_is_read_is_not_reused_unasked(cache: LateCache) -> None:
    class Prompt:
        """Tokens whose second reading finds that somebody else has stored their state."""

        readings = 0

        def __len__(self) -> int:
            return len(PROMPT)

        def __iter__(self) -> Iterator[int]:
            self.readings += 1
            if self.readings == 2:
                put(cache, bad=True)
            return iter(PROMPT)

    put(cache, [1] * 9)  # something is to be settled, so the prompt is read twice
    assert reused(cache, Prompt()) == 0  # type: ignore[arg-type]  # no list, for once


# --- between a call of the core and what the front notes of it ---


@pytest.mark.parametrize("in_step", [False, True])
def test_an_interrupted_store_leaves_no_state_that_nobody_will_ask_about(in_step: bool) -> None:
    for place in itertools.count():
        cache = LateCache()
        step = cache.begin_step() if in_step else None
        seq = cache.start(PROMPT)
        cache.active.state(seq.slot).fill_(float("nan"))
        interrupted = interrupt(lambda seq=seq: seq.checkpoint(8), place)
        seq.abort()
        if step is not None:
            cache.retire_step(step)
        assert reused(cache) == 0, f"interrupted at place {place}"
        if not interrupted:
            break


def test_an_interrupted_publish_leaves_no_state_that_nobody_will_ask_about() -> None:
    for place in itertools.count():
        cache = LateEngineCache()
        lease = cache.lease(cache.lookup(PROMPT))
        cache.active.state(1).fill_(float("nan"))
        interrupted = interrupt(
            lambda lease=lease: lease.publish(PROMPT[:8], source=1, pages=[1, 2, 3, 4]), place
        )
        assert cache.lookup(PROMPT).length == 0, f"interrupted at place {place}"
        if not interrupted:
            break


@pytest.mark.parametrize("other", ["start", "retire_step"])
def test_another_thread_in_the_middle_of_a_store_reuses_no_state_unasked(other: str) -> None:
    for place in itertools.count():
        cache = LateCache()
        step = cache.begin_step() if other == "retire_step" else None
        seq = cache.start(PROMPT)
        cache.active.state(seq.slot).fill_(float("nan"))
        acts: dict[str, Callable[[], object]] = {
            "start": lambda cache=cache: reused(cache),
            "retire_step": lambda cache=cache, step=step: cache.retire_step(step),
        }
        met = interrupt(lambda seq=seq: seq.checkpoint(8), place, acts[other])
        seq.abort()
        assert reused(cache) == 0, f"at place {place}"
        if not met:
            break


@pytest.mark.parametrize("call", ["lookup", "start", "start_many", "retire_step"])
def test_an_interrupted_call_that_settles_leaves_no_state_unasked(call: str) -> None:
    for place in itertools.count():
        cache = LateCache()
        step = cache.begin_step() if call == "retire_step" else None
        put(cache, bad=True)
        settles: dict[str, Callable[[], object]] = {
            "lookup": lambda cache=cache: cache.lookup(PROMPT),
            "start": lambda cache=cache: cache.start(PROMPT).abort(),
            "start_many": lambda cache=cache: cache.start_many([]),
            "retire_step": lambda cache=cache, step=step: cache.retire_step(step),
        }
        interrupted = interrupt(settles[call], place)
        assert reused(cache) == 0, f"interrupted at place {place}"
        if not interrupted:
            break


# --- pages of a state whose verdict is not known ---


def test_a_request_keeps_its_own_pages_while_the_verdict_on_others_is_open(cache: LateCache) -> None:
    a, b = cache.start(PROMPT), cache.start(PROMPT)
    own = b.pages
    cache.active.state(a.slot).fill_(float("nan"))
    cache.active.state(b.slot).fill_(1.0)
    a.checkpoint(4)
    b.checkpoint(8)
    assert b.pages == own


def test_a_verdict_on_a_shallower_state_takes_no_deeper_good_one(cache: LateCache) -> None:
    a, b = cache.start(PROMPT), cache.start(PROMPT)
    cache.active.state(a.slot).fill_(float("nan"))
    cache.active.state(b.slot).fill_(1.0)
    a.checkpoint(4)
    b.checkpoint(8)
    assert cache.lookup(PROMPT).length == 8 or isinstance(b.checkpoint(8), Stored)


# --- what is told once ---


def test_freed_pages_are_written_or_told_again_when_the_call_is_interrupted() -> None:
    for place in itertools.count():
        cache = LateEngineCache()
        cache.active.state(1).fill_(1.0)
        with cache.lease(cache.lookup(PROMPT)) as lease:
            lease.publish(PROMPT[:8], source=1, pages=[1, 2, 3, 4])
        cache.evict("kv", 4)
        told = np.zeros(4, np.int32)  # no page is 0
        interrupted = interrupt(lambda cache=cache, told=told: cache.copy_freed(told), place)
        assert sorted({*told.tolist(), *cache.take_freed()} - {0}) == [1, 2, 3, 4], (
            f"interrupted at place {place}"
        )
        if not interrupted:
            break


def test_a_start_that_reuses_nothing_waits_for_room_and_reads_an_iterator_once(cache: LateCache) -> None:
    with cache.start([99] * 9, no_read=True, reserve=56):
        for n in range(2, 10):
            put(cache, [n] * 9)
        assert cache.usage("kv").free == 4, "too few, until proofs are read"
        with cache.start(iter([1] * 9), no_read=True) as other:
            assert other.length == 9


def test_a_lookup_of_all_tokens_waits_for_the_verdict_on_their_last_state(cache: LateCache) -> None:
    put(cache, depth=8)
    assert cache.lookup(PROMPT[:8], whole=True).length == 8
