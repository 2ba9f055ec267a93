"""A scheduler over `EngineCache(logical=True)`: page ids stay on the device, and the host only counts them.

A table on the device maps the numbers of the cache to pages. `engine_pages.py` has steps in flight and retraction.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from fake_model import SPEC, FakeModel, cold
from radixstate import EngineCache, Lease

CHUNK, ANSWER, PAGE, MOST = 32, 24, 8, 16  # at most 16 pages in a request


class Device:
    """What the kernels of an allocator would do. No page id is read by the host."""

    def __init__(self, slots: int, pages: int) -> None:
        """All pages are free; 0 is the sink for padding."""
        self.stack, self.free = torch.arange(1, pages + 1), pages  # the first `free` of the stack are free
        self.rows = torch.zeros(slots + 1, MOST, dtype=torch.int64)  # pages of each running request
        self.page = torch.zeros(pages + 1, dtype=torch.int64)  # of each number of the cache

    def take(self, row: torch.Tensor) -> None:
        """Fills a part of a row with free pages."""
        self.free -= len(row)
        row[:] = self.stack[self.free : self.free + len(row)]

    def give(self, pages: torch.Tensor) -> None:
        """Frees pages."""
        self.stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)


@dataclass(eq=False)
class Request:
    """What a client asked, and how far it has got."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    slot: int = 0
    computed: int = 0  # tokens in the state
    ends: deque[int] = field(default_factory=deque)  # of the pieces of prefill
    keep: tuple[int, ...] = ()  # those at which a state helps later prompts

    @property
    def pages(self) -> int:
        """Pages for the prompt and the answer, but for its last token, which is never computed."""
        return -(-(len(self.prompt) + ANSWER - 1) // PAGE)


class Scheduler:
    """Launches one piece or one token of every request in turn."""

    def __init__(self, cache: EngineCache, model: FakeModel) -> None:
        """Nothing waits, nothing runs."""
        self.cache, self.model, self.device = cache, model, Device(cache.active.slots, len(model.kv) - 1)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, Lease] = {}

    def run(self, requests: list[Request]) -> None:
        """Serves them all."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            while self.waiting and self.admit(self.waiting[0]):
                self.waiting.popleft()
            for request, lease in list(self.running.items()):
                self.advance(request, lease)

    def admit(self, request: Request) -> bool:
        """Starts a request, if there are a slot and pages for all of it."""
        lease = self.cache.lease(match := self.cache.lookup(request.prompt))
        reused = match.length // PAGE
        if not self.cache.usage("active").free or not self.make_room(request.pages - reused):
            lease.release()
            return False
        lease.load(slot := lease.take_slot())
        request.slot, row = slot, self.device.rows[slot]
        row[:reused] = self.device.page[self.numbers(lease, 0, reused)]
        self.device.take(row[reused : request.pages])
        self.running[request], request.computed = lease, match.length
        request.keep = (match.branch or 0, self.cache.legal_depth(len(request.prompt) - 1))
        cuts = {*range(match.length, len(request.prompt), CHUNK), *request.keep, len(request.prompt)}
        request.ends = deque(sorted(end for end in cuts if end > match.length))
        return True

    def make_room(self, pages: int) -> bool:
        """Whether so many pages are free now, or the cache could give them up."""
        missing = pages - self.device.free
        if 0 < missing <= self.cache.usage("kv").evictable:
            self.cache.evict("kv", missing)
            self.collect()
        return pages <= self.device.free

    def collect(self) -> None:
        """Pages that the cache has given up. Until this is called, no other page gets their numbers."""
        freed = torch.zeros(self.cache.usage("kv").outbox, dtype=torch.int32)
        self.cache.copy_freed(freed.numpy())
        self.device.give(self.device.page[freed])

    def numbers(self, lease: Lease, begin: int, end: int) -> torch.Tensor:
        """Numbers of a lease's pages `begin` to `end`."""
        numbers = torch.zeros(end - begin, dtype=torch.int32)
        lease.copy_pages(numbers.numpy(), start=begin * PAGE)
        return numbers

    def advance(self, request: Request, lease: Lease) -> None:
        """Computes one piece of prefill or one token."""
        begin, known = request.computed, request.prompt + request.answer
        request.computed = end = request.ends.popleft() if request.ends else begin + 1
        row = self.device.rows[request.slot]
        token = self.model.wait(self.model.launch(request.slot, row, begin, known[begin:end]))
        if end in request.keep:
            self.publish(request, lease, end)
        if end >= len(request.prompt):
            request.answer.append(token)
        if len(request.answer) == ANSWER:
            self.device.give(row[lease.depth // PAGE : request.pages])
            self.running.pop(request).release()  # the slot goes back with the lease

    def publish(self, request: Request, lease: Lease, end: int) -> None:
        """Stores the state and shares the KV. The numbers tell where the lease has grown."""
        old, row = lease.depth // PAGE, self.device.rows[request.slot]
        made = lease.publish(request.prompt[:end], source=request.slot)
        numbers = self.numbers(lease, old, new := lease.depth // PAGE)
        shared = made.replaced[1] // PAGE if made.replaced else old
        self.device.give(row[old:shared])  # another request was faster: the cache has pages for these
        row[old:shared] = self.device.page[numbers[: shared - old]]
        self.device.page[numbers[shared - old :]] = row[shared:new]
        self.collect()  # storing may have evicted a state, with its pages


def main() -> None:
    """Ten system prompts with six questions each."""
    cache = EngineCache(
        SPEC, active_slots=4, kv_pages=150, page_size=PAGE, format="native", logical=True, own_slots=True
    )
    scheduler = Scheduler(cache, FakeModel(cache.active, kv_pages=150, page_size=PAGE))
    chats = [[*range(n // 6 * 100, n // 6 * 100 + 70), *range(n, n + 10 + n % 7 * 3)] for n in range(60)]
    scheduler.run(requests := [Request(prompt) for prompt in chats])
    assert all(request.answer == cold(request.prompt, ANSWER) for request in requests)
    cache.check()
    assert scheduler.device.free + cache.usage("kv").evictable == 150
    print(scheduler.model.launched, "tokens computed of", sum(len(prompt) + ANSWER - 1 for prompt in chats))


if __name__ == "__main__":
    main()
