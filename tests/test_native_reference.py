"""The native cache and the reference make the same calls at random, those that no front makes on a CPU too.

Proofs come late and in any order, steps are retired, cancelled or dropped, and a commit finds what has changed
since its reservation.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from native import make
from radixstate._native import Step
from radixstate.reference import records
from radixstate.reference.cache import ReferenceCache
from radixstate.testing.compare import Refused, attempt, words

PROMPTS = [[0] * end + [1] * (9 - end) for end in (2, 4, 6, 9)] + [[0] * 5, [0] * 13]


def kind(outcome: Any) -> str:
    return str(getattr(outcome, "reason", type(outcome).__name__.removesuffix("Handle").lower()))


class Both:
    """Calls are made on two caches, which must answer the same and then be the same."""

    def __init__(self, seed: int, kv_pages: int) -> None:
        self.random = Random(seed)
        sizes = {"kv_pages": kv_pages, "active_slots": 4, "checkpoint_slots": 4}
        self.native, self.model = make(**sizes), ReferenceCache(page_size=2, checkpoint_stride=4, **sizes)
        self.live: list[tuple[Any, Any]] = []
        self.pending: list[tuple[tuple[Any, Any], Any, Any]] = []  # of which sequence, and what
        self.stored: list[tuple[Any, Any]] = []
        self.steps: list[Step] = []
        self.seen: Counter[str] = Counter()

    def act(self) -> None:
        acts: list[Callable[[], None]] = [self.reserve, self.commit, self.complete] * 2
        self.random.choice([*acts, self.start, self.end, self.begin_step, self.end_step, self.withdraw])()
        self.native.check()
        for pool in ("kv", "active", "checkpoint"):
            assert tuple(self.native.usage(pool).as_dict().values()) == self.model.usage(pool)
        for prompt in PROMPTS:
            assert words(self.native.lookup(prompt)) == words(self.model.lookup(prompt))

    def start(self) -> None:
        prompt = self.random.choice(PROMPTS)
        mine, its = attempt(lambda: self.native.start(prompt)), attempt(lambda: self.model.start(prompt))
        if isinstance(its, records.Running):
            self.native.loaded(mine.sequence)
            self.model.loaded(its)
            self.live.append((mine, its))
        else:
            assert words(mine) == words(its)

    def reserve(self) -> None:
        if self.live:
            started, running = self.random.choice(self.live)
            depth = self.random.randrange(4, len(running.tokens) + 1, 4)
            mine = attempt(lambda: self.native.reserve_checkpoint(started.sequence, depth, started.slot))
            its = attempt(lambda: self.model.reserve_checkpoint(running, depth, running.slots[0]))
            if isinstance(its, Refused):
                assert words(mine) == words(its) == ("misuse", "depth_passed")
                return
            assert kind(mine) == kind(its)
            self.seen[kind(its)] += 1
            self.pending += [((started, running), mine, its)] if isinstance(its, records.Pending) else []

    def commit(self) -> None:
        if self.pending:
            (started, running), *pending = self.pending.pop(self.random.randrange(len(self.pending)))
            proven = self.random.random() < 0.5
            mine = self.native.commit(started.sequence, pending[0], proven=proven)
            its = self.model.commit(running, pending[1], proven=proven)
            assert kind(mine) == kind(its)
            self.seen[kind(its)] += 1
            if isinstance(its, records.Stored):
                assert words(mine) == words(its)
                self.stored.append((mine, its))

    def end(self) -> None:
        if self.live:
            seq = self.live.pop(self.random.randrange(len(self.live)))
            for _, mine, its in [each for each in self.pending if each[0] == seq]:
                self.native.discard(mine)
                self.model.drop(its)
            self.pending = [each for each in self.pending if each[0] != seq]
            self.native.finish(seq[0].sequence)
            self.model.finish(seq[1])

    def begin_step(self) -> None:
        if len(self.steps) < 3:
            self.steps.append(self.native.begin_step())
            assert self.steps[-1] == self.model.begin_step()

    def end_step(self) -> None:
        if self.steps:
            step = self.steps.pop(self.random.randrange(len(self.steps)))
            number, how = step.id, self.random.choice(["retire", "cancel", "drop"])
            refused = self.stored[-1:] if how == "retire" and self.random.random() < 0.3 else []
            if how == "retire":
                self.native.retire_step(step, [mine for mine, _ in refused])
            elif how == "cancel":
                self.native.cancel_step(step)
            del step
            self.model.retire_step(number, [its.serial for _, its in refused], failed=how != "retire")

    def complete(self) -> None:
        some = self.random.randrange(self.model.newest + 2)  # of a step, completed before, or never given
        ticket, finite = self.random.choice([some, *self.model.proofs]), self.random.random() < 0.7
        mine = attempt(lambda: self.native.complete(ticket, finite))
        assert words(mine) == words(attempt(lambda: self.model.complete(ticket, finite)))

    def withdraw(self) -> None:
        how = self.random.choice(["reset", *["kv", "checkpoint", "invalidate", "invalidate"] * 3])
        if how == "reset":
            self.native.reset()
            self.model.reset()
        elif how == "invalidate":
            for mine, its in self.random.sample(self.stored[-5:], k=min(1, len(self.stored))):
                self.native.invalidate(mine)
                self.model.invalidate(its.serial)
        else:
            pool: Any = how
            assert words(self.native.evict(pool, 1)) == words(self.model.evict(pool, 1))


@pytest.mark.parametrize("kv_pages", [0, 24])
def test_the_native_cache_and_the_reference_agree_on_proofs_and_steps(kv_pages: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        both = Both(seed, kv_pages)
        for _ in range(80):
            both.act()
        seen += both.seen
    assert set(seen) == {
        "pending",
        "stored",
        "duplicate",
        "no_room",
        "reset",
        *["not_ready"] * (kv_pages > 0),
    }
