"""The memory of pools on a CPU."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page of x86-64 and of most ARM kernels."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A zeroed tensor; on a CPU in huge pages, where the kernel has them and the tensor would fill one.

    A head's matrix has several pages of 4 KiB, and storing or loading a state goes over all of them once: states of 16
    bits take up to 1.3 times as long with such pages, for then the codec waits for the TLB. The memory is the
    process's own, given back with the last view of the tensor; what is never written costs nothing, as with
    `torch.zeros`.

    Raises:
        MemoryError: the system does not have as much.
    """
    import torch

    count = prod(shape)
    nbytes = count * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if torch.device(device).type != "cpu" or advice is None or nbytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes for a tensor {shape} cannot be had: {error}") from error
    with suppress(OSError):  # a kernel built without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
