"""The library and the reference driven by the same random calls, compared after every one.

Every cached byte is accounted for: a page holds the tokens it was written for, a slot one prefix's state.
Two owners of one page or slot therefore overwrite each other, and a later comparison sees it.
"""

import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import lcm
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from radixstate import (
    ConvSpec,
    Lease,
    Match,
    Namespace,
    PrefixCache,
    Sequence,
    Skipped,
    StateSpec,
    Stored,
)
from radixstate.errors import MisuseError, NeverFitsError, OutOfSlotsError
from radixstate.reference import parts
from radixstate.reference.cache import ReferenceCache

SPEC = StateSpec(
    layers=2, heads=1, d_k=2, d_v=3, dtype="float32", layout="v_last", conv=(ConvSpec((2,), "float32"),)
)
POOLS = ("kv", "active", "checkpoint")
NAMESPACES = (Namespace(), Namespace(adapter=1))

# Zeros, and ones from the fork on: any two prompts share a prefix and part ways somewhere.
lengths, forks = st.sampled_from(range(1, 21)), st.sampled_from([0, 3, 6, 8, 11, 12, 20, 20, 20])
prompts = st.builds(lambda n, fork: [int(i >= fork) for i in range(n)], lengths, forks)
depths = st.tuples(lengths, st.sampled_from([True, True, True, False]))  # mostly made legal
rarely = st.sampled_from([False, False, False, False, True])
namespaces = st.sampled_from([0, 0, 0, 1])
counts = st.integers(0, 6)
sizes = st.sampled_from([1, 1, 2, 2, 3, 4])
room = st.sampled_from([0, 12, 20, 30, 50])  # tokens that all KV pages together hold

Key = tuple[int, tuple[int, ...]]  # namespace and tokens: what a page or a state belongs to


def pattern(key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """State (layers, heads, d_k, d_v) and conv (layers, 2) of a prefix, which int8 holds exactly.

    Each k-channel has 127 as its largest value, so that its scale is 1.
    """
    seed = zlib.crc32(repr(key).encode())
    values = torch.tensor([(seed >> shift) % 255 - 127 for shift in range(8)], dtype=torch.float32)
    state = torch.full((2, 1, 2, 3), 127.0)
    state[..., 1:] = values.reshape(2, 1, 2, 2)
    return state, torch.tensor([[seed % 65521, len(key[1])]] * 2, dtype=torch.float32)


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returned, or which rule it named with which numbers; the same words for both caches."""
    try:
        return call()
    except (OutOfSlotsError, parts.Shortage) as short:
        return "shortage", short.pool, short.wanted, short.free, short.evictable
    except (NeverFitsError, parts.NeverFits) as never:
        return "never fits", never.pool, never.wanted, never.capacity
    except parts.Misuse as misuse:
        return "misuse", misuse.rule
    except MisuseError as error:
        name = type(error).__name__.removesuffix("Error")
        return "misuse", re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def failed(outcome: Any) -> bool:
    return isinstance(outcome, tuple) and outcome[0] in ("shortage", "never fits", "misuse")


def facts(result: Any) -> Any:
    """The part of a result that both caches must agree on: not which slot or page it is."""
    if isinstance(result, (Match, parts.Match)):
        return result.length, result.kv_length, result.branch, result.reason
    if isinstance(result, (Stored, parts.Stored)):
        return "stored", result.depth, result.step, result.replaced
    if isinstance(result, (Skipped, parts.Skipped)):
        return "skipped", result.reason
    return result


@dataclass
class Request:
    """One running request on both sides, and the prefix whose state its slot holds."""

    real: Sequence
    model: parts.Running
    namespace: int
    held: dict[int, Key]  # by slot; absent: the empty state

    def key(self, depth: int) -> Key:
        return self.namespace, tuple(self.model.tokens[:depth])


@dataclass
class Leased:
    """One lease on both sides, and the prompt it was looked up for."""

    real: Lease
    model: parts.Lease
    prompt: Key

    def key(self, depth: int) -> Key:
        return self.prompt[0], self.prompt[1][:depth]


class Machine(RuleBasedStateMachine):
    """What schedulers and engines have in common."""

    cache: PrefixCache
    model: ReferenceCache
    matches = Bundle("matches")
    leases = Bundle("leases")
    stored = Bundle("stored")

    def open(self, page: int, stride: int, kv: int, active: int, checkpoints: int, *, external: bool) -> None:
        kv = kv and -(-max(kv, lcm(page, stride)) // page)  # room for one state at least, or for none at all
        self.page, self.has_kv = page, kv > 0
        self.pages: dict[int, Key] = {}  # what each KV page holds
        self.leased: dict[int, Leased] = {}
        self.numbers = count(1)
        self.model = ReferenceCache(
            page_size=page,
            checkpoint_stride=stride,
            kv_pages=kv,
            active_slots=active,
            checkpoint_slots=checkpoints,
            kv_external=external,
            active_external=external,
        )
        self.cache = PrefixCache(
            SPEC,
            page_size=page,
            checkpoint_stride=stride,
            kv_pages=kv,
            active_slots=active,
            checkpoint_slots=checkpoints,
            external=external,
        )

    def agree(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any]:
        """Calls both and compares what they say."""
        got, expected = attempt(real), attempt(model)
        if not failed(got) and not failed(expected):
            return got, expected
        assert got == expected
        return None, None

    def write(self, slot: int, key: Key | None) -> None:
        """The engine computes a state, or has none yet."""
        state, conv = pattern(key) if key else (0, 0)
        self.cache.active.state(slot)[:] = state
        self.cache.active.conv(0, slot)[:] = conv

    def assert_holds(self, slot: int, key: Key | None, pool: Any = None) -> None:
        pool = pool or self.cache.active
        state, conv = pattern(key) if key else (torch.zeros(2, 1, 2, 3), torch.zeros(2, 2))
        assert torch.equal(pool.state(slot).float(), state)
        assert torch.equal(pool.conv(0, slot), conv)

    def assert_pages(self, pages: list[int], key: Key, start: int = 0) -> None:
        """Pages hold the tokens of a prefix from page `start` on."""
        namespace, known = key
        for i, page in enumerate(pages, start):
            end = (i + 1) * self.page
            assert end > len(known) or self.pages[page] == (namespace, known[:end])

    @rule(target=matches, prompt=prompts, namespace=namespaces, most=st.none() | counts)
    def lookup(self, prompt: list[int], namespace: int, most: int | None) -> Any:
        real = self.cache.lookup(prompt, namespace=NAMESPACES[namespace], max_length=most)
        model = self.model.lookup(prompt, namespace=namespace, max_length=most)
        assert facts(real) == facts(model)
        return real, model, (namespace, tuple(prompt))

    @rule(target=leases, match=matches)
    def lease(self, match: tuple[Match, parts.Match, Key]) -> Any:
        real, model = self.agree(lambda: self.cache.lease(match[0]), lambda: self.model.lease(match[1]))
        if real is None:
            return multiple()
        number = next(self.numbers)
        self.leased[number] = Leased(real, model, match[2])
        self.look_at(self.leased[number])
        return number

    def look_at(self, lease: "Leased") -> None:
        """The state and the pages of a lease are those of its prefix."""
        assert (lease.real.state is None) == (lease.model.state is None)
        if lease.model.state:
            self.assert_holds(
                lease.real.state, lease.key(lease.model.state.prefix.depth), self.cache.checkpoints
            )
            assert (self.cache.checkpoints.scale(lease.real.state) == 1).all()
        depth = lease.model.prefix.depth
        assert len(lease.real.pages) == (depth // self.page if self.has_kv else 0)
        self.assert_pages(lease.real.pages, lease.key(depth))

    @rule(number=leases)
    def lease_loaded(self, number: int) -> None:
        lease = self.leased[number]
        lease.real.loaded()
        self.model.lease_loaded(lease.model)
        self.look_at(lease)

    @rule(number=consumes(leases), drop=st.booleans())
    def release(self, number: int, drop: bool) -> None:
        lease = self.leased.pop(number)
        if not drop:
            lease.real.release()
        self.model.release(lease.model)

    def depth(self, drawn: tuple[int, bool], limit: int) -> int:
        """A depth to cache a state at: any, or one that is legal and not beyond `limit`."""
        depth, legal = drawn
        return self.model.legal_depth(min(depth, limit)) if legal else depth

    def publish_on_model(
        self, lease: "Leased", known: list[int], pages: list[int]
    ) -> parts.Published | parts.Skipped:
        pending = self.model.reserve(lease.model, known)
        if isinstance(pending, parts.Skipped):
            return pending
        try:
            return self.model.publish(lease.model, known, pages, pending)
        except parts.Misuse:
            self.model.drop(pending)
            raise

    def published(self, real: Any, model: Any) -> Any:
        """Compares what publishing on a lease came to."""
        real, model = getattr(real, "outcome", real), getattr(model, "outcome", model)
        assert facts(real) == facts(model)
        return (real, model) if isinstance(real, Stored) else multiple()

    @precondition(lambda self: self.model.states)
    @rule(pool=st.sampled_from(["kv", "kv", "checkpoint", "checkpoint", "active"]), n=st.integers(0, 3))
    def evict(self, pool: Any, n: int) -> None:
        real, model = self.cache.evict(pool, n), self.model.evict(pool, n)
        assert (real.kv, real.checkpoints) == model

    @rule(pair=consumes(stored))
    def refuse(self, pair: tuple[Stored, parts.Stored]) -> None:
        self.cache.refuse(pair[0])
        self.model.refuse(pair[1].serial)

    @precondition(lambda self: len(self.model.outstanding) < 3)
    @rule()
    def begin_step(self) -> None:
        assert self.cache.begin_step() == self.model.begin_step()

    @precondition(lambda self: self.model.newest)
    @rule(which=st.integers(0, 20))
    def retire_step(self, which: int) -> None:
        known = [*self.model.outstanding * 4, self.model.newest, self.model.newest + 1]
        step = known[which % len(known)]
        self.agree(lambda: self.cache.retire_step(step), lambda: self.model.retire_step(step))

    @precondition(lambda self: self.model.outstanding)
    @rule(pair=consumes(stored))
    def retire_step_with_a_refusal(self, pair: tuple[Stored, parts.Stored]) -> None:
        step = self.model.outstanding[0]
        self.cache.retire_step(step, refused=[pair[0]])
        self.model.retire_step(step, [pair[1].serial])

    @precondition(lambda self: self.model.states)
    @rule(really=rarely)
    def reset(self, really: bool) -> None:
        if really:
            self.cache.reset()
            self.model.reset()

    @invariant()
    def sound(self) -> None:
        self.cache.check()
        for pool in POOLS:
            real, model = self.cache.usage(pool), self.model.usage(pool)
            got = (real.capacity, real.free, real.held, real.evictable, real.pinned, real.retiring)
            assert got == model[:6], pool


class SchedulerMachine(Machine):
    """Sequences: the cache hands out slots and pages."""

    sequences = Bundle("sequences")

    @initialize(
        page=sizes,
        stride=sizes,
        kv=room,
        active=st.integers(2, 5),
        checkpoints=sizes,
    )
    def begin(self, page: int, stride: int, kv: int, active: int, checkpoints: int) -> None:
        self.open(page, stride, kv, active, checkpoints, external=False)
        self.live: dict[int, Request] = {}

    @rule(
        target=sequences,
        prompt=prompts,
        namespace=namespaces,
        reserve=st.none() | st.none() | st.integers(0, 20),
        no_read=rarely,
        no_store=rarely,
    )
    def start(
        self, prompt: list[int], namespace: int, reserve: int | None, no_read: bool, no_store: bool
    ) -> Any:
        for slot in range(1, self.cache.active.slots + 1):
            if not any(slot in request.held for request in self.live.values()):
                self.write(slot, (7, (slot,)))  # left over from whoever had it before
        options: Any = {"reserve": reserve, "no_read": no_read, "no_store": no_store}
        real, model = self.agree(
            lambda: self.cache.start(prompt, namespace=NAMESPACES[namespace], **options),
            lambda: self.model.start(prompt, namespace=namespace, **options),
        )
        if real is None:
            return multiple()
        self.model.loaded(model)
        assert facts(real.match) == facts(model.matched)
        request = Request(real, model, namespace, {})
        request.held[real.slot] = request.key(real.reused)
        self.assert_holds(real.slot, request.key(real.reused) if real.reused else None)
        self.write(real.slot, request.key(real.reused))
        number = next(self.numbers)
        self.live[number] = request
        self.assert_pages(request.real.pages[: real.reused // self.page], request.key(real.reused))
        self.fill_pages(request)
        return number

    def fill_pages(self, request: Request) -> None:
        """The engine writes the KV of every token that has a page and was not reused."""
        for i, page in enumerate(request.real.pages):
            end = (i + 1) * self.page
            if request.real.reused < end <= len(request.model.tokens):
                self.pages[page] = request.key(end)

    @rule(number=sequences, n=counts)
    def grow(self, number: int, n: int) -> None:
        request = self.live[number]
        self.agree(lambda: request.real.grow(n), lambda: self.model.grow(request.model, n))
        self.fill_pages(request)

    @rule(number=sequences, more=st.lists(st.integers(0, 1), max_size=6))
    def append(self, number: int, more: list[int]) -> None:
        request = self.live[number]
        self.agree(lambda: request.real.append(more), lambda: self.model.append(request.model, more))
        self.fill_pages(request)

    @rule(number=sequences)
    def shrink(self, number: int) -> None:
        self.live[number].real.shrink()
        self.model.shrink(self.live[number].model)

    @rule(number=sequences)
    def take_slot(self, number: int) -> None:
        request = self.live[number]
        slot, _ = self.agree(request.real.take_slot, lambda: self.model.take_slot(request.model))
        if slot is not None:
            request.held[slot] = request.key(0)
            self.write(slot, request.key(0))

    @rule(target=Machine.stored, number=sequences, drawn=depths, which=st.sampled_from([0, 0, 0, 0, 1, 2]))
    def checkpoint(self, number: int, drawn: tuple[int, bool], which: int) -> Any:
        request = self.live[number]
        depth = self.depth(drawn, min(request.real.length, request.real.claimed))
        last = min(which, len(request.held))  # past the sequence's slots comes one that is nobody's
        real_slot, model_slot = [*request.held, 0][last], [*request.model.slots, 0][last]
        if real_slot:
            request.held[real_slot] = request.key(depth)
            self.write(real_slot, request.key(depth))
        real, model = self.agree(
            lambda: request.real.checkpoint(depth, source=real_slot),
            lambda: self.store(request, depth, model_slot),
        )
        assert facts(real) == facts(model)
        return (real, model) if isinstance(real, Stored) else multiple()

    @precondition(lambda self: len(self.live) < self.cache.active.slots)
    @rule(target=Machine.stored, prompt=prompts, namespace=namespaces)
    def serve(self, prompt: list[int], namespace: int) -> Any:
        """A whole request, which fills the cache for the others."""
        number = self.start(prompt, namespace, None, no_read=False, no_store=False)
        if not isinstance(number, int):
            return multiple()
        stored = self.checkpoint(number, (len(prompt), True), 0)
        self.end(number, "finish")
        return stored

    @rule(numbers=st.lists(sequences, min_size=2, max_size=3), limit=lengths)
    def checkpoint_together(self, numbers: list[int], limit: int) -> None:
        """All are reserved before the first is committed: one may find its prefix stored meanwhile."""
        requests = [self.live[number] for number in numbers]
        depths = [self.depth((limit, True), min(len(r.model.tokens), r.model.claimed)) for r in requests]
        for request, depth in zip(requests, depths, strict=True):
            request.held[request.real.slot] = request.key(depth)
            self.write(request.real.slot, request.key(depth))
        real = self.cache.checkpoint_many(
            [(r.real, depth, r.real.slot) for r, depth in zip(requests, depths, strict=True)]
        )
        reserved = [
            self.model.reserve_checkpoint(r.model, depth, r.model.slots[0])
            for r, depth in zip(requests, depths, strict=True)
        ]
        model = [
            pending if isinstance(pending, parts.Skipped) else self.model.commit(r.model, pending)
            for r, pending in zip(requests, reserved, strict=True)
        ]
        assert list(map(facts, real)) == list(map(facts, model))

    @precondition(lambda self: len(self.live) + 1 < self.cache.active.slots)
    @rule(target=sequences, prompt=prompts, namespace=namespaces)
    def race(self, prompt: list[int], namespace: int) -> Any:
        """Two requests compute the same prefix at the same time, and go on."""
        twins = [self.start(prompt, namespace, None, no_read=False, no_store=False) for _ in range(2)]
        started = [number for number in twins if isinstance(number, int)]
        self.checkpoint_together(started, len(prompt))
        return multiple(*started)

    def store(self, request: Request, depth: int, slot: int) -> parts.Stored | parts.Skipped:
        pending = self.model.reserve_checkpoint(request.model, depth, slot)
        return pending if isinstance(pending, parts.Skipped) else self.model.commit(request.model, pending)

    @rule(number=consumes(sequences), how=st.sampled_from(["finish", "abort", "drop"]))
    def end(self, number: int, how: str) -> None:
        request = self.live.pop(number)
        if how != "drop":
            getattr(request.real, how)()
        self.model.finish(request.model)

    @precondition(lambda self: self.live)
    @rule(target=Machine.stored, number=Machine.leases, drawn=depths)
    def publish(self, number: int, drawn: tuple[int, bool]) -> Any:
        """Without KV a lease can publish as a sequence does; with pages of the cache's own it is misuse."""
        lease = self.leased[number]
        depth = self.depth(drawn, len(lease.prompt[1]))
        slot, held = next((slot, key) for request in self.live.values() for slot, key in request.held.items())
        known = list(lease.prompt[1][:depth])
        self.write(slot, lease.key(depth))
        real, model = self.agree(
            lambda: lease.real.publish(known, source=slot), lambda: self.publish_on_model(lease, known, [])
        )
        self.write(slot, held)
        return self.published(real, model)

    @invariant()
    def nobody_shares(self) -> None:
        for request in getattr(self, "live", {}).values():
            model = request.model
            assert (request.real.length, request.real.claimed) == (len(model.tokens), model.claimed)
            assert len(request.real.pages) == len(self.model.pages_of(model))
            self.assert_pages(request.real.pages, request.key(request.real.claimed))
            for slot, key in request.held.items():
                self.assert_holds(slot, key)


class EngineMachine(Machine):
    """Leases: the engine hands out slots and pages, and the cache adopts what it publishes."""

    @initialize(page=sizes, stride=sizes, kv=room.filter(bool), checkpoints=sizes)
    def begin(self, page: int, stride: int, kv: int, checkpoints: int) -> None:
        self.open(page, stride, kv, 2, checkpoints, external=True)
        self.free = list(range(1, self.model.pools["kv"].capacity + 1))

    @rule(number=Machine.leases)
    def load(self, number: int) -> None:
        lease = self.leased[number]
        state = lease.model.state
        self.write(2, (7, ()))
        lease.real.load(2)
        self.model.lease_loaded(lease.model)
        self.assert_holds(2, lease.key(state.prefix.depth) if state else None)

    @rule(target=Machine.stored, prompt=prompts, namespace=namespaces)
    def serve(self, prompt: list[int], namespace: int) -> Any:
        """A whole request, which fills the cache for the others; short of pages, the engine asks for some."""
        self.evict("kv", max(0, len(prompt) // self.page - len(self.free)))
        self.take_freed()
        number = self.lease(self.lookup(prompt, namespace, None))
        stored = self.publish(number, (len(prompt), True), "none")
        self.release(number, drop=False)
        return stored

    @rule(
        target=Machine.stored,
        number=Machine.leases,
        drawn=depths,
        slip=st.sampled_from(["none"] * 6 + ["one page too many", "a page twice", "a cached page"]),
    )
    def publish(self, number: int, drawn: tuple[int, bool], slip: str) -> Any:
        lease = self.leased[number]
        depth = self.depth(drawn, len(lease.prompt[1]))
        known = list(lease.prompt[1][:depth])
        pages = self.new_pages(lease, len(known), slip)
        self.write(1, lease.key(depth))
        real, model = self.agree(
            lambda: lease.real.publish(known, source=1, pages=pages),
            lambda: self.publish_on_model(lease, known, pages),
        )
        if real is not None and isinstance(model, parts.Published):
            assert (real.canonical, real.duplicates) == (model.canonical, model.duplicates)
            self.free = [page for page in self.free if page not in pages or page in real.duplicates]
            self.look_at(lease)
        return self.published(real, model)

    def new_pages(self, lease: Leased, depth: int, slip: str) -> list[int]:
        """The engine writes the tokens past the lease into free pages, and perhaps names the wrong ones."""
        start = lease.model.prefix.depth
        ends = range(start + self.page, depth + 1, self.page)
        pages = [page for page, _ in zip(self.free, ends, strict=False)]
        for page, end in zip(pages, ends, strict=False):
            self.pages[page] = lease.key(end)
        cached = [page for page in self.model.pages.values() if page is not None]
        return {
            "none": pages,
            "one page too many": pages + self.free[-1:],
            "a page twice": pages[1:] + pages[-1:],
            "a cached page": cached[:1] + pages[1:],
        }[slip]

    @precondition(lambda self: self.model.pools["kv"].outbox)
    @rule()
    def take_freed(self) -> None:
        freed = sorted(self.cache.take_freed("kv"))
        assert freed == sorted(self.model.take_freed("kv"))
        self.free += freed

    @invariant()
    def adopted_pages_are_not_the_engines(self) -> None:
        self.cache.check(engine_free=getattr(self, "free", []))


def run(machine: type[Machine], examples: int) -> None:
    """One round, or as many as half of RADIXSTATE_FUZZ_SECONDS holds: the two machines share it."""
    end = time.monotonic() + float(os.environ.get("RADIXSTATE_FUZZ_SECONDS", "0")) / 2
    while True:
        run_state_machine_as_test(machine, settings=settings(max_examples=examples))
        if time.monotonic() >= end:
            return


def test_a_scheduler_and_the_reference_agree() -> None:
    run(SchedulerMachine, 250)


def test_an_engine_with_its_own_allocators_and_the_reference_agree() -> None:
    run(EngineMachine, 120)
