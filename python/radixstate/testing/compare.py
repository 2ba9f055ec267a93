"""One set of words for what the library and the reference answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixstate import Extended, Freed, Lease, Match, Published, Sequence, Skipped, Stored
from radixstate._native import Step
from radixstate.errors import MisuseError, NeverFitsError, OutOfSlotsError
from radixstate.reference import records
from radixstate.testing.model import ModelLease, ModelSequence


class Disagreement(AssertionError):  # noqa: N818 (named after what happened)
    """The library did not do what it should have, or its caller touched what it does not own."""


_REFUSALS = (
    OutOfSlotsError,
    NeverFitsError,
    MisuseError,
    records.Shortage,
    records.NeverFits,
    records.Misuse,
)


@dataclass(frozen=True)
class Refused:
    """A call that raised a shortage or a misuse."""

    error: Exception


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returned, or its refusal. Anything else it raises is no answer, and passes through."""
    try:
        return call()
    except _REFUSALS as error:
        return Refused(error.with_traceback(None))  # whose frames would keep dropped sequences alive


def agree(what: str, found: object, expected: object) -> None:
    """Raises Disagreement unless the two are equal."""
    if found != expected:
        raise Disagreement(f"{what}: {found!r}, expected {expected!r}")


def words(answer: Any) -> Any:
    """The part of an answer that the library and the reference share: never which slot or page it is."""
    match answer:
        case Refused(error):
            return _refusal(error)
        case Exception():
            return _refusal(answer)
        case list():
            return [words(item) for item in answer]
        case Match() | records.Match():
            return "match", answer.length, answer.kv_length, answer.branch, answer.reason, answer.encodings
        case Sequence() | ModelSequence():
            return "sequence", words(answer.match)
        case Lease() | ModelLease():
            return "lease"
        case Stored() | records.Stored():
            return "stored", answer.depth, answer.encodings, answer.step, answer.ticket, answer.replaced
        case Skipped() | records.Skipped():
            return "skipped", answer.reason, answer.wanted, answer.free, answer.evictable
        case Published() | records.Published():
            return "published", words(answer.outcome), answer.replaced
        case Extended() | records.Extended():
            return "extended", words(answer.skipped), answer.replaced
        case Step():
            return answer.id
        case Freed() | records.Freed():
            return "freed", answer.kv, answer.checkpoints
        case _:
            return answer


def _refusal(error: Exception) -> tuple[object, ...]:
    match error:
        case OutOfSlotsError() | records.Shortage():
            return "shortage", error.pool, error.wanted, error.free, error.evictable, error.retiring
        case NeverFitsError() | records.NeverFits():
            return "never fits", error.pool, error.wanted, error.capacity
        case records.Misuse():
            return "misuse", error.rule
        case _:
            name = type(error).__name__.removesuffix("Error")
            return "misuse", re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
