"""The tiny trained model and the text it knows: what the benchmarks and the quality test run on.

The model is a byte-level Qwen3.5 hybrid (three Gated DeltaNet layers, one attention layer) trained on the
sources of the Python standard library; see ``benchmarks/model/README.md``. Its recurrent states matter as a
trained model's do. Those of random weights do not: with the default initialisation nearly every head forgets
within a few tokens, and zeroing its state changes nothing worth measuring.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from transformers import Qwen3_5ForCausalLM

MODEL_DIR = Path(__file__).resolve().parent / "model"

Split = Literal["train", "validation"]


def load_tiny_model(dtype: torch.dtype = torch.float32) -> Qwen3_5ForCausalLM:
    """The trained model on the CPU in evaluation mode, computing in ``dtype``.

    Judge codecs in float32: in a bf16 model, resuming at another boundary alone moves the output distribution
    by a KL of up to 5e-5 nats, which hides what an int8 checkpoint does.
    """
    model: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype)
    return model


def corpus(split: Split) -> bytes:
    """All files of one split of the running interpreter's standard library, joined by zero bytes.

    About 10.0 MB of ``train`` and 1.8 MB of ``validation``. A hash of its path puts a file in its split, so
    it stays there when other files come or go.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    kept = (name for name in names if _is_source(name) and _split_of(name) == split)
    return b"\0".join((library / name).read_bytes() for name in kept)


def corpus_prompts(n: int, length: int, seed: int) -> list[list[int]]:
    """``n`` distinct prompts of ``length`` bytes from the validation split, the same for the same seed.

    Raises:
        ValueError: ``100 * n`` draws gave fewer than ``n`` distinct prompts, or ``length`` exceeds the split.
    """
    text, draw = corpus("validation"), random.Random(seed)
    prompts: dict[bytes, None] = {}  # a set that keeps its order
    for _ in range(100 * n):
        if len(prompts) == n:
            break
        start = draw.randrange(len(text) - length + 1)
        prompts[text[start : start + length]] = None
    if len(prompts) < n:
        raise ValueError(f"wanted {n} distinct prompts of {length} bytes, found {len(prompts)}")
    return [list(prompt) for prompt in prompts]


def _is_source(name: str) -> bool:
    """Whether a path below the standard library is its own code, not a test or an installed package."""
    parts = name.split("/")
    return parts[0] != "site-packages" and not any("test" in part for part in parts)


def _split_of(name: str) -> Split:
    """One file in ten is for validation."""
    return "validation" if hashlib.sha256(name.encode()).digest()[0] < 26 else "train"
