"""Plots: how calls grow, and how many times better each figure is than each peer's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.speed.table import OURS, Figure, Row

# Distinct for colour-blind readers, and by marker where lines coincide.
STYLES = {
    "ours": ("#0072b2", "o"),
    "sglang-rust": ("#d55e00", "s"),
    "sglang-python": ("#e69f00", "^"),
    "sglang-old": ("#999999", "v"),
    "memcpy": ("#000000", "x"),
    "torch": ("#cc79a7", "D"),
}
COLUMNS = 4
TREES = ("W1", "W2", "W3")


def write(folder: Path, figures: Mapping[str, Sequence[Figure]], rows: Sequence[Row]) -> list[Path]:
    """Writes the plots for which there are figures, and says which.

    Args:
        folder: exists.
        figures: by whose they are, ours among them.
        rows: of the table.
    """
    plots = {
        "growth.png": _growth(figures),
        "trees.png": _bars(rows, TREES, "times better than the peer (1: equal)"),
        "codec.png": _bars(rows, ["codec"], "times as fast (1: equal)"),
    }
    written = []
    for name, canvas in plots.items():
        if canvas is not None:
            canvas.savefig(folder / name, dpi=110)
            written.append(folder / name)
    return written


def _canvas(width: float, height: float) -> Canvas:
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)  # draws to a file, needs no display
    return canvas


def _growth(figures: Mapping[str, Sequence[Figure]]) -> Canvas | None:
    """A panel for each curve, both axes logarithmic."""
    curves = list(dict.fromkeys(it.name for it in figures[OURS] if it.at is not None))
    if not curves:
        return None
    height = -(-len(curves) // COLUMNS)
    canvas = _canvas(4 * COLUMNS, 3 * height)
    panels = list(canvas.subplots(height, COLUMNS, squeeze=False).flat)
    for axes, curve in zip(panels, curves, strict=False):
        _curve(axes, curve, figures)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return canvas


def _curve(axes: Axes, curve: str, figures: Mapping[str, Sequence[Figure]]) -> None:
    """Over whole decades, so that noise does not look like growth."""
    for owner, (colour, marker) in STYLES.items():
        points = [it for it in figures.get(owner, ()) if it.name == curve and it.at is not None]
        if points:
            axes.plot(
                [it.at for it in points],
                [it.value for it in points],
                color=colour,
                marker=marker,
                label=owner,
            )
            axes.set_xlabel(points[0].axis)
            axes.set_ylabel(points[0].unit)
    axes.set_title(curve, fontsize=9)
    axes.set_xscale("symlog", linthresh=64)
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    axes.set_ylim(10 ** floor(log10(lowest)), 10 ** ceil(log10(highest)))


def _bars(rows: Sequence[Row], sections: Collection[str], label: str) -> Canvas | None:
    """How many times better each figure of some sections is than each peer's."""
    points = [
        (peer, row.name, ratio)
        for row in rows
        if row.section in sections
        for peer in row.peers
        if (ratio := row.ratio(peer))
    ]
    if not points:
        return None
    names = list(dict.fromkeys(name for _, name, _ in points))
    canvas = _canvas(9, 1.5 + 0.3 * len(names))
    axes = canvas.subplots()
    for owner in dict.fromkeys(peer for peer, _, _ in points):
        own = [(ratio, names.index(name)) for peer, name, ratio in points if peer == owner]
        colour, marker = STYLES[owner]
        axes.plot(*zip(*own, strict=True), color=colour, marker=marker, linestyle="", label=owner)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.legend()
    return canvas
