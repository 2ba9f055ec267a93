"""Measures radixstate beside other prefix caches: prints the table, writes bench.json and plots.

A peer runs where its variable of the environment is set; see CONTRIBUTING.md. Ours always runs. Needs Linux.
The exit status is 1 if a figure misses its bound.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import layers, plots, table, workers

# Tasks of each section, and how often they run; the median counts.
SECTIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "trees": (("W1", "W2", "W3"), 5),
    "growth": (("leaves", "chain", "pinned", "fragments", "prompt", "hostile"), 1),
    "requests": (("admission",), 3),
    "boundary": (("boundary",), 3),
    "front": (("front",), 3),
    "codec": (("codec-1", "codec-2"), 3),
    "reuse": (("reuse",), 1),
}
KEPT = Path("benchmarks/results")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    add = parser.add_argument
    add("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)} (default: all)")
    add(
        "--runs", type=int, help="of a task, at most (default: 5 of a workload, fewer of what repeats itself)"
    )
    add("--out", type=Path, default=Path("out/bench"), help="folder of the results (default: out/bench)")
    add(
        "--keep", action="store_true", help=f"copy the results to {KEPT} and write {table.PAGE}'s tables anew"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    if options.keep and options.sections:
        parser.error("--keep takes a whole run")
    return options


def measure(
    sections: Sequence[str], runs: int | None, processes: Sequence[workers.Process]
) -> workers.Results:
    """Everything, in order."""
    results = workers.Results()
    for section in sections:
        tasks, usual = SECTIONS[section]
        results.run(processes, tasks, min(runs or usual, usual))
    if "boundary" in sections:
        workers.progress("criterion")
        results.take("rust", layers.criterion())
    return results


def main() -> int:
    options = parse()
    processes, missing = workers.available()
    began = time.perf_counter()
    results = measure(options.sections or list(SECTIONS), options.runs, processes)
    figures = results.medians()
    rows = table.build(figures)
    setting = {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": results.versions,
        "missing": [*missing, *results.failures],
        "seconds": round(time.perf_counter() - began),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    table.write(options.out / "bench.json", rows, setting)
    drawn = plots.write(options.out, figures, rows)
    if options.keep:
        _keep([options.out / "bench.json", *drawn], rows, setting)
    print(f"{table.text(rows)}\n\n{_sentence(setting)}\nbench.json and plots are in {options.out}")
    return _judge(rows)


def _judge(rows: Sequence[table.Row]) -> int:
    """Says which bounds are missed; the exit status."""
    missed, unknown = table.check(rows)
    print(
        f"{len(missed)} of {len(table.BOUNDS) - len(unknown)} bounds missed; {len(unknown)} without a figure"
    )
    for line in missed:
        print(f"  MISSED {line}")
    return 1 if missed else 0


def _keep(files: Sequence[Path], rows: Sequence[table.Row], setting: dict[str, Any]) -> None:
    KEPT.mkdir(exist_ok=True)
    for file in files:
        shutil.copy(file, KEPT / (file.name if file.name.startswith("bench") else f"bench-{file.name}"))
    contents = table.sections(table.bounded(rows, "growth")) | {"setting": _sentence(setting)}
    table.PAGE.write_text(table.refresh(table.PAGE.read_text(), contents))


def _sentence(setting: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    missing = f" Not there: {'; '.join(setting['missing'])}." if setting["missing"] else ""
    return (
        f"{setting['machine']}; Python {setting['python']}, torch {setting['torch']}; {versions}; "
        f"{setting['seconds']} s.{missing}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
