"""The cache once more, slowly and plainly, for engines that allocate the pages themselves."""

from collections.abc import Sequence
from typing import Literal

from radixstate.reference.base import ReferenceBase
from radixstate.reference.records import (
    Extended,
    Extension,
    Lease,
    Misuse,
    Pending,
    Prefix,
    Published,
    Skipped,
    Stored,
)


class ReferenceEngineCache(ReferenceBase):
    """Leases that move deeper. Operations have the names and arguments of the library's."""

    def __init__(
        self,
        *,
        page_size: int,
        checkpoint_stride: int,
        kv_pages: int,
        checkpoint_slots: int,
        active_slots: int = 0,
        owner: Literal["engine", "logical"] = "engine",
    ) -> None:
        """An empty cache; sizes in pages, slots and tokens. `logical`: it numbers the pages that it is given."""
        super().__init__(
            page_size=page_size,
            checkpoint_stride=checkpoint_stride,
            kv_pages=kv_pages,
            active_slots=active_slots,
            checkpoint_slots=checkpoint_slots,
            owner=owner,
        )

    # --- pages alone ---

    def extend(self, lease: Lease, tokens: Sequence[int], pages: Sequence[int] = ()) -> Extended:
        """Shares the pages of the tokens past the lease, which moves there. They stay while somebody leases them."""
        self._must_be_whole_pages(tokens)
        target = self._must_go_on(lease, tokens, pages)
        if self._is_old(target):
            return Extended(Skipped("reset"), None)
        if self._is_being_written(lease, target):
            return Extended(Skipped("not_ready"), None)
        start, serial = lease.prefix.depth, next(self._serials)
        began, duplicates = self._place(lease, target, self._adopt(lease, target, pages), serial)
        self.pools["kv"].hand_back(duplicates)
        if self.newest_open and began < target.depth:
            self.stores[serial] = target, began
            self.extensions.append(Extension(target, serial, self.writer, self.newest_open))
        return Extended(None, self._replaced(start, duplicates))

    def take_freed(self) -> list[int]:
        """Pages that go back to the engine, or numbers, each told once."""
        return self.pools["kv"].take_freed()

    # --- states ---

    def reserve(self, lease: Lease, tokens: Sequence[int], pages: Sequence[int] = ()) -> Pending | Skipped:
        """Takes a checkpoint slot for the state after `tokens`, which is to be published with `pages`."""
        self._must_be_legal(len(tokens))
        return self._reserve(lease, self._must_go_on(lease, tokens, pages))

    def attach(
        self, lease: Lease, tokens: Sequence[int], pending: Pending, *, proven: bool = True
    ) -> Stored | Skipped:
        """Adds a state to pages that the lease has: they stay if it turns out not to be finite."""
        self._must_be_reserved(lease, tokens, pending)
        self.must_be_leased(lease, tokens)
        return self._enter(lease, self._along(lease, tokens), (), pending, proven).outcome

    def publish(
        self,
        lease: Lease,
        tokens: Sequence[int],
        pages: Sequence[int],
        pending: Pending,
        *,
        proven: bool = True,
    ) -> Published:
        """Publishes tokens, pages and state together: `pages` hold the tokens past the lease."""
        self._must_be_reserved(lease, tokens, pending)
        target = self._must_go_on(lease, tokens, pages)
        return self._enter(lease, target, pages, pending, proven)

    def _enter(
        self, lease: Lease, target: Prefix, pages: Sequence[int], pending: Pending, proven: bool
    ) -> Published:
        if skipped := self._barred(lease, target):
            self.drop(pending)
            # One that is still being written shares no pages, where a duplicate does.
            return Published(Skipped("not_ready") if skipped.reason == "duplicate" else skipped, None)
        start, adopted = lease.prefix.depth, self._adopt(lease, target, pages)
        outcome, duplicates = self._publish(lease, target, adopted, pending, proven)
        self.pools["kv"].hand_back(duplicates)
        return Published(outcome, self._replaced(start, duplicates))

    # --- active slots ---

    def take_slot(self, lease: Lease) -> int:
        """An active slot of the cache. It goes back with the lease, or earlier."""
        return self._take_slot(lease.slots)

    def give_back_slot(self, lease: Lease, slot: int) -> None:
        """Gives an active slot back."""
        if slot not in lease.slots:
            raise Misuse("not_your_slot")
        lease.slots.remove(slot)
        self._give_back({"active": [slot]})

    # --- what must hold ---

    def must_be_leased(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Only `publish` and `extend` bring tokens that the lease lacks."""
        if len(tokens) > lease.prefix.depth:
            raise Misuse("length_mismatch")

    def _must_be_whole_pages(self, tokens: Sequence[int]) -> None:
        if len(tokens) % self.page_size:
            raise Misuse("unaligned")

    def _must_go_on(self, lease: Lease, tokens: Sequence[int], pages: Sequence[int]) -> Prefix:
        """Tokens go on from the lease, whose state was loaded, and the pages are those past it."""
        target = self._along(lease, tokens)
        self._must_be_adoptable(self._new_pages(lease, target), pages)
        if lease.state and target.depth > lease.prefix.depth:
            raise Misuse("not_loaded")
        return target

    def _new_pages(self, lease: Lease, target: Prefix) -> int:
        """Pages that the engine hands over with the tokens past the lease."""
        past = max(0, target.depth - lease.prefix.depth)
        return past // self.page_size if self.has_kv else 0

    def _must_be_adoptable(self, n: int, pages: Sequence[int]) -> None:
        kv = self.pools["kv"]
        if len(pages) != (n if kv.owner == "engine" else 0):
            raise Misuse("length_mismatch")
        if kv.owner == "logical" and n > len(kv.free):
            raise Misuse("too_many_pages")
        known = [*self.pages.values(), *kv.outbox]
        if len(set(pages)) < len(pages) or any(p in known or not 1 <= p <= kv.capacity for p in pages):
            raise Misuse("page_ownership")

    def _adopt(self, lease: Lease, target: Prefix, pages: Sequence[int]) -> Sequence[int]:
        """The pages past the lease: as the engine names them, or under the lowest free numbers."""
        kv = self.pools["kv"]
        return pages if kv.owner == "engine" else kv.take(self._new_pages(lease, target))

    def _must_be_reserved(self, lease: Lease, tokens: Sequence[int], pending: Pending) -> None:
        if pending.owner is not lease:
            raise Misuse("not_your_pending")
        if len(tokens) != pending.depth:
            raise Misuse("length_mismatch")
