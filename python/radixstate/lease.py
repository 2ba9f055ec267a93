"""A prefix that an engine with pages of its own has pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from radixstate import _native
from radixstate._native import Match, Stored
from radixstate.errors import AlreadyLoadedError, LengthMismatchError
from radixstate.owner import Owner, leave
from radixstate.results import Extended, Published, Skipped, skipped
from radixstate.tokens import Tokens, sized

if TYPE_CHECKING:
    from radixstate._native import LeaseHandle, PendingHandle
    from radixstate.engine import EngineCache
    from radixstate.indices import Slot
    from radixstate.tokens import PageRow

Entered: TypeAlias = tuple[Stored | _native.Skipped, tuple[int, int] | None]
"""What became of a state in the tree, and the tokens whose pages were cached already."""


class Lease(Owner):
    """What a lookup found, pinned, for an engine that allocates its KV pages itself.

    A context manager; leaving it releases the lease, and so does dropping it.

    Pages are ids as of `EngineCache`: the engine's, or numbers of the cache. Pass them as a contiguous buffer of
    32- or 64-bit integers to make no Python object of each. Where the cache numbers them, pass none.

    Attributes:
        match: what was found.
    """

    def __init__(self, cache: EngineCache, match: Match, handle: LeaseHandle | None = None) -> None:
        """Made by `EngineCache.lease` and `fork`."""
        self._cache = cache
        self._handle = cache._native.lease(match) if handle is None else handle
        self.match = match

    def __repr__(self) -> str:
        """Its depth, or that it has ended."""
        return "Lease(ended)" if self._handle.used else f"Lease(depth={self.depth})"

    def fork(self) -> Lease:
        """Another lease of the same prefix, as deep as it is by now. It has no state to load."""
        native = self._cache._native
        return Lease(self._cache, self.match, native.fork_lease(self._handle))

    @property
    def depth(self) -> int:
        """Tokens of the leased prefix. It moves deeper when more is shared."""
        return self._cache._native.lease_depth(self._handle)

    @property
    def pages(self) -> list[int]:
        """KV pages of the leased prefix."""
        return self._cache._native.lease_pages(self._handle)

    def copy_pages(self, out: PageRow, start: int = 0) -> int:
        """Writes the pages past `start` tokens into `out`, as `Sequence.copy_pages` does.

        Raises:
            UnalignedError: `start` is no multiple of the page size.
        """
        return self._cache._native.copy_lease_pages(self._handle, out, start)

    @property
    def state(self) -> int | None:
        """The checkpoint slot to load; None when nothing matched or it was loaded."""
        return self._cache._native.lease_state(self._handle)

    def loaded(self) -> None:
        """Ends the pin on the state, for an engine that loads it with a codec of its own."""
        self._cache._native.lease_loaded(self._handle)

    def load(self, slot: int) -> None:
        """Makes an active slot hold the matched state, or the empty one; ends the pin on that state.

        Raises:
            SlotError: `slot` is no active slot.
            NotYourSlotError: the cache hands out the slots, and `slot` is none of this lease.
            AlreadyLoadedError: the pin has ended, and the state may be gone; or the lease has tokens that no state
                was matched for, as a fork or one that was extended: the empty state is not theirs.
        """
        self._cache._require(self, slot)
        state = self.state
        if state is None and self.match.length:
            raise AlreadyLoadedError(f"this lease's state at depth {self.match.length} was loaded before")
        if state is None and self.depth:
            raise AlreadyLoadedError(f"this lease has {self.depth} tokens and no state to load for them")
        self._cache._transfer.fill(state, slot)
        self.loaded()

    @property
    def slots(self) -> list[int]:
        """The active slots from `take_slot`, the oldest first."""
        return self._cache._native.slots(self._handle)

    def take_slot(self) -> int:
        """An active slot of the cache, for a cache with `own_slots`. It goes back with the lease, or earlier.

        It is filled with NaN, so that a state that nobody wrote is refused as not finite.

        Raises:
            OutOfSlotsError: none is free.
            NeverFitsError: the lease has all there are, or the cache hands out none.
        """
        native, before = self._cache._native, self.slots
        try:
            slot = native.take_slot(self._handle)
            self._cache.active.poison(slot)
        except BaseException:
            # An interrupt may have come before the number of the slot was known here.
            for taken in self.slots[len(before) :]:
                native.give_back_slot(self._handle, taken)
            raise
        return slot

    def give_back_slot(self, slot: int) -> None:
        """Gives back a slot from `take_slot`, once the steps in flight have retired.

        Raises:
            NotYourSlotError: `slot` is no slot of this lease.
        """
        self._cache._native.give_back_slot(self._handle, slot)

    def extend(self, tokens: Tokens, pages: Iterable[int] | None = None) -> Extended:
        """Shares the pages of `tokens` past the lease, and moves it to their end. No state is stored.

        Without a state at that depth or deeper, the pages stay cached as long as somebody leases them.

        Args:
            tokens: from the start of the prompt, whole pages.
            pages: the pages of the tokens past the leased prefix.

        Raises:
            UnalignedError: the tokens are not whole pages.
            NotLoadedError: they go past the leased prefix, whose state was not loaded.
            PrefixMismatchError: the tokens do not go on from the leased prefix.
            LengthMismatchError: the pages are not those of the tokens past the leased prefix.
            PageOwnershipError: a page is out of range or cached already.
            TooManyPagesError: the cache numbers pages, and has no more numbers: call `take_freed` first.
        """
        made = self._cache._native.extend(self._handle, tokens, pages)
        return Extended(made.skipped and skipped(made.skipped), made.replaced)

    def attach(self, tokens: Tokens, *, source: Slot) -> Stored | Skipped:
        """Caches the state after `tokens`, all of which the lease has.

        If the state is not finite the pages stay, where `publish` takes them back.

        Args:
            tokens: from the start of the prompt; their number must be a legal depth.
            source: the active slot that holds the state: a number, or an int64 tensor of one element on the device
                of the pools, which on cuda is not read back.

        Raises:
            LengthMismatchError: they go past the lease: `extend` or `publish` them.
        """
        native, tokens, depth = self._cache._native, sized(tokens), self.depth
        if len(tokens) > depth:
            # Before anything is evicted for the state.
            raise LengthMismatchError(f"the state is of {len(tokens)} tokens, the lease has {depth}")
        source = self._cache._require(self, source)
        pending = self._reserve(partial(native.reserve, self._handle, tokens))
        if isinstance(pending, _native.Skipped):
            return skipped(pending)

        def attach(proven: bool) -> Entered:
            return native.attach(self._handle, tokens, pending, proven=proven), None

        return self._store(source, pending, attach).outcome

    def publish(self, tokens: Tokens, *, source: Slot, pages: Iterable[int] | None = None) -> Published:
        """Caches the state after `tokens`, which active slot `source` holds, and the KV pages with it.

        All or nothing, but for a state that is cached already (`duplicate`): then the pages are shared as by
        `extend`. While another request still writes it that is `not_ready`, and nothing is shared.

        Args:
            tokens: from the start of the prompt; their number must be a legal depth.
            source: the active slot that holds the state: a number, or an int64 tensor of one element on the device
                of the pools, which on cuda is not read back.
            pages: the pages of the tokens past the leased prefix.

        Raises:
            SlotError: `source` is no active slot.
            NotYourSlotError: the cache hands out the slots, and `source` is none of this lease.
            UnalignedError: the number of tokens is not legal.
            MisuseError: see `extend`.
        """
        native, tokens = self._cache._native, sized(tokens)
        pages = None if pages is None else sized(pages)
        source = self._cache._require(self, source)
        pending = self._reserve(partial(native.reserve, self._handle, tokens, pages))
        if isinstance(pending, _native.Skipped):
            if pending.reason != "duplicate":
                return Published(skipped(pending), None)
            # While another request still writes that state and its pages, none are shared.
            shared = self.extend(tokens, pages)
            return Published(shared.skipped or skipped(pending), shared.replaced)

        def publish(proven: bool) -> Entered:
            made = native.publish(self._handle, tokens, pages, pending, proven=proven)
            return made.outcome, made.replaced

        return self._store(source, pending, publish)

    def _reserve(
        self, reserve: Callable[[], PendingHandle | _native.Skipped]
    ) -> PendingHandle | _native.Skipped:
        return self._cache._with_slot(reserve(), reserve)

    def _store(self, source: Slot, pending: PendingHandle, enter: Callable[[bool], Entered]) -> Published:
        """Encodes a state and brings it into the tree by `enter`, which is told whether it is known to be finite."""
        cache = self._cache
        try:
            verdict = cache._encode_from(source, pending.slot)
            if not cache._may_enter(pending, verdict):
                return Published(skipped(cache._native.discard(pending)), None)
            outcome, replaced = enter(verdict.known)
        except BaseException:
            # Whoever keeps the exception keeps this frame: nothing is left to the end of its variables.
            pending.drop()
            raise
        return Published(cache._entered(pending, verdict, outcome), replaced)

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
            leave(self.release, error)
