"""Where the tensors of pools on a CPU live."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from radixstate import ActivePool, StateSpec
from radixstate.memory import HUGE_PAGE, zeros

SMAPS = Path("/proc/self/smaps")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(address: int) -> bool:
    """Whether the mapping of an address has the flag `hg`."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(
    not SMAPS.exists() or not THP.exists(), reason="this kernel has no transparent huge pages"
)
def test_a_pool_asks_for_huge_pages() -> None:
    spec = StateSpec(layers=2, heads=8, d_k=128, d_v=128, dtype="float32", layout="k_last")
    pool = ActivePool(spec, 4)
    assert pool.rows["state"].whole is not None
    assert advised(pool.rows["state"].whole.data_ptr() + HUGE_PAGE)


@pytest.mark.parametrize("nbytes", [256, HUGE_PAGE - 256, HUGE_PAGE, HUGE_PAGE + 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_tensor_is_zeroed_writable_and_of_the_shape_asked_for(nbytes: int, dtype: torch.dtype) -> None:
    rows = nbytes // (32 * dtype.itemsize)
    tensor = zeros((rows, 32), dtype, "cpu")
    assert tensor.shape == (rows, 32)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.any()
    tensor[-1, -1] = 1
    assert tensor.sum() == 1


def test_a_view_keeps_the_memory() -> None:
    whole = zeros((4, HUGE_PAGE), torch.int8, "cpu")
    row = whole[3]
    row.fill_(7)
    del whole
    assert (row == 7).all()


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL is what such a kernel answers to an advice that it does not know."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10_000, raising=False)
    assert not zeros((2, HUGE_PAGE), torch.int8, "cpu").untyped_storage().resizable()


def test_a_system_without_the_advice_takes_what_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert zeros((2, HUGE_PAGE), torch.int8, "cpu").untyped_storage().resizable()


@pytest.mark.parametrize("size", [1 << 50, 1 << 62])
def test_what_no_memory_can_hold_is_torchs_error(size: int) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        zeros((size,), torch.int8, "cpu")
