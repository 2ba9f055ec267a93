"""What the present order of eviction, the least recently used first, keeps and what it does not.

The field asked for more in each of these cases: see CASES.md, C54, C57 and C58. A test here pins what an engine gets
today, and what it can do about it.
"""

import pytest
from radixstate import PrefixCache, StateSpec, Stored

SPEC = StateSpec(layers=1, heads=1, d_k=1, d_v=1, dtype="float32", layout="v_last")
BLOCK = 4  # tokens of a page, and between two legal depths


def make(slots: int) -> PrefixCache:
    sizes = {"active_slots": 1, "checkpoint_slots": slots, "kv_pages": 1000}
    return PrefixCache(SPEC, page_size=BLOCK, checkpoint_stride=BLOCK, format="native", **sizes)


def prompt(number: int, blocks: int) -> list[int]:
    """So many blocks and a token more; no two numbers share a block."""
    return [number] * (blocks * BLOCK + 1)


def serve(cache: PrefixCache, tokens: list[int], *blocks: int, no_store: bool = False) -> int:
    """A request that stores its state at the ends of `blocks`; how many blocks it reused."""
    with cache.start(tokens, no_store=no_store) as seq:
        for block in blocks:
            outcome = seq.checkpoint(block * BLOCK)
            assert isinstance(outcome, Stored) or no_store or block * BLOCK <= seq.reused
        return seq.reused // BLOCK


def reused(cache: PrefixCache, number: int, blocks: int) -> int:
    """Blocks that a prompt would reuse just now."""
    return cache.lookup(prompt(number, blocks)).length // BLOCK


# vllm-project/vllm #45845; sgl-project/sglang #31230
@pytest.mark.parametrize(("interval", "others_left"), [(1, 0), (2, 0), (10, 10), (50, 10)])
def test_a_prompt_takes_as_many_slots_as_its_engine_stores_states(interval: int, others_left: int) -> None:
    cache = make(slots=40)
    for number in range(10):
        serve(cache, prompt(number, 1), 1)
    ends = range(interval, 101, interval)
    serve(cache, prompt(99, 100), *ends)
    assert sum(reused(cache, number, 1) for number in range(10)) == others_left
    assert cache.usage("checkpoint").evictable == min(40, len(ends) + others_left)
    oldest = ends[max(0, len(ends) - 40)]
    assert [reused(cache, 99, n) for n in (100, oldest, oldest - 1)] == [100, oldest, 0], (
        "its own oldest go first"
    )


# sgl-project/sglang #28185
def test_prefixes_that_take_turns_are_all_reused_or_none() -> None:
    for prefixes, hits in ((32, 32), (33, 0), (40, 0)):
        cache = make(slots=32)
        for number in range(prefixes):
            serve(cache, prompt(number, 1), 1)
        assert sum(serve(cache, prompt(number, 1), 1) for number in range(prefixes)) == hits


# sgl-project/sglang #28185
def test_an_engine_that_stores_only_into_free_slots_keeps_what_fits_of_prefixes_that_take_turns() -> None:
    cache = make(slots=32)

    def turn() -> int:
        requests = (prompt(number, 1) for number in range(40))
        return sum(serve(cache, it, 1, no_store=cache.usage("checkpoint").free == 0) for it in requests)

    turn()
    assert [turn(), turn()] == [32, 32]


# ROCm/ATOM #2045, #1879
@pytest.mark.parametrize(("read_back", "ends_left"), [(True, 10), (False, 4)])
def test_ends_of_prompts_outlive_states_on_the_way_once_they_were_read(
    read_back: bool, ends_left: int
) -> None:
    cache = make(slots=50)
    for number in range(10):
        serve(cache, prompt(number, 5), 1, 2, 3, 4, 5)
    if read_back:
        assert [serve(cache, prompt(number, 5)) for number in range(10)] == [5] * 10
    cache.evict("checkpoint", 30)
    assert sum(reused(cache, number, 5) == 5 for number in range(10)) == ends_left
