"""CPU time of single calls, with what reading the clock costs taken off."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from statistics import mean, median
from time import thread_time_ns
from typing import Any

import numpy as np

CALIBRATION = 2001
NEAR_BYTES, FAR_BYTES = 1 << 12, 1 << 28


def clock_cost() -> float:
    """Nanoseconds that two readings of the thread's CPU clock lie apart when nothing happens between them."""
    spent = []
    for _ in range(CALIBRATION):
        begin = thread_time_ns()
        end = thread_time_ns()
        spent.append(end - begin)
    return median(spent)


class Clock:
    """Collects the CPU time of each kind of call.

    A thread's CPU time leaves out what other processes on the machine take. Python's own cost of making the call
    stays in: a scheduler pays it too.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._spent: dict[str, array[int]] = {}
        self._floor = clock_cost()

    def __call__(self, kind: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = thread_time_ns()
        result = call(*args)
        end = thread_time_ns()
        self._spent.setdefault(kind, array("q")).append(end - begin)
        return result

    def __contains__(self, kind: str) -> bool:
        return kind in self._spent

    def mean_us(self, kind: str) -> float:
        """Microseconds of one call, as a mean: what is rare and slow counts."""
        return max(mean(self._spent[kind]) - self._floor, 0.0) / 1e3

    def median_us(self, kind: str) -> float:
        """Microseconds of one call, as a median: of few calls, one disturbed would spoil the mean."""
        return max(median(self._spent[kind]) - self._floor, 0.0) / 1e3

    def seconds(self, kinds: Iterable[str]) -> float:
        """CPU seconds of all calls of these kinds; of a kind without calls, none."""
        return sum(self.mean_us(kind) * len(self._spent[kind]) for kind in kinds if kind in self) / 1e6


def median_us(call: Callable[[], Any], *, seconds: float = 0.3, least: int = 11, most: int = 301) -> float:
    """Median CPU microseconds of a call that may be repeated: until the time is spent, within the bounds."""
    floor, spent = clock_cost(), []
    while len(spent) < least or (len(spent) < most and sum(spent) < seconds * 1e9):
        begin = thread_time_ns()
        call()
        spent.append(thread_time_ns() - begin)
    return max(median(spent) - floor, 0.0) / 1e3


def cache_miss_us() -> float:
    """Microseconds that a read from memory takes when it must wait for the one before it.

    The same walk in random order, through about as much memory as a million leaves take and through what every cache
    holds: the difference. Pages are as small as those of the heap, so that the TLB's misses count, too.
    """
    return max(_step_ns(FAR_BYTES) - _step_ns(NEAR_BYTES), 0.0) / 1e3


def _step_ns(size: int, steps: int = 200_000) -> float:
    ring, at = array("q", [0]) * (size // 8), 0  # numpy's own memory would be in huge pages
    order = 64 * np.random.default_rng(0).permutation(size // 512)  # a number in every 512 bytes
    np.frombuffer(ring, np.int64)[order] = np.roll(order, -1)
    begin = thread_time_ns()
    for _ in repeat(None, steps):
        at = ring[at]
    return (thread_time_ns() - begin) / steps


def batch_ns(call: Callable[[], Any], *, batch: int = 2000, batches: int = 25) -> float:
    """Nanoseconds of a call too short to be timed alone: the median batch, the loop's own cost taken off."""
    calls, loops = [], []
    for _ in range(batches):
        begin = thread_time_ns()
        for _ in repeat(None, batch):
            call()
        middle = thread_time_ns()
        for _ in repeat(None, batch):
            pass
        calls.append(middle - begin)
        loops.append(thread_time_ns() - middle)
    return max(median(calls) - median(loops), 0.0) / batch
