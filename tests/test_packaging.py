"""What is promised to those who install: extras, versions, the page. `make packages` builds and tries the rest."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CARGO = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PARTS = {
    "testing": "testing",
    "transformers": "integrations/transformers.py",
    "sglang": "integrations/sglang",
}
"""What an extra is for, as a folder or file of the package."""
HOSTS = {"sglang"}
"""Packages that no extra names, since they load this one and pin a torch of their own."""


def imports(part: Path) -> set[str]:
    """Third-party packages that a folder or a file imports."""
    found = set()
    for path in part.rglob("*.py") if part.is_dir() else [part]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module))
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"radixstate", "_typeshed"}


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_its_part_imports(extra: str) -> None:
    brought = {re.split(r"[<>=]", requirement)[0] for requirement in EXTRAS[extra]}
    assert imports(ROOT / "python/radixstate" / PARTS[extra]) - HOSTS <= brought
    assert {"torch", "numpy"} <= brought, "pools are tensors, and torch without numpy warns"


def test_every_entry_point_names_a_function_that_is_there() -> None:
    named = [target for group in PROJECT["entry-points"].values() for target in group.values()]
    assert named
    for target in named:
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), target


def test_a_package_has_one_lower_bound_in_all_extras() -> None:
    """`tools/oldest.sh` tests with those versions."""
    bounds: dict[str, set[str]] = {}
    for requirement in (it for extra in EXTRAS.values() for it in extra):
        bounded = re.fullmatch(r"([\w-]+)([>=]=[\d.]+)", requirement)
        assert bounded, f"{requirement} has no lower bound"
        name, bound = bounded.groups()
        bounds.setdefault(name, set()).add(bound)
    assert {name: len(each) for name, each in bounds.items()} == dict.fromkeys(bounds, 1)


def test_the_documents_name_the_versions_that_are_promised() -> None:
    python = PROJECT["requires-python"].removeprefix(">=")
    torch = next(it for it in EXTRAS["torch"] if it.startswith("torch")).removeprefix("torch>=")
    numpy = next(it for it in EXTRAS["torch"] if it.startswith("numpy")).removeprefix("numpy>=")
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        assert f"Python {python} or newer, Rust {CARGO['rust-version']} or newer" in " ".join(page.split())
    assert f"torch {torch} and NumPy {numpy} or newer" in " ".join(README.split())
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_every_link_of_the_page_works_wherever_it_is_shown() -> None:
    """The README is the page of the wheel and of the crate, where a relative link leads nowhere."""
    repository = CARGO["repository"]
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not link.startswith("https://")] == []
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for link in links:
        if file := re.match(rf"{repository}/(?:blob|raw)/main/(.*)", link):
            assert (ROOT / file[1]).is_file(), link
        elif anchor := re.match(rf"{repository}#(.*)", link):
            assert anchor[1] in headings, link
    assert f"{repository}/raw/main/benchmarks/results/reuse.png" in links, "a picture is the file itself"


def test_the_projects_links_name_what_is_there() -> None:
    repository = CARGO["repository"]
    urls = PROJECT["urls"]
    assert urls["Repository"] == repository
    for url in urls.values():
        assert url.startswith(repository)
        if file := re.match(rf"{repository}/(?:blob|tree)/main/(.*)", url):
            assert (ROOT / file[1]).exists(), url
