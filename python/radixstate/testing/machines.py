"""State machines that use the whole public API the way schedulers and engines do, and every way they should not.

Each stands for a model: the state after a prefix is a pattern of that prefix, which every format keeps exactly.
A slot that holds another prefix's state therefore shows, besides all that `CheckedCache` compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf, nan
from typing import Any, TypeVar

import torch
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
)

from radixstate import Lease, Match, Namespace, Request, Sequence, StateSpec, Stored
from radixstate.errors import AlreadyLoadedError, MisuseError, NeverFitsError, OutOfSlotsError
from radixstate.testing import strategies
from radixstate.testing.checked import CheckedCache
from radixstate.testing.compare import Disagreement
from radixstate.testing.misuses import Foreign, of_engines, of_every_cache, of_schedulers

T = TypeVar("T")
Key = tuple[Namespace, tuple[int, ...]]  # what a state belongs to

prompts, namespaces, rarely = (
    strategies.prompts(),
    strategies.namespaces(),
    st.sampled_from([False] * 4 + [True]),
)
depths = st.tuples(st.integers(1, 20), st.sampled_from([True, True, True, False]))  # mostly made legal
values = st.sampled_from([None] * 9 + [nan, inf, -inf])  # none: the state is finite
pressures = st.sampled_from([None, None, None, "kv", "checkpoint"])  # evicted for after a request
again = st.sampled_from([0, 0, 1, 1, 2, 3])  # a new prompt, or one that goes on from one cached lately


def pattern(spec: StateSpec, key: Key | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """State (layers, heads, *matrix) and windows (layers, *shape) of a prefix, or the empty ones.

    Whole numbers up to 127, which the largest of each k-channel is: int8 then has scale 1 and loses nothing.
    """
    if key is None:
        shape = (spec.layers, spec.heads, *spec.matrix)
        return torch.zeros(shape), [torch.zeros(spec.layers, *window.shape) for window in spec.conv]
    namespace, tokens = key
    seed = zlib.crc32(repr((namespace.adapter, namespace.tenant, namespace.epoch, tokens)).encode())
    state = torch.full((spec.layers, spec.heads, spec.d_k, spec.d_v), 127.0)
    rest = state[..., 1:]
    rest[:] = ((seed >> (torch.arange(rest.numel()) % 24)) % 255 - 127.0).reshape(rest.shape)
    windows = [torch.full((spec.layers, *window.shape), float(seed % 251)) for window in spec.conv]
    return state.mT if spec.layout == "k_last" else state, windows


def allowed(call: Callable[[], T]) -> T | None:
    """What a call returned; none if it was refused, which `CheckedCache` has found right."""
    try:
        return call()
    except (OutOfSlotsError, NeverFitsError, MisuseError):
        return None


@dataclass
class Running:
    """A request, and the prefix whose state each of its slots holds."""

    seq: Sequence
    namespace: Namespace
    held: dict[int, Key | None] = field(default_factory=dict)

    def key(self, depth: int) -> Key:
        """The first `depth` of its tokens."""
        return self.namespace, tuple(self.seq.tokens[:depth])


@dataclass
class Leased:
    """A lease, and the prompt that was looked up."""

    lease: Lease
    namespace: Namespace
    prompt: list[int]


class CacheMachine(RuleBasedStateMachine):
    """What schedulers and engines have in common."""

    external = False
    matches = Bundle("matches")
    leases = Bundle("leases")
    stored = Bundle("stored")
    cache: CheckedCache

    def __init__(self) -> None:
        """Nothing yet: the first rule makes the cache."""
        super().__init__()
        self.leased: dict[int, Leased] = {}
        self.numbers = count(1)
        self.flying: list[int] = []
        self.steps = 0
        self.released: list[Lease] = []
        self.served: list[tuple[list[int], Namespace]] = []

    def open(self, spec: StateSpec, options: dict[str, Any]) -> None:
        """Makes the cache."""
        self.cache = CheckedCache(spec, **options)
        self.grid = next(n for n in range(1, 21) if self.cache.legal_depth(n))
        self.foreign = Foreign(spec)

    # --- the model ---

    def write(self, slot: int, key: Key | None, value: float | None = None) -> None:
        """The model computes a state, or has none yet; `value` is put where it does most harm."""
        state, windows = pattern(self.cache.spec, key)
        self.cache.active.state(slot).copy_(state)
        if value is not None:
            self.cache.active.state(slot)[-1, -1, -1, -1] = value
        for i, window in enumerate(windows):
            self.cache.active.conv(i, slot).copy_(window)

    def expect(self, slot: int, key: Key | None) -> None:
        """An active slot holds the state of a prefix."""
        state, windows = pattern(self.cache.spec, key)
        same = torch.equal(self.cache.active.state(slot).float(), state)
        if not same or any(
            not torch.equal(self.cache.active.conv(i, slot), w) for i, w in enumerate(windows)
        ):
            raise Disagreement(f"active slot {slot} does not hold the state of {key}")

    def ask(self, prompt: list[int], namespace: Namespace, again: int) -> tuple[list[int], Namespace]:
        """What is asked for: something new, or a prompt cached lately and one token more."""
        if not again or not self.served:
            return prompt, namespace
        before, namespace = self.served[-again % len(self.served)]
        return [*before, prompt[-1]], namespace

    def depth(self, drawn: tuple[int, bool], limit: int) -> int:
        """A depth to cache a state at: any, or one that is legal and not beyond `limit`."""
        depth, legal = drawn
        return self.cache.legal_depth(min(depth, limit)) if legal else depth

    # --- rules ---

    @rule(
        target=matches,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        most=st.none() | st.none() | st.integers(0, 6),
    )
    def lookup(self, prompt: list[int], namespace: Namespace, again: int, most: int | None) -> Any:
        """A lookup may be used at once, later or never."""
        prompt, namespace = self.ask(prompt, namespace, again)
        return self.cache.lookup(prompt, namespace=namespace, max_length=most), namespace, prompt

    @rule(target=leases, found=matches)
    def lease(self, found: tuple[Match, Namespace, list[int]]) -> Any:
        """Stale ones are refused."""
        lease = allowed(lambda: self.cache.lease(found[0]))
        if lease is None:
            return multiple()
        number = next(self.numbers)
        self.leased[number] = Leased(lease, *found[1:])
        return number

    @rule(number=leases)
    def lease_loaded(self, number: int) -> None:
        """Also twice."""
        self.leased[number].lease.loaded()

    @rule(number=consumes(leases), drop=st.booleans())
    def release(self, number: int, drop: bool) -> None:
        """A lease ends, or is forgotten."""
        leased = self.leased.pop(number)
        if not drop:
            leased.lease.release()
            self.released = [leased.lease]

    @rule(pool=st.sampled_from(["kv", "kv", "checkpoint", "checkpoint", "active"]), n=st.integers(0, 3))
    def evict(self, pool: Any, n: int) -> None:
        """Memory pressure from outside."""
        self.cache.evict(pool, n)

    @rule(stored=consumes(stored))
    def refuse(self, stored: Stored) -> None:
        """A state turns out not to be finite, perhaps long after it was evicted."""
        self.cache.refuse(stored)

    @precondition(lambda self: len(self.flying) < 3)
    @rule()
    def begin_step(self) -> None:
        """One more step in flight."""
        self.flying.append(self.cache.begin_step())
        self.steps = self.flying[-1]

    @precondition(lambda self: self.steps)
    @rule(which=st.integers(0, 20))
    def retire_step(self, which: int) -> None:
        """In any order, repeated, or one that was never begun."""
        known = [*self.flying * 4, self.steps, self.steps + 1]
        step = known[which % len(known)]
        allowed(lambda: self.cache.retire_step(step))
        self.flying = [other for other in self.flying if other != step]

    @precondition(lambda self: self.flying)
    @rule(stored=consumes(stored), which=st.integers(0, 2))
    def retire_step_with_a_refusal(self, stored: Stored, which: int) -> None:
        """The refused state may be of this step, of another or of none."""
        step = self.flying.pop(which % len(self.flying))
        self.cache.retire_step(step, [stored])

    @precondition(lambda self: self.steps)
    @rule(stored=consumes(stored), step=st.integers(1, 20))
    def retire_a_late_step_with_a_refusal(self, stored: Stored, step: int) -> None:
        """What a repeated result refuses changes nothing."""
        if step not in self.flying:
            allowed(lambda: self.cache.retire_step(step, [stored]))

    @rule(really=rarely)
    def reset(self, really: bool) -> None:
        """Rarely, for it leaves little to do."""
        if really:
            self.cache.reset()

    @rule(which=st.integers(0, 100))
    def misuse(self, which: int) -> None:
        """Each wrong call is refused by its own name; `CheckedCache` sees that nothing changes."""
        calls = self.misuses()
        expected, call = calls[which % len(calls)]
        try:
            call()
        except MisuseError as error:
            if type(error) is not expected:
                raise Disagreement(
                    f"{type(error).__name__} instead of {expected.__name__}: {error}"
                ) from error
        else:
            raise Disagreement(f"a misuse passed that should raise {expected.__name__}")

    def misuses(self) -> list[tuple[type[MisuseError], Callable[[], object]]]:
        """Calls that are wrong just now."""
        return of_every_cache(self.cache, self.foreign, self.released)


class SchedulerMachine(CacheMachine):
    """Sequences: the cache hands out slots and pages."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        """No request."""
        super().__init__()
        self.live: dict[int, Running] = {}
        self.ended: list[Sequence] = []

    @initialize(spec=strategies.specs(), options=strategies.sizes())
    def begin(self, spec: StateSpec, options: dict[str, Any]) -> None:
        """A cache of any kind."""
        self.open(spec, options)

    def admit(self, seq: Sequence, namespace: Namespace) -> int:
        """A request has started: the model goes on from the state in its slot."""
        request, number = Running(seq, namespace), next(self.numbers)
        request.held[seq.slot] = request.key(seq.reused) if seq.reused else None
        self.expect(seq.slot, request.held[seq.slot])
        self.live[number] = request
        return number

    @rule(
        target=sequences,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        reserve=st.none() | st.none() | st.integers(0, 20),
        most=st.none() | st.none() | st.integers(0, 12),
        no_read=rarely,
        no_store=rarely,
    )
    def start(
        self,
        prompt: list[int],
        namespace: Namespace,
        again: int,
        reserve: int | None,
        most: int | None,
        no_read: bool,
        no_store: bool,
    ) -> Any:
        """A request, with any option."""
        prompt, namespace = self.ask(prompt, namespace, again)
        options: Any = {"reserve": reserve, "max_length": most, "no_read": no_read, "no_store": no_store}
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace, **options))
        return multiple() if seq is None else self.admit(seq, namespace)

    @rule(
        target=sequences,
        drawn=st.lists(st.tuples(prompts, namespaces, again), min_size=1, max_size=4),
        empty=rarely,
    )
    def start_many(self, drawn: list[tuple[list[int], Namespace, int]], empty: bool) -> Any:
        """A scheduler step's worth of requests, of which some are refused."""
        asked = [self.ask(*each) for each in drawn] + [([], strategies.NAMESPACES[0])] * empty
        outcomes = zip(self.cache.start_many([Request(*each) for each in asked]), asked, strict=True)
        started = [(seq, namespace) for seq, (_, namespace) in outcomes if isinstance(seq, Sequence)]
        return multiple(*[self.admit(seq, namespace) for seq, namespace in started])

    @rule(number=sequences, n=st.integers(0, 6))
    def grow(self, number: int, n: int) -> None:
        """A draft, or the next chunk."""
        allowed(lambda: self.live[number].seq.grow(n))

    @rule(number=sequences, more=st.lists(st.integers(0, 1), max_size=6))
    def append(self, number: int, more: list[int]) -> None:
        """Accepted tokens, perhaps too many."""
        allowed(lambda: self.live[number].seq.append(more))

    @rule(number=sequences)
    def shrink(self, number: int) -> None:
        """A draft was rejected."""
        self.live[number].seq.shrink()

    @rule(number=sequences)
    def take_slot(self, number: int) -> None:
        """A slot for a state on the way."""
        request = self.live[number]
        slot = allowed(request.seq.take_slot)
        if slot is not None:
            request.held[slot] = request.key(0)
            self.write(slot, request.key(0))

    def source(self, number: int, which: str) -> int:
        """The running slot of a request, the last one it took on the way, or nobody's."""
        request = self.live[number]
        if which == "track" and len(request.held) == 1:
            self.take_slot(number)
        return {"running": request.seq.slot, "track": [*request.held][-1], "nobody's": 0}[which]

    @rule(
        target=CacheMachine.stored,
        number=sequences,
        drawn=depths,
        which=st.sampled_from(["running"] * 4 + ["track"] * 2 + ["nobody's"]),
        value=values,
    )
    def checkpoint(self, number: int, drawn: tuple[int, bool], which: str, value: float | None) -> Any:
        """From any slot of the request or from nobody's, at any depth, finite or not."""
        request = self.live[number]
        depth = self.depth(drawn, min(request.seq.length, request.seq.claimed))
        source = self.source(number, which)
        if source:
            request.held[source] = request.key(depth)
            self.write(source, request.key(depth), value)
        stored = allowed(lambda: request.seq.checkpoint(depth, source=source))
        return stored if isinstance(stored, Stored) else multiple()

    @rule(
        target=CacheMachine.stored,
        numbers=st.lists(sequences, min_size=1, max_size=3),
        limit=st.integers(1, 20),
        value=values,
        slip=st.sampled_from([False, False, True]),
    )
    def checkpoint_many(self, numbers: list[int], limit: int, value: float | None, slip: bool) -> Any:
        """All are reserved before the first is committed: one may find its prefix stored meanwhile."""
        states = []
        for number in numbers:
            request = self.live[number]
            depth = self.cache.legal_depth(min(limit, request.seq.length, request.seq.claimed))
            request.held[request.seq.slot] = request.key(depth)
            self.write(request.seq.slot, request.key(depth), value if number == numbers[-1] else None)
            states.append((request.seq, depth, request.seq.slot))
        if slip:
            states.append((self.live[numbers[0]].seq, 0, 0))  # nobody's slot
        outcomes = allowed(lambda: self.cache.checkpoint_many(states)) or []
        return multiple(*[it for it in outcomes if isinstance(it, Stored)])

    @precondition(lambda self: len(self.live) < self.cache.active.slots)
    @rule(
        target=CacheMachine.stored,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        in_step=rarely,
        pressure=pressures,
    )
    def serve(self, prompt: list[int], namespace: Namespace, again: int, in_step: bool, pressure: Any) -> Any:
        """A whole request, which fills the cache for the others."""
        if in_step:
            with self.cache.step() as self.steps:
                return self.serve(prompt, namespace, again, False, pressure)
        prompt, namespace = self.ask(prompt, namespace, again)
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace))
        if seq is None:
            return multiple()
        number = self.admit(seq, namespace)
        stored = self.checkpoint(number, (len(prompt), True), "running", None)
        self.end(number, "finish")
        self.served += [(prompt, namespace)] if isinstance(stored, Stored) else []
        if pressure:
            self.cache.evict(pressure, 1)
        return stored

    @precondition(lambda self: self.served and len(self.live) < self.cache.active.slots)
    @rule(again=st.integers(1, 4))
    def probe(self, again: int) -> None:
        """A request that only reads: what it hits is the last to be evicted."""
        prompt, namespace = self.ask([0], strategies.NAMESPACES[0], again)
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace))
        if seq is not None:
            self.end(self.admit(seq, namespace), "finish")

    @precondition(lambda self: len(self.live) + 1 < self.cache.active.slots)
    @rule(target=sequences, prompt=prompts, namespace=namespaces, again=again)
    def race(self, prompt: list[int], namespace: Namespace, again: int) -> Any:
        """Two requests compute the same prefix at the same time, and go on."""
        prompt, namespace = self.ask(prompt, namespace, again)
        twins = self.cache.start_many([Request(prompt, namespace)] * 2)
        started = [self.admit(seq, namespace) for seq in twins if isinstance(seq, Sequence)]
        self.checkpoint_many(started, len(prompt), None, slip=False)
        return multiple(*started)

    @rule(number=consumes(sequences), how=st.sampled_from(["finish", "abort", "drop", "leave", "fail"]))
    def end(self, number: int, how: str) -> None:
        """Every way a request ends, at any point of its life."""
        seq = self.live.pop(number).seq
        if how == "leave":
            seq.__exit__(None, None, None)
        elif how == "fail":
            seq.__exit__(RuntimeError, RuntimeError("the request failed"), None)
        elif how != "drop":
            getattr(seq, how)()
        self.ended = [] if how == "drop" else [seq]

    @precondition(lambda self: self.live)
    @rule(target=CacheMachine.stored, number=CacheMachine.leases, drawn=depths)
    def publish(self, number: int, drawn: tuple[int, bool]) -> Any:
        """Without KV a lease can publish as a sequence does; with pages of the cache's own it is misuse."""
        leased = self.leased[number]
        known = leased.prompt[: self.depth(drawn, len(leased.prompt))]
        slot, held = next((slot, key) for request in self.live.values() for slot, key in request.held.items())
        self.write(slot, (leased.namespace, tuple(known)))
        published = allowed(lambda: leased.lease.publish(known, source=slot))
        self.write(slot, held)
        return published.outcome if published and isinstance(published.outcome, Stored) else multiple()

    def misuses(self) -> list[tuple[type[MisuseError], Callable[[], object]]]:
        """Calls that are wrong just now."""
        live = [request.seq for request in self.live.values()]
        return super().misuses() + of_schedulers(self.cache, self.grid, self.foreign, live[-1:], self.ended)

    @invariant()
    def states_stay(self) -> None:
        """The slots of running requests hold what the model left in them."""
        for request in self.live.values():
            for slot, key in request.held.items():
                if not self.cache.active.state(slot).isfinite().all():
                    continue
                self.expect(slot, key)


class EngineMachine(CacheMachine):
    """Leases: the engine hands out slots and pages, and the cache adopts what is published."""

    @initialize(spec=strategies.specs(), options=strategies.sizes(external=True))
    def begin(self, spec: StateSpec, options: dict[str, Any]) -> None:
        """A cache of any kind, and an engine with all pages."""
        self.open(spec, options)
        self.free = list(range(1, self.cache.usage("kv").capacity + 1))  # pages

    @rule(number=CacheMachine.leases, slot=st.sampled_from([1, 2, 2, 2]))
    def load(self, number: int, slot: int) -> None:
        """The state goes where the engine likes, once; for a miss there is none."""
        leased = self.leased[number]
        depth = leased.lease.match.length
        try:
            leased.lease.load(slot)
        except AlreadyLoadedError:
            return
        self.expect(slot, (leased.namespace, tuple(leased.prompt[:depth])) if depth else None)

    @rule(
        target=CacheMachine.stored,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        in_step=rarely,
        pressure=pressures,
    )
    def serve(self, prompt: list[int], namespace: Namespace, again: int, in_step: bool, pressure: Any) -> Any:
        """A whole request, which fills the cache for the others; short of pages, the engine asks for some."""
        if in_step:
            with self.cache.step() as self.steps:
                return self.serve(prompt, namespace, again, False, pressure)
        prompt, namespace = self.ask(prompt, namespace, again)
        self.cache.evict("kv", max(0, len(prompt) // self.cache.page_size - len(self.free)))
        self.take_freed()
        number = self.lease(self.lookup(prompt, namespace, 0, None))
        self.load(number, 2)
        stored = self.publish(number, (len(prompt), True), "none", None)
        self.release(number, drop=False)
        self.served += [(prompt, namespace)] if isinstance(stored, Stored) else []
        if pressure:
            self.cache.evict(pressure, 1)
        return stored

    @rule(
        target=CacheMachine.stored,
        number=CacheMachine.leases,
        drawn=depths,
        slip=st.sampled_from(
            ["none"] * 6 + ["one page too many", "a page twice", "a cached page", "no slot"]
        ),
        value=values,
    )
    def publish(self, number: int, drawn: tuple[int, bool], slip: str, value: float | None) -> Any:
        """The engine has computed on, perhaps to a state that is not finite, and perhaps slips."""
        leased = self.leased[number]
        known = leased.prompt[: self.depth(drawn, len(leased.prompt))]
        pages = self.new_pages(leased.lease, len(known), slip)
        self.write(1, (leased.namespace, tuple(known)), value)
        source = 0 if slip == "no slot" else 1
        published = allowed(lambda: leased.lease.publish(known, source=source, pages=pages))
        if published is None:
            return multiple()
        adopted = set(leased.lease.pages) & set(pages)
        self.free = [page for page in self.free if page not in adopted]
        return published.outcome if isinstance(published.outcome, Stored) else multiple()

    def new_pages(self, lease: Lease, depth: int, slip: str) -> list[int]:
        """Free pages for the tokens past the lease, and perhaps a wrong one."""
        cached = lease.pages
        pages = self.free[: max(0, depth // self.cache.page_size - len(cached))]
        return {
            "one page too many": pages + self.free[-1:],
            "a page twice": pages[1:] + pages[-1:],
            "a cached page": cached[:1] + pages[1:],
        }.get(slip, pages)

    @rule()
    def take_freed(self) -> None:
        """What was evicted is the engine's again."""
        self.free += self.cache.take_freed("kv")

    def misuses(self) -> list[tuple[type[MisuseError], Callable[[], object]]]:
        """Calls that are wrong just now."""
        leased = [each.lease for each in self.leased.values()]
        return super().misuses() + of_engines(self.cache, leased[-1:])

    @invariant()
    def adopted_pages_are_not_the_engines(self) -> None:
        """No page is free in the engine and cached."""
        self.cache.check(engine_free=self.free)
