"""A small native cache, and whole requests on it."""

from collections.abc import Iterable
from typing import Any

from radixstate import _native
from radixstate._native import Cache, EngineCache, PendingHandle, Started, Stored

PROMPT = list(range(9))  # 4 pages of 2 tokens and one token more
DEPTH = 8


def make(**sizes: Any) -> Cache:
    """Pages of 2 tokens, checkpoints at multiples of 4."""
    defaults: dict[str, Any] = {
        "page_size": 2,
        "checkpoint_stride": 4,
        "kv_pages": 16,
        "active_slots": 2,
        "checkpoint_slots": 2,
    }
    return Cache(**(defaults | sizes))


def engine(**sizes: Any) -> EngineCache:
    """The same for an engine that allocates the pages."""
    defaults: dict[str, Any] = {
        "page_size": 2,
        "checkpoint_stride": 4,
        "kv_pages": 16,
        "checkpoint_slots": 2,
    }
    return EngineCache(**(defaults | sizes))


def running(cache: Cache, tokens: Iterable[int] = PROMPT, **options: Any) -> Started:
    started = cache.start(tokens, **options)
    cache.loaded(started.sequence)
    return started


def reserve(cache: Cache, started: Started, depth: int = DEPTH) -> PendingHandle:
    pending = cache.reserve_checkpoint(started.sequence, depth, started.slot)
    assert isinstance(pending, PendingHandle)
    return pending


def store(cache: Cache, tokens: Iterable[int] = PROMPT, depth: int = DEPTH) -> Stored:
    """A whole request that caches its state at `depth`."""
    started = running(cache, tokens)
    stored = cache.commit(started.sequence, reserve(cache, started, depth))
    assert isinstance(stored, Stored)
    cache.finish(started.sequence)
    return stored


def publish(cache: EngineCache, pages: list[int]) -> _native.Published:
    """The same for an engine that allocates the pages."""
    lease = cache.lease(cache.lookup(PROMPT))
    pending = cache.reserve(lease, PROMPT[:DEPTH], pages)
    assert isinstance(pending, PendingHandle)
    published = cache.publish(lease, PROMPT[:DEPTH], pages, pending)
    cache.release(lease)
    return published
