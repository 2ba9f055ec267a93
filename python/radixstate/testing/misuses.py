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
    MisuseError,
    NotClaimedError,
    NotYourSlotError,
    RunningSlotError,
    SlotError,
    TokenRangeError,
    UnalignedError,
    UnknownStepError,
    UseAfterFinishError,
    WrongCacheError,
)
from radixstate.testing.checked import CheckedCache, CheckedLease, CheckedSequence

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


def of_every_cache(cache: CheckedCache, foreign: Foreign, released: list[CheckedLease]) -> Wrong:
    """What no caller may do. `released` are leases that have ended."""
    wrong: Wrong = [
        (EmptyPromptError, lambda: cache.lookup([])),
        (TokenRangeError, lambda: cache.lookup([0, 2**32])),
        (TokenRangeError, lambda: cache.lookup([-1])),
        (UnknownStepError, lambda: cache.retire_step(10**6)),
        (UnknownStepError, lambda: cache.retire_step(0)),
        (MisuseError, lambda: cache.evict(_ANY, 1)),
        (MisuseError, lambda: cache.take_freed(_ANY)),
        (WrongCacheError, lambda: cache.lease(foreign.match)),
        (WrongCacheError, lambda: cache.invalidate(foreign.stored)),
        (WrongCacheError, lambda: cache.retire_step(1, [foreign.stored])),
    ]
    for lease in released:
        wrong += [
            (UseAfterFinishError, lease.loaded),
            (UseAfterFinishError, lease.release),
            (UseAfterFinishError, partial(lease.load, 1)),
            (UseAfterFinishError, partial(lease.publish, [0], source=1)),
        ]
    return wrong


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


def of_engines(cache: CheckedCache, leases: list[CheckedLease]) -> Wrong:
    """What no engine with allocators of its own may do."""
    wrong: Wrong = [
        (ConfigError, lambda: cache.start([0])),
        (ConfigError, lambda: cache.start_many([])),
    ]
    for lease in leases:
        if lease.state is None and lease.match.length:
            wrong += [(AlreadyLoadedError, partial(lease.load, 1))]
        else:
            wrong += [(SlotError, partial(lease.load, slot)) for slot in (0, cache.active.slots + 1)]
    return wrong
