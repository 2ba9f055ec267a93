"""The cache once more, slowly and plainly, for schedulers whose pages and slots it hands out."""

from collections.abc import Hashable, Sequence

from radixstate.reference.base import ReferenceBase
from radixstate.reference.records import (
    Match,
    Misuse,
    NeverFits,
    Pending,
    Running,
    Shortage,
    Skipped,
    Stored,
)


class ReferenceCache(ReferenceBase):
    """Sequences. Operations have the names and arguments of the library's."""

    def __init__(
        self,
        *,
        page_size: int,
        checkpoint_stride: int,
        kv_pages: int,
        active_slots: int,
        checkpoint_slots: int,
    ) -> None:
        """An empty cache; sizes in pages, slots and tokens."""
        super().__init__(
            page_size=page_size,
            checkpoint_stride=checkpoint_stride,
            kv_pages=kv_pages,
            active_slots=active_slots,
            checkpoint_slots=checkpoint_slots,
            owner="cache",
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens: none if the model has no KV."""
        return -(-tokens // self.page_size) if self.has_kv else 0

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
        if slots == 0:
            raise Misuse("config")
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

    def _must_ever_fit(self, tokens: int, slots: int = 0) -> None:
        kv, active = self.pools["kv"], self.pools["active"]
        if self.pages_for(tokens) > kv.capacity:
            raise NeverFits("kv", self.pages_for(tokens), kv.capacity)
        if slots > active.capacity:
            raise NeverFits("active", slots, active.capacity)

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
        return self.lease_pages(seq.lease) + seq.private

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
        return self._take_slot(seq.slots)

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

    # --- its states ---

    def reserve_checkpoints(self, states: Sequence[tuple[Running, int, int]]) -> list[Pending | Skipped]:
        """Takes checkpoint slots for (sequence, depth, source) each, once all of them are found right."""
        depths: dict[int, int] = {}
        for seq, depth, source in states:
            self._must_hold(seq, depth, source)
            if depths.setdefault(source, depth) != depth:
                raise Misuse("depth_passed")  # a slot holds one state
        return [self.reserve_checkpoint(*each) for each in states]

    def reserve_checkpoint(self, seq: Running, depth: int, source: int) -> Pending | Skipped:
        """Takes a checkpoint slot for the state at `depth`, which active slot `source` holds."""
        self._must_hold(seq, depth, source)
        seq.reached[source] = depth
        if seq.no_store:
            return Skipped("no_store")
        return self._reserve(seq.lease, self._along(seq.lease, seq.tokens[:depth]))

    def _must_hold(self, seq: Running, depth: int, source: int) -> None:
        """A slot of the sequence can hold its state at `depth`."""
        self._must_be_legal(depth)
        if depth > min(len(seq.tokens), seq.claimed):
            raise Misuse("depth_past_end")
        if source not in seq.slots:
            raise Misuse("not_your_slot")
        if not seq.loaded:
            raise Misuse("not_loaded")
        if depth < max(seq.matched.length, seq.reached.get(source, 0)):
            raise Misuse("depth_passed")  # a state only goes deeper

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
        outcome, duplicates = self._publish(seq.lease, target, pages, pending, proven)
        self._give_back({"kv": duplicates})
        return outcome
