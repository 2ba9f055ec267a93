"""Slots named by tensors of the pools' device, on the CPU and with a CPU in the place of a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import CpuDevice
from radixstate import (
    ActivePool,
    CheckpointPool,
    ConvSpec,
    EngineCache,
    StateSpec,
    Stored,
    Transfer,
    cuda,
    engine,
    indices,
    transfer,
)
from radixstate.errors import NotYourSlotError, SlotError, TensorError

SPEC = StateSpec(
    layers=2,
    heads=3,
    d_k=16,
    d_v=24,
    dtype="bfloat16",
    layout="k_last",
    conv=(ConvSpec((10, 3), "bfloat16"),),
)
GROUPS = StateSpec(layers=1, heads=2, d_k=8, d_v=8, dtype="float32", layout="v_last", more=(SPEC,))
READING = ("item", "tolist", "numpy", "__int__", "__index__", "__bool__")


@contextmanager
def nobody_reads_tensors() -> Iterator[None]:
    """A tensor of a device is not read back: whoever tries, fails."""
    kept = {name: getattr(torch.Tensor, name) for name in READING}

    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor is read back")

    try:
        for name in READING:
            setattr(torch.Tensor, name, refuse)
        yield
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the codec believes the pools to be."""
    if request.param == "cuda":
        device = CpuDevice()

        def codec(active: ActivePool, kept: CheckpointPool) -> transfer.Codec:
            parts = transfer.parts(active, kept)
            return transfer.join(
                parts, [cuda.describe(active, kept, device, group=n) for n in range(len(parts))]
            )

        def as_slot(slot: indices.Slot, device: torch.device) -> indices.Slot:
            """On a device of another type a tensor stays one."""
            number = indices.as_slot(slot, device)
            return slot.reshape(1) if isinstance(slot, torch.Tensor) else number

        monkeypatch.setattr(transfer, "codec", codec)
        monkeypatch.setattr(engine, "as_slot", as_slot)
    return str(request.param)


def filled(spec: StateSpec, slots: int = 4) -> ActivePool:
    pool = ActivePool(spec, slots)
    generator = torch.Generator().manual_seed(3)
    for rows in pool.rows.values():
        for layer in rows.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))
    return pool


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("spec", [SPEC, GROUPS], ids=["one group", "two groups"])
def test_slots_that_tensors_name_are_moved_as_those_that_numbers_name(place: str, spec: StateSpec) -> None:
    pools = [(filled(spec), CheckpointPool(spec, 4)) for _ in range(2)]
    (named, named_kept), (numbered, numbered_kept) = pools
    sources, targets, back = slots(3, 1), slots(2, 4), slots(4, 2)
    moves = Transfer(named, named_kept)
    with nobody_reads_tensors():
        finite = moves.store_at(sources, targets)
        moves.load_at(targets, back)
    assert list(finite) == [True, True]
    moves = Transfer(numbered, numbered_kept)
    moves.store([(3, 2), (1, 4)])
    moves.load([(2, 4), (4, 2)])
    for one, other in ((named, numbered), (named_kept, numbered_kept)):
        for name, rows in one.rows.items():
            for layer, like in zip(rows.layers, other.rows[name].layers, strict=True):
                assert torch.equal(layer[1:], like[1:]), name


def test_naming_no_slots_moves_nothing(place: str) -> None:
    moves = Transfer(filled(SPEC), CheckpointPool(SPEC, 4))
    none = torch.empty(0, dtype=torch.int64)
    assert list(moves.store_at(none, none)) == []
    moves.load_at(none, none)
    assert not moves.checkpoints.state(1).any()


@pytest.mark.parametrize("wrong", [0, 5, -1, 2**32 + 1])
def test_a_slot_outside_its_pool_is_an_error_on_the_cpu_and_moves_nothing_on_a_device(
    place: str, wrong: int
) -> None:
    moves = Transfer(filled(SPEC), CheckpointPool(SPEC, 4))
    before = moves.active.state(1).clone()
    if place == "cpu":
        with pytest.raises((SlotError, OverflowError)):
            moves.store_at(slots(wrong, 2), slots(1, 2))
        with pytest.raises((SlotError, OverflowError)):
            moves.load_at(slots(wrong), slots(1))
    else:
        assert list(moves.store_at(slots(wrong, 2), slots(1, 2))) == [False, True]
        moves.load_at(slots(wrong), slots(1))
    assert not moves.checkpoints.state(1).any()
    assert torch.equal(moves.active.state(1), before)


def test_tensors_of_another_type_or_shape_or_length_are_refused(place: str) -> None:
    moves = Transfer(filled(SPEC), CheckpointPool(SPEC, 4))
    for sources, targets, rule in (
        (slots(1).int(), slots(1), "int64 on cpu, got torch.int32"),
        (slots(1), slots(1).to("meta"), "int64 on cpu, got torch.int64 on meta"),
        (slots(1, 2), slots(1), "one length"),
        (torch.tensor(1), torch.tensor(1), r"two tensors \(n,\)"),
    ):
        for move in (moves.store_at, moves.load_at):
            with pytest.raises(TensorError, match=rule):
                move(sources, targets)


def test_the_number_of_a_slot_is_a_view_on_the_device() -> None:
    pool = CheckpointPool(SPEC, 4)
    assert (pool.slot_index(3).tolist(), pool.slot_index(3).dtype) == ([3], torch.int64)
    assert pool.slot_index(3).data_ptr() == pool.slot_index(2).data_ptr() + 8
    with pytest.raises(SlotError):
        pool.slot_index(5)


# --- leases ---


def make(**changes: Any) -> EngineCache:
    active = filled(SPEC)
    sizes = {"active": active, "checkpoint_slots": 4, "kv_pages": 16, "page_size": 4, "checkpoint_stride": 4}
    return EngineCache(SPEC, logical=True, **(sizes | changes))


def test_a_lease_stores_the_state_of_a_slot_that_a_tensor_names(place: str) -> None:
    cache, prompt = make(), np.arange(9, dtype=np.uint32)
    for source, depth in ((torch.tensor(3), 4), (torch.tensor([2]), 8)):
        with cache.lease(cache.lookup(prompt, max_length=depth - 1)) as lease, nobody_reads_tensors():
            if lease.match.length:
                lease.loaded()
            made = lease.publish(prompt[:depth], source=source)
        assert isinstance(made.outcome, Stored)
        assert cache.lookup(prompt).length == depth
        with cache.lease(cache.lookup(prompt)) as lease:
            state = cache.active.state(int(source)).clone()
            lease.load(1)
            step = state.float().abs().amax(-2, keepdim=True) / 127
            assert ((cache.active.state(1) - state).float().abs() <= step).all()


def test_a_state_that_is_not_finite_is_refused_whoever_names_its_slot(place: str) -> None:
    cache, prompt = make(), list(range(9))
    cache.active.state(3)[0, 0, 0, 0] = torch.nan
    with cache.lease(cache.lookup(prompt)) as lease:
        lease.publish(prompt[:8], source=torch.tensor(3))
        assert cache.lookup(prompt).length == 0
    cache.check()


def test_one_slot_is_named_at_a_time(place: str) -> None:
    cache, prompt = make(), list(range(9))
    with cache.lease(cache.lookup(prompt)) as lease:
        with pytest.raises(TensorError, match="one slot is wanted"):
            lease.publish(prompt[:8], source=slots(1, 2))
        with pytest.raises(TensorError, match="int64"):
            lease.publish(prompt[:8], source=torch.tensor(1.0))


def test_a_lease_with_slots_of_the_cache_takes_only_those(place: str) -> None:
    cache, prompt = make(own_slots=True), list(range(9))
    with cache.lease(cache.lookup(prompt)) as lease:
        lease.take_slot()
        with pytest.raises(NotYourSlotError):
            lease.publish(prompt[:8], source=torch.tensor(3))
