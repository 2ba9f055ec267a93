"""What the compared caches have in common.

A library's cache, a second rank's and a `Model` of the reference are each a `Side`, so one call can be made on all of
them. What they hand out is their own: `Side.of` finds, for one of them, the counterpart of what the caller holds.
"""

# ruff: noqa: D102 (the protocols repeat signatures of the front, which has their docstrings)

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from radixstate import Namespace, StartRequest
from radixstate.base import PoolName
from radixstate.reference import records
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate.tokens import PageRow

POOLS: tuple[records.PoolName, ...] = ("kv", "active", "checkpoint")


class AnySequence(Protocol):
    """A running request, see `Sequence`."""

    @property
    def slot(self) -> int: ...
    def grow(self, n: int) -> None: ...
    def append(self, tokens: Tokens) -> None: ...
    def shrink(self) -> None: ...
    def take_slot(self) -> int: ...
    def give_back_slot(self, slot: int) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class AnyLease(Protocol):
    """What a lookup found, pinned, see `Lease`."""

    def loaded(self) -> None: ...
    def load(self, slot: int) -> None: ...
    def fork(self) -> Any: ...
    def take_slot(self) -> int: ...
    def give_back_slot(self, slot: int) -> None: ...
    def extend(self, tokens: Tokens, pages: Iterable[int] | None = None) -> Any: ...
    def attach(self, tokens: Tokens, *, source: int) -> Any: ...
    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] | None = None) -> Any: ...
    def release(self) -> None: ...


class AnyCache(Protocol):
    """The calls of every cache. What it hands out is understood by itself alone."""

    def lookup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        max_length: int | None = None,
        whole: bool = False,
    ) -> Any: ...
    def touch(self, tokens: Tokens, *, namespace: Namespace | None = None) -> int: ...
    def evict(self, pool: PoolName, n: int) -> Any: ...
    def reset(self) -> None: ...
    def begin_step(self) -> Any: ...
    def retire_step(self, step: Any, invalid: Iterable[Any] = (), *, failed: bool = False) -> None: ...
    def step(self) -> AbstractContextManager[Any]: ...
    def invalidate(self, stored: Any) -> None: ...


class AnyPrefixCache(AnyCache, Protocol):
    """The calls of a scheduler, see `PrefixCache`."""

    def start(
        self,
        tokens: Tokens,
        *,
        reserve: int | None = None,
        namespace: Namespace | None = None,
        no_read: bool = False,
        no_store: bool = False,
        max_length: int | None = None,
        slots: int = 1,
    ) -> AnySequence: ...
    def start_many(self, requests: Iterable[StartRequest]) -> Any: ...
    def checkpoint_many(self, states: Iterable[tuple[Any, int, int]]) -> Any: ...


class AnyEngineCache(AnyCache, Protocol):
    """The calls of an engine that allocates its pages, see `EngineCache`."""

    def lease(self, match: Any) -> AnyLease: ...
    def take_freed(self) -> list[int]: ...
    def copy_freed(self, out: PageRow) -> int: ...


class Twins(NamedTuple):
    """What the three caches answered to one call, in the order of the sides."""

    library: Any
    model: Any
    rank: Any


@dataclass(frozen=True)
class Side:
    """One of the compared caches: `cache`, the `number`-th, and the `twins` of all that the caller holds, by id."""

    cache: Any
    number: int
    twins: dict[int, Twins]

    def of(self, held: Any) -> Any:
        """This cache's counterpart; what another cache made is that to every side."""
        twins = self.twins.get(id(held)) or getattr(held, "twins", None)
        return twins[self.number] if twins else held
