"""The scenarios with the CUDA kernels, a CPU in the place of the device: slots are named by tensors to the end, and
whether a state is finite is known only when somebody waits for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

import torch
from guards import guarded
from radixstate import ActivePool, CheckpointPool, cuda, engine, indices, transfer
from scenarios import SCENARIOS, NotHereError, Scenario
from sglang.srt.mem_cache.registry import create_tree_cache
from world import SETTINGS, Setting, World, prompt

sys.path.insert(0, str(Path(__file__).parents[1]))
from cuda_on_cpu import CpuDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    """Makes every codec the CUDA one, and every tensor that names a slot one of a device."""
    device = CpuDevice()

    def codec(active: ActivePool, kept: CheckpointPool) -> transfer.Codec:
        return cuda.describe(active, kept, device)

    def as_slot(slot: indices.Slot, where: torch.device) -> indices.Slot:
        number = indices.as_slot(slot, where)
        return slot.reshape(1) if isinstance(slot, torch.Tensor) else number

    monkeypatch.setattr(transfer, "codec", codec)
    monkeypatch.setattr(engine, "as_slot", as_slot)
    return device


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Scenario, setting: Setting, device: CpuDevice) -> None:
    world = World(setting, guarded(create_tree_cache))
    try:
        scenario(world)
    except NotHereError as why:
        pytest.skip(f"{why} in {setting}")
    world.cache.cache.settle()
    world.end()
    assert device.launches


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_device_that_lags_is_waited_for_only_by_who_needs_its_answer(
    setting: Setting, device: CpuDevice
) -> None:
    world = World(setting)
    device.lags = True
    one, two = (world.admit(world.request(prompt(1, 128) + prompt(seed, 64))) for seed in (2, 3))
    world.cache.checkpoint(one, up_to=192)
    assert (device.waits, one.kv.cache_protected_len) == (0, 192)
    world.request(prompt(5, 64))
    assert device.waits == 0, "it cannot hit what is on its way"
    world.cache.checkpoint(two, up_to=192)
    assert (device.waits, two.kv.cache_protected_len) == (1, 192)
    assert torch.equal(world.row(one, 128), world.row(two, 128))
    assert world.admit(world.request(prompt(1, 128) + prompt(2, 65))).hit_ok
    assert device.waits == 1
    device.lags = False
    world.end()
