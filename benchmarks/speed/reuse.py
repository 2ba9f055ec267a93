"""The reuse experiment of `benchmarks.reuse` as rows: int8 checkpoints beside full-precision ones of equal bytes."""

from __future__ import annotations

from dataclasses import asdict

import torch

from benchmarks import reuse as experiment
from benchmarks.reuse import Knee, Row
from benchmarks.speed.table import Figure
from benchmarks.speed.workloads import Backend
from benchmarks.tiny import load_tiny_model

SECTION = "reuse"
SLOTS, SEED = 32, 0
BASES = ("bf16", "native-fp32")
UNITS = {"reuse": "fraction", "p50_ms": "ms", "rps": "requests/s"}


def measure(backend: Backend) -> list[Figure]:
    """Runs the experiment's default size."""
    torch.set_num_threads(1)
    settings = experiment.default_settings(SLOTS, SEED)
    caches = experiment.contestants(load_tiny_model(torch.float32), settings)
    rows = experiment.run(settings, caches, experiment.make_prompts(settings))
    return figures(rows, experiment.knees(rows, settings), slots=SLOTS)


def figures(rows: list[Row], knees: list[Knee], *, slots: int) -> list[Figure]:
    """Reuse, latency and throughput at 1.5 prefixes per full-precision slot, and the knees."""
    k = min({row.k for row in rows}, key=lambda count: abs(count - 1.5 * slots))
    found = []
    for base in BASES:
        owners = {f"int8-bytes-of-{base}": "", base: base}
        for row in rows:
            if row.k == k and row.cache in owners:
                found += _probes(row, base, owners[row.cache])
        for knee in knees:
            if knee.cache in owners:
                name = f"knee, random order, bytes of {base}"
                found.append(Figure(SECTION, name, knee.random, "prefixes", of=owners[knee.cache]))
    return found


def _probes(row: Row, base: str, owner: str) -> list[Figure]:
    values = asdict(row)
    return [
        Figure(
            SECTION,
            f"{field}, {row.k} prefixes, {row.order} order, bytes of {base}",
            values[field],
            unit,
            of=owner,
        )
        for field, unit in UNITS.items()
    ]
