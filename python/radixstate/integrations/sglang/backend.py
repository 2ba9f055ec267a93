"""The prefix cache that sglang's scheduler calls, on an `EngineCache`.

sglang's page ids and slot ids are tensors of the device. Nothing here reads them: the cache numbers the pages itself
(`EngineCache(logical=True)`), a table on the device maps numbers to pages, and slots go from tensor to kernel. A lock
is a `Lease`. A node, as sglang carries it about, is the `Match` of a lookup, or the lease that has gone deeper since.

A request's life: `match_prefix` says what is cached and gives it an active slot, `lock` pins that, the forward loads
the state, `checkpoint` publishes state and pages as they come, `unlock` ends it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictResult, MatchResult, TreeLock
from sglang.srt.runtime_context import mamba_checkpoint_grid

from radixstate import EngineCache, Lease, Match, Namespace, Skipped
from radixstate.integrations.sglang.options import Options
from radixstate.integrations.sglang.order import depth_first
from radixstate.integrations.sglang.pool import CheckpointSlots, PageTable, bind

if TYPE_CHECKING:
    from array import array

    from radixstate.integrations.sglang.pool import Numbers
    from radixstate.results import Published

logger = logging.getLogger(__name__)

Node: TypeAlias = Match | Lease


class RadixStateCache(BasePrefixCache):  # type: ignore[misc]  # sglang is not there when types are checked
    """Prefixes of KV pages with recurrent states as checkpoints of their own pool.

    Attributes:
        cache: what it is made of.
        page_size: tokens of a page.
        disable: False; sglang reads it.
        req_to_token_pool: sglang's rows of page tables and active slots.
        token_to_kv_pool_allocator: sglang's allocator of KV.
    """

    disable = False

    def __init__(self, params: Any, options: Options) -> None:
        """Allocates the checkpoints, after comparing their bytes with the free memory.

        Args:
            params: sglang's `CacheInitParams`.
            options: see there.

        Raises:
            BudgetError: not enough free memory.
            ConfigError: an option has a value that the cache refuses.
            TensorError: the model's states have a shape that is not known here.
        """
        self.page_size: int = params.page_size
        self.req_to_token_pool = pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self._tracks: bool = params.enable_mamba_extra_buffer
        self._grid: int = mamba_checkpoint_grid(params.page_size)
        pages = self.token_to_kv_pool_allocator.size // self.page_size
        active = bind(pool.mamba_pool)
        self.cache = EngineCache(
            active.spec,
            active=active,
            checkpoint_slots=options.slots(active.spec),
            kv_pages=pages,
            page_size=self.page_size,
            checkpoint_stride=self.page_size,  # sglang's states lie at the end of any page
            format=options.format,
            policy=options.policy,
            logical=True,
        )
        pool.mamba_ckpt_pool = CheckpointSlots(self.cache)
        self._table = PageTable(pages, self.page_size, active.device)
        self._refused: Counter[str] = Counter()
        if params.enable_metrics:
            self.init_metrics_collector()
        kept = self.cache.checkpoints
        logger.info(
            "radixstate: %d checkpoint slots of %s, %d bytes, beside %d active slots and %d pages of %d tokens",
            *(kept.slots, kept.format, kept.nbytes, active.slots, pages, self.page_size),
        )

    # ---- what is cached

    def match_prefix(self, params: Any) -> MatchResult:
        """How much of a key can be reused; with `cow_mamba` the request gets a slot that the next forward fills."""
        self.cache.settle()
        key = params.key
        length, namespace = key._raw_len(), _namespace(key.extra_key, key.cache_salt)
        match = self._lookup(key.token_ids, length, namespace)
        kv_length = match.kv_length
        if params.cow_mamba and match.length and not self._claim(params.req, match):
            match = self._root(namespace)
        branch = kv_length // self._grid * self._grid
        return MatchResult(
            match.length,
            *(match, match, match),
            full_kv_hit_length=kv_length,
            mamba_branching_seqlen=branch if branch > match.length else None,
        )

    def _lookup(self, tokens: array[int], length: int, namespace: Namespace | None) -> Match:
        """What is cached of the first `length` tokens, the last of them too."""
        if not length:
            return self._root(namespace)
        if length == len(tokens):
            return self.cache.lookup(tokens, namespace=namespace, whole=True)
        return self.cache.lookup(tokens, namespace=namespace, max_length=length)

    def _root(self, namespace: Namespace | None) -> Match:
        return self.cache.lookup([0], namespace=namespace, max_length=0)

    def _claim(self, req: Any, match: Match) -> bool:
        """Whether a request has an active slot, to which the forward will load the matched state."""
        if not req.kv.holds_mamba:
            slot = self.req_to_token_pool.mamba_allocator.alloc(1)
            if slot is None:
                return False
            req.kv.mamba_pool_idx = slot[0]
        with self.cache.lease(match) as lease:
            req.kv.mamba_cow_src_index = self.cache.checkpoints.slot_index(_state(lease))
        req.kv.mamba_needs_clear = False
        return True

    def root_node_handle(self, extra_key: str | None = None) -> Match:
        """The empty prefix."""
        return self._root(_namespace(extra_key, None))

    @property
    def root_node(self) -> Match:
        """The empty prefix of requests without a key."""
        return self._root(None)

    def is_root(self, node: Node) -> bool:
        """Whether a node is the empty prefix."""
        return not (node.depth if isinstance(node, Lease) else node.length)

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """KV indices of a node's prefix, int64 on the device."""
        with self._lease(node) as lease:
            return self._table.tokens(self._table.on_device(self._numbers(lease)))

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """KV indices of the prefix that a request reuses."""
        if req.lock is None:
            return self.path_device_indices(req.last_node)[: req.prefix_len]
        numbers = self._numbers(req.lock.receipt)
        return self._table.tokens(self._table.on_device(numbers))[: req.prefix_len]

    def _numbers(self, lease: Lease, start: int = 0) -> Numbers:
        """Numbers of the leased pages past `start` tokens."""
        numbers = np.empty((lease.depth - start) // self.page_size, np.int32)
        lease.copy_pages(numbers, start)
        return numbers

    def touch_prefix(self, key: Any) -> None:
        """Makes what a waiting request will reuse as recent as if it had been."""
        if tokens := key.raw_token_ids():
            self.cache.touch(tokens, namespace=_namespace(key.extra_key, key.cache_salt))

    def dfs_weight_order(self, node_handles: Sequence[Node]) -> list[int]:
        """Requests that share a prefix next to each other, those of the most shared one first."""
        paths = []
        for node in node_handles:
            with self._lease(node) as lease:
                paths.append(self._numbers(lease))
        return depth_first(paths)

    # ---- pins

    def lock(self, node: Node) -> TreeLock:
        """Pins a node's prefix, and the state of a match, for one holder."""
        return TreeLock(node, self._lease(node))

    def _lease(self, node: Node) -> Lease:
        return node.fork() if isinstance(node, Lease) else self.cache.lease(node)

    def unlock(self, lock: TreeLock | None) -> None:
        """Ends a pin."""
        if lock is not None:
            lock.receipt.release()
            self.cache.settle()
            self._give_back()

    def inc_lock_ref(self, node: Node) -> Any:
        """Not there: `lock` pins for one holder."""
        raise NotImplementedError("radixstate pins by lock(node)")

    def dec_lock_ref(self, node: Node, params: Any = None) -> Any:
        """Not there: `unlock` ends a pin."""
        raise NotImplementedError("radixstate ends a pin by unlock(lock)")

    # ---- what a request brings

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Caches a request's newest state at or before `up_to`, with the pages up to it.

        The request uses the cache's pages from then on where those of others were there before.
        """
        self.cache.settle()
        finished = req.finished()
        depth, slot = self._newest_state(req, up_to, finished)
        if depth > req.kv.cache_protected_len and depth % self.page_size == 0:
            self._publish(req, depth, slot)
        if finished:
            self.req_to_token_pool.free_mamba_cache(req)
        else:
            req.kv.mamba_last_track_seqlen = req.kv.mamba_prev_track_seqlen = None

    def _newest_state(self, req: Any, up_to: int, finished: bool) -> tuple[int, torch.Tensor | None]:
        """Depth of a state, and the active slot that holds it; depth 0 if there is none to cache."""
        kv, pool = req.kv, self.req_to_token_pool
        if not self._tracks:
            return up_to, kv.mamba_pool_idx
        index, depth = pool.get_mamba_ping_pong_keep_idx(req), kv.mamba_last_track_seqlen or 0
        if depth > up_to:
            # The forward ran past the end of the request. The other slot may hold the state before.
            depth, index = kv.mamba_prev_track_seqlen or 0, pool.get_mamba_ping_pong_other_idx(index)
            if not finished or depth > up_to or pool.mamba_ping_pong_track_buffer_size != 2:
                return 0, None
        return depth, kv.mamba_ping_pong_track_buffer[index]

    def _publish(self, req: Any, depth: int, slot: torch.Tensor | None) -> None:
        assert slot is not None, "a state has a slot"
        if req.lock is None:
            req.lock = self.lock(self._root(_namespace(req.extra_key, req.cache_salt)))
        lease, start = req.lock.receipt, req.kv.cache_protected_len
        lease.loaded()  # by a forward whose results are here
        made = self._store(lease, req.full_untruncated_fill_ids[:depth], slot)
        self._give_back()  # what the new state's slot was taken from
        if isinstance(made.outcome, Skipped):
            self._count(made.outcome)
        if lease.depth > start:
            self._adopt(req, lease, start, made.replaced)

    def _store(self, lease: Lease, tokens: array[int], slot: torch.Tensor) -> Published:
        made = lease.publish(tokens, source=slot)
        if isinstance(made.outcome, Skipped) and made.outcome.reason == "not_ready":
            # Another request of this batch has brought the same pages, and its state is on its way.
            self.cache.settle(wait=True)
            made = lease.publish(tokens, source=slot)
        return made

    def _adopt(self, req: Any, lease: Lease, start: int, replaced: tuple[int, int] | None) -> None:
        """The request's pages from `start` to the lease's depth are the cache's; it uses those that are."""
        kv, depth = req.kv, lease.depth
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        given = self._table.pages_at(row[start : depth : self.page_size])
        numbers = self._table.on_device(self._numbers(lease, start))
        known = (replaced[1] - start) // self.page_size if replaced else 0
        self._table.map(numbers[known:], given[known:])
        if replaced:
            self.token_to_kv_pool_allocator.free_page_ids(given[:known])
            tokens = self._table.tokens(numbers[:known]).to(row.dtype)
            self.req_to_token_pool.write((kv.req_pool_idx, slice(start, replaced[1])), tokens)
        kv.cache_protected_len = kv.cache_inserted_len = depth
        req.last_node = lease

    def _count(self, skipped: Skipped) -> None:
        """Says why states were not cached, ever less often."""
        self._refused[skipped.reason] += 1
        count = self._refused[skipped.reason]
        if skipped.reason in ("non_finite", "no_room") and count & (count - 1) == 0:
            logger.warning("radixstate: %d states were not cached: %s", count, skipped.reason)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Gives back the active slots of a request whose end cached nothing."""
        if not checkpointed:
            self.req_to_token_pool.free_mamba_cache(req)

    # ---- room

    def evict(self, params: Any) -> EvictResult:
        """Frees KV in sglang's allocator. For active slots it can do nothing: the cache has none of them."""
        began = time.perf_counter()
        pages = -(-params.num_tokens // self.page_size)
        tokens = self.cache.evict("kv", pages).kv * self.page_size if pages > 0 else 0
        self._give_back()
        self.update_eviction_metrics(tokens, began)
        return EvictResult(num_tokens_evicted=tokens)

    def _give_back(self) -> None:
        """Frees the pages that the cache has given up."""
        count = self.cache.usage("kv").outbox
        if count:
            numbers = np.zeros(count, np.int32)
            self.cache.copy_freed(numbers)
            self.token_to_kv_pool_allocator.free_page_ids(self._table.take(self._table.on_device(numbers)))

    def reset(self) -> None:
        """Forgets everything; sglang clears its own pools next."""
        self.cache.reset()
        self._give_back()

    # ---- what sglang counts

    def evictable_size(self) -> int:
        """Tokens of KV that `evict` can free."""
        return self.cache.usage("kv").evictable * self.page_size

    def protected_size(self) -> int:
        """Tokens of KV that are cached and pinned."""
        usage = self.cache.usage("kv")
        return (usage.pinned + usage.retiring + usage.outbox) * self.page_size

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def mamba_evictable_size(self) -> int:
        """Cached states that nobody has pinned."""
        return self.cache.usage("checkpoint").evictable

    def mamba_protected_size(self) -> int:
        """Cached states that are pinned, being written or waited for."""
        usage = self.cache.usage("checkpoint")
        return usage.pinned + usage.held + usage.retiring

    def total_size(self) -> tuple[int, int]:
        """Tokens of KV and states that are cached."""
        full = self.evictable_size() + self.protected_size()
        return full, self.mamba_evictable_size() + self.mamba_protected_size()

    def supports_mamba(self) -> bool:
        """States are cached."""
        return True

    def sanity_check(self) -> None:
        """Recomputes every invariant, and compares the cache's pages with the allocator's. Waits for the device.

        Raises:
            CheckError: the cache is wrong.
            RuntimeError: cache and allocator do not agree.
        """
        self.cache.check()
        pages, free = self._table.mapped(), self.token_to_kv_pool_allocator.get_all_free_pages().tolist()
        cached = self.total_size()[0] // self.page_size
        if not len(set(pages)) == len(pages) == cached:
            raise RuntimeError(
                f"{cached} pages are cached, {len(pages)} are mapped, to {len(set(pages))} of the allocator"
            )
        if both := set(pages) & set(free):
            raise RuntimeError(f"cached pages are free in the allocator: {sorted(both)[:10]}")

    def pretty_print(self) -> None:
        """Prints all counters."""
        print(self.cache, self.cache.stats(), dict(self._refused))


def _namespace(extra_key: str | None, salt: str | None) -> Namespace | None:
    """Prompts with other keys or salts share nothing."""
    if extra_key is None and not salt:
        return None
    return Namespace(salts=(extra_key, salt or None))


def _state(lease: Lease) -> int:
    state = lease.state
    assert state is not None, "a match of tokens has a state"
    return state
