"""The cost of a workload to one cache: CPU microseconds per call, tokens per CPU second, bytes per token."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.speed import workloads
from benchmarks.speed.clock import Clock
from benchmarks.speed.table import Figure
from benchmarks.speed.workloads import WORKLOADS, Backend, Size

SINGLE = {
    "match": ("match",),
    "insert": ("insert",),
    "lease + release": ("lock", "unlock"),
    "evict one state": ("evict state",),
    "evict tokens": ("evict tokens",),
    "match again, cold": ("match again",),
    "copy out KV ids": ("copy out",),
    "start + finish": ("start", "finish"),
}
SAME_CALLS = ("match", "lock", "insert", "unlock", "evict state", "evict tokens")
# Claims and returns pages and slots as well, which the peers' counting allocator does for nothing.
REQUESTS = ("match", "start", "insert", "finish", "evict state", "evict tokens")

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measure(name: str, backend: Backend) -> list[Figure]:
    """Runs a workload on a new cache.

    Memory is the growth of the process between the end of the set-up, when the keys exist already, and the time
    when all is cached: what the cache itself keeps per token and per node.
    """
    workload, make = WORKLOADS[name](), backend.make
    make(Size(64, 4))  # imports, and whatever a first cache allocates for all
    before = resident_bytes()
    cache, clock = make(workload.size), Clock()
    resident, cached = [resident_bytes()], []

    def note() -> None:
        resident.append(resident_bytes())
        cached.append(cache.evictable())

    workload.run(cache, clock, note)
    made, empty, filled = resident
    per_token = (made - before) / workload.size.tokens
    capacity = Figure(name, f"{name} bytes per token of capacity, empty", per_token, "B")
    # The churn ends with what its history left behind, not with what its tokens need.
    held = _memory(name, filled - empty, Size(*cached[-1])) if name != "W3" else []
    times = [it for it in _times(name, clock) if it.name.removeprefix(f"{name} ") not in backend.leaves_out]
    return [*times, *held, capacity]


w1, w2, w3 = (partial(measure, name) for name in WORKLOADS)


def _times(name: str, clock: Clock) -> list[Figure]:
    found = [
        Figure(name, f"{name} {what}", sum(map(clock.mean_us, kinds)), "us")
        for what, kinds in SINGLE.items()
        if all(kind in clock for kind in kinds)
    ]
    whole = {"the same calls": SAME_CALLS, "whole workload": REQUESTS if "start" in clock else SAME_CALLS}
    return found + [
        Figure(name, f"{name} {what}", clock.tokens / clock.seconds(kinds), "tokens/s")
        for what, kinds in whole.items()
    ]


def _memory(name: str, grown: int, cached: Size) -> list[Figure]:
    return [
        Figure(name, f"{name} bytes per cached token", grown / cached.tokens, "B"),
        Figure(name, f"{name} bytes per node", grown / cached.states, "B"),
    ]


def admission(backend: Backend, documents: int = 4096) -> list[Figure]:
    """W1 with whole requests: admits one that misses, publishes its prefix, admits one that hits it.

    For a scheduler that shows its cache only through requests. Pages of 64 tokens, prompts of 1000 tokens as lists.
    """
    page = 64
    depth = 1000 // page * page
    cache, clock = backend.make(Size(documents * 1024, documents)), Clock()
    rng = np.random.default_rng(1)
    for _ in range(documents):
        key = workloads.tokens(rng, 1000)
        missing = clock("admit a miss", cache.admit, cache.prompt(key))
        clock("publish", cache.publish, missing, depth)
        hitting = clock("admit a hit", cache.admit, cache.prompt(key + workloads.tokens(rng, 8)))
        if cache.reused(hitting) < depth - page:
            raise AssertionError(f"reused {cache.reused(hitting)} of {depth} tokens")
        clock("end a hit", cache.publish, hitting, depth)
    return [
        Figure("requests", kind, clock.mean_us(kind), "us")
        for kind in ("admit a miss", "publish", "admit a hit", "end a hit")
    ]
