"""Wrong calls, and the class of error that each must raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from radixstate import PrefixCache, StateSpec, Stored
from radixstate.errors import (
    AlreadyLoadedError,
    ConfigError,
    DepthPassedError,
    DepthPastEndError,
    EmptyPromptError,
    LengthMismatchError,
    MisuseError,
    NotClaimedError,
    NotYourSlotError,
    PrefixMismatchError,
    RunningSlotError,
    SlotError,
    TokenRangeError,
    UnalignedError,
    UnknownStepError,
    UseAfterFinishError,
    WrongCacheError,
)
from radixstate.testing.checked import CheckedCache, CheckedSequence
from radixstate.testing.checked_base import CheckedBase
from radixstate.testing.checked_engine import CheckedEngineCache, CheckedLease

Wrong = list[tuple[type[MisuseError], Callable[[], object]]]

_ANY: Any = "pages"  # no pool is called so


class Foreign:
    """What another cache made."""

    def __init__(self, spec: StateSpec) -> None:
        """A cache with a running request and a stored state."""
        cache = PrefixCache(spec, active_slots=1, checkpoint_slots=1, page_size=1, checkpoint_stride=1)
        self.seq = cache.start([0])
        stored = self.seq.checkpoint(1)
        assert isinstance(stored, Stored), "an empty cache has room"
        self.stored = stored
        self.match = cache.lookup([0, 0])


def of_every_cache(cache: CheckedBase[Any, Any], foreign: Foreign) -> Wrong:
    """What no caller may do."""
    return [
        (EmptyPromptError, lambda: cache.lookup([])),
        (EmptyPromptError, lambda: cache.lookup([], whole=True)),
        (ConfigError, lambda: cache.lookup([0], whole=True, max_length=1)),
        (TokenRangeError, lambda: cache.lookup([0, 2**32])),
        (TokenRangeError, lambda: cache.lookup([-1])),
        (UnknownStepError, lambda: cache.retire_step(10**6)),
        (UnknownStepError, lambda: cache.retire_step(0)),
        (MisuseError, lambda: cache.evict(_ANY, 1)),
        (WrongCacheError, lambda: cache.invalidate(foreign.stored)),
        (WrongCacheError, lambda: cache.retire_step(1, [foreign.stored])),
    ]


def of_schedulers(
    cache: CheckedCache,
    grid: int,
    foreign: Foreign,
    live: list[CheckedSequence],
    ended: list[CheckedSequence],
) -> Wrong:
    """What no scheduler may do. Legal depths are multiples of `grid`."""
    wrong: Wrong = [
        (EmptyPromptError, lambda: cache.start([])),
        (TokenRangeError, lambda: cache.start([-1])),
        (ConfigError, lambda: cache.start([0], slots=0)),
        (WrongCacheError, lambda: cache.checkpoint_many([(foreign.seq, grid, 1)])),
    ]
    for seq in live:
        wrong += _on_a_live_one(seq, grid)
    for seq in ended:
        wrong += [
            (UseAfterFinishError, seq.finish),
            (UseAfterFinishError, seq.abort),
            (UseAfterFinishError, seq.shrink),
            (UseAfterFinishError, seq.take_slot),
            (UseAfterFinishError, partial(seq.give_back_slot, 1)),
            (UseAfterFinishError, partial(seq.grow, 1)),
            (UseAfterFinishError, partial(seq.append, [0])),
            (UseAfterFinishError, partial(seq.checkpoint, grid)),
        ]
    return wrong


def _on_a_live_one(seq: CheckedSequence, grid: int) -> Wrong:
    beyond = seq.length + grid - seq.length % grid
    wrong: Wrong = [
        (DepthPastEndError, lambda: seq.checkpoint(beyond)),
        (NotYourSlotError, lambda: seq.checkpoint(0, source=0)),
        (NotYourSlotError, partial(seq.give_back_slot, 0)),
        (RunningSlotError, lambda: seq.give_back_slot(seq.slot)),
        (TokenRangeError, lambda: seq.append([2**32])),
        (NotClaimedError, lambda: seq.append([0] * (1 + max(0, seq.claimed - seq.length)))),
    ]
    if seq.reused:
        wrong.append((DepthPassedError, lambda: seq.checkpoint(seq.reused - grid)))
    return wrong if grid == 1 else [*wrong, (UnalignedError, lambda: seq.checkpoint(1))]


def of_engines(
    cache: CheckedEngineCache, foreign: Foreign, live: list[CheckedLease], released: list[CheckedLease]
) -> Wrong:
    """What no engine may do. `released` are leases that have ended."""
    wrong: Wrong = [(WrongCacheError, lambda: cache.lease(foreign.match))]
    for lease in live:
        wrong += _on_a_live_lease(cache, lease)
    for lease in released:
        wrong += [
            (UseAfterFinishError, lease.loaded),
            (UseAfterFinishError, lease.release),
            (UseAfterFinishError, lease.fork),
            (UseAfterFinishError, lease.take_slot),
            (UseAfterFinishError, partial(lease.give_back_slot, 1)),
            (UseAfterFinishError, partial(lease.load, 1)),
            (UseAfterFinishError, partial(lease.extend, [])),
            (UseAfterFinishError, partial(lease.attach, [], source=1)),
            (UseAfterFinishError, partial(lease.publish, [], source=1)),
        ]
    return wrong


def _on_a_live_lease(cache: CheckedEngineCache, lease: CheckedLease) -> Wrong:
    page = cache.page_size
    beyond = [7] * (lease.depth - lease.depth % page + page)
    wrong: Wrong = [(SlotError, partial(lease.load, slot)) for slot in (0, cache.active.slots + 1)]
    wrong += [
        (NotYourSlotError, partial(lease.give_back_slot, 0)),
        (TokenRangeError, partial(lease.extend, [2**32] * page)),
        (LengthMismatchError, partial(lease.attach, beyond, source=1)),
    ]
    if lease.depth:  # no prompt has these tokens
        wrong.append((PrefixMismatchError, partial(lease.extend, beyond)))
    if page > 1:
        wrong.append((UnalignedError, partial(lease.extend, beyond[1:])))
    if cache.logical:
        wrong.append((LengthMismatchError, partial(lease.extend, [], [1])))
    others = [slot for slot in range(1, cache.active.slots + 1) if slot not in lease.slots]
    if cache.own_slots:
        wrong += [(NotYourSlotError, partial(lease.load, slot)) for slot in others[:1]]
    elif lease.state is None and lease.depth:
        wrong.append((AlreadyLoadedError, partial(lease.load, 1)))
    return wrong
