"""A running request."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from radixstate._native import Stored
from radixstate.owner import Owner, leave
from radixstate.results import Skipped
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate._native import Match, Started
    from radixstate.cache import PrefixCache
    from radixstate.tokens import PageRow


class Sequence(Owner):
    """A running request: its active slot, its pages and its pin on what it reuses.

    A context manager: leaving it finishes the request, or aborts it on an exception. Dropping it also gives
    everything back. Used afterwards it raises UseAfterFinishError.
    """

    __slots__ = ("__weakref__", "_cache", "_handle", "_started")

    def __init__(self, cache: PrefixCache, started: Started) -> None:
        """Made by `PrefixCache.start`."""
        self._cache = cache
        self._started = started
        self._handle = started.sequence

    def __repr__(self) -> str:
        """Its slot and what it reuses, or that it has ended."""
        if self._handle.used:
            return "Sequence(ended)"
        return f"Sequence(slot={self._started.slot}, reused={self.match.length})"

    @property
    def match(self) -> Match:
        """What was found for the prompt.

        `match.length` tokens were reused. `match.reason` says why not more: `hit`, `no_prefix`, `no_state`, `unaligned`
        or `not_ready`. At depth `match.branch` (or None) a checkpoint would have helped; `pieces` cuts there.
        """
        return self._started.match

    @property
    def slot(self) -> int:
        """The active slot that holds the running state."""
        return self._cache._native.slot(self._handle)

    @property
    def slots(self) -> list[int]:
        """All active slots: `slot`, then the further ones."""
        return self._cache._native.slots(self._handle)

    @property
    def reused(self) -> int:
        """Tokens whose pages and state were taken from the cache: compute from here on."""
        return self._cache._native.reused(self._handle)

    @property
    def pages(self) -> list[int]:
        """KV pages in the order of the tokens. Read again after a checkpoint, which may replace some."""
        return self._cache._native.pages(self._handle)

    def copy_pages(self, out: PageRow) -> int:
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

    def pieces(self, chunk: int | None = None) -> list[tuple[int, int, bool]]:
        """Cuts what is left of the prompt where a stored state helps later prompts.

        That is at the fork where another prompt is known to leave this one, and at the deepest depth at which this
        very prompt can be continued when it comes again.

        Args:
            chunk: tokens of the longest piece; by default there is no limit.

        Returns:
            (begin, end, keep) for each piece, from the reused tokens on: compute positions begin..end, then, with
            `keep`, store the state by `checkpoint(end)`.

        Raises:
            ConfigError: a chunk of 0.
        """
        return self._cache._native.pieces(self._handle, chunk)

    def grow(self, n: int) -> None:
        """Claims pages for `n` more tokens, not yet known.

        `start` claimed the prompt alone: the first sampled token needs `grow(1)` as every other does.

        Raises:
            OutOfSlotsError: the KV pool is short just now; nothing changed.
            NeverFitsError: more than all pages are needed.
        """
        self._cache._with_room(self._cache._native.grow, self._handle, n)

    def append(self, tokens: Tokens) -> None:
        """Fills claimed positions.

        Raises:
            NotClaimedError: there are more tokens than claimed positions.
        """
        self._cache._native.append(self._handle, tokens)

    def shrink(self) -> None:
        """Gives back the pages past the known tokens, as after a rejected draft.

        The running state is not taken back: if it has consumed tokens that were rejected, load or compute it
        again before the next checkpoint. The cache cannot tell, and would store it for the wrong tokens.
        """
        self._cache._native.shrink(self._handle)

    def take_slot(self) -> int:
        """One more active slot, for a kernel that writes a state on the way.

        It is filled with NaN, and again after each checkpoint from it, so that a checkpoint taken before a kernel
        wrote the slot is refused as not finite.

        Raises:
            OutOfSlotsError: none is free.
            NeverFitsError: the sequence has all there are.
        """
        native, before = self._cache._native, self.slots
        try:
            slot = native.take_slot(self._handle)
            self._cache.active.poison(slot)
        except BaseException:
            # An interrupt may have come before the number of the slot was known here.
            for taken in native.slots(self._handle)[len(before) :]:
                native.give_back_slot(self._handle, taken)
            raise
        return slot

    def give_back_slot(self, slot: int) -> None:
        """Gives back a slot from `take_slot` or `start(slots=...)`, once the steps in flight have retired.

        Raises:
            RunningSlotError: `slot` is the one that the sequence runs in.
            NotYourSlotError: `slot` is no slot of this sequence.
        """
        self._cache._native.give_back_slot(self._handle, slot)

    def checkpoint(self, depth: int | None = None, *, source: int | None = None) -> Stored | Skipped:
        """Caches the state that an active slot holds. Optional work: want of room is a result, not an error.

        Args:
            depth: tokens the state was computed from; by default all known ones. If their number is not legal
                that is skipped as `not_aligned`: the slot does not hold the state of a legal depth.
            source: one of the sequence's slots; by default `slot`. A slot from `take_slot` gives its state once.

        Raises:
            UnalignedError: `depth` is not legal, see `PrefixCache.legal_depth`.
            DepthPastEndError: `depth` is beyond the known tokens.
            DepthPassedError: `depth` is less than the sequence reused, or than `source` was named for before: a
                state only goes deeper.
            NotYourSlotError: `source` is no slot of this sequence.
        """
        if depth is None:
            depth = self.length
            if depth != self._cache.legal_depth(depth):
                return Skipped("not_aligned")
        return self._cache._checkpoint(self, depth, self._started.slot if source is None else source)

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
        if self._handle.used:
            return
        if error is None:
            self._cache._native.finish(self._handle)
        else:
            leave(self.abort, error)
