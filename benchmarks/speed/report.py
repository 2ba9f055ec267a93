"""The table, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.speed.rows import Row

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

VERDICTS = MET, LIMIT, MISSED, UNKNOWN = "met", "limit", "MISSED", "no peer"
"""LIMIT: the target is missed, but another row shows that the limit of the machine is reached."""


def table(rows: Sequence[Row]) -> str:
    """All rows, by section: a line for each figure, a column for each peer, "theirs (ratio)" in it."""
    parts = []
    for section, title in TITLES.items():
        chosen = [row for row in rows if row.section == section]
        if chosen:
            parts.append("\n".join([title, *_aligned(cells(chosen))]))
    return "\n\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met, and every one that is not, with the row of the limit that it has reached."""
    by_verdict = {verdict: [row for row in rows if _verdict(row) == verdict] for verdict in VERDICTS}
    judged = sum(map(len, by_verdict.values()))
    lines = [f"{len(by_verdict[MET])} of {judged} targets met, {len(by_verdict[LIMIT])} more at a limit"]
    for row in by_verdict[LIMIT] + by_verdict[MISSED]:
        shown = f"; limit: {row.limit}" if row.limit else ""
        lines.append(f"  {_verdict(row)}: {row.name}: {_against(row)}, target {row.target}{shown}")
    if by_verdict[UNKNOWN]:
        lines.append(f"  {len(by_verdict[UNKNOWN])} not judged: their peers were not there")
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], setting: dict[str, Any]) -> None:
    """JSON: what was run on what, and the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(setting | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of one section as text: a header, then a line for each figure."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer))
    lines = [["name", "unit", "ours", *peers, "target", ""]]
    for name, group in groupby(rows, key=lambda row: row.name):
        same = list(group)
        by_peer = {row.peer: row for row in same}
        judged = [row for row in same if row.target is not None]
        lines.append(
            [
                name,
                same[0].unit,
                number(same[0].ours),
                *(_beside(by_peer.get(peer)) for peer in peers),
                ", ".join(row.target or "" for row in judged),
                ", ".join(map(_verdict, judged)),
            ]
        )
    return lines


def texts(header: Sequence[str]) -> set[int]:
    """The columns of `cells` that are no numbers: name and unit, target and verdict."""
    return {0, 1, len(header) - 2, len(header) - 1}


def number(value: float) -> str:
    """Three significant digits, without an exponent below a billion."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or not value else f"{value:.1e}"


def _aligned(lines: list[list[str]]) -> list[str]:
    """Text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = texts(lines[0])
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _beside(row: Row | None) -> str:
    if row is None or row.theirs is None:
        return ""
    return number(row.theirs) + (f" ({number(row.ratio)}x)" if row.ratio is not None else "")


def _verdict(row: Row) -> str:
    """One of `VERDICTS`; empty without a target."""
    if row.target is None:
        return ""
    if row.met is None:
        return UNKNOWN
    return MET if row.met else LIMIT if row.limit else MISSED


def _against(row: Row) -> str:
    return f"{number(row.ours)} {row.unit}" if row.ratio is None else f"{number(row.ratio)}x {row.peer}"
