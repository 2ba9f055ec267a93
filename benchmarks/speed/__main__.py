"""Measures radixstate beside other prefix caches: prints the table, writes bench.json and plots.

A peer runs where its variable of the environment is set; see CONTRIBUTING.md. Ours always runs. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import backends, page, plots, report, rows, run, rust

# Tasks of each section, and how often they run; the median counts.
SECTIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "trees": (backends.TREE, 5),
    "growth": (backends.GROWTH, 1),
    "requests": (("admission",), 3),
    "boundary": (("boundary",), 3),
    "front": (("front",), 3),
    "codec": (backends.CODEC, 3),
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
    add("--keep", action="store_true", help=f"copy the results to {KEPT} and write {page.PAGE}'s tables anew")
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    if options.keep and options.sections:
        parser.error("--keep takes a whole run")
    return options


def measure(sections: Sequence[str], runs: int | None, processes: Sequence[backends.Process]) -> run.Results:
    """Everything, in order."""
    results = run.Results()
    for section in sections:
        tasks, usual = SECTIONS[section]
        run.run(results, processes, tasks, min(runs or usual, usual), run.progress)
    if "boundary" in sections:
        run.progress("criterion")
        results.take("rust", rust.measure())
    return results


def describe(results: run.Results, missing: Sequence[str], seconds: float) -> dict[str, Any]:
    """What was measured on what."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": results.versions,
        "missing": list(missing),
        "seconds": round(seconds),
    }


def main() -> None:
    options = parse()
    processes, missing = backends.available()
    began = time.perf_counter()
    results = measure(options.sections or list(SECTIONS), options.runs, processes)
    figures = {name: results.medians(name) for name in results.runs}
    table = rows.build(figures[backends.OURS], {k: v for k, v in figures.items() if k != backends.OURS})
    missing += results.failures
    setting = describe(results, missing, time.perf_counter() - began)
    text = f"{report.table(table)}\n\n{report.summary(table)}\n" + "".join(f"no {it}\n" for it in missing)
    print(text)

    report.write(options.out / "bench.json", table, setting)
    (options.out / "bench.txt").write_text(text)
    drawn = plots.write(options.out, figures, table)
    if options.keep:
        _keep([options.out / "bench.json", options.out / "bench.txt", *drawn])
        page.rewrite(page.tables(table) | {"setting": _sentence(setting)})
    print(f"{setting['seconds']} s; wrote bench.json, bench.txt and plots to {options.out}")


def _keep(files: Sequence[Path]) -> None:
    KEPT.mkdir(exist_ok=True)
    for file in files:
        shutil.copy(file, KEPT / (file.name if file.name.startswith("bench") else f"bench-{file.name}"))


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
    main()
