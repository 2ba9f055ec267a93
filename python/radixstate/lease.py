"""A prefix that an engine with allocators of its own has pinned."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from radixstate import _native
from radixstate._native import Match
from radixstate.errors import AlreadyLoadedError
from radixstate.owner import Owner, leave
from radixstate.results import Published, skipped
from radixstate.tokens import Tokens, sized

if TYPE_CHECKING:
    from radixstate.cache import PrefixCache
    from radixstate.tokens import PageRow


class Lease(Owner):
    """What a lookup found, pinned, for an engine that allocates KV pages and active slots itself.

    A context manager; leaving it releases the lease, and so does dropping it.

    Attributes:
        match: what was found.
    """

    def __init__(self, cache: PrefixCache, match: Match) -> None:
        """Made by `PrefixCache.lease`."""
        self._cache = cache
        self._handle = cache._native.lease(match)
        self.match = match

    def __repr__(self) -> str:
        """Its depth, or that it has ended."""
        if self._handle.used:
            return "Lease(ended)"
        return f"Lease(depth={self._cache._native.lease_depth(self._handle)})"

    @property
    def pages(self) -> list[int]:
        """KV pages of the leased prefix. The lease moves deeper when more is published."""
        return self._cache._native.lease_pages(self._handle)

    def copy_pages(self, out: PageRow) -> int:
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
        """Makes an engine's active slot hold the matched state, or the empty one; ends the pin on that state.

        Raises:
            SlotError: `slot` is no active slot.
            AlreadyLoadedError: the pin has ended, and the state may be gone.
        """
        state = self.state
        if state is None and self.match.length:
            raise AlreadyLoadedError(f"this lease's state at depth {self.match.length} was loaded before")
        self._cache._fill(state, slot)
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
            NotLoadedError: they go past the leased prefix, whose state was not loaded.
            PrefixMismatchError: the tokens do not go on from the leased prefix.
            LengthMismatchError: the pages are not those of the tokens past the leased prefix.
            PageOwnershipError: a page is out of range or cached already.
        """
        native = self._cache._native
        tokens, pages = sized(tokens), list(pages)
        self._cache.active.require(source)
        native.can_publish(self._handle, tokens, pages)
        pending = self._cache._reserve(lambda: native.reserve(self._handle, tokens))
        if isinstance(pending, _native.Skipped):
            return Published(skipped(pending), pages, [])
        try:
            (verdict,) = self._cache._encode([(source, pending.slot)])
            if verdict.known and not verdict.is_finite():
                return Published(skipped(native.discard(pending)), pages, [])
            if not verdict.known:
                self._cache._proofs.expect(pending.slot, verdict)
            made = native.publish(self._handle, tokens, pages, pending, proven=verdict.known)
        except BaseException:
            pending.drop()
            raise
        outcome = self._cache._published(pending, verdict, made.outcome)
        return Published(outcome, made.canonical, made.duplicates)

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
