"""Comes between the lines of a call of the front, as a signal or another thread may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import radixstate

FRONT = str(Path(radixstate.__file__).parent)


class Interrupted(KeyboardInterrupt):
    """What this module raises, told from what a developer types."""


def _raise() -> NoReturn:
    raise Interrupted


def interrupt(call: Callable[[], object], place: int, act: Callable[[], object] = _raise) -> bool:
    """Makes a call, and interrupts it at one place: by an exception, or by something else that is called there.

    Args:
        call: what to interrupt.
        place: counted from 0: before each line of the front, and before a function of it hands over its result.
        act: what happens there.

    Returns:
        Whether the call has so many places. An exception has then ended it, and its frames are gone.
    """
    left = place

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FRONT):
            return None
        if event in {"line", "return"}:
            left -= 1
            if left == -1:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return left < 0
