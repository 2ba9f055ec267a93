"""W1 with whole requests: admit one that misses, publish its prefix, admit one that hits it.

For a scheduler that shows its cache only through requests. Pages of 64 tokens, prompts of 1000 tokens as lists.
"""

from __future__ import annotations

import numpy as np

from benchmarks.speed import workloads
from benchmarks.speed.backends import Backend
from benchmarks.speed.clock import Clock
from benchmarks.speed.figures import Figure
from benchmarks.speed.workloads import Size

PAGE = 64
DEPTH = 1000 // PAGE * PAGE


def measure(backend: Backend, documents: int = 4096) -> list[Figure]:
    cache, clock = backend.make(Size(documents * 1024, documents)), Clock()
    rng = np.random.default_rng(1)
    for _ in range(documents):
        key = workloads.tokens(rng, 1000)
        missing = clock("admit a miss", cache.admit, cache.prompt(key))
        clock("publish", cache.publish, missing, DEPTH)
        hitting = clock("admit a hit", cache.admit, cache.prompt(key + workloads.tokens(rng, 8)))
        if cache.reused(hitting) < DEPTH - PAGE:
            raise AssertionError(f"reused {cache.reused(hitting)} of {DEPTH} tokens")
        clock("end a hit", cache.publish, hitting, DEPTH)
    return [
        Figure("requests", kind, clock.mean_us(kind), "us")
        for kind in ("admit a miss", "publish", "admit a hit", "end a hit")
    ]
