"""One task of one cache, in a process of its own: prints its figures as one line of JSON.

python -m benchmarks.speed.worker BACKEND TASK
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module

from benchmarks.speed import backends
from benchmarks.speed.figures import Figure

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
    "admission": "admission:measure",
    "boundary": "boundary:measure",
    "front": "front:measure",
    "codec-1": "codec:one_thread",
    "codec-2": "codec:two_threads",
    "reuse": "reuse:measure",
}


def task(name: str) -> Callable[[backends.Backend], list[Figure]]:
    module, function = TASKS[name].split(":")
    return getattr(import_module(f"benchmarks.speed.{module}"), function)


def main() -> None:
    logging.disable(logging.WARNING)
    name, wanted = sys.argv[1:]
    backend = backends.connect(name, wanted)
    figures = task(wanted)(backend)
    print(json.dumps({"version": backend.version, "figures": [figure.as_dict() for figure in figures]}))


if __name__ == "__main__":
    main()
