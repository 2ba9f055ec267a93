"""Bugs seeded into the backend, each of which a scenario must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

from radixstate.integrations.sglang import backend, options
from scenarios import SCENARIOS, NotHereError
from world import SETTINGS, World

MUTANTS = {
    "the outbox is not emptied": ("        if count:\n", "        if count > 10**9:\n"),
    "the outbox is not emptied when a lock ends": (
        "self.cache.settle()\n            self._give_back()",
        "self.cache.settle()",
    ),
    "KV that was there is kept": (
        "self.token_to_kv_pool_allocator.free_page_ids(given[:known])",
        "given[:known]",
    ),
    "KV that was there is freed twice over": ("free_page_ids(given[:known])", "free_page_ids(given)"),
    "the row is not rewritten": ("slice(start, replaced[1])", "slice(start, start)"),
    "all numbers are mapped anew": (
        "self._table.map(numbers[known:], given[known:])",
        "self._table.map(numbers, given)",
    ),
    "the salt is ignored": ("salts=(extra_key, salt or None)", "salts=(extra_key,)"),
    "the key is ignored": ("salts=(extra_key, salt or None)", "salts=(salt or None,)"),
    "the wrong slot is stored": (
        "return up_to, kv.mamba_pool_idx",
        "return up_to, kv.mamba_pool_idx % 12 + 1",
    ),
    "the wrong slot is stored of two": (
        "kv.mamba_ping_pong_track_buffer[index]",
        "kv.mamba_ping_pong_track_buffer[1 - index]",
    ),
    "the overshoot takes the newer slot": (
        "pool.get_mamba_ping_pong_other_idx(index)\n",
        "index\n",
    ),
    "an active slot leaks at the end": (
        "        if finished:\n            self.req_to_token_pool.free_mamba_cache(req)\n        else:",
        "        if not finished:",
    ),
    "an active slot leaks at an abort": ("        if not checkpointed:\n", "        if not req:\n"),
    "the branch is off the grid": (
        "kv_length // self._grid * self._grid",
        "kv_length // self._grid * self._grid - 1",
    ),
    "the branch is what is reused": ("branch > match.length", "branch >= match.length"),
    "a full active pool is asserted": (
        "            if slot is None:\n                return False\n",
        "            assert slot is not None\n",
    ),
    "the claimed slot is cleared": (
        "req.kv.mamba_needs_clear = False",
        "req.kv.mamba_needs_clear = True\n        req.kv.mamba_cow_src_index = None",
    ),
    "another checkpoint is loaded": ("slot_index(_state(lease))", "slot_index(_state(lease) % 20 + 1)"),
    "a flush gives nothing back": ("self.cache.reset()\n        self._give_back()", "self.cache.reset()"),
    "the protected length stays": (
        "kv.cache_protected_len = kv.cache_inserted_len = depth",
        "kv.cache_inserted_len = depth",
    ),
    "a limit is forgotten": ("namespace=namespace, max_length=length", "namespace=namespace"),
    "waiting requests are not touched": ("if tokens := key.raw_token_ids():", 'if tokens := b"":'),
}
"""What is replaced once in backend.py, and by what."""


def mutated(old: str, new: str) -> Callable[[Any], Any]:
    """A maker of caches with a bug."""
    source = Path(str(backend.__file__)).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    module = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), vars(module))
    return lambda context: module.RadixStateCache(context.params, options.Options())


def first_failure(make: Callable[[Any], Any]) -> str | None:
    """The first scenario that does not end well."""
    for setting in SETTINGS:
        for scenario in SCENARIOS:
            try:
                world = World(setting, make)
                scenario(world)
                world.end()
            except NotHereError:
                continue
            except Exception as error:
                return f"{scenario.__name__} in {setting}: {error!r}"[:200]
    return None


def test_without_a_bug_all_is_well() -> None:
    assert first_failure(mutated("class RadixStateCache", "class  RadixStateCache")) is None


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_bug_is_found(bug: str) -> None:
    found = first_failure(mutated(*MUTANTS[bug]))
    print(f"{bug}: {found}")
    assert found
