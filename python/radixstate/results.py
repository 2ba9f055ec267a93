"""What storing a state and publishing a prefix came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixstate import _native
from radixstate._native import Stored


@dataclass(frozen=True)
class Skipped:
    """No state was stored. Storing is optional work, so this is no error.

    Attributes:
        reason: `duplicate`: there is one already; `no_room`: no slot is free or evictable; `not_aligned`: the
            state is not one of a legal depth; `not_ready`: another request is still writing pages of this prefix,
            so the same call may succeed once its step has retired; `no_store`: the request asked so; `reset`: the
            request is older than the last reset, or the prefix it shares turned out invalid; `non_finite`: the
            state held an infinity or a NaN.
        wanted: with `no_room`, checkpoint slots wanted.
        free: with `no_room`, checkpoint slots free.
        evictable: with `no_room`, checkpoint slots that could be evicted.
    """

    reason: Literal["duplicate", "no_room", "not_aligned", "not_ready", "no_store", "reset", "non_finite"]
    wanted: int | None = None
    free: int | None = None
    evictable: int | None = None


@dataclass(frozen=True)
class Extended:
    """What sharing pages on a lease came to.

    Attributes:
        skipped: why nothing was taken over; None if the lease has all the tokens now. See `Skipped`.
        replaced: tokens [from, to) whose pages were cached already: the engine frees its own, and uses those of
            the lease in their place. None if there are none. The pages after them belong to the cache.
    """

    skipped: Skipped | None
    replaced: tuple[int, int] | None


@dataclass(frozen=True)
class Published:
    """What publishing on a lease came to.

    Attributes:
        outcome: whether the state is cached. With `duplicate` it was, and the pages are shared as well.
        replaced: as of `Extended`.
    """

    outcome: Stored | Skipped
    replaced: tuple[int, int] | None


def skipped(skip: _native.Skipped) -> Skipped:
    """The front's own class, which callers can make too."""
    return Skipped(skip.reason, skip.wanted, skip.free, skip.evictable)
