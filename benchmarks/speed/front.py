"""What `PrefixCache` adds to the native layer it calls. States have one element, so that nothing is left to encode."""

from __future__ import annotations

import numpy as np
from radixstate import PrefixCache, Request, Sequence, StateSpec

from benchmarks.speed import workloads
from benchmarks.speed.backends import Backend
from benchmarks.speed.clock import Clock
from benchmarks.speed.figures import Figure
from benchmarks.speed.workloads import Keys, Size

SECTION = "front"
BATCH = 16
ONE_ELEMENT = StateSpec(layers=1, heads=1, d_k=1, d_v=1, layout="k_last")


def measure(backend: Backend, documents: int = 2048) -> list[Figure]:
    """Documents of 1000 tokens, stored and then asked for with 8 tokens behind, in turns by both layers."""
    size = Size(documents * 1000 + 50_000, documents)
    front, native = _front(size), backend.make(size)
    front_clock, native_clock, batches = Clock(), Clock(), Clock()
    rng = np.random.default_rng(1)
    keys = [workloads.tokens(rng, 1000) for _ in range(documents)]
    asks = [key + workloads.tokens(rng, 8) for key in keys]
    for key, ask in zip(keys, asks, strict=True):
        _by_front(front, front_clock, key, ask)
        native.store(native_clock, key, 0, None)
        native_clock("lookup", native.match, ask)
    for first in range(0, documents, BATCH):
        _by_batch(front, batches, asks[first : first + BATCH])
    kinds = {"lookup": "lookup", "start": "start", "checkpoint": "insert", "finish": "finish"}
    return [
        *(Figure(SECTION, kind, front_clock.mean_us(kind), "us") for kind in kinds),
        *(Figure(SECTION, kind, native_clock.mean_us(own), "us", of="native") for kind, own in kinds.items()),
        *(
            Figure(SECTION, f"{kind} of {BATCH}, each", batches.mean_us(kind) / BATCH, "us")
            for kind in ("start_many", "checkpoint_many")
        ),
    ]


def _front(size: Size) -> PrefixCache:
    return PrefixCache(
        ONE_ELEMENT,
        active_slots=BATCH,
        checkpoint_slots=size.states,
        kv_pages=size.tokens,
        page_size=1,
        checkpoint_stride=1,
    )


def _by_front(cache: PrefixCache, clock: Clock, key: Keys, ask: Keys) -> None:
    sequence = clock("start", cache.start, key)
    clock("checkpoint", sequence.checkpoint)
    clock("finish", sequence.finish)
    clock("lookup", cache.lookup, ask)


def _by_batch(cache: PrefixCache, clock: Clock, asks: list[Keys]) -> None:
    """A scheduler's step: requests that hit, and whose own states are then stored."""

    def start() -> list[Sequence]:
        return cache.start_many([Request(ask) for ask in asks])

    sequences = clock("start_many", start)
    clock("checkpoint_many", cache.checkpoint_many, [(it, it.length, it.slot) for it in sequences])
    for sequence in sequences:
        sequence.finish()
