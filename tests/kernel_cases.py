"""Cases for the kernels: pools in poisoned memory with any strides, moved by them and by the CPU codec."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from radixstate import _native
from radixstate.cuda import CudaCodec, Device
from radixstate.cuda.specialise import OUT_OF_RANGE, Program
from radixstate.reference import codec as reference
from radixstate.states import Rows

POISON = 0x7F
Values = Literal["usual", "finite", "edges", "any"]
_SCALE = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}
_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    """One store of all slots into reversed slots, and a load into a second active pool.

    Attributes:
        gap: elements between rows, heads, slots and layers.
        offset: elements by which every tensor starts off alignment.
        tables: one tensor per layer, so that addresses come from a table.
        conv: shapes of the conv windows.
        conv_types: of the first windows; the others are bfloat16.
        conv_values: of their elements.
        pairs: (source, destination) of the store; the load goes back. By default all slots, reversed.
    """

    dtype: torch.dtype = torch.bfloat16
    format: str = "int8"
    layout: str = "k_last"
    d_k: int = 16
    d_v: int = 16
    heads: int = 2
    layers: int = 2
    slots: int = 4
    gap: int = 0
    offset: int = 0
    tables: bool = False
    conv: tuple[tuple[int, ...], ...] = ()
    conv_types: tuple[torch.dtype, ...] = ()
    conv_values: Values = "finite"
    values: Values = "edges"
    seed: int = 0
    pairs: tuple[tuple[int, int], ...] | None = None

    def __str__(self) -> str:
        changed = (f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k))
        return "-".join(changed).replace("torch.", "").replace(" ", "") or "plain"

    @property
    def matrix(self) -> tuple[int, int]:
        return (self.d_v, self.d_k) if self.layout == "k_last" else (self.d_k, self.d_v)

    @property
    def kept(self) -> torch.dtype:
        return {"int8": torch.int8, "bf16": torch.bfloat16, "native": self.dtype}[self.format]

    @property
    def store_pairs(self) -> list[tuple[int, int]]:
        if self.pairs is not None:
            return list(self.pairs)
        return [(slot, self.slots + 1 - slot) for slot in range(1, self.slots + 1)]


@dataclass
class Memory:
    """A poisoned buffer and the rows in it."""

    buffer: torch.Tensor
    rows: Rows

    @classmethod
    def of(
        cls, case: Case, shape: Sequence[int], dtype: torch.dtype, device: str, *, gap_from: int
    ) -> Memory:
        """(layers, slots + 1, *shape); axes from `gap_from` of `shape` on are contiguous."""
        sizes, strides, step = (case.layers, case.slots + 1, *shape), [], 1
        for axis in reversed(range(len(sizes))):
            strides.append(step)
            step = step * sizes[axis] + (case.gap if axis <= gap_from + 2 else 0)
        width = torch.empty((), dtype=dtype).element_size()
        buffer = torch.full(((step + case.offset) * width,), POISON, dtype=torch.uint8, device=device)
        whole = buffer.view(dtype).as_strided(sizes, strides[::-1], case.offset)
        return cls(buffer, Rows(whole.unbind(0), None if case.tables else whole))

    def given(self) -> torch.Tensor | list[torch.Tensor]:
        return list(self.rows.layers) if self.rows.whole is None else self.rows.whole

    def fill(self, case: Case, seed: int) -> None:
        for i, layer in enumerate(self.rows.layers):
            layer.copy_(random_values(case.values, layer.dtype, tuple(layer.shape), seed + i))


def random_values(values: Values, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers, those with edges among them, every finite bit pattern, or every bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    usual = torch.randn(shape, generator=generator)
    if values == "usual":
        return usual.to(dtype)
    if values == "edges":
        return _with_edges(usual, dtype, generator)
    integer, exponent = _BITS[dtype.itemsize], _EXPONENT[dtype]
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(integer)
    if values == "finite":
        bits = torch.where(bits & exponent == exponent, bits & ~exponent, bits)
    return bits.view(dtype)


def _with_edges(usual: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Makes some rows and columns tiny or zero, some elements subnormal, largest finite, Inf or NaN."""
    for axis in (-1, -2)[: usual.ndim]:
        length = [1] * usual.ndim
        length[axis] = usual.shape[axis]
        kind = torch.randint(0, 16, length, generator=generator)
        usual = usual * torch.where(kind == 0, 0.0, torch.where(kind == 1, 1e-9, 1.0))
    bits = usual.to(dtype).view(_BITS[dtype.itemsize])
    exponent = _EXPONENT[dtype]
    kind = torch.randint(0, 4096, usual.shape, generator=generator)
    bits = torch.where(kind < 400, bits & ~exponent, bits)
    for number, special in enumerate((exponent, exponent | 1, exponent - 1)):
        bits = torch.where(kind == number, torch.full_like(bits, special), bits)
    return bits.view(dtype)


@dataclass
class Pools:
    """All memory of a case, the same for every codec that is made for it."""

    case: Case
    device: str
    active: Memory = field(init=False)
    checkpoint: Memory = field(init=False)
    scale: Memory | None = field(init=False)
    reloaded: Memory = field(init=False)
    windows: list[tuple[Memory, Memory, Memory]] = field(init=False)

    def __post_init__(self) -> None:
        case, head = self.case, (self.case.heads, *self.case.matrix)
        self.active = self._memory(head, case.dtype, 2)
        self.checkpoint = self._memory(head, case.kept, 2)
        self.reloaded = self._memory(head, case.dtype, 2)
        scales = case.format == "int8"
        self.scale = self._memory((case.heads, case.d_k), _SCALE[case.dtype], 1) if scales else None
        self.windows = []
        for shape, dtype in itertools.zip_longest(case.conv, case.conv_types, fillvalue=torch.bfloat16):
            kept = [self._memory(shape, dtype, 0) for _ in range(3)]
            self.windows.append((kept[0], kept[1], kept[2]))
        self.active.fill(case, case.seed)
        for window, _, _ in self.windows:
            window.fill(replace(case, values=case.conv_values), case.seed + 1000)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype, gap_from: int) -> Memory:
        return Memory.of(self.case, shape, dtype, self.device, gap_from=gap_from)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        """Everything that was or was not written, with the type in which NaNs are equal."""
        yield "active", self.active.buffer, torch.int8
        kept = torch.int8 if self.case.format == "native" else self.case.kept
        yield "checkpoint", self.checkpoint.buffer, kept
        if self.scale:
            yield "scale", self.scale.buffer, torch.int8
        yield (
            "reloaded",
            self.reloaded.buffer,
            torch.int8 if self.case.format == "native" else self.case.dtype,
        )
        for i, window in enumerate(self.windows):
            for name, memory in zip(("active", "kept", "reloaded"), window, strict=True):
                yield f"window {i} {name}", memory.buffer, torch.int8


Codec = Callable[[Pools, Memory, Sequence[Memory]], Any]


def cpu_codec(pools: Pools, active: Memory, windows: Sequence[Memory]) -> Any:
    """The CPU codec, which the kernels must equal bit for bit."""
    return _native.CodecPlan(
        active=active.given(),
        checkpoint=pools.checkpoint.given(),
        scale=pools.scale.given() if pools.scale else None,
        conv=[(a.given(), kept.given()) for a, (_, kept, _) in zip(windows, pools.windows, strict=True)],
        layout=pools.case.layout,
        format=pools.case.format,
    )


def cuda_codec(device: Device) -> Codec:
    """The kernels on a device."""

    def make(pools: Pools, active: Memory, windows: Sequence[Memory]) -> CudaCodec:
        return CudaCodec(
            active=active.rows,
            checkpoint=pools.checkpoint.rows,
            scale=pools.scale.rows if pools.scale else None,
            conv=[(a.rows, kept.rows) for a, (_, kept, _) in zip(windows, pools.windows, strict=True)],
            layout=pools.case.layout,
            format=pools.case.format,
            device=device,
        )

    return make


@dataclass
class Outcome:
    """What a round trip left behind."""

    finite: list[bool]
    pools: Pools

    def differences(self, other: Outcome) -> list[str]:
        """Where two outcomes differ, with the number of elements; empty if they are the same."""
        found = [] if self.finite == other.finite else [f"finite: {self.finite} and {other.finite}"]
        for (name, mine, dtype), (_, theirs, _) in zip(
            self.pools.buffers(), other.pools.buffers(), strict=True
        ):
            a, b = mine.cpu().view(dtype), theirs.cpu().view(dtype)
            bits = _BITS[dtype.itemsize]
            equal = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
            if not equal.all():
                found.append(f"{name}: {int((~equal).sum())} of {equal.numel()} elements differ")
        return found


def round_trip(case: Case, codec: Codec, *, device: str = "cpu") -> Outcome:
    """Stores, then loads what was stored into a second active pool."""
    pools, pairs = Pools(case, device), case.store_pairs
    finite = codec(pools, pools.active, [a for a, _, _ in pools.windows]).store(pairs)
    second = codec(pools, pools.reloaded, [b for _, _, b in pools.windows])
    second.load([(kept, active) for active, kept in pairs])
    return Outcome(list(finite), pools)


def out_of_range_problems(device: Device, where: str = "cpu") -> list[str]:
    """What is wrong with slots out of range; empty if they move nothing and say so."""
    case = Case(slots=4, values="usual", conv=((5,),))
    untouched, pools = Pools(case, where), Pools(case, where)
    codec = cuda_codec(device)(pools, pools.active, [a for a, _, _ in pools.windows])
    pairs = [(0, 1), (1, 0), (5, 2), (2, 5), (-1, 3), (3, -1), (1, 4)]
    slots = torch.zeros(3, len(pairs), dtype=torch.int32)
    slots[:2] = torch.tensor(pairs).T
    slots = slots.to(where)
    codec.enqueue_store(slots)
    found = []
    if (status := slots[2].tolist()) != [OUT_OF_RANGE] * 6 + [0]:
        found.append(f"status {status}")
    for name in ("checkpoint", "scale"):
        before, after = (getattr(each, name).rows.whole for each in (untouched, pools))
        if not torch.equal(before[:, :4].view(torch.uint8), after[:, :4].view(torch.uint8)):
            found.append(f"{name}: a slot was written")
        if torch.equal(before[:, 4].view(torch.uint8), after[:, 4].view(torch.uint8)):
            found.append(f"{name}: the pair in range was not moved")
    return found


def scale_problems(device: Device, dtype: torch.dtype, where: str = "cpu") -> list[str]:
    """Which of all largest values of a channel get another scale than on the CPU: all patterns of a 16-bit type."""
    case = Case(dtype=dtype, d_k=1 << 16, d_v=1, heads=1, layers=1, slots=1)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return _store_problems(case, patterns[None], device, where)


def tie_problems(device: Device, dtype: torch.dtype, seed: int, where: str = "cpu") -> list[str]:
    """Which quotients are rounded otherwise than on the CPU, of half-integers and up to two steps beside them."""
    case = Case(dtype=dtype, d_k=256, d_v=1 + 5 * 127, heads=1, layers=1, slots=1)
    random = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-60, 60, (case.d_k,), generator=random)
    if dtype == torch.float16:
        exponent = exponent % 24 - 12
    amax = ((1 + torch.rand(case.d_k, generator=random)) * 2.0**exponent).to(dtype)
    _, scale = reference.encode(amax[None], k_axis=-1)
    ties = ((torch.arange(127) + 0.5)[:, None] * scale.float()).to(dtype)
    integers = ties.view(_BITS[dtype.itemsize])
    near = torch.cat([(integers + step).view(dtype) for step in range(-2, 3)])
    return _store_problems(case, torch.cat([amax[None], torch.minimum(near, amax)]), device, where)


def _store_problems(case: Case, head: torch.Tensor, device: Device, where: str) -> list[str]:
    """Where the store of one head differs from that of the CPU codec."""
    outcomes = []
    for make, there in ((cuda_codec(device), where), (cpu_codec, "cpu")):
        pools = Pools(case, there)
        pools.active.rows.layers[0][1, 0] = head.to(there)
        outcomes.append(Outcome(list(make(pools, pools.active, []).store([(1, 1)])), pools))
    return outcomes[0].differences(outcomes[1])


def reference_problems(device: Device, dtype: torch.dtype, layout: str, where: str = "cpu") -> list[str]:
    """Where a round trip differs from the codec that is written in torch."""
    case = Case(dtype=dtype, layout=layout, d_k=40, d_v=24, values="usual", seed=7)
    pools, k_axis = round_trip(case, cuda_codec(device), device=where).pools, -1 if layout == "k_last" else -2
    found = []
    for layer, (active, kept) in itertools.product(range(case.layers), case.store_pairs):
        q, scale = reference.encode(pools.active.rows.layers[layer][active].cpu(), k_axis=k_axis)
        back = reference.decode(q, scale, k_axis=k_axis, dtype=dtype)
        for name, slot, wanted in (
            ("checkpoint", kept, q),
            ("scale", kept, scale),
            ("reloaded", active, back),
        ):
            if not torch.equal(getattr(pools, name).rows.layers[layer][slot].cpu(), wanted):
                found.append(f"{name}: layer {layer}, slot {slot}")
    return found


class Recorder:
    """A device that only notes which programs are wanted."""

    def __init__(self) -> None:
        self.programs: set[Program] = set()

    def put(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values)

    def refill(self, *_: Any) -> None:
        raise AssertionError("a recorder runs nothing")

    def prepare(self, program: Program) -> None:
        self.programs.add(program)

    def launch(self, *_: Any) -> None:
        raise AssertionError("a recorder runs nothing")

    def fetch(self, values: torch.Tensor) -> Callable[[], list[int]]:
        raise AssertionError("a recorder runs nothing")


def program_of(case: Case) -> Program:
    """The program that serves a case."""
    device, pools = Recorder(), Pools(case, "cpu")
    cuda_codec(device)(pools, pools.active, [a for a, _, _ in pools.windows])
    (program,) = device.programs
    return program
