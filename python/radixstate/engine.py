"""What an engine calls that allocates its KV pages itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixstate import _native, budget
from radixstate._native import Match
from radixstate.base import CacheBase
from radixstate.errors import NotYourSlotError
from radixstate.finiteness import Verdict
from radixstate.indices import as_slot
from radixstate.lease import Lease
from radixstate.states import ActivePool, CheckpointPool, Format, StateSpec

if TYPE_CHECKING:
    import torch

    from radixstate.indices import Slot
    from radixstate.tokens import PageRow


class EngineCache(CacheBase[_native.EngineCache]):
    """A prefix cache for an engine that allocates its KV pages itself, and mostly its active slots.

    A request is a lease: `lookup` a prompt, `lease` what was found, `Lease.load` its state, compute, and
    `Lease.publish` the state and the pages. `take_freed` gives back what the cache needs no more.

    Who owns a page: the engine, until `publish` or `extend` takes it over. The pages of `replaced` tokens are not
    taken over: they were cached already, so the engine frees its own and uses the lease's. From then on the cache
    owns it, until `take_freed` lists it.

    Attributes:
        spec: what a slot holds.
        page_size: tokens of a page.
        active: full-precision states of running requests.
        checkpoints: encoded states of cached prefixes.
        logical: whether the cache numbers the pages.
        own_slots: whether the cache hands out active slots.
    """

    def __init__(
        self,
        spec: StateSpec,
        *,
        active_slots: int | None = None,
        checkpoint_slots: int | None = None,
        kv_pages: int = 0,
        page_size: int = 16,
        checkpoint_stride: int = 64,
        page_bytes: int = 0,
        format: Format = "int8",
        active: ActivePool | None = None,
        device: str | torch.device = "cpu",
        policy: str = "lru",
        logical: bool = False,
        own_slots: bool = False,
    ) -> None:
        """Allocates the pools, after comparing their bytes with the free memory.

        Args:
            spec: what a slot holds.
            active_slots: running states; 16 by default, or those of `active`.
            checkpoint_slots: cached states; by default twice the active slots.
            kv_pages: pages of the engine's KV cache, which has ids 1..=kv_pages; 0 for a purely linear model.
            page_size: tokens of a page, and the granularity at which prefixes match.
            checkpoint_stride: tokens between the depths at which the engine can cut off a state.
            page_bytes: bytes of one KV page in the engine, for `stats().bytes` alone.
            format: of the checkpoints.
            active: the engine's tensors, see `ActivePool.bind`; their device is used.
            device: where the pools are allocated.
            policy: which cached state is evicted first; `lru`: the one stored or hit the longest ago; `hit-density`:
                the one that promises the fewest saved FLOPs for each request that it is kept, see `docs/policies.md`.
            logical: the engine names no pages. The cache numbers those that it takes over, 1..=kv_pages, and
                the engine maps the numbers to pages, as in a table on its device.
            own_slots: the cache hands out the active slots, by `Lease.take_slot`.

        Raises:
            ConfigError: sizes with which nothing could ever be reused, or that contradict `active`, or `active`
                belongs to another cache.
            BudgetError: not enough free memory.
            TensorError: `active` holds states of another spec or tensors that share memory, or no codec serves it.
            ModuleNotFoundError: the pools are on cuda, and CuPy is missing.
        """
        device = active.device if active else device
        plan = budget.of_pools(spec, active, active_slots, checkpoint_slots, format)
        plan.check(device)
        native = _native.EngineCache(
            page_size=page_size,
            checkpoint_stride=checkpoint_stride,
            kv_pages=kv_pages,
            active_slots=plan.active_slots if own_slots else 0,
            checkpoint_slots=plan.checkpoint_slots,
            logical=logical,
            kv_page_bytes=page_bytes,
            active_bytes=spec.slot_bytes("native"),
            checkpoint_bytes=spec.slot_bytes(format),
            policy=policy,
        )
        active = active or ActivePool(spec, plan.active_slots, device=device)
        checkpoints = CheckpointPool(spec, plan.checkpoint_slots, format=format, device=device)
        super().__init__(native, spec, page_size, active, checkpoints)
        self.logical = logical
        self.own_slots = own_slots

    def lease(self, match: Match) -> Lease:
        """Pins what a lookup found.

        Raises:
            StaleError: what was found is gone.
            WrongCacheError: another cache found it.
        """
        return Lease(self, match)

    def take_freed(self) -> list[int]:
        """KV pages that the cache has given up since the last call, each once: the engine's ids, or numbers.

        A number may be another page's from now on: read what it maps to before the next `publish` or `extend`.
        """
        return self._native.take_freed()

    def copy_freed(self, out: PageRow) -> int:
        """Writes what `take_freed` lists into `out`, as `Sequence.copy_pages` does, and returns how many pages.

        `usage("kv").outbox` says how many there are.

        Raises:
            TensorError: `out` has another type, is read-only or strided.
            LengthMismatchError: `out` is too short; nothing was taken.
        """
        return self._native.copy_freed(out)

    def _require(self, lease: Lease, slot: Slot) -> Slot:
        """A slot of the engine, or one that this lease has taken. On cuda what a tensor names is seen by the codec."""
        slot = as_slot(slot, self.active.device)
        if not isinstance(slot, int):
            if self.own_slots:
                raise NotYourSlotError(
                    "the cache hands out the active slots as numbers: name one, not a tensor"
                )
            return slot
        slot = self.active.require(slot)
        if self.own_slots and slot not in lease.slots:
            raise NotYourSlotError(f"active slot {slot} is not one of this lease's slots {lease.slots}")
        return slot

    def _encode_from(self, source: Slot, slot: int) -> Verdict:
        """Stores an active slot of `_require` into a checkpoint slot."""
        if isinstance(source, int):
            (verdict,) = self._encode([(source, slot)])
            return verdict
        return Verdict(self._transfer.store_at(source, self.checkpoints.slot_index(slot)), 0)
