"""What NVRTC makes of the kernels on every architecture; needs neither a GPU nor a driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_cases import program_of
from radixstate.cuda import specialise
from test_kernels import CASES

from benchmarks.kernels import REGISTERS, Row, compiled, main_programs
from benchmarks.nvrtc import (
    ARCHITECTURES,
    CUDA_12,
    CompileError,
    architectures,
    compile_program,
    fetched,
)


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return compiled(main_programs(), main=True)


def test_every_program_that_the_tests_name_compiles_without_spills() -> None:
    in_table = set(main_programs().values())
    wanted = {program: str(case) for case in CASES if (program := program_of(case)) not in in_table}
    rows = compiled({name: program for program, name in wanted.items()}, main=False)
    assert len(rows) == 2 * len(wanted) * len(ARCHITECTURES)
    assert [row for row in rows if row.spills] == []


def test_no_main_shape_spills(table: list[Row]) -> None:
    assert {row.arch for row in table} == set(ARCHITECTURES)
    assert [row for row in table if row.spills] == []


def test_a_multiprocessor_holds_a_thousand_threads_of_a_main_shape(table: list[Row]) -> None:
    assert [row for row in table if row.blocks * row.threads < 1024] == []
    assert [row for row in table if row.registers * row.threads * row.blocks > REGISTERS] == []


def test_main_shapes_move_sixteen_bytes_at_a_time(table: list[Row]) -> None:
    """On the side of the state, that is: as many int8 codes, or bf16 of float32, are shorter."""
    for row in table:
        kernel = row.kernel.split()[0]
        # 8 vectors of a window, and those of the state that a thread holds.
        wanted = 16 if kernel.startswith("int8") else 12
        if kernel != "int8_load" and "fp32 as bf16" not in row.kernel:
            assert row.loads["128"] >= wanted, row
        if kernel != "int8_store" and "fp32 as bf16" not in row.kernel:
            assert row.stores["128"] >= wanted, row


def test_a_thread_reads_the_divisors_of_its_columns_sixteen_bytes_at_a_time(table: list[Row]) -> None:
    """As `test_bank_conflicts.py` supposes."""
    columns = [row for row in table if "k_last" in row.kernel]
    assert columns
    for row in columns:
        vector = 4 if "fp32" in row.kernel else 8
        wanted = vector // 2 if row.kernel.startswith("int8_store") else vector // 4
        assert row.shared_loads["128"] >= wanted, row
        assert "64" not in row.shared_loads, row


def test_no_arithmetic_flushes_subnormals_in_spite_of_the_option(table: list[Row]) -> None:
    assert [row for row in table if row.flushing] == []


@pytest.mark.parametrize("version", CUDA_12)
def test_the_nvrtc_of_cuda_12_compiles_the_main_shapes_as_well(version: str) -> None:
    """For the oldest and the newest architecture that it knows; `make kernels ARGS="--nvrtc ..."` does all."""
    if not fetched(version):
        pytest.skip(f"NVRTC {version} is not here: `make nvrtc12` fetches it")
    oldest, *_, newest = architectures(version)
    rows = compiled(main_programs(), main=True, architectures=(oldest, newest), nvrtc=version)
    assert len(rows) == 2 * 2 * len(main_programs())
    assert [row for row in rows if row.spills or row.flushing or row.blocks * row.threads < 1024] == []


def test_a_program_that_does_not_compile_says_why() -> None:
    program = specialise.Program("int8.cu", (("STATE", "Fp8"),))
    with pytest.raises(CompileError, match="Fp8"):
        compile_program(program, "sm_90")


def test_the_package_has_the_kernels_of_the_repository() -> None:
    repository = Path(__file__).parents[1] / "kernels"
    files = {path.name: path.read_text() for path in repository.glob("*.cu*")}
    assert files == {path.name: path.read_text() for path in specialise.SOURCES.glob("*.cu*")}
