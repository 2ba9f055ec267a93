"""What must hold between two calls: who owns each slot and page, and what every byte of the pools is.

The reference says which prefixes are cached and what is free, but its slots and pages are its own. This module
follows those of the library, from what its answers name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from radixstate import Lease, Sequence
from radixstate.base import CacheBase
from radixstate.reference import records
from radixstate.reference.base import ReferenceBase
from radixstate.testing.compare import Disagreement, agree, words
from radixstate.testing.memory import Contract, Memory
from radixstate.testing.model import ModelLease, ModelSequence
from radixstate.testing.sides import POOLS, Twins

Page = tuple[
    int, Hashable, tuple[int, ...], int | None
]  # what a page is of, and which one it is in the reference


@dataclass(eq=False)
class Owner:
    """A running sequence of the library, of the second rank and of the reference, and what the first owns."""

    twins: Twins
    slots: list[int]
    private: list[int] = field(default_factory=list)  # pages past the leased ones

    @property
    def plain(self) -> Sequence:
        """The library's."""
        sequence: Sequence = self.twins.library
        return sequence

    @property
    def running(self) -> records.Running:
        """The reference's."""
        model: ModelSequence = self.twins.model
        return model.running


@dataclass(eq=False)
class Pin:
    """A lease of the library, of the second rank and of the reference, and the active slots that it took."""

    twins: Twins
    slots: list[int] = field(default_factory=list)

    @property
    def plain(self) -> Lease:
        """The library's."""
        lease: Lease = self.twins.library
        return lease

    @property
    def model(self) -> records.Lease:
        """The reference's."""
        model: ModelLease = self.twins.model
        return model.lease


@dataclass(eq=False)
class Begun:
    """A step of each cache; it is cancelled if its handles are let go before it is retired."""

    twins: Twins


@dataclass(frozen=True)
class Record:
    """Where the library keeps a state, and its bytes."""

    slot: int
    row: bytes


class Retiring:
    """Slots and pages given back that a step in flight may still touch: nobody else may have them yet."""

    def __init__(self, reference: ReferenceBase) -> None:
        """None so far; `reference` knows the steps."""
        self._reference = reference
        self._entries: list[tuple[int, records.PoolName, int]] = []

    def add(self, pool: records.PoolName, units: Iterable[int]) -> None:
        """Remembers units that were given back just now."""
        step = self._reference.newest
        self._entries += [(step, pool, unit) for unit in units if step > self._reference.watermark]

    def of(self, pool: records.PoolName) -> set[int]:
        """Those of a pool that still wait."""
        self._entries = [entry for entry in self._entries if entry[0] > self._reference.watermark]
        return {unit for _, kind, unit in self._entries if kind == pool}


class Audit:
    """Compares the library with the reference after every call, and poisons what nobody owns.

    Attributes:
        active: bytes of the active pool.
        kept: bytes of the checkpoint pool.
        owners: running sequences.
        pins: leases.
    """

    def __init__(self, cache: CacheBase[Any], reference: ReferenceBase, rank: CacheBase[Any]) -> None:
        """Watches `cache`, which is new and empty."""
        self.active, self.kept = Memory(cache.active), Memory(cache.checkpoints)
        self.owners: list[Owner] = []
        self.pins: list[Pin] = []
        self._cache, self._reference, self._rank = cache, reference, rank
        self._rank_active = Memory(rank.active)
        self._contract = Contract(cache.spec, cache.checkpoints.format)
        self._records: dict[records.State, Record] = {}
        self._pages: dict[Page, int] = {}  # where the cache hands them out: the library's cached pages
        self._resident: set[records.Prefix] = set()
        self._retiring = Retiring(reference)
        self._finding: Disagreement | None = None
        self._owns_pages = reference.pools["kv"].owner == "cache"
        self._owns_active = reference.pools["active"].capacity > 0
        for slot in self.kept.slots:
            self.kept.write(slot, self.kept.poison)
        self._rows = self.kept.read_all()  # what the checkpoint pool should hold
        self.poison_free_slots()

    # --- around a call ---

    def before(self) -> None:
        """Notes where the call starts, after looking for writes of the caller where it owns nothing."""
        if self._finding:
            raise self._finding
        for slot in self._free_slots():
            if self.active.read(slot) != self.active.poison:
                raise Disagreement(f"active slot {slot} was written while nobody owned it")
        for slot, row in self._rows.items():
            if self.kept.read(slot) != row:
                raise Disagreement(f"checkpoint slot {slot} was written by somebody else than the cache")
        self._active_before = self.active.read_all()
        self._usage_before = self._usage()
        self._digest_before = self._cache.digest()

    def refused(self, *, misuse: bool) -> None:
        """A refused call has changed nothing; a shortage is part of the digest."""
        agree("usage after a refused call", self._usage(), self._usage_before)
        if misuse:
            agree("digest after a misuse", self._cache.digest(), self._digest_before)

    def after(self, *, touched: Iterable[Owner] = (), written: Iterable[int] = (), encoded: int = 0) -> None:
        """Compares everything.

        Args:
            touched: sequences whose pages the call may have changed.
            written: active slots that it filled.
            encoded: states that it encoded.
        """
        try:
            self._compare(touched, set(written), encoded)
        except Disagreement as finding:
            self._finding = finding  # what is called on the way out has nothing to add
            raise

    def _compare(self, touched: Iterable[Owner], written: set[int], encoded: int) -> None:
        self._cache.check()
        self._rank.check()
        for pool, usage in zip(POOLS, self._usage(), strict=True):
            agree(f"usage of the {pool} pool", usage, tuple(self._reference.usage(pool)))
        agree("digests of two ranks", self._cache.digest(), self._rank.digest())
        self._compare_residents()
        self._compare_counts()
        self._compare_pages(touched)
        self._compare_slots(written)
        self._compare_rows(encoded)
        self.poison_free_slots()

    # --- what calls did ---

    def begin(self, owner: Owner) -> None:
        """A sequence has started: its slot holds the state it reuses, or the empty one."""
        agree("slots of two ranks", owner.slots, owner.twins.rank.slots)
        agree("slots of a sequence", len(owner.slots), len(owner.running.slots))
        self.owners.append(owner)
        self.expect_loaded(owner.slots[0], owner.running.matched.state)
        for slot in owner.slots[1:]:
            self.expect_unusable(slot)

    def give_back(self, owner: Owner | Pin, slot: int) -> None:
        """A sequence or a lease has given one of its slots back."""
        owner.slots.remove(slot)
        self._retiring.add("active", [slot])

    def end(self, owner: Owner) -> None:
        """A sequence has ended."""
        self.owners.remove(owner)
        self._retiring.add("active", owner.slots)
        self._retiring.add("kv", owner.private)

    def unpin(self, pin: Pin) -> None:
        """A lease has ended."""
        self.pins.remove(pin)
        self._retiring.add("active", pin.slots)

    def expect_loaded(self, slot: int, state: records.State | None) -> None:
        """An active slot holds a cached state, decoded, or the empty one."""
        expected = self._contract.decode(self._records[state].row) if state else self._contract.empty
        if self.active.read(slot) != expected:
            source = f"the state of {state.prefix}" if state else "the empty state"
            raise Disagreement(f"active slot {slot} does not hold {source}")

    def expect_unusable(self, slot: int) -> None:
        """No kernel wrote an active slot yet: the library did, so that nothing can be cached from it."""
        row = self.active.read(slot)
        if row == self.active.poison:  # whose NaNs have other bits than the library's
            raise Disagreement(f"active slot {slot} is new, but was left as its last owner left it")
        if self._contract.encode(row) is not None:
            raise Disagreement(f"active slot {slot} is new, but holds a state that could be cached")

    def expect_spent(self, slot: int) -> None:
        """A further slot gave its state to a checkpoint: it gives it for no second depth."""
        if self._contract.encode(self.active.read(slot)) is not None:
            raise Disagreement(f"active slot {slot} was read, and still holds a state that could be cached")

    def encode(self, source: int) -> bytes | None:
        """The checkpoint that active slot `source` should become; none if it is not finite, or no slot.

        The second rank's model has computed the same state.
        """
        if source not in self.active.slots:
            return None
        row = self.active.read(source)
        self._rank_active.write(source, row)
        return self._contract.encode(row)

    def stored(self, serial: int, slot: int, row: bytes) -> None:
        """The library keeps the state that the reference knows as `serial` in `slot`."""
        if slot in self._retiring.of("checkpoint"):
            raise Disagreement(f"checkpoint slot {slot} was reused while a step that writes it is in flight")
        (state,) = (state for state in self._reference.states.values() if state.serial == serial)
        self._records[state] = Record(slot, row)

    def slot_of(self, state: records.State) -> int:
        """Where the library keeps a state."""
        return self._records[state].slot

    # --- comparisons ---

    def _usage(self) -> list[tuple[int, ...]]:
        usages = [self._cache.usage(pool) for pool in POOLS]
        return [tuple(getattr(usage, name) for name in records.Usage._fields) for usage in usages]

    def _compare_residents(self) -> None:
        """Whatever is or was cached before this call matches as in the reference: one order of eviction."""
        now = set(self._reference.states)
        for prefix in self._resident | now:
            if prefix.life == self._reference.life:
                namespace: Any = prefix.namespace  # to the reference any hashable is one
                tokens = [*prefix.tokens, 0]
                found = self._cache.lookup(tokens, namespace=namespace)
                expected = self._reference.lookup(tokens, namespace=namespace)
                agree(f"lookup of {prefix}", words(found), words(expected))
                found = self._cache.lookup(prefix.tokens, namespace=namespace, whole=True)
                expected = self._reference.lookup(prefix.tokens, namespace=namespace, whole=True)
                agree(f"whole lookup of {prefix}", words(found), words(expected))
        self._resident = now

    def _compare_counts(self) -> None:
        stats, counts = self._cache.stats(), self._reference.counts
        agree("hits", (stats.hits, stats.hit_tokens), (counts["hit"], counts["hit_tokens"]))
        for reason, number in stats.misses.as_dict().items():
            agree(f"misses: {reason}", number, counts[reason])

    def _compare_pages(self, touched: Iterable[Owner]) -> None:
        """Sequences and leases have their prefix and its pages, and no page has two owners."""
        if self._owns_pages:
            self._forget_evicted_pages()
            for owner in touched:
                self._follow(owner)
            cached: list[Any] = list(self._pages.values())
            _require_disjoint(
                "kv page", cached, self._retiring.of("kv"), *[own.private for own in self.owners]
            )
        for owner in self.owners:
            expected = self._pages_of(owner.running.lease.prefix) + owner.private
            agree("pages of a sequence", owner.plain.pages, expected)
            model = owner.running
            agree("length", (owner.plain.length, owner.plain.claimed), (len(model.tokens), model.claimed))
            agree("tokens", owner.plain.tokens, model.tokens)
            leased = self._cache._native.leased(owner.plain._handle)
            agree("leased tokens", leased, model.lease.prefix.depth)
        for pin in self.pins:
            agree("pages of a lease", pin.plain.pages, self._pages_of(pin.model.prefix))
            agree("tokens of a lease", pin.plain.depth, pin.model.prefix.depth)
            agree("slots of a lease", (pin.plain.slots, pin.slots), (pin.model.slots, pin.model.slots))
            agree("state of a lease", pin.plain.state, pin.model.state and self.slot_of(pin.model.state))

    def _page(self, prefix: records.Prefix) -> Page:
        return prefix.life, prefix.namespace, prefix.tokens, self._reference.pages[prefix]

    def _forget_evicted_pages(self) -> None:
        """A page that the call evicted may have been replaced by another of the same prefix."""
        now = {self._page(prefix) for prefix in self._reference.pages}
        self._pages = {page: ours for page, ours in self._pages.items() if page in now}

    def _follow(self, owner: Owner) -> None:
        """Learns which pages of a sequence are cached now, and which it gave back."""
        found, ends = owner.plain.pages, self._ends(owner.running.lease.prefix)
        for prefix, page in zip(ends, found, strict=False):
            known = self._pages.get(self._page(prefix))
            if known is None and page in owner.private:
                self._pages[self._page(prefix)] = page
            elif page != known:
                raise Disagreement(
                    f"kv page {page} of {prefix} is neither the cached one nor the sequence's own"
                )
        private = found[len(ends) :]
        self._retiring.add("kv", {*owner.private} - {*private} - {*self._pages.values()})
        owner.private = private

    def _ends(self, prefix: records.Prefix) -> list[records.Prefix]:
        """What the pages of a prefix are the ends of; no page in a model without KV."""
        size = self._reference.page_size
        has_kv = self._reference.pools["kv"].capacity > 0
        return [prefix.cut(end) for end in range(size, prefix.depth + 1, size)] if has_kv else []

    def _pages_of(self, prefix: records.Prefix) -> list[int | None]:
        ends = self._ends(prefix)
        if not self._owns_pages:
            return [self._reference.pages[end] for end in ends]
        return [self._pages[self._page(end)] for end in ends]

    def _compare_slots(self, written: set[int]) -> None:
        """No active slot has two owners, and the call wrote none but `written`."""
        if self._owns_active:
            retiring = self._retiring.of("active")
            _require_disjoint("active slot", retiring, *[it.slots for it in self._holders()])
        for slot, row in self._active_before.items():
            if slot not in written and self.active.read(slot) != row:
                raise Disagreement(f"active slot {slot} was overwritten by a call that had no business there")

    def _compare_rows(self, encoded: int) -> None:
        """Every cached state is as it was stored; at most `encoded` other rows were written, then given up."""
        kept = [*self._reference.states.values(), *self._reference.withdrawn]
        before, self._records = self._rows, {state: self._records[state] for state in kept}
        rows = {record.slot: record.row for record in self._records.values()}
        agree("checkpoint slots with a state of their own", len(rows), len(kept))
        waiting, scraps = self._retiring.of("checkpoint"), 0
        self._rows = {}
        for slot in self.kept.slots:
            found = self.kept.read(slot)
            if slot in rows or slot in waiting:
                if found != rows.get(slot, before[slot]):
                    raise Disagreement(f"checkpoint slot {slot} does not hold what was stored there")
            elif found != before[slot]:
                scraps += 1
                self._retiring.add("checkpoint", [slot])
            if slot not in rows and slot not in self._retiring.of("checkpoint"):
                self.kept.write(slot, self.kept.poison)
                found = self.kept.poison
            self._rows[slot] = found
        if scraps > encoded:
            raise Disagreement(f"{scraps} free checkpoint slots were written, {encoded} states encoded")

    # --- poison ---

    def _holders(self) -> list[Owner | Pin]:
        """Whoever has active slots of the cache."""
        return [*self.owners, *self.pins]

    def _free_slots(self) -> list[int]:
        """Active slots that nobody owns and no step in flight may touch; an engine's own are its business."""
        held = {slot for it in self._holders() for slot in it.slots}
        owned = held | self._retiring.of("active")
        return [slot for slot in self.active.slots if slot not in owned] if self._owns_active else []

    def poison_free_slots(self) -> None:
        """Fills what nobody owns with NaNs."""
        for slot in self._free_slots():
            self.active.write(slot, self.active.poison)


def _require_disjoint(what: str, *owners: Iterable[int]) -> None:
    units = [unit for each in owners for unit in each]
    twice = sorted({unit for unit in units if units.count(unit) > 1})
    if twice:
        raise Disagreement(f"{what} {twice[0]} has two owners")
