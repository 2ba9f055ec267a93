"""Other prefix caches for recurrent states, as `benchmarks.speed` drives them: read only to trust its comparison.

Each is an unpacked wheel in the folder that a variable of the environment names; nothing of them is copied here.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed.workloads import Backend


class Peer(NamedTuple):
    """A cache that is not ours.

    Attributes:
        variable: of the environment, the folder that its package is in.
        tasks: that it can do.
    """

    variable: str
    tasks: frozenset[str]


TREES = frozenset({"W1", "W2", "W3", "leaves", "chain", "pinned", "fragments", "prompt"})
CODEC = frozenset({"codec-1", "codec-2"})

PEERS = {
    "sglang-old": Peer("SGLANG_OLD", TREES | CODEC),
    "sglang-python": Peer("SGLANG_NEW", TREES),
    "sglang-rust": Peer("SGLANG_NEW", TREES | CODEC),
    "tokenspeed": Peer("TOKENSPEED", frozenset({"admission"})),
}


def connect(name: str) -> Backend:
    """In the worker: imports the peer."""
    folder = Path(os.environ[PEERS[name].variable])
    return _tokenspeed(folder) if name == "tokenspeed" else _sglang(name, folder)


def _sglang(name: str, folder: Path) -> Backend:
    from benchmarks.peers import sglang
    from benchmarks.peers.stubs import Wheel

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
    from benchmarks.peers.tokenspeed import Tokenspeed

    return Backend("tokenspeed", version("tokenspeed-scheduler"), Tokenspeed)
