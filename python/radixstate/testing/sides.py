"""What the compared caches have in common, and the reference with the methods of the front.

`PrefixCache` and `Model` are both an `AnyCache`, so one call can be made on each. What they hand out is their own:
`Side.of` finds, for one of them, the counterpart of what the caller holds.
"""

# ruff: noqa: D102 (the protocols repeat the signatures of `PrefixCache`, which has their docstrings)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from radixstate import Namespace, Published, Skipped, StartRequest
from radixstate.cache import PoolName
from radixstate.reference import records
from radixstate.reference.cache import ReferenceCache
from radixstate.tokens import Tokens

POOLS: tuple[records.PoolName, ...] = ("kv", "active", "checkpoint")

T = TypeVar("T")


class AnySequence(Protocol):
    """A running request, see `Sequence`."""

    @property
    def slot(self) -> int | None: ...
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
    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] = ()) -> Any: ...
    def release(self) -> None: ...


class AnyCache(Protocol):
    """The calls that are compared, see `PrefixCache`. What a cache hands out is understood by itself alone."""

    def lookup(
        self, tokens: Tokens, *, namespace: Namespace | None = None, max_length: int | None = None
    ) -> Any: ...
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
    def lease(self, match: Any) -> AnyLease: ...
    def evict(self, pool: PoolName, n: int) -> Any: ...
    def take_freed(self, pool: PoolName) -> list[int]: ...
    def reset(self) -> None: ...
    def begin_step(self) -> Any: ...
    def retire_step(self, step: Any, invalid: Iterable[Any] = (), *, failed: bool = False) -> None: ...
    def step(self) -> AbstractContextManager[Any]: ...
    def invalidate(self, stored: Any) -> None: ...


class Twins(NamedTuple):
    """What the three caches answered to one call, in the order of the sides."""

    library: Any
    model: Any
    rank: Any


@dataclass(frozen=True)
class Side:
    """One of the compared caches: `cache`, the `number`-th, and the `twins` of all that the caller holds, by id."""

    cache: AnyCache
    number: int
    twins: dict[int, Twins]

    def of(self, held: Any) -> Any:
        """This cache's counterpart; what another cache made is that to every side."""
        twins = self.twins.get(id(held)) or getattr(held, "twins", None)
        return twins[self.number] if twins else held


class Model:
    """The reference as an `AnyCache`. A misuse is the reference's, a slot or page its own number.

    Attributes:
        reference: the reference.
        finite: active slots whose state is finite, as the model that computes states would know.
        reserved: states that the last call took a checkpoint slot for.
    """

    def __init__(self, reference: ReferenceCache) -> None:
        """A new front of a reference."""
        self.reference = reference
        self.finite: set[int] = set()
        self.reserved = 0

    def lookup(
        self, tokens: Tokens, *, namespace: Namespace | None = None, max_length: int | None = None
    ) -> records.Match:
        """See `PrefixCache.lookup`."""
        namespace = namespace or Namespace()
        return self.reference.lookup(_known(tokens), namespace=namespace, max_length=max_length)

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
    ) -> ModelSequence:
        """See `PrefixCache.start`."""
        self._require_internal()
        options = {"reserve": reserve, "no_read": no_read, "no_store": no_store, "max_length": max_length}
        return self._loaded(self._start(tokens, namespace, slots=slots, **options))

    def start_many(self, requests: Iterable[StartRequest]) -> list[ModelSequence | Exception]:
        """See `PrefixCache.start_many`."""
        self._require_internal()
        started = [self._attempt(it) for it in requests]
        return [self._loaded(it) if isinstance(it, ModelSequence) else it for it in started]

    def checkpoint_many(
        self, states: Iterable[tuple[ModelSequence, int, int]]
    ) -> list[records.Stored | records.Skipped | Skipped]:
        """See `PrefixCache.checkpoint_many`."""
        asked = [(self._own(seq, ModelSequence)._alive(), depth, source) for seq, depth, source in states]
        depths: dict[int, int] = {}
        for running, depth, source in asked:
            self.reference.can_checkpoint(running, depth, source)
            if depths.setdefault(source, depth) != depth:
                raise records.Misuse("depth_passed")  # a slot holds one state
        taken = [self.reference.reserve_checkpoint(*each) for each in asked]
        self.reserved = sum(isinstance(it, records.Pending) for it in taken)
        return [
            self._store(it, source, partial(self.reference.commit, running))
            for (running, _, source), it in zip(asked, taken, strict=True)
        ]

    def lease(self, match: records.Match) -> ModelLease:
        """See `PrefixCache.lease`."""
        return ModelLease(self, self.reference.lease(self._own(match, records.Match)))

    def evict(self, pool: PoolName, n: int) -> records.Freed:
        """See `PrefixCache.evict`."""
        return self.reference.evict(_pool(pool), n)

    def take_freed(self, pool: PoolName) -> list[int]:
        """See `PrefixCache.take_freed`."""
        return self.reference.take_freed(_pool(pool))

    def reset(self) -> None:
        """See `PrefixCache.reset`."""
        self.reference.reset()

    def begin_step(self) -> int:
        """See `PrefixCache.begin_step`; this is its number, and dropping that ends nothing."""
        return self.reference.begin_step()

    def retire_step(self, step: int, invalid: Iterable[records.Stored] = (), *, failed: bool = False) -> None:
        """See `PrefixCache.retire_step`."""
        serials = [self._own(it, records.Stored).serial for it in invalid]
        self.reference.retire_step(step, serials, failed=failed)

    @contextmanager
    def step(self) -> Iterator[int]:
        """See `PrefixCache.step`."""
        step, failed = self.begin_step(), True
        try:
            yield step
            failed = False
        finally:
            self.retire_step(step, failed=failed)

    def invalidate(self, stored: records.Stored) -> None:
        """See `PrefixCache.invalidate`."""
        self.reference.invalidate(self._own(stored, records.Stored).serial)

    def _attempt(self, request: StartRequest) -> ModelSequence | Exception:
        names = ("reserve", "no_read", "no_store", "max_length", "slots")
        try:
            return self._start(
                request.tokens, request.namespace, **{name: getattr(request, name) for name in names}
            )
        except (records.Shortage, records.NeverFits, records.Misuse) as error:
            return error.with_traceback(None)

    def _start(self, tokens: Tokens, namespace: Namespace | None, **options: Any) -> ModelSequence:
        running = self.reference.start(_known(tokens), namespace=namespace or Namespace(), **options)
        return ModelSequence(self, running)

    def _loaded(self, seq: ModelSequence) -> ModelSequence:
        self.reference.loaded(seq.running)
        return seq

    def _store(
        self, taken: records.Pending | records.Skipped, source: int, commit: Callable[[records.Pending], T]
    ) -> T | records.Skipped | Skipped:
        """Commits a state that has a slot, unless it is not finite."""
        if isinstance(taken, records.Skipped):
            return taken
        if source in self.finite:
            return commit(taken)
        self.reference.drop(taken)
        return Skipped("non_finite")

    def _own(self, held: Any, kind: type[T]) -> T:
        if not isinstance(held, kind) or getattr(held, "cache", self) is not self:
            raise records.Misuse("wrong_cache")
        return held

    def _require_internal(self) -> None:
        if self.reference.pools["active"].external:
            raise records.Misuse("config")


class ModelSequence:
    """A running sequence of a `Model`."""

    def __init__(self, cache: Model, running: records.Running) -> None:
        """Made by `Model.start`."""
        self.cache, self.running = cache, running
        self.match = running.matched

    @property
    def slot(self) -> int:
        """The active slot that it started with."""
        return self.running.slots[0]

    def grow(self, n: int) -> None:
        """See `Sequence.grow`."""
        self.cache.reference.grow(self._alive(), n)

    def append(self, tokens: Tokens) -> None:
        """See `Sequence.append`."""
        known = _known(tokens)
        self.cache.reference.append(self._alive(), known)

    def shrink(self) -> None:
        """See `Sequence.shrink`."""
        self.cache.reference.shrink(self._alive())

    def take_slot(self) -> int:
        """See `Sequence.take_slot`."""
        return self.cache.reference.take_slot(self._alive())

    def give_back_slot(self, slot: int) -> None:
        """See `Sequence.give_back_slot`."""
        self.cache.reference.give_back_slot(self._alive(), slot)

    def finish(self) -> None:
        """See `Sequence.finish`."""
        self.cache.reference.finish(self._alive())

    def abort(self) -> None:
        """See `Sequence.abort`."""
        self.finish()

    def _alive(self) -> records.Running:
        if self.running not in self.cache.reference.running:
            raise records.Misuse("use_after_finish")
        return self.running


class ModelLease:
    """A lease of a `Model`."""

    def __init__(self, cache: Model, lease: records.Lease) -> None:
        """Made by `Model.lease`."""
        self.cache, self.lease = cache, lease
        self._hit = lease.prefix.depth > 0
        self._ended = False  # a step in flight may keep what it gave back

    def loaded(self) -> None:
        """See `Lease.loaded`."""
        self.cache.reference.lease_loaded(self._alive())

    def load(self, slot: int) -> None:
        """See `Lease.load`."""
        lease = self._alive()
        if lease.state is None and self._hit:
            raise records.Misuse("already_loaded")
        self._require_slot(slot)
        self.cache.reference.lease_loaded(lease)

    def publish(
        self, tokens: Tokens, *, source: int, pages: Iterable[int] = ()
    ) -> records.Published | Published:
        """See `Lease.publish`."""
        self._require_slot(source)
        known, lease, pages, reference = _known(tokens), self._alive(), list(pages), self.cache.reference
        reference.can_publish(lease, known, pages)
        taken = reference.reserve(lease, known)
        self.cache.reserved = int(isinstance(taken, records.Pending))
        made = self.cache._store(taken, source, partial(reference.publish, lease, known, pages))
        if isinstance(made, Skipped):
            return Published(made, pages, [])
        return records.Published(made, pages, []) if isinstance(made, records.Skipped) else made

    def release(self) -> None:
        """See `Lease.release`."""
        self.cache.reference.release(self._alive())
        self._ended = True

    def _alive(self) -> records.Lease:
        if self._ended:
            raise records.Misuse("use_after_finish")
        return self.lease

    def _require_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.cache.reference.pools["active"].capacity:
            raise records.Misuse("slot")


def _known(tokens: Tokens) -> list[int]:
    known = [int(token) for token in tokens]
    if not all(0 <= token < 2**32 for token in known):
        raise records.Misuse("token_range")
    return known


def _pool(pool: PoolName) -> records.PoolName:
    if pool not in POOLS:
        raise records.Misuse("misuse")
    return pool
