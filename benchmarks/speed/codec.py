"""The CPU codec: GB/s of the fewest bytes that must move, beside `memcpy` and torch's operations in the same process.

One state is 30 layers of 32 heads of 128 x 128. Before each timed call a copy of 256 MiB, itself timed, empties the
caches; beside ours it copies within such memory as pools live in. With one thread, time is the process's CPU time;
with two, it is the wall's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from benchmarks.speed.table import OURS, Figure
from benchmarks.speed.workloads import Backend

SECTION = "codec"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATES = (1, 4)
COPY_BYTES = 256 << 20
SECONDS, LEAST = 2.0, 5

Pairs = list[tuple[int, int]]
Allocate = Callable[..., torch.Tensor]


class Shape(NamedTuple):
    """Of a pool of states; one slot more is the padding sink."""

    layers: int = 30
    heads: int = 32
    d_v: int = 128
    d_k: int = 128
    slots: int = 8

    @property
    def pool(self) -> tuple[int, ...]:
        return (self.layers, self.slots + 1, self.heads, self.d_v, self.d_k)

    def state_bytes(self, dtype: torch.dtype, states: int) -> int:
        return self.layers * self.heads * self.d_v * self.d_k * dtype.itemsize * states

    def moved_bytes(self, dtype: torch.dtype, scale: torch.dtype, states: int) -> int:
        """Read and written by a store or a load that touches each byte once."""
        channels = self.layers * self.heads * self.d_k * states
        return channels * (self.d_v * (dtype.itemsize + 1) + scale.itemsize)


class Mover(NamedTuple):
    """Moves (from, to) slots. `name` is empty for the backend itself."""

    name: str
    scale: torch.dtype
    store: Callable[[Pairs], object]
    load: Callable[[Pairs], object]


def measure(backend: Backend, *, threads: int, shape: Shape | None = None) -> list[Figure]:
    shape = shape or Shape()
    torch.set_num_threads(threads)
    ours = backend.name == OURS
    make = _ours if ours else partial(_sglang, backend)
    figures: list[Figure] = []
    with ThreadPoolExecutor(threads) as executor:
        memory = Memory(_pool_memory if ours else torch.zeros, executor, threads)
        for dtype in DTYPES:
            movers = make(shape, dtype, threads)
            for states in STATES:
                figures += _case(movers, memory, shape, dtype, states, threads)
    return figures


one_thread, two_threads = partial(measure, threads=1), partial(measure, threads=2)


def _case(
    movers: Sequence[Mover], memory: Memory, shape: Shape, dtype: torch.dtype, states: int, threads: int
) -> Iterator[Figure]:
    """All movers in turns, both directions."""
    up = [(i, shape.slots - states + i) for i in range(1, states + 1)]
    down = [(to, source) for source, to in up]
    calls = {(mover, "store"): partial(mover.store, up) for mover in movers}
    calls |= {(mover, "load"): partial(mover.load, down) for mover in movers}
    write = partial(memory.write, shape.state_bytes(dtype, states))
    now = process_time if threads == 1 else perf_counter
    *each, writing, copying = _in_turns([*calls.values(), write], memory.copy, now)
    spent = dict(zip(calls, each, strict=True))

    name = f"{str(dtype).removeprefix('torch.')}, N={states}, threads={threads}"
    for (mover, direction), seconds in spent.items():
        speed = shape.moved_bytes(dtype, mover.scale, states) / seconds / 1e9
        yield Figure(SECTION, f"{direction} {name}", speed, "GB/s", of=mover.name)
    if len(movers) == 1:  # a peer, alone in its process: memory is measured beside ours
        return
    for direction in ("store", "load"):
        yield Figure(SECTION, f"{direction} {name}", 2 * COPY_BYTES / copying / 1e9, "GB/s", of="memcpy")
    if dtype == torch.float32:  # a load of fp32 writes four times what it reads
        loading = spent[movers[0], "load"]
        yield Figure(SECTION, f"load {name}: over writing the states alone", loading / writing, "x")


def _in_turns(
    calls: Sequence[Callable[[], object]], copy: Callable[[], None], now: Callable[[], float]
) -> list[float]:
    """Median seconds of each call, and at the end those of a copy."""
    for call in calls:
        call()  # its first memory is new to the process
    spent: list[list[float]] = [[] for _ in calls]
    copies: list[float] = []
    began = perf_counter()
    while perf_counter() - began < SECONDS or len(spent[0]) < LEAST:
        for call, seconds in zip(calls, spent, strict=True):
            start = now()
            copy()
            middle = now()
            call()
            seconds.append(now() - middle)
            copies.append(middle - start)
    return [median(seconds) for seconds in (*spent, copies)]


class Memory:
    """Two pieces of memory, and what the C library does with them, over some threads."""

    def __init__(self, allocate: Allocate, executor: ThreadPoolExecutor, threads: int) -> None:
        self._executor, self._threads = executor, threads
        self._source, self._target = (allocate((COPY_BYTES,), dtype=torch.uint8) for _ in range(2))
        self._source.fill_(1)
        self._target.fill_(1)

    def copy(self) -> None:
        """All of one to the other."""
        part = COPY_BYTES // self._threads
        source, target = self._source.data_ptr(), self._target.data_ptr()
        self._each(lambda i: _memmove(target + i * part, source + i * part, part))

    def write(self, nbytes: int) -> None:
        """The same byte over so much of it."""
        if nbytes > COPY_BYTES:
            raise ValueError(f"{nbytes} bytes to write, {COPY_BYTES} are there")
        part, target = nbytes // self._threads, self._target.data_ptr()
        self._each(lambda i: _memset(target + i * part, 1, part))

    def _each(self, work: Callable[[int], object]) -> None:
        if self._threads == 1:
            work(0)
        else:
            list(self._executor.map(work, range(self._threads)))


# A foreign function of a library gives up the interpreter's lock, `ctypes.memmove` does not.
_memmove, _memset = ctypes.CDLL(None).memmove, ctypes.CDLL(None).memset
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def _pool_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from radixstate.memory import zeros

    return zeros(shape, dtype, "cpu")


def _ours(shape: Shape, dtype: torch.dtype, threads: int) -> list[Mover]:
    """The codec, and its reference in torch's operations on the same tensors."""
    from radixstate import ActivePool, CheckpointPool, StateSpec, transfer
    from radixstate.reference import codec as reference

    name = str(dtype).removeprefix("torch.")
    layers, _, heads, d_v, d_k = shape.pool
    spec = StateSpec(layers=layers, heads=heads, d_k=d_k, d_v=d_v, dtype=name, layout="k_last")
    active, kept = ActivePool(spec, shape.slots), CheckpointPool(spec, shape.slots)
    states, q, scale = (rows.whole for rows in (active.rows["state"], *kept.rows.values()))
    _fill(states)
    plan: Any = transfer.codec(active, kept)

    def store(pairs: Pairs) -> None:
        source, to = _columns(pairs)
        q[:, to], scale[:, to] = reference.encode(states[:, source], k_axis=-1)

    def load(pairs: Pairs) -> None:
        source, to = _columns(pairs)
        states[:, to] = reference.decode(q[:, source], scale[:, source], k_axis=-1, dtype=dtype)

    return [
        Mover("", scale.dtype, partial(plan.store, threads=threads), partial(plan.load, threads=threads)),
        Mover("torch", scale.dtype, store, load),
    ]


def _sglang(backend: Backend, shape: Shape, dtype: torch.dtype, threads: int) -> list[Mover]:
    kept = backend.make_store(
        num_layers=shape.layers,
        num_slots=shape.slots + 1,
        num_heads=shape.heads,
        head_v_dim=shape.d_v,
        head_k_dim=shape.d_k,
        device="cpu",
        scale_dtype=dtype,
    )
    kept.qdata.zero_()
    kept.scale.zero_()
    states = torch.empty(shape.pool, dtype=dtype)
    _fill(states)
    return [
        Mover(
            "",
            dtype,
            lambda pairs: kept.store_from_pool(states, *_columns(pairs)),
            lambda pairs: kept.copy_to_pool(states, *_columns(pairs)),
        )
    ]


def _fill(states: torch.Tensor) -> None:
    """Values such as states have, the same in all layers."""
    states.copy_(torch.randn(states.shape[1:], generator=torch.Generator().manual_seed(0)).mul_(0.3))


def _columns(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    source, to = zip(*pairs, strict=True)
    return torch.tensor(source), torch.tensor(to)
