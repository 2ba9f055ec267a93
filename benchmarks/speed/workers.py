"""Workers: every task of every cache runs in a process of its own, pinned to a core.

python -m benchmarks.speed.workers BACKEND TASK    prints the figures as one line of JSON
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.speed.table import OURS, Figure, medians
from benchmarks.speed.workloads import Backend

# Modules are imported only for their task: a peer's interpreter need not have what the others take.
TASKS = {
    "W1": "tree:w1",
    "W2": "tree:w2",
    "W3": "tree:w3",
    "leaves": "growth:leaves",
    "chain": "growth:chain",
    "pinned": "growth:pinned",
    "fragments": "growth:fragments",
    "prompt": "growth:prompt",
    "hostile": "hostile:measure",
    "admission": "tree:admission",
    "boundary": "layers:boundary",
    "front": "layers:front",
    "codec-1": "codec:one_thread",
    "codec-2": "codec:two_threads",
    "reuse": "reuse:measure",
}
# Under glibc's defaults torch's temporaries are new memory each time, and page faults are most of their cost.
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": "8000000000", "MALLOC_TRIM_THRESHOLD_": "16000000000"}


@dataclass(frozen=True)
class Process:
    """How to start the worker of a backend."""

    name: str
    python: str
    environment: dict[str, str] = field(default_factory=dict)

    def does(self, task: str) -> bool:
        return self.name == OURS or task in peers.PEERS[self.name].tasks

    def start(self, task: str) -> dict[str, Any]:
        """Runs one task to its end, on one core or on the two that it is about.

        Raises:
            CalledProcessError: it failed; its own report is on stderr.
        """
        command = [self.python, "-m", "benchmarks.speed.workers", self.name, task]
        environment = os.environ | self.environment | (KEPT_HEAP if task.startswith("codec") else {})
        with pinned(2 if task == "codec-2" else 1):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


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

    def medians(self) -> dict[str, list[Figure]]:
        """Of each backend."""
        return {name: medians(runs) for name, runs in self.runs.items()}

    def run(self, processes: Sequence[Process], tasks: Sequence[str], runs: int) -> None:
        """Every task `runs` times on every backend that does it: the backends in turns, so that all share what else
        the machine does."""
        for turn in range(1, runs + 1):
            for task in tasks:
                for process in processes:
                    if process.does(task):
                        progress(f"{task}, {process.name}, run {turn} of {runs}")
                        self._take_turn(process, task)

    def _take_turn(self, process: Process, task: str) -> None:
        """A peer that fails is noted and left out: the figures of all the others do not hang on it."""
        try:
            answer = process.start(task)
        except subprocess.CalledProcessError:
            if process.name == OURS:
                raise
            self.failures.append(f"{process.name}: {task} failed")
            return
        self.versions[process.name] = answer["version"]
        self.take(process.name, (Figure(**it) for it in answer["figures"]))


def available(environment: Mapping[str, str] = os.environ) -> tuple[list[Process], list[str]]:
    """The backends of this run, ours first, and what to set to have the others.

    Raises:
        SystemExit: a variable names no folder.
    """
    python = environment.get("PEER_PYTHON", sys.executable)
    found, missing = [Process(OURS, sys.executable)], []
    for name, peer in peers.PEERS.items():
        folder = environment.get(peer.variable)
        if folder is None:
            missing.append(f"{name}: {peer.variable} is not set")
        elif not Path(folder).is_dir():
            raise SystemExit(f"{peer.variable} is no folder: {folder}")
        else:
            found.append(Process(name, python, {peer.variable: str(Path(folder).resolve())}))
    return found, missing


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Processes started inside run on the last `cores` cores of those this one may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def task(name: str) -> Callable[[Backend], list[Figure]]:
    module, function = TASKS[name].split(":")
    found: Callable[[Backend], list[Figure]] = getattr(import_module(f"benchmarks.speed.{module}"), function)
    return found


def connect(name: str, wanted: str) -> Backend:
    """In the worker: the backend, with the front that the task takes."""
    if name != OURS:
        return peers.connect(name)
    from radixstate import _native

    from benchmarks.speed.ours import OurRequests, Ours

    return Backend(OURS, _native.__version__, OurRequests if wanted == "admission" else Ours)


def main() -> None:
    logging.disable(logging.WARNING)
    name, wanted = sys.argv[1:]
    backend = connect(name, wanted)
    print(json.dumps({"version": backend.version, "figures": [asdict(it) for it in task(wanted)(backend)]}))


if __name__ == "__main__":
    main()
