"""Filling one active slot, with a checkpoint or with zeros, as the start of a request does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_on_cpu import CpuDevice
from radixstate import ActivePool, CheckpointPool, Transfer, _native, cuda, transfer
from radixstate._native import CodecPlan
from radixstate.errors import SlotError, TensorError
from test_codec_native import (
    ACTIVE_SLOTS,
    LAYERS,
    STORE,
    bits,
    every_format,
    every_layout,
    every_state,
    pools,
)
from test_groups import DEVICES, NAMES, SPEC, bound, codec_of, move_ways, row, snapshot, unchanged
from test_groups import fill as fill_randomly


@every_state
@every_layout
@every_format
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "by layer"])
def test_filling_one_slot_is_a_load_of_one_pair_or_zeros(state, layout, format, listed):
    made = pools(state, layout, format)
    plan = made.per_layer() if listed else made.plan()
    plan.store(STORE)
    running = [made.active, *(window for window, _ in made.conv)]
    plan.load([(3, 2)])
    loaded = [tensor.clone() for tensor in running]
    plan.fill(None, 2)
    for tensor, before in zip(running, loaded, strict=True):
        zeroed = before.clone()
        zeroed[:, 2] = 0
        assert torch.equal(bits(tensor), bits(zeroed))
    plan.fill(3, 2)
    for tensor, before in zip(running, loaded, strict=True):
        assert torch.equal(bits(tensor), bits(before))


def test_zeros_reach_every_row_of_a_view_with_gaps_and_nothing_between():
    memory = torch.full((LAYERS, ACTIVE_SLOTS + 1, 3, 6, 9), 7.0)
    made = pools("fp32", "v_last", "native", d_k=5, d_v=8)
    made.plan(active=memory[..., :5, :8]).fill(None, 3)
    expected = torch.full_like(memory, 7.0)
    expected[:, 3, :, :5, :8] = 0
    assert torch.equal(memory, expected)


def test_threads_share_the_zeros_of_a_large_state():
    active, kept = torch.ones(5, 3, 7, 128, 128), torch.ones(5, 3, 7, 128, 128)
    window = torch.ones(5, 3, 999), torch.ones(5, 3, 999)
    plan = CodecPlan(active=active, checkpoint=kept, conv=[window], layout="k_last", format="native")
    plan.fill(None, 2)
    for tensor in (active, window[0]):
        assert not tensor[:, 2].any()
        assert (tensor[:, :2] == 1).all()


@pytest.mark.parametrize(
    ("source", "slot", "message"),
    [
        (None, 0, "slot 0 of the active pool is the padding sink"),
        (None, 5, "slot 5 is not in the active pool, whose last slot is 4"),
        (None, -1, r"slot -1 is outside 0..2\*\*32"),
        (6, 1, "slot 6 is not in the checkpoint pool, whose last slot is 5"),
        (0, 1, "slot 0 of the checkpoint pool is the padding sink"),
        (1, 5, "slot 5 is not in the active pool, whose last slot is 4"),
        (2**32, 1, r"slot 4294967296 is outside 0..2\*\*32"),
    ],
)
def test_a_slot_that_cannot_be_filled_leaves_all_as_they_are(source, slot, message):
    made = pools("fp32", "k_last", "int8")
    before = made.active.clone()
    with pytest.raises(SlotError, match=message):
        made.plan().fill(source, slot)
    assert torch.equal(made.active, before)


# --- groups of layers, and the codec of another device ---


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_reach_every_group_and_no_other_slot(device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill_randomly(active)
    expected, twin = ActivePool(SPEC, 3), snapshot(kept)
    fill_randomly(expected)
    expected.clear(2)
    codec_of(active, kept, device).fill(None, 2)
    assert unchanged(snapshot(expected), active)
    assert unchanged(twin, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_filling_from_a_checkpoint_equals_a_load_of_one_pair_in_every_group(device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill_randomly(active)
    codec = codec_of(active, kept, device)
    codec.store([(1, 3)])
    codec.load([(3, 2)])
    loaded = snapshot(active)
    for name in NAMES:
        row(active, name, 2).fill_(7)
    codec.fill(3, 2)
    assert unchanged(loaded, active)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("source", "slot"), [(None, 0), (None, 4), (0, 1), (4, 1), (1, 0), (1, 4)])
def test_a_wrong_slot_fills_no_group(source: int | None, slot: int, device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill_randomly(active)
    before = snapshot(active, kept)
    with pytest.raises(SlotError, match=r"slot \d"):
        codec_of(active, kept, device).fill(source, slot)
    assert unchanged(before, active, kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_moved_keeps_every_group_from_being_filled(
    name: str, source: int | None, device: str
) -> None:
    active, tensors = bound(listed=True)
    kept = CheckpointPool(SPEC, 3)
    codec = codec_of(active, kept, device)
    codec.store([(1, 1)])
    next(iter(move_ways.values()))(tensors[name][-1])
    before = snapshot(active, kept)
    with pytest.raises(TensorError, match=r"^group \d, .*: the tensor's memory"):
        codec.fill(source, 2)
    assert unchanged(before, active, kept)


@pytest.mark.parametrize("slot", [0, 4])
def test_cuda_refuses_zeros_in_a_slot_that_is_not_there_as_the_cpu_does(slot: int) -> None:
    spec = SPEC.groups[0]
    active, kept = ActivePool(spec, 3), CheckpointPool(spec, 3)
    refusals = []
    for codec in (transfer.codec(active, kept), cuda.describe(active, kept, CpuDevice())):
        with pytest.raises(SlotError) as refused:
            codec.fill(None, slot)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


# --- starts ---


class Recorder:
    """A codec of Python, as those of other devices are."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def fill(self, source: int | None, slot: int) -> None:
        self.calls.append((source, slot))
        if self.error:
            raise self.error


def native() -> _native.Cache:
    return _native.Cache(page_size=2, checkpoint_stride=4, kv_pages=16, active_slots=2, checkpoint_slots=2)


def put(cache: _native.Cache, tokens: list[int]) -> _native.Stored:
    started = cache.start(tokens)
    cache.loaded(started.sequence)
    pending = cache.reserve_checkpoint(started.sequence, len(tokens), started.slot)
    assert isinstance(pending, _native.PendingHandle)
    stored = cache.commit(started.sequence, pending)
    assert isinstance(stored, _native.Stored)
    cache.finish(started.sequence)
    return stored


def test_a_start_has_its_codec_fill_the_slot_and_ends_the_pin_on_the_state() -> None:
    cache, codec = native(), Recorder()
    stored = put(cache, [1, 2, 3, 4])
    miss, hit = cache.start([9], codec=codec), cache.start([1, 2, 3, 4, 5], codec=codec)
    assert codec.calls == [(None, miss.slot), (stored.slot, hit.slot)]
    assert cache.usage("checkpoint").pinned == 0, "the load is over"
    assert isinstance(cache.reserve_checkpoint(miss.sequence, 0, miss.slot), _native.Skipped)


@pytest.mark.parametrize("error", [RuntimeError("device"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("tokens", [[9], [1, 2, 3, 4, 5]], ids=["a miss", "a hit"])
def test_a_start_whose_codec_raises_keeps_nothing_and_the_error_goes_on(
    tokens: list[int], error: BaseException
) -> None:
    cache = native()
    put(cache, [1, 2, 3, 4])
    before = [cache.usage(pool) for pool in ("kv", "active", "checkpoint")]
    with pytest.raises(type(error)) as raised:
        cache.start(tokens, codec=Recorder(error))
    assert raised.value is error
    assert [cache.usage(pool) for pool in ("kv", "active", "checkpoint")] == before
    cache.check()


def test_a_codec_that_cannot_fill_is_refused_and_the_request_ends() -> None:
    cache = native()
    with pytest.raises(AttributeError, match="fill"):
        cache.start([1], codec=object())  # type: ignore[arg-type]  # that is the point
    assert cache.usage("active").free == 2


def test_a_transfer_fills_through_its_codec() -> None:
    spec = SPEC.groups[0]
    moves = Transfer(ActivePool(spec, 2), CheckpointPool(spec, 2))
    moves.active.state(1).fill_(3)
    moves.fill(None, 1)
    assert not moves.active.state(1).any()
