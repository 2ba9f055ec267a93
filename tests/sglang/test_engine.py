"""sglang's real engine answers with radixstate as with its own lossless tree, and its strict checks find nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

ENGINE = Path(__file__).with_name("engine.py")


def start(backend: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ENGINE, backend], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def result(engine: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = engine.communicate()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert (engine.returncode, len(lines)) == (0, 1), output[-5000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def test_first_tokens_and_reuse_are_those_of_sglangs_lossless_tree() -> None:
    """Both take minutes, on a core each."""
    ours, theirs = (result(engine) for engine in [start("radixstate"), start("bf16")])
    print(ours, theirs)
    assert (ours["tree"], theirs["tree"]) == ("RadixStateCache", "UnifiedRadixCache")
    assert ours["first"] == theirs["first"]
    assert ours["cached"] == theirs["cached"]
    assert sum(cached > 0 for cached in ours["cached"].values()) == 6
    assert len(set(ours["first"].values())) > 3, "the model tells prompts apart"
    assert ours["flushed"] == [0, 0]
