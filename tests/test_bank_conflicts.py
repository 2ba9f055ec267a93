"""What the kernels' accesses to shared memory cost, counted where they are run on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_on_cpu import CpuDevice, Mutation
from cuda_on_cpu.banks import Wavefronts, wavefronts
from kernel_cases import Case, Pools, cuda_codec

READS, WRITES = False, True
MAIN = [
    Case(dtype=dtype, layout=layout, d_k=d, d_v=d, heads=1, layers=1, slots=1)
    for dtype in (torch.bfloat16, torch.float32)
    for layout in ("k_last", "v_last")
    for d in (64, 128, 256)
]


def cost(case: Case, direction: str, mutation: Mutation | None = None) -> dict[tuple[bool, int], Wavefronts]:
    """Of one head, by kind of access: reads or writes, of so many bytes."""
    device, pools = CpuDevice(note=True, mutation=mutation), Pools(case, "cpu")
    codec: Any = cuda_codec(device)(pools, pools.active, [])
    getattr(codec, direction)([(1, 1)])
    return wavefronts(device.noted(device.launches[0].program))


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("case", MAIN, ids=str)
def test_no_access_of_a_main_shape_has_a_bank_conflict(case: Case, direction: str) -> None:
    found = cost(case, direction)
    assert {writes for writes, _ in found} == {READS, WRITES}
    assert {kind: each for kind, each in found.items() if each.taken != each.least} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("d_k", "d_v"), [(36, 100), (96, 96), (24, 300), (7, 20)])
def test_rows_of_any_length_have_none_where_channels_are_rows(dtype: torch.dtype, d_k: int, d_v: int) -> None:
    case = Case(dtype=dtype, layout="v_last", d_k=d_k, d_v=d_v, heads=1, layers=1, slots=1)
    assert all(each.taken == each.least for each in cost(case, "store").values())


IN_RUNS = "return channel % VECTOR / RUN * APART + channel / VECTOR * RUN + channel % RUN;"
APART = " + LINE / VECTOR * RUN"
TURNED = "i + channel / (BANKS / SHARING) % ACROSS"
SEEDED = {
    "divisors by channel": ("k_last", IN_RUNS, "return channel;", (READS, 16), (512, 128)),
    "runs without a distance": ("k_last", APART, "", (WRITES, 8), (32, 8)),
    "all channels from their first on": ("v_last", TURNED, "i", (READS, 4), (1024, 64)),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_layout_with_conflicts_is_noticed(name: str) -> None:
    layout, old, new, kind, counts = SEEDED[name]
    case = Case(layout=layout, d_k=128, d_v=128, heads=1, layers=1, slots=1)
    assert cost(case, "store", Mutation("int8.cu", old, new))[kind] == counts
