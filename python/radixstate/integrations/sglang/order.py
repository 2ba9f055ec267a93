"""Depth-first order of requests by the prefixes they matched, the heavier subtree first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Path = np.ndarray[Any, np.dtype[np.int32]]


def depth_first(paths: Sequence[Path]) -> list[int]:
    """Indices of requests so that those which share a prefix are neighbours.

    A subtree weighs as many requests as end in it. The heavier goes first, of equals the one that was given first.
    Requests that end at an inner node come after those below it.

    Args:
        paths: pages of each request's matched prefix, in order.
    """
    order: list[int] = []
    todo: list[list[int] | tuple[list[int], int]] = [(list(range(len(paths))), 0)]
    while todo:
        step = todo.pop()
        if isinstance(step, list):
            order += step
            continue
        members, depth = step
        depth = _shared(paths, members, depth)
        todo.append([member for member in members if len(paths[member]) == depth])
        children: dict[int, list[int]] = {}
        for member in members:
            if len(paths[member]) > depth:
                children.setdefault(paths[member].item(depth), []).append(member)
        todo += [(child, depth + 1) for child in sorted(reversed(children.values()), key=len)]
    return order


def _shared(paths: Sequence[Path], members: Sequence[int], depth: int) -> int:
    """How many pages all of them begin with; at least `depth`, up to which they are equal."""
    if not members:
        return depth
    first = paths[members[0]]
    end = min(len(paths[member]) for member in members)
    for member in members[1:]:
        differ = (paths[member][depth:end] != first[depth:end]).nonzero()[0]
        if differ.size:
            end = depth + differ.item(0)
    return end
