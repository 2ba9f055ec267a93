"""What fuzzing a scheduler and an engine have in common: the use of the public API, and every misuse.

A machine stands for a model: the state after a prefix is a pattern of that prefix, which every format keeps exactly.
A slot that holds another prefix's state therefore shows, besides all that `CheckedCache` compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from math import inf, nan
from typing import Any, SupportsIndex, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    precondition,
    rule,
)

from radixstate import Namespace, StateSpec, Stored
from radixstate.errors import MisuseError, NeverFitsError, OutOfSlotsError
from radixstate.testing import strategies
from radixstate.testing.checked_base import CheckedBase, CheckedStep
from radixstate.testing.compare import Disagreement
from radixstate.testing.misuses import Foreign, of_every_cache

T = TypeVar("T")
Key = tuple[Namespace, tuple[int, ...]]  # what a state belongs to
Prompts = list[tuple[list[int], Namespace]]

prompts, namespaces, rarely = (
    strategies.prompts(),
    strategies.namespaces(),
    st.sampled_from([False] * 4 + [True]),
)
mostly = st.sampled_from([True] * 4 + [False])
depths = st.tuples(st.integers(1, 20), st.sampled_from([True, True, True, False]))  # mostly made legal
values = st.sampled_from([None] * 9 + [nan, inf, -inf])  # none: the state is finite
pressures = st.sampled_from([None, None, "kv", "checkpoint"])  # evicted for after a request
again = st.sampled_from([0, 0, 1, 1, 2, 3])  # a new prompt, or one that goes on from one cached lately
warm = st.lists(st.tuples(prompts, namespaces), min_size=2, max_size=4)  # served before the first rule


def pattern(spec: StateSpec, key: Key | None, value: float | None = None) -> list[torch.Tensor]:
    """State (layers, heads, *matrix) and windows (layers, *shape) of a prefix, or the empty ones.

    Whole numbers up to 127, which the largest of each k-channel is: int8 then has scale 1 and loses nothing.
    `value` is put where it does most harm.
    """
    if key is None:
        shape = (spec.layers, spec.heads, *spec.matrix)
        return [torch.zeros(shape), *[torch.zeros(spec.layers, *window.shape) for window in spec.conv]]
    namespace, tokens = key
    seed = zlib.crc32(
        repr((namespace.adapter, namespace.tenant, namespace.weights, namespace.salts, tokens)).encode()
    )
    state = torch.full((spec.layers, spec.heads, spec.d_k, spec.d_v), 127.0)
    rest = state[..., 1:]
    rest[:] = ((seed >> (torch.arange(rest.numel()) % 24)) % 255 - 127.0).reshape(rest.shape)
    state = state.mT if spec.layout == "k_last" else state
    if value is not None:
        state[-1, -1, -1, -1] = value
    return [state, *[torch.full((spec.layers, *window.shape), float(seed % 251)) for window in spec.conv]]


def allowed(call: Callable[[], T]) -> T | None:
    """What a call returned; none if it was refused, which `CheckedCache` has found right."""
    try:
        return call()
    except (OutOfSlotsError, NeverFitsError, MisuseError):
        return None


class CacheMachine(RuleBasedStateMachine):
    """What schedulers and engines have in common."""

    matches = Bundle("matches")
    stored = Bundle("stored")
    cache: CheckedBase[Any, Any]

    def __init__(self) -> None:
        """Nothing yet: the first rule makes the cache."""
        super().__init__()
        self.numbers = count(1)
        self.flying: list[CheckedStep] = []
        self.steps = 0  # the newest one begun
        self.served: Prompts = []

    def open(self, cache: CheckedBase[Any, Any]) -> None:
        """Takes the cache, which is new."""
        self.cache = cache
        self.grid = next(n for n in range(1, 21) if self.cache.legal_depth(n))
        self.foreign = Foreign(cache.spec)

    def warm(self, prompts: Prompts) -> None:
        """Serves some requests first: there is little to find in an empty cache."""
        for prompt, namespace in prompts:
            self.serve(prompt, namespace, again=0, in_step=False, pressure=None)

    # --- the model ---

    def write(self, slot: int, key: Key | None, value: float | None = None) -> None:
        """The model computes a state, or has none yet."""
        for part, computed in zip(self.parts(slot), pattern(self.cache.spec, key, value), strict=True):
            part.copy_(computed)

    def expect(self, slot: int, key: Key | None, value: float | None = None) -> None:
        """An active slot holds what `write` puts there."""
        for part, computed in zip(self.parts(slot), pattern(self.cache.spec, key, value), strict=True):
            if not torch.allclose(part.float(), computed, rtol=0, atol=0, equal_nan=True):
                raise Disagreement(f"active slot {slot} does not hold the state of {key}")

    def parts(self, slot: int) -> list[torch.Tensor]:
        """Views of the state and of the windows in an active slot."""
        active = self.cache.active
        return [active.state(slot), *[active.conv(i, slot) for i in range(len(self.cache.spec.conv))]]

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

    def has_room(self) -> bool:
        """Whether a whole request may start."""
        return True

    def request(self, prompt: list[int], namespace: Namespace) -> Any:
        """A whole request, and what it stored."""
        raise NotImplementedError  # a scheduler and an engine call different methods for it

    @precondition(lambda self: self.has_room())
    @rule(
        target=stored,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        in_step=rarely,
        pressure=pressures,
    )
    def serve(self, prompt: list[int], namespace: Namespace, again: int, in_step: bool, pressure: Any) -> Any:
        """A whole request, which fills the cache for the others, and perhaps memory pressure from it."""
        if in_step:
            with self.cache.step() as step:
                self.steps = step.id
                return self.serve(prompt, namespace, again, False, pressure)
        prompt, namespace = self.ask(prompt, namespace, again)
        stored = self.request(prompt, namespace)
        self.served += [(prompt, namespace)] if isinstance(stored, Stored) else []
        if pressure:
            self.cache.evict(pressure, 1)
        return stored

    @precondition(lambda self: self.has_room())
    @rule(prompt=prompts, namespace=namespaces, again=again, failed=st.booleans())
    def serve_in_vain(self, prompt: list[int], namespace: Namespace, again: int, failed: bool) -> None:
        """A whole request whose state turns out not to be finite when its step ends, or whose step fails."""
        step = self.cache.begin_step()
        self.steps = step.id
        stored = self.serve(prompt, namespace, again, False, None)
        refused = [stored] if isinstance(stored, Stored) and not failed else []
        self.cache.retire_step(step, refused, failed=failed)

    @precondition(lambda self: self.has_room())
    @rule(prompt=prompts, namespace=namespaces, again=again)
    def serve_until_something_raises(self, prompt: list[int], namespace: Namespace, again: int) -> None:
        """A whole request in a step that ends with an exception."""
        before, stored = self.cache.stats().skipped.non_finite, None
        with suppress(ZeroDivisionError), self.cache.step() as step:
            self.steps = step.id
            stored = self.serve(prompt, namespace, again, False, None)
            raise ZeroDivisionError
        if isinstance(stored, Stored) and self.cache.stats().skipped.non_finite == before:
            raise Disagreement(f"the state at depth {stored.depth} outlived the failure of its step")

    @rule(
        target=matches,
        prompt=prompts,
        namespace=namespaces,
        again=again,
        most=st.none() | st.none() | st.integers(0, 6),
        whole=rarely,
    )
    def lookup(
        self, prompt: list[int], namespace: Namespace, again: int, most: int | None, whole: bool = False
    ) -> Any:
        """A lookup may be used at once, later or never."""
        prompt, namespace = self.ask(prompt, namespace, again)
        options: Any = {"whole": True} if whole else {"max_length": most}
        return self.cache.lookup(prompt, namespace=namespace, **options), namespace, prompt

    @precondition(lambda self: self.served)
    @rule(again=st.integers(1, 4), pressure=pressures)
    def touch(self, again: int, pressure: Any) -> None:
        """What a waiting request will hit is the last to be evicted."""
        prompt, namespace = self.ask([0], strategies.NAMESPACES[0], again)
        self.cache.touch(prompt, namespace=namespace)
        if pressure:
            self.cache.evict(pressure, 1)

    @rule(pool=st.sampled_from(["kv", "kv", "checkpoint", "checkpoint", "active"]), n=st.integers(0, 3))
    def evict(self, pool: Any, n: int) -> None:
        """Memory pressure from outside."""
        self.cache.evict(pool, n)

    @rule(stored=consumes(stored))
    def invalidate(self, stored: Stored) -> None:
        """A state turns out not to be finite, perhaps long after it was evicted."""
        self.cache.invalidate(stored)

    @precondition(lambda self: len(self.flying) < 3)
    @rule()
    def begin_step(self) -> None:
        """One more step in flight."""
        self.flying.append(self.cache.begin_step())
        self.steps = self.flying[-1].id

    @precondition(lambda self: self.steps)
    @rule(which=st.integers(0, 20))
    def retire_step(self, which: int) -> None:
        """In any order, repeated, or one that was never begun."""
        known: list[SupportsIndex] = [*self.flying * 4, self.steps, self.steps + 1]
        step = known[which % len(known)]
        allowed(lambda: self.cache.retire_step(step))
        self.flying = [other for other in self.flying if other != step]

    @precondition(lambda self: self.flying)
    @rule()
    def catch_up(self) -> None:
        """Everything in flight has ended: what was stored meanwhile can be found."""
        while self.flying:
            self.cache.retire_step(self.flying.pop(0))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 2), drop=st.booleans())
    def lose_step(self, which: int, drop: bool) -> None:
        """What a step was to write is lost: its work failed, or nobody has it any more."""
        step = self.flying.pop(which % len(self.flying))
        if not drop:
            self.cache.retire_step(step, failed=True)

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

    @precondition(lambda self: len(self.served) > 2)
    @rule()
    def reset(self) -> None:
        """Seldom, because it leaves little to do."""
        self.cache.reset()
        self.served.clear()

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
        return of_every_cache(self.cache, self.foreign)
