"""The Rust API's own benches, by criterion."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.speed.figures import Figure
from benchmarks.speed.run import pinned

BENCH = ["cargo", "bench", "--locked", "--quiet", "-p", "radixstate", "--bench", "calls"]


def measure() -> list[Figure]:
    """Builds the benches with all cores and runs them on one.

    Raises:
        CalledProcessError: they do not build or do not run.
    """
    subprocess.run([*BENCH, "--no-run"], check=True)
    with pinned(1):
        subprocess.run([*BENCH, "--", "--noplot"], check=True, stdout=subprocess.DEVNULL)
    return read(Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "criterion" / "calls")


def read(folder: Path) -> list[Figure]:
    """The medians that criterion left behind."""
    return [
        Figure(
            "boundary",
            json.loads((new / "benchmark.json").read_text())["function_id"],
            json.loads((new / "estimates.json").read_text())["median"]["point_estimate"],
            "ns",
            of="rust",
        )
        for new in sorted(folder.glob("*/new"))
    ]
