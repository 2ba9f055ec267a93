"""A scheduler that lets the cache hand out slots and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from radixstate import Namespace, StartRequest, StateSpec, Stored
from radixstate.errors import MisuseError
from radixstate.testing import strategies
from radixstate.testing.base_machine import (
    CacheMachine,
    Key,
    Prompts,
    again,
    allowed,
    depths,
    mostly,
    namespaces,
    pressures,
    prompts,
    rarely,
    values,
    warm,
)
from radixstate.testing.checked import CheckedCache, CheckedSequence
from radixstate.testing.misuses import of_schedulers


@dataclass
class Running:
    """A request, and the prefix whose state each of its slots holds."""

    seq: CheckedSequence
    namespace: Namespace
    held: dict[int, tuple[Key | None, float | None]] = field(default_factory=dict)  # as `write` puts it there
    reached: dict[int, int] = field(default_factory=dict)  # how deep the state in each slot has come

    def key(self, depth: int) -> Key:
        """The first `depth` of its tokens."""
        return self.namespace, tuple(self.seq.tokens[:depth])

    def least(self, slot: int) -> int:
        """The shallowest state that a slot may still give."""
        return max(self.reached.get(slot, 0), self.seq.reused)


class SchedulerMachine(CacheMachine):
    """Sequences: the cache hands out slots and pages."""

    sequences = Bundle("sequences")
    cache: CheckedCache

    def __init__(self) -> None:
        """No request."""
        super().__init__()
        self.live: dict[int, Running] = {}
        self.ended: list[CheckedSequence] = []

    @initialize(spec=strategies.specs(), options=strategies.sizes(), warm=warm)
    def begin(self, spec: StateSpec, options: dict[str, Any], warm: Prompts) -> None:
        """A cache of any size."""
        self.open(CheckedCache(spec, **options))
        self.warm(warm)

    def admit(self, seq: CheckedSequence, namespace: Namespace) -> int:
        """A request has started: the model goes on from the state in its slot."""
        request, number = Running(seq, namespace), next(self.numbers)
        request.held[seq.slot] = request.key(seq.reused) if seq.reused else None, None
        self.expect(seq.slot, *request.held[seq.slot])
        self.live[number] = request
        for slot in seq.slots[1:]:
            self.compute(number, slot, 0)
        return number

    def compute(self, number: int, slot: int, depth: int, value: float | None = None) -> None:
        """The model computes a request's state at a depth."""
        request = self.live[number]
        request.held[slot] = request.key(depth), value
        self.write(slot, *request.held[slot])

    @precondition(lambda self: self.has_room())
    @rule(
        target=sequences,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        reserve=st.none() | st.none() | st.integers(0, 20),
        most=st.none() | st.none() | st.integers(0, 12),
        no_read=rarely,
        no_store=rarely,
        slots=st.sampled_from([1] * 8 + [2, 2, 3, 9, 0]),  # 9: more than there are
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
        slots: int,
    ) -> Any:
        """A request, with any option."""
        prompt, namespace = self.ask(prompt, namespace, again)
        options: Any = {"reserve": reserve, "max_length": most, "no_read": no_read, "no_store": no_store}
        options["slots"] = slots
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace, **options))
        return multiple() if seq is None else self.admit(seq, namespace)

    @rule(
        target=sequences,
        drawn=st.lists(st.tuples(prompts, namespaces, again), min_size=1, max_size=4),
        empty=rarely,
        slots=st.sampled_from([1, 1, 1, 2]),
    )
    def start_many(self, drawn: list[tuple[list[int], Namespace, int]], empty: bool, slots: int) -> Any:
        """A scheduler step's worth of requests, of which some are refused."""
        asked = [self.ask(*each) for each in drawn] + [([], strategies.NAMESPACES[0])] * empty
        requests = [StartRequest(*each, slots=slots) for each in asked]
        outcomes = zip(self.cache.start_many(requests), asked, strict=True)
        started = [(seq, namespace) for seq, (_, namespace) in outcomes if isinstance(seq, CheckedSequence)]
        return multiple(*[self.admit(seq, namespace) for seq, namespace in started])

    @rule(number=sequences, n=st.integers(0, 6))
    def grow(self, number: int, n: int) -> None:
        """A draft, or the next chunk."""
        allowed(lambda: self.live[number].seq.grow(n))

    @rule(number=sequences, evicting=st.booleans(), beyond=st.integers(-1, 1), rejected=mostly)
    def grow_to_the_edge(self, number: int, evicting: bool, beyond: int, rejected: bool) -> None:
        """A draft as long as free pages allow, or those that can be evicted too, or a page more or less."""
        usage, seq = self.cache.usage("kv"), self.live[number].seq
        pages = usage.free + usage.evictable * evicting + beyond
        allowed(lambda: seq.grow(max(0, pages) * self.cache.page_size))
        if rejected:
            seq.shrink()

    @rule(number=sequences, more=st.lists(st.integers(0, 1), max_size=6))
    def append(self, number: int, more: list[int]) -> None:
        """Accepted tokens, perhaps too many."""
        allowed(lambda: self.live[number].seq.append(more))

    @rule(number=sequences)
    def shrink(self, number: int) -> None:
        """A draft was rejected."""
        self.live[number].seq.shrink()

    @rule(number=sequences, most=st.sampled_from([1, 1, 1, 6]))
    def take_slot(self, number: int, most: int) -> None:
        """A slot for a state on the way, or as many as there are."""
        for _ in range(most):
            slot = allowed(self.live[number].seq.take_slot)
            if slot is None:
                return
            self.compute(number, slot, 0)

    def source(self, number: int, which: str) -> int:
        """The running slot of a request, the last one it took on the way, or nobody's."""
        request = self.live[number]
        if which == "track" and len(request.held) == 1:
            self.take_slot(number, 1)
        return {"running": request.seq.slot, "track": [*request.held][-1], "nobody's": 0}[which]

    @rule(number=sequences, which=st.sampled_from(["track"] * 4 + ["running", "nobody's"]))
    def give_back_slot(self, number: int, which: str) -> None:
        """A slot for a state on the way goes back before its request ends; no other does."""
        request, slot = self.live[number], self.source(number, which)
        allowed(lambda: request.seq.give_back_slot(slot))
        if slot != request.seq.slot:
            request.held.pop(slot, None)
            request.reached.pop(slot, None)

    @rule(
        target=CacheMachine.stored,
        number=sequences,
        drawn=depths,
        which=st.sampled_from(["running"] * 4 + ["track"] * 2 + ["nobody's"]),
        value=values,
        back=rarely,
    )
    def checkpoint(
        self, number: int, drawn: tuple[int, bool], which: str, value: float | None, back: bool = False
    ) -> Any:
        """From any slot of the request or from nobody's, at any depth, finite or not."""
        request = self.live[number]
        depth = self.depth(drawn, min(request.seq.length, request.seq.claimed))
        source = self.source(number, which)
        depth = depth if back else max(depth, request.least(source))
        if source:
            self.compute(number, source, depth, value)
        stored = allowed(lambda: request.seq.checkpoint(depth, source=source))
        if stored is not None:
            request.reached[source] = depth
            if source != request.seq.slot:
                self.compute(number, source, 0)  # a further slot gives its state once
        return stored if isinstance(stored, Stored) else multiple()

    @rule(target=CacheMachine.stored, number=sequences, drawn=depths)
    def checkpoint_from_a_slot_taken_again(self, number: int, drawn: tuple[int, bool]) -> Any:
        """A slot that goes back and is taken again may hold a shallower state than in its first life."""
        self.checkpoint(number, (20, True), "track", None)
        self.give_back_slot(number, "track")
        return self.checkpoint(number, drawn, "track", None, back=True)

    @rule(
        target=CacheMachine.stored,
        numbers=st.lists(sequences, min_size=1, max_size=3),
        limit=st.integers(1, 20),
        value=values,
        slip=st.sampled_from(["none", "none", "nobody's slot", "two depths"]),
    )
    def checkpoint_many(self, numbers: list[int], limit: int, value: float | None, slip: str) -> Any:
        """All are reserved before the first is committed: one may find its prefix stored meanwhile."""
        states = []
        for number in numbers:
            request = self.live[number]
            depth = self.cache.legal_depth(min(limit, request.seq.length, request.seq.claimed))
            depth = max(depth, request.least(request.seq.slot))
            self.compute(number, request.seq.slot, depth, value if number == numbers[-1] else None)
            states.append((request.seq, depth, request.seq.slot))
        if slip == "nobody's slot":
            states.append((self.live[numbers[0]].seq, 0, 0))
        if slip == "two depths":
            seq, depth, slot = states[0]
            states.append((seq, max(0, depth - self.grid), slot))
        outcomes = allowed(lambda: self.cache.checkpoint_many(states)) or []
        for number, _ in zip(numbers, outcomes, strict=False):
            request = self.live[number]
            request.reached[request.seq.slot] = states[numbers.index(number)][1]
        return multiple(*[it for it in outcomes if isinstance(it, Stored)])

    def has_room(self) -> bool:
        """An active slot is free."""
        return self.cache.usage("active").free > 0

    def request(self, prompt: list[int], namespace: Namespace) -> Any:
        """Starts, caches a state as deep as is legal, and finishes."""
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace))
        if seq is None:
            return multiple()
        number = self.admit(seq, namespace)
        stored = self.checkpoint(number, (len(prompt), True), "running", None)
        self.end(number, "finish")
        return stored

    @precondition(lambda self: self.served and self.has_room())
    @rule(again=st.integers(1, 4), pressure=pressures)
    def probe(self, again: int, pressure: Any) -> None:
        """A request that only reads: what it hits is the last to be evicted."""
        prompt, namespace = self.ask([0], strategies.NAMESPACES[0], again)
        seq = allowed(lambda: self.cache.start(prompt, namespace=namespace))
        if seq is not None:
            self.end(self.admit(seq, namespace), "finish")
        if pressure:
            self.cache.evict(pressure, 1)

    @precondition(lambda self: self.cache.usage("active").free > 1)
    @rule(target=sequences, prompt=prompts, namespace=namespaces)
    def race(self, prompt: list[int], namespace: Namespace) -> Any:
        """Two requests compute the same prefix at the same time, and go on."""
        twins = self.cache.start_many([StartRequest(prompt, namespace)] * 2)
        started = [self.admit(seq, namespace) for seq in twins if isinstance(seq, CheckedSequence)]
        self.checkpoint_many(started, len(prompt), None, slip="none")
        return multiple(*started)

    @precondition(lambda self: self.cache.usage("active").free > 1)
    @rule(target=sequences, prompt=prompts, namespace=namespaces)
    def overtake(self, prompt: list[int], namespace: Namespace) -> Any:
        """Two requests compute the same prefix in one step, and each stores past what the other has."""
        twins = self.cache.start_many([StartRequest(prompt, namespace)] * 2)
        started = [self.admit(seq, namespace) for seq in twins if isinstance(seq, CheckedSequence)]
        turns = [(number, self.grid) for number in started[:1]] + [(it, len(prompt)) for it in started[::-1]]
        with self.cache.step() as step:
            self.steps = step.id
            for number, depth in turns:
                self.checkpoint(number, (depth, True), "running", None)
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

    def misuses(self) -> list[tuple[type[MisuseError], Callable[[], object]]]:
        """Calls that are wrong just now."""
        live = [request.seq for request in self.live.values()]
        return super().misuses() + of_schedulers(self.cache, self.grid, self.foreign, live[-1:], self.ended)

    @invariant()
    def states_stay(self) -> None:
        """The slots of running requests hold what the model left in them."""
        for request in self.live.values():
            for slot, held in request.held.items():
                self.expect(slot, *held)
