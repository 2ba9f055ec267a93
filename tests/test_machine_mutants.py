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
from radixstate import EngineCache, Lease, PrefixCache, Sequence
from radixstate.base import CacheBase
from radixstate.reference.base import ReferenceBase
from radixstate.reference.books import Books
from radixstate.reference.cache import ReferenceCache
from radixstate.reference.engine import ReferenceEngineCache
from radixstate.reference.records import Pool
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


REQUIRE = "source = self._cache._require(self, source)\n    "
RESERVE = "pending = self._reserve(partial(native.reserve, self._handle, tokens, pages))\n    "
PAST = "if len(tokens) > depth:\n        "
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
        CacheBase,
        "_encode",
        "store(pairs)",
        "store([(max(1, a - 1), b) for a, b in pairs])",
    ),
    "a state is stored in another slot": Mutant(
        CacheBase,
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
        CacheBase, "_may_enter", "return verdict.is_finite()", "return True"
    ),
    "a retiring step forgets what it was told to refuse": Mutant(
        CacheBase, "retire_step", "known.extend(invalid)", "pass"
    ),
    "a step that failed keeps its states": Mutant(CacheBase, "retire_step", "if failed:", "if False:"),
    "a block that raises ends as one that does not": Mutant(CacheBase, "step", "failed=True", "failed=False"),
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
        Lease, "publish", REQUIRE + RESERVE, RESERVE + REQUIRE, EngineMachine
    ),
    "a loaded lease keeps its state pinned": Mutant(
        Lease, "loaded", "lease_loaded", "lease_depth", EngineMachine
    ),
    "a further slot of a start is not poisoned": Mutant(
        PrefixCache, "_poison_further", "self.active.poison(slot)", "pass"
    ),
    "a start takes no further slot": Mutant(
        PrefixCache, "start", "slots,\n        self._transfer", "min(slots, 1),\n        self._transfer"
    ),
    "a slot that was given back stays": Mutant(
        Sequence, "give_back_slot", "self._cache._native.give_back_slot(self._handle, slot)", "pass"
    ),
    "a further slot is not poisoned": Mutant(
        Sequence, "take_slot", "self._cache.active.poison(slot)", "pass"
    ),
    "a further slot gives its state twice": Mutant(
        PrefixCache, "_spend", "self.active.spend(source)", "pass"
    ),
    "a slot that a lease takes is not poisoned": Mutant(
        Lease, "take_slot", "self._cache.active.poison(slot)", "pass", EngineMachine
    ),
    "a lease may use the slots of another": Mutant(
        EngineCache, "_require", "slot not in lease.slots", "False", EngineMachine
    ),
    "pages are not exchanged for those of a duplicate": Mutant(
        Lease, "publish", 'if pending.reason != "duplicate":', "if True:", EngineMachine
    ),
    "an attach past the lease evicts before it is refused": Mutant(
        Lease, "attach", PAST, "if False:\n        ", EngineMachine
    ),
    "an engine is not told which pages were replaced": Mutant(
        Lease, "extend", "made.replaced)", "None)", EngineMachine
    ),
    "a hand-over of pages is not told which were replaced": Mutant(
        Lease, "_store", "outcome), replaced)", "outcome), None)", EngineMachine
    ),
    "freed pages are written and not counted": Mutant(
        EngineCache,
        "copy_freed",
        "return self._native.copy_freed(out)",
        "return self._native.copy_freed(out) * 0",
        EngineMachine,
    ),
}

REFERENCE = {
    "a whole prompt may be reused": Mutant(
        ReferenceBase, "lookup", "(prompt, prompt.depth - 1)", "(prompt, prompt.depth)"
    ),
    "a whole lookup leaves the last token": Mutant(
        ReferenceBase, "lookup", "(prompt, prompt.depth)", "(prompt, prompt.depth - 1)"
    ),
    "pages past the longest match asked for are told": Mutant(
        ReferenceBase, "lookup", "kv_length=min(found.kv_length, ", "kv_length=max(found.kv_length, "
    ),
    "a touch renews nothing": Mutant(
        ReferenceBase, "touch", "found.state.stamp = next(self._stamps)", "pass"
    ),
    "a forked lease has the state to load": Mutant(
        ReferenceBase, "fork_lease", "lease.prefix, None,", "lease.prefix, lease.state,", EngineMachine
    ),
    "the most recent is evicted": Mutant(ReferenceBase, "_victim", "min(idle", "max(idle"),
    "what is given back waits for no step": Mutant(
        ReferenceBase, "_settle", DUE + LATER, "]\n    self.returns = []"
    ),
    "the watermark is one too new": Mutant(Books, "watermark", ") - 1", ")"),
    "a state is ready with the oldest step": Mutant(
        Books, "newest_open", "max([*self.outstanding", "min([*self.outstanding"
    ),
    "every state counts as encoded once": Mutant(ReferenceBase, "_store", "pending.owner.encodings + 1", "1"),
    "a branch is told where a state is": Mutant(
        ReferenceBase, "_find", " and prompt.cut(wished) not in self.states", ""
    ),
    "replaced pages are not given back": Mutant(
        ReferenceCache, "commit", 'self._give_back({"kv": duplicates})', "pass"
    ),
    "a state is evicted while it is loaded": Mutant(
        Books, "is_busy", " or state in self.readers", "", EngineMachine
    ),
    "one page too many is evicted": Mutant(
        ReferenceCache, "_take_pages", "n - use.free)", "n - use.free + 1)"
    ),
    "a hit refreshes nothing": Mutant(
        ReferenceBase, "_consume", "match.state.stamp = next(self._stamps)", "pass"
    ),
    "a lease stays behind after a duplicate": Mutant(
        ReferenceBase,
        "_place",
        "if target.depth > lease.prefix.depth:",
        "if target.depth > lease.prefix.depth and target not in self.states:",
    ),
    "a lease that was not loaded keeps its state pinned": Mutant(
        ReferenceBase, "release", "reader=lease.state, ", "", EngineMachine
    ),
    "what stands on the pages of a refused state stays": Mutant(
        ReferenceBase, "invalidate", "if (found or shared) and", "if False and", EngineMachine
    ),
    "a step that failed has written its states": Mutant(
        ReferenceBase, "retire_step", "if failed else ()", "if False else ()"
    ),
    "pages are shared while another writes them": Mutant(
        ReferenceBase, "_is_being_written", "any(map(self.is_unproven, shared))", "False"
    ),
    "a request waits for the pages that it wrote itself": Mutant(
        ReferenceBase, "_is_being_written", "self._page_ends(lease.prefix.depth, ", "self._page_ends(0, "
    ),
    "a duplicate that is not ready counts as none": Mutant(
        ReferenceBase, "_barred", '"duplicate" if target in self.states else "not_ready"', '"not_ready"'
    ),
    "a reset frees late": Mutant(ReferenceBase, "reset", "self._settle()", "pass"),
    "too many slots for the pool are called busy": Mutant(
        ReferenceBase, "_take_slot", "len(slots) == active.capacity", "active.capacity == 0"
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
        ReferenceCache, "_must_hold", "max(seq.matched.length, ", "max(0, "
    ),
    "a lease publishes past a state that it never loaded": Mutant(
        ReferenceEngineCache, "_must_go_on", "if lease.state and", "if False and", EngineMachine
    ),
    "a batch evicts before its last misuse is found": Mutant(
        ReferenceCache,
        "reserve_checkpoints",
        "self._must_hold(seq, depth, source)\n",
        "self.reserve_checkpoint(seq, depth, source)\n",
    ),
    "a batch takes two depths from one slot": Mutant(
        ReferenceCache, "reserve_checkpoints", "depths.setdefault(source, depth) != depth", "False"
    ),
    "numbers are given again before the engine took them back": Mutant(
        Pool, "give", 'self.owner == "cache"', 'self.owner != "engine"', EngineMachine
    ),
    "numbers that were taken back are lost": Mutant(
        Pool, "take_freed", "self.hand_back(told)", "pass", EngineMachine
    ),
    "the numbers of replaced pages are lost": Mutant(
        ReferenceEngineCache, "extend", 'self.pools["kv"].hand_back(duplicates)', "pass", EngineMachine
    ),
    "pages of an extend are shared while their step is in flight": Mutant(
        ReferenceEngineCache, "extend", "if self.newest_open and", "if False and", EngineMachine
    ),
    "a step that failed has written the pages it shared": Mutant(
        ReferenceBase, "invalidate", "(found or shared)", "found", EngineMachine
    ),
    "an extend shares before a reset": Mutant(
        ReferenceEngineCache, "extend", "if self._is_old(target):", "if False:", EngineMachine
    ),
    "an attach stores past the lease": Mutant(
        ReferenceEngineCache,
        "must_be_leased",
        "if len(tokens) > lease.prefix.depth:",
        "if False:",
        EngineMachine,
    ),
    "an extend cuts a page": Mutant(
        ReferenceEngineCache,
        "_must_be_whole_pages",
        "if len(tokens) % self.page_size:",
        "if False:",
        EngineMachine,
    ),
    "more pages are numbered than there are": Mutant(
        ReferenceEngineCache, "_must_be_adoptable", "n > len(kv.free)", "False", EngineMachine
    ),
    "pages that are cached may be handed over": Mutant(
        ReferenceEngineCache, "_must_be_adoptable", "p in known or ", "", EngineMachine
    ),
    "a lease ends and keeps its slots": Mutant(
        ReferenceBase, "release", '{"active": slots}', "{}", EngineMachine
    ),
    "a slot that a lease gives back waits for no step": Mutant(
        ReferenceEngineCache,
        "give_back_slot",
        'self._give_back({"active": [slot]})',
        'self.pools["active"].give([slot])',
        EngineMachine,
    ),
    "states are evicted for pages that do not exist": Mutant(
        ReferenceBase, "_victim", "if evictable and self", "if self"
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
