"""The reference with the methods of the front. A misuse is the reference's, a slot or page its own number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from radixstate import Namespace, Published, Skipped, StartRequest
from radixstate.base import PoolName
from radixstate.reference import records
from radixstate.reference.base import ReferenceBase
from radixstate.reference.cache import ReferenceCache
from radixstate.reference.engine import ReferenceEngineCache
from radixstate.testing.sides import POOLS
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate.tokens import PageRow

T = TypeVar("T")
Reference = TypeVar("Reference", bound=ReferenceBase)


class Model(Generic[Reference]):
    """What the models of both kinds of cache share.

    Attributes:
        reference: the reference.
        finite: active slots whose state is finite, as the model that computes states would know.
        reserved: states that the last call took a checkpoint slot for.
    """

    def __init__(self, reference: Reference) -> None:
        """A new front of a reference."""
        self.reference = reference
        self.finite: set[int] = set()
        self.reserved = 0

    def lookup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        max_length: int | None = None,
        whole: bool = False,
    ) -> records.Match:
        """See `CacheBase.lookup`."""
        options: Any = {"namespace": namespace or Namespace(), "max_length": max_length, "whole": whole}
        return self.reference.lookup(_known(tokens), **options)

    def touch(self, tokens: Tokens, *, namespace: Namespace | None = None) -> int:
        """See `CacheBase.touch`."""
        return self.reference.touch(_known(tokens), namespace=namespace or Namespace())

    def evict(self, pool: PoolName, n: int) -> records.Freed:
        """See `CacheBase.evict`."""
        return self.reference.evict(_pool(pool), n)

    def reset(self) -> None:
        """See `CacheBase.reset`."""
        self.reference.reset()

    def begin_step(self) -> int:
        """See `CacheBase.begin_step`; this is its number, and dropping that ends nothing."""
        return self.reference.begin_step()

    def retire_step(self, step: int, invalid: Iterable[records.Stored] = (), *, failed: bool = False) -> None:
        """See `CacheBase.retire_step`."""
        serials = [self._own(it, records.Stored).serial for it in invalid]
        self.reference.retire_step(step, serials, failed=failed)

    @contextmanager
    def step(self) -> Iterator[int]:
        """See `CacheBase.step`."""
        step, failed = self.begin_step(), True
        try:
            yield step
            failed = False
        finally:
            self.retire_step(step, failed=failed)

    def invalidate(self, stored: records.Stored) -> None:
        """See `CacheBase.invalidate`."""
        self.reference.invalidate(self._own(stored, records.Stored).serial)

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


class ModelCache(Model[ReferenceCache]):
    """Sequences, see `PrefixCache`."""

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
        options = {"reserve": reserve, "no_read": no_read, "no_store": no_store, "max_length": max_length}
        return self._loaded(self._start(tokens, namespace, slots=slots, **options))

    def start_many(self, requests: Iterable[StartRequest]) -> list[ModelSequence | Exception]:
        """See `PrefixCache.start_many`."""
        started = [self._attempt(it) for it in requests]
        return [self._loaded(it) if isinstance(it, ModelSequence) else it for it in started]

    def checkpoint_many(
        self, states: Iterable[tuple[ModelSequence, int, int]]
    ) -> list[records.Stored | records.Skipped | Skipped]:
        """See `PrefixCache.checkpoint_many`."""
        asked = [(self._own(seq, ModelSequence)._alive(), depth, source) for seq, depth, source in states]
        taken = self.reference.reserve_checkpoints(asked)
        self.reserved = sum(isinstance(it, records.Pending) for it in taken)
        return [
            self._store(it, source, partial(self.reference.commit, running))
            for (running, _, source), it in zip(asked, taken, strict=True)
        ]

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


class ModelSequence:
    """A running sequence of a `ModelCache`."""

    def __init__(self, cache: ModelCache, running: records.Running) -> None:
        """Made by `ModelCache.start`."""
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


class ModelEngine(Model[ReferenceEngineCache]):
    """Leases, see `EngineCache`.

    Attributes:
        slots: of the engine's active tensors.
        own_slots: whether the cache hands them out.
    """

    def __init__(self, reference: ReferenceEngineCache, *, slots: int, own_slots: bool) -> None:
        """A new front of a reference."""
        super().__init__(reference)
        self.slots, self.own_slots = slots, own_slots

    def lease(self, match: records.Match) -> ModelLease:
        """See `EngineCache.lease`."""
        return ModelLease(self, self.reference.lease(self._own(match, records.Match)))

    def take_freed(self) -> list[int]:
        """See `EngineCache.take_freed`."""
        return self.reference.take_freed()

    def copy_freed(self, out: PageRow) -> int:
        """See `EngineCache.copy_freed`."""
        room: np.ndarray[Any, Any] = np.asarray(out)
        if room.dtype != np.int32 or not room.flags.c_contiguous or not room.flags.writeable:
            raise records.Misuse("tensor")
        waiting = len(self.reference.pools["kv"].outbox)
        if waiting > room.size:
            raise records.Misuse("length_mismatch")
        room.reshape(-1)[:waiting] = self.reference.take_freed()
        return waiting


class ModelLease:
    """A lease of a `ModelEngine`."""

    def __init__(self, cache: ModelEngine, lease: records.Lease) -> None:
        """Made by `ModelEngine.lease` and `fork`."""
        self.cache, self.lease = cache, lease
        self._ended = False  # a step in flight may keep what it gave back

    def loaded(self) -> None:
        """See `Lease.loaded`."""
        self.cache.reference.lease_loaded(self._alive())

    def load(self, slot: int) -> None:
        """See `Lease.load`."""
        self._require_slot(slot)
        lease = self._alive()
        if lease.state is None and lease.prefix.depth:
            raise records.Misuse("already_loaded")
        self.cache.reference.lease_loaded(lease)

    def fork(self) -> ModelLease:
        """See `Lease.fork`."""
        return ModelLease(self.cache, self.cache.reference.fork_lease(self._alive()))

    def take_slot(self) -> int:
        """See `Lease.take_slot`."""
        return self.cache.reference.take_slot(self._alive())

    def give_back_slot(self, slot: int) -> None:
        """See `Lease.give_back_slot`."""
        self.cache.reference.give_back_slot(self._alive(), slot)

    def extend(self, tokens: Tokens, pages: Iterable[int] | None = None) -> records.Extended:
        """See `Lease.extend`."""
        known, given = _known(tokens), self._given(pages)
        return self.cache.reference.extend(self._alive(), known, given)

    def attach(self, tokens: Tokens, *, source: int) -> records.Stored | records.Skipped | Skipped:
        """See `Lease.attach`."""
        known, lease, reference = _known(tokens), self._alive(), self.cache.reference
        reference.must_be_leased(lease, known)
        self._require_slot(source)
        taken = reference.reserve(lease, known)
        return self._store(taken, source, partial(reference.attach, lease, known))

    def publish(
        self, tokens: Tokens, *, source: int, pages: Iterable[int] | None = None
    ) -> records.Published | Published:
        """See `Lease.publish`."""
        self._require_slot(source)
        known, given = _known(tokens), self._given(pages)
        lease, reference = self._alive(), self.cache.reference
        taken = reference.reserve(lease, known, given)
        if taken == records.Skipped("duplicate"):
            shared = reference.extend(lease, known, given)
            return records.Published(shared.skipped or taken, shared.replaced)
        made = self._store(taken, source, partial(reference.publish, lease, known, given))
        if isinstance(made, Skipped):
            return Published(made, None)
        return records.Published(made, None) if isinstance(made, records.Skipped) else made

    def release(self) -> None:
        """See `Lease.release`."""
        self.cache.reference.release(self._alive())
        self._ended = True

    def _store(
        self, taken: records.Pending | records.Skipped, source: int, enter: Callable[[records.Pending], T]
    ) -> T | records.Skipped | Skipped:
        self.cache.reserved = int(isinstance(taken, records.Pending))
        return self.cache._store(taken, source, enter)

    def _alive(self) -> records.Lease:
        if self._ended:
            raise records.Misuse("use_after_finish")
        return self.lease

    def _given(self, pages: Iterable[int] | None) -> list[int]:
        """Pages that the engine names: none where the cache numbers them."""
        given = [] if pages is None else list(pages)
        if given and self.cache.reference.pools["kv"].owner == "logical":
            raise records.Misuse("length_mismatch")
        return given

    def _require_slot(self, slot: int) -> None:
        """A slot of the engine, or one that this lease has taken."""
        if not 1 <= slot <= self.cache.slots:
            raise records.Misuse("slot")
        if self.cache.own_slots and slot not in self._alive().slots:
            raise records.Misuse("not_your_slot")


def _known(tokens: Tokens) -> list[int]:
    known = [int(token) for token in tokens]
    if not all(0 <= token < 2**32 for token in known):
        raise records.Misuse("token_range")
    return known


def _pool(pool: PoolName) -> records.PoolName:
    if pool == "checkpoints":
        return "checkpoint"
    if pool not in POOLS:
        raise records.Misuse("misuse")
    return pool
