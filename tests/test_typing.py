"""What a type checker says of calls that users write."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CALLS = """
import ctypes
from array import array

import numpy as np
from radixstate import Lease, Sequence

def given(holder: Sequence | Lease, table: np.ndarray) -> int:
    rows = [
        holder.copy_pages(np.zeros(8, np.int32)),
        holder.copy_pages(table[1]),
        holder.copy_pages(array("i", [0])),
        holder.copy_pages(memoryview(bytearray(8)).cast("i")),
        holder.copy_pages((ctypes.c_int32 * 8)()),
    ]
    holder.copy_pages([0] * 8)  # type: ignore[arg-type]
    return sum(rows)
"""
# Torch alone would take half a minute. A needless `ignore` is an error, so a call that should be refused is.
SETTINGS = f"""
[mypy]
strict = True
disallow_any_generics = False
mypy_path = {ROOT / "python"}
[mypy-torch.*]
follow_imports = skip
"""


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_a_row_of_a_page_table_is_any_array_and_no_list(version: str, tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    run = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--python-version", version, "calls.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stderr
