"""Tables, JSON and plot of the reuse experiment; see :mod:`benchmarks.reuse`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.reuse import Knee, Row, Settings

ORDERS = ("same", "random")
BASELINE, HEADLINE = "bf16", "int8-2n"

# sglang pull request 28185: 256 bf16 slots against 512 int8 slots at 384 prefixes, on its authors' GPU.
PULL_REQUEST_PREFIXES = 384
PULL_REQUEST = {"reuse": (0.02, 0.94), "p50_ms": (204.1, 150.5), "rps": (36.9, 49.0), "knee": (256, 512)}
DIGITS = {"reuse": 2, "p50_ms": 1, "rps": 1, "knee": 0}

# Distinct for colour-blind readers, and by marker where lines coincide.
STYLES = {
    "native-fp32": ("#000000", "s"),
    "bf16": ("#d55e00", "x"),
    "int8-2n": ("#0072b2", "o"),
    "int8-bytes-of-native-fp32": ("#009e73", "^"),
    "int8-bytes-of-bf16": ("#cc79a7", "v"),
}


def tables(rows: Sequence[Row], knees: Sequence[Knee], settings: Settings) -> str:
    """The tables that the demo prints."""
    parts = [_probes(rows, order) for order in ORDERS]
    return "\n\n".join([*parts, _knees(rows, knees), _comparison(rows, knees, settings)])


def write(folder: Path, rows: Sequence[Row], knees: Sequence[Knee], settings: Settings) -> None:
    """Writes ``reuse.json`` and ``reuse.png`` to ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "knees": {knee.cache: {order: getattr(knee, order) for order in ORDERS} for knee in knees},
        "pull_request": {"k": PULL_REQUEST_PREFIXES} | PULL_REQUEST,
    }
    (folder / "reuse.json").write_text(json.dumps(content, indent=1) + "\n")
    _plot(rows, settings).savefig(folder / "reuse.png", dpi=150)


def _probes(rows: Sequence[Row], order: str) -> str:
    lines = [
        f"probes in {order} order",
        f"{'K':>5}  {'cache':<27}{'slots':>5}{'reuse':>8}{'p50 ms':>8}{'p90 ms':>8}{'req/s':>8}",
    ]
    for row in sorted((row for row in rows if row.order == order), key=lambda row: row.k):
        lines.append(
            f"{row.k:>5}  {row.cache:<27}{row.slots:>5}{row.reuse:>8.3f}"
            f"{row.p50_ms:>8.1f}{row.p90_ms:>8.1f}{row.rps:>8.1f}"
        )
    return "\n".join(lines)


def _knees(rows: Sequence[Row], knees: Sequence[Knee]) -> str:
    size = {row.cache: row.bytes for row in rows}
    base = next(knee for knee in knees if knee.cache == BASELINE)
    lines = [
        f"knees: the largest K tested that keeps half of the greatest reuse; x: relative to {BASELINE}",
        f"{'cache':<27}{'slots':>5}{'x':>6}{'MB':>8}{'x':>6}{'same':>8}{'x':>6}{'random':>8}{'x':>6}",
    ]
    for knee in knees:
        bytes_ = size[knee.cache]
        lines.append(
            f"{knee.cache:<27}{knee.slots:>5}{_ratio(knee.slots, base.slots):>6}"
            f"{bytes_ / 1e6:>8.2f}{_ratio(bytes_, size[BASELINE]):>6}"
            f"{knee.same:>8}{_ratio(knee.same, base.same):>6}"
            f"{knee.random:>8}{_ratio(knee.random, base.random):>6}"
        )
    return "\n".join(lines)


def _comparison(rows: Sequence[Row], knees: Sequence[Knee], settings: Settings) -> str:
    """Between the knees: at 1.5 prefixes per slot, as the pull request's figures are."""
    k = min(settings.counts, key=lambda count: abs(count - 1.5 * settings.slots))
    figures = {(row.cache, row.order): asdict(row) for row in rows if row.k == k}
    for knee in knees:
        for order in ORDERS:
            figures[knee.cache, order]["knee"] = getattr(knee, order)
    lines = [
        f"{BASELINE} -> {HEADLINE} between the knees: K = {k}, in the pull request {PULL_REQUEST_PREFIXES}",
        f"{'':<8}{'here, same order':>24}{'here, random order':>24}{'pull request 28185':>24}",
    ]
    for field, theirs in PULL_REQUEST.items():
        here = [(figures[BASELINE, order][field], figures[HEADLINE, order][field]) for order in ORDERS]
        cells = [_change(*pair, DIGITS[field]) for pair in (*here, theirs)]
        lines.append(f"{field:<8}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _change(before: float, after: float, digits: int) -> str:
    return f"{before:.{digits}f} -> {after:.{digits}f}"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "-"


def _plot(rows: Sequence[Row], settings: Settings) -> Figure:
    """Reuse and median latency over K, for both orders."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, needs no display
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    fields = (("reuse", "fraction reused"), ("p50_ms", "p50 of a probe, ms"))
    for axes, (field, label) in zip(panels, fields, strict=True):
        for axis, order in zip(axes, ORDERS, strict=True):
            _panel(axis, [row for row in rows if row.order == order], field, settings.slots)
        axes[0].set_ylabel(label)
    for column, order in enumerate(ORDERS):
        panels[0][column].set_title(f"probed in {order} order")
        panels[1][column].set_xlabel("distinct prefixes K (dotted: N and 2N)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _panel(axis: Axes, rows: Sequence[Row], field: str, slots: int) -> None:
    for name, (colour, marker) in STYLES.items():
        chosen = [row for row in rows if row.cache == name]
        label = f"{name} ({chosen[0].slots} slots)"
        values = [getattr(row, field) for row in chosen]
        axis.plot([row.k for row in chosen], values, color=colour, marker=marker, label=label, alpha=0.8)
    for n in (slots, 2 * slots):
        axis.axvline(n, color="grey", linestyle=":", linewidth=1)
    axis.set_ylim(bottom=0)
