"""Pages of the tree that are not written yet: they may never reach a request that has good ones of its own.

The KV pages of these tests are an array. A request's work writes (request, position) into the pages that the request
had when the work was enqueued, and it does so when its step runs, or never. A request may decode only on rows that
work with its tokens wrote for their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from radixstate import EngineCache, Lease, PrefixCache, Sequence, Skipped, StateSpec, Stored, _native
from radixstate._native import PendingHandle, Step

SPEC = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
PAGE = 16
PROMPT = list(range(2 * PAGE + 1))


SIZES: dict[str, Any] = {
    "active_slots": 4,
    "checkpoint_slots": 8,
    "kv_pages": 24,
    "page_size": PAGE,
    "checkpoint_stride": PAGE,
}


def make() -> PrefixCache:
    return PrefixCache(SPEC, **SIZES)


def make_engine() -> EngineCache:
    return EngineCache(SPEC, **SIZES)


class Kv:
    """The engine's KV tensor, (page, offset, [request, position]); -1 where nothing was written."""

    def __init__(self) -> None:
        self.rows = np.full((25, PAGE, 2), -1)

    def run(self, request: int, pages: list[int], begin: int = 0, end: int = len(PROMPT)) -> None:
        """The work of a request runs: it writes the positions `begin..end` into `pages`."""
        for position in range(begin, end):
            self.rows[pages[position // PAGE], position % PAGE] = request, position

    def read(self, pages: list[int], end: int = len(PROMPT)) -> list[tuple[int, int]]:
        """What a request would decode on."""
        rows = (self.rows[pages[position // PAGE], position % PAGE] for position in range(end))
        return [(int(request), int(position)) for request, position in rows]


def assert_computed(kv: Kv, pages: list[int], by: set[int], end: int = len(PROMPT)) -> None:
    """Each of the first `end` rows was written for its position, by a request in `by`."""
    found = kv.read(pages, end)
    wrong = [position for position, row in enumerate(found) if row not in {(it, position) for it in by}]
    assert not wrong, f"rows {wrong} hold {sorted({found[position] for position in wrong})}"


def started(cache: PrefixCache, prompt: list[int] = PROMPT) -> tuple[Sequence, list[int]]:
    """A request whose state is computed, and the pages that its work writes."""
    seq = cache.start(prompt)
    cache.active.state(seq.slot).fill_(1.0)
    return seq, seq.pages


def keeps_its_state(
    cache: PrefixCache, seq: Sequence, depth: int = 2 * PAGE, prompt: list[int] = PROMPT
) -> bool:
    """Whether the state of `seq` can be found, or stored now because it was skipped before."""
    return cache.lookup(prompt).length == depth or isinstance(seq.checkpoint(depth), Stored)


# --- the writer fails in its step ---


@pytest.mark.parametrize(("first", "second"), [(16, 32), (32, 16)])
def test_a_request_decodes_on_its_own_pages_when_one_that_stored_before_it_fails(
    first: int, second: int
) -> None:
    cache, kv = make(), Kv()
    step = cache.begin_step()
    (a, _), (b, pages) = started(cache), started(cache)
    refused = a.checkpoint(first)
    assert isinstance(refused, Stored)
    b.checkpoint(second)
    kv.run(2, pages)  # the work of A does not run
    a.abort()
    cache.retire_step(step, invalid=[refused])
    assert_computed(kv, b.pages, by={2})


@pytest.mark.parametrize("depth", [16, 32])
def test_a_duplicate_in_a_batch_keeps_its_own_pages_when_the_first_fails(depth: int) -> None:
    cache, kv = make(), Kv()
    step = cache.begin_step()
    (a, _), (b, pages) = started(cache), started(cache)
    refused, duplicate = cache.checkpoint_many([(a, depth, a.slot), (b, depth, b.slot)])
    assert isinstance(refused, Stored)
    assert duplicate == Skipped("duplicate")
    kv.run(2, pages)
    a.abort()
    cache.retire_step(step, invalid=[refused])
    assert_computed(kv, b.pages, by={2})


def test_a_branch_decodes_on_its_own_pages_when_the_branch_beside_it_fails() -> None:
    cache, kv = make(), Kv()
    other = [*PROMPT[:PAGE], *range(100, 100 + PAGE + 1)]
    step = cache.begin_step()
    (a, _), (b, pages) = started(cache), started(cache, other)
    refused = a.checkpoint(32)
    assert isinstance(refused, Stored)
    b.checkpoint(32)
    kv.run(2, pages)
    a.abort()
    cache.retire_step(step, invalid=[refused])
    assert_computed(kv, b.pages, by={2})


def test_a_request_keeps_its_state_when_one_that_stored_less_before_it_fails() -> None:
    cache = make()
    step = cache.begin_step()
    (a, _), (b, _) = started(cache), started(cache)
    refused = a.checkpoint(16)
    assert isinstance(refused, Stored)
    b.checkpoint(32)
    a.abort()
    cache.retire_step(step, invalid=[refused])
    assert keeps_its_state(cache, b)


def test_a_branch_keeps_its_state_when_the_branch_beside_it_fails() -> None:
    cache = make()
    other = [*PROMPT[:PAGE], *range(100, 100 + PAGE + 1)]
    step = cache.begin_step()
    (a, _), (b, _) = started(cache), started(cache, other)
    refused = a.checkpoint(32)
    assert isinstance(refused, Stored)
    b.checkpoint(32)
    a.abort()
    cache.retire_step(step, invalid=[refused])
    assert keeps_its_state(cache, b, prompt=other)


# --- two steps in flight ---


def test_a_request_whose_step_retires_first_decodes_on_pages_that_were_written() -> None:
    cache, kv = make(), Kv()
    early = cache.begin_step()
    a, of_a = started(cache)
    a.checkpoint(16)
    late = cache.begin_step()
    b, of_b = started(cache)
    b.checkpoint(32)
    kv.run(2, of_b)
    cache.retire_step(late)
    assert_computed(kv, b.pages, by={1, 2})
    kv.run(1, of_a)
    cache.retire_step(early)


def test_a_state_of_a_later_step_outlives_the_failure_of_an_earlier_one() -> None:
    cache = make()
    early = cache.begin_step()
    a, _ = started(cache)
    a.checkpoint(16)
    late = cache.begin_step()
    b, _ = started(cache)
    b.checkpoint(32)
    cache.retire_step(late)
    a.abort()
    cache.retire_step(early, failed=True)
    assert keeps_its_state(cache, b)


# --- a refusal that comes late ---


def test_a_late_refusal_leaves_the_deeper_state_of_a_request_that_computed_all_itself() -> None:
    cache = make()
    step = cache.begin_step()
    (a, _), (b, _) = started(cache), started(cache)
    refused = a.checkpoint(16)
    assert isinstance(refused, Stored)
    b.checkpoint(32)
    cache.retire_step(step)
    cache.invalidate(refused)
    assert keeps_its_state(cache, b)


# --- engines with allocators of their own ---


def test_an_engine_without_steps_shares_pages_that_were_written() -> None:
    cache, kv = make_engine(), Kv()
    cache.active.state(1).fill_(1.0)
    for request, pages in ((1, [1]), (2, [2, 3])):
        kv.run(request, pages, end=PAGE * len(pages))
        with cache.lease(cache.lookup(PROMPT, max_length=0)) as lease:
            published = lease.publish(PROMPT[: PAGE * len(pages)], source=1, pages=pages)
            table = lease.pages
    assert (table, published.replaced) == ([1, 3], (0, PAGE))
    assert_computed(kv, table, by={1, 2}, end=2 * PAGE)


def page_table(lease: Lease, own: list[int]) -> list[int]:
    """Pages of the lease, then the request's own."""
    return lease.pages + own[len(lease.pages) :]


def test_publishing_names_no_page_of_a_step_in_flight_as_canonical() -> None:
    cache, kv = make_engine(), Kv()
    cache.active.state(1).fill_(1.0)
    a, b = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    step = cache.begin_step()
    refused = a.publish(PROMPT[:16], source=1, pages=[1]).outcome
    assert isinstance(refused, Stored)
    b.publish(PROMPT[:32], source=1, pages=[2, 3])
    kv.run(2, [2, 3], end=32)  # the work of A does not run
    cache.retire_step(step, invalid=[refused])
    assert_computed(kv, page_table(b, [2, 3]), by={2}, end=32)


def test_a_published_state_outlives_the_failure_of_a_shallower_one() -> None:
    cache = make_engine()
    cache.active.state(1).fill_(1.0)
    a, b = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    step = cache.begin_step()
    refused = a.publish(PROMPT[:16], source=1, pages=[1]).outcome
    assert isinstance(refused, Stored)
    published = b.publish(PROMPT[:32], source=1, pages=[2, 3])
    cache.retire_step(step, invalid=[refused])
    if isinstance(published.outcome, Skipped):
        published = b.publish(PROMPT[:32], source=1, pages=page_table(b, [2, 3]))
    assert cache.lookup(PROMPT).length == 32


# --- many requests, at random ---


@dataclass(eq=False)
class Work:
    """A request, the pages that its work writes, and the step in which it does."""

    seq: Sequence
    prompt: list[int]
    pages: list[int]
    reused: int
    step: Step
    stored: int = 0
    named: int = 0  # the depth of the last checkpoint, for its state only goes deeper


class Engine:
    """StartRequests whose work runs when their step retires, which it does in any order, or fails.

    A row of a page holds the tokens from the prompt's start to its own, once it was written.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.cache = PrefixCache(
            SPEC, active_slots=80, checkpoint_slots=80, kv_pages=320, page_size=2, checkpoint_stride=2
        )
        self.rows: dict[tuple[int, int], list[int]] = {}
        self.steps: list[Step] = []
        self.flying: list[Work] = []
        self.running: list[Work] = []  # whose work has run
        self.ran: list[Work] = []  # the ended ones too

    def act(self) -> None:
        """One thing happens."""
        kinds = [self.launch, self.launch, self.checkpoint, self.checkpoint, self.retire, self.end]
        self.random.choice(kinds)()

    def launch(self) -> None:
        if len(self.flying) + len(self.running) == 8:
            return
        if len(self.steps) < 3:
            self.steps.append(self.cache.begin_step())
        prompt = [0, 0, self.random.randrange(2), 0, self.random.randrange(2), 0, 9]
        seq = self.cache.start(prompt)
        self.cache.active.state(seq.slot).fill_(1.0)
        work = Work(seq, prompt, seq.pages, seq.reused, self.steps[-1], named=seq.reused)
        self.assert_written(work, seq.reused)
        self.flying.append(work)

    def checkpoint(self) -> None:
        newest = [work for work in self.flying if work.step == self.steps[-1]]
        if newest:
            work = self.random.choice(newest)
            work.named = self.random.choice([depth for depth in (2, 4, 6) if depth >= work.named])
            outcome = work.seq.checkpoint(work.named)
            work.stored = max(work.stored, outcome.depth if isinstance(outcome, Stored) else 0)

    def retire(self) -> None:
        if not self.steps:
            return
        step = self.steps.pop(self.random.randrange(len(self.steps)))
        done = [work for work in self.flying if work.step == step]
        self.flying = [work for work in self.flying if work.step != step]
        if self.random.random() < 0.3:
            for work in done:
                work.seq.abort()
            self.cache.retire_step(step, failed=True)
            return
        for work in done:
            for position in range(work.reused, len(work.prompt)):
                self.rows[work.pages[position // 2], position % 2] = work.prompt[: position + 1]
        self.cache.retire_step(step)
        self.running += done
        self.ran += done

    def end(self) -> None:
        if self.running:
            self.running.pop(self.random.randrange(len(self.running))).seq.finish()

    def assert_written(self, work: Work, end: int) -> None:
        """What a request would read are the rows of its own tokens."""
        pages = work.seq.pages
        for position in range(end):
            found = self.rows.get((pages[position // 2], position % 2))
            assert found == work.prompt[: position + 1], f"position {position} of {work.prompt} holds {found}"


SEEDS = range(60)


def test_requests_decode_on_what_was_computed_from_their_tokens_whatever_fails_beside_them() -> None:
    for seed in SEEDS:
        engine = Engine(seed)
        for _ in range(60):
            engine.act()
            for work in engine.running:
                engine.assert_written(work, len(work.prompt))
        engine.cache.check()


def test_states_whose_step_ran_are_found_whatever_failed_beside_them() -> None:
    for seed in SEEDS:
        engine = Engine(seed)
        for _ in range(60):
            engine.act()
        while engine.steps:
            engine.retire()
        lost = [w for w in engine.ran if engine.cache.lookup(w.prompt).length < w.stored]
        assert not lost, f"{len(lost)} of {len(engine.ran)}"


# --- an engine's pages ---


def test_pages_that_were_not_taken_over_stay_the_engines_though_their_state_is_being_written() -> None:
    cache = make_engine()
    first, second = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    step = cache.begin_step()
    assert isinstance(first.publish(PROMPT[:PAGE], source=1, pages=[1]).outcome, Stored)
    late = second.publish(PROMPT[:PAGE], source=2, pages=[2])
    assert (late.outcome, late.replaced) == (Skipped("not_ready"), None), "not duplicate: that shares pages"
    assert second.depth == 0
    cache.retire_step(step)
    again = second.publish(PROMPT[:PAGE], source=2, pages=[2])
    assert (again.outcome, again.replaced, second.pages) == (Skipped("duplicate"), (0, PAGE), [1])


def test_a_slot_reserved_before_another_publishes_shares_no_pages_that_are_being_written() -> None:
    cache = make_engine()
    native = cache._native
    first, second = (cache.lease(cache.lookup(PROMPT)) for _ in range(2))
    pending = native.reserve(second._handle, PROMPT[:PAGE], [2])
    assert isinstance(pending, PendingHandle)
    with cache.step():
        first.publish(PROMPT[:PAGE], source=1, pages=[1])
        made = native.publish(second._handle, PROMPT[:PAGE], [2], pending)
    assert isinstance(made.outcome, _native.Skipped)
    assert (made.outcome.reason, made.replaced, second.depth) == ("not_ready", None, 0)
    assert cache.usage("checkpoint").held == 0
