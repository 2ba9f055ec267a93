"""Where the time of a call goes: samples of the CPU clock by `perf`, while nothing but that call runs.

    python -m benchmarks.speed.profile [--keep]

Linux and `perf` are needed. With --keep the tables go into docs/performance.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.speed import workloads
from benchmarks.speed.clock import Clock
from benchmarks.speed.growth import document
from benchmarks.speed.ours import Ours
from benchmarks.speed.table import PAGE, refresh
from benchmarks.speed.workloads import Size

SECONDS = 3
DOCUMENTS, TURNS = 4096, 1024
LEAST_PERCENT = 2.0

Round = Callable[[], object]


def match_documents() -> Round:
    """W1: `lookup` of 4096 prompts of 1008 tokens in turns, none of them in the caches of the processor."""
    cache, asks = _documents()
    return lambda: [cache.match(ask) for ask in asks]


def match_conversation() -> Round:
    """`lookup` along a conversation of 1024 turns of 16 tokens."""
    cache, clock = Ours(Size(16 * TURNS, TURNS)), Clock()
    history = array("q")
    for i in range(TURNS):
        history = history + document(i)
        cache.store(clock, history, 0, None)
    ask = history + array("q", [0])
    return lambda: cache.match(ask)


def lease() -> Round:
    """W1: `lease` and `release` of 4096 matches in turns."""
    cache, asks = _documents()
    matches = [cache.match(ask) for ask in asks]
    return lambda: [cache.unlock(cache.lock(match)) for match in matches]


def request() -> Round:
    """W1: `start` and `finish` of a request that hits, 4096 in turns."""
    cache, asks = _documents()
    return lambda: [cache.finish(cache.start(ask).sequence) for ask in asks]


def store_and_evict() -> Round:
    """W1: a request of 1000 tokens that misses, stores its state and evicts another."""
    cache, asks = _documents(room=0.5)

    def store() -> None:
        for ask in asks:
            started = cache.start(ask)
            cache.insert(started, len(ask))
            cache.finish(started.sequence)

    return store


SCENARIOS = (match_documents, match_conversation, lease, request, store_and_evict)


def _documents(room: float = 1.0) -> tuple[Ours, list[array[int]]]:
    """A cache that has room for so many of W1's documents, and all its prompts."""
    states = int(DOCUMENTS * room)
    cache, clock, rng = Ours(Size(1010 * states, states)), Clock(), np.random.default_rng(1)
    keys = [workloads.tokens(rng, 1000) for _ in range(DOCUMENTS)]
    for key in keys[:states]:
        cache.store(clock, key, 0, None)
    return cache, [key + workloads.tokens(rng, 8) for key in keys]


def sample(round_: Round) -> list[tuple[float, str, str]]:
    """Percent, library and function, from the most to the least."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-p", str(os.getpid()), "-o", data]
        recorder = subprocess.Popen([*record, "--", "sleep", str(SECONDS)])
        while recorder.poll() is None:
            round_()
        fields = ["--stdio", "-q", "-F", "overhead,dso,sym", "-t", "|", "--percent-limit", str(LEAST_PERCENT)]
        done = subprocess.run(
            ["perf", "report", "-i", data, *fields], check=True, text=True, capture_output=True
        )
    return parse(done.stdout)


def parse(report: str) -> list[tuple[float, str, str]]:
    """Lines of `perf report`: "54.57%|_native.abi3.so|[.] _native::tokens::Memory::convert|-|-"."""
    found = []
    for line in report.splitlines():
        if line.strip() and not line.startswith("#"):
            percent, library, symbol = line.split("|")[:3]
            name = symbol.strip().removeprefix("[.] ").removeprefix("[k] ")
            found.append((float(percent.strip().rstrip("%")), library.strip(), shorten(name)))
    return found


def shorten(name: str) -> str:
    """A function's name without its type parameters, which may be a line long."""
    while (shorter := re.sub(r"(?<=\w)(::)?<[^<>]*>", "", name)) != name:
        name = shorter
    return name


def table(title: str, samples: list[tuple[float, str, str]]) -> str:
    rest = 100 - sum(percent for percent, _, _ in samples)
    samples = [*samples, (rest, "", f"less than {LEAST_PERCENT:g} each")]
    lines = [f"{title}\n", "| % | function | in |", "| ---: | --- | --- |"]
    return "\n".join([*lines, *(f"| {percent:.0f} | {name} | {where} |" for percent, where, name in samples)])


def main() -> None:
    tables = []
    for scenario in SCENARIOS:
        tables.append(table((scenario.__doc__ or "").strip(), sample(scenario())))
        print(f"{tables[-1]}\n", flush=True)
    if "--keep" in sys.argv[1:]:
        PAGE.write_text(refresh(PAGE.read_text(), {"profile": "\n\n".join(tables)}))


if __name__ == "__main__":
    main()
