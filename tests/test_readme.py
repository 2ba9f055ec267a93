"""The README's Python blocks run as they stand, and print what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README.read_text(), re.DOTALL)


def test_the_readme_has_blocks() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_a_block_runs_and_prints_what_the_readme_says(code: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


def test_the_first_example_stores_and_hits() -> None:
    _, output = BLOCKS[0]
    assert re.search(r"Stored\(depth=256\b", output)
    assert "reused 256 of 300" in output
