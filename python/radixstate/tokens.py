"""Tokens as callers have them."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Protocol

Tokens = Iterable[int]
"""Token ids in 0..2**32. A buffer of uint32 is read in place. Other CPU tensors and buffers (numpy, array) of 32 or
64 bits are converted in one pass, lists and other iterables number by number."""


class SizedTokens(Iterable[int], Sized, Protocol):
    """Tokens that can be counted, and read more than once."""


def sized(tokens: Tokens) -> SizedTokens:
    """Tokens that can be read more than once."""
    return tokens if isinstance(tokens, Sized) else list(tokens)
