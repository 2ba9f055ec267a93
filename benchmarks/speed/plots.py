"""Plots: how calls grow, and how many times better each figure is than each peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.speed.figures import Figure
from benchmarks.speed.rows import Row

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


def write(folder: Path, figures: Mapping[str, Sequence[Figure]], rows: Sequence[Row]) -> list[Path]:
    """Writes the plots for which there are figures, and says which.

    Args:
        folder: exists.
        figures: by whose they are, ours among them.
        rows: of the table.
    """
    plots = {"growth.png": _growth(figures), "trees.png": _trees(rows), "codec.png": _codec(rows)}
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
    curves = list(dict.fromkeys(it.name for it in figures["ours"] if it.at is not None))
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


def _trees(rows: Sequence[Row]) -> Canvas | None:
    """How many times better, for each figure of the workloads."""
    chosen = [row for row in rows if row.section in ("W1", "W2", "W3") and row.ratio]
    return _bars(chosen, "times better than the peer (1: equal)") if chosen else None


def _codec(rows: Sequence[Row]) -> Canvas | None:
    chosen = [row for row in rows if row.section == "codec" and row.ratio]
    return _bars(chosen, "times as fast (1: equal)") if chosen else None


def _bars(rows: Sequence[Row], label: str) -> Canvas:
    names = list(dict.fromkeys(row.name for row in rows))
    canvas = _canvas(9, 1.5 + 0.3 * len(names))
    axes = canvas.subplots()
    for peer in dict.fromkeys(row.peer for row in rows):
        own = [row for row in rows if row.peer == peer]
        colour, marker = STYLES[peer]
        axes.plot(
            [row.ratio for row in own],
            [names.index(row.name) for row in own],
            color=colour,
            marker=marker,
            linestyle="",
            label=peer,
        )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.legend()
    return canvas
