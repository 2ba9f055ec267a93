"""Our native layer, which `PrefixCache` calls, as the workloads see it. It holds no tensors, as the peers' trees."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from radixstate import _native

from benchmarks.speed.clock import Clock
from benchmarks.speed.workloads import Keys, Size


class Ours:
    """Internal pools, pages of one token. Each key is stored by a request that starts, stores and finishes."""

    def __init__(self, size: Size, *, page: int = 1) -> None:
        self.native = native = _native.Cache(
            page_size=page,
            checkpoint_stride=page,
            kv_pages=size.tokens // page,
            active_slots=8,
            checkpoint_slots=size.states,
        )
        self._page = page
        self._row = np.empty(size.tokens // page, dtype=np.int32)
        # Bound once, so that a timed call is the call alone.
        self.match, self.lock, self.unlock = native.lookup, native.lease, native.release
        self.finish = native.finish

    def matched(self, match: _native.Match) -> int:
        return match.length

    def copy_out(self, match: _native.Match, lock: _native.LeaseHandle) -> int:
        """Into the row of a page table."""
        return self.native.copy_lease_pages(lock, self._row)

    @staticmethod
    def copied(copy: int) -> int:
        return copy

    def start(self, tokens: Keys | list[int]) -> _native.Started:
        started = self.native.start(tokens)
        self.native.loaded(started.sequence)
        return started

    def insert(self, started: _native.Started, depth: int) -> _native.Stored | _native.Skipped:
        pending = self.native.reserve_checkpoint(started.sequence, depth, started.slot)
        return self.native.commit(started.sequence, pending)

    def store(self, clock: Clock, key: array[int], cached: int, before: Any) -> None:
        started = clock("start", self.start, key)
        clock("insert", self.insert, started, len(key))
        clock("finish", self.finish, started.sequence)

    def evict_states(self, n: int) -> None:
        self.native.evict("checkpoint", n)

    def evict_tokens(self, n: int) -> None:
        self.native.evict("kv", n // self._page)

    def free(self) -> tuple[int, int]:
        return self.native.usage("kv").free * self._page, self.native.usage("checkpoint").free

    def evictable(self) -> tuple[int, int]:
        return self.native.usage("kv").evictable * self._page, self.native.usage("checkpoint").evictable


class OurRequests:
    """The same by whole requests, for `admission`."""

    def __init__(self, size: Size) -> None:
        self._cache = Ours(size, page=64)

    @staticmethod
    def prompt(key: Keys) -> list[int]:
        return key.tolist()

    def admit(self, prompt: list[int]) -> _native.Started:
        return self._cache.start(prompt)

    @staticmethod
    def reused(admitted: _native.Started) -> int:
        return admitted.match.length

    def publish(self, admitted: _native.Started, depth: int) -> None:
        """Stores what it computed, unless that is cached; the request ends."""
        if admitted.match.length < depth:
            self._cache.insert(admitted, depth)
        self._cache.finish(admitted.sequence)
