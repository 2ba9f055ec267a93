"""One call at each layer: the Rust API, the native module that binds it, and `PrefixCache`."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from radixstate import PrefixCache, Sequence, StartRequest, StateSpec

from benchmarks.speed import workloads
from benchmarks.speed.clock import Clock, batch_ns
from benchmarks.speed.ours import Ours
from benchmarks.speed.table import Figure
from benchmarks.speed.workers import pinned
from benchmarks.speed.workloads import Backend, Keys, Size

LONG, LEAF = 1000, 16
BATCH = 16
BENCH = ["cargo", "bench", "--locked", "--quiet", "-p", "radixstate", "--bench", "calls"]


def boundary(backend: Backend) -> list[Figure]:
    """The native module's calls, repeated on warm data and undone within the repetition.

    The names are those of the criterion benches in rust/core/benches.
    """
    cache: Ours = backend.make(Size(4 * LONG, 64))
    for i in range(32):
        _store(cache, _key(i, LEAF))
    long, fresh, absent = _key(100, LONG), _key(200, LONG), array("I", [7])
    _store(cache, long)
    native, short, ask = cache.native, _ask(_key(3, LEAF)), _ask(long)
    match = native.lookup(ask)
    row = array("i", bytes(4 * LONG))
    lease = native.lease(match)  # keeps the long document from being evicted

    def start_and_finish() -> None:
        native.finish(native.start(ask).sequence)

    def store_and_evict() -> None:
        _store(cache, fresh)
        native.evict("checkpoint", 1)

    calls: dict[str, Callable[[], object]] = {
        "legal depth": lambda: native.legal_depth(LONG),
        "usage": lambda: native.usage("kv"),
        "lookup, 1 token": lambda: native.lookup(absent),
        "lookup, 16 tokens": lambda: native.lookup(short),
        "lookup, 1000 tokens": lambda: native.lookup(ask),
        "lease + release": lambda: native.release(native.lease(match)),
        "pages of a lease, 1000 tokens": lambda: native.copy_lease_pages(lease, row),
        "start + finish, 1000 tokens": start_and_finish,
    }
    figures = [Figure("boundary", name, batch_ns(call), "ns") for name, call in calls.items()]
    native.evict("checkpoint", 32)  # so that what is stored is what is evicted
    return [*figures, Figure("boundary", "store and evict 1000 tokens", batch_ns(store_and_evict), "ns")]


def _key(i: int, n: int) -> Keys:
    return array("I", range(i * 10_000, i * 10_000 + n))


def _ask(key: Keys) -> Keys:
    return key + array("I", [7])


def _store(cache: Ours, key: Keys) -> None:
    started = cache.start(key)
    cache.insert(started, len(key))
    cache.finish(started.sequence)


def criterion() -> list[Figure]:
    """The Rust API's own benches. Builds them with all cores and runs them on one.

    Raises:
        CalledProcessError: they do not build or do not run.
    """
    subprocess.run([*BENCH, "--no-run"], check=True)
    with pinned(1):
        subprocess.run([*BENCH, "--", "--noplot"], check=True, stdout=subprocess.DEVNULL)
    return read_criterion(Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "criterion" / "calls")


def read_criterion(folder: Path) -> list[Figure]:
    """The medians that criterion left behind."""
    return [
        Figure(
            "boundary",
            json.loads((new / "benchmark.json").read_text())["function_id"],
            json.loads((new / "estimates.json").read_text())["median"]["point_estimate"],
            "ns",
            of="rust",
        )
        for new in sorted(folder.glob("*/new"))
    ]


FRONT = {
    "lookup": ("lookup",),
    "start + finish, a miss": ("start a miss", "finish a miss"),
    "start + finish, a hit": ("start a hit", "finish a hit"),
    "checkpoint": ("checkpoint",),
    "evict one state": ("evict state",),
}
"""Figures of the front, and the calls each is made of."""


def front(backend: Backend, documents: int = 4096) -> list[Figure]:
    """What `PrefixCache` adds to the native layer. States have one element, so that nothing is left to encode.

    The documents of W1, each stored and then asked for with 8 tokens behind, in turns by both layers; half are evicted.
    """
    size = Size(documents * 1000 + 50_000, documents)
    cache, native = _prefix_cache(size), backend.make(size)
    front_clock, native_clock, batches = Clock(), Clock(), Clock()
    rng = np.random.default_rng(1)
    keys = [workloads.tokens(rng, 1000) for _ in range(documents)]
    asks = [key + workloads.tokens(rng, 8) for key in keys]
    for key, ask in zip(keys, asks, strict=True):
        _by_front(cache, front_clock, key, ask)
        _by_native(native, native_clock, key, ask)
    for _ in range(documents // 2):
        front_clock("evict state", cache.evict, "checkpoint", 1)
        native_clock("evict state", native.evict_states, 1)
    kept = asks[documents // 2 :]  # what was evicted is what was hit the longest ago
    for first in range(0, len(kept), BATCH):
        _by_batch(cache, batches, kept[first : first + BATCH])
    return [
        *(_sum_of(front_clock, name) for name in FRONT),
        *(replace(_sum_of(native_clock, name), of="native") for name in FRONT),
        *(
            Figure("front", f"{kind} of {BATCH}, each", batches.mean_us(kind) / BATCH, "us")
            for kind in ("start_many", "checkpoint_many")
        ),
    ]


def _sum_of(clock: Clock, name: str) -> Figure:
    return Figure("front", name, sum(map(clock.mean_us, FRONT[name])), "us")


def _prefix_cache(size: Size) -> PrefixCache:
    return PrefixCache(
        StateSpec(layers=1, heads=1, d_k=1, d_v=1, layout="k_last"),
        active_slots=BATCH,
        checkpoint_slots=size.states,
        kv_pages=size.tokens,
        page_size=1,
        checkpoint_stride=1,
    )


def _by_front(cache: PrefixCache, clock: Clock, key: Keys, ask: Keys) -> None:
    missing = clock("start a miss", cache.start, key)
    clock("checkpoint", missing.checkpoint)
    clock("finish a miss", missing.finish)
    clock("lookup", cache.lookup, ask)
    hitting = clock("start a hit", cache.start, ask)
    clock("finish a hit", hitting.finish)


def _by_native(cache: Ours, clock: Clock, key: Keys, ask: Keys) -> None:
    """The same calls, without a tensor."""
    missing = clock("start a miss", cache.start, key)
    clock("checkpoint", cache.insert, missing, len(key))
    clock("finish a miss", cache.finish, missing.sequence)
    clock("lookup", cache.match, ask)
    hitting = clock("start a hit", cache.start, ask)
    clock("finish a hit", cache.finish, hitting.sequence)


def _by_batch(cache: PrefixCache, clock: Clock, asks: list[Keys]) -> None:
    """A scheduler's step: requests that hit, and whose own states are then stored."""

    def start() -> list[Sequence]:
        return cache.start_many([StartRequest(ask) for ask in asks])

    sequences = clock("start_many", start)
    clock("checkpoint_many", cache.checkpoint_many, [(it, it.length, it.slot) for it in sequences])
    for sequence in sequences:
        sequence.finish()
