"""Stands in for what sglang's forward asks of a GPU, so that it runs on a CPU with Triton's interpreter.

Importing this changes torch, triton and sglang for the whole process: for `engine.py` alone.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import autotuner


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates queries and keys in place, as the kernel of that name does.

    Args:
        positions: (tokens,).
        query: (tokens, heads * head_size), or None.
        key: the same.
        head_size: elements of a head.
        cos_sin_cache: (positions, rotated), cosines and then sines.
        is_neox: whether the halves of a head are paired, and not neighbours.
    """
    rows = cos_sin_cache[positions.flatten()]
    rotated = rows.shape[-1]
    cosine, sine = (part[:, None].float() for part in rows.chunk(2, -1))
    for heads in (query, key):
        if heads is None:
            continue
        view = heads.view(positions.numel(), -1, head_size)
        part = view[..., :rotated].float()
        one, two = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
        pair = (one * cosine - two * sine, two * cosine + one * sine)
        turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
        view[..., :rotated] = turned.to(view.dtype)


def _module_of_kernels() -> None:
    package, kernels = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    package.__path__ = []
    kernels.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    package._custom_ops = kernels  # type: ignore[attr-defined]
    sys.modules |= {"vllm": package, "vllm._custom_ops": kernels}


def _one_configuration() -> None:
    """Tuning would run each kernel many times in the interpreter."""
    make = autotuner.Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        make(self, fn, arg_names, configs[:1], *rest, **more)

    autotuner.Autotuner.__init__ = init


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def _exp2(x):  # type: ignore[no-untyped-def]
    return tl.exp2(x)


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    return tl.log2(x)


_module_of_kernels()
_one_configuration()
torch.cpu.device = lambda index=None: contextlib.nullcontext()  # type: ignore[attr-defined]

from sglang.kernels.ops.attention.fla import op

# Names of a module that are functions of `tl` escape the interpreter.
op.exp, op.exp2, op.log, op.log2 = _exp, _exp2, _log, _log2
