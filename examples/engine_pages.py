"""`scheduler.py` over `EngineCache`: the engine allocates pages and slots, and says when they are free again."""

from collections import deque
from dataclasses import dataclass, field

from allocator import Allocator
from fake_model import SPEC, FakeModel, Launch, cold
from radixstate import EngineCache, Lease, Step

CHUNK, ANSWER, IN_FLIGHT, PAGE = 32, 24, 2, 8  # most tokens of one prefill launch; tokens; steps; tokens


@dataclass(eq=False)
class Request:
    """What a client asked, and what it has."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)  # what the host knows of it
    table: list[int] = field(default_factory=list)  # the pages of the lease, then the engine's
    slot: int = 0
    computed: int = 0  # tokens in the state, once all that was launched has run
    ends: deque[int] = field(default_factory=deque)  # of the pieces of prefill
    keep: tuple[int, ...] = ()  # those at which a state helps later prompts


class Scheduler:
    """Launches step n + 1 before it knows what step n sampled."""

    def __init__(self, cache: EngineCache, model: FakeModel) -> None:
        """Nothing waits, nothing runs."""
        self.cache, self.model = cache, model
        self.pages, self.slots = Allocator(len(model.kv) - 1), Allocator(cache.active.slots)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, Lease] = {}  # the oldest first
        self.in_flight: deque[tuple[Step, list[tuple[Request, Lease, Launch]]]] = deque()
        self.giving: Step | None = None  # in which a request gave way

    def run(self, requests: list[Request]) -> None:
        """Serves them all. Those that no empty pool could hold were refused before."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()
            if len(self.in_flight) == IN_FLIGHT:
                self.retire()
        while self.in_flight:
            self.retire()

    def step(self) -> None:
        """Launches one step."""
        self.newest, batch, short = self.cache.begin_step(), [], False
        for request in list(self.running):
            if request.computed == len(request.prompt) + ANSWER - 1 or request not in self.running:
                continue  # its last token is not known yet, or it has given way
            if self.claim(request):
                batch.append((request, self.running[request], self.advance(request)))
            else:
                short = True
        while not short and self.waiting and self.slots.free:
            short = not self.admit(self.waiting[0])
        self.in_flight.append((self.newest, batch))

    def retire(self) -> None:
        """Waits for the oldest step, and reads what it sampled."""
        step, batch = self.in_flight.popleft()
        for request, lease, launch in batch:
            token = self.model.wait(launch)
            if self.running.get(request) is lease and launch.depth == len(request.prompt + request.answer):
                request.answer.append(token)
                if len(request.answer) == ANSWER:
                    self.end(request)
        self.cache.retire_step(step)
        self.pages.retire(step)
        self.slots.retire(step)
        self.giving = None if self.giving == step else self.giving

    def take_pages(self, n: int) -> list[int] | None:
        """So many pages, or None. What the cache gives up for them is the engine's at once."""
        missing = n - len(self.pages.free)
        if missing > self.cache.usage("kv").evictable:
            return None
        if missing > 0:
            self.cache.evict("kv", missing)
            self.pages.free += self.cache.take_freed()
        return self.pages.take(n)

    def admit(self, request: Request) -> bool:
        """Starts a request if there are pages for all that is known of it."""
        tokens = request.prompt + request.answer
        lease = self.cache.lease(match := self.cache.lookup(tokens))
        if (own := self.take_pages(-(-len(tokens) // PAGE) - match.length // PAGE)) is None:
            lease.release()
            return False
        self.running[self.waiting.popleft()] = lease
        request.table, (request.slot,) = lease.pages + own, self.slots.take(1)
        lease.load(request.slot)
        request.computed = begin = match.length
        request.keep = (match.branch or 0, self.cache.legal_depth(len(tokens) - 1))
        cuts = {*range(begin + CHUNK, len(tokens), CHUNK), *request.keep, len(tokens)}
        request.ends = deque(sorted(end for end in cuts if end > begin))
        return True

    def claim(self, request: Request) -> bool:
        """A page for the next token if it needs one. False if the request sits this step out."""
        more = self.take_pages(max(0, request.computed // PAGE + 1 - len(request.table)))
        if more is None and self.giving is None:
            self.giving = self.newest  # one at a time: its pages come free when this step has retired
            self.waiting.appendleft(youngest := next(reversed(self.running)))
            self.end(youngest)
        request.table += more or []
        return more is not None

    def advance(self, request: Request) -> Launch:
        """Launches one piece of prefill or one token, and publishes what helps later prompts."""
        lease, begin, tokens = self.running[request], request.computed, request.prompt + request.answer
        piece = tokens[begin : request.ends.popleft()] if request.ends else None
        launch = self.model.launch(request.slot, request.table[:], begin, piece)
        request.computed = end = launch.depth
        if piece and end in request.keep:
            own = slice(lease.depth // PAGE, end // PAGE)
            made = lease.publish(tokens[:end], source=request.slot, pages=request.table[own])
            if made.replaced:  # another request was faster: the lease has its pages
                cached = slice(*(depth // PAGE for depth in made.replaced))
                self.pages.give(request.table[cached], self.newest)
                request.table[cached] = lease.pages[cached]
        return launch

    def end(self, request: Request) -> None:
        """Complete, retracted, or the client has gone. What was not published was the engine's all along."""
        lease = self.running.pop(request)
        self.pages.give(request.table[lease.depth // PAGE :], self.newest)
        self.slots.give([request.slot], self.newest)
        lease.release()


def main() -> None:
    """Three system prompts with four questions each, asked twice."""
    cache = EngineCache(
        SPEC, active_slots=4, kv_pages=40, page_size=PAGE, checkpoint_stride=8, format="native"
    )
    scheduler = Scheduler(cache, FakeModel(cache.active, kv_pages=40, page_size=PAGE))
    chats = [[*range(n // 8 * 100, n // 8 * 100 + 70), *range(n % 4 * 9, n % 4 * 9 + 20)] for n in range(24)]
    scheduler.run(requests := [Request(prompt) for prompt in chats])
    assert all(request.answer == cold(request.prompt, ANSWER) for request in requests)
    cache.check(engine_free=scheduler.pages.free)
    assert len(scheduler.pages.free) + cache.usage("kv").evictable == 40
    print(scheduler.model.launched, "tokens computed of", sum(len(prompt) + ANSWER - 1 for prompt in chats))


if __name__ == "__main__":
    main()
