"""CPU microseconds of the calls that sglang's scheduler makes most, medians of one run.

    python tests/sglang/bench.py [radixstate | sglang-python | sglang-rust]...

Prompts of 900 tokens at page 1, each stored and then continued three times; no state is written. CPU time of the
thread, so that neighbours on the machine count little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from world import PEER, Setting, World, plugin, prompt

CALLS = {
    "match": "match_prefix",
    "lock": "lock",
    "unlock": "unlock",
    "checkpoint": "checkpoint",
    "evict": "evict_for_alloc",
}


class Idle(World):
    """Its model computes nothing, and its allocator of KV takes nothing back.

    sglang's concatenates its whole free list for that, which takes longer than a tree. There is KV for all requests.
    """

    def __init__(self, backend: str) -> None:
        super().__init__(Setting(), backend=backend, kv=1 << 19, active=64)
        for name in ("free", "free_page_ids", "free_segment", "free_segments"):
            setattr(self.kv, name, lambda *_, **__: None)

    def write(self, *_: Any) -> None:
        """No state."""

    def holds(self, *_: Any) -> bool:
        return True


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def measure(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        made = call(*given, **named)
        times.append(time.thread_time() - began)
        return made

    return measure


def medians(backend: str) -> dict[str, float]:
    world = Idle(backend)
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for name, method in CALLS.items():
        setattr(world.cache, method, timed(getattr(world.cache, method), times[name]))
    documents = [prompt(seed, 900) for seed in range(100)]
    for document in documents:
        world.serve(document)
    for turn in range(3):
        for seed, document in enumerate(documents):
            world.serve(document + prompt(1000 * turn + seed, 64))
    for _ in range(100):
        world.cache.evict_for_alloc(EvictParams(num_tokens=64))
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in times.items() if each}


if __name__ == "__main__":
    for backend in sys.argv[1:] or [plugin.NAME, PEER, "sglang-rust"]:
        print(backend, medians(backend))
