"""A cache that carries out every call three times, and compares: what both kinds share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, SupportsIndex, TypeVar

from radixstate import ActivePool, CheckpointPool, Freed, Match, Namespace, StateSpec, Stored, Usage
from radixstate.base import CacheBase, PoolName
from radixstate.errors import MisuseError
from radixstate.reference.base import ReferenceBase
from radixstate.testing.audit import Audit, Begun, Owner, Pin
from radixstate.testing.compare import Refused, agree, attempt, words
from radixstate.testing.model import Model
from radixstate.testing.sides import AnyCache, Side, Twins
from radixstate.tokens import Tokens

Call = Callable[[Side], Any]
Library = TypeVar("Library", bound=CacheBase[Any])
Reference = TypeVar("Reference", bound=ReferenceBase)


class Wrapper:
    """What only reads is the library's own answer: its class names such attributes, and `__getattr__` finds them."""

    _library: Any

    def __getattr__(self, name: str) -> Any:
        """The library's."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self._library, name)


class CheckedBase(Wrapper, Generic[Library, Reference]):
    """What `CheckedCache` and `CheckedEngineCache` share.

    It holds three caches and makes each call on all of them: the library, the slow reference, and a second rank of
    the library. Then everything is compared: the answers, what is resident, the books of all pools, the digests of
    the two ranks, the pages of every sequence and lease, and every byte of both tensor pools. Slots that nobody
    owns are filled with NaNs. A misuse or a shortage is raised as usual, after a look at whether it changed
    anything.

    It also finds mistakes of the scheduler that drives it: a slot written after it was given back, a state read
    from a slot that was freed. Time and memory grow with the calls made: use it with small pools, on the CPU.

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
    stats: Callable[[], Any]
    check: Callable[..., None]

    def __init__(self, library: Library, model: Model[Reference], rank: Library) -> None:
        """Compares three new and empty caches."""
        self.library = self._library = library
        self.rank = rank
        self._model = model
        self._twins: dict[int, Twins] = {}  # by id of the library's object, which is kept
        caches: tuple[AnyCache, ...] = (library, model, rank)
        self._sides = [Side(cache, number, self._twins) for number, cache in enumerate(caches)]
        self._audit = Audit(library, model.reference, rank)
        self._dropped: list[Owner | Pin | Begun] = []

    @property
    def reference(self) -> Reference:
        """See the class."""
        return self._model.reference

    # --- calls ---

    def lookup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        max_length: int | None = None,
        whole: bool = False,
    ) -> Match:
        """See `CacheBase.lookup`."""
        tokens = readable(tokens)
        answers = self._agree(
            "lookup",
            lambda it: it.cache.lookup(tokens, namespace=namespace, max_length=max_length, whole=whole),
        )
        self._audit.after()
        match: Match = self._remember(answers)
        return match

    def touch(self, tokens: Tokens, *, namespace: Namespace | None = None) -> int:
        """See `CacheBase.touch`."""
        tokens = readable(tokens)
        depth: int = self._call("touch", lambda it: it.cache.touch(tokens, namespace=namespace))
        return depth

    def evict(self, pool: PoolName, n: int) -> Freed:
        """See `CacheBase.evict`."""
        freed: Freed = self._call("evict", lambda it: it.cache.evict(pool, n))
        return freed

    def reset(self) -> None:
        """See `CacheBase.reset`."""
        self._call("reset", lambda it: it.cache.reset())

    def begin_step(self) -> CheckedStep:
        """See `CacheBase.begin_step`."""
        begun = Begun(self._agree("begin_step", lambda it: it.cache.begin_step()))
        self._audit.after()
        return CheckedStep(self, begun)

    def retire_step(
        self, step: SupportsIndex, invalid: Iterable[Stored] = (), *, failed: bool = False
    ) -> None:
        """See `CacheBase.retire_step`."""
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
        """See `CacheBase.invalidate`."""
        self._call("invalidate", lambda it: it.cache.invalidate(it.of(stored)))

    @contextmanager
    def step(self) -> Iterator[CheckedStep]:
        """See `CacheBase.step`."""
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
            self._audit.unpin(dropped)
            self._audit.poison_free_slots()
        elif isinstance(dropped, Begun):
            self._model.retire_step(dropped.twins.model, failed=True)
            self._audit.poison_free_slots()
        del dropped.twins

    # --- what belongs together ---

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
    """A step of a checked cache. It counts as its number.

    Attributes:
        id: its number.
        twins: the same step in each cache.
    """

    def __init__(self, cache: CheckedBase[Any, Any], begun: Begun) -> None:
        """Made by `CheckedBase.begin_step`."""
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


def readable(tokens: Tokens) -> Tokens:
    """Tokens that can be read three times."""
    return tokens if isinstance(tokens, Sized) else list(tokens)
