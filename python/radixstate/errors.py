"""Everything this package raises, in three kinds that never mix.

*Shortage* is normal and has the fields a scheduler acts on: `OutOfSlotsError` (busy: `pool`, `wanted`, `free`,
`evictable`, `retiring`) and `NeverFitsError` (`pool`, `wanted`, `capacity`). What is `retiring` comes free when
the steps in flight have retired: where that makes up for what is missing, wait; else end a request.
*Misuse* is the caller's mistake: a subclass of `MisuseError`, which is also a `ValueError`; its message gives
the rule and the numbers, and nothing has changed. A *bug* of the library poisons the cache: `PoisonedError`
from then on. `CheckError` and `BudgetError` report what `check()` and a memory plan found.
"""

from radixstate._native import (
    AlreadyLoadedError,
    CacheError,
    CheckError,
    ConfigError,
    DepthPassedError,
    DepthPastEndError,
    EmptyPromptError,
    ForkedError,
    LengthMismatchError,
    MisuseError,
    NeverFitsError,
    NotClaimedError,
    NotLoadedError,
    NotYourPendingError,
    NotYourSlotError,
    OutOfSlotsError,
    PageOwnershipError,
    PoisonedError,
    PrefixMismatchError,
    RunningSlotError,
    SlotError,
    StaleError,
    TensorError,
    TokenRangeError,
    TooManyPagesError,
    UnalignedError,
    UnknownStepError,
    UseAfterFinishError,
    WrongCacheError,
)


class BudgetError(CacheError):
    """A plan needs more memory than there is; the message says what to lower."""


__all__ = [
    "AlreadyLoadedError",
    "BudgetError",
    "CacheError",
    "CheckError",
    "ConfigError",
    "DepthPassedError",
    "DepthPastEndError",
    "EmptyPromptError",
    "ForkedError",
    "LengthMismatchError",
    "MisuseError",
    "NeverFitsError",
    "NotClaimedError",
    "NotLoadedError",
    "NotYourPendingError",
    "NotYourSlotError",
    "OutOfSlotsError",
    "PageOwnershipError",
    "PoisonedError",
    "PrefixMismatchError",
    "RunningSlotError",
    "SlotError",
    "StaleError",
    "TensorError",
    "TokenRangeError",
    "TooManyPagesError",
    "UnalignedError",
    "UnknownStepError",
    "UseAfterFinishError",
    "WrongCacheError",
]
