"""Starts the workers: each in a process of its own, pinned, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.speed.backends import OURS, Process
from benchmarks.speed.figures import Figure, medians

# Under glibc's defaults torch's temporaries are new memory each time, and page faults are most of their cost.
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": "8000000000", "MALLOC_TRIM_THRESHOLD_": "16000000000"}


@dataclass
class Results:
    """What the workers handed over: the runs of each backend, the versions under test, and what failed."""

    runs: dict[str, list[list[Figure]]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def take(self, name: str, figures: Iterable[Figure]) -> None:
        """One run of a process, which may have measured others beside its own backend."""
        by_owner: dict[str, list[Figure]] = defaultdict(list)
        for figure in figures:
            by_owner[figure.of or name].append(figure)
        for owner, own in by_owner.items():
            self.runs[owner].append(own)

    def medians(self, name: str) -> list[Figure]:
        return medians(self.runs[name])


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Processes started inside run on the last `cores` cores of those this one may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(
    results: Results,
    processes: Sequence[Process],
    tasks: Sequence[str],
    runs: int,
    say: Callable[[str], None],
) -> None:
    """Every task `runs` times on every backend that does it: the backends in turns, so that all share what else the
    machine does."""
    for turn in range(1, runs + 1):
        for task in tasks:
            for process in processes:
                if process.does(task):
                    say(f"{task}, {process.name}, run {turn} of {runs}")
                    _take_turn(results, process, task)


def _take_turn(results: Results, process: Process, task: str) -> None:
    """A peer that fails is noted and left out: the figures of all the others do not hang on it."""
    try:
        answer = start(process, task)
    except subprocess.CalledProcessError:
        if process.name == OURS:
            raise
        results.failures.append(f"{process.name}: {task} failed")
        return
    results.versions[process.name] = answer["version"]
    results.take(process.name, map(Figure.from_dict, answer["figures"]))


def start(process: Process, task: str) -> dict[str, Any]:
    """Runs one worker to its end, on one core or on the two that its task is about.

    Raises:
        CalledProcessError: it failed; its own report is on stderr.
    """
    command = [process.python, "-m", "benchmarks.speed.worker", process.name, task]
    environment = os.environ | process.environment | (KEPT_HEAP if task.startswith("codec") else {})
    with pinned(2 if task == "codec-2" else 1):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
