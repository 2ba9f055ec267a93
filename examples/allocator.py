"""Ids that an engine hands out itself, while its device runs behind."""

from radixstate import Step


class Allocator:
    """Ids of the engine. One that is given back is free when every step begun so far has retired."""

    def __init__(self, count: int) -> None:
        """All are free; 0 is the sink for padding."""
        self.free = list(range(1, count + 1))
        self.retiring: dict[Step, list[int]] = {}

    def take(self, n: int) -> list[int]:
        """The first `n`."""
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def give(self, ids: list[int], newest: Step) -> None:
        """Steps retire in order here, so the newest is the last that may touch them."""
        self.retiring.setdefault(newest, []).extend(ids)

    def retire(self, step: Step) -> None:
        """A step has ended."""
        self.free += self.retiring.pop(step, [])
