"""Depth-first order of requests by the prefixes they matched, the heavier subtree first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Path = np.ndarray[Any, np.dtype[np.int32]]


@dataclass
class _Node:
    """A prefix at which requests end or part.

    Attributes:
        depth: pages from the root.
        ending: requests that end here.
        children: longer prefixes.
        weight: requests that end here or below, known when the node is complete.
        first: the one of them that was given first.
    """

    depth: int
    ending: list[int] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    weight: int = 0
    first: int = 0

    def complete(self) -> _Node:
        """Nothing comes below any more."""
        self.weight = len(self.ending) + sum(child.weight for child in self.children)
        self.first = min([*self.ending, *(child.first for child in self.children)])
        self.children.sort(key=lambda child: (-child.weight, child.first))
        return self


def depth_first(paths: Sequence[Path]) -> list[int]:
    """Indices of requests so that those which share a prefix are neighbours.

    A subtree weighs as many requests as end in it. The heavier goes first, of equals the one that was given first.
    Requests that end at an inner node come after those below it.

    Args:
        paths: pages of each request's matched prefix, in order.
    """
    order: list[int] = []
    todo: list[_Node | list[int]] = [_tree(paths)] if paths else []
    while todo:
        step = todo.pop()
        if isinstance(step, list):
            order += step
        else:
            todo += [step.ending, *reversed(step.children)]
    return order


def _tree(paths: Sequence[Path]) -> _Node:
    """The tree of all prefixes at which requests end or part. Sorted, those that share one are neighbours."""
    keys = [path.astype(">u4").tobytes() for path in paths]
    open_nodes, before = [_Node(0)], None
    for at in sorted(range(len(paths)), key=keys.__getitem__):
        shared = 0 if before is None else _shared(paths[before], paths[at])
        while open_nodes[-1].depth > shared:
            done = open_nodes.pop().complete()
            if open_nodes[-1].depth < shared:
                open_nodes.append(_Node(shared))
            open_nodes[-1].children.append(done)
        if len(paths[at]) > shared:
            open_nodes.append(_Node(len(paths[at])))
        open_nodes[-1].ending.append(at)
        before = at
    while len(open_nodes) > 1:
        done = open_nodes.pop().complete()
        open_nodes[-1].children.append(done)
    return open_nodes[0].complete()


def _shared(one: Path, other: Path) -> int:
    """How many pages both begin with."""
    end = min(len(one), len(other))
    differ = (one[:end] != other[:end]).nonzero()[0]
    return int(differ[0]) if differ.size else end
