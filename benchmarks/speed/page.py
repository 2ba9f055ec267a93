"""The figures in docs/performance.md, which lie between markers:

<!-- figures: W1 -->
...
<!-- end of figures -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed import report
from benchmarks.speed.rows import Row

PAGE = Path("docs/performance.md")
MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def rewrite(contents: Mapping[str, str], path: Path = PAGE) -> None:
    """Puts new figures into the page."""
    path.write_text(refresh(path.read_text(), contents))


def refresh(text: str, contents: Mapping[str, str]) -> str:
    """The text with new contents between the markers that name them; the rest stays.

    Raises:
        ValueError: there is no marker for some of the contents.
    """
    absent = set(contents) - {match[2] for match in MARKED.finditer(text)}
    if absent:
        raise ValueError(f"no marker for {', '.join(sorted(absent))}")

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}{contents[name]}\n{end}" if name in contents else match[0]

    return MARKED.sub(fill, text)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Every section in Markdown; of the growth, which is a plot, only what has a target."""
    sections = {section: [row for row in rows if row.section == section] for section in report.TITLES}
    judged = {row.name for row in rows if row.target is not None}
    sections["growth"] = [row for row in sections["growth"] if row.name in judged]
    return {section: _table(chosen) for section, chosen in sections.items()}


def _table(rows: Sequence[Row]) -> str:
    header, *lines = report.cells(rows)
    rule = ["---" if i in report.texts(header) else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])
