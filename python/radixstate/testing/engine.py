"""An engine that allocates its pages itself, and perhaps its active slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
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

from radixstate import Match, Namespace, StateSpec, Stored
from radixstate.errors import (
    AlreadyLoadedError,
    LengthMismatchError,
    MisuseError,
    PageOwnershipError,
    SlotError,
)
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
    prompts,
    rarely,
    values,
    warm,
)
from radixstate.testing.checked_engine import CheckedEngineCache, CheckedLease
from radixstate.testing.misuses import of_engines
from radixstate.testing.pages import EnginePages

slips = st.sampled_from(["none"] * 6 + ["one page too many", "a page twice", "a cached page"])
sources = st.sampled_from(["own"] * 6 + ["no slot", "another's"])


@dataclass
class Leased:
    """A lease, the prompt that was looked up, and the prefix whose state each of its slots holds."""

    lease: CheckedLease
    namespace: Namespace
    prompt: list[int]
    held: dict[int, tuple[Key | None, float | None]] = field(default_factory=dict)

    def key(self, depth: int) -> Key:
        """The first `depth` tokens of its prompt."""
        return self.namespace, tuple(self.prompt[:depth])


class EngineMachine(CacheMachine):
    """Leases: the engine allocates pages, and the cache takes over what is shared.

    The engine names its pages, or maps numbers of the cache to them. Active slots 1 and 2 are the engine's, or the
    cache hands them out.
    """

    leases = Bundle("leases")
    cache: CheckedEngineCache

    def __init__(self) -> None:
        """No lease."""
        super().__init__()
        self.leased: dict[int, Leased] = {}
        self.released: list[CheckedLease] = []

    @initialize(spec=strategies.specs(), options=strategies.engine_sizes(), warm=warm)
    def begin(self, spec: StateSpec, options: dict[str, Any], warm: Prompts) -> None:
        """A cache of any kind, and an engine with all pages."""
        self.open(CheckedEngineCache(spec, **options))
        self.pages = EnginePages(self.cache)
        self.warm(warm)

    @rule(target=leases, found=CacheMachine.matches)
    def lease(self, found: tuple[Match, Namespace, list[int]]) -> Any:
        """Stale ones are refused."""
        lease = allowed(lambda: self.cache.lease(found[0]))
        if lease is None:
            return multiple()
        number = next(self.numbers)
        self.leased[number] = Leased(lease, found[1], [*found[2]])
        return number

    @rule(target=leases, prompt=prompts, namespace=namespaces, again=again)
    def lease_at_once(self, prompt: list[int], namespace: Namespace, again: int) -> Any:
        """What a lookup finds is leased before anything else happens."""
        return self.lease(self.lookup(prompt, namespace, again, None))

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

    @rule(target=leases, number=leases, more=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, number: int, more: list[int]) -> Any:
        """A second answer to the same prompt, which goes on by itself."""
        leased, forked = self.leased[number], next(self.numbers)
        self.leased[forked] = Leased(leased.lease.fork(), leased.namespace, [*leased.prompt, *more])
        return forked

    # --- active slots ---

    def has_room(self) -> bool:
        """A request can have an active slot."""
        return not self.cache.own_slots or self.cache.usage("active").free > 0

    def slot(self, number: int, which: str = "own") -> int:
        """A slot of a lease, and if it can have none, one that no pool has."""
        leased = self.leased[number].lease
        if which == "no slot":
            return 0
        if not self.cache.own_slots:
            return 1 if which == "own" else 2
        if which == "another's":
            return next((it for it in range(1, self.cache.active.slots + 1) if it not in leased.slots), 0)
        if not leased.slots:
            self.take_slot(number)
        return leased.slots[-1] if leased.slots else 0

    def compute(self, number: int, slot: int, depth: int, value: float | None = None) -> None:
        """The model computes a request's state at a depth, in a slot that may be no slot of it."""
        leased = self.leased[number]
        if slot in leased.lease.slots:
            leased.held[slot] = leased.key(depth), value
        elif self.cache.own_slots or not slot:
            return
        self.write(slot, leased.key(depth), value)

    @precondition(lambda self: self.cache.own_slots)
    @rule(number=leases)
    def take_slot(self, number: int) -> None:
        """Another slot, or none is free."""
        slot = allowed(self.leased[number].lease.take_slot)
        if slot is not None:
            self.compute(number, slot, 0)

    @precondition(lambda self: self.cache.own_slots)
    @rule(number=leases, which=st.sampled_from(["own", "own", "another's"]))
    def give_back_slot(self, number: int, which: str) -> None:
        """A slot goes back before its request ends; no other does."""
        slot = self.slot(number, which)
        allowed(lambda: self.leased[number].lease.give_back_slot(slot))
        self.leased[number].held.pop(slot, None)

    @rule(number=leases, which=st.sampled_from(["own"] + ["another's"] * 3))
    def load(self, number: int, which: str = "own") -> None:
        """The state goes where the engine likes, once; for a miss there is none."""
        leased = self.leased[number]
        slot = self.slot(number, "own" if self.cache.own_slots else which)
        depth = leased.lease.match.length
        try:
            leased.lease.load(slot)
        except (AlreadyLoadedError, SlotError):
            return
        key = leased.key(depth) if depth else None
        self.expect(slot, key)
        if self.cache.own_slots:
            leased.held[slot] = key, None

    # --- sharing ---

    def request(self, prompt: list[int], namespace: Namespace) -> Any:
        """Leases, loads, shares and releases; short of pages, the engine asks for some."""
        missing = len(prompt) // self.cache.page_size - len(self.pages.free)
        if missing > 0:
            self.cache.evict("kv", missing)
            self.take_freed("list")
        number = self.lease(self.lookup(prompt, namespace, 0, None))
        if len(prompt) % 2:
            stored = self.publish(number, (len(prompt), True), "none", "own", None)
        else:
            self.extend(number, len(prompt), True, "none")
            stored = self.attach(number, (len(prompt), True), "own", None)
        self.release(number, drop=False)
        return stored

    def share(self, number: int, depth: int, slip: str, call: Callable[[list[int], Any], Any]) -> Any:
        """The engine has computed on, and perhaps slips: what `call` says to the tokens and their pages."""
        leased = self.leased[number]
        lease, known = leased.lease, leased.prompt[:depth]
        before = len(lease.pages)
        pages = self.pages.compute(leased.namespace, known, lease.depth)
        given = self.named(pages, slip)
        made = allowed(lambda: call(known, given))
        self.pages.hand_over(pages, lease.pages[before:], made.replaced if made else None)
        return made

    def named(self, pages: list[int], slip: str) -> list[int] | None:
        """How the engine names pages, perhaps wrongly: not at all where the cache numbers them."""
        if slip == "none":
            return None if self.cache.logical else pages
        return {
            "one page too many": pages + self.pages.free[-1:],
            "a page twice": pages[1:] + pages[-1:],
            "a cached page": self.pages.cached()[:1] + pages[1:],
        }[slip]

    @rule(
        target=CacheMachine.stored,
        number=leases,
        drawn=depths,
        slip=slips,
        source=sources,
        value=values,
        forget=rarely,
    )
    def publish(
        self,
        number: int,
        drawn: tuple[int, bool],
        slip: str,
        source: str,
        value: float | None,
        forget: bool = False,
    ) -> Any:
        """A state, perhaps not finite, and its pages."""
        leased = self.leased[number]
        if not forget:
            self.load(number)
        depth, slot = self.depth(drawn, len(leased.prompt)), self.slot(number, source)
        self.compute(number, slot, depth, value)
        published = self.share(
            number, depth, slip, lambda known, pages: leased.lease.publish(known, source=slot, pages=pages)
        )
        return published.outcome if published and isinstance(published.outcome, Stored) else multiple()

    @rule(number=leases, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, number: int, more: list[int]) -> None:
        """The request has more tokens, and shares those pages that are full now."""
        self.leased[number].prompt += more
        self.extend(number, len(self.leased[number].prompt), True, "none")

    @rule(number=leases, depth=st.integers(1, 20), whole=mostly, slip=slips, forget=rarely)
    def extend(self, number: int, depth: int, whole: bool, slip: str, forget: bool = False) -> None:
        """Pages alone, as after a chunk of a prefill."""
        leased = self.leased[number]
        if not forget:
            self.load(number)
        depth = min(depth, len(leased.prompt))
        depth -= depth % self.cache.page_size if whole else 0
        self.share(number, depth, slip, leased.lease.extend)

    @rule(target=CacheMachine.stored, number=leases, drawn=depths, source=sources, value=values)
    def attach(self, number: int, drawn: tuple[int, bool], source: str, value: float | None) -> Any:
        """A state of what is leased, or of more."""
        leased = self.leased[number]
        depth, slot = self.depth(drawn, leased.lease.depth), self.slot(number, source)
        self.compute(number, slot, depth, value)
        known = leased.prompt[:depth]
        stored = allowed(lambda: leased.lease.attach(known, source=slot))
        return stored if isinstance(stored, Stored) else multiple()

    @rule(target=CacheMachine.stored, number=leases, drawn=depths)
    def attach_past_the_lease(self, number: int, drawn: tuple[int, bool]) -> Any:
        """A legal depth whose pages nobody has shared."""
        leased = self.leased[number]
        slot = self.slot(number)
        depth = min(self.depth(drawn, 20), len(leased.prompt))
        if depth > leased.lease.depth:
            return self.attach(number, (depth, False), "own" if slot else "no slot", None)
        return multiple()

    @precondition(lambda self: self.has_room())
    @rule(target=leases, prompt=prompts, namespace=namespaces, in_step=st.booleans(), shares=st.booleans())
    def race(self, prompt: list[int], namespace: Namespace, in_step: bool, shares: bool) -> Any:
        """Two requests compute the same prompt at once: the second finds what the first has shared."""
        found = self.lookup(prompt, namespace, 0, None)
        twins = [number for number in (self.lease(found), self.lease(found)) if number in self.leased]
        if in_step and len(self.flying) < 3:
            self.begin_step()
        for number in twins:
            if shares:
                self.extend(number, len(prompt), True, "none")
            else:
                self.publish(number, (len(prompt), True), "none", "own", None)
        return multiple(*twins)

    @precondition(lambda self: self.served)
    @rule(target=CacheMachine.stored, again=st.integers(1, 4), more=prompts)
    def forget_to_load(self, again: int, more: list[int]) -> Any:
        """A lease whose state nobody loads: what it would publish past that is refused, and then it ends."""
        self.take_freed("list")
        prompt, namespace = self.ask(more[:1], strategies.NAMESPACES[0], again)
        prompt = [*prompt, *more]
        number = self.lease(self.lookup(prompt, namespace, 0, None))
        stored = self.publish(number, (len(prompt), True), "none", "own", None, forget=True)
        self.release(number, drop=False)
        return stored

    @rule(how=st.sampled_from(["list", "list", "buffer", "a buffer that is too short"]))
    def take_freed(self, how: str) -> None:
        """What was evicted is the engine's again."""
        if how == "list":
            return self.pages.take_back(self.cache.take_freed())
        waiting = self.cache.usage("kv").outbox
        room: Any = np.zeros(max(0, waiting - (how != "buffer")), np.int32)
        try:
            freed = self.cache.copy_freed(room)
        except LengthMismatchError:
            return None
        return self.pages.take_back(room[:freed].tolist())

    def misuses(self) -> list[tuple[type[MisuseError], Callable[[], object]]]:
        """Calls that are wrong just now."""
        leased = [*self.leased.values()][-1:]
        live = [each.lease for each in leased]
        wrong = super().misuses() + of_engines(self.cache, self.foreign, live, self.released)
        cached = [] if self.cache.logical else self.pages.cached()[:1]
        for each in leased if cached else []:
            if each.lease.state is None:
                known = [*each.prompt[: each.lease.depth], *[7] * self.cache.page_size]
                wrong.append((PageOwnershipError, partial(each.lease.extend, known, cached)))
        return wrong

    # --- always ---

    @invariant()
    def adopted_pages_are_not_the_engines(self) -> None:
        """No page is free in the engine and cached."""
        self.cache.check(None if self.cache.logical else self.pages.free)

    @invariant()
    def leased_pages_hold_their_tokens(self) -> None:
        """Whatever was evicted, replaced or taken back meanwhile."""
        for each in self.leased.values():
            self.pages.require(each.lease.pages, each.namespace, each.prompt)

    @invariant()
    def states_stay(self) -> None:
        """The slots of requests hold what the model left in them."""
        for each in self.leased.values():
            for slot, held in each.held.items():
                self.expect(slot, *held)
