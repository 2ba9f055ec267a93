"""sglang's own pools, requests, allocators and invariant checker around one prefix cache, on a CPU.

What a scheduler does with them is done here; states are written in place of a model. Nothing of sglang is copied.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from radixstate.integrations.sglang import plugin
from radixstate.integrations.sglang.int8_pool import Int8Pool
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig

fixtures.get_device = lambda: "cpu"  # it knows no CPU

PEER = "sglang-python"
BACKEND = os.environ.get("RADIXSTATE_KIT", plugin.NAME)
"""`radixstate`, or `sglang-python` or `sglang-rust`: sglang's own trees with their int8 pool."""
ACTIVE, KV, GRID = 12, 2048, 64
SLOTS = 2 * ACTIVE
"""Of checkpoints, as both caches have by default."""

if plugin.NAME not in registry.registered_radix_cache_backends():
    plugin.register()
    HookRegistry.apply_hooks()


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 50000) for _ in range(n)]


@dataclass(frozen=True)
class Setting:
    """How sglang is started.

    Attributes:
        page: tokens of a page.
        extra: whether a request tracks states in slots of their own (`extra_buffer`).
    """

    page: int = 1
    extra: bool = False

    def __str__(self) -> str:
        return f"page{self.page}-{'extra_buffer' if self.extra else 'no_buffer'}"


SETTINGS = (Setting(), Setting(extra=True), Setting(page=64, extra=True))


def context_of(setting: Setting, backend: str = BACKEND, kv: int = KV, active: int = ACTIVE) -> Any:
    """What sglang gives to the maker of a cache, after it made its pools."""
    theirs = backend.startswith("sglang-")
    config = CacheConfig(
        page_size=setting.page,
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=setting.extra,
        mamba_cache_size=active,
        kv_size=kv,
        max_context_len=1024,
        max_num_reqs=8,
        enable_int8_mamba_checkpoint=theirs,
        num_layers=4,
        full_attention_layer_ids=(3,),
        mamba_num_heads=2,
        mamba_head_dim=16,
        mamba_state_size=16,
    )
    cache, allocator, _ = fixtures.build_fixture(config)
    params = cache.cache_init_params
    if setting.page > 1:
        kvcache = allocator.get_kvcache()
        allocator = PagedTokenToKVPoolAllocator(kv, setting.page, torch.bfloat16, "cpu", kvcache, False)
    params.token_to_kv_pool_allocator = allocator
    args = ServerArgs(
        model_path="dummy",
        page_size=setting.page,
        enable_int8_mamba_checkpoint=theirs,
        radix_cache_backend=None if theirs else backend,
        mamba_radix_cache_strategy="extra_buffer" if setting.extra else "no_buffer",
        mamba_track_interval=GRID,
    )
    args._mamba_cache_chunk_size = GRID
    set_global_server_args_for_scheduler(args)
    if theirs:
        params.tree_core_backend = backend.removeprefix("sglang-")
    return registry.TreeCacheBuildContext(
        server_args=args,
        params=params,
        is_hybrid_swa=False,
        is_hybrid_ssm=True,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        tp_worker=None,
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )


class World:
    """A cache with its pools, and what a scheduler does with them.

    Attributes:
        cache: the one that is tried.
        pool: rows of page tables and active slots.
        kv: allocator of KV.
        states: tensors of the active slots.
        running: requests that have been admitted.
    """

    def __init__(
        self, setting: Setting, make: Callable[[Any], Any] = registry.create_tree_cache, **sizes: int
    ) -> None:
        context = context_of(setting, **sizes)
        self.cache = make(context)
        self.kv, self.pool = context.params.token_to_kv_pool_allocator, context.params.req_to_token_pool
        ours = context.server_args.enable_int8_mamba_checkpoint and plugin.int8_pool_wanted()
        assert isinstance(self.pool.mamba_ckpt_pool, Int8Pool) == ours
        self.states = self.pool.mamba_pool.mamba_cache
        self.setting, self.page, self.extra = setting, setting.page, setting.extra
        self.capacity = self.kv.size
        self.running: list[Any] = []
        self.serial = 0

    # ---- states, as a model would leave them

    def truth(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % (1 << 40))
        shape = self.states.temporal[:, 0].shape
        return torch.randn(shape, generator=generator).to(self.states.temporal.dtype)

    def write(self, slot: torch.Tensor, tokens: list[int]) -> None:
        self.states.temporal[:, int(slot)] = self.truth(tokens)
        for conv in self.states.conv:
            conv[:, int(slot)] = float(len(tokens) % 7)

    def holds(self, slot: torch.Tensor, tokens: list[int]) -> bool:
        """Whether a slot has the state after `tokens`, up to half a step of the int8 scale and its roundings."""
        want, got = self.truth(tokens).float(), self.states.temporal[:, int(slot)].float()
        step = want.abs().amax(-2, keepdim=True) / 127
        windows = all((conv[:, int(slot)] == float(len(tokens) % 7)).all() for conv in self.states.conv)
        return windows and bool(((got - want).abs() <= step * 0.52 + want.abs() * 2**-7).all())

    # ---- requests

    def request(
        self,
        tokens: list[int],
        *,
        extra_key: str | None = None,
        salt: str | None = None,
        match: bool = True,
    ) -> Any:
        self.serial += 1
        req = Req(
            rid=f"r{self.serial}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=4),
            extra_key=extra_key,
        )
        req.cache_salt, req.output_ids = salt, array("q")
        if match:
            req.init_next_round_input(self.cache)
        return req

    def admit(self, req: Any, end: int | None = None) -> Any:
        """Locks, takes a row, an active slot and KV, loads the matched state and computes, as a batch does."""
        req.lock = self.cache.lock(req.last_node)
        self.extend(req, end or len(req.full_untruncated_fill_ids))
        self.running.append(req)
        return req

    def extend(self, req: Any, end: int) -> None:
        req.extend_end = end
        start = req.kv.kv_allocated_len or req.prefix_len
        if req.kv.req_pool_idx is None:
            prefix = self.cache.prefix_device_indices(req) if req.prefix_len else None
            assert self.pool.alloc([req]) is not None
            if prefix is not None:
                self.pool.write((req.kv.req_pool_idx, slice(0, len(prefix))), prefix.to(torch.int32))
        first = -(-start // self.page) * self.page  # prompts are cut at pages
        need = -(-(end - first) // self.page) * self.page if end > first else 0
        evict_from_tree_cache(self.cache, need)
        new = self.kv.alloc(need)
        assert new is not None, "out of KV tokens"
        self.pool.write((req.kv.req_pool_idx, slice(first, end)), new[: end - first].to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        self.move(req)
        self.compute(req, start, end)

    def move(self, req: Any) -> None:
        """What the forward does first."""
        if req.kv.mamba_cow_src_index is not None:
            target = req.kv.mamba_pool_idx.unsqueeze(0)
            states = self.pool.mamba_pool
            self.pool.mamba_ckpt_pool.load_to_active(states, req.kv.mamba_cow_src_index, target)
        elif req.kv.mamba_needs_clear:
            self.pool.mamba_pool.clear_slots(req.kv.mamba_pool_idx.unsqueeze(0))
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False

    def compute(self, req: Any, start: int, end: int) -> None:
        tokens, reused = list(req.full_untruncated_fill_ids), bool(start) and start == req.prefix_len
        req.hit_ok = self.holds(req.kv.mamba_pool_idx, tokens[:start]) if reused else None
        self.write(req.kv.mamba_pool_idx, tokens[:end])
        depth = start + (end - start) // GRID * GRID
        if self.extra and depth > start:
            index = req.kv.mamba_next_track_idx
            self.write(req.kv.mamba_ping_pong_track_buffer[index], tokens[:depth])
            req.kv.mamba_prev_track_seqlen = req.kv.mamba_last_track_seqlen
            req.kv.mamba_last_track_seqlen = depth
            req.kv.mamba_last_track_idx = index
            req.kv.mamba_next_track_idx = self.pool.get_mamba_ping_pong_other_idx(index)

    def finish(self, req: Any) -> None:
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.cache, checkpoint=True)
        self.running.remove(req)

    def drop(self, req: Any) -> None:
        """An abort or a retraction."""
        release_kv_cache(req, self.cache, checkpoint=False)
        self.running.remove(req)

    def serve(self, tokens: list[int], **more: str) -> Any:
        req = self.request(tokens, **more)  # type: ignore[arg-type]
        self.finish(self.admit(req))
        return req

    def match(
        self, tokens: list[int], limit: int, extra_key: str | None = None, salt: str | None = None
    ) -> Any:
        key = RadixKey(array("q", tokens), extra_key, limit=limit, cache_salt=salt)
        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def cached(self, tokens: list[int], **more: str) -> int:
        """How many of these tokens a longer prompt reuses."""
        found: int = self.match([*tokens, 1, 2], len(tokens) + 1, **more).device_prefix_len
        return found

    def row(self, req: Any, end: int) -> torch.Tensor:
        indices: torch.Tensor = self.pool.req_to_token[req.kv.req_pool_idx, :end]
        return indices

    # ---- what must always hold

    def audit(self) -> None:
        """sglang's own invariant checker; when nothing runs also the two pools of states and the cache itself."""
        check, stats = self._checker()
        leak, text = check._check_full_pool(stats, uncached=check._get_total_uncached_sizes()[0])
        assert not leak, text
        if not self.running:
            leak, text = check._check_mamba_pool(stats)
            assert not leak, text
            assert len(self.pool.free_slots) == self.pool.size, "rows leak"
            protected = self.cache.full_protected_size(), self.cache.mamba_protected_size()
            assert protected == (0, 0), f"protected though nothing runs: {protected}"
            self.cache.sanity_check()

    def _checker(self) -> tuple[Any, Any]:
        stats = SimpleNamespace(
            full_evictable_size=self.cache.full_evictable_size(),
            full_available_size=self.kv.available_size(),
            full_capacity=self.capacity,
            mamba_available_size=self.pool.mamba_allocator.available_size(),
            mamba_evictable_size=0,
        )
        observer = SimpleNamespace(
            session_held_tokens=lambda: 0,
            session_held_mamba_slots=lambda: 0,
            session_held_req_count=lambda: 0,
            get_pool_stats=lambda: stats,
        )
        check = SchedulerInvariantChecker.__new__(SchedulerInvariantChecker)
        values = {
            "is_hybrid_swa": False,
            "is_hybrid_ssm": True,
            "page_size": self.page,
            "tree_cache": self.cache,
            "req_to_token_pool": self.pool,
            "token_to_kv_pool_allocator": self.kv,
            "pool_stats_observer": observer,
            "max_total_num_tokens": self.capacity,
            "get_last_batch": lambda: SimpleNamespace(reqs=self.running),
            "get_running_batch": lambda: None,
            "get_chunked_req": lambda: None,
        }
        for name, value in values.items():
            object.__setattr__(check, name, value)
        return check, stats

    def end(self) -> None:
        """Aborts what still runs; nothing may be left over."""
        for req in list(self.running):
            self.drop(req)
        self.audit()
