"""Pairs of slots on a device, and the verdicts on what was stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

if TYPE_CHECKING:
    from radixstate.cuda.device import Device, Fetched

    Array = np.ndarray[Any, Any]
    Pairs = Sequence[tuple[int, int]]


class Verdicts(Sequence[bool]):
    """For each pair of a store whether its state reloads finite. The first reading waits for the store."""

    def __init__(self, pairs: int, fetch: Fetched) -> None:
        """`fetch` waits for the status words of `pairs` pairs and returns them."""
        self._pairs = pairs
        self._fetch = fetch
        self._finite: list[bool] | None = None

    def wait(self) -> list[bool]:
        """All verdicts, when the store has run."""
        if self._finite is None:
            self._finite = [status == 0 for status in self._fetch()]
        return self._finite

    def done(self) -> bool:
        """Whether the store has run; waits for nothing."""
        return self._finite is not None or self._fetch.done()

    def __len__(self) -> int:
        """Number of pairs; waits for nothing."""
        return self._pairs

    @overload
    def __getitem__(self, index: int) -> bool: ...
    @overload
    def __getitem__(self, index: slice) -> list[bool]: ...
    def __getitem__(self, index: int | slice) -> bool | list[bool]:
        """The verdict on one pair; waits for the store."""
        return self.wait()[index]


class Batch:
    """A fixed device buffer of slot pairs: a captured launch can be replayed with other slots.

    `enqueue` alone may be captured. Before a replay `fill` on the stream that replays, after it take `verdicts`
    there. A batch keeps the tensors of the pools alive: keep it as long as a graph that has captured it.

    Capacity is not free. The grid of a captured launch is fixed, so a pair that is not filled in moves nothing, but all
    of its `blocks_of_pair` blocks start, read its two slots and end. Capture batches of a few sizes, and replay the
    smallest that suffices.

    Attributes:
        blocks_of_pair: blocks that every launch starts for each pair of the capacity.
    """

    def __init__(
        self,
        device: Device,
        words: Callable[[Pairs, int], Array],
        launch: Callable[[torch.Tensor], None],
        pairs: Pairs,
        capacity: int,
        blocks_of_pair: int,
    ) -> None:
        """Made by `CudaCodec.batch`.

        Args:
            device: where the buffer is.
            words: checks pairs and writes them into int32 (3, capacity): sources, destinations, status words.
            launch: moves the pairs in such a buffer.
            pairs: the first ones.
            capacity: most pairs at a time.
            blocks_of_pair: see the class.
        """
        self.blocks_of_pair = blocks_of_pair
        self._device = device
        self._words = words
        self._launch = launch
        self._pairs = len(pairs)
        self._slots = device.put(words(pairs, capacity))

    def fill(self, pairs: Pairs) -> None:
        """Names the pairs that launches from here on move, and clears the verdicts.

        Raises:
            SlotError: as `CudaCodec.store`, or there are more pairs than the capacity; nothing changed.
            TensorError: as `CudaCodec.store`; a replay itself cannot see it.
            MisuseError: a graph is being captured.
        """
        words = self._words(pairs, self._slots.shape[1])
        self._device.refill(self._slots, words)
        self._pairs = len(pairs)

    def enqueue(self) -> None:
        """Launches, and nothing else."""
        self._launch(self._slots)

    def verdicts(self) -> Verdicts:
        """Of the pairs, after a store: whether each reloads finite. Call it before they are filled anew.

        Raises:
            MisuseError: a graph is being captured.
        """
        return Verdicts(self._pairs, self._device.fetch(self._slots[2, : self._pairs]))
