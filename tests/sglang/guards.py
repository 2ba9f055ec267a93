"""Tensors that nobody may read back, as if each lay on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

READING = ("item", "tolist", "numpy", "cpu", "__int__", "__float__", "__index__", "__bool__")
CALLS = (
    "match_prefix",
    "checkpoint",
    "prefix_device_indices",
    "path_device_indices",
    "evict",
    "lock",
    "unlock",
)


class ReadBackError(Exception):
    """A value of a tensor was asked for."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise ReadBackError("a tensor is read back: on a device that waits for it")


@contextmanager
def nobody_reads_tensors() -> Iterator[None]:
    kept = {name: getattr(torch.Tensor, name) for name in READING}
    try:
        for name in READING:
            setattr(torch.Tensor, name, _refuse)
        yield
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def guarded(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A maker of caches of which no call that sglang makes in a step reads a tensor."""

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_call(*given: Any, **named: Any) -> Any:
            with nobody_reads_tensors():
                return call(*given, **named)

        return guarded_call

    def build(context: Any) -> Any:
        cache = make(context)
        for name in CALLS:
            setattr(cache, name, guard(getattr(cache, name)))
        pool = cache.req_to_token_pool.mamba_ckpt_pool
        pool.load_to_active = guard(pool.load_to_active)
        return cache

    return build
