"""Whether stored states are finite, which a device says only later. When to wait depends on calls alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixstate._native import Stored

MOST_UNREAD = 256
"""Verdicts that are kept before the oldest is waited for; it was then given long ago."""


@dataclass(frozen=True)
class Verdict:
    """On one state of a store: known at once on the CPU, on a device when the store has run."""

    store: Sequence[bool]
    index: int

    @property
    def known(self) -> bool:
        """Whether `is_finite` waits for nothing."""
        return isinstance(self.store, list)

    def is_finite(self) -> bool:
        """Waits for the store."""
        return self.store[self.index]


class Unread:
    """Published checkpoints of which nobody has asked yet whether their state is finite.

    With steps in flight they are asked about when their step retires, else when a lookup would hit something.
    """

    def __init__(self, refuse: Callable[[Stored], None]) -> None:
        """`refuse` withdraws a checkpoint that belongs to no step."""
        self._refuse = refuse
        self._of_step: dict[int, list[tuple[Stored, Verdict]]] = {}
        self._without_step: deque[tuple[Stored, Verdict]] = deque()

    def add(self, stored: Stored, verdict: Verdict) -> None:
        """Remembers to ask about a published checkpoint, unless its verdict is known."""
        if verdict.known:
            return
        if stored.step is not None:
            self._of_step.setdefault(stored.step, []).append((stored, verdict))
            return
        self._without_step.append((stored, verdict))
        if len(self._without_step) > MOST_UNREAD:
            self._settle_oldest()

    def __bool__(self) -> bool:
        """Whether a lookup may hit a checkpoint that nobody has asked about."""
        return bool(self._without_step)

    def settle(self) -> None:
        """Waits for the checkpoints that belong to no step, and withdraws those that are not finite."""
        while self._without_step:
            self._settle_oldest()

    def refused_in(self, step: int) -> list[Stored]:
        """Waits for the checkpoints that a step wrote; those that are not finite."""
        written = self._of_step.get(step, [])
        return [stored for stored, verdict in written if not verdict.is_finite()]

    def forget(self, step: int) -> None:
        """What a step wrote has been dealt with."""
        self._of_step.pop(step, None)

    def _settle_oldest(self) -> None:
        stored, verdict = self._without_step.popleft()
        if not verdict.is_finite():
            self._refuse(stored)
