"""What owns slots of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from radixstate.errors import CacheError


class Owner:
    """Owns slots, and so exists once: a copy would give them back a second time."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuses `copy` and `pickle`, which both ask this."""
        raise TypeError(f"cannot copy or pickle a {type(self).__name__}: it owns slots of this process")


def leave(end: Callable[[], None], error: BaseException | None) -> None:
    """Ends what a block held. That it cannot, as in a forked child, does not hide why the block failed."""
    try:
        end()
    except CacheError as refused:
        if error is None:
            raise
        error.add_note(f"Nothing was given back: {refused}")
