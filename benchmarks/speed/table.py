"""Figures, the table that shows them beside the peers', and the bounds they must keep."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

OURS = "ours"
PAGE = Path("docs/performance.md")
MORE_IS_BETTER = frozenset({"tokens/s", "GB/s", "requests/s", "fraction", "prefixes"})
TITLES = {
    "W1": "W1: 4096 prefixes of 1000 tokens, stored, matched, evicted; CPU time per call",
    "W2": "W2: 64 conversations of 64 turns of 256 tokens; CPU time per call",
    "W3": "W3: 20,000 requests for 4000 prompts by Zipf's law, 512 states; CPU time per call",
    "growth": "Growth: CPU time of one call against what the cache holds",
    "requests": "W1 as whole requests, pages of 64, prompts as lists; CPU time per call",
    "boundary": "Boundary: one call from Python, and from Rust",
    "front": "Front: PrefixCache with states of one element, and the native layer it calls",
    "codec": "Codec on the CPU: GB/s read and written",
    "reuse": "End to end: int8 states, and full-precision ones in the same bytes",
}


@dataclass(frozen=True)
class Figure:
    """A number of one backend, as its worker hands it over.

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


class Bound(NamedTuple):
    """Against a peer: ours is at least `bound` times better. Without one: our figure is at most `bound`."""

    figure: str
    peer: str | None
    bound: float

    def __str__(self) -> str:
        return f"<= {self.bound:g}" if self.peer is None else f">= {self.bound:g}x {self.peer}"


@dataclass(frozen=True)
class Row:
    """One figure of ours, and the same of the peers that have it, all in `unit`."""

    section: str
    name: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict)

    def ratio(self, peer: str) -> float | None:
        """How many times better ours is; none where that is no number."""
        pair = self.ours, self.peers[peer]
        better, worse = pair if self.unit in MORE_IS_BETTER else reversed(pair)
        return better / worse if worse else None

    def keeps(self, bound: Bound) -> bool | None:
        """Whether the bound on this row holds; none if its peer was not there."""
        if bound.peer is None:
            return self.ours <= bound.bound
        return (self.ratio(bound.peer) or 0.0) >= bound.bound if bound.peer in self.peers else None


CHAIN = "match, chain of 16-token turns"
EVICT = "evict one state among leaves", "evict one page among leaves"
CASES = [f"N={n}, threads={threads}" for n, threads in product((1, 4), (1, 2))]
HALVES = [f"{dtype}, {case}" for dtype, case in product(("bfloat16", "float16"), CASES)]
CODEC = [*HALVES, *(f"float32, {case}" for case in CASES)]

BOUNDS = [
    Bound(*bound)
    for bound in (
        ("W1 match", "sglang-rust", 5),
        ("W2 match", "sglang-rust", 8),
        ("W3 match", "sglang-rust", 4),
        *((f"{name} insert", "sglang-rust", 5) for name in ("W1", "W2", "W3")),
        *((f"{name} lease + release", "sglang-rust", 4) for name in ("W1", "W2", "W3")),
        *((f"{name} whole workload", "sglang-rust", 5) for name in ("W1", "W2", "W3")),
        *((f"{name} bytes per cached token", "sglang-rust", 2) for name in ("W1", "W2")),
        *((f"{what}, 1024 leaves", "sglang-rust", 10) for what in EVICT),
        # The node, its run and two places in the table of children come from memory: four cache misses.
        *((f"{what}: 1048576 leaves over 1024", None, 2.5) for what in EVICT),
        *((f"{what}: 1048576 leaves over 1024 and 4 cache misses", None, 1.5) for what in EVICT),
        (f"{CHAIN}, 4096 turns", "sglang-rust", 15),
        (f"{CHAIN}: 4096 turns over reading the key once and a cache miss for each", None, 2),
        # Unchanged, within what a median of single calls varies from run to run.
        ("match a key of 1000 tokens: after 999 diverging lookups over before", None, 1.2),
        # The hash has a key of its own in each tree, so nobody can choose pages that collide.
        *(
            (f"{what} among 8192 pages that collide: over ordinary ones", None, 2)
            for what in ("match", "insert")
        ),
        *((f"{way} {case}", "memcpy", 0.8) for way in ("store", "load") for case in CODEC),
        *((f"store {case}", "torch", 10) for case in CODEC),
        *((f"load {case}", "torch", 10) for case in HALVES),
        # A load of fp32 writes four times what it reads. One thread comes close to writing alone, so two gain little.
        *((f"load float32, {case}", "torch", 10 if case.endswith("1") else 5) for case in CASES),
        *((f"load float32, {case}: over writing the states alone", None, 1.25) for case in CASES),
    )
]


def medians(runs: Iterable[Sequence[Figure]]) -> list[Figure]:
    """Each figure once, with its median over the runs, in the order in which they first appear."""
    values: dict[Figure, list[float]] = defaultdict(list)
    for run in runs:
        for figure in run:
            values[replace(figure, value=0.0)].append(figure.value)
    return [replace(figure, value=median(several)) for figure, several in values.items()]


def build(figures: Mapping[str, Sequence[Figure]]) -> list[Row]:
    """A row for each figure of ours, from everybody's medians."""
    theirs = {
        owner: {figure.label: figure.value for figure in several}
        for owner, several in figures.items()
        if owner != OURS
    }
    return [
        Row(
            figure.section,
            figure.label,
            figure.unit,
            figure.value,
            {peer: values[figure.label] for peer, values in theirs.items() if figure.label in values},
        )
        for figure in figures[OURS]
    ]


def check(rows: Sequence[Row], bounds: Sequence[Bound] = BOUNDS) -> tuple[list[str], list[str]]:
    """The bounds that are missed, and those that can't be checked because a figure is missing, as text."""
    by_name = {row.name: row for row in rows}
    missed, unknown = [], []
    for bound in bounds:
        row = by_name.get(bound.figure)
        kept = row.keeps(bound) if row else None
        if kept is None:
            unknown.append(f"{bound.figure}: {bound}")
        elif row and not kept:
            missed.append(f"{bound.figure}: {_found(row, bound)}, {bound}")
    return missed, unknown


def text(rows: Sequence[Row]) -> str:
    """All sections, as Markdown that is aligned for a terminal."""
    return "\n\n".join(f"{TITLES[section]}\n\n{table}" for section, table in sections(rows).items())


def sections(rows: Sequence[Row]) -> dict[str, str]:
    """The table of each section: a line for each figure, and in a peer's column "theirs (ratio)"."""
    chosen = {section: [row for row in rows if row.section == section] for section in TITLES}
    return {section: _markdown(several) for section, several in chosen.items() if several}


def bounded(rows: Sequence[Row], section: str) -> list[Row]:
    """Without those rows of a section that have no bound: a plot shows them."""
    names = {bound.figure for bound in BOUNDS}
    return [row for row in rows if row.section != section or row.name in names]


def write(path: Path, rows: Sequence[Row], setting: Mapping[str, Any]) -> None:
    """JSON: what was run on what, and the rows."""
    path.write_text(json.dumps({**setting, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def read(path: Path) -> list[Row]:
    """The rows that `write` wrote."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def refresh(page: str, contents: Mapping[str, str]) -> str:
    """A page with new contents between "<!-- figures: NAME -->" and "<!-- end of figures -->".

    Raises:
        ValueError: the page has no such place.
    """
    for name, content in contents.items():
        place = re.compile(rf"(?<=<!-- figures: {name} -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
        page, found = place.subn(lambda _, new=content: f"{new}\n", page)
        if not found:
            raise ValueError(f"no place for {name}")
    return page


def number(value: float) -> str:
    """Three significant digits, without an exponent below a billion."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or not value else f"{value:.1e}"


def _markdown(rows: Sequence[Row]) -> str:
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    header = ["name", "unit", OURS, *peers, "bound"]
    lines = [
        [row.name, row.unit, number(row.ours), *(_beside(row, peer) for peer in peers), _bounds(row)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    numbers = range(2, 3 + len(peers))
    rule = ["-" * (width - 1) + ":" if i in numbers else "-" * width for i, width in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in [header, rule, *lines]
    )


def _beside(row: Row, peer: str) -> str:
    if peer not in row.peers:
        return ""
    ratio = row.ratio(peer)
    return number(row.peers[peer]) + ("" if ratio is None else f" ({number(ratio)}x)")


def _bounds(row: Row) -> str:
    own = [bound for bound in BOUNDS if bound.figure == row.name]
    return ", ".join(f"{bound} MISSED" if row.keeps(bound) is False else str(bound) for bound in own)


def _found(row: Row, bound: Bound) -> str:
    return (
        f"{number(row.ours)} {row.unit}" if bound.peer is None else f"{number(row.ratio(bound.peer) or 0.0)}x"
    )
