"""The three workloads, each written once for every cache; `Front` is what it takes of one.

Token ids are array('q'), the type that all the caches take without a copy of their own making.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.speed.clock import Clock

VOCABULARY = 150_000
Keys = array  # of type "q"


class Front(Protocol):
    """A cache as the workloads see it. What is timed is one call of it, or what `store` says."""

    def match(self, tokens: Keys) -> Any:
        """The longest cached prefix, as the cache's own result object."""

    def matched(self, match: Any) -> int:
        """Its tokens."""

    def lock(self, match: Any) -> Any:
        """Keeps it from being evicted."""

    def unlock(self, lock: Any) -> None:
        """Ends that."""

    def copy_out(self, match: Any, lock: Any) -> Any:
        """The KV ids of the matched tokens, in memory that is not the cache's own."""

    def copied(self, copy: Any) -> int:
        """How many ids that were."""

    def store(self, clock: Clock, key: Keys, cached: int, before: Any) -> None:
        """Caches a key with a state, whose first `cached` tokens are, at the ids `before`; times `insert`."""

    def evict_states(self, n: int) -> None:
        """Evicts at least n states."""

    def evict_tokens(self, n: int) -> None:
        """Evicts at least n tokens of KV."""

    def free(self) -> tuple[int, int]:
        """Free tokens of KV and free states."""

    def evictable(self) -> tuple[int, int]:
        """Evictable tokens of KV and evictable states."""


class Size(NamedTuple):
    """Of a cache: tokens of KV, and states."""

    tokens: int
    states: int


@dataclass(frozen=True)
class Backend:
    """A cache, in its worker.

    Attributes:
        make: a new, empty one of a size: a `Front`, for the workloads.
        make_store: the peer's store of int8 states, for the codec.
        leaves_out: figures that say nothing about it.
    """

    name: str
    version: str
    make: Callable[[Size], Any]
    make_store: Callable[..., Any] | None = None
    leaves_out: frozenset[str] = frozenset()


class Workload(NamedTuple):
    """What to run, and the cache it takes. `run` calls its last argument once before and once after filling it."""

    size: Size
    run: Callable[[Front, Clock, Callable[[], None]], None]


def tokens(rng: np.random.Generator, n: int) -> Keys:
    return array("q", rng.integers(0, VOCABULARY, n, dtype=np.int64).tobytes())


def documents(n: int = 4096, length: int = 1000) -> Workload:
    """W1: distinct prefixes, each stored and then matched with 8 tokens behind it; all matched again in random
    order, long after they were last touched; all evicted."""

    def run(cache: Front, clock: Clock, note: Callable[[], None]) -> None:
        rng = np.random.default_rng(1)
        stored = [tokens(rng, length) for _ in range(n)]
        asked = [key + tokens(rng, 8) for key in stored]
        order = random.Random(1).sample(range(n), n)
        gc.collect()
        note()
        for key, ask in zip(stored, asked, strict=True):
            cache.store(clock, key, 0, None)
            clock.tokens += len(key)
            _hit(cache, clock, ask, length)
        note()
        for i in order:
            _copy_out(cache, clock, asked[i])
        _evict_all(cache, clock, states=n // 2, step=length)

    return Workload(Size(n * length + length, n), run)


def chat(sessions: int = 64, turns: int = 64, turn: int = 256) -> Workload:
    """W2: conversations whose turns alternate; each turn matches its whole history, pins it and stores more."""

    def run(cache: Front, clock: Clock, note: Callable[[], None]) -> None:
        rng = np.random.default_rng(2)
        histories = [tokens(rng, turns * turn) for _ in range(sessions)]
        gc.collect()
        note()
        for end in range(turn, turns * turn + 1, turn):
            for history in histories:
                _turn(cache, clock, history[:end], end - turn)
        note()
        _evict_all(cache, clock, states=sessions * turns // 2, step=turn)

    return Workload(Size((sessions * turns + 1) * turn, sessions * turns), run)


def churn(requests: int = 20_000, prompts: int = 4000, states: int = 512, length: int = 1000) -> Workload:
    """W3: more prompts than states, asked for by Zipf's law; a miss makes room and stores.

    A request is a prompt and one token of its own: its last token is always computed.
    """

    def run(cache: Front, clock: Clock, note: Callable[[], None]) -> None:
        rng = np.random.default_rng(3)
        stored = [tokens(rng, length) for _ in range(prompts)]
        asked = [key + tokens(rng, 1) for key in stored]
        share = 1.0 / np.arange(1, prompts + 1)
        sequence = np.random.default_rng(4).choice(prompts, size=requests, p=share / share.sum())
        gc.collect()
        note()
        for i in sequence:
            _request(cache, clock, stored[i], asked[i])
        note()

    return Workload(Size(states * length + length * 88, states), run)


WORKLOADS: dict[str, Callable[[], Workload]] = {"W1": documents, "W2": chat, "W3": churn}


def _hit(cache: Front, clock: Clock, ask: Keys, expected: int) -> None:
    match = clock("match", cache.match, ask)
    clock.tokens += len(ask)
    _require(cache.matched(match), expected)
    lock = clock("lock", cache.lock, match)
    clock("unlock", cache.unlock, lock)


def _copy_out(cache: Front, clock: Clock, ask: Keys) -> None:
    match = clock("match again", cache.match, ask)
    lock = cache.lock(match)
    ids = clock("copy out", cache.copy_out, match, lock)
    _require(cache.copied(ids), cache.matched(match))
    cache.unlock(lock)


def _turn(cache: Front, clock: Clock, key: Keys, cached: int) -> None:
    match = clock("match", cache.match, key)
    clock.tokens += 2 * len(key)
    _require(cache.matched(match), cached)
    lock = clock("lock", cache.lock, match)
    before = clock("copy out", cache.copy_out, match, lock) if cached else None
    cache.store(clock, key, cached, before)
    clock("unlock", cache.unlock, lock)


def _request(cache: Front, clock: Clock, key: Keys, ask: Keys) -> None:
    match = clock("match", cache.match, ask)
    clock.tokens += len(ask)
    cached = cache.matched(match)
    lock = clock("lock", cache.lock, match)
    if cached < len(key):
        free_tokens, free_states = cache.free()
        if free_tokens < len(key) - cached:
            clock("evict tokens", cache.evict_tokens, len(key) - cached - free_tokens)
        if not free_states:
            clock("evict state", cache.evict_states, 1)
        cache.store(clock, key, cached, cache.copy_out(match, lock) if cached else None)
        clock.tokens += len(key)
    clock("unlock", cache.unlock, lock)


def _evict_all(cache: Front, clock: Clock, *, states: int, step: int) -> None:
    for _ in range(states):
        clock("evict state", cache.evict_states, 1)
    while cache.evictable()[0]:
        clock("evict tokens", cache.evict_tokens, step)
    _require(cache.evictable(), (0, 0))


def _require(found: Any, expected: Any) -> None:
    """A cache that finds something else does other work, and its times mean nothing."""
    if found != expected:
        raise AssertionError(f"expected {expected}, found {found}")
