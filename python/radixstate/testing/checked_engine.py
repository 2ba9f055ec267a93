"""An engine's cache that carries out every call three times, and compares."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from radixstate import EngineCache, Extended, Match, Published, Skipped, StateSpec, Stored
from radixstate.reference.engine import ReferenceEngineCache
from radixstate.testing.audit import Pin
from radixstate.testing.checked_base import CheckedBase, Wrapper, readable
from radixstate.testing.compare import Refused, words
from radixstate.testing.model import ModelEngine
from radixstate.testing.sides import AnyEngineCache, Side, Twins
from radixstate.tokens import Tokens

if TYPE_CHECKING:
    from radixstate.tokens import PageRow


class CheckedEngineCache(CheckedBase[EngineCache, ReferenceEngineCache]):
    """Answers as an `EngineCache` does, and raises Disagreement at the first call that goes wrong.

    Its leases and steps are `CheckedLease` and `CheckedStep`. The numbers of pages and of active slots that it hands
    out must be the reference's: each time the lowest free ones. See `CheckedBase`.
    """

    logical: bool
    own_slots: bool

    def __init__(
        self,
        spec: StateSpec,
        *,
        kv_pages: int = 0,
        page_size: int = 16,
        checkpoint_stride: int = 64,
        logical: bool = False,
        own_slots: bool = False,
        **options: Any,
    ) -> None:
        """Takes what `EngineCache` takes. An engine's `active` tensors are overwritten, and must be on the CPU.

        Raises:
            ConfigError: as `EngineCache`, or the pools are not on the CPU.
        """
        sizes: dict[str, Any] = {
            "kv_pages": kv_pages,
            "page_size": page_size,
            "checkpoint_stride": checkpoint_stride,
        }
        kind: dict[str, Any] = {"logical": logical, "own_slots": own_slots}
        library = EngineCache(spec, **kind, **sizes, **options)
        slots, kept = library.active.slots, library.checkpoints.slots
        fixed: dict[str, Any] = {"active_slots": slots, "checkpoint_slots": kept, "active": None}
        rank = EngineCache(spec, **kind, **options | sizes | fixed)
        reference = ReferenceEngineCache(
            **sizes,
            checkpoint_slots=kept,
            active_slots=slots if own_slots else 0,
            owner="logical" if logical else "engine",
        )
        model = ModelEngine(reference, slots=slots, own_slots=own_slots)
        _alike: tuple[AnyEngineCache, ...] = library, model, rank
        super().__init__(library, model, rank)

    def lease(self, match: Match) -> CheckedLease:
        """See `EngineCache.lease`."""
        pin = Pin(self._agree("lease", lambda it: it.cache.lease(it.of(match))))
        self._audit.pins.append(pin)
        self._audit.after()
        return CheckedLease(self, pin)

    def take_freed(self) -> list[int]:
        """See `EngineCache.take_freed`."""
        freed: list[int] = self._call(
            "take_freed",
            lambda it: it.cache.take_freed(),
            say=lambda answer: words(answer) if isinstance(answer, Refused) else sorted(answer),
        )
        return freed

    def copy_freed(self, out: PageRow) -> int:
        """See `EngineCache.copy_freed`."""
        before = np.array(out)  # may be no buffer of the right kind, which each side says by itself

        def call(it: Side) -> tuple[int, list[int]]:
            room = out if it.cache is self.library else before.copy()
            freed = it.cache.copy_freed(room)
            return freed, sorted(np.asarray(room).ravel()[:freed].tolist())

        freed: tuple[int, list[int]] = self._call("copy_freed", call)
        return freed[0]


class CheckedLease(Wrapper):
    """A lease of a `CheckedEngineCache`."""

    match: Match
    depth: int
    pages: list[int]
    state: int | None
    slots: list[int]

    def __init__(self, cache: CheckedEngineCache, pin: Pin) -> None:
        """Made by `CheckedEngineCache.lease`."""
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

    def fork(self) -> CheckedLease:
        """See `Lease.fork`."""
        pin = Pin(self._cache._agree("fork", lambda it: it.of(self).fork()))
        self._cache._audit.pins.append(pin)
        self._cache._audit.after()
        return CheckedLease(self._cache, pin)

    def take_slot(self) -> int:
        """See `Lease.take_slot`."""
        slot: int = self._cache._agree("take_slot", lambda it: it.of(self).take_slot()).library
        self._pin.slots.append(slot)
        self._cache._audit.expect_unusable(slot)
        self._cache._audit.after(written=[slot])
        return slot

    def give_back_slot(self, slot: int) -> None:
        """See `Lease.give_back_slot`."""
        self._cache._agree("give_back_slot", lambda it: it.of(self).give_back_slot(slot))
        self._cache._audit.give_back(self._pin, slot)
        self._cache._audit.after()

    def extend(self, tokens: Tokens, pages: Iterable[int] | None = None) -> Extended:
        """See `Lease.extend`."""
        tokens, given = readable(tokens), None if pages is None else list(pages)
        extended: Extended = self._cache._call("extend", lambda it: it.of(self).extend(tokens, given))
        return extended

    def attach(self, tokens: Tokens, *, source: int) -> Stored | Skipped:
        """See `Lease.attach`."""
        cache, tokens = self._cache, readable(tokens)
        row = cache._encode(source, source)
        answers = cache._agree("attach", lambda it: it.of(self).attach(tokens, source=source))
        cache._note_stored(answers, row)
        cache._audit.after(encoded=cache._model.reserved)
        stored: Stored | Skipped = answers.library
        return stored

    def publish(self, tokens: Tokens, *, source: int, pages: Iterable[int] | None = None) -> Published:
        """See `Lease.publish`."""
        cache, tokens, given = self._cache, readable(tokens), None if pages is None else list(pages)
        row = cache._encode(source, source)
        answers = cache._agree("publish", lambda it: it.of(self).publish(tokens, source=source, pages=given))
        cache._note_stored(Twins(*(it.outcome for it in answers)), row)
        cache._audit.after(encoded=cache._model.reserved)
        published: Published = answers.library
        return published

    def release(self) -> None:
        """See `Lease.release`."""
        self._cache._agree("release", lambda it: it.of(self).release())
        self._cache._audit.unpin(self._pin)
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
