"""The cache once more, slowly and plainly.

There is no radix tree, no counter and no recency list: cached pages are a dict keyed by the whole prefix, one
entry per page, and whether something is pinned, a leaf or still needed is worked out from nothing each time
it is asked. What takes the library O(1) takes this O(n).

The definitions come first; the operations follow from them.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import count
from math import lcm

from radixstate.reference.records import (
    Freed,
    Lease,
    Match,
    Misuse,
    NeverFits,
    Pending,
    Pool,
    PoolName,
    Prefix,
    Published,
    Reason,
    Return,
    Running,
    Shortage,
    Skipped,
    State,
    Stored,
    Usage,
)


class ReferenceCache:
    """The whole cache. Operations have the names and arguments of the library's."""

    def __init__(
        self,
        *,
        page_size: int,
        checkpoint_stride: int,
        kv_pages: int,
        active_slots: int,
        checkpoint_slots: int,
        kv_external: bool = False,
        active_external: bool = False,
    ) -> None:
        """An empty cache; sizes in pages, slots and tokens."""
        self.page_size = page_size
        self.grid = lcm(page_size, checkpoint_stride)
        self.pools: dict[PoolName, Pool] = {
            "kv": Pool(kv_pages, kv_external),
            "active": Pool(active_slots, active_external),
            "checkpoint": Pool(checkpoint_slots, external=False),
        }
        for pool in self.pools.values():
            pool.free = [] if pool.external else list(range(1, pool.capacity + 1))
        self.pages: dict[Prefix, int | None] = {}  # one entry per cached page; None in a model without KV
        self.brought: dict[Prefix, int] = {}  # the serial of the store that each cached page came with
        self.stores: dict[int, tuple[Prefix, int]] = {}  # by serial: what, and where its own pages began
        self.states: dict[Prefix, State] = {}
        self.withdrawn: list[State] = []  # no longer matchable, still being written or read
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

    # --- definitions ---

    def legal_depth(self, n: int) -> int:
        """The deepest depth not beyond `n` at which a state may be cached."""
        return n - n % self.grid

    def unready(self) -> list[State]:
        """States still being written or not yet known to be finite, also those withdrawn meanwhile."""
        return [s for s in [*self.states.values(), *self.withdrawn] if s.ticket is not None]

    def is_pinned(self, prefix: Prefix) -> bool:
        """A page is pinned by a lease, or by a state that is not ready, at it or below it."""
        holders: list[Lease | State] = [*self.leases, *self.unready()]
        return any(holder.prefix.extends(prefix) for holder in holders)

    def is_unproven(self, prefix: Prefix) -> bool:
        """A page may not be shared before the store that it came with is ready."""
        return any(state.serial == self.brought.get(prefix) for state in self.unready())

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

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens: none if the model has no KV or the engine brings its own."""
        kv = self.pools["kv"]
        return 0 if kv.external or kv.capacity == 0 else -(-tokens // self.page_size)

    def usage(self, name: PoolName) -> Usage:
        """Counts where the units of a pool are."""
        pool = self.pools[name]
        pinned, evictable = self._cached(name)
        held = {
            "kv": sum(len(seq.private) for seq in self.running),
            "active": sum(len(seq.slots) for seq in self.running),
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

    # --- reading ---

    def lookup(
        self, tokens: Sequence[int], *, namespace: Hashable = None, max_length: int | None = None
    ) -> Match:
        """The longest prefix, short of the whole prompt, whose pages and state are both cached."""
        if not tokens:
            raise Misuse("empty_prompt")
        prompt = Prefix(self.life, namespace, tuple(tokens))
        limit = prompt.depth - 1 if max_length is None else min(prompt.depth - 1, max_length)
        kv_length = max((key.depth for key in self.pages if prompt.extends(key)), default=0)
        states = [s for key, s in self.states.items() if prompt.extends(key) and key.depth <= limit]
        ready = [s for s in states if s.ticket is None]
        best = max(ready, key=lambda s: s.prefix.depth, default=None)
        matched = best.prefix if best else prompt.cut(0)
        wished = self.legal_depth(min(kv_length, limit))
        reason: Reason
        if best:
            reason = "hit"
        elif states:
            reason = "not_ready"
        elif kv_length == 0:
            reason = "no_prefix"
        else:
            reason = "no_state" if wished else "unaligned"
        helpful = wished > matched.depth and prompt.cut(wished) not in self.states
        return Match(matched, kv_length, wished if helpful else None, reason, best)

    def lease(self, match: Match) -> Lease:
        """Pins what `match` found; stale if its state is no longer the one cached there."""
        if match.prefix.life != self.life or self.states.get(match.prefix) is not match.state:
            raise Misuse("stale")
        self._consume(match)
        return self._pin(match)

    def lease_loaded(self, lease: Lease) -> None:
        """Ends a lease's pin on its state."""
        state, lease.state = lease.state, None
        self._give_back(reader=state)

    def release(self, lease: Lease) -> None:
        """Gives a lease back."""
        self._give_back(reader=lease.state, lease=lease)

    def _pin(self, match: Match) -> Lease:
        lease = Lease(match.prefix, match.state, match.encodings)
        self.leases.append(lease)
        if match.state:
            self.readers.append(match.state)
        return lease

    def _consume(self, match: Match) -> None:
        """Counts a hit or a miss. A hit renews the state it loads and no other."""
        self.counts[match.reason] += 1
        self.counts["hit_tokens"] += match.length
        if match.state:
            match.state.stamp = next(self._stamps)

    # --- a running request ---

    def start(
        self,
        tokens: Sequence[int],
        *,
        namespace: Hashable = None,
        reserve: int | None = None,
        no_read: bool = False,
        no_store: bool = False,
        max_length: int | None = None,
        slots: int = 1,
    ) -> Running:
        """Pins the match and takes active slots and pages for `reserve` tokens, or changes nothing."""
        matched = self.lookup(tokens, namespace=namespace, max_length=max_length)
        if no_read:
            matched = Match(matched.prefix.cut(0), kv_length=0, branch=None, reason="no_prefix", state=None)
        slots = self._slots_to_take(slots)
        claimed = max(len(tokens) if reserve is None else reserve, matched.length)
        self._must_ever_fit(max(claimed, len(tokens)), slots)
        self._must_be_spare(slots)
        lease = self._pin(matched)
        try:
            private = self._take_pages(self.pages_for(claimed) - self.pages_for(matched.length))
        except Shortage:
            self.leases.remove(lease)
            if matched.state:
                self.readers.remove(matched.state)
            raise
        if not no_read:
            self._consume(matched)
        taken = self.pools["active"].take(slots)
        seq = Running(lease, matched, list(tokens), claimed, taken, private, no_store)
        self.running.append(seq)
        return seq

    def _slots_to_take(self, slots: int) -> int:
        """Active slots that a start takes from the pool: none of an engine's."""
        if slots == 0:
            raise Misuse("config")
        if slots > 1 and self.pools["active"].external:
            raise Misuse("pool_mode")
        return 0 if self.pools["active"].external else slots

    def _must_ever_fit(self, tokens: int, slots: int = 0) -> None:
        kv, active = self.pools["kv"], self.pools["active"]
        if self.pages_for(tokens) > kv.capacity:
            raise NeverFits("kv", self.pages_for(tokens), kv.capacity)
        if slots > active.capacity:
            raise NeverFits("active", slots, active.capacity)

    def _must_be_spare(self, slots: int) -> None:
        """Active slots that are not free can't be had: no cached prefix can give any."""
        free = len(self.pools["active"].free)
        if slots > free:
            raise Shortage("active", slots, free, 0, self.usage("active").retiring)

    def _take_pages(self, n: int) -> list[int]:
        """Takes `n` pages and evicts exactly what is missing, or changes nothing."""
        use = self.usage("kv")
        if n > use.free + use.evictable:
            raise Shortage("kv", n, use.free, use.evictable, use.retiring)
        self.evict("kv", n - use.free)
        return self.pools["kv"].take(n)

    def loaded(self, seq: Running) -> None:
        """The slot was loaded or cleared: it may be read, and the state it came from is free again."""
        if seq.loaded:
            raise Misuse("already_loaded")
        seq.loaded = True
        self.lease_loaded(seq.lease)

    def pages_of(self, seq: Running) -> list[int]:
        """The pages of a sequence in the order of its tokens: the leased ones, then its own."""
        return self._canonical(seq.lease.prefix, 0) + seq.private

    def grow(self, seq: Running, n: int) -> None:
        """Claims pages for `n` more tokens, not yet known."""
        self._must_ever_fit(seq.claimed + n)
        seq.private += self._take_pages(max(0, self.pages_for(seq.claimed + n) - self._holds(seq)))
        seq.claimed += n

    def _holds(self, seq: Running) -> int:
        return self.pages_for(seq.lease.prefix.depth) + len(seq.private)

    def append(self, seq: Running, tokens: Sequence[int]) -> None:
        """Fills claimed positions."""
        if len(seq.tokens) + len(tokens) > seq.claimed:
            raise Misuse("not_claimed")
        seq.tokens += tokens

    def shrink(self, seq: Running) -> None:
        """Gives back the pages past the known tokens."""
        seq.claimed = min(seq.claimed, len(seq.tokens))
        keep = len(seq.private) - max(0, self._holds(seq) - self.pages_for(seq.claimed))
        surplus, seq.private = seq.private[keep:], seq.private[:keep]
        self._give_back({"kv": surplus})

    def take_slot(self, seq: Running) -> int:
        """One more active slot."""
        active = self.pools["active"]
        if active.external:
            raise Misuse("pool_mode")
        if len(seq.slots) == active.capacity:
            raise NeverFits("active", len(seq.slots) + 1, active.capacity)
        self._must_be_spare(1)
        seq.slots += active.take(1)
        return seq.slots[-1]

    def give_back_slot(self, seq: Running, slot: int) -> None:
        """Gives a further active slot back; what state it held is forgotten."""
        if slot not in seq.slots:
            raise Misuse("not_your_slot")
        if slot == seq.slots[0]:
            raise Misuse("running_slot")
        seq.slots.remove(slot)
        seq.reached.pop(slot, None)
        self._give_back({"active": [slot]})

    def finish(self, seq: Running) -> None:
        """Gives back everything a sequence owns."""
        self.running.remove(seq)
        self._give_back({"kv": seq.private, "active": seq.slots}, reader=seq.lease.state, lease=seq.lease)

    # --- publishing a state ---

    def reserve_checkpoint(self, seq: Running, depth: int, source: int | None) -> Pending | Skipped:
        """Takes a checkpoint slot for the state at `depth`, which active slot `source` holds."""
        self.can_checkpoint(seq, depth, source)
        if not self.pools["active"].external:
            seq.reached[source] = depth
        return Skipped("no_store") if seq.no_store else self.reserve(seq.lease, seq.tokens[:depth])

    def can_checkpoint(self, seq: Running, depth: int, source: int | None) -> None:
        """What must hold before anything is evicted for a checkpoint."""
        self._must_be_legal(depth)
        if depth > min(len(seq.tokens), seq.claimed):
            raise Misuse("depth_past_end")
        active = self.pools["active"]
        if source not in (range(1, active.capacity + 1) if active.external else seq.slots):
            raise Misuse("not_your_slot")
        if not seq.loaded:
            raise Misuse("not_loaded")
        if depth < max(seq.matched.length, seq.reached.get(source, 0)):
            raise Misuse("depth_passed")  # a state only goes deeper

    def reserve(self, lease: Lease, tokens: Sequence[int]) -> Pending | Skipped:
        """Takes a checkpoint slot for the state after `tokens`, evicting a state only when there is need."""
        self._must_be_legal(len(tokens))
        target = self._along(lease, tokens)
        self._must_be_loaded(lease, len(tokens))
        if not tokens:
            return Skipped("not_aligned")
        if skipped := self._barred(lease, target):
            return skipped
        if target in self.states:
            return Skipped("duplicate")
        checkpoints = self.pools["checkpoint"]
        self.evict("checkpoint", 1 - len(checkpoints.free))
        if not checkpoints.free:
            return Skipped("no_room", wanted=1, free=0, evictable=0)
        pending = Pending(checkpoints.take(1)[0], len(tokens), lease)
        self.pending.append(pending)
        return pending

    def _barred(self, lease: Lease, target: Prefix) -> Skipped | None:
        """Why nothing may be published there: old or refused, or pages that another is still writing."""
        if target.life != self.life or target.refused:
            return Skipped("reset")
        shared = [target.cut(end) for end in self._page_ends(lease.prefix.depth, target.depth)]
        if self.pools["kv"].capacity == 0 or not any(map(self.is_unproven, shared)):
            return None
        return Skipped("duplicate" if target in self.states else "not_ready")

    def _must_be_legal(self, depth: int) -> None:
        if depth != self.legal_depth(depth):
            raise Misuse("unaligned")

    def _must_be_loaded(self, lease: Lease, depth: int) -> None:
        """A state past the leased one goes on from it."""
        if lease.state and depth > lease.prefix.depth:
            raise Misuse("not_loaded")

    @staticmethod
    def _along(lease: Lease, tokens: Sequence[int]) -> Prefix:
        """The prefix that ends with `tokens`, which must lie on the leased path or go on from it."""
        target = lease.prefix._replace(tokens=tuple(tokens))
        if not target.extends(lease.prefix) and not lease.prefix.extends(target.cut(target.depth)):
            raise Misuse("prefix_mismatch")
        return target

    def drop(self, pending: Pending) -> None:
        """The state will not be written after all."""
        self.pending.remove(pending)
        self._give_back({"checkpoint": [pending.slot]})

    def commit(self, seq: Running, pending: Pending, *, proven: bool = True) -> Stored | Skipped:
        """Publishes tokens, pages and state together; pages cached meanwhile replace the sequence's own.

        A state that is not `proven` to be finite is ready only once its ticket is completed.
        """
        fresh = self.pages_for(max(0, pending.depth - seq.lease.prefix.depth))
        target = self._along(seq.lease, seq.tokens[: pending.depth])
        if skipped := self._barred(seq.lease, target):
            self.drop(pending)
            return skipped
        pages, seq.private = seq.private[:fresh], seq.private[fresh:]
        published = self._publish(seq.lease, target, pages, pending, proven)
        self._give_back({"kv": published.duplicates})
        return published.outcome

    def publish(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[int],
        pending: Pending,
        *,
        proven: bool = True,
    ) -> Published:
        """The same for an engine with pages of its own: `pages` hold the tokens past the lease."""
        if len(tokens) != pending.depth:
            raise Misuse("length_mismatch")
        self.can_publish(lease, tokens, pages)
        target = self._along(lease, tokens)
        if skipped := self._barred(lease, target):
            self.drop(pending)
            return Published(skipped, list(pages), [])
        return self._publish(lease, target, pages, pending, proven)

    def can_publish(self, lease: Lease, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """What must hold before anything is evicted for publishing."""
        self._must_be_legal(len(tokens))
        target, kv = self._along(lease, tokens), self.pools["kv"]
        if kv.capacity > 0 and not kv.external:
            raise Misuse("pool_mode")
        fresh = max(0, target.depth - lease.prefix.depth) // self.page_size if kv.external else 0
        if len(pages) != fresh:
            raise Misuse("length_mismatch")
        known = [*self.pages.values(), *kv.outbox]
        if len(set(pages)) < len(pages) or any(p in known or not 1 <= p <= kv.capacity for p in pages):
            raise Misuse("page_ownership")
        self._must_be_loaded(lease, target.depth)

    def _publish(
        self, lease: Lease, target: Prefix, pages: Sequence[int], pending: Pending, proven: bool
    ) -> Published:
        start = lease.prefix.depth
        fresh = [target.cut(end) for end in self._page_ends(start, target.depth)]
        offered: dict[Prefix, int | None] = dict.fromkeys(fresh)
        offered.update(zip(fresh, pages, strict=False))
        duplicates = [page for prefix, page in offered.items() if page and prefix in self.pages]
        new = [prefix for prefix in offered if prefix not in self.pages]
        self.pages = offered | self.pages  # what is cached already stays
        if target.depth > start:
            lease.prefix = target
        replaced = (start, start + len(duplicates) * self.page_size) if duplicates else None
        outcome = self._attach(target, pending, proven, replaced)
        if isinstance(outcome, Stored):
            self.brought |= dict.fromkeys(new, outcome.serial)
            self.stores[outcome.serial] = target, target.depth - len(new) * self.page_size
        return Published(outcome, self._canonical(target, start), duplicates)

    def _page_ends(self, start: int, end: int) -> range:
        return range(start + self.page_size, end + 1, self.page_size)

    def _canonical(self, prefix: Prefix, start: int) -> list[int]:
        cached = (self.pages[prefix.cut(end)] for end in self._page_ends(start, prefix.depth))
        return [page for page in cached if page is not None]

    def _attach(
        self, target: Prefix, pending: Pending, proven: bool, replaced: tuple[int, int] | None
    ) -> Stored | Skipped:
        if target in self.states:
            self.drop(pending)
            return Skipped("duplicate")
        self.pending.remove(pending)
        step = max(self.outstanding, default=None)
        encodings = pending.owner.encodings + 1
        state = State(target, pending.slot, next(self._serials), encodings, next(self._stamps), step)
        self.states[target] = state
        proof = None if proven else self._next_ticket()
        if proof:
            self.proofs[proof] = state
        state.ticket = max([*self.outstanding, *self.proofs], default=None)
        return Stored(target.depth, state.slot, state.serial, encodings, step, proof, replaced)

    # --- eviction, refusal, reset ---

    def evict(self, name: PoolName, n: int) -> Freed:
        """Frees `n` units if it can, the least recently used state first."""
        pages, states = sum(self._cached("kv")), sum(self._cached("checkpoint"))
        while True:
            freed = Freed(pages - sum(self._cached("kv")), states - sum(self._cached("checkpoint")))
            enough = (freed.kv if name == "kv" else freed.checkpoints) >= n
            victim = None if enough or name == "active" else self._victim(name)
            if victim is None:
                return freed
            self._withdraw(victim)

    def _victim(self, name: PoolName) -> State | None:
        """An idle state; for pages one at the end of an unpinned path, where its pages go with it."""
        idle = [state for state in self.states.values() if not self.is_busy(state)]
        if name == "kv":
            _, evictable = self._cached("kv")  # none in a model without KV: its states are not worth a page
            idle = [s for s in idle if evictable and self.is_leaf(s.prefix) and not self.is_pinned(s.prefix)]
        return min(idle, key=lambda state: state.stamp, default=None)

    def _withdraw(self, state: State) -> None:
        """No lookup finds the state any more; its slot is free once nobody writes or reads it."""
        del self.states[state.prefix]
        self.withdrawn.append(state)
        self._settle()

    def invalidate(self, serial: int) -> int:
        """Withdraws a state that turned out not to be finite, and with the pages it brought all that stands on them.

        Returns how many states that were: 0 if it is cached no longer, for then it is too late.
        """
        target, depth = self.stores[serial]
        found = [state for state in self.states.values() if state.serial == serial]
        if found and depth < target.depth and self.pools["kv"].capacity > 0:
            self._hide(target.cut(depth + self.page_size), depth, serial)
            found = [s for s in self.states.values() if (depth, serial) in s.prefix.refused]
        for state in found:  # in the order stored
            self._withdraw(state)
        return len(found)

    def _hide(self, first: Prefix, depth: int, serial: int) -> None:
        """No prompt has page `first` or one beyond it any more; whoever holds them keeps them."""

        def hidden(prefix: Prefix) -> Prefix:
            return prefix.invalidate(depth, serial) if prefix.extends(first) else prefix

        self.pages = {hidden(prefix): page for prefix, page in self.pages.items()}
        self.brought = {hidden(prefix): by for prefix, by in self.brought.items()}
        holders: list[Lease | State] = [*self.leases, *self.states.values(), *self.withdrawn]
        for holder in holders:
            holder.prefix = hidden(holder.prefix)
        self.states = {state.prefix: state for state in self.states.values()}

    def reset(self) -> None:
        """Lookups see an empty cache; what is pinned stays until its pins go, unreachable."""
        self.life += 1
        self.withdrawn += self.states.values()
        self.states = {}
        self._settle()

    def take_freed(self, name: PoolName) -> list[int]:
        """Units of an external pool that go back to its owner, each told once."""
        pool = self.pools[name]
        told, pool.outbox = pool.outbox, []
        return told

    # --- steps in flight, proofs to come ---

    def begin_step(self) -> int:
        """A step was enqueued: what is given back from now on may still be in use by it."""
        self.outstanding.append(self._next_ticket())
        return self.newest

    def _next_ticket(self) -> int:
        self.newest += 1
        return self.newest

    def retire_step(self, step: int, refused: Sequence[int] = (), *, failed: bool = False) -> None:
        """A step has run, or failed: then what it was to write is refused. Repeating it is harmless."""
        self._must_be_known(step)
        if step not in self.outstanding:
            return
        self.outstanding.remove(step)
        written = [state.serial for state in self.unready() if state.step == step]
        if failed:
            # Nobody needs to know any more whether they are finite.
            self.proofs = {t: state for t, state in self.proofs.items() if state.serial not in written}
        for serial in (*refused, *(written if failed else ())):
            self.invalidate(serial)
        self._land()

    def complete(self, ticket: int, finite: bool) -> None:
        """It is known now whether the state is finite whose proof has this ticket. Repeating it is harmless."""
        self._must_be_known(ticket)
        state = self.proofs.pop(ticket, None)
        if state and not finite:
            self.invalidate(state.serial)
        self._land()

    def _must_be_known(self, ticket: int) -> None:
        if not 1 <= ticket <= self.newest:
            raise Misuse("unknown_step")

    def _land(self) -> None:
        """States are ready once their ticket and all before it are closed."""
        for state in self.unready():
            state.ticket = state.ticket if state.ticket and state.ticket > self.closed else None
        self._settle()

    def _give_back(
        self,
        units: dict[PoolName, list[int]] | None = None,
        *,
        reader: State | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.returns.append(Return(self.newest, units or {}, reader, lease))
        self._settle()

    def _settle(self) -> None:
        """Applies the returns that no step holds up, then lets go of whatever nothing needs."""
        due = [back for back in self.returns if back.ticket <= self.watermark]
        self.returns = [back for back in self.returns if back.ticket > self.watermark]
        for back in due:
            for name, units in back.units.items():
                self.pools[name].give(units)
            if back.reader:
                self.readers.remove(back.reader)
            if back.lease:
                self.leases.remove(back.lease)
        idle = [state for state in self.withdrawn if not self.is_busy(state)]
        self.withdrawn = [state for state in self.withdrawn if self.is_busy(state)]
        self.pools["checkpoint"].give(state.slot for state in idle)
        bare = [prefix for prefix in self.pages if not self.is_needed(prefix)]
        for prefix in bare:
            self.brought.pop(prefix, None)
        self.pools["kv"].give(page for page in map(self.pages.pop, bare) if page is not None)
