"""What a scheduler calls: the cache with its tensors.

The native core decides which slot. The pools hold the tensors. A codec fills them. This module brings the
three together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import lcm
from operator import index
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from radixstate import _native, budget
from radixstate._native import Freed, Match, Namespace, Stats, Step, Stored, Usage
from radixstate.errors import CacheError, ConfigError, DepthPassedError, OutOfSlotsError, TensorError
from radixstate.finiteness import Proofs, Verdict
from radixstate.lease import Lease
from radixstate.owner import Owner, leave
from radixstate.results import Skipped, skipped
from radixstate.sequence import Sequence
from radixstate.states import ActivePool, CheckpointPool, Format, StateSpec
from radixstate.tokens import Tokens, sized
from radixstate.transfer import Transfer

if TYPE_CHECKING:
    import torch

    from radixstate._native import PendingHandle, Started, StartRequest

PoolName = Literal["kv", "active", "checkpoint"]
T = TypeVar("T")


class PrefixCache(Owner):
    """A prefix cache for recurrent states, with its tensors.

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
        external: bool = False,
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
            external: the engine allocates KV pages and active slots itself and uses `lookup` and `lease`.
            policy: which cached state is evicted first; `lru`: the one stored or hit the longest ago.
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
        plan = _plan(spec, active, active_slots, checkpoint_slots, format)
        plan.check(device)
        self._native = _native.Cache(
            page_size=page_size,
            checkpoint_stride=checkpoint_stride,
            kv_pages=kv_pages,
            active_slots=plan.active_slots,
            checkpoint_slots=plan.checkpoint_slots,
            kv_external=external,
            active_external=external,
            kv_page_bytes=page_bytes,
            active_bytes=spec.slot_bytes("native"),
            checkpoint_bytes=spec.slot_bytes(format),
            policy=policy,
        )
        plan.warn_if_crowded(prompt_tokens, lcm(page_size, checkpoint_stride))
        self.spec = spec
        self.page_size = page_size
        self.active = active or ActivePool(spec, plan.active_slots, device=device)
        self.checkpoints = CheckpointPool(spec, plan.checkpoint_slots, format=format, device=device)
        self._transfer = Transfer(self.active, self.checkpoints)
        self._external = external
        self._proofs = Proofs(self._native)
        self.active.belong_to(self)

    def __repr__(self) -> str:
        """Slots in use of each pool."""
        return repr(self._native).replace("Cache", type(self).__name__, 1)

    def legal_depth(self, tokens: int) -> int:
        """The deepest depth, at most `tokens`, at which a state may be cached."""
        return self._native.legal_depth(tokens)

    def lookup(
        self, tokens: Tokens, *, namespace: Namespace | None = None, max_length: int | None = None
    ) -> Match:
        """How much of a prompt can be reused. Pins nothing and changes nothing that eviction looks at.

        Raises:
            EmptyPromptError: `tokens` is empty.
            TokenRangeError: a token is not in 0..2**32.
        """
        tokens = self._proven(tokens, namespace, max_length)
        return self._native.lookup(tokens, namespace=namespace, max_length=max_length)

    def _proven(self, tokens: Tokens, namespace: Namespace | None, max_length: int | None) -> Tokens:
        """If this prompt could hit a state that is not yet known to be finite, waits until it is known.

        Returns the tokens; an iterator is read into a list.
        """
        if not self._proofs:
            return tokens
        tokens = sized(tokens)
        if self._native.lookup(tokens, namespace=namespace, max_length=max_length).not_ready:
            self._proofs.report(None)
        return tokens

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

        Args:
            tokens: the prompt.
            reserve: positions to claim pages for; by default the whole prompt.
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
            ConfigError: `slots` is 0, or active slots belong to the engine.
        """
        self._require_own_slots()
        if self._proofs:
            # Also without reading: a second try for room reads them again.
            tokens = sized(tokens) if no_read else self._proven(tokens, namespace, max_length)
        begin = partial(
            self._native.start,
            tokens,
            namespace,
            reserve=reserve,
            max_length=max_length,
            no_read=no_read,
            no_store=no_store,
            slots=slots,
        )
        # Only proofs that are out make a second try worth a frame.
        started = self._with_room(begin) if self._proofs else begin()
        try:
            self._fill(started.load_from, cast(int, started.slot))
            if slots > 1:
                self._poison_further(started)
            self._native.loaded(started.sequence)
            return Sequence(self, started)
        except BaseException:
            # Whoever keeps the exception keeps this frame: nothing is left to the end of its variables.
            self._native.abort(started.sequence)
            raise

    def _with_room(self, call: Callable[[], T]) -> T:
        """Makes a call that takes slots. If there are too few, reads the proofs that are out, and calls again."""
        try:
            return call()
        except OutOfSlotsError:
            if not self._proofs:
                raise
            self._proofs.report(None)
            return call()

    def start_many(self, requests: Iterable[StartRequest]) -> list[Sequence | CacheError]:
        """Starts a scheduler step's worth of requests, in order; all their states are decoded together.

        Each succeeds or fails on its own: the list has its sequence or the error `start` would have raised.

        Raises:
            ConfigError: active slots belong to the engine.
        """
        self._require_own_slots()
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
        hits = [(it.load_from, cast(int, it.slot)) for it in started if it.load_from is not None]
        if hits:
            self._transfer.load(hits)
        for it in started:
            if it.load_from is None:
                self.active.clear(cast(int, it.slot))
        for it in started:
            self._poison_further(it)
        for it in started:
            self._native.loaded(it.sequence)
        return [Sequence(self, it) if isinstance(it, _native.Started) else it for it in outcomes]

    def _fill(self, source: int | None, slot: int) -> None:
        """Makes an active slot hold a cached state, or the empty one."""
        if source is None:
            self.active.clear(slot)
        else:
            self._transfer.load([(source, slot)])

    def _poison_further(self, started: Started) -> None:
        """Makes the slots that a sequence took for states on the way unusable until a kernel writes them."""
        for slot in self._native.slots(started.sequence)[1:]:
            self.active.poison(slot)

    def _require_own_slots(self) -> None:
        if self._external:
            raise ConfigError("the engine hands out active slots here: use lookup() and lease(), not start()")

    def _checkpoint(self, seq: Sequence, depth: int, source: int) -> Stored | Skipped:
        """See `Sequence.checkpoint`."""
        pending = self._reserve(lambda: self._native.reserve_checkpoint(seq._handle, depth, source))
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
        self._can_checkpoint(states)
        reserved: list[PendingHandle | _native.Skipped] = []
        try:
            for seq, depth, source in states:
                reserve = partial(self._native.reserve_checkpoint, seq._handle, depth, source)
                reserved.append(self._reserve(reserve))
            pending = [it for it in reserved if isinstance(it, _native.PendingHandle)]
            sources = [
                source
                for (_, _, source), it in zip(states, reserved, strict=True)
                if isinstance(it, _native.PendingHandle)
            ]
            verdicts = iter(self._encode([(s, it.slot) for s, it in zip(sources, pending, strict=True)]))
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

    def _can_checkpoint(self, states: list[tuple[Sequence, int, int]]) -> None:
        """Finds every misuse of a batch before anything is evicted for it."""
        depths: dict[int, int] = {}
        for seq, depth, source in states:
            self._native.can_checkpoint(seq._handle, depth, source)
            other = depths.setdefault(source, depth)
            if depth != other:
                raise DepthPassedError(
                    f"active slot {source} holds one state, and is named for depths {other} and {depth}"
                )

    def _reserve(
        self, reserve: Callable[[], PendingHandle | _native.Skipped]
    ) -> PendingHandle | _native.Skipped:
        """Reserves a slot. If there is none, reads the proofs that are out, which may free some, and asks again."""
        pending = reserve()
        if isinstance(pending, _native.Skipped) and pending.reason == "no_room" and self._proofs:
            self._proofs.report(None)
            pending = reserve()
        return pending

    def _encode(self, pairs: list[tuple[int, int]]) -> list[Verdict]:
        """Stores active slots into checkpoint slots."""
        if not pairs:
            return []
        finite = self._transfer.store(pairs)
        return [Verdict(finite, i) for i in range(len(pairs))]

    def _spend(self, seq: Sequence, source: int) -> None:
        """A further slot gives its state once, whatever became of that."""
        if source != seq._slot:
            self.active.spend(source)

    def _commit(self, seq: Sequence, pending: PendingHandle, verdict: Verdict) -> Stored | Skipped:
        """Publishes what was encoded. If that is known not to be finite, its slot goes back instead."""
        if verdict.known and not verdict.is_finite():
            return skipped(self._native.discard(pending))
        if not verdict.known:
            self._proofs.expect(pending.slot, verdict)
        outcome = self._native.commit(seq._handle, pending, proven=verdict.known)
        return self._published(pending, verdict, outcome)

    def _published(
        self, pending: PendingHandle, verdict: Verdict, outcome: Stored | _native.Skipped
    ) -> Stored | Skipped:
        if isinstance(outcome, _native.Skipped):
            self._proofs.forget(pending.slot, verdict)
            return skipped(outcome)
        return outcome

    def lease(self, match: Match) -> Lease:
        """Pins what a lookup found, for an engine with allocators of its own.

        Raises:
            StaleError: what was found is gone.
            WrongCacheError: another cache found it.
        """
        return Lease(self, match)

    def evict(self, pool: PoolName, n: int) -> Freed:
        """Frees at least `n` units of a pool if it can. Says what it really freed; that is usable at once."""
        if self._proofs:
            self._proofs.report(None)
        return self._native.evict(pool, n)

    def take_freed(self, pool: PoolName) -> list[int]:
        """KV pages of an external pool that the cache has given up since the last call, each once."""
        return self._native.take_freed(pool)

    def reset(self) -> None:
        """Lookups see an empty cache at once; running sequences keep what they hold, and store nothing."""
        self._native.reset()

    def begin_step(self) -> Step:
        """Declares work in flight: what is given back from now on waits for its end. See `step`.

        Keep the handle until the step is retired: dropping it earlier cancels the step.
        """
        return self._native.begin_step()

    def retire_step(self, step: Step | int, invalid: Iterable[Stored] = (), *, failed: bool = False) -> None:
        """A step has ended, in any order; repeating it changes nothing.

        If `invalid` or the wait for a device raises, the step has ended as well: every state stored in it is
        withdrawn, and the error goes on.

        Args:
            step: from `begin_step`, or its number.
            invalid: states that were not finite.
            failed: its work did not run, or not to its end: every state stored in it (`Stored.step`) is withdrawn.
                A state that a later step computed from what is lost is not: that step has failed as well.

        Raises:
            UnknownStepError: no such step was begun.
            WrongCacheError: another cache began `step`, or stored one of `invalid`; the step goes on.
        """
        known: list[Stored] = []
        try:
            known.extend(invalid)
            if self._proofs and not failed:
                self._proofs.report(index(step))
        except BaseException:
            self._native.cancel_step(step, known)
            raise
        if failed:
            self._native.cancel_step(step, known)
        else:
            self._native.retire_step(step, known)

    def invalidate(self, stored: Stored) -> None:
        """Withdraws a stored state that turned out not to be finite. Repeating it changes nothing.

        The pages that the tree got with it are as suspect: lookups no longer find them, or any state whose path
        they lie on. Sequences that share them keep them to their end and store nothing further.

        Raises:
            WrongCacheError: another cache stored it.
        """
        self._native.invalidate(stored)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """One step, begun on entry and retired on exit, as failed when its body raises.

        Overlapping ones use `begin_step`, `retire_step`.
        """
        step = self.begin_step()
        try:
            yield step
        except BaseException as error:
            leave(lambda: self.retire_step(step, failed=True), error)
            raise
        self.retire_step(step)

    def stats(self) -> Stats:
        """All counters since the cache was made, and the bytes in use."""
        return self._native.stats()

    def usage(self, pool: PoolName) -> Usage:
        """Where the slots of a pool are: capacity = free + held + evictable + pinned + retiring."""
        return self._native.usage(pool)

    def digest(self) -> int:
        """One number for every decision so far, to be compared between the ranks of a group.

        Equal after the same calls, different once the ranks have diverged; cheap enough for every step. It
        covers what each call took, reused, stored, evicted, ended or lacked. A dropped sequence counts from
        the cache's next call on: ranks whose garbage collectors drop at other moments should `finish`.
        """
        return self._native.digest()

    def draw(self) -> str:
        """A text picture of every prefix that lookups can reach, with the states at their ends; 64 levels at most."""
        return self._native.draw()

    def check(self, engine_free: Iterable[int] | None = None) -> None:
        """Recomputes every invariant; with `engine_free` also that no page free there is adopted here.

        Raises:
            CheckError: something is wrong; `violations` lists all of it.
        """
        self._native.check(engine_free)


def _plan(
    spec: StateSpec,
    active: ActivePool | None,
    active_slots: int | None,
    checkpoint_slots: int | None,
    format: Format,
) -> budget.Plan:
    """What is to be allocated: an engine's active tensors decide their slots, and cost nothing."""
    if active is None:
        slots = 16 if active_slots is None else active_slots
        return budget.plan(spec, active_slots=slots, checkpoint_slots=checkpoint_slots, format=format)
    if active.spec != spec:
        raise TensorError(f"the active pool holds {active.spec}, the cache is for {spec}")
    if active_slots not in (None, active.slots):
        raise ConfigError(f"active_slots is {active_slots}, but the active pool has {active.slots} slots")
    plan = budget.plan(spec, active_slots=active.slots, checkpoint_slots=checkpoint_slots, format=format)
    return replace(plan, active_bytes=0)
