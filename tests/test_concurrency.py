"""Threads, garbage collectors, forks, copies and the interpreter's exit."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from radixstate import EngineCache, PrefixCache, StateSpec

SPEC = StateSpec(layers=2, heads=2, d_k=8, d_v=8, dtype="float32", layout="v_last")
PROMPT = list(range(20))
SIZES = {"active_slots": 4, "checkpoint_slots": 6, "kv_pages": 64, "page_size": 4, "checkpoint_stride": 8}


def make(**changes: Any) -> PrefixCache:
    return PrefixCache(SPEC, **(SIZES | changes))


def in_threads(n: int, work: Callable[[int], None]) -> None:
    """Runs `work` in `n` threads at once; raises what any of them raised."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def all_free(cache: PrefixCache) -> bool:
    return cache.usage("active").free == 4 and cache.usage("kv").held == 0


def test_each_of_many_threads_finds_its_own_states() -> None:
    cache = make(format="native")

    def work(number: int) -> None:
        for turn in range(100):
            prompt = [1000 * number + turn % 3, *PROMPT]
            with cache.start(prompt) as seq:
                state = cache.active.state(seq.slot)
                assert (state == (prompt[0] + 1 if seq.reused else 0)).all()
                state.fill_(prompt[0] + 1)
                seq.checkpoint(16)

    in_threads(4, work)
    cache.check()
    assert (cache.stats().starts, all_free(cache)) == (400, True)
    assert cache.stats().hits > 0


def test_what_one_thread_drops_while_others_call_comes_back_once() -> None:
    cache = make()
    handed: list[object] = []

    def work(number: int) -> None:
        for turn in range(200):
            if number % 2:
                handed.append(cache.start([number, turn % 5, 7], reserve=3))
            while handed:
                handed.pop()
                cache.usage("kv")

    in_threads(2, work)
    cache.check()
    assert all_free(cache)


def test_steps_of_many_threads_settle() -> None:
    cache = make()

    def work(number: int) -> None:
        for turn in range(100):
            with cache.step():
                seq = cache.start([number, turn % 4, *PROMPT[:7]], reserve=9) if number == 0 else None
                if seq:
                    seq.checkpoint(8)

    in_threads(3, work)
    cache.check()
    assert (cache.usage("active").retiring, cache.usage("checkpoint").pinned) == (0, 0)


def test_a_collector_on_another_thread_gives_back_what_a_cycle_held() -> None:
    cache = make()
    cycle: list[object] = [cache.start(PROMPT), cache.begin_step()]
    cycle.append(cycle)
    del cycle
    assert cache.usage("active").held == 1
    in_threads(1, lambda _: gc.collect())
    assert all_free(cache)
    cache.check()


def test_what_owns_slots_is_neither_copied_nor_pickled() -> None:
    cache = make()
    engine = EngineCache(SPEC, active_slots=2)
    with cache.start(PROMPT) as seq, engine.lease(engine.lookup(PROMPT)) as lease:
        for owner in (cache, engine, seq, lease):
            name = type(owner).__name__
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"cannot copy or pickle a {name}: it owns slots"):
                    duplicate(owner)
    assert all_free(cache)


# --- other processes ---

# The native cache alone starts thirty times as fast: most of these need no tensor.
NATIVE = f"""
import gc, os, threading
from radixstate import _native
cache = _native.Cache(**{SIZES!r})
"""
FRONT = f"""
import gc, os, threading
from radixstate import EngineCache, PrefixCache, StateSpec
from radixstate.errors import ForkedError, MisuseError
spec = {SPEC!r}
cache = PrefixCache(spec, **{SIZES!r})
"""


def run(code: str) -> None:
    """Runs a script in an interpreter of its own, which must end well and without a word."""
    strict = ["-X", "faulthandler", "-W", "error"]
    done = subprocess.run([sys.executable, *strict, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


CHILD = """
engine = EngineCache(spec, active_slots=1)
seq, lease = cache.start([1, 2, 3]), engine.lease(engine.lookup([1]))
calls = [
    lambda: cache.start([1]), lambda: cache.lookup([1]), lambda: cache.legal_depth(8),
    lambda: cache.evict("kv", 1), lambda: cache.usage("kv"), lambda: engine.lease(lease.match),
    lambda: seq.pages, lambda: seq.checkpoint(0), seq.finish, lease.release,
    cache.begin_step, cache.reset, cache.stats, cache.digest, cache.check,
    lambda: cache._transfer.load([(1, 1)]),
    lambda: cache._transfer.store([(1, 1)]),
]
child = os.fork()
if child == 0:
    for call in calls:
        try:
            call()
        except ForkedError as refused:
            assert isinstance(refused, MisuseError) and "belongs to the process that made it" in str(refused)
        else:
            os._exit(1)
    own = PrefixCache(spec, active_slots=1)
    with own.start([1, 2, 3]) as other:
        other.grow(1)
    del seq, lease
    gc.collect()
    own.check()
    grandchild = os.fork()
    if grandchild == 0:
        try:
            own.stats()
        except ForkedError:
            os._exit(0)
        os._exit(2)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert cache.usage("active").held == 1, "the child gave nothing back"
seq.finish()
lease.release()
cache.check()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_may_not_call_its_parents_cache_and_can_make_its_own() -> None:
    run(FRONT + CHILD)


ENDS = {
    "globals in any order": "seq = cache.start([1, 2, 3]); other = cache",
    "the cache first": "seq = cache.start([1, 2, 3]); del cache; gc.collect()",
    "a cycle": "cycle = [cache, cache.start([1, 2, 3])]; cycle.append(cycle); del cache, cycle",
    "a step in flight": "cache.begin_step(); cache.finish(cache.start([1, 2, 3]).sequence)",
    "a finalizer that still calls": """
class Late:
    def __init__(self): self.seq, self.cache = cache.start([1, 2, 3]).sequence, cache
    def __del__(self): self.cache.finish(self.seq)
late = Late()
""",
    "a daemon thread": """
ready = threading.Event()
def work():
    seq = cache.start([1, 2, 3])
    ready.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
ready.wait()
""",
}
FRONT_ENDS = {
    "everything at once": "engine = EngineCache(spec, active_slots=1); "
    "seq, lease = cache.start([1, 2, 3]), engine.lease(engine.lookup([1]))",
    "a thread that runs on": """
def work():
    for turn in range(200):
        with cache.start([turn, *range(16)]) as seq:
            seq.checkpoint(8)
    cache.check()
threading.Thread(target=work).start()
""",
}


@pytest.mark.parametrize("left", ENDS)
def test_an_interpreter_ends_well_whatever_is_left_to_drop(left: str) -> None:
    run(NATIVE + ENDS[left])


@pytest.mark.parametrize("left", FRONT_ENDS)
def test_an_interpreter_with_tensors_ends_well_whatever_is_left_to_drop(left: str) -> None:
    run(FRONT + FRONT_ENDS[left])
