"""Imports modules of an unpacked sglang wheel without its model stack.

The modules of its prefix cache are imported as shipped. Everything else of the package, and every third-party
module that is not installed, is replaced by an inert stub, so that a plain CPU machine is enough.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

REAL = (
    "sglang.srt.mem_cache",
    "sglang.srt.utils",
    "sglang.srt.environ",
    "sglang.srt.constants",
    "sglang.srt.configs.mamba_utils",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.rust_extensions",
    "sglang.srt.session.streaming_session",
    "sglang.srt.runtime_context",
    "sglang.srt.platforms",
    "sglang.srt.plugins",
    "sglang.srt.arg_groups",
    "sglang.srt.observability.func_timer",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.distributed.communication_tags",
    "sglang.utils",
    "sglang.version",
)


class _StubMeta(type):
    """A stub class: any attribute is one too, any call gives a stub or the function it decorates."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any], **_: Any) -> _StubMeta:
        return super().__new__(mcs, name, bases, members)

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, members)

    def __getattr__(cls, name: str) -> Any:
        return _stub_attribute(name)


def _stub_attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _stub(name)


def _stub(name: str) -> _StubMeta:
    def new(cls: type, *args: Any, **named: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not named and cls.__dict__.get("_is_stub")
        return args[0] if decorates else object.__new__(cls)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not named else self

    members = {
        "__new__": new,
        "__init__": lambda self, *args, **named: None,
        "__getattr__": lambda self, attribute: _stub_attribute(attribute),
        "__call__": call,
        "_is_stub": True,
    }
    return _StubMeta(name, (), members)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = _stub_attribute(name)
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def __init__(self, path: list[str]) -> None:
        self.path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = self.path
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub has nothing to run."""


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.missing: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(name, _Loader([]), is_package=True)
        if name.split(".")[0] != "sglang" or any(
            name == real or name.startswith(real + ".") for real in REAL
        ):
            return None
        holds_real = any(real.startswith(name + ".") for real in REAL)
        where = [os.path.join(self.root, *name.split("."))] if holds_real else []
        return importlib.machinery.ModuleSpec(name, _Loader(where), is_package=True)


class Wheel:
    """An unpacked wheel. `patch` configures its stubs; it runs before each attempt to import a module."""

    def __init__(self, root: Path, patch: Callable[[], None]) -> None:
        self.root, self._patch = root, patch
        self._finder = _Finder(root)
        sys.path.insert(0, str(root))
        sys.meta_path.insert(0, self._finder)

    def version(self) -> str:
        """Of the wheel, from the folder of its metadata."""
        found = [path.name for path in self.root.glob("sglang-*.dist-info")]
        return found[0].removeprefix("sglang-").removesuffix(".dist-info") if found else "unknown"

    def load(self, name: str) -> Any:
        """Imports a module; what turns out to be missing is stubbed, and all is tried again."""
        while True:
            try:
                self._patch()
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                top = (error.name or "").split(".")[0]
                if not top or top == "sglang" or top in self._finder.missing:
                    raise
                self._finder.missing.add(top)
                for loaded in [it for it in sys.modules if it == "sglang" or it.startswith("sglang.")]:
                    del sys.modules[loaded]
