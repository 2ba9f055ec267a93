"""Whether stored states are finite, which a device says only later. When to wait depends on calls alone.

The core keeps a state that is not known to be finite from being hit, and names its ticket. Here is only what the
device will say of it, so nothing that is lost here can make a state reusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixstate import _native


@dataclass(frozen=True)
class Verdict:
    """On one state of a store: known at once on the CPU, on a device when the store has run."""

    store: Sequence[bool]
    index: int

    @property
    def known(self) -> bool:
        """Whether `is_finite` waits for nothing."""
        return isinstance(self.store, list)

    @property
    def done(self) -> bool:
        """Whether the store has run."""
        return self.known or bool(getattr(self.store, "done", bool)())

    def is_finite(self) -> bool:
        """Waits for the store."""
        return self.store[self.index]


class Proofs:
    """Verdicts that are still to be read, by the checkpoint slot that the core keeps for the state until then.

    Attributes:
        verdicts: without any there is nothing to read, and no need to ask for more than that.
    """

    def __init__(self, native: _native.CacheBase) -> None:
        """Reports to `native`."""
        self._native = native
        self.verdicts: dict[int, Verdict] = {}

    def __bool__(self) -> bool:
        """Whether a verdict is still to be read. Those on what a failed step stored are not."""
        return bool(self.verdicts) and bool(self._native.unproven())

    def expect(self, slot: int, verdict: Verdict) -> None:
        """Remembers what will be said of the state in a slot, before it is published."""
        self.verdicts[slot] = verdict

    def forget(self, slot: int, verdict: Verdict | None) -> None:
        """This verdict is not to be read. The slot may have the next state by now, with a verdict of its own."""
        if self.verdicts.get(slot) is verdict:
            self.verdicts.pop(slot, None)

    def report(self, step: int | None) -> None:
        """Waits for the states that a step wrote, or that belong to none, and tells the core what they are.

        A state whose wait raises, or of which nothing is known, counts as not finite. Repeating it changes nothing.
        """
        for ticket, slot, writer, verdict in self._open():
            if writer == step:
                self._report(ticket, slot, verdict)

    def report_done(self) -> None:
        """Tells the core what is known of states that no open step wrote; waits for nothing."""
        for ticket, slot, writer, verdict in self._open():
            if writer is None and verdict is not None and verdict.done:
                self._report(ticket, slot, verdict)

    def _open(self) -> list[tuple[int, int, int | None, Verdict | None]]:
        """Ticket, slot and writer of each state that is not known to be finite, and what will be said of it."""
        listed = self._native.unproven()
        verdicts = dict(self.verdicts)
        # Another thread may have completed some and stored the next states in their slots. A slot whose ticket is
        # still open had its own verdict just now.
        still = {ticket for ticket, _, _ in self._native.unproven()}
        return [
            (ticket, slot, writer, verdicts.get(slot)) for ticket, slot, writer in listed if ticket in still
        ]

    def _report(self, ticket: int, slot: int, verdict: Verdict | None) -> None:
        finite = False
        try:
            finite = verdict is not None and verdict.is_finite()
        finally:
            self._native.complete(ticket, finite)
            self.forget(slot, verdict)
