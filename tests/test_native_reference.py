"""The native cache and the reference make the same calls at random, those that no front makes on a CPU too.

Proofs come late and in any order, steps are retired, cancelled or dropped, and a commit finds what has changed
since its reservation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import pytest
from native import make
from radixstate import _native
from radixstate._native import Step, Stored
from radixstate.reference import records
from radixstate.reference.cache import ReferenceCache
from radixstate.testing.compare import Refused, attempt, words

POOLS: tuple[Literal["kv", "active", "checkpoint"], ...] = ("kv", "active", "checkpoint")
PROMPTS = [[0] * end + [1] * (9 - end) for end in (2, 4, 6, 9)] + [[0] * 5, [0] * 13]
REASONS = {"stored", "duplicate", "no_room", "not_ready", "reset"}


def said(answer: Any) -> Any:
    if isinstance(answer, _native.Skipped):
        return "skipped", answer.reason, answer.wanted, answer.free, answer.evictable
    if isinstance(answer, _native.PendingHandle | records.Pending):
        return "pending", answer.depth
    if isinstance(answer, _native.Started | records.Running):
        return words(answer.match if isinstance(answer, _native.Started) else answer.matched)
    return words(answer)


class Both:
    """Calls are made on two caches, which must answer the same and then be the same."""

    def __init__(self, seed: int, kv_pages: int) -> None:
        self.random = Random(seed)
        sizes = {"kv_pages": kv_pages, "active_slots": 4, "checkpoint_slots": 4}
        self.native = make(**sizes)
        self.model = ReferenceCache(page_size=2, checkpoint_stride=4, **sizes)
        self.live: list[tuple[Any, Any]] = []
        self.pending: list[tuple[tuple[Any, Any], tuple[Any, Any]]] = []  # of which sequence, and what
        self.stored: list[tuple[Any, Any]] = []
        self.steps: list[Step] = []
        self.seen: Counter[str] = Counter()

    def call(self, native: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """What both have answered; none if they have refused."""
        answers = attempt(native), attempt(model)
        assert said(answers[0]) == said(answers[1])
        return None if isinstance(answers[0], Refused) else answers

    def act(self) -> None:
        acts = [self.start, self.reserve, self.reserve, self.commit, self.commit, self.end, self.begin_step]
        self.random.choice([*acts, self.end_step, self.complete, self.complete, self.withdraw])()
        self.native.check()
        for pool in POOLS:
            assert tuple(self.native.usage(pool).as_dict().values()) == self.model.usage(pool)
        for prompt in PROMPTS:
            assert words(self.native.lookup(prompt)) == words(self.model.lookup(prompt))

    def start(self) -> None:
        prompt = self.random.choice(PROMPTS)
        made = self.call(lambda: self.native.start(prompt), lambda: self.model.start(prompt))
        if made:
            self.native.loaded(made[0].sequence)
            self.model.loaded(made[1])
            self.live.append(made)

    def reserve(self) -> None:
        if not self.live:
            return
        seq = started, running = self.random.choice(self.live)
        depth = self.random.randrange(4, len(running.tokens) + 1, 4)
        made = self.call(
            lambda: self.native.reserve_checkpoint(started.sequence, depth, started.slot),
            lambda: self.model.reserve_checkpoint(running, depth, running.slots[0]),
        )
        assert made
        if isinstance(made[1], records.Pending):
            self.pending.append((seq, made))
        else:
            self.seen[made[1].reason] += 1

    def commit(self) -> None:
        if not self.pending:
            return
        (started, running), (mine, its) = self.pending.pop(self.random.randrange(len(self.pending)))
        proven = self.random.random() < 0.5
        made = self.call(
            lambda: self.native.commit(started.sequence, mine, proven=proven),
            lambda: self.model.commit(running, its, proven=proven),
        )
        assert made
        self.stored += [made] if isinstance(made[0], Stored) else []
        self.seen["stored" if isinstance(made[0], Stored) else made[0].reason] += 1

    def end(self) -> None:
        if self.live:
            seq = self.live.pop(self.random.randrange(len(self.live)))
            for _, (mine, its) in [each for each in self.pending if each[0] is seq]:
                self.native.discard(mine)
                self.model.drop(its)
            self.pending = [each for each in self.pending if each[0] is not seq]
            self.native.finish(seq[0].sequence)
            self.model.finish(seq[1])

    def begin_step(self) -> None:
        if len(self.steps) < 3:
            self.steps.append(self.native.begin_step())
            assert self.steps[-1] == self.model.begin_step()

    def end_step(self) -> None:
        if not self.steps:
            return
        step = self.steps.pop(self.random.randrange(len(self.steps)))
        number, how = step.id, self.random.choice(["retire", "refuse", "cancel", "drop"])
        refused = [self.random.choice(self.stored)] if how == "refuse" and self.stored else []
        if how == "cancel":
            self.native.cancel_step(step)
        elif how != "drop":
            self.native.retire_step(step, [mine for mine, _ in refused])
        del step
        self.model.retire_step(number, [its.serial for _, its in refused], failed=how in ("cancel", "drop"))

    def complete(self) -> None:
        ticket, finite = self.random.randrange(self.model.newest + 2), self.random.random() < 0.7
        open_ones = [*self.model.proofs] or [ticket]
        ticket = self.random.choice([ticket, *open_ones * 3])
        self.call(lambda: self.native.complete(ticket, finite), lambda: self.model.complete(ticket, finite))

    def withdraw(self) -> None:
        how = self.random.choice(["refuse", "refuse", "kv", "checkpoint", "checkpoint", "reset"])
        if how == "reset" and self.random.random() < 0.3:
            self.native.reset()
            self.model.reset()
        elif how in POOLS:
            self.call(lambda: self.native.evict(how, 1), lambda: self.model.evict(how, 1))
        elif self.stored:
            mine, its = self.random.choice(self.stored)
            self.native.refuse(mine)
            self.model.refuse(its.serial)


@pytest.mark.parametrize("kv_pages", [0, 24])
def test_the_native_cache_and_the_reference_agree_on_proofs_and_steps(kv_pages: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        both = Both(seed, kv_pages)
        for _ in range(80):
            both.act()
        seen += both.seen
    never = REASONS - set(seen) - ({"not_ready"} if kv_pages == 0 else set())
    assert not never, f"no call came to {never}: {seen}"
    assert kv_pages or "not_ready" not in seen, "states without pages wait for nobody's"
