"""What the figures are to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A bound on the ratio to a peer, which is above 1 where we are better; or, without a peer, on our own figure.

    Attributes:
        bound: the ratio must be at least this; our own figure at most this.
        peer: by name of its backend.
    """

    bound: float
    peer: str | None = None

    def __str__(self) -> str:
        return f"<= {self.bound:g}" if self.peer is None else f">= {self.bound:g}x {self.peer}"

    def met(self, ours: float, ratio: float | None) -> bool | None:
        """None where the peer was not there to be compared with."""
        if self.peer is None:
            return ours <= self.bound
        return None if ratio is None else ratio >= self.bound


def _faster(least: float, *names: str, peer: str = "sglang-rust") -> dict[str, Target]:
    return {name: Target(least, peer) for name in names}


def _at_most(bound: float, *names: str) -> dict[str, Target]:
    return {name: Target(bound) for name in names}


def _codec() -> dict[str, tuple[Target, ...]]:
    both = (Target(0.8, "memcpy"), Target(10.0, "torch"))
    return {
        f"{direction} {dtype}, N={states}, threads={threads}": both
        for direction in ("store", "load")
        for dtype in ("bfloat16", "float16", "float32")
        for states in (1, 4)
        for threads in (1, 2)
    }


SINGLE = {
    **_faster(5, "W1 match", *(f"{name} insert" for name in ("W1", "W2", "W3"))),
    **_faster(8, "W2 match"),
    **_faster(4, "W3 match", *(f"{name} lease + release" for name in ("W1", "W2", "W3"))),
    **_faster(5, *(f"{name} whole workload" for name in ("W1", "W2", "W3"))),
    **_faster(2, "W1 bytes per cached token", "W2 bytes per cached token"),
    **_faster(10, "evict one state among leaves, 1024 leaves", "evict one page among leaves, 1024 leaves"),
    **_faster(20, "match, chain of 16-token turns, 4096 turns"),
    **_at_most(
        2,
        "evict one state among leaves: 1048576 leaves over 1024",
        "evict one page among leaves: 1048576 leaves over 1024",
    ),
    # Or 20 times faster than sglang's, see above.
    **_at_most(
        2, "match, chain of 16-token turns: 4096 turns over reading the key once and a cache miss for each"
    ),
    # Unchanged, within what a median of single calls varies from run to run.
    **_at_most(1.2, "match a key of 1000 tokens: after 999 diverging lookups over before"),
}

TARGETS: dict[str, tuple[Target, ...]] = {**{name: (one,) for name, one in SINGLE.items()}, **_codec()}
