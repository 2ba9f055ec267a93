"""Where everything is, worked out from nothing each time it is asked.

There is no radix tree, no counter and no recency list: cached pages are a dict keyed by the whole prefix, one entry
per page. Whether something is pinned, a leaf or still needed follows from its definition. What takes the library
O(1) takes this O(n).
"""

from collections import Counter
from itertools import count
from math import lcm

from radixstate.reference.records import (
    Extension,
    Lease,
    PageOwner,
    Pending,
    Pool,
    PoolName,
    Prefix,
    Return,
    Running,
    State,
    Usage,
)


class Books:
    """What a cache holds, and the definitions that its operations follow from."""

    def __init__(
        self,
        *,
        page_size: int,
        checkpoint_stride: int,
        kv_pages: int,
        active_slots: int,
        checkpoint_slots: int,
        owner: PageOwner,
    ) -> None:
        """An empty cache; sizes in pages, slots and tokens. `owner` allocates the pages."""
        self.page_size = page_size
        self.grid = lcm(page_size, checkpoint_stride)
        self.pools: dict[PoolName, Pool] = {
            "kv": Pool(kv_pages, owner),
            "active": Pool(active_slots),
            "checkpoint": Pool(checkpoint_slots),
        }
        self.pages: dict[Prefix, int | None] = {}  # one entry per cached page; None in a model without KV
        self.brought: dict[Prefix, int] = {}  # the serial of the store that each cached page came with
        self.stores: dict[int, tuple[Prefix, int]] = {}  # by serial: what, and where its own pages began
        self.states: dict[Prefix, State] = {}
        self.withdrawn: list[State] = []  # no longer matchable, still being written or read
        self.extensions: list[Extension] = []  # pages shared without a state, still being written
        self.leases: list[Lease] = []
        self.readers: list[State] = []  # one entry per lease that has not loaded its state yet
        self.running: list[Running] = []
        self.pending: list[Pending] = []
        self.returns: list[Return] = []
        self.newest = 0  # the newest ticket: steps and proofs are counted in one line
        self.outstanding: list[int] = []  # steps in flight
        self.proofs: dict[int, State] = {}  # by ticket: states not yet known to be finite
        self.life = 0
        self.counts: Counter[str] = Counter()
        self._stamps, self._serials = count(1), count(1)

    def legal_depth(self, n: int) -> int:
        """The deepest depth not beyond `n` at which a state may be cached."""
        return n - n % self.grid

    @property
    def has_kv(self) -> bool:
        """Whether the model has pages at all."""
        return self.pools["kv"].capacity > 0

    def unready(self) -> list[State | Extension]:
        """What is still being written or not yet known to be finite, also states withdrawn meanwhile."""
        written: list[State | Extension] = [*self.states.values(), *self.withdrawn, *self.extensions]
        return [it for it in written if it.ticket is not None]

    def is_pinned(self, prefix: Prefix) -> bool:
        """A page is pinned by a lease, or by what is not ready, at it or below it."""
        holders: list[Lease | State | Extension] = [*self.leases, *self.unready()]
        return any(holder.prefix.extends(prefix) for holder in holders)

    def is_unproven(self, prefix: Prefix) -> bool:
        """A page may not be shared before what it came with is ready."""
        return any(it.serial == self.brought.get(prefix) for it in self.unready())

    def is_busy(self, state: State) -> bool:
        """A state is pinned until it is ready, and while somebody loads it."""
        return state.ticket is not None or state in self.readers

    def is_leaf(self, prefix: Prefix) -> bool:
        """No cached page lies beyond it."""
        return not any(other != prefix and other.extends(prefix) for other in self.pages)

    def is_needed(self, prefix: Prefix) -> bool:
        """A page is kept while it is pinned or a state at it or below it depends on it."""
        return self.is_pinned(prefix) or any(kept.extends(prefix) for kept in self.states)

    @property
    def watermark(self) -> int:
        """The newest ticket such that no step up to it is in flight."""
        return min(self.outstanding, default=self.newest + 1) - 1

    @property
    def closed(self) -> int:
        """The newest ticket such that no step or proof up to it is open."""
        return min([*self.outstanding, *self.proofs], default=self.newest + 1) - 1

    @property
    def newest_open(self) -> int | None:
        """The newest ticket that is open: what is written now is ready when that is closed, and all before it."""
        return max([*self.outstanding, *self.proofs], default=None)

    @property
    def writer(self) -> int | None:
        """The step that what is written now belongs to."""
        return max(self.outstanding, default=None)

    def usage(self, name: PoolName) -> Usage:
        """Counts where the units of a pool are."""
        pool = self.pools[name]
        pinned, evictable = self._cached(name)
        holders: list[Running | Lease] = [*self.running, *self.leases]
        held = {
            "kv": sum(len(seq.private) for seq in self.running),
            "active": sum(len(holder.slots) for holder in holders),
            "checkpoint": len(self.pending),
        }
        retiring = sum(len(back.units.get(name, ())) for back in self.returns)
        return Usage(pool.capacity, len(pool.free), held[name], evictable, pinned, retiring, len(pool.outbox))

    def _cached(self, name: PoolName) -> tuple[int, int]:
        """Units of cached prefixes: pinned ones, evictable ones. No prefix owns an active slot."""
        if name == "active":
            return 0, 0
        if name == "kv":
            pins = [self.is_pinned(prefix) for prefix, page in self.pages.items() if page is not None]
            return sum(pins), len(pins) - sum(pins)
        busy = sum(self.is_busy(state) for state in self.states.values())
        return busy + len(self.withdrawn), len(self.states) - busy
