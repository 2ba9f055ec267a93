"""The native cache of an engine and the reference make the same calls at random, also those that no front makes.

Proofs come late, a reservation is used after others have shared, and leases end while what they brought is being
written.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from radixstate._native import EngineCache, Step
from radixstate.reference import records
from radixstate.reference.engine import ReferenceEngineCache
from radixstate.testing.compare import Refused, attempt, words

PROMPTS = [[0] * end + [1] * (13 - end) for end in (2, 4, 6, 9, 13)]


def kind(outcome: Any) -> str:
    return str(getattr(outcome, "reason", type(outcome).__name__.removesuffix("Handle").lower()))


class Both:
    """Calls are made on two caches, which must answer the same and then be the same."""

    def __init__(self, seed: int, logical: bool, kv_pages: int) -> None:
        self.random = Random(seed)
        sizes: dict[str, Any] = {
            "page_size": 2,
            "checkpoint_stride": 4,
            "kv_pages": kv_pages,
            "checkpoint_slots": 4,
        }
        self.native = EngineCache(**sizes, logical=logical)
        self.model = ReferenceEngineCache(**sizes, owner="logical" if logical else "engine")
        self.names_pages = kv_pages > 0 and not logical
        self.free = list(range(1, kv_pages + 1))
        self.leases: list[tuple[Any, records.Lease, list[int]]] = []
        self.pending: list[
            tuple[Any, Any, Any, list[int]]
        ] = []  # of which lease, each cache's, and its tokens
        self.stored: list[tuple[Any, Any]] = []
        self.steps: list[Step] = []
        self.seen: Counter[str] = Counter()

    def act(self) -> None:
        acts: list[Callable[[], None]] = [self.extend, self.reserve, self.enter, self.lease] * 2
        others = [self.end, self.begin_step, self.end_step, self.complete, self.take_freed, self.withdraw]
        self.random.choice([*acts, *others])()
        self.native.check(self.free if self.names_pages else None)
        for pool in ("kv", "active", "checkpoint"):
            assert tuple(self.native.usage(pool).as_dict().values()) == self.model.usage(pool)
        for prompt in PROMPTS:
            assert words(self.native.lookup(prompt)) == words(self.model.lookup(prompt))
        for mine, its, _ in self.leases:
            assert self.native.lease_pages(mine) == self.model.lease_pages(its)
            assert self.native.lease_depth(mine) == its.prefix.depth

    def agree(self, mine: Any, its: Any) -> Any:
        assert words(mine) == words(its)
        return its

    def given(self, lease: records.Lease, depth: int) -> list[int]:
        """The engine's pages past a lease."""
        return self.free[: max(0, depth - lease.prefix.depth) // 2] if self.names_pages else []

    def adopt(self, lease: tuple[Any, records.Lease, list[int]], pages: list[int]) -> None:
        adopted = set(self.model.lease_pages(lease[1])) & set(pages)
        self.free = [page for page in self.free if page not in adopted]

    def lease(self) -> None:
        if len(self.leases) < 4:
            prompt = self.random.choice(PROMPTS)
            mine = self.native.lease(self.native.lookup(prompt))
            its = self.model.lease(self.model.lookup(prompt))
            if self.random.random() < 0.8:
                self.native.lease_loaded(mine)
                self.model.lease_loaded(its)
            self.leases.append((mine, its, prompt))

    def extend(self) -> None:
        if self.leases:
            lease = mine, its, prompt = self.random.choice(self.leases)
            known = prompt[: self.random.randrange(0, 13, 2)]
            pages = self.given(its, len(known))
            made = attempt(lambda: self.native.extend(mine, known, pages))
            model = attempt(lambda: self.model.extend(its, known, pages))
            if isinstance(model, Refused):
                self.agree(made, model)
                self.seen["extend refused"] += 1
                return
            assert (kind(made.skipped), made.replaced) == (kind(model.skipped), model.replaced)
            self.seen[f"extend {kind(model.skipped) if model.skipped else 'done'}"] += 1
            self.adopt(lease, pages)

    def reserve(self) -> None:
        if self.leases:
            lease = mine, its, prompt = self.random.choice(self.leases)
            known = prompt[: self.random.randrange(4, 13, 4)]
            pages = self.given(its, len(known))
            made = attempt(lambda: self.native.reserve(mine, known, pages))
            model = attempt(lambda: self.model.reserve(its, known, pages))
            assert isinstance(made, Refused) == isinstance(model, Refused)
            if isinstance(model, Refused):
                self.agree(made, model)
            else:
                assert kind(made) == kind(model)
                self.pending += [(lease, made, model, known)] if isinstance(model, records.Pending) else []

    def enter(self) -> None:
        """Publishes or attaches; others may have shared or refused its prefix meanwhile."""
        if self.pending:
            lease, mine, its, known = self.pending.pop(self.random.randrange(len(self.pending)))
            pages, proven = self.given(lease[1], len(known)), self.random.random() < 0.5
            if len(known) <= lease[1].prefix.depth and self.random.random() < 0.5:
                made = attempt(lambda: self.native.attach(lease[0], known, mine, proven=proven))
                model = attempt(lambda: self.model.attach(lease[1], known, its, proven=proven))
            else:
                made = attempt(lambda: self.native.publish(lease[0], known, pages, mine, proven=proven))
                model = attempt(lambda: self.model.publish(lease[1], known, pages, its, proven=proven))
                if isinstance(model, records.Published):
                    assert made.replaced == model.replaced
                    self.seen.update(["replaced"] * (model.replaced is not None))
                    made, model = made.outcome, model.outcome
                    self.adopt(lease, pages)
            if isinstance(model, Refused):
                self.agree(made, model)
                self.native.discard(mine)
                self.model.drop(its)
                return
            assert kind(made) == kind(model)
            self.seen[kind(model)] += 1
            if isinstance(model, records.Stored):
                assert words(made) == words(model)
                self.stored.append((made, model))

    def end(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            for _, mine, its, _ in [each for each in self.pending if each[0] is lease]:
                self.native.discard(mine)
                self.model.drop(its)
            self.pending = [each for each in self.pending if each[0] is not lease]
            self.native.release(lease[0])
            self.model.release(lease[1])

    def begin_step(self) -> None:
        if len(self.steps) < 3:
            self.steps.append(self.native.begin_step())
            assert self.steps[-1] == self.model.begin_step()

    def end_step(self) -> None:
        if self.steps:
            step = self.steps.pop(self.random.randrange(len(self.steps)))
            failed = self.random.random() < 0.5
            lost = failed and any(it.step == step.id for it in self.model.extensions)
            self.seen.update(["pages lost"] * lost)
            (self.native.cancel_step if failed else self.native.retire_step)(step)
            self.model.retire_step(step.id, failed=failed)

    def complete(self) -> None:
        if self.model.proofs:
            ticket, finite = self.random.choice([*self.model.proofs]), self.random.random() < 0.7
            self.native.complete(ticket, finite)
            self.model.complete(ticket, finite)

    def take_freed(self) -> None:
        freed = sorted(self.native.take_freed())
        assert freed == sorted(self.model.take_freed())
        self.free += freed if self.names_pages else []

    def withdraw(self) -> None:
        how = self.random.choice(["reset", *["kv", "checkpoint", "invalidate"] * 4])
        if how == "reset":
            self.native.reset()
            self.model.reset()
        elif how == "invalidate":
            for mine, its in self.random.sample(self.stored[-5:], k=min(1, len(self.stored))):
                self.native.invalidate(mine)
                self.model.invalidate(its.serial)
        else:
            pool: Any = how
            self.agree(self.native.evict(pool, 1), self.model.evict(pool, 1))


@pytest.mark.parametrize(("logical", "kv_pages"), [(False, 24), (True, 24), (True, 9), (False, 0)])
def test_the_native_cache_of_an_engine_and_the_reference_agree(logical: bool, kv_pages: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        both = Both(seed, logical, kv_pages)
        for _ in range(80):
            both.act()
        seen += both.seen
    with_pages = (
        {"extend refused", "extend not_ready", "not_ready", "replaced", "pages lost"} if kv_pages else set()
    )
    assert set(seen) == {"stored", "duplicate", "reset", "extend done", "extend reset"} | with_pages
