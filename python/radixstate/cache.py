"""What a scheduler calls, whose pages and slots the cache hands out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from radixstate import _native, budget
from radixstate._native import Namespace, Stored
from radixstate.base import CacheBase
from radixstate.errors import CacheError
from radixstate.finiteness import Verdict
from radixstate.results import Skipped, skipped
from radixstate.sequence import Sequence
from radixstate.states import ActivePool, CheckpointPool, Format, StateSpec
from radixstate.tokens import Tokens, sized

if TYPE_CHECKING:
    import torch

    from radixstate._native import PendingHandle, Started, StartRequest


class PrefixCache(CacheBase[_native.Cache]):
    """A prefix cache for recurrent states, with its tensors. It hands out KV pages and active slots.

    An engine that allocates its pages itself uses `EngineCache`.

    Attributes:
        spec: what a slot holds.
        page_size: tokens of a page.
        active: full-precision states of running sequences.
        checkpoints: encoded states of cached prefixes.
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
        prompt_tokens: int = 0,
    ) -> None:
        """Allocates the pools, after comparing their bytes with the free memory.

        Args:
            spec: what a slot holds.
            active_slots: sequences that run at once; 16 by default, or those of `active`.
            checkpoint_slots: cached states; by default twice the active slots.
            kv_pages: pages of the engine's KV cache, which has ids 1..=kv_pages; 0 for a purely linear model.
            page_size: tokens of a page, and the granularity at which prefixes match.
            checkpoint_stride: tokens between the depths at which the engine can cut off a state.
            page_bytes: bytes of one KV page in the engine, for `stats().bytes` alone.
            format: of the checkpoints.
            active: an engine's tensors, see `ActivePool.bind`; their device is used.
            device: where the pools are allocated.
            policy: which cached state is evicted first; `lru`: the one stored or hit the longest ago; `hit-density`:
                the one that promises the fewest saved FLOPs for each request that it is kept, see `docs/policies.md`.
            prompt_tokens: of a typical prompt; a RuntimeWarning says if as many as run at once, each stored at
                every legal depth, have more states than there are checkpoint slots.

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
        native = _native.Cache(
            page_size=page_size,
            checkpoint_stride=checkpoint_stride,
            kv_pages=kv_pages,
            active_slots=plan.active_slots,
            checkpoint_slots=plan.checkpoint_slots,
            kv_page_bytes=page_bytes,
            active_bytes=spec.slot_bytes("native"),
            checkpoint_bytes=spec.slot_bytes(format),
            policy=policy,
        )
        plan.warn_if_crowded(prompt_tokens, lcm(page_size, checkpoint_stride))
        active = active or ActivePool(spec, plan.active_slots, device=device)
        checkpoints = CheckpointPool(spec, plan.checkpoint_slots, format=format, device=device)
        super().__init__(native, spec, page_size, active, checkpoints)

    def start(
        self,
        tokens: Tokens,
        *,
        reserve: int | None = None,
        namespace: Namespace | None = None,
        no_read: bool = False,
        no_store: bool = False,
        max_length: int | None = None,
        slots: int = 1,
    ) -> Sequence:
        """Starts a request, all or nothing: its active slot holds the state after `reused` tokens.

        It claims pages for the prompt alone, unless `reserve` says more. So call `Sequence.grow(1)` for the first
        sampled token too.

        Args:
            tokens: the prompt.
            reserve: positions to claim pages for; by default those of the prompt. More of them leave room for
                sampled tokens.
            namespace: prefixes of other namespaces never match.
            no_read: reuse nothing.
            no_store: store nothing.
            max_length: reuse at most so many tokens.
            slots: active slots, at least 1; the further ones are as from `Sequence.take_slot`.

        Raises:
            OutOfSlotsError: a pool is short just now; nothing was evicted. Its `pool`, `wanted`, `free`,
                `evictable` and `retiring` say whether to wait for a step or to end a request.
            NeverFitsError: more than a whole pool is needed.
            EmptyPromptError: `tokens` is empty.
            ConfigError: `slots` is 0.
        """
        start, waiting = self._native.start, self._proofs.verdicts and self._proofs
        if waiting:
            # Also without reading: a second try for room reads them again.
            tokens = sized(tokens) if no_read else self._proven(tokens, namespace, max_length)
        arguments = (
            tokens,
            namespace,
            reserve,
            max_length,
            no_read,
            no_store,
            slots,
            self._transfer.codec,
        )
        # Only proofs that are out make a second try worth a frame.
        started = self._with_room(start, *arguments) if waiting else start(*arguments)
        try:
            if slots > 1:
                self._poison_further(started)
            return Sequence(self, started)
        except BaseException:
            # Whoever keeps the exception keeps this frame: nothing is left to the end of its variables.
            self._native.abort(started.sequence)
            raise

    def start_many(self, requests: Iterable[StartRequest]) -> list[Sequence | CacheError]:
        """Starts a scheduler step's worth of requests, in order; all their states are decoded together.

        Each succeeds or fails on its own: the list has its sequence or the error `start` would have raised.
        """
        requests = list(requests)  # whose iterator may store something
        if self._proofs:
            self._proofs.report(None)
        outcomes = self._native.start_many(requests)
        try:
            return self._begin(outcomes)
        except BaseException:
            for outcome in outcomes:
                if isinstance(outcome, _native.Started):
                    self._native.abort(outcome.sequence)
            raise

    def _begin(self, outcomes: list[Started | CacheError]) -> list[Sequence | CacheError]:
        """Makes the slots of new sequences hold their states."""
        started = [it for it in outcomes if isinstance(it, _native.Started)]
        hits = [(it.load_from, it.slot) for it in started if it.load_from is not None]
        if hits:
            self._transfer.load(hits)
        for it in started:
            if it.load_from is None:
                self._transfer.fill(None, it.slot)
        for it in started:
            self._poison_further(it)
        for it in started:
            self._native.loaded(it.sequence)
        return [Sequence(self, it) if isinstance(it, _native.Started) else it for it in outcomes]

    def _poison_further(self, started: Started) -> None:
        """Makes the slots that a sequence took for states on the way unusable until a kernel writes them."""
        for slot in self._native.slots(started.sequence)[1:]:
            self.active.poison(slot)

    def _checkpoint(self, seq: Sequence, depth: int, source: int) -> Stored | Skipped:
        """See `Sequence.checkpoint`."""
        reserve = partial(self._native.reserve_checkpoint, seq._handle, depth, source)
        pending = self._with_slot(reserve(), reserve)
        try:
            if isinstance(pending, _native.Skipped):
                self._spend(seq, source)
                return skipped(pending)
            (verdict,) = self._encode([(source, pending.slot)])
            self._spend(seq, source)
            return self._commit(seq, pending, verdict)
        except BaseException:
            if isinstance(pending, _native.PendingHandle):
                pending.drop()
            raise

    def checkpoint_many(self, states: Iterable[tuple[Sequence, int, int]]) -> list[Stored | Skipped]:
        """`Sequence.checkpoint` for (sequence, depth, source slot) each, encoded together.

        Raises:
            DepthPassedError: also when one slot is named for two depths.
        """
        states = list(states)
        reserved = self._native.reserve_checkpoints([(it._handle, depth, slot) for it, depth, slot in states])
        try:
            for i, (seq, depth, source) in enumerate(states):
                again = partial(self._native.reserve_checkpoint, seq._handle, depth, source)
                reserved[i] = self._with_slot(reserved[i], again)
            pairs = [
                (source, it.slot)
                for (_, _, source), it in zip(states, reserved, strict=True)
                if isinstance(it, _native.PendingHandle)
            ]
            verdicts = iter(self._encode(pairs))
            for seq, _, source in states:
                self._spend(seq, source)
            return [
                skipped(it) if isinstance(it, _native.Skipped) else self._commit(seq, it, next(verdicts))
                for (seq, _, _), it in zip(states, reserved, strict=True)
            ]
        except BaseException:
            for it in reserved:
                if isinstance(it, _native.PendingHandle):
                    it.drop()
            raise

    def _spend(self, seq: Sequence, source: int) -> None:
        """A further slot gives its state once, whatever became of that."""
        if source != seq._started.slot:
            self.active.spend(source)

    def _commit(self, seq: Sequence, pending: PendingHandle, verdict: Verdict) -> Stored | Skipped:
        """Publishes what was encoded."""
        if not self._may_enter(pending, verdict):
            return skipped(self._native.discard(pending))
        outcome = self._native.commit(seq._handle, pending, proven=verdict.known)
        return self._entered(pending, verdict, outcome)
