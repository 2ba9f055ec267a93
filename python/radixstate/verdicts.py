"""Whether stored states are finite, which a device says only later. When to wait depends on calls alone."""

from __future__ import annotations

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


class Unsettled:
    """Published checkpoints that may still turn out not to be finite.

    Those that a step writes are asked about when it retires, the others when a lookup would hit something. An entry
    goes only after it was acted on, and by its serial: whoever is interrupted, or comes second, does it once more.
    """

    def __init__(self, refuse: Callable[[Stored], None]) -> None:
        """`refuse` withdraws a checkpoint that belongs to no step; repeating it changes nothing."""
        self._refuse = refuse
        self._of_step: dict[int, list[tuple[Stored, Verdict]]] = {}
        self._without_step: dict[int, tuple[Stored, Verdict]] = {}

    def add(self, stored: Stored, verdict: Verdict) -> None:
        """Remembers a published checkpoint, unless its verdict is known and it belongs to no step."""
        if stored.step is not None:
            self._of_step.setdefault(stored.step, []).append((stored, verdict))
        elif not verdict.known:
            self._without_step[stored.serial] = stored, verdict
            for oldest in self._oldest()[:-MOST_UNREAD]:
                self._settle(*oldest)

    def __bool__(self) -> bool:
        """Whether a lookup may hit a checkpoint that nobody has asked about."""
        return bool(self._without_step)

    def settle(self) -> None:
        """Waits for the checkpoints that belong to no step, and withdraws those that are not finite.

        One whose wait raises counts as not finite.
        """
        for stored, verdict in self._oldest():
            self._settle(stored, verdict)

    def stored_in(self, step: int) -> list[Stored]:
        """Everything that a step wrote, unless it was forgotten."""
        return [stored for stored, _ in self._of_step.get(step, [])]

    def refused_in(self, step: int) -> list[Stored]:
        """Waits for the checkpoints that a step wrote; those that are not finite."""
        return [stored for stored, verdict in self._of_step.get(step, []) if not verdict.is_finite()]

    def forget(self, step: int) -> None:
        """What a step wrote has been dealt with."""
        self._of_step.pop(step, None)

    def _oldest(self) -> list[tuple[Stored, Verdict]]:
        """Those that belong to no step, the oldest first. A copy, for another thread may settle them meanwhile."""
        return list(self._without_step.values())

    def _settle(self, stored: Stored, verdict: Verdict) -> None:
        finite = False
        try:
            finite = verdict.is_finite()
        finally:
            if not finite:
                self._refuse(stored)
            self._without_step.pop(stored.serial, None)
