"""A cache that carries out every call three times, and compares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from radixstate import (
    Freed,
    Lease,
    Match,
    Namespace,
    PrefixCache,
    Published,
    Sequence,
    Skipped,
    StateSpec,
    Stored,
)
from radixstate.cache import PoolName, Tokens
from radixstate.errors import MisuseError
from radixstate.reference import parts
from radixstate.reference.cache import ReferenceCache
from radixstate.testing.audit import POOLS, Audit, Owner, Pin
from radixstate.testing.compare import Refused, agree, attempt, words

if TYPE_CHECKING:
    from radixstate import Request
    from radixstate.errors import CacheError


T = TypeVar("T")


class CheckedCache(PrefixCache):
    """A `PrefixCache` that answers as one does, and raises Disagreement at the first call that goes wrong.

    Each call is made on the library, on the slow reference and on a second rank of the library. Then everything
    is compared: the answers, what is resident, the books of all pools, the digests of the two ranks, the pages of
    every sequence and lease, and every byte of both tensor pools. Slots that nobody owns are filled with NaNs.
    A misuse or a shortage is raised as usual, after a look at whether it changed anything.

    It also finds mistakes of the scheduler that drives it: a slot written after it was given back, a state read
    from a slot that was freed. Time and memory grow with the calls made: use it with small pools, on the CPU.

    Attributes:
        reference: the reference, to ask what should be.
    """

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
        self._library = PrefixCache(spec, external=external, **sizes, **options)
        vars(self).update(vars(self._library))  # what is not overridden answers as the library does
        sizes |= {"active_slots": self.active.slots, "checkpoint_slots": self.checkpoints.slots}
        self.reference = ReferenceCache(kv_external=external, active_external=external, **sizes)
        self._rank = PrefixCache(spec, external=external, **options | sizes | {"active": None})
        self._audit = Audit(self._library, self.reference, self._rank)
        self._twins: dict[int, tuple[object, Any, Any]] = {}  # by id of the library's object, which is kept
        self._dropped: list[Owner | Pin] = []
        self._encoded = 0  # states that the call encodes

    # --- calls ---

    def lookup(
        self, tokens: Tokens, *, namespace: Namespace | None = None, max_length: int | None = None
    ) -> Match:
        """See `PrefixCache.lookup`."""
        tokens, known = _readable(tokens)
        options: Any = {"namespace": namespace, "max_length": max_length}

        def reference() -> parts.Match:
            _require_range(known)
            return self.reference.lookup(known, **options | {"namespace": namespace or Namespace()})

        answers = self._agree(
            "lookup",
            lambda: self._library.lookup(tokens, **options),
            reference,
            lambda: self._rank.lookup(tokens, **options),
        )
        self._audit.after()
        match: Match = self._remember(*answers)
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
    ) -> Sequence:
        """See `PrefixCache.start`."""
        tokens, known = _readable(tokens)
        options: Any = {
            "reserve": reserve,
            "no_read": no_read,
            "no_store": no_store,
            "max_length": max_length,
        }
        options["namespace"] = namespace
        answers = self._agree(
            "start",
            lambda: self._library.start(tokens, **options),
            lambda: self._begun([self._start(known, options)])[0],
            lambda: self._rank.start(tokens, **options),
        )
        return self._adopt([answers])[0]

    def start_many(self, requests: Iterable[Request]) -> list[Sequence | CacheError]:
        """See `PrefixCache.start_many`."""
        requests = list(requests)

        def reference() -> list[Any]:
            self._require_internal()
            return self._begun([attempt(partial(self._start, it.tokens, _options(it))) for it in requests])

        real, expected, echo = self._agree(
            "start_many",
            lambda: self._library.start_many(requests),
            reference,
            lambda: self._rank.start_many(requests),
        )
        answers = list(zip(real, expected, echo, strict=True))
        started = iter(self._adopt([each for each in answers if isinstance(each[0], Sequence)]))
        return [next(started) if isinstance(it, Sequence) else it for it in real]

    def checkpoint_many(self, states: Iterable[tuple[Sequence, int, int]]) -> list[Stored | Skipped]:
        """See `PrefixCache.checkpoint_many`."""
        states = list(states)
        rows = [self._audit.encode(source) for _, _, source in states]
        real, expected, echo = self._agree(
            "checkpoint_many",
            lambda: self._library.checkpoint_many(states),
            lambda: self._checkpoint_all(states, rows),
            lambda: self._rank.checkpoint_many(
                [(self._echo(seq), depth, slot) for seq, depth, slot in states]
            ),
        )
        for answer, row in zip(zip(real, expected, echo, strict=True), rows, strict=True):
            self._note_stored(*answer, row)
        owners = [seq._owner for seq, _, _ in states if isinstance(seq, CheckedSequence)]
        spent = [
            slot
            for seq, _, slot in states
            if isinstance(seq, CheckedSequence) and slot != seq._owner.slots[0]
        ]
        for slot in spent:
            self._audit.expect_spent(slot)
        self._audit.after(touched=owners, written=spent, encoded=self._encoded)
        outcomes: list[Stored | Skipped] = real
        return outcomes

    def lease(self, match: Match) -> Lease:
        """See `PrefixCache.lease`."""
        real, model, echo = self._agree(
            "lease",
            lambda: self._library.lease(match),
            lambda: self.reference.lease(self._model_of(match)),
            lambda: self._rank.lease(self._echo_of(match)),
            say=lambda answer: words(answer) if isinstance(answer, Refused) else "leased",
        )
        pin = Pin(real, echo, model)
        self._audit.pins.append(pin)
        self._audit.after()
        return CheckedLease(self, pin)

    def evict(self, pool: PoolName, n: int) -> Freed:
        """See `PrefixCache.evict`."""
        real: Freed = self._call(
            "evict",
            lambda: self._library.evict(pool, n),
            lambda: self.reference.evict(_known(pool), n),
            lambda: self._rank.evict(pool, n),
        )
        return real

    def take_freed(self, pool: PoolName) -> list[int]:
        """See `PrefixCache.take_freed`."""
        freed: list[int] = self._call(
            "take_freed",
            lambda: self._library.take_freed(pool),
            lambda: self.reference.take_freed(_known(pool)),
            lambda: self._rank.take_freed(pool),
            say=lambda answer: words(answer) if isinstance(answer, Refused) else sorted(answer),
        )
        return freed

    def reset(self) -> None:
        """See `PrefixCache.reset`."""
        self._call("reset", self._library.reset, self.reference.reset, self._rank.reset)

    def begin_step(self) -> int:
        """See `PrefixCache.begin_step`."""
        step: int = self._call(
            "begin_step", self._library.begin_step, self.reference.begin_step, self._rank.begin_step
        )
        return step

    def retire_step(self, step: int, refused: Iterable[Stored] = (), *, failed: bool = False) -> None:
        """See `PrefixCache.retire_step`."""
        known: list[Stored] = []
        try:
            known.extend(refused)
        except BaseException:
            self.retire_step(step, known, failed=True)
            raise
        self._call(
            "retire_step",
            lambda: self._library.retire_step(step, known, failed=failed),
            lambda: self.reference.retire_step(
                step, [self._model_of(it).serial for it in known], failed=failed
            ),
            lambda: self._rank.retire_step(step, [self._echo_of(it) for it in known], failed=failed),
        )

    def refuse(self, stored: Stored) -> None:
        """See `PrefixCache.refuse`."""
        self._call(
            "refuse",
            lambda: self._library.refuse(stored),
            lambda: _nothing(self.reference.refuse(self._model_of(stored).serial)),
            lambda: self._rank.refuse(self._echo_of(stored)),
        )

    # --- how each call is made ---

    def _agree(
        self,
        call: str,
        library: Callable[[], Any],
        reference: Callable[[], Any],
        rank: Callable[[], Any],
        *,
        say: Callable[[Any], Any] = words,
    ) -> tuple[Any, Any, Any]:
        """Makes a call on all three and compares what they say; raises what the library refused it with."""
        while self._dropped:
            self._end_dropped(self._dropped.pop(0))
        self._encoded = 0
        self._audit.before()
        real, expected, echo = attempt(library), attempt(reference), attempt(rank)
        agree(f"{call}: the library", say(real), say(expected))
        agree(f"{call}: the second rank", say(echo), say(real))
        if not isinstance(real, Refused):
            return real, expected, echo
        self._audit.refused(misuse=isinstance(real.error, MisuseError))
        self._audit.after()
        try:
            raise real.error
        finally:
            del real  # else its traceback and this frame would keep each other, and dropped sequences, alive

    def _call(
        self,
        call: str,
        library: Callable[[], Any],
        reference: Callable[[], Any],
        rank: Callable[[], Any],
        *,
        touched: Iterable[Owner] = (),
        say: Callable[[Any], Any] = words,
    ) -> Any:
        """`_agree`, and then the audit: for calls that neither hand out nor fill slots."""
        real, _, _ = self._agree(call, library, reference, rank, say=say)
        self._audit.after(touched=touched)
        return real

    def _end_dropped(self, dropped: Owner | Pin) -> None:
        """A sequence or lease was dropped since the last call. Its handles are let go only here, between calls."""
        if isinstance(dropped, Owner) and dropped in self._audit.owners:
            self.reference.finish(dropped.running)
            self._audit.end(dropped)
            self._audit.poison_free_slots()
        elif isinstance(dropped, Pin) and dropped in self._audit.pins:
            self.reference.release(dropped.model)
            self._audit.pins.remove(dropped)
        del dropped.plain, dropped.echo

    # --- the reference's side ---

    def _require_internal(self) -> None:
        if self.reference.pools["active"].external:
            raise parts.Misuse("config")

    def _start(self, known: list[int], options: dict[str, Any]) -> parts.Running:
        self._require_internal()
        _require_range(known)
        return self.reference.start(known, **options | {"namespace": options["namespace"] or Namespace()})

    def _begun(self, started: list[Any]) -> list[Any]:
        for it in started:
            if isinstance(it, parts.Running):
                self.reference.loaded(it)
        return started

    def _checkpoint_all(
        self, states: list[tuple[Sequence, int, int]], rows: list[bytes | None]
    ) -> list[parts.Stored | parts.Skipped | Skipped]:
        asked = [(self._owner(seq).running, depth, self._slot(seq, source)) for seq, depth, source in states]
        for each in asked:
            self.reference.check_checkpoint(*each)
        reserved = [self.reference.reserve_checkpoint(*each) for each in asked]
        self._encoded = sum(isinstance(it, parts.Pending) for it in reserved)
        return [
            self._store(it, row, partial(self.reference.commit, running))
            for (running, _, _), it, row in zip(asked, reserved, rows, strict=True)
        ]

    def _slot(self, seq: Sequence, source: int) -> int | None:
        """The reference's slot for one of a sequence."""
        owner = self._owner(seq)
        return owner.running.slots[owner.slots.index(source)] if source in owner.slots else None

    def _store(
        self,
        reserved: parts.Pending | parts.Skipped,
        row: bytes | None,
        publish: Callable[[parts.Pending], T],
    ) -> T | parts.Skipped | Skipped:
        """Publishes what was encoded, unless that was not finite."""
        if isinstance(reserved, parts.Skipped):
            return reserved
        if row is not None:
            return publish(reserved)
        self.reference.drop(reserved)
        return Skipped("non_finite")

    def _publish(
        self, lease: parts.Lease, known: list[int], pages: list[int], row: bytes | None
    ) -> parts.Published | Published:
        self.reference.check_publish(lease, known, pages)
        reserved = self.reference.reserve(lease, known)
        self._encoded = int(isinstance(reserved, parts.Pending))
        made = self._store(reserved, row, partial(self.reference.publish, lease, known, pages))
        if isinstance(made, Skipped):
            return Published(made, pages, [])
        return parts.Published(made, pages, []) if isinstance(made, parts.Skipped) else made

    def _owner(self, seq: Sequence) -> Owner:
        if not isinstance(seq, CheckedSequence) or seq._cache is not self:
            raise parts.Misuse("wrong_cache")
        return seq._owner_alive()

    # --- what belongs together ---

    def _adopt(self, started: list[tuple[Any, Any, Any]]) -> list[Sequence]:
        """Sequences that started: their slots hold what they reuse."""
        owners = [Owner(plain, echo, running, [plain.slot]) for plain, running, echo in started]
        for owner in owners:
            self._remember(owner.plain.match, owner.running.matched, owner.echo.match)
            self._audit.begin(owner)
        self._audit.after(touched=owners, written=[owner.plain.slot for owner in owners])
        return [CheckedSequence(self, owner) for owner in owners]

    def _note_stored(self, real: Any, model: Any, echo: Any, row: bytes | None) -> None:
        if isinstance(real, Stored):
            assert row is not None, "the answers agree, so the state was found finite"
            agree("checkpoint slots of two ranks", real.slot, echo.slot)
            self._audit.stored(model.serial, real.slot, row)
            self._remember(real, model, echo)

    def _remember(self, real: Any, model: Any, echo: Any) -> Any:
        self._twins[id(real)] = real, model, echo
        return real

    def _model_of(self, real: object) -> Any:
        """The reference's match or stored state for the library's."""
        if id(real) not in self._twins:
            raise parts.Misuse("wrong_cache")
        return self._twins[id(real)][1]

    def _echo_of(self, real: Any) -> Any:
        """The second rank's; what another cache made is that to every rank."""
        return self._twins[id(real)][2] if id(real) in self._twins else real

    def _echo(self, seq: Sequence) -> Sequence:
        return seq._owner.echo if isinstance(seq, CheckedSequence) and seq._cache is self else seq


class CheckedSequence(Sequence):
    """A sequence of a `CheckedCache`."""

    _cache: CheckedCache

    def __init__(self, cache: CheckedCache, owner: Owner) -> None:
        """Made by `CheckedCache.start`."""
        vars(self).update(vars(owner.plain))
        self._cache = cache
        self._owner = owner
        weakref.finalize(self, cache._dropped.append, owner).atexit = False

    def _owner_alive(self) -> Owner:
        if self._owner not in self._cache._audit.owners:
            raise parts.Misuse("use_after_finish")
        return self._owner

    def _running(self) -> parts.Running:
        return self._owner_alive().running

    def grow(self, n: int) -> None:
        """See `Sequence.grow`."""
        owner, reference = self._owner, self._cache.reference
        self._cache._call(
            "grow",
            lambda: owner.plain.grow(n),
            lambda: reference.grow(self._running(), n),
            lambda: owner.echo.grow(n),
            touched=[owner],
        )

    def append(self, tokens: Tokens) -> None:
        """See `Sequence.append`."""
        owner, (tokens, known) = self._owner, _readable(tokens)

        def reference() -> None:
            _require_range(known)
            self._cache.reference.append(self._running(), known)

        self._cache._call(
            "append", lambda: owner.plain.append(tokens), reference, lambda: owner.echo.append(tokens)
        )

    def shrink(self) -> None:
        """See `Sequence.shrink`."""
        owner = self._owner
        self._cache._call(
            "shrink",
            owner.plain.shrink,
            lambda: self._cache.reference.shrink(self._running()),
            owner.echo.shrink,
            touched=[owner],
        )

    def take_slot(self) -> int:
        """See `Sequence.take_slot`."""
        owner = self._owner
        slot, _, echo = self._cache._agree(
            "take_slot",
            owner.plain.take_slot,
            lambda: self._cache.reference.take_slot(self._running()),
            owner.echo.take_slot,
            say=lambda answer: words(answer) if isinstance(answer, Refused) else "slot",
        )
        agree("slots of two ranks", slot, echo)
        owner.slots.append(slot)
        self._cache._audit.expect_unusable(slot)
        self._cache._audit.after(written=[slot])
        return int(slot)

    def finish(self) -> None:
        """See `Sequence.finish`."""
        self._end("finish", self._owner.plain.finish, self._owner.echo.finish)

    def abort(self) -> None:
        """See `Sequence.abort`."""
        self._end("abort", self._owner.plain.abort, self._owner.echo.abort)

    def _end(self, call: str, library: Callable[[], None], rank: Callable[[], None]) -> None:
        cache = self._cache
        cache._agree(call, library, lambda: cache.reference.finish(self._running()), rank)
        cache._audit.end(self._owner)
        cache._audit.after()


class CheckedLease(Lease):
    """A lease of a `CheckedCache`."""

    _cache: CheckedCache

    def __init__(self, cache: CheckedCache, pin: Pin) -> None:
        """Made by `CheckedCache.lease`."""
        vars(self).update(vars(pin.plain))
        self._cache = cache
        self._pin = pin
        weakref.finalize(self, cache._dropped.append, pin).atexit = False

    def _model(self) -> parts.Lease:
        if self._pin not in self._cache._audit.pins:
            raise parts.Misuse("use_after_finish")
        return self._pin.model

    def loaded(self) -> None:
        """See `Lease.loaded`."""
        self._cache._call(
            "loaded",
            self._pin.plain.loaded,
            lambda: self._cache.reference.lease_loaded(self._model()),
            self._pin.echo.loaded,
        )

    def load(self, slot: int) -> None:
        """See `Lease.load`."""
        cache, pin, state = self._cache, self._pin, self._pin.model.state

        def reference() -> None:
            model = self._model()
            if state is None and pin.plain.match.length:
                raise parts.Misuse("already_loaded")
            _require_slot(slot, cache._audit.active.slots)
            cache.reference.lease_loaded(model)

        cache._agree("load", lambda: pin.plain.load(slot), reference, lambda: pin.echo.load(slot))
        cache._audit.expect_loaded(slot, state)
        cache._audit.after(written=[slot])

    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] = ()) -> Published:
        """See `Lease.publish`."""
        cache, pin, (tokens, known), pages = self._cache, self._pin, _readable(tokens), list(pages)
        row = cache._audit.encode(source)

        def reference() -> parts.Published | Published:
            _require_slot(source, cache._audit.active.slots)
            _require_range(known)
            return cache._publish(self._model(), known, pages, row)

        real, model, echo = cache._agree(
            "publish",
            lambda: pin.plain.publish(tokens, source=source, pages=pages),
            reference,
            lambda: pin.echo.publish(tokens, source=source, pages=pages),
        )
        cache._note_stored(real.outcome, model.outcome, echo.outcome, row)
        cache._audit.after(encoded=cache._encoded)
        published: Published = real
        return published

    def release(self) -> None:
        """See `Lease.release`."""
        cache = self._cache
        cache._agree(
            "release",
            self._pin.plain.release,
            lambda: cache.reference.release(self._model()),
            self._pin.echo.release,
        )
        cache._audit.pins.remove(self._pin)
        cache._audit.after()


def _readable(tokens: Tokens) -> tuple[Tokens, list[int]]:
    """Tokens that can be read three times, and their list."""
    tokens = tokens if isinstance(tokens, Sized) else list(tokens)
    return tokens, [int(token) for token in tokens]


def _options(request: Request) -> dict[str, Any]:
    names = ("namespace", "reserve", "max_length", "no_read", "no_store")
    return {name: getattr(request, name) for name in names}


def _nothing(_: object) -> None:
    """What the library says where the reference tells more."""


def _require_range(known: list[int]) -> None:
    if not all(0 <= token < 2**32 for token in known):
        raise parts.Misuse("token_range")


def _require_slot(slot: int, slots: range) -> None:
    if slot not in slots:
        raise parts.Misuse("slot")


def _known(pool: PoolName) -> parts.PoolName:
    if pool not in POOLS:
        raise parts.Misuse("misuse")
    return pool
