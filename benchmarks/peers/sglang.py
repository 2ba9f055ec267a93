"""sglang's prefix caches for recurrent states, as the workloads see them.

Two encodings: `MambaRadixCache`, and `UnifiedRadixCache` with its tree in Python or in Rust. The int8 checkpoint
pool is on, pages have one token, the device is the CPU and states are one element, for the tree alone is measured.

Its allocator of KV tokens frees by concatenating the whole free list, which costs more than the tree; here it is
replaced by one that only counts, which is to the peers' advantage.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers.stubs import Wheel
from benchmarks.speed.clock import Clock
from benchmarks.speed.workloads import Keys, Size

CHUNK = 64

# One object for the whole process: the wheels' modules bind what returns it when they are imported.
SETTINGS = SimpleNamespace(
    enable_int8_mamba_checkpoint=True,
    int8_mamba_ckpt_size=1,
    mamba_cache_chunk_size=CHUNK,
    mamba_max_states_per_path=-1,
    mamba_track_interval=CHUNK,
    enable_mamba_extra_buffer_lazy=False,
)


def _one_element() -> SimpleNamespace:
    return SimpleNamespace(
        shape=SimpleNamespace(conv=[(1, 1)], temporal=(1, 1, 1)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.bfloat16),
        layers=[0],
    )


def _counting(allocator: type) -> type:
    class Counting(allocator):  # type: ignore[misc, valid-type]  # a base that only the wheel has
        def clear(self) -> None:
            super().clear()
            self._ids = torch.arange(1, self.size + 1, dtype=torch.int64)
            self._free = self.size

        def available_size(self) -> int:
            return self._free

        def alloc(self, n: int) -> torch.Tensor:
            if n > self._free:
                raise AssertionError(f"wanted {n} tokens, {self._free} free")
            self._free -= n
            return self._ids[:n]

        def free(self, ids: torch.Tensor) -> None:
            self._free += ids.numel()

        def free_segment(self, ids: torch.Tensor, start_pos: int = 0) -> None:
            self._free += ids.numel()

    return Counting


class _Sglang:
    """What both encodings have in common."""

    leaves_out: frozenset[str] = frozenset()

    def __init__(self, wheel: Wheel, size: Size) -> None:
        SETTINGS.int8_mamba_ckpt_size = size.states
        load = partial(self._load, wheel)
        base = load("base_prefix_cache")
        self._key = load("radix_cache").RadixKey
        self._match_params, self._insert_params = base.MatchPrefixParams, base.InsertParams
        self._evict_params = base.EvictParams
        self._requests = load("memory_pool").HybridReqToTokenPool(
            size=4,
            mamba_size=8,
            mamba_spec_state_size=0,
            max_context_len=8,
            device="cpu",
            enable_memory_saver=False,
            cache_params=_one_element(),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=False,
        )
        allocator = _counting(load("allocator.token").TokenToKVPoolAllocator)
        self._kv = allocator(size.tokens, torch.bfloat16, "cpu", None, False)
        self._states = self._requests.mamba_ckpt_pool
        self.cache = self._cache(load)

    @staticmethod
    def patch() -> None:
        """Makes the wheel's stubs answer with `SETTINGS`."""
        raise NotImplementedError  # each version has its own way

    @staticmethod
    def _load(wheel: Wheel, name: str) -> Any:
        return wheel.load(f"sglang.srt.mem_cache.{name}")

    def _cache(self, load: Any) -> Any:
        raise NotImplementedError  # each version has its own tree

    def _params(self, load: Any, **more: Any) -> Any:
        return load("cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=self._requests,
            token_to_kv_pool_allocator=self._kv,
            page_size=1,
            **more,
        )

    def match(self, tokens: Keys) -> Any:
        return self.cache.match_prefix(self._match_params(key=self._key(tokens)))

    def store(self, clock: Clock, key: Keys, cached: int, before: torch.Tensor | None) -> None:
        new = self._kv.alloc(len(key) - cached)
        value = new if before is None else torch.cat([before, new])
        state = self._states.alloc(1)
        if clock("insert", self.insert, key, value, state, cached).mamba_exist:
            self._states.free(state)

    def insert(self, key: Keys, value: torch.Tensor, state: torch.Tensor, cached: int) -> Any:
        return self.cache.insert(
            self._insert_params(key=self._key(key), value=value, mamba_value=state, prev_prefix_len=cached)
        )

    @staticmethod
    def copied(copy: torch.Tensor) -> int:
        return len(copy)

    def evict_states(self, n: int) -> None:
        self.cache.evict(self._evict_params(num_tokens=0, mamba_num=n))

    def evict_tokens(self, n: int) -> None:
        self.cache.evict(self._evict_params(num_tokens=n, mamba_num=0))

    def free(self) -> tuple[int, int]:
        return self._kv.available_size(), self._states.available_size()

    def evictable(self) -> tuple[int, int]:
        return self.cache.full_evictable_size(), self.cache.mamba_evictable_size()


class Mamba(_Sglang):
    """`MambaRadixCache`, in Python."""

    leaves_out = frozenset({"copy out KV ids"})  # its match has them already

    @staticmethod
    def patch() -> None:
        importlib.import_module("sglang.srt.server_args").get_global_server_args = lambda: SETTINGS

    def _cache(self, load: Any) -> Any:
        return load("mamba_radix_cache").MambaRadixCache(self._params(load))

    @staticmethod
    def matched(match: Any) -> int:
        return len(match.device_indices)

    def copy_out(self, match: Any, lock: Any) -> torch.Tensor:
        return match.device_indices

    def lock(self, match: Any) -> Any:
        self.cache.inc_lock_ref(match.last_device_node)
        return match.last_device_node

    def unlock(self, lock: Any) -> None:
        self.cache.dec_lock_ref(lock)


class Unified(_Sglang):
    """`UnifiedRadixCache`, with its core in Python or in Rust."""

    core: str

    @staticmethod
    def patch() -> None:
        os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
        context = importlib.import_module("sglang.srt.runtime_context")
        context.get_exec = lambda: SimpleNamespace(mamba=SETTINGS)
        context.mamba_cache_chunk_size = lambda: CHUNK
        context.mamba_checkpoint_grid = lambda page: CHUNK

    def _cache(self, load: Any) -> Any:
        parts = load("unified_cache.component_type").ComponentType
        params = self._params(load, tree_components=(parts.FULL, parts.MAMBA), tree_core_backend=self.core)
        cache = load("unified_radix_cache").UnifiedRadixCache(params)
        expected = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}[self.core]
        if type(cache.tree_core).__name__ != expected:
            raise AssertionError(f"expected {expected}, found {type(cache.tree_core).__name__}")
        return cache

    @staticmethod
    def matched(match: Any) -> int:
        return match.device_prefix_len

    def copy_out(self, match: Any, lock: Any) -> torch.Tensor:
        return self.cache.path_device_indices(match.last_device_node)

    def lock(self, match: Any) -> Any:
        return self.cache.lock(match.last_device_node)

    def unlock(self, lock: Any) -> None:
        self.cache.unlock(lock)


class UnifiedPython(Unified):
    core = "python"


class UnifiedRust(Unified):
    core = "rust"


def make_store(wheel: Wheel, **shape: Any) -> Any:
    """The pool of int8 states, without a cache."""
    return wheel.load("sglang.srt.mem_cache.mamba_checkpoint_pool").Int8CheckpointStore(**shape)
