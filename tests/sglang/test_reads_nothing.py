"""No call of a scheduler's step reads a tensor: on a device each reading would wait for all that is enqueued."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

import torch
from guards import ReadBackError, guarded, nobody_reads_tensors
from scenarios import SCENARIOS, NotHereError, Scenario
from sglang.srt.mem_cache.registry import create_tree_cache
from world import SETTINGS, Setting, World


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_id_is_read_back(scenario: Scenario, setting: Setting) -> None:
    world = World(setting, guarded(create_tree_cache))
    try:
        scenario(world)
    except NotHereError as why:
        pytest.skip(f"{why} in {setting}")
    world.end()


@pytest.mark.parametrize("read", ["item", "tolist", "numpy", "cpu", "__int__", "__index__", "__bool__"])
def test_whoever_reads_a_tensor_is_caught(read: str) -> None:
    one = torch.tensor(1)
    with nobody_reads_tensors(), pytest.raises(ReadBackError):
        getattr(one, read)()
    assert getattr(one, read)() == 1
