"""The examples run, and what they assert would be broken by a scheduler's mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from radixstate import PrefixCache
from radixstate.errors import CacheError

EXAMPLES = Path(__file__).parent.parent / "examples"
SCHEDULERS = ("scheduler", "engine_pages", "logical_pages")


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples import their neighbours, as scripts do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in {path.stem for path in EXAMPLES.glob("*.py")}:
            del sys.modules[name]


def changed(name: str, old: str = "", new: str = "") -> ModuleType:
    """An example with one place of its source changed."""
    path = EXAMPLES / f"{name}.py"
    source = path.read_text()
    assert not old or source.count(old) == 1, f"{name}.py has not {old!r} once"
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source.replace(old, new, 1) if old else source, str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_example_runs_from_anywhere_as_a_script(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def test_the_scheduler_retracts_refuses_and_reuses() -> None:
    module = changed("scheduler")
    made = []

    class Watched(module.Scheduler):  # type: ignore[misc, name-defined]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            made.append(self)

    module.__dict__["Scheduler"] = Watched
    module.main()
    (scheduler,) = made
    assert scheduler.retracted > 0
    assert scheduler.refused == 1
    assert scheduler.cache.stats().hits > 0


def test_the_state_of_a_decoded_depth_is_stored_under_overlap() -> None:
    """The prompt has 20 tokens, so the states at 24 to 40 are of tokens that were sampled."""
    module = changed("scheduler")
    cache = PrefixCache(
        module.SPEC, active_slots=2, kv_pages=48, page_size=8, checkpoint_stride=8, format="native"
    )
    scheduler = module.Scheduler(cache, module.FakeModel(cache.active, kv_pages=48, page_size=8))
    request = module.Request(list(range(20)))
    scheduler.run([request])
    assert request.answer == module.cold(request.prompt, 24)
    assert cache.lookup([*request.prompt, *request.answer]).length == 40
    assert cache.stats().skipped.non_finite == 0


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_a_client_that_goes_away_while_its_launches_are_in_flight_leaves_nothing(answered: int) -> None:
    module = changed("scheduler")

    class Leaving(module.Request):  # type: ignore[misc, name-defined]
        @property
        def cancelled(self) -> bool:
            return len(self.answer) >= answered

        @cancelled.setter
        def cancelled(self, _: bool) -> None: ...

    cache = PrefixCache(
        module.SPEC, active_slots=3, kv_pages=48, page_size=8, checkpoint_stride=8, format="native"
    )
    scheduler = module.Scheduler(cache, module.FakeModel(cache.active, kv_pages=48, page_size=8))
    stays, leaves = module.Request(list(range(40))), Leaving(list(range(50, 90)))
    scheduler.run([stays, leaves])
    assert stays.answer == module.cold(stays.prompt, 24)
    assert leaves.answer == module.cold(leaves.prompt, 24)[:answered]
    assert [cache.usage(pool).held + cache.usage(pool).retiring for pool in ("kv", "active")] == [0, 0]
    cache.check()


MISTAKES = {
    "a row of the page table is wrong": (
        "scheduler",
        "launch = self.model.launch(seq.slot, seq.pages, request.computed)",
        "launch = self.model.launch(seq.slot, seq.pages[:-1] + seq.pages[:1], request.computed)",
    ),
    "a sampled token has no position": ("scheduler", "self.running[request].grow(1)", "pass"),
    "a state is set aside in the running slot": (
        "scheduler",
        "request.spare = seq.take_slot(), launch.depth",
        "request.spare = seq.slot, launch.depth",
    ),
    "a state is stored as that of an earlier depth": (
        "scheduler",
        "seq.checkpoint(depth, source=slot)",
        "seq.checkpoint(depth - 8, source=slot)",
    ),
    "a state that nobody wrote is set aside": (
        "scheduler",
        "self.model.copy_state(seq.slot, request.spare[0])",
        "self.cache.active.clear(request.spare[0])",
    ),
    "a page is free while a step may read it": (
        "allocator",
        "self.retiring.setdefault(newest, []).extend(ids)",
        "self.free[:0] = ids",
    ),
    "pages that were replaced stay in the table": (
        "engine_pages",
        "request.table[cached] = lease.pages[cached]",
        "pass",
    ),
    "pages that were replaced are lost": (
        "engine_pages",
        "self.pages.give(request.table[cached], self.newest)",
        "pass",
    ),
    "pages that were published are freed": (
        "engine_pages",
        "request.table[lease.depth // PAGE :]",
        "request.table",
    ),
    "numbers that were replaced keep the row's own pages": (
        "logical_pages",
        "row[old:shared] = self.device.page[numbers[: shared - old]]",
        "pass",
    ),
    "new numbers are not in the table": (
        "logical_pages",
        "self.device.page[numbers[shared - old :]] = row[shared:new]",
        "pass",
    ),
    "pages given up while storing are not collected": (
        "logical_pages",
        "self.collect()  # storing",
        "pass  # storing",
    ),
}


@pytest.mark.parametrize(("name", "old", "new"), MISTAKES.values(), ids=MISTAKES)
def test_an_example_notices_a_schedulers_mistake(name: str, old: str, new: str) -> None:
    module = changed(name, old, new)
    main = module if name in SCHEDULERS else changed("engine_pages")
    with pytest.raises((AssertionError, CacheError)):
        main.main()
