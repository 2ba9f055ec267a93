"""Tokens, and rows of page tables, as callers have them."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    PageRow: TypeAlias = "WriteableBuffer | Array"

Tokens = Iterable[int]
"""Token ids in 0..2**32. A buffer of uint32 is read in place. Other CPU tensors and buffers (numpy, array, ctypes) of
32 or 64 bits are converted in one pass, lists and other iterables number by number."""


class Array(Protocol):
    """What a type checker sees of a numpy array: before Python 3.12 not that it is a buffer."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Where its memory is, and of what type."""
        ...


class SizedTokens(Iterable[int], Sized, Protocol):
    """Tokens that can be counted, and read more than once."""


def sized(tokens: Tokens) -> SizedTokens:
    """Tokens that can be read more than once."""
    return tokens if isinstance(tokens, Sized) else list(tokens)
