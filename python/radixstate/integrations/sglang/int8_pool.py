"""radixstate's codec behind sglang's own tree: what `req_to_token_pool.mamba_ckpt_pool` is there.

The tree stays sglang's: it still caches states that are not finite, and asserts when all checkpoints are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from radixstate.budget import CHECKPOINTS_PER_ACTIVE, Plan
from radixstate.integrations.sglang.pool import bind
from radixstate.states import CheckpointPool, ConvSpec, StateSpec
from radixstate.transfer import Transfer

MAKER = "sglang.srt.mem_cache.mamba_checkpoint_pool.maybe_init_int8_mamba_checkpoint_pool"


class Int8Pool:
    """Checkpoints whose slots sglang hands out.

    Attributes:
        num_slots: cached states.
        states: their tensors.
    """

    def __init__(self, spec: StateSpec, slots: int, device: str) -> None:
        """Allocates the pool, after comparing its bytes with the free memory.

        Raises:
            BudgetError: not enough free memory.
            ConfigError: `slots` is below 1.
        """
        from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

        Plan(0, slots, 0, 0, (slots + 1) * spec.slot_bytes("int8"), 0).check(device)
        self.num_slots = slots
        self.states = CheckpointPool(spec, slots, device=device)
        self._free = MambaSlotAllocator(size=slots, device=device)
        self._transfer: Transfer | None = None

    def alloc(self, n: int = 1) -> torch.Tensor | None:
        """Slots, int64 (n,); None if there are too few."""
        slots: torch.Tensor | None = self._free.alloc(n)
        return slots

    def free(self, slots: torch.Tensor) -> None:
        """Takes slots back."""
        self._free.free(slots)

    def available_size(self) -> int:
        """Free slots."""
        return int(self._free.available_size())

    def clear(self) -> None:
        """All slots are free."""
        self._free.clear()

    def store_from_active(self, states: Any, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Encodes slots of running requests into checkpoints, both int64 (n,) on the device."""
        self._moves(states).store_at(sources.long(), targets.long())

    def load_to_active(self, states: Any, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Decodes checkpoints into slots of running requests, both int64 (n,) on the device."""
        self._moves(states).load_at(sources.long(), targets.long())

    def _moves(self, states: Any) -> Transfer:
        """sglang makes this pool before the states that it is for."""
        if self._transfer is None:
            self._transfer = Transfer(bind(states), self.states)
        return self._transfer


def make(
    original: Callable[..., Any],
    *,
    mamba_size: int,
    cache_params: Any,
    mamba_layer_ids: Sequence[int],
    device: str,
) -> Int8Pool | None:
    """Stands around sglang's maker of its pool. Without its option there is none."""
    from sglang.srt.runtime_context import get_exec

    try:
        mamba = get_exec().mamba
    except ValueError:  # sglang was not started
        return None
    if not mamba.enable_int8_mamba_checkpoint:
        return None
    heads, d_v, d_k = cache_params.shape.temporal
    spec = StateSpec(
        layers=len(mamba_layer_ids),
        heads=heads,
        d_k=d_k,
        d_v=d_v,
        dtype=_name(cache_params.dtype.temporal),
        layout="k_last",
        conv=tuple(
            ConvSpec(tuple(shape), _name(cache_params.dtype.conv)) for shape in cache_params.shape.conv
        ),
    )
    return Int8Pool(spec, mamba.int8_mamba_ckpt_size or CHECKPOINTS_PER_ACTIVE * mamba_size, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def install() -> None:
    """Asks sglang's own registry of hooks to call `make`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MAKER, make, HookType.AROUND)
