"""What the reference cache is made of: its results, its refusals and its records."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PageOwner = Literal["cache", "engine", "logical"]  # who allocates the pages, and numbers them
PoolName = Literal["kv", "active", "checkpoint"]
Reason = Literal["hit", "no_prefix", "no_state", "unaligned", "not_ready"]


@dataclass(eq=False)
class Shortage(Exception):  # noqa: N818 (named after what happened)
    """A pool has too few free and evictable units just now; nothing was changed."""

    pool: PoolName
    wanted: int
    free: int
    evictable: int
    retiring: int


@dataclass(eq=False)
class NeverFits(Exception):  # noqa: N818
    """More than a whole pool was asked for, so waiting does not help; nothing was changed."""

    pool: PoolName
    wanted: int
    capacity: int


@dataclass(eq=False)
class Misuse(Exception):  # noqa: N818
    """The caller broke `rule`; nothing was changed."""

    rule: str


class Usage(NamedTuple):
    """Where the units of a pool are. Unless an engine names them, `capacity` is the sum of the others."""

    capacity: int
    free: int
    held: int
    evictable: int
    pinned: int
    retiring: int
    outbox: int


class Freed(NamedTuple):
    """What an eviction really freed."""

    kv: int
    checkpoints: int


@dataclass(frozen=True)
class Stored:
    """A state was published at `depth`; the pages of the tokens in `replaced` are now canonical ones."""

    depth: int
    slot: int
    serial: int
    encodings: int  # as of the state
    step: int | None  # that writes it
    ticket: int | None  # to complete when it is known whether it is finite; none: it is
    replaced: tuple[int, int] | None


@dataclass(frozen=True)
class Skipped:
    """No state was published. That is no error: caching is optional work."""

    reason: Literal["duplicate", "no_room", "not_aligned", "not_ready", "no_store", "reset"]
    wanted: int | None = None  # slots, with `no_room`, and so the two below
    free: int | None = None
    evictable: int | None = None


@dataclass(frozen=True)
class Extended:
    """What sharing an engine's pages came to: why nothing was taken over, or the tokens whose pages were cached."""

    skipped: Skipped | None
    replaced: tuple[int, int] | None


@dataclass(frozen=True)
class Published:
    """The same with a state; if that was cached already, the pages are shared all the same."""

    outcome: Stored | Skipped
    replaced: tuple[int, int] | None


class Prefix(NamedTuple):
    """What a cached page or state is the end of. Prefixes of another life or namespace never match."""

    life: int  # resets before it was cached
    namespace: Hashable
    tokens: tuple[int, ...]
    refused: tuple[
        tuple[int, int], ...
    ] = ()  # past which depths, with which store; no prompt has such a prefix

    @property
    def depth(self) -> int:
        """Length in tokens."""
        return len(self.tokens)

    def cut(self, depth: int) -> "Prefix":
        """The first `depth` tokens of it."""
        refused = tuple(mark for mark in self.refused if mark[0] < depth)
        return self._replace(tokens=self.tokens[:depth], refused=refused)

    def extends(self, other: "Prefix") -> bool:
        """Whether `other` lies on the path to it, or is it."""
        return self.cut(other.depth) == other

    def invalidate(self, depth: int, serial: int) -> "Prefix":
        """The same, refused past `depth` with the store `serial`."""
        return self._replace(refused=tuple(sorted((*self.refused, (depth, serial)))))


@dataclass(eq=False)
class State:
    """A checkpoint: the recurrent state after exactly `prefix`."""

    prefix: Prefix
    slot: int
    serial: int
    encodings: int  # how often it was encoded since it was computed
    stamp: int  # when it was stored or last loaded; the lowest is evicted first
    step: int | None  # that writes it
    ticket: int | None = None  # it is ready when this and all before are closed; none: it is


@dataclass(eq=False)
class Extension:
    """Pages that were shared without a state while something was still to come: a step, or a proof."""

    prefix: Prefix
    serial: int  # from the same count as those of states
    step: int | None  # that writes them
    ticket: int | None  # they may be shared when this and all before are closed; none: they may


@dataclass(frozen=True)
class Match:
    """What a lookup found, and the state it would load."""

    prefix: Prefix
    kv_length: int
    branch: int | None
    reason: Reason
    state: State | None

    @property
    def length(self) -> int:
        """Tokens whose pages and state can both be reused."""
        return self.prefix.depth

    @property
    def encodings(self) -> int:
        """How often the state was encoded; what is computed from the start never was."""
        return self.state.encodings if self.state else 0


@dataclass(eq=False)
class Lease:
    """Pins the path to `prefix` until it is given back, and `state` until that was loaded."""

    prefix: Prefix
    state: State | None
    encodings: int  # of the state, also after it was loaded
    slots: list[int] = field(default_factory=list)  # active ones that an engine's request has taken


@dataclass(eq=False)
class Running:
    """A sequence: a running request, and everything it owns."""

    lease: Lease
    matched: Match
    tokens: list[int]
    claimed: int
    slots: list[int]
    private: list[int]  # pages of its own, which start where its lease ends
    no_store: bool
    loaded: bool = False
    reached: dict[int | None, int] = field(default_factory=dict)  # depths that slots were last named for


@dataclass(eq=False)
class Pending:
    """A checkpoint slot taken for a state at `depth` that is about to be written."""

    slot: int
    depth: int
    owner: Lease


@dataclass
class Return:
    """Things given back while steps were in flight: usable when every step up to `ticket` has retired."""

    ticket: int
    units: dict[PoolName, list[int]]
    reader: State | None
    lease: Lease | None


@dataclass
class Pool:
    """Units 1..=capacity; the lowest free one is taken first. What an engine allocates goes back to it."""

    capacity: int
    owner: PageOwner = "cache"
    free: list[int] = field(init=False)
    outbox: list[int] = field(default_factory=list)  # given up, and not yet taken by the engine

    def __post_init__(self) -> None:
        """All are free, or the engine's."""
        self.free = [] if self.owner == "engine" else list(range(1, self.capacity + 1))

    def take(self, n: int) -> list[int]:
        """Takes `n` units."""
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def give(self, units: Iterable[int]) -> None:
        """Takes units back."""
        if self.owner == "cache":
            self.free = sorted([*self.free, *units])
        else:
            self.outbox += units

    def take_freed(self) -> list[int]:
        """Units that go back to the engine, each told once: only then is a number free for another page."""
        told, self.outbox = self.outbox, []
        self.hand_back(told)
        return told

    def hand_back(self, units: Iterable[int]) -> None:
        """The engine knows that the cache needs these no more."""
        if self.owner == "logical":
            self.free = sorted([*self.free, *units])
