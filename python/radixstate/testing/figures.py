"""Runs state machines, and counts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test


@dataclass
class Figures:
    """What a fuzzing run came to.

    Attributes:
        examples: caches that lived and died.
        steps: rules that were carried out on them.
        seconds: wall time.
        findings: machines that found something.
    """

    examples: int = 0
    steps: int = 0
    seconds: float = 0.0
    findings: int = 0

    def fuzz(self, machine: type[RuleBasedStateMachine], *, examples: int, seconds: float = 0.0) -> None:
        """Runs rounds of `examples` for so many seconds, one at least.

        Settings are those of hypothesis' current profile. Raises what the machine raised, reduced to the shortest
        sequence of rules that still does.
        """
        counted = self._counted(machine)
        begin = time.monotonic()
        try:
            while True:
                run_state_machine_as_test(counted, settings=settings(max_examples=examples))
                if time.monotonic() - begin >= seconds:
                    return
        except Exception:
            self.findings += 1
            raise
        finally:
            self.seconds += time.monotonic() - begin

    def _counted(self, machine: type[RuleBasedStateMachine]) -> type[RuleBasedStateMachine]:
        figures = self

        class Counted(machine):  # type: ignore[misc, valid-type]  # a base that only the caller knows
            def __init__(self) -> None:
                super().__init__()
                figures.examples += 1

            @invariant()
            def counted(self) -> None:
                figures.steps += 1

        Counted.__name__ = machine.__name__  # the database files examples under the name
        return Counted

    def __str__(self) -> str:
        """One line."""
        rate = self.steps / max(self.seconds, 1e-9)
        return (
            f"fuzz: {self.examples} examples, {self.steps} steps in {self.seconds:.0f} s, "
            f"{rate:.0f} steps/s, {self.findings} findings"
        )
