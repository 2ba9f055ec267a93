"""The KV pages of an engine that allocates them itself, with something to read in each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixstate import Namespace
from radixstate.testing.compare import Disagreement

if TYPE_CHECKING:
    from radixstate.testing.checked_engine import CheckedEngineCache

_POISON = bytes([0xFF]) * 8  # in a page that is free, and the tag of nothing


def tag(namespace: Namespace, tokens: Sequence[int]) -> bytes:
    """What a kernel leaves in the page that ends `tokens`: 8 bytes that name the whole prefix."""
    words = repr((namespace.adapter, namespace.tenant, namespace.weights, namespace.salts, tokens)).encode()
    return len(tokens).to_bytes(4, "little") + zlib.crc32(words).to_bytes(4, "little")


class EnginePages:
    """Which pages are free, what each holds, and what the cache calls those that it has taken over.

    That is the page itself, or, with `logical`, the number that the engine maps to it.

    Attributes:
        free: pages that the engine may hand out.
    """

    def __init__(self, cache: CheckedEngineCache) -> None:
        """All pages are free."""
        self._page_size, self._logical = cache.page_size, cache.logical
        self._capacity = cache.usage("kv").capacity
        self.free = list(range(1, self._capacity + 1))
        self._rows = np.full((self._capacity + 1, 8), 0xFF, np.uint8)
        self._mapped: dict[int, int] = {}

    def compute(self, namespace: Namespace, tokens: Sequence[int], start: int) -> list[int]:
        """Writes the tokens past `start` into pages, as far as there are some. They stay free until `hand_over`."""
        ends = range(start + self._page_size, len(tokens) + 1, self._page_size)
        pages = self.free[: len(ends)]
        for page, end in zip(pages, ends, strict=False):
            self._rows[page] = np.frombuffer(tag(namespace, tokens[:end]), np.uint8)
        return pages

    def hand_over(self, pages: Sequence[int], ids: Sequence[int], replaced: tuple[int, int] | None) -> None:
        """The cache has taken over what `compute` filled, but for the tokens `replaced`, and calls it `ids`."""
        known = (replaced[1] - replaced[0]) // self._page_size if replaced else 0
        if len(ids) > len(pages) and self._capacity:
            raise Disagreement(f"the cache took over {len(ids)} pages, the engine gave {len(pages)}")
        for page, number in zip(pages[known:], ids[known:], strict=False):
            if number in self._mapped:
                raise Disagreement(f"number {number} names a page before the engine took it back")
            if not self._logical and number != page:
                raise Disagreement(f"the engine gave page {page}, and the cache calls it {number}")
            self._mapped[number] = page
            self.free.remove(page)
        self._poison(set(pages) & set(self.free))

    def take_back(self, ids: Iterable[int]) -> None:
        """The cache needs these no more."""
        pages = [self._mapped.pop(number) for number in ids]
        self._poison(pages)
        self.free += pages

    def cached(self) -> list[int]:
        """What the cache calls the pages that it has."""
        return [*self._mapped]

    def require(self, ids: Sequence[int], namespace: Namespace, tokens: Sequence[int]) -> None:
        """Kernels that read `ids` find these tokens in them."""
        for i, number in enumerate(ids):
            end = (i + 1) * self._page_size
            page = self._mapped.get(number)
            if page is None or self._rows[page].tobytes() != tag(namespace, tokens[:end]):
                raise Disagreement(f"page {number} does not hold the tokens up to {end} of {tokens}")

    def _poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._rows[page] = np.frombuffer(_POISON, np.uint8)
