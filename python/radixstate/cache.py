"""What a scheduler calls: the cache, its running sequences, and leases for engines with their own allocators.

The native core decides which slot, the pools hold the tensors, the codec fills them: all this module does is
to bring the three together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from radixstate import _native, budget
from radixstate._native import Freed, Match, Namespace, Stats, Stored, Usage
from radixstate.errors import AlreadyLoadedError, CacheError, ConfigError, TensorError
from radixstate.results import Published, Skipped
from radixstate.states import ActivePool, CheckpointPool, Format, StateSpec
from radixstate.verdicts import Unsettled, Verdict

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from radixstate._native import Request, Started

PoolName = Literal["kv", "active", "checkpoint"]

Tokens = Iterable[int]
"""Token ids in 0..2**32. CPU tensors and buffers (numpy, array) of int32 or int64 are read in place."""


class _Owner:
    """Owns slots, and so exists once: a copy would give them back a second time."""

    def __reduce__(self) -> NoReturn:
        """Refuses `copy` and `pickle`, which both ask this."""
        raise TypeError(f"cannot copy or pickle a {type(self).__name__}: it owns slots of this process")


class PrefixCache(_Owner):
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
            prompt_tokens: of a typical prompt; a RuntimeWarning says if as many as run at once, each stored at
                every legal depth, have more states than there are checkpoint slots.

        Raises:
            ConfigError: sizes with which nothing could ever be reused, or that contradict `active`.
            BudgetError: not enough free memory.
            TensorError: `active` holds states of another spec.
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
        )
        plan.warn_if_crowded(prompt_tokens, lcm(page_size, checkpoint_stride))
        self.spec = spec
        self.page_size = page_size
        self.active = active or ActivePool(spec, plan.active_slots, device=device)
        self.checkpoints = CheckpointPool(spec, plan.checkpoint_slots, format=format, device=device)
        self._external = external
        self._unsettled = Unsettled(self._native.refuse)

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
        tokens = self._settled(tokens, namespace, max_length)
        return self._native.lookup(tokens, namespace=namespace, max_length=max_length)

    def _settled(self, tokens: Tokens, namespace: Namespace | None, max_length: int | None) -> Tokens:
        """Waits for verdicts on stored states if `tokens` would hit one; returns tokens to be read again."""
        if not self._unsettled:
            return tokens
        tokens = _sized(tokens)
        if self._native.lookup(tokens, namespace=namespace, max_length=max_length).length:
            self._unsettled.settle()
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
    ) -> Sequence:
        """Starts a request, all or nothing: its active slot holds the state after `reused` tokens.

        Args:
            tokens: the prompt.
            reserve: positions to claim pages for; by default the whole prompt.
            namespace: prefixes of other namespaces never match.
            no_read: reuse nothing.
            no_store: store nothing.
            max_length: reuse at most so many tokens.

        Raises:
            OutOfSlotsError: a pool is short just now; nothing was evicted. Its `pool`, `wanted`, `free`,
                `evictable` and `retiring` say whether to wait for a step or to end a request.
            NeverFitsError: more than a whole pool is needed.
            EmptyPromptError: `tokens` is empty.
            ConfigError: active slots belong to the engine.
        """
        self._require_own_slots()
        tokens = tokens if no_read else self._settled(tokens, namespace, max_length)
        started = self._native.start(
            tokens,
            reserve=reserve,
            namespace=namespace,
            no_read=no_read,
            no_store=no_store,
            max_length=max_length,
        )
        return self._begin([started])[0]

    def start_many(self, requests: Iterable[Request]) -> list[Sequence | CacheError]:
        """Starts a scheduler step's worth of requests, in order; all their states are decoded together.

        Each succeeds or fails on its own: the list has its sequence or the error `start` would have raised.

        Raises:
            ConfigError: active slots belong to the engine.
        """
        self._require_own_slots()
        requests = list(requests)  # whose iterator may store something
        self._unsettled.settle()
        outcomes = self._native.start_many(requests)
        sequences = iter(self._begin([it for it in outcomes if isinstance(it, _native.Started)]))
        return [next(sequences) if isinstance(it, _native.Started) else it for it in outcomes]

    def _begin(self, started: list[Started]) -> list[Sequence]:
        """Makes the slots of new sequences hold their states."""
        sequences = [Sequence(self, it) for it in started]
        self._fill([(it.load_from, seq.slot) for it, seq in zip(started, sequences, strict=True)])
        for it in started:
            self._native.loaded(it.sequence)
        return sequences

    def _fill(self, pairs: list[tuple[int | None, int]]) -> None:
        """Makes each active slot hold a cached state, or the empty one."""
        self.checkpoints.load(self.active, [(source, slot) for source, slot in pairs if source is not None])
        for source, slot in pairs:
            if source is None:
                self.active.clear(slot)

    def _require_own_slots(self) -> None:
        if self._external:
            raise ConfigError("the engine hands out active slots here: use lookup() and lease(), not start()")

    def checkpoint_many(self, states: Iterable[tuple[Sequence, int, int]]) -> list[Stored | Skipped]:
        """`Sequence.checkpoint` for (sequence, depth, source slot) each, encoded together."""
        reserved = self._reserve_all(states)
        pairs = [(source, slot.slot) for _, slot, source in reserved if not isinstance(slot, _native.Skipped)]
        verdicts = iter(self._encode(pairs))
        return [
            _skipped(slot) if isinstance(slot, _native.Skipped) else self._commit(seq, slot, next(verdicts))
            for seq, slot, _ in reserved
        ]

    def _reserve_all(
        self, states: Iterable[tuple[Sequence, int, int]]
    ) -> list[tuple[Sequence, _native.PendingHandle | _native.Skipped, int]]:
        """Reserves for all, or raises before anything is evicted for one."""
        states = list(states)
        for seq, depth, source in states:
            self._native.check_checkpoint(seq._handle, depth, source)
        return [
            (seq, self._native.reserve_checkpoint(seq._handle, depth, source), source)
            for seq, depth, source in states
        ]

    def _encode(self, pairs: list[tuple[int, int]]) -> list[Verdict]:
        """Stores active slots into checkpoint slots."""
        finite = self.checkpoints.store(self.active, pairs)
        return [Verdict(finite, i) for i in range(len(pairs))]

    def _commit(self, seq: Sequence, pending: _native.PendingHandle, verdict: Verdict) -> Stored | Skipped:
        """Publishes what was encoded. If that is known not to be finite, its slot goes back instead."""
        if verdict.known and not verdict.is_finite():
            return _skipped(self._native.discard(pending))
        return self._outcome(self._native.commit(seq._handle, pending), verdict)

    def _outcome(self, outcome: Stored | _native.Skipped, verdict: Verdict) -> Stored | Skipped:
        if isinstance(outcome, _native.Skipped):
            return _skipped(outcome)
        self._unsettled.add(outcome, verdict)
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
        return self._native.evict(pool, n)

    def take_freed(self, pool: PoolName) -> list[int]:
        """Units of an engine's pool that the cache has given up since the last call."""
        return self._native.take_freed(pool)

    def reset(self) -> None:
        """Lookups see an empty cache at once; running sequences keep what they hold, and store nothing."""
        self._native.reset()

    def begin_step(self) -> int:
        """Declares work in flight: what is given back from now on waits for its end. See `step`."""
        return self._native.begin_step()

    def retire_step(self, step: int, refused: Iterable[Stored] = (), *, failed: bool = False) -> None:
        """A step has ended, in any order; repeating it changes nothing.

        It has ended also when `refused` or the wait for a device raises: then every state stored in it counts as
        refused, and the error goes on.

        Args:
            step: from `begin_step`.
            refused: states that were not finite.
            failed: its work did not run, or not to its end: every state stored in it (`Stored.step`) is refused.

        Raises:
            UnknownStepError: no such step was begun.
            WrongCacheError: another cache stored a refused state; the step goes on.
        """
        withdrawn: list[Stored] = []
        asked = False
        try:
            withdrawn.extend(refused)
            if not failed:
                withdrawn.extend(self._unsettled.refused_in(step))
                asked = True
        finally:
            if not asked:
                withdrawn.extend(self._unsettled.stored_in(step))
            self._native.retire_step(step, withdrawn)
        self._unsettled.forget(step)

    def refuse(self, stored: Stored) -> None:
        """Withdraws a stored state that turned out not to be finite. Repeating it changes nothing.

        The pages that the tree got with it are as suspect: no lookup finds them any more, nor any state whose
        path they lie on. Sequences that share them keep them to their end, and store nothing further.

        Raises:
            WrongCacheError: another cache stored it.
        """
        self._native.refuse(stored)

    @contextmanager
    def step(self) -> Iterator[int]:
        """One step, begun on entry and retired on exit, as failed when its body raises.

        Overlapping ones use `begin_step`, `retire_step`.
        """
        step, failed = self.begin_step(), True
        try:
            yield step
            failed = False
        finally:
            self.retire_step(step, failed=failed)

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

    def check(self, engine_free: Iterable[int] | None = None) -> None:
        """Recomputes every invariant; with `engine_free` also that no page free there is adopted here.

        Raises:
            CheckError: something is wrong; `violations` lists all of it.
        """
        self._native.check(engine_free)


class Sequence(_Owner):
    """A running request: its active slot, its pages and its pin on what it reuses.

    A context manager: leaving it finishes the request, or aborts it on an exception. Dropping it also gives
    everything back. Used afterwards it raises UseAfterFinishError.
    """

    def __init__(self, cache: PrefixCache, started: Started) -> None:
        """Made by `PrefixCache.start`."""
        self._cache = cache
        self._handle = started.sequence
        self.match = started.match

    @property
    def slot(self) -> int:
        """The active slot that holds the running state."""
        slot = self._cache._native.slot(self._handle)
        assert slot is not None, "an internal active pool gives every sequence a slot"
        return slot

    @property
    def reused(self) -> int:
        """Tokens whose pages and state were taken from the cache: compute from here on."""
        return self._cache._native.reused(self._handle)

    @property
    def pages(self) -> list[int]:
        """KV pages in the order of the tokens. Read again after a checkpoint, which may replace some."""
        return self._cache._native.pages(self._handle)

    def copy_pages(self, out: WriteableBuffer) -> int:
        """Writes `pages` into a row of a page table, without a Python object for each.

        Args:
            out: contiguous int32, with room for all of them: an array, or `tensor.numpy()` of a CPU tensor.

        Returns:
            How many pages that were.

        Raises:
            TensorError: `out` has another type, is read-only or strided.
            LengthMismatchError: `out` is too short; nothing was written.
        """
        return self._cache._native.copy_pages(self._handle, out)

    @property
    def tokens(self) -> list[int]:
        """All known tokens."""
        return self._cache._native.tokens(self._handle)

    @property
    def length(self) -> int:
        """Number of known tokens."""
        return self._cache._native.length(self._handle)

    @property
    def claimed(self) -> int:
        """Tokens that the pages are for."""
        return self._cache._native.claimed(self._handle)

    def grow(self, n: int) -> None:
        """Claims pages for `n` more tokens, not yet known.

        Raises:
            OutOfSlotsError: the KV pool is short just now; nothing changed.
            NeverFitsError: more than all pages are needed.
        """
        self._cache._native.grow(self._handle, n)

    def append(self, tokens: Tokens) -> None:
        """Fills claimed positions.

        Raises:
            NotClaimedError: there are more tokens than claimed positions.
        """
        self._cache._native.append(self._handle, tokens)

    def shrink(self) -> None:
        """Gives back the pages past the known tokens, as after a rejected draft."""
        self._cache._native.shrink(self._handle)

    def take_slot(self) -> int:
        """One more active slot, for a kernel that writes a state on the way.

        It holds NaN until then, so that a state which nobody wrote is not cached for one that somebody did.

        Raises:
            OutOfSlotsError: none is free.
        """
        slot = self._cache._native.take_slot(self._handle)
        self._cache.active.poison(slot)
        return slot

    def checkpoint(self, depth: int | None = None, *, source: int | None = None) -> Stored | Skipped:
        """Caches the state that an active slot holds. Optional work: want of room is a result, not an error.

        Args:
            depth: tokens the state was computed from; by default all known ones. If their number is not legal
                that is skipped as `not_aligned`, for the slot does not hold the state of a legal depth.
            source: one of the sequence's slots; by default `slot`.

        Raises:
            UnalignedError: `depth` is not legal, see `PrefixCache.legal_depth`.
            DepthPastEndError: `depth` is beyond the known tokens.
            NotYourSlotError: `source` is no slot of this sequence.
        """
        if depth is None:
            depth = self.length
            if depth != self._cache.legal_depth(depth):
                return Skipped("not_aligned")
        source = self.slot if source is None else source
        return self._cache.checkpoint_many([(self, depth, source)])[0]

    def finish(self) -> None:
        """Ends the request and gives back everything it owns."""
        self._cache._native.finish(self._handle)

    def abort(self) -> None:
        """The same for a request that was given up."""
        self._cache._native.abort(self._handle)

    def __enter__(self) -> Self:
        """The sequence itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes, or aborts after an exception, unless that was done."""
        if not self._handle.used:
            self.abort() if error else self.finish()


class Lease(_Owner):
    """What a lookup found, pinned, for an engine that allocates KV pages and active slots itself.

    A context manager; leaving it releases the lease, and so does dropping it.
    """

    def __init__(self, cache: PrefixCache, match: Match) -> None:
        """Made by `PrefixCache.lease`."""
        self._cache = cache
        self._handle = cache._native.lease(match)
        self.match = match

    @property
    def pages(self) -> list[int]:
        """KV pages of the leased prefix. The lease moves deeper when more is published."""
        return self._cache._native.lease_pages(self._handle)

    def copy_pages(self, out: WriteableBuffer) -> int:
        """Writes `pages` into `out`, as `Sequence.copy_pages` does."""
        return self._cache._native.copy_lease_pages(self._handle, out)

    @property
    def state(self) -> int | None:
        """The checkpoint slot to load; None when nothing matched or it was loaded."""
        return self._cache._native.lease_state(self._handle)

    def loaded(self) -> None:
        """Ends the pin on the state, for an engine that loads it with a codec of its own."""
        self._cache._native.lease_loaded(self._handle)

    def load(self, slot: int) -> None:
        """Makes an engine's active slot hold the matched state, or none; ends the pin on that state.

        Raises:
            SlotError: `slot` is no active slot.
            AlreadyLoadedError: the pin has ended, and the state may be gone.
        """
        state = self.state
        if state is None and self.match.length:
            raise AlreadyLoadedError(f"this lease's state at depth {self.match.length} was loaded before")
        self._cache._fill([(state, slot)])
        self.loaded()

    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] = ()) -> Published:
        """Caches the state after `tokens`, which active slot `source` holds, and the KV pages with it.

        Args:
            tokens: from the start of the prompt; their number must be a legal depth.
            source: an active slot of the engine.
            pages: the pages of the tokens past the leased prefix.

        Raises:
            SlotError: `source` is no active slot.
            UnalignedError: the number of tokens is not legal.
            PrefixMismatchError: the tokens do not go on from the leased prefix.
            LengthMismatchError: the pages are not those of the tokens past the leased prefix.
            PageOwnershipError: a page is out of range or cached already.
        """
        native = self._cache._native
        tokens, pages = _sized(tokens), list(pages)
        self._cache.active.require(source)
        native.check_publish(self._handle, tokens, pages)
        pending = native.reserve(self._handle, tokens)
        if isinstance(pending, _native.Skipped):
            return Published(_skipped(pending), pages, [])
        (verdict,) = self._cache._encode([(source, pending.slot)])
        if verdict.known and not verdict.is_finite():
            return Published(_skipped(native.discard(pending)), pages, [])
        made = native.publish(self._handle, tokens, pages, pending)
        return Published(self._cache._outcome(made.outcome, verdict), made.canonical, made.duplicates)

    def release(self) -> None:
        """Ends the lease."""
        self._cache._native.release(self._handle)

    def __enter__(self) -> Self:
        """The lease itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases it, unless that was done."""
        if not self._handle.used:
            self.release()


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


def _sized(tokens: Tokens) -> Tokens:
    """Tokens that can be read more than once."""
    return tokens if isinstance(tokens, Sized) else list(tokens)


def _skipped(skip: _native.Skipped) -> Skipped:
    return Skipped(skip.reason, skip.wanted, skip.free, skip.evictable)
