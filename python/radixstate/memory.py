"""The memory of pools on a CPU."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page of x86-64, and of ARM with pages of 4 KiB."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """`torch.zeros`, but on a CPU it asks Linux for huge pages, for tensors that would fill one.

    A head's matrix has several pages of 4 KiB, and storing or loading a state goes over all of them once: with such
    pages the codec waits for the TLB. torch can ask as well, but only for all its tensors, and if the environment said
    so when the process began (THP_MEM_ALLOC_ENABLE=1). All the memory is taken at once, so that what is missing shows
    here and not later; it goes with the last view.
    """
    import torch

    count = prod(shape)
    nbytes = count * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if torch.device(device).type != "cpu" or advice is None or nbytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # then torch says what is wrong
        return torch.zeros(shape, dtype=dtype, device=device)
    with suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape).zero_()
