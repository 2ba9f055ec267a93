"""radixstate's int8 checkpoints and those of sglang's own pool are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

import torch
from guards import nobody_reads_tensors
from radixstate.errors import BudgetError
from radixstate.integrations.sglang.int8_pool import Int8Pool
from radixstate.integrations.sglang.pool import bind
from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

LAYERS, HEADS, D_V, D_K, SLOTS = 4, 4, 32, 24, 8
CONV = (24, 3)


def edge(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0, 0, 0, 0] = 3.38e38
    return x


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "twelve decades": lambda x: x * torch.logspace(-6, 6, x.shape[-1]),
    "tiny": lambda x: x * 1e-9,
    "zeros": lambda x: x * 0,
    "nearly the largest": edge,
}


def states(dtype: torch.dtype, fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What both pools see of sglang's pool of running requests."""
    generator = torch.Generator().manual_seed(1)
    temporal = torch.zeros(LAYERS, SLOTS + 1, HEADS, D_V, D_K, dtype=dtype)
    temporal[:, 1:] = fill(torch.randn(LAYERS, SLOTS, HEADS, D_V, D_K, generator=generator)).to(dtype)
    conv = [torch.randn(LAYERS, SLOTS + 1, *CONV, generator=generator).to(torch.bfloat16)]
    return SimpleNamespace(mamba_cache=SimpleNamespace(temporal=temporal, conv=conv))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_scales_windows_and_loaded_states_are_equal(dtype: torch.dtype, fill: str) -> None:
    theirs, ours = states(dtype, FILLS[fill]), states(dtype, FILLS[fill])
    pool = MambaCheckpointPool(
        num_layers=LAYERS,
        num_slots=SLOTS,
        num_heads=HEADS,
        head_v_dim=D_V,
        head_k_dim=D_K,
        conv_shapes=[CONV],
        conv_dtype=torch.bfloat16,
        device="cpu",
        temporal_dtype=dtype,
    )
    own = Int8Pool(bind(ours).spec, SLOTS, "cpu")
    sources, targets = torch.arange(1, SLOTS + 1), torch.arange(SLOTS, 0, -1)

    pool.store_from_active(theirs, sources, targets)
    with nobody_reads_tensors():
        own.store_from_active(ours, sources, targets)
    codes, scales = own.states.rows["state"].whole, own.states.rows["scale"].whole
    assert codes is not None
    assert scales is not None
    assert torch.equal(pool.temporal.qdata[:, 1:], codes[:, 1:])
    assert pool.temporal.scale.dtype == scales.dtype
    assert torch.equal(pool.temporal.scale[:, 1:].squeeze(-2), scales[:, 1:])

    for each in (theirs, ours):
        each.mamba_cache.temporal.zero_()
        each.mamba_cache.conv[0][:, 1:].zero_()
    pool.load_to_active(theirs, targets, sources)
    with nobody_reads_tensors():
        own.load_to_active(ours, targets, sources)
    assert torch.equal(theirs.mamba_cache.temporal, ours.mamba_cache.temporal)
    assert torch.equal(theirs.mamba_cache.conv[0], ours.mamba_cache.conv[0])
    assert theirs.mamba_cache.conv[0].any()


def test_slots_are_handed_out_as_sglang_expects() -> None:
    pool = Int8Pool(bind(states(torch.bfloat16, FILLS["plain"])).spec, 3, "cpu")
    taken = pool.alloc(2)
    assert taken is not None
    assert (taken.dtype, pool.num_slots, pool.available_size()) == (torch.int64, 3, 1)
    assert pool.alloc(2) is None
    pool.free(taken)
    assert pool.available_size() == 3
    pool.alloc(3)
    pool.clear()
    assert pool.available_size() == 3


def test_a_pool_too_large_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(BudgetError, match="lower checkpoint_slots first"):
        Int8Pool(bind(states(torch.bfloat16, FILLS["plain"])).spec, 10**11, "cpu")
