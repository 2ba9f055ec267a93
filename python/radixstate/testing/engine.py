"""An engine that hands out slots and pages itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from radixstate import Namespace, StateSpec, Stored
from radixstate.errors import AlreadyLoadedError, MisuseError
from radixstate.testing import strategies
from radixstate.testing.base_machine import (
    CacheMachine,
    Prompts,
    allowed,
    depths,
    prompts,
    rarely,
    values,
    warm,
)
from radixstate.testing.checked import CheckedLease
from radixstate.testing.misuses import of_engines

slips = st.sampled_from(
    ["none"] * 5 + ["one page too many", "a page twice", "a cached page", "no slot", "no slot"]
)


class EngineMachine(CacheMachine):
    """Leases: the engine hands out slots and pages, and the cache adopts what is published."""

    @initialize(spec=strategies.specs(), options=strategies.sizes(external=True), warm=warm)
    def begin(self, spec: StateSpec, options: dict[str, Any], warm: Prompts) -> None:
        """A cache of any kind, and an engine with all pages."""
        self.open(spec, options)
        self.free = list(range(1, self.cache.usage("kv").capacity + 1))  # pages
        self.warm(warm)

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

    def request(self, prompt: list[int], namespace: Namespace) -> Any:
        """Leases, loads, publishes and releases; short of pages, the engine asks for some."""
        self.cache.evict("kv", max(0, len(prompt) // self.cache.page_size - len(self.free)))
        self.take_freed()
        number = self.lease(self.lookup(prompt, namespace, 0, None))
        self.load(number, 2)
        stored = self.publish(number, (len(prompt), True), "none", None)
        self.release(number, drop=False)
        return stored

    @rule(
        target=CacheMachine.stored,
        number=CacheMachine.leases,
        drawn=depths,
        slip=slips,
        value=values,
        forget=rarely,
    )
    def publish(
        self, number: int, drawn: tuple[int, bool], slip: str, value: float | None, forget: bool = False
    ) -> Any:
        """The engine has computed on, perhaps to a state that is not finite, and perhaps slips."""
        leased = self.leased[number]
        if not forget:
            self.load(number, 2)
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

    @precondition(lambda self: self.served)
    @rule(target=CacheMachine.stored, again=st.integers(1, 4), more=prompts)
    def forget_to_load(self, again: int, more: list[int]) -> Any:
        """A lease whose state nobody loads: what it would publish past that is refused, and then it ends."""
        self.take_freed()
        prompt, namespace = self.ask(more[:1], strategies.NAMESPACES[0], again)
        prompt = [*prompt, *more]
        number = self.lease(self.lookup(prompt, namespace, 0, None))
        stored = self.publish(number, (len(prompt), True), "none", None, forget=True)
        self.release(number, drop=False)
        return stored

    def new_pages(self, lease: CheckedLease, depth: int, slip: str) -> list[int]:
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
