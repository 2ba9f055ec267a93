"""One measured number, as the processes under test hand it over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Self

MORE_IS_BETTER = frozenset({"tokens/s", "GB/s", "requests/s", "fraction", "prefixes"})


@dataclass(frozen=True)
class Figure:
    """A number of one backend.

    Attributes:
        section: of the table.
        name: of what was measured, the same for every backend.
        value: in `unit`.
        unit: one of `MORE_IS_BETTER`, or one of which less is better.
        at: on a growth curve, the point it was measured at.
        axis: what `at` counts.
        of: whose it is, if not that of the process which measured it.
    """

    section: str
    name: str
    value: float
    unit: str
    at: int | None = None
    axis: str = ""
    of: str = ""

    @property
    def label(self) -> str:
        return self.name if self.at is None else f"{self.name}, {self.at} {self.axis}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(**content)


def medians(runs: Iterable[Sequence[Figure]]) -> list[Figure]:
    """Each figure once, with its median over the runs, in the order in which they first appear."""
    values: dict[Figure, list[float]] = defaultdict(list)
    for run in runs:
        for figure in run:
            values[replace(figure, value=0.0)].append(figure.value)
    return [replace(figure, value=median(several)) for figure, several in values.items()]


def growth(figures: Sequence[Figure], first: int, last: int) -> list[Figure]:
    """For each curve with both points, how many times as large its value is at the last."""
    at = {(figure.name, figure.at): figure for figure in figures}
    return [
        Figure(
            end.section,
            f"{name}: {last} {end.axis} over {first}",
            end.value / at[name, first].value,
            "x",
        )
        for (name, point), end in at.items()
        if point == last and at.get((name, first), end).value and (name, first) in at
    ]
