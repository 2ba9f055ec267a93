"""Bugs seeded into the front and into the reference, each of which a state machine must find.

A bug is one piece of one function's source, replaced while the machine runs. Those in the reference stand for bugs
of the native core: either way the two no longer agree. The machine has a fixed seed and the settings of CI, and most
bugs are found within a second. One that no longer is asks for a machine that does more of what would show it.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from radixstate import ActivePool, Lease, PrefixCache, Sequence
from radixstate.reference.cache import ReferenceCache
from radixstate.testing import CacheMachine, Disagreement, EngineMachine, SchedulerMachine

EXAMPLES = 450  # three rounds of `test_stateful.py` in CI, for what needs luck


@dataclass(frozen=True)
class Mutant:
    """`old` in the source of `owner.function` becomes `new`, and `machine` must find it."""

    owner: type
    function: str
    old: str
    new: str
    machine: type[CacheMachine] = SchedulerMachine

    def build(self) -> Any:
        """The function as the class would have it; refuses an `old` that is not there exactly once."""
        original = inspect.getattr_static(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(getattr(original, "fget", original)))
        assert source.count(self.old) == 1, (
            f"{self.owner.__name__}.{self.function} has no single {self.old!r}"
        )
        made: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), vars(sys.modules[self.owner.__module__]), made)
        return made[self.function]


REQUIRE = "self._cache.active.require(source)\n    "
RESERVE = "pending = self._cache._reserve(lambda: native.reserve(self._handle, tokens))\n    "
CHECK = "native.can_publish(self._handle, tokens, pages)\n    "
DUE = "if back.ticket <= self.watermark]\n    "
LATER = "self.returns = [back for back in self.returns if back.ticket > self.watermark]"
FILL = "type('Codec', (), {{'fill': lambda _, source, slot: ({})}})()"

FRONT = {
    "slot 1 is not cleared": Mutant(
        PrefixCache,
        "start",
        "self._transfer.codec",
        FILL.format("(source is not None or slot > 1) and self._transfer.codec.fill(source, slot)"),
    ),
    "another slot is encoded": Mutant(
        PrefixCache,
        "_encode",
        "store(pairs)",
        "store([(max(1, a - 1), b) for a, b in pairs])",
    ),
    "a state is stored in another slot": Mutant(
        PrefixCache,
        "_encode",
        "store(pairs)",
        "store([(a, b % self.checkpoints.slots + 1) for a, b in pairs])",
    ),
    "the neighbour of a slot is cleared too": Mutant(
        PrefixCache,
        "start",
        "self._transfer.codec",
        FILL.format(
            "self._transfer.codec.fill(source, slot), self.active.clear(slot % self.active.slots + 1)"
        ),
    ),
    "a state that is not finite is published": Mutant(
        PrefixCache, "_commit", "not verdict.is_finite()", "verdict.is_finite() is None"
    ),
    "a retiring step forgets what it was told to refuse": Mutant(
        PrefixCache, "retire_step", "known.extend(invalid)", "pass"
    ),
    "a step that failed keeps its states": Mutant(PrefixCache, "retire_step", "if failed:", "if False:"),
    "a block that raises ends as one that does not": Mutant(
        PrefixCache, "step", "failed=True", "failed=False"
    ),
    "a slot is not cleared for a batch": Mutant(
        PrefixCache, "_begin", "if it.load_from is None:", "if it.load_from is None and it.slot > 1:"
    ),
    "a start forgets its namespace": Mutant(
        PrefixCache, "start", "tokens,\n        namespace,", "tokens,\n        None,"
    ),
    "shrink does nothing": Mutant(Sequence, "shrink", "_native.shrink(", "_native.length("),
    "pages come in reverse": Mutant(Sequence, "pages", "pages(self._handle)", "pages(self._handle)[::-1]"),
    "only the first start of a batch is reported loaded": Mutant(
        PrefixCache,
        "_begin",
        "for it in started:\n        self._native.loaded(",
        "for it in started[:1]:\n        self._native.loaded(",
    ),
    "only the first state of a batch is loaded": Mutant(
        PrefixCache, "_begin", "self._transfer.load(hits)", "self._transfer.load(hits[:1])"
    ),
    "an engine's slot is checked after an eviction": Mutant(
        Lease, "publish", REQUIRE + CHECK + RESERVE, CHECK + RESERVE + REQUIRE, EngineMachine
    ),
    "a loaded lease keeps its state pinned": Mutant(
        Lease, "loaded", "lease_loaded", "lease_depth", EngineMachine
    ),
    "a batch evicts before its last misuse is found": Mutant(
        PrefixCache, "checkpoint_many", "self._can_checkpoint(states)", "pass"
    ),
    "a batch takes two depths from one slot": Mutant(
        PrefixCache, "_can_checkpoint", "if depth != other:", "if False:"
    ),
    "a further slot of a start is not poisoned": Mutant(
        PrefixCache, "_poison_further", "self.active.poison(slot)", "pass"
    ),
    "a start takes no further slot": Mutant(PrefixCache, "start", "slots=slots", "slots=min(slots, 1)"),
    "a slot that was given back stays": Mutant(
        Sequence, "give_back_slot", "self._cache._native.give_back_slot(self._handle, slot)", "pass"
    ),
    "a further slot is not poisoned": Mutant(
        Sequence, "take_slot", "self._cache.active.poison(slot)", "pass"
    ),
    "a further slot gives its state twice": Mutant(
        PrefixCache, "_spend", "self.active.spend(source)", "pass"
    ),
    "clearing forgets the windows": Mutant(ActivePool, "clear", "self.rows.values()", "[self.rows['state']]"),
}

REFERENCE = {
    "a whole prompt may be reused": Mutant(
        ReferenceCache,
        "lookup",
        "prompt.depth - 1 if max_length is None else min(prompt.depth - 1, max_length)",
        "prompt.depth if max_length is None else min(prompt.depth, max_length)",
    ),
    "the most recent is evicted": Mutant(ReferenceCache, "_victim", "min(idle", "max(idle"),
    "what is given back waits for no step": Mutant(
        ReferenceCache, "_settle", DUE + LATER, "]\n    self.returns = []"
    ),
    "the watermark is one too new": Mutant(ReferenceCache, "watermark", ") - 1", ")"),
    "a state is ready with the oldest step": Mutant(
        ReferenceCache, "_attach", "max([*self.outstanding", "min([*self.outstanding"
    ),
    "every state counts as encoded once": Mutant(
        ReferenceCache, "_attach", "pending.owner.encodings + 1", "1"
    ),
    "a branch is told where a state is": Mutant(
        ReferenceCache, "lookup", " and prompt.cut(wished) not in self.states", ""
    ),
    "replaced pages are not given back": Mutant(
        ReferenceCache, "commit", 'self._give_back({"kv": published.duplicates})', "pass"
    ),
    "a state is evicted while it is loaded": Mutant(
        ReferenceCache, "is_busy", " or state in self.readers", "", EngineMachine
    ),
    "one page too many is evicted": Mutant(
        ReferenceCache, "_take_pages", "n - use.free)", "n - use.free + 1)"
    ),
    "a hit refreshes nothing": Mutant(
        ReferenceCache, "_consume", "match.state.stamp = next(self._stamps)", "pass"
    ),
    "a lease stays behind after a duplicate": Mutant(
        ReferenceCache,
        "_publish",
        "if target.depth > start:",
        "if target.depth > start and target not in self.states:",
    ),
    "a lease that was not loaded keeps its state pinned": Mutant(
        ReferenceCache, "release", "reader=lease.state, ", "", EngineMachine
    ),
    "what stands on the pages of a refused state stays": Mutant(
        ReferenceCache, "invalidate", "if found and", "if False and", EngineMachine
    ),
    "a step that failed has written its states": Mutant(
        ReferenceCache, "retire_step", "if failed else ()", "if False else ()"
    ),
    "pages are shared while another writes them": Mutant(
        ReferenceCache, "_barred", "not any(map(self.is_unproven, shared))", "True"
    ),
    "a request waits for the pages that it wrote itself": Mutant(
        ReferenceCache, "_barred", "self._page_ends(lease.prefix.depth, ", "self._page_ends(0, "
    ),
    "a duplicate that is not ready counts as none": Mutant(
        ReferenceCache, "_barred", '"duplicate" if target in self.states else "not_ready"', '"not_ready"'
    ),
    "a reset frees late": Mutant(ReferenceCache, "reset", "self._settle()", "pass"),
    "too many slots for the pool are called busy": Mutant(
        ReferenceCache, "take_slot", "len(seq.slots) == active.capacity", "active.capacity == 0"
    ),
    "a start has room for its first slot alone": Mutant(
        ReferenceCache, "start", "self._must_be_spare(slots)", "self._must_be_spare(min(slots, 1))"
    ),
    "more slots than the pool has are called busy": Mutant(
        ReferenceCache, "start", "len(tokens)), slots)", "len(tokens)))"
    ),
    "the running slot can be given back": Mutant(
        ReferenceCache, "give_back_slot", "if slot == seq.slots[0]:", "if False:"
    ),
    "a slot that is given back waits for no step": Mutant(
        ReferenceCache,
        "give_back_slot",
        'self._give_back({"active": [slot]})',
        'self.pools["active"].give([slot])',
    ),
    "a slot that is taken again is as deep as before": Mutant(
        ReferenceCache, "give_back_slot", "seq.reached.pop(slot, None)", "pass"
    ),
    "a state goes back to what was stored before": Mutant(
        ReferenceCache, "reserve_checkpoint", "seq.reached[source] = depth", "pass"
    ),
    "a state goes back above what was reused": Mutant(
        ReferenceCache, "can_checkpoint", "max(seq.matched.length, ", "max(0, "
    ),
    "a lease publishes past a state that it never loaded": Mutant(
        ReferenceCache, "_must_be_loaded", "if lease.state and", "if False and", EngineMachine
    ),
    "states are evicted for pages that do not exist": Mutant(
        ReferenceCache, "_victim", "if evictable and self", "if self"
    ),
}

MUTANTS = FRONT | REFERENCE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.owner, mutant.function, mutant.build())
    once = settings(max_examples=EXAMPLES, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises(Disagreement):
        run_state_machine_as_test(mutant.machine, settings=once)
