"""Bank conflicts of a kernel: what its accesses to shared memory cost, and the least that they could."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np

WARP = 32
BANKS = 32
BANK_BYTES = 4
ACCESS = np.dtype(
    [("site", "u8"), ("thread", "u4"), ("offset", "u4"), ("size", "u4"), ("block", "u4"), ("writes", "u8")]
)


class Wavefronts(NamedTuple):
    """How often shared memory is asked, and how often it would be without conflicts."""

    taken: int
    least: int


def noted(library: ctypes.CDLL) -> np.ndarray[Any, Any]:
    """What threads have accessed since the last time, in order, as `ACCESS` records."""
    library.noted.restype = ctypes.c_void_p
    count = ctypes.c_size_t()
    address = library.noted(ctypes.byref(count))
    return np.frombuffer(ctypes.string_at(address, count.value * ACCESS.itemsize), dtype=ACCESS)


def wavefronts(accesses: np.ndarray[Any, Any]) -> dict[tuple[bool, int], Wavefronts]:
    """Of each kind of access: whether it writes, and its bytes.

    Shared memory serves the threads of a warp that access 4 bytes each together, 8 bytes by halves, 16 by quarters. In
    each such turn a bank gives one word; threads that want the same word share it.
    """
    turns: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    times = Counter[tuple[int, int, int]]()
    for site, thread, offset, size, block, writes in accesses.tolist():
        # The threads of a warp are in step: the n-th time that one is at an instruction is the n-th time of all.
        times[block, thread, site] += 1
        part = thread % WARP // (WARP * BANK_BYTES // size)
        turn = (bool(writes), size), block, thread // WARP, part, site, times[block, thread, site]
        turns[turn] |= {(offset + byte) // BANK_BYTES for byte in range(0, size, BANK_BYTES)}
    taken, least = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
    for (kind, *_), words in turns.items():
        taken[kind] += max(Counter(word % BANKS for word in words).values())
        least[kind] += 1
    return {kind: Wavefronts(taken[kind], least[kind]) for kind in sorted(taken)}
