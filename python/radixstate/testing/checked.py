"""A scheduler's cache that carries out every call three times, and compares."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from radixstate import Match, Namespace, PrefixCache, Sequence, Skipped, StateSpec, Stored
from radixstate.errors import CacheError
from radixstate.reference.cache import ReferenceCache
from radixstate.testing.audit import Owner
from radixstate.testing.checked_base import Call, CheckedBase, Wrapper, readable
from radixstate.testing.compare import Refused, agree, words
from radixstate.testing.model import ModelCache
from radixstate.testing.sides import AnyPrefixCache, Side, Twins
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate import StartRequest


class CheckedCache(CheckedBase[PrefixCache, ReferenceCache]):
    """Answers as a `PrefixCache` does, and raises Disagreement at the first call that goes wrong.

    Its sequences and steps are `CheckedSequence` and `CheckedStep`; what `start_many` could not start is a
    `CacheError`. See `CheckedBase`.
    """

    def __init__(
        self,
        spec: StateSpec,
        *,
        kv_pages: int = 0,
        page_size: int = 16,
        checkpoint_stride: int = 64,
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
        library = PrefixCache(spec, **sizes, **options)
        pools = library.active.slots, library.checkpoints.slots
        sizes |= {"active_slots": pools[0], "checkpoint_slots": pools[1]}
        rank = PrefixCache(spec, **options | sizes | {"active": None})
        model = ModelCache(ReferenceCache(**sizes))
        _alike: tuple[AnyPrefixCache, ...] = library, model, rank
        super().__init__(library, model, rank)

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
        tokens = readable(tokens)
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
            if isinstance(it.cache, ModelCache):
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

    def _adopt(self, started: list[Twins]) -> list[CheckedSequence]:
        """Sequences that started: their slots hold what they reuse."""
        owners = [Owner(twins, twins.library.slots) for twins in started]
        for owner in owners:
            self._remember(Twins(*(it.match for it in owner.twins)))
            self._audit.begin(owner)
        self._audit.after(touched=owners, written=[slot for owner in owners for slot in owner.slots])
        return [CheckedSequence(self, owner) for owner in owners]


class CheckedSequence(Wrapper):
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
        tokens = readable(tokens)
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


def _model_slot(seq: object, slot: int) -> int:
    """The reference's slot for one of a sequence's. Any other gives 0, which is nobody's."""
    if not isinstance(seq, CheckedSequence) or slot not in seq._owner.slots:
        return 0
    return seq._owner.running.slots[seq._owner.slots.index(slot)]
