"""Tokens that somebody chose to do harm, and keys that tokens alone do not tell apart."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from native import store
from radixstate import EngineCache, PrefixCache, SpanKeys, StateSpec, _native
from radixstate.errors import ConfigError

from benchmarks.speed.hostile import PAGES, colliding_pages, ordinary_pages

FACTOR = 0xF1357AEA2E62A9C5
"""Of FxHasher, which hashed the first pages once."""


def fxhash(page: list[int]) -> int:
    value = 0
    for token in page:
        value = (value + token) * FACTOR % 2**64
    return value


def holding(pages: Iterator[list[int]]) -> tuple[_native.Cache, list[list[int]]]:
    """A cache with a state at the end of each page, and the prompts that go on from them."""
    cache = _native.Cache(
        page_size=16, checkpoint_stride=16, kv_pages=PAGES + 8, active_slots=2, checkpoint_slots=PAGES + 8
    )
    prompts = [[*page, 7] for page in pages]
    for prompt in prompts:
        store(cache, prompt, 16)
    return cache, prompts


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_the_colliding_pages_would_collide_under_a_known_hash() -> None:
    pages = list(colliding_pages())
    assert len({tuple(page) for page in pages}) == PAGES
    assert len({fxhash(page) for page in pages}) == 1


# A ratio of times, so generous: colliding pages were 30 times slower at this number, and slower still at more.
def test_pages_chosen_against_a_known_hash_cost_what_others_cost() -> None:
    took = []
    for pages in (ordinary_pages(), colliding_pages()):
        cache, prompts = holding(pages)
        asked = prompts[:: len(prompts) // 500]

        def ask(cache: _native.Cache = cache, asked: list[list[int]] = asked) -> None:
            assert all(cache.lookup(prompt).length == 16 for prompt in asked)

        took.append(min(seconds(ask) for _ in range(5)))
    ordinary, hostile = took
    assert hostile < 4 * ordinary, f"{hostile} s beside {ordinary} s"


# --- keys wider than 32 bits a position ---


def pictures() -> PrefixCache:
    spec = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
    return PrefixCache(spec, active_slots=2, kv_pages=32, page_size=4, checkpoint_stride=4)


PLACEHOLDERS = [*range(4), *[99] * 8, *range(4, 9)]
"""Four tokens, a picture of eight positions, five tokens."""


@pytest.mark.parametrize(("end", "reused"), [(12, 4), (5, 4)])
def test_equal_tokens_with_different_digests_match_up_to_the_span(end: int, reused: int) -> None:
    cache, keys = pictures(), SpanKeys()
    with cache.start(keys.key(PLACEHOLDERS, [(4, end, b"a" * 16)])) as seq:
        for depth in (4, 8, 12, 16):
            seq.checkpoint(depth)
    with cache.start(keys.key(PLACEHOLDERS, [(4, end, b"b" * 16)])) as seq:
        assert seq.reused == reused
    with cache.start(keys.key(PLACEHOLDERS, [(4, end, b"a" * 16)])) as seq:
        assert seq.reused == 16


def test_a_span_never_matches_the_same_tokens_without_one() -> None:
    cache, keys = pictures(), SpanKeys()
    with cache.start(keys.key(PLACEHOLDERS, [(4, 12, b"a" * 16)])) as seq:
        seq.checkpoint(16)
    assert cache.lookup(keys.key(PLACEHOLDERS)).length == 0
    assert cache.lookup(keys.key(PLACEHOLDERS, [(4, 12, b"a" * 16)])).length == 16


def test_all_128_bits_of_a_digest_count() -> None:
    cache, keys = pictures(), SpanKeys()
    with cache.start(keys.key(PLACEHOLDERS, [(4, 12, bytes(16))])) as seq:
        seq.checkpoint(16)
    for bit in range(128):
        digest = (1 << bit).to_bytes(16, "little")
        assert cache.lookup(keys.key(PLACEHOLDERS, [(4, 12, digest)])).length == 0


def test_a_published_span_is_matched_by_its_digest_alone() -> None:
    spec = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
    cache = EngineCache(spec, active_slots=2, kv_pages=32, page_size=4, checkpoint_stride=4)
    keys = SpanKeys()
    prompt = keys.key(PLACEHOLDERS, [(4, 12, b"a" * 16)])
    with cache.lease(cache.lookup(prompt)) as lease:
        lease.publish(prompt[:16], source=1, pages=[1, 2, 3, 4])
    assert cache.lookup(keys.key(PLACEHOLDERS, [(4, 12, b"b" * 16)])).length == 0
    assert cache.lookup(prompt).length == 16


def test_tokens_that_would_be_those_of_a_digest_are_refused() -> None:
    keys = SpanKeys()
    keys.key(PLACEHOLDERS, [(4, 12, b"a" * 16)])
    with pytest.raises(ConfigError, match="token 2147483648 at position 1 is 2\\^31 or more"):
        keys.key([1, 2**31])
    for spans, message in (
        ([(4, 4, bytes(16))], r"span 4\.\.4 is empty, out of order or past the 17 tokens"),
        ([(4, 18, bytes(16))], "past the 17 tokens"),
        ([(4, 12, bytes(16)), (11, 13, bytes(16))], r"expected one within 12\.\.17"),
        ([(4, 12, bytes(15))], "a digest of 120 bits, at least 128"),
    ):
        with pytest.raises(ConfigError, match=message):
            keys.key(PLACEHOLDERS, spans)


COLLECTING = """
import gc
from radixstate import SpanKeys

keys = SpanKeys()

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        keys.key([1])

gc.set_threshold(1)
for _ in range(200):
    Garbage()
    keys.key([1, 2], [(0, 1, bytes(16))])
"""


def test_garbage_that_asks_for_a_key_while_a_key_is_made_is_answered() -> None:
    # In a process of its own: a deadlock there holds the lock of the interpreter.
    subprocess.run([sys.executable, "-c", COLLECTING], timeout=60, check=True)
