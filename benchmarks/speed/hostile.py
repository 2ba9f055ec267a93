"""Pages that all have one hash under the function that the tree had once, beside ordinary ones."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import product

from benchmarks.speed.clock import Clock, median_us
from benchmarks.speed.ours import Ours
from benchmarks.speed.table import OURS, Figure
from benchmarks.speed.workloads import Backend, Size

PAGE = 16
PAGES = 8192
STEPS = (
    (-5, -8, -1, 0, -9, -4, 1, 5, 5, 7, -1, 3, 0, -5, 1, -9),
    (14, -3, -1, -5, -4, -1, -2, 7, -8, -3, -7, 3, -2, 4, -2, 2),
    (2, -8, -11, 3, 5, 5, -5, -5, 7, -8, 6, 4, 3, 1, 2, 3),
)
"""Short vectors that a lattice reduction finds in a tenth of a second: adding one to a page keeps its FxHash."""


def colliding_pages() -> Iterator[list[int]]:
    """Pages of ordinary tokens that all had one hash."""
    times = range(round(PAGES ** (1 / 3)) + 1)
    for _, factors in zip(range(PAGES), product(times, repeat=3), strict=False):
        moves = (sum(n * s for n, s in zip(factors, step, strict=True)) for step in zip(*STEPS, strict=True))
        yield [50_000 + move for move in moves]


def ordinary_pages() -> Iterator[list[int]]:
    """As many others."""
    return ([50_000 + PAGE * i + j for j in range(PAGE)] for i in range(PAGES))


def measure(backend: Backend) -> list[Figure]:
    """A match and a store among the pages of each kind. Peers are not attacked."""
    if backend.name != OURS:
        return []
    ordinary, colliding = _among(ordinary_pages()), _among(colliding_pages())
    name = f"among {PAGES} pages that collide"
    figures = [
        Figure("growth", f"{what} {name}", us, "us")
        for what, us in zip(("match", "insert"), colliding, strict=True)
    ]
    ratios = (
        Figure("growth", f"{it.name}: over ordinary ones", it.value / us, "x")
        for it, us in zip(figures, ordinary, strict=True)
    )
    return [*figures, *ratios]


def _among(pages: Iterable[list[int]]) -> tuple[float, float]:
    """Microseconds of a match and of an insert."""
    cache, clock = Ours(Size(PAGE * (PAGES + 64), PAGES + 64), page=PAGE), Clock()
    keys = [array("q", page) for page in pages]
    for key in keys:
        cache.store(clock, key, 0, None)
    asked = [key + array("q", [7]) for key in keys[:: PAGES // 256]]

    def match() -> None:
        for ask in asked:
            cache.match(ask)

    return median_us(match) / len(asked), clock.median_us("insert")
