"""sglang's pools as radixstate sees them, and its pool of checkpoints as sglang sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixstate.errors import TensorError
from radixstate.states import ActivePool, ConvSpec, StateSpec
from radixstate.transfer import Transfer

if TYPE_CHECKING:
    from radixstate import EngineCache

    Numbers = np.ndarray[Any, np.dtype[np.int32]]


def bind(states: Any) -> ActivePool:
    """The slots of a `MambaPool`, in place.

    Raises:
        TensorError: the states are not (layers, slots + 1, heads, d_v, d_k), or as `ActivePool.bind`.
    """
    temporal, windows = states.mamba_cache.temporal, list(states.mamba_cache.conv)
    if temporal.ndim != 5:
        raise TensorError(
            f"states must be (layers, slots + 1, heads, d_v, d_k), this model's are {tuple(temporal.shape)}"
        )
    layers, _, heads, d_v, d_k = temporal.shape
    spec = StateSpec(
        layers=layers,
        heads=heads,
        d_k=d_k,
        d_v=d_v,
        dtype=_name(temporal),
        layout="k_last",
        conv=tuple(ConvSpec(tuple(window.shape[2:]), _name(window)) for window in windows),
    )
    return ActivePool.bind(spec, state=temporal, conv=windows)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class CheckpointSlots:
    """What sglang asks of `req_to_token_pool.mamba_ckpt_pool`. The slots are the cache's.

    Attributes:
        num_slots: cached states.
    """

    def __init__(self, cache: EngineCache) -> None:
        """Shows the checkpoints of a cache."""
        self._cache = cache
        self._transfer = Transfer(cache.active, cache.checkpoints)
        self.num_slots = cache.checkpoints.slots

    def available_size(self) -> int:
        """Free slots."""
        return self._cache.usage("checkpoint").free

    def load_to_active(self, states: Any, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Decodes checkpoints into slots of running requests, on the current stream: the forward's.

        Args:
            states: sglang's pool, which is bound already.
            sources: checkpoint slots, int64 (n,) on the device.
            targets: active slots, the same.
        """
        self._transfer.load_at(sources.long(), targets.long())

    def clear(self) -> None:
        """Nothing: the cache was reset before, and takes back its slots itself."""


class PageTable:
    """Which page of sglang's allocator has which number in the cache. Only the device knows the pages.

    Attributes:
        page_size: tokens of a page.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        """Knows the numbers 1..=pages, none of which is mapped."""
        self.page_size = page_size
        with torch.inference_mode(False):  # any mode may write it
            self._pages = torch.zeros(pages + 1, dtype=torch.int64, device=device)
            self._within = torch.arange(page_size, device=device)

    def on_device(self, numbers: Numbers) -> torch.Tensor:
        """Numbers from the host as int64; the copy is enqueued, nothing waits for it."""
        there = torch.from_numpy(numbers)
        if self._pages.is_cuda:
            there = there.pin_memory().to(self._pages.device, non_blocking=True)
        return there.long()

    def map(self, numbers: torch.Tensor, pages: torch.Tensor) -> None:
        """Gives each number its page."""
        self._pages.index_copy_(0, numbers, pages)

    def pages(self, numbers: torch.Tensor) -> torch.Tensor:
        """The pages of numbers, in order."""
        return self._pages.index_select(0, numbers)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """The pages of numbers, which are not mapped any more."""
        pages = self.pages(numbers)
        self._pages.index_fill_(0, numbers, 0)
        return pages

    def tokens(self, numbers: torch.Tensor) -> torch.Tensor:
        """KV indices of the tokens on numbered pages, in order."""
        pages = self.pages(numbers)
        if self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + self._within).flatten()

    def pages_at(self, first_tokens: torch.Tensor) -> torch.Tensor:
        """The pages of KV indices, one of each page."""
        pages = first_tokens.long()
        return pages if self.page_size == 1 else pages // self.page_size

    def mapped(self) -> list[int]:
        """All pages; waits for the device, for checks alone."""
        pages: list[int] = self._pages[self._pages > 0].tolist()
        return pages
