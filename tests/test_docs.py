"""The pages of `docs` run as they stand, and name no file that is not there.

`cargo test --doc` runs the policy of `docs/add-a-policy.md`.
"""

from __future__ import annotations

import doctest
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "docs" / "add-an-engine.md"
MODEL = ROOT / "docs" / "describe-a-model.md"
LIFE = ROOT / "docs" / "life-of-a-request.md"
OVERLAP = ROOT / "docs" / "overlap.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*.md"), *ROOT.glob("rust/**/*.md")]
TO_BE_WRITTEN = {"rust/codec/src/format/int4.rs", "kernels/int4.cu", "rust/core/src/policy/cheapest.rs"}
"""Files that a page tells its reader to write."""


def examples(text: str) -> doctest.DocTest:
    """The prompts and pictures of a page. Its fences become empty lines, which end what is expected."""
    bare = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    return doctest.DocTestParser().get_doctest(bare, {}, LIFE.name, str(LIFE), 0)


def failures(text: str) -> str:
    """What a page says that is not so."""
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(examples(text), out=report.write)
    return report.getvalue()


def test_the_life_of_a_request_is_what_the_page_says() -> None:
    assert len(examples(LIFE.read_text()).examples) > 50
    assert failures(LIFE.read_text()) == ""


def test_a_picture_that_has_gone_stale_is_found() -> None:
    """Guards the test above: fences that swallowed the pictures would let it pass."""
    stale = LIFE.read_text().replace("├─ 0..12  state in slot 4", "├─ 0..12  state in slot 3")
    assert failures(stale).count("Failed example") == 1


def test_both_loops_of_an_engine_run_and_assert_what_they_reuse() -> None:
    loops = re.findall(r"```python\n(.*?)```", ENGINE.read_text(), re.DOTALL)
    assert len(loops) == 3, "two loops, and keys of spans"
    for loop in loops:
        assert "assert " in loop
        exec(loop, {})


def test_the_loop_with_steps_in_flight_runs_and_asserts_what_it_stored() -> None:
    blocks = re.findall(r"```python\n(.*?)```", OVERLAP.read_text(), re.DOTALL)
    assert len(blocks) == 3
    assert "assert " in blocks[-1]
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_the_specs_of_models_are_what_the_page_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", MODEL.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        assert "assert " in block
        exec(block, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text)]
    named = re.findall(r"`([\w.-]+/[\w./-]+\.(?:rs|py|pyi|md|cu|cuh|toml))`", text)
    gone = [path for path in links if not path.exists()]
    gone += [ROOT / path for path in named if path not in TO_BE_WRITTEN and not found(page, path)]
    assert gone == []


def found(page: Path, path: str) -> bool:
    """A page may name a file from the root of the repository, from its own folder or from a package's."""
    places = [
        ROOT,
        page.parent,
        ROOT / "rust/core/src",
        ROOT / "rust/core",
        ROOT / "rust/codec/src",
        ROOT / "python/radixstate",
    ]
    return any((place / path).exists() for place in places)
