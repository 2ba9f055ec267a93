"""Rows of the table: our figure beside a peer's, with the target and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.speed.figures import MORE_IS_BETTER, Figure
from benchmarks.speed.targets import TARGETS, Target


@dataclass(frozen=True)
class Row:
    """One figure of ours, beside one peer's or alone.

    Attributes:
        section: of the table.
        name: of the figure.
        ours: in `unit`.
        peer: by name; none where no peer has the figure.
        theirs: in `unit`.
        ratio: how many times better ours is.
        target: of the ratio or, as an upper bound, of ours.
        met: none without a target, or without the peer that it is about.
        limit: where the target is missed but the machine's limit is reached: the row that shows it.
    """

    section: str
    name: str
    ours: float
    unit: str
    peer: str | None = None
    theirs: float | None = None
    ratio: float | None = None
    target: str | None = None
    met: bool | None = None
    limit: str | None = None


def ratio(ours: float, theirs: float, unit: str) -> float | None:
    """How many times better ours is; none where that is no number."""
    better, worse = (ours, theirs) if unit in MORE_IS_BETTER else (theirs, ours)
    return better / worse if worse else None


def build(
    ours: Sequence[Figure],
    peers: Mapping[str, Sequence[Figure]],
    targets: Mapping[str, tuple[Target, ...]] = TARGETS,
) -> list[Row]:
    """One row for each figure of ours and each peer that has it, and one for each target without a peer's figure.

    Args:
        ours: medians.
        peers: the same of each peer, by name.
        targets: by a figure's label.
    """
    theirs = {name: {figure.label: figure.value for figure in figures} for name, figures in peers.items()}
    found = [row for figure in ours for row in _rows(figure, theirs, targets.get(figure.label, ()))]
    reached = {row.name for row in found if row.met and row.peer is None}
    return [row if row.limit in reached else replace(row, limit=None) for row in found]


def _rows(figure: Figure, theirs: Mapping[str, Mapping[str, float]], targets: Sequence[Target]) -> list[Row]:
    target_of = {target.peer: target for target in targets}
    compared = [
        _row(figure, peer, values[figure.label], target_of.get(peer))
        for peer, values in theirs.items()
        if figure.label in values
    ]
    seen = {row.peer for row in compared}
    alone = [_row(figure, None, None, target) for target in targets if target.peer not in seen]
    return [*alone, *compared] or [_row(figure, None, None, None)]


def _row(figure: Figure, peer: str | None, theirs: float | None, target: Target | None) -> Row:
    better = None if theirs is None else ratio(figure.value, theirs, figure.unit)
    met = None if target is None else target.met(figure.value, better)
    return Row(
        figure.section,
        figure.label,
        figure.value,
        figure.unit,
        peer,
        theirs,
        better,
        None if target is None else str(target),
        met,
        target.limit if target and met is False else None,
    )
