"""The caches under test: how each is reached, and which of them this run has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.speed.workloads import Size

OURS = "ours"
TREE = ("W1", "W2", "W3")
GROWTH = ("leaves", "chain", "pinned", "fragments", "prompt")
CODEC = ("codec-1", "codec-2")


@dataclass(frozen=True)
class Peer:
    """A cache that is not ours.

    Attributes:
        label: in tables.
        variable: of the environment, the folder that its package is in.
        tasks: that it can do.
    """

    label: str
    variable: str
    tasks: tuple[str, ...]


PEERS = {
    "sglang-old": Peer("sglang 0.5.14", "SGLANG_OLD", (*TREE, *GROWTH, *CODEC)),
    "sglang-python": Peer("sglang Python", "SGLANG_NEW", (*TREE, *GROWTH)),
    "sglang-rust": Peer("sglang Rust", "SGLANG_NEW", (*TREE, *GROWTH, *CODEC)),
    "tokenspeed": Peer("tokenspeed", "TOKENSPEED", ("admission",)),
}


@dataclass(frozen=True)
class Process:
    """How to start the worker of a backend."""

    name: str
    python: str
    environment: dict[str, str] = field(default_factory=dict)

    def does(self, task: str) -> bool:
        return self.name == OURS or task in PEERS[self.name].tasks


@dataclass(frozen=True)
class Backend:
    """A cache, in its worker.

    Attributes:
        make: a new, empty one of a size: a `Front`, for the workloads.
        make_store: the peer's store of int8 states, for the codec.
        leaves_out: figures that say nothing about it.
    """

    name: str
    version: str
    make: Callable[[Size], Any]
    make_store: Callable[..., Any] | None = None
    leaves_out: frozenset[str] = frozenset()


def available(environment: Mapping[str, str] = os.environ) -> tuple[list[Process], list[str]]:
    """The backends of this run, ours first, and what to set to have the others.

    Raises:
        SystemExit: a variable names no folder.
    """
    python = environment.get("PEER_PYTHON", sys.executable)
    found, missing = [Process(OURS, sys.executable)], []
    for name, peer in PEERS.items():
        folder = environment.get(peer.variable)
        if folder is None:
            missing.append(f"{name}: {peer.variable} is not set")
        elif not Path(folder).is_dir():
            raise SystemExit(f"{peer.variable} is no folder: {folder}")
        else:
            found.append(Process(name, python, {peer.variable: str(Path(folder).resolve())}))
    return found, missing


def connect(name: str, task: str) -> Backend:
    """In the worker: imports the backend, with the front that the task takes."""
    if name == OURS:
        return _ours(task)
    folder = Path(os.environ[PEERS[name].variable])
    return _tokenspeed(folder) if name == "tokenspeed" else _sglang(name, folder)


def _ours(task: str) -> Backend:
    from radixstate import _native

    from benchmarks.speed.ours import OurRequests, Ours

    return Backend(OURS, _native.__version__, OurRequests if task == "admission" else Ours)


def _sglang(name: str, folder: Path) -> Backend:
    from benchmarks.speed import sglang
    from benchmarks.speed.stubs import Wheel

    kinds: dict[str, Any] = {
        "sglang-old": sglang.Mamba,
        "sglang-python": sglang.UnifiedPython,
        "sglang-rust": sglang.UnifiedRust,
    }
    kind = kinds[name]
    wheel = Wheel(folder, kind.patch)
    make, make_store = partial(kind, wheel), partial(sglang.make_store, wheel)
    return Backend(name, wheel.version(), make, make_store, kind.leaves_out)


def _tokenspeed(folder: Path) -> Backend:
    sys.path.insert(0, str(folder))
    from benchmarks.speed.tokenspeed import Tokenspeed

    return Backend("tokenspeed", version("tokenspeed-scheduler"), Tokenspeed)
