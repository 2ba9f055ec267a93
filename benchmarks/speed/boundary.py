"""What it costs to call the native layer from Python, to be set against the same calls of the Rust API.

The names are those of the criterion benches in rust/core/benches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from benchmarks.speed.backends import Backend
from benchmarks.speed.clock import batch_ns
from benchmarks.speed.figures import Figure
from benchmarks.speed.ours import Ours
from benchmarks.speed.workloads import Keys, Size

SECTION = "boundary"
LONG, LEAF = 1000, 16


def measure(backend: Backend) -> list[Figure]:
    """Every call repeated on warm data; those that change the cache are undone within the repetition."""
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
    figures = [Figure(SECTION, name, batch_ns(call), "ns") for name, call in calls.items()]
    native.evict("checkpoint", 32)  # so that what is stored is what is evicted
    return [*figures, Figure(SECTION, "store and evict 1000 tokens", batch_ns(store_and_evict), "ns")]


def _key(i: int, n: int) -> Keys:
    return array("I", range(i * 10_000, i * 10_000 + n))


def _ask(key: Keys) -> Keys:
    return key + array("I", [7])


def _store(cache: Ours, key: Keys) -> None:
    started = cache.start(key)
    cache.insert(started, len(key))
    cache.finish(started.sequence)
