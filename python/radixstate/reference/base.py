"""What every cache can do, whoever owns its pages. The definitions that this follows from are in `books`."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import zip_longest

from radixstate.reference.books import Books
from radixstate.reference.records import (
    Extension,
    Freed,
    Lease,
    Match,
    Misuse,
    NeverFits,
    Pending,
    PoolName,
    Prefix,
    Reason,
    Return,
    Shortage,
    Skipped,
    State,
    Stored,
)


class ReferenceBase(Books):
    """What `ReferenceCache` and `ReferenceEngineCache` share."""

    # --- reading ---

    def lookup(
        self,
        tokens: Sequence[int],
        *,
        namespace: Hashable = None,
        max_length: int | None = None,
        whole: bool = False,
    ) -> Match:
        """The longest prefix, short of the whole prompt, whose pages and state are both cached.

        If the tokens are no prompt but all there is, `whole` finds all of them.
        """
        if whole and max_length is not None:
            raise Misuse("config")
        if not tokens:
            raise Misuse("empty_prompt")
        prompt = Prefix(self.life, namespace, tuple(tokens))
        if whole:
            return self._find(prompt, prompt.depth)
        if max_length is None:
            return self._find(prompt, prompt.depth - 1)
        found = self._find(prompt, min(prompt.depth - 1, max_length))
        return replace(found, kv_length=min(found.kv_length, max_length - max_length % self.page_size))

    def _find(self, prompt: Prefix, limit: int) -> Match:
        """What is cached of `prompt`, with a state no deeper than `limit`."""
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

    def touch(self, tokens: Sequence[int], *, namespace: Hashable = None) -> int:
        """Renews the deepest ready state on the path of `tokens`; its depth, or 0."""
        found = self._find(Prefix(self.life, namespace, tuple(tokens)), len(tokens))
        if found.state:
            found.state.stamp = next(self._stamps)
        return found.length

    def lease(self, match: Match) -> Lease:
        """Pins what `match` found; stale if its state is no longer the one cached there."""
        if match.prefix.life != self.life or self.states.get(match.prefix) is not match.state:
            raise Misuse("stale")
        self._consume(match)
        return self._pin(match)

    def fork_lease(self, lease: Lease) -> Lease:
        """Another lease of the same prefix, with no state to load."""
        forked = Lease(lease.prefix, None, lease.encodings)
        self.leases.append(forked)
        return forked

    def lease_loaded(self, lease: Lease) -> None:
        """Ends a lease's pin on its state."""
        state, lease.state = lease.state, None
        self._give_back(reader=state)

    def release(self, lease: Lease) -> None:
        """Gives a lease back, with the active slots that it took."""
        slots, lease.slots = lease.slots, []
        self._give_back({"active": slots}, reader=lease.state, lease=lease)

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

    # --- active slots ---

    def _take_slot(self, slots: list[int]) -> int:
        """One more active slot for the owner of `slots`."""
        active = self.pools["active"]
        if len(slots) == active.capacity:
            raise NeverFits("active", len(slots) + 1, active.capacity)
        self._must_be_spare(1)
        slots += active.take(1)
        return slots[-1]

    def _must_be_spare(self, slots: int) -> None:
        """Active slots that are not free can't be had: no cached prefix can give any."""
        free = len(self.pools["active"].free)
        if slots > free:
            raise Shortage("active", slots, free, 0, self.usage("active").retiring)

    # --- publishing a state ---

    def _reserve(self, lease: Lease, target: Prefix) -> Pending | Skipped:
        """Takes a checkpoint slot for the state after `target`, evicting a state only when there is need."""
        if not target.tokens:
            return Skipped("not_aligned")
        if skipped := self._barred(lease, target):
            return skipped
        if target in self.states:
            return Skipped("duplicate")
        checkpoints = self.pools["checkpoint"]
        self.evict("checkpoint", 1 - len(checkpoints.free))
        if not checkpoints.free:
            return Skipped("no_room", wanted=1, free=0, evictable=0)
        pending = Pending(checkpoints.take(1)[0], target.depth, lease)
        self.pending.append(pending)
        return pending

    def _barred(self, lease: Lease, target: Prefix) -> Skipped | None:
        """Why no state may be stored there: old or refused, or pages that another is still writing."""
        if self._is_old(target):
            return Skipped("reset")
        if self._is_being_written(lease, target):
            return Skipped("duplicate" if target in self.states else "not_ready")
        return None

    def _is_old(self, target: Prefix) -> bool:
        """It is from before a reset, or turned out invalid."""
        return target.life != self.life or target.refused != ()

    def _is_being_written(self, lease: Lease, target: Prefix) -> bool:
        """Pages past the lease are those of another that is still writing them."""
        shared = [target.cut(end) for end in self._page_ends(lease.prefix.depth, target.depth)]
        return any(map(self.is_unproven, shared))

    def _must_be_legal(self, depth: int) -> None:
        if depth != self.legal_depth(depth):
            raise Misuse("unaligned")

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

    def _publish(
        self, lease: Lease, target: Prefix, pages: Sequence[int], pending: Pending, proven: bool
    ) -> tuple[Stored | Skipped, list[int]]:
        """Publishes tokens, pages and state; also returns the pages that were not needed."""
        start, serial = lease.prefix.depth, next(self._serials)
        began, duplicates = self._place(lease, target, pages, serial)
        if target in self.states:
            self.drop(pending)
            return Skipped("duplicate"), duplicates
        self.stores[serial] = target, began
        replaced = self._replaced(start, duplicates)
        return self._store(target, pending, serial, proven, replaced), duplicates

    def _place(
        self, lease: Lease, target: Prefix, pages: Sequence[int], serial: int
    ) -> tuple[int, list[int]]:
        """Caches the pages of `target` past the lease, which moves there; what is cached already stays.

        Returns from which depth on they were not cached, and the given ones that were.
        """
        fresh = [target.cut(end) for end in self._page_ends(lease.prefix.depth, target.depth)]
        new = [prefix for prefix in fresh if prefix not in self.pages]
        offered = dict(zip_longest(fresh, pages))  # no page in a model without KV
        duplicates = [page for prefix, page in offered.items() if page and prefix in self.pages]
        self.pages = offered | self.pages
        if target.depth > lease.prefix.depth:
            lease.prefix = target
        if not self.has_kv:
            return target.depth, []
        self.brought |= dict.fromkeys(new, serial)
        return target.depth - len(new) * self.page_size, duplicates

    def _replaced(self, start: int, duplicates: Sequence[int]) -> tuple[int, int] | None:
        """The tokens whose given pages were cached already: the first past the lease."""
        return (start, start + len(duplicates) * self.page_size) if duplicates else None

    def _page_ends(self, start: int, end: int) -> range:
        return range(start + self.page_size, end + 1, self.page_size)

    def lease_pages(self, lease: Lease) -> list[int]:
        """The pages of a leased prefix in the order of its tokens."""
        cached = (self.pages[lease.prefix.cut(end)] for end in self._page_ends(0, lease.prefix.depth))
        return [page for page in cached if page is not None]

    def _store(
        self,
        target: Prefix,
        pending: Pending,
        serial: int,
        proven: bool,
        replaced: tuple[int, int] | None,
    ) -> Stored:
        self.pending.remove(pending)
        encodings = pending.owner.encodings + 1
        state = State(target, pending.slot, serial, encodings, next(self._stamps), self.writer)
        self.states[target] = state
        proof = None if proven else self._next_ticket()
        if proof:
            self.proofs[proof] = state
        state.ticket = self.newest_open
        return Stored(target.depth, state.slot, state.serial, encodings, state.step, proof, replaced)

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
        """Withdraws what turned out not to be finite, or was lost, and all that stands on the pages it brought.

        Returns how many states that were: 0 if it is cached no longer, for then it is too late.
        """
        target, depth = self.stores[serial]
        found = [state for state in self.states.values() if state.serial == serial]
        shared = any(it.serial == serial and not it.prefix.refused for it in self.extensions)
        if (found or shared) and depth < target.depth:
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
        states = [*self.states.values(), *self.withdrawn]
        holders: list[Lease | State | Extension] = [*self.leases, *states, *self.extensions]
        for holder in holders:
            holder.prefix = hidden(holder.prefix)
        self.states = {state.prefix: state for state in self.states.values()}

    def reset(self) -> None:
        """Lookups see an empty cache; what is pinned stays until its pins go, unreachable."""
        self.life += 1
        self.withdrawn += self.states.values()
        self.states = {}
        self._settle()

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
        written = [it.serial for it in self.unready() if it.step == step]
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
        """What was written is ready once its ticket and all before it are closed."""
        for it in self.unready():
            it.ticket = it.ticket if it.ticket and it.ticket > self.closed else None
        self.extensions = [it for it in self.extensions if it.ticket]
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
