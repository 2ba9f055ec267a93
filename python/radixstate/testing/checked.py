"""A cache that carries out every call three times, and compares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from radixstate import (
    ActivePool,
    CheckpointPool,
    Freed,
    Match,
    Namespace,
    PrefixCache,
    Published,
    Sequence,
    Skipped,
    StateSpec,
    Stored,
    Usage,
)
from radixstate.cache import PoolName
from radixstate.errors import CacheError, MisuseError
from radixstate.reference.cache import ReferenceCache
from radixstate.testing.audit import Audit, Begun, Owner, Pin
from radixstate.testing.compare import Refused, agree, attempt, words
from radixstate.testing.sides import AnyCache, Model, Side, Twins
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate import StartRequest

Call = Callable[[Side], Any]


class _Wrapper:
    """What only reads is the library's own answer: its class names such attributes, and `__getattr__` finds them."""

    _library: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self._library, name)


class CheckedCache(_Wrapper):
    """Answers as a `PrefixCache` does, and raises Disagreement at the first call that goes wrong.

    It holds three caches and makes each call on all of them: the library, the slow reference, and a second rank of
    the library. Then everything is compared: the answers, what is resident, the books of all pools, the digests of
    the two ranks, the pages of every sequence and lease, and every byte of both tensor pools. Slots that nobody
    owns are filled with NaNs. A misuse or a shortage is raised as usual, after a look at whether it changed
    anything.

    It also finds mistakes of the scheduler that drives it: a slot written after it was given back, a state read
    from a slot that was freed. Time and memory grow with the calls made: use it with small pools, on the CPU.

    Its sequences, leases and steps are `CheckedSequence`, `CheckedLease` and `CheckedStep`; what `start_many`
    could not start is a `CacheError`.

    Attributes:
        library: the cache that answers.
        reference: the reference, to ask what should be.
        rank: the second rank.
    """

    spec: StateSpec
    page_size: int
    active: ActivePool
    checkpoints: CheckpointPool
    legal_depth: Callable[[int], int]
    usage: Callable[[PoolName], Usage]

    def __init__(
        self,
        spec: StateSpec,
        *,
        kv_pages: int = 0,
        page_size: int = 16,
        checkpoint_stride: int = 64,
        external: bool = False,
        **options: Any,
    ) -> None:
        """Takes what `PrefixCache` takes. An engine's `active` tensors are overwritten, and must be on the CPU.

        Raises:
            ConfigError: as `PrefixCache`, or the pools are not on the CPU.
        """
        sizes: dict[str, Any] = {
            "kv_pages": kv_pages,
            "page_size": page_size,
            "checkpoint_stride": checkpoint_stride,
        }
        self.library = self._library = PrefixCache(spec, external=external, **sizes, **options)
        pools = self.library.active.slots, self.library.checkpoints.slots
        sizes |= {"active_slots": pools[0], "checkpoint_slots": pools[1]}
        self.rank = PrefixCache(spec, external=external, **options | sizes | {"active": None})
        self._model = Model(ReferenceCache(kv_external=external, active_external=external, **sizes))
        self._twins: dict[int, Twins] = {}  # by id of the library's object, which is kept
        caches: tuple[AnyCache, ...] = (self.library, self._model, self.rank)
        self._sides = [Side(cache, number, self._twins) for number, cache in enumerate(caches)]
        self._audit = Audit(self.library, self.reference, self.rank)
        self._dropped: list[Owner | Pin | Begun] = []

    @property
    def reference(self) -> ReferenceCache:
        """See the class."""
        return self._model.reference

    # --- calls ---

    def lookup(
        self, tokens: Tokens, *, namespace: Namespace | None = None, max_length: int | None = None
    ) -> Match:
        """See `PrefixCache.lookup`."""
        tokens = _readable(tokens)
        answers = self._agree(
            "lookup", lambda it: it.cache.lookup(tokens, namespace=namespace, max_length=max_length)
        )
        self._audit.after()
        match: Match = self._remember(answers)
        return match

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
    ) -> CheckedSequence:
        """See `PrefixCache.start`."""
        tokens = _readable(tokens)
        options: Any = {
            "reserve": reserve,
            "namespace": namespace,
            "no_read": no_read,
            "no_store": no_store,
            "max_length": max_length,
            "slots": slots,
        }
        return self._adopt([self._agree("start", lambda it: it.cache.start(tokens, **options))])[0]

    def start_many(self, requests: Iterable[StartRequest]) -> list[CheckedSequence | CacheError]:
        """See `PrefixCache.start_many`."""
        requests = list(requests)
        answers = self._agree("start_many", lambda it: it.cache.start_many(requests))
        each = [Twins(*twins) for twins in zip(*answers, strict=True)]
        started = iter(self._adopt([twins for twins in each if isinstance(twins.library, Sequence)]))
        return [next(started) if isinstance(it, Sequence) else it for it in answers.library]

    def checkpoint_many(self, states: Iterable[tuple[Any, int, int]]) -> list[Stored | Skipped]:
        """See `PrefixCache.checkpoint_many`."""
        states = list(states)
        rows = [self._encode(source, _model_slot(seq, source)) for seq, _, source in states]

        def call(it: Side) -> Any:
            if it.cache is self._model:
                return it.cache.checkpoint_many(
                    [(it.of(seq), depth, _model_slot(seq, slot)) for seq, depth, slot in states]
                )
            if len(states) == 1:
                ((seq, depth, slot),) = states
                sequence = it.of(seq)
                # The front has a path of its own for one. Of another cache's sequence only a batch can ask.
                if sequence._cache is it.cache:
                    return [sequence.checkpoint(depth, source=slot)]
            return it.cache.checkpoint_many([(it.of(seq), depth, slot) for seq, depth, slot in states])

        answers = self._agree("checkpoint_many", call)
        for twins, row in zip(zip(*answers, strict=True), rows, strict=True):
            self._note_stored(Twins(*twins), row)
        owners = [seq._owner for seq, _, _ in states]
        spent = [slot for seq, _, slot in states if slot != seq._owner.slots[0]]
        for slot in spent:
            self._audit.expect_spent(slot)
        self._audit.after(touched=owners, written=spent, encoded=self._model.reserved)
        outcomes: list[Stored | Skipped] = answers.library
        return outcomes

    def lease(self, match: Match) -> CheckedLease:
        """See `PrefixCache.lease`."""
        pin = Pin(self._agree("lease", lambda it: it.cache.lease(it.of(match))))
        self._audit.pins.append(pin)
        self._audit.after()
        return CheckedLease(self, pin)

    def evict(self, pool: PoolName, n: int) -> Freed:
        """See `PrefixCache.evict`."""
        freed: Freed = self._call("evict", lambda it: it.cache.evict(pool, n))
        return freed

    def take_freed(self, pool: PoolName) -> list[int]:
        """See `PrefixCache.take_freed`."""
        freed: list[int] = self._call(
            "take_freed",
            lambda it: it.cache.take_freed(pool),
            say=lambda answer: words(answer) if isinstance(answer, Refused) else sorted(answer),
        )
        return freed

    def reset(self) -> None:
        """See `PrefixCache.reset`."""
        self._call("reset", lambda it: it.cache.reset())

    def begin_step(self) -> CheckedStep:
        """See `PrefixCache.begin_step`."""
        begun = Begun(self._agree("begin_step", lambda it: it.cache.begin_step()))
        self._audit.after()
        return CheckedStep(self, begun)

    def retire_step(
        self, step: SupportsIndex, invalid: Iterable[Stored] = (), *, failed: bool = False
    ) -> None:
        """See `PrefixCache.retire_step`."""
        known: list[Stored] = []
        try:
            known.extend(invalid)
        except BaseException:
            self.retire_step(step, known, failed=True)
            raise
        self._call(
            "retire_step",
            lambda it: it.cache.retire_step(it.of(step), [it.of(stored) for stored in known], failed=failed),
        )

    def invalidate(self, stored: Stored) -> None:
        """See `PrefixCache.invalidate`."""
        self._call("invalidate", lambda it: it.cache.invalidate(it.of(stored)))

    @contextmanager
    def step(self) -> Iterator[CheckedStep]:
        """See `PrefixCache.step`."""
        blocks = [side.cache.step() for side in self._sides]
        begun = Begun(self._agree("step", lambda it: blocks[it.number].__enter__()))
        self._audit.after()
        step = CheckedStep(self, begun)  # kept while the block runs, which need not keep it
        try:
            yield step
        except BaseException as error:
            raised = type(error), error, error.__traceback__
            self._call("a step that fails", lambda it: blocks[it.number].__exit__(*raised))
            raise
        self._call("the end of a step", lambda it: blocks[it.number].__exit__(None, None, None))

    # --- how each call is made ---

    def _agree(self, name: str, call: Call, *, say: Callable[[Any], Any] = words) -> Twins:
        """Makes a call on every side and compares what they say; raises what the library refused it with."""
        while self._dropped:
            self._end_dropped(self._dropped.pop(0))
        self._model.reserved = 0
        self._audit.before()
        answers = Twins(*(attempt(partial(call, side)) for side in self._sides))
        agree(f"{name}: the library", say(answers.library), say(answers.model))
        agree(f"{name}: the second rank", say(answers.rank), say(answers.library))
        if not isinstance(answers.library, Refused):
            return answers
        self._audit.refused(misuse=isinstance(answers.library.error, MisuseError))
        self._audit.after()
        try:
            raise answers.library.error
        finally:
            del (
                answers
            )  # else its traceback and this frame would keep each other, and dropped sequences, alive

    def _call(
        self, name: str, call: Call, *, touched: Iterable[Owner] = (), say: Callable[[Any], Any] = words
    ) -> Any:
        """`_agree`, and then the audit: for calls that neither hand out nor fill slots."""
        answers = self._agree(name, call, say=say)
        self._audit.after(touched=touched)
        return answers.library

    def _end_dropped(self, dropped: Owner | Pin | Begun) -> None:
        """A sequence, lease or step was dropped since the last call: its handles are let go only here."""
        if isinstance(dropped, Owner) and dropped in self._audit.owners:
            dropped.twins.model.finish()
            self._audit.end(dropped)
            self._audit.poison_free_slots()
        elif isinstance(dropped, Pin) and dropped in self._audit.pins:
            dropped.twins.model.release()
            self._audit.pins.remove(dropped)
        elif isinstance(dropped, Begun):
            self._model.retire_step(dropped.twins.model, failed=True)
            self._audit.poison_free_slots()
        del dropped.twins

    # --- what belongs together ---

    def _adopt(self, started: list[Twins]) -> list[CheckedSequence]:
        """Sequences that started: their slots hold what they reuse."""
        owners = [Owner(twins, twins.library.slots) for twins in started]
        for owner in owners:
            self._remember(Twins(*(it.match for it in owner.twins)))
            self._audit.begin(owner)
        self._audit.after(touched=owners, written=[slot for owner in owners for slot in owner.slots])
        return [CheckedSequence(self, owner) for owner in owners]

    def _encode(self, source: int, model_slot: int) -> bytes | None:
        """What should be stored of an active slot. The other sides' models have computed the same state."""
        row = self._audit.encode(source)
        self._model.finite.discard(model_slot)
        self._model.finite |= {model_slot} if row is not None else set()
        return row

    def _note_stored(self, twins: Twins, row: bytes | None) -> None:
        if isinstance(twins.library, Stored):
            assert row is not None, "the answers agree, so the state was found finite"
            agree("checkpoint slots of two ranks", twins.library.slot, twins.rank.slot)
            self._audit.stored(twins.model.serial, twins.library.slot, row)
            self._remember(twins)

    def _remember(self, twins: Twins) -> Any:
        self._twins[id(twins.library)] = twins
        return twins.library


class CheckedStep:
    """A step of a `CheckedCache`. It counts as its number.

    Attributes:
        id: its number.
        twins: the same step in each cache.
    """

    def __init__(self, cache: CheckedCache, begun: Begun) -> None:
        """Made by `CheckedCache.begin_step`."""
        self.id: int = begun.twins.model
        self._begun = begun
        weakref.finalize(self, cache._dropped.append, begun).atexit = False

    @property
    def twins(self) -> Twins:
        """See the class."""
        return self._begun.twins

    def __index__(self) -> int:
        """Its number."""
        return self.id

    def __eq__(self, other: object) -> bool:
        """Whether the other counts as the same number."""
        return isinstance(other, SupportsIndex) and other.__index__() == self.id

    def __hash__(self) -> int:
        """Its number's."""
        return hash(self.id)


class CheckedSequence(_Wrapper):
    """A sequence of a `CheckedCache`."""

    match: Match
    slot: int
    slots: list[int]
    reused: int
    length: int
    claimed: int
    tokens: list[int]
    pages: list[int]

    def __init__(self, cache: CheckedCache, owner: Owner) -> None:
        """Made by `CheckedCache.start`."""
        self._library = owner.plain
        self._cache = cache
        self._owner = owner
        weakref.finalize(self, cache._dropped.append, owner).atexit = False

    @property
    def twins(self) -> Twins:
        """The same sequence in each cache."""
        return self._owner.twins

    def grow(self, n: int) -> None:
        """See `Sequence.grow`."""
        self._cache._call("grow", lambda it: it.of(self).grow(n), touched=[self._owner])

    def append(self, tokens: Tokens) -> None:
        """See `Sequence.append`."""
        tokens = _readable(tokens)
        self._cache._call("append", lambda it: it.of(self).append(tokens))

    def shrink(self) -> None:
        """See `Sequence.shrink`."""
        self._cache._call("shrink", lambda it: it.of(self).shrink(), touched=[self._owner])

    def take_slot(self) -> int:
        """See `Sequence.take_slot`."""
        answers = self._cache._agree(
            "take_slot",
            lambda it: it.of(self).take_slot(),
            say=lambda answer: words(answer) if isinstance(answer, Refused) else "slot",
        )
        agree("slots of two ranks", answers.library, answers.rank)
        self._owner.slots.append(answers.library)
        self._cache._audit.expect_unusable(answers.library)
        self._cache._audit.after(written=[answers.library])
        return int(answers.library)

    def give_back_slot(self, slot: int) -> None:
        """See `Sequence.give_back_slot`."""
        cache, model_slot = self._cache, _model_slot(self, slot)
        cache._agree(
            "give_back_slot",
            lambda it: it.of(self).give_back_slot(model_slot if it.cache is cache._model else slot),
        )
        cache._audit.give_back(self._owner, slot)
        cache._audit.after()

    def checkpoint(self, depth: int | None = None, *, source: int | None = None) -> Stored | Skipped:
        """See `Sequence.checkpoint`."""
        if depth is None:
            depth = self.length
            if depth != self._cache.legal_depth(depth):
                return Skipped("not_aligned")
        source = self.slot if source is None else source
        return self._cache.checkpoint_many([(self, depth, source)])[0]

    def finish(self) -> None:
        """See `Sequence.finish`."""
        self._end("finish", lambda it: it.of(self).finish())

    def abort(self) -> None:
        """See `Sequence.abort`."""
        self._end("abort", lambda it: it.of(self).abort())

    def _end(self, name: str, call: Call) -> None:
        self._cache._agree(name, call)
        self._cache._audit.end(self._owner)
        self._cache._audit.after()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Sequence`."""
        if self._owner in self._cache._audit.owners:
            self.abort() if error else self.finish()


class CheckedLease(_Wrapper):
    """A lease of a `CheckedCache`."""

    match: Match
    pages: list[int]
    state: int | None

    def __init__(self, cache: CheckedCache, pin: Pin) -> None:
        """Made by `CheckedCache.lease`."""
        self._library = pin.plain
        self._cache = cache
        self._pin = pin
        weakref.finalize(self, cache._dropped.append, pin).atexit = False

    @property
    def twins(self) -> Twins:
        """The same lease in each cache."""
        return self._pin.twins

    def loaded(self) -> None:
        """See `Lease.loaded`."""
        self._cache._call("loaded", lambda it: it.of(self).loaded())

    def load(self, slot: int) -> None:
        """See `Lease.load`."""
        state = self._pin.model.state
        self._cache._agree("load", lambda it: it.of(self).load(slot))
        self._cache._audit.expect_loaded(slot, state)
        self._cache._audit.after(written=[slot])

    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] = ()) -> Published:
        """See `Lease.publish`."""
        cache, tokens, pages = self._cache, _readable(tokens), list(pages)
        row = cache._encode(source, source)
        answers = cache._agree("publish", lambda it: it.of(self).publish(tokens, source=source, pages=pages))
        cache._note_stored(Twins(*(it.outcome for it in answers)), row)
        cache._audit.after(encoded=cache._model.reserved)
        published: Published = answers.library
        return published

    def release(self) -> None:
        """See `Lease.release`."""
        self._cache._agree("release", lambda it: it.of(self).release())
        self._cache._audit.pins.remove(self._pin)
        self._cache._audit.after()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Lease`."""
        if self._pin in self._cache._audit.pins:
            self.release()


def _readable(tokens: Tokens) -> Tokens:
    """Tokens that can be read three times."""
    return tokens if isinstance(tokens, Sized) else list(tokens)


def _model_slot(seq: object, slot: int) -> int:
    """The reference's slot for one of a sequence's. Any other gives 0, which is nobody's."""
    if not isinstance(seq, CheckedSequence) or slot not in seq._owner.slots:
        return 0
    return seq._owner.running.slots[seq._owner.slots.index(slot)]
