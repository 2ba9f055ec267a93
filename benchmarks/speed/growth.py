"""How the cost of one call grows with what is in the cache.

A curve ends early where its cache would take longer than `SECONDS` to build; RADIXSTATE_BENCH_FULL=1 lifts that.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.speed.clock import Clock, cache_miss_us, median_us
from benchmarks.speed.table import OURS, Figure
from benchmarks.speed.workloads import Backend, Front, Keys, Size

SECONDS = 60.0
SECTION = "growth"
LEAF = 16

LEAVES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
PEER_LEAVES = LEAVES[:4]
TURNS = (64, 256, 1024, 4096)
PINNED = (0, 256, 1024, 4096)
PINNED_DOCUMENTS = 8192
PROMPTS = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
DIVERGING = 999
SAMPLES = 300


def document(i: int, n: int = LEAF) -> Keys:
    """Tokens that no other document begins with."""
    return array("q", ((i * 1_000_003 + j) & 0x7FFFFFFF for j in range(n)))


def leaves(backend: Backend) -> list[Figure]:
    """Against the number of leaves, all of them evictable."""
    figures: list[Figure] = []
    for n in LEAVES if backend.name == OURS else PEER_LEAVES:
        figures += _at_leaves(_filled(backend, n), n)
    grown = growth(figures, LEAVES[0], PEER_LEAVES[-1]) + growth(figures, LEAVES[0], LEAVES[-1])
    return figures + grown + (_over_misses(figures) if backend.name == OURS else [])


def growth(figures: Sequence[Figure], first: int, last: int) -> list[Figure]:
    """For each curve with both points, how many times as large its value is at the last."""
    at = {(figure.name, figure.at): figure for figure in figures}
    return [
        Figure(end.section, f"{name}: {last} {end.axis} over {first}", end.value / at[name, first].value, "x")
        for (name, point), end in at.items()
        if point == last and (name, first) in at and at[name, first].value
    ]


def _over_misses(figures: Sequence[Figure]) -> list[Figure]:
    """An eviction among the most leaves, against one among the fewest and what memory alone adds to it.

    Nothing of the victim is in a cache: neither the node nor the memory of its run, which is freed, nor the two
    places that it has in the table of children.
    """
    miss = 4 * cache_miss_us()
    at = {(figure.name, figure.at): figure.value for figure in figures}
    first, last = LEAVES[0], LEAVES[-1]
    return [
        Figure(
            SECTION,
            f"{name}: {last} leaves over {first} and 4 cache misses",
            at[name, last] / (at[name, first] + miss),
            "x",
        )
        for name in ("evict one state among leaves", "evict one page among leaves")
    ]


def chain(backend: Backend) -> list[Figure]:
    """Against the turns of one conversation, each of 16 tokens and with a state at its end."""
    figures: list[Figure] = []
    seconds = 0.0
    for turns in TURNS:
        if not _affordable(16 * seconds):  # four times the turns, each four times as long
            break
        began = perf_counter()
        cache = backend.make(Size(LEAF * (turns + 64), turns + 64))
        history, clock = array("q"), Clock()
        for i in range(turns):
            history = _take_turn(cache, clock, history, i)
        seconds = perf_counter() - began
        figures += _at_turns(cache, history, turns)
    matched = next(figure for figure in reversed(figures) if figure.name.startswith("match"))
    return figures + (_over_limit(backend, matched, history) if backend.name == OURS else [])


def _over_limit(backend: Backend, matched: Figure, history: Keys) -> list[Figure]:
    """A chain's match against the least that it could cost: to read the key once, and a cache miss for each node."""
    cache = backend.make(Size(len(history) + 64, 4))
    cache.store(Clock(), history, 0, None)
    ask = _ask(history)
    read, miss, turns = median_us(lambda: cache.match(ask)), cache_miss_us(), matched.at or 0
    limit = (
        f"match, chain of 16-token turns: {turns} turns over reading the key once and a cache miss for each"
    )
    return [
        Figure(SECTION, f"match, {len(history)} tokens in one node", read, "us"),
        Figure(SECTION, "a cache miss", 1000 * miss, "ns"),
        Figure(SECTION, limit, matched.value / (read + turns * miss), "x"),
    ]


def pinned(backend: Backend) -> list[Figure]:
    """Against the pinned states at the old end of 8192: eviction must not walk over them each time."""
    figures: list[Figure] = []
    for n in PINNED:
        cache = _filled(backend, PINNED_DOCUMENTS)
        for i in range(n):
            cache.lock(cache.match(_ask(document(i))))
        for i in range(n, PINNED_DOCUMENTS):
            cache.unlock(cache.lock(cache.match(_ask(document(i)))))
        figures += _evictions(cache, n, "pinned states")
    return figures


def fragments(backend: Backend) -> list[Figure]:
    """A key of 1000 tokens, before and after as many lookups that leave it at each of its tokens."""
    cache = backend.make(Size(4000, 8))
    key = document(1, DIVERGING + 1)
    cache.store(Clock(), key, 0, None)
    ask = _ask(key)

    def matched() -> float:
        return median_us(lambda: cache.match(ask))

    before = matched()
    for end in range(1, DIVERGING + 1):
        cache.match(key[:end] + document(7, 8))
    after = matched()
    name = "match a key of 1000 tokens"
    return [
        Figure(SECTION, name, before, "us", 0, "diverging lookups"),
        Figure(SECTION, name, after, "us", DIVERGING, "diverging lookups"),
        Figure(SECTION, f"{name}: after {DIVERGING} diverging lookups over before", after / before, "x"),
    ]


def prompt(backend: Backend) -> list[Figure]:
    """Against the length of a prompt that is cached whole, by the type that holds its tokens."""
    figures: list[Figure] = []
    for n in PROMPTS:
        cache = backend.make(Size(n + 64, 4))
        key = document(1, n)
        cache.store(Clock(), key, 0, None)
        for kind, ask in _kinds(_ask(key), backend.name == OURS):
            if cache.matched(cache.match(ask)) != n:
                raise AssertionError(f"{n} tokens of {kind} do not match")
            spent = median_us(partial(cache.match, ask), most=101)
            figures.append(Figure(SECTION, f"match, prompt in {kind}", spent, "us", n, "tokens"))
    return figures


def _kinds(ask: Keys, ours: bool) -> Iterator[tuple[str, Any]]:
    """The peers' keys are array('q'); we take more."""
    yield "array('q')", ask
    if ours:
        import torch

        yield "array('I')", array("I", ask)
        yield "torch int64", torch.tensor(ask, dtype=torch.int64)
        yield "list", list(ask)


def _ask(key: Keys) -> Keys:
    """A prompt with one token behind a cached prefix: that of a prompt is always computed."""
    return key + array("q", [0])


def _affordable(seconds: float) -> bool:
    return seconds < SECONDS or "RADIXSTATE_BENCH_FULL" in os.environ


def _filled(backend: Backend, n: int) -> Front:
    """A cache of n documents, with room for more."""
    cache = backend.make(Size(LEAF * (n + SAMPLES), n + SAMPLES))
    clock = Clock()
    for i in range(n):
        cache.store(clock, document(i), 0, None)
    return cache


def _at_leaves(cache: Front, n: int) -> list[Figure]:
    """Matches in random order, then insertions, then evictions of as many."""
    clock = Clock()
    for i in random.Random(n).choices(range(n), k=SAMPLES):
        clock("match", cache.match, _ask(document(i)))
    for i in range(n, n + SAMPLES):
        cache.store(clock, document(i), 0, None)
    timed = [
        Figure(SECTION, f"{what} one among leaves", clock.median_us(what), "us", n, "leaves")
        for what in ("match", "insert")
    ]
    return timed + _evictions(cache, n, "leaves")


def _take_turn(cache: Front, clock: Clock, history: Keys, i: int) -> Keys:
    """The history with one turn more, stored."""
    longer = history + document(i)
    match = cache.match(longer)
    lock = cache.lock(match)
    cache.store(clock, longer, len(history), cache.copy_out(match, lock) if history else None)
    cache.unlock(lock)
    return longer


def _at_turns(cache: Front, history: Keys, turns: int) -> list[Figure]:
    ask = _ask(history)
    match = cache.match(ask)
    if cache.matched(match) != len(history):
        raise AssertionError(f"{cache.matched(match)} of {len(history)} tokens match")
    spent = {
        "match": median_us(lambda: cache.match(ask)),
        "lease + release": median_us(lambda: cache.unlock(cache.lock(match))),
    }
    clock = Clock()
    for i in range(turns, turns + 31):
        history = _take_turn(cache, clock, history, i)
    spent["insert"] = clock.median_us("insert")
    spent["evict one page"] = _median_eviction(cache.evict_tokens, most=31)
    return [
        Figure(SECTION, f"{what}, chain of 16-token turns", us, "us", turns, "turns")
        for what, us in spent.items()
    ]


def _evictions(cache: Front, at: int, axis: str) -> list[Figure]:
    return [
        Figure(
            SECTION, f"evict one state among {axis}", _median_eviction(cache.evict_states), "us", at, axis
        ),
        Figure(SECTION, f"evict one page among {axis}", _median_eviction(cache.evict_tokens), "us", at, axis),
    ]


def _median_eviction(evict: Callable[[int], None], most: int = 151) -> float:
    return median_us(lambda: evict(1), seconds=0.5, least=11, most=most)
