"""A scheduler over `PrefixCache`, chunks and steps in flight included. In Rust: `rust/core/examples/embed.rs`."""

from collections import deque
from dataclasses import dataclass, field

from fake_model import SPEC, FakeModel, Launch, cold
from radixstate import PrefixCache, Sequence, Step
from radixstate.errors import NeverFitsError, OutOfSlotsError

CHUNK, ANSWER, IN_FLIGHT = 32, 24, 2  # most tokens of one prefill launch; tokens; steps


@dataclass(eq=False)
class Request:
    """What a client asked, and how far it has got."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)  # what the host knows of it
    pieces: deque[tuple[int, int, bool]] = field(default_factory=deque)
    computed: int = 0  # tokens in the running state, once all that was launched has run
    spare: tuple[int, int] | None = None  # a further slot, and the depth of the state in it
    cancelled: bool = False


class Scheduler:
    """Launches step n + 1 before it knows what step n sampled."""

    def __init__(self, cache: PrefixCache, model: FakeModel) -> None:
        """Nothing waits, nothing runs."""
        self.cache, self.model = cache, model
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, Sequence] = {}  # the oldest first
        self.in_flight: deque[tuple[Step, list[tuple[Request, Sequence, Launch]]]] = deque()
        self.retracted = self.refused = 0

    def run(self, requests: list[Request]) -> None:
        """Serves them all."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()
            if len(self.in_flight) == IN_FLIGHT:
                self.retire()
        while self.in_flight:
            self.retire()

    def step(self) -> None:
        """Launches one step. What is given back from here on waits until it has retired."""
        step, batch, short = self.cache.begin_step(), [], False
        for request in list(self.running):
            if request.cancelled:
                self.running.pop(request).abort()
            elif request.computed == len(request.prompt) + ANSWER - 1:
                continue  # its last token has been sampled, and is not known yet
            elif self.claim(request):
                batch.append((request, self.running[request], self.advance(request)))
            else:
                short = True
        if not short:  # newcomers would take the pages that the others wait for
            self.admit()
        self.in_flight.append((step, batch))

    def retire(self) -> None:
        """Waits for the oldest step, and reads what it sampled."""
        step, batch = self.in_flight.popleft()
        for request, seq, launch in batch:
            token = self.model.wait(launch)
            if seq is not self.running.get(request) or launch.depth < seq.length:
                continue  # the request was given up meanwhile, or is still in its prompt
            seq.append([token])
            request.answer.append(token)
            if len(request.answer) == ANSWER:
                self.running.pop(request).finish()
        self.cache.retire_step(step)

    def admit(self) -> None:
        """Starts what fits, in the order of arrival."""
        while self.waiting:
            request = self.waiting[0]
            try:
                seq = self.running[request] = self.cache.start(request.prompt + request.answer)
                request.pieces, request.computed = deque(seq.pieces(CHUNK)), seq.reused
            except OutOfSlotsError:
                return  # nothing has changed: a request will end, or a step retire
            except NeverFitsError:
                self.refused += 1
            self.waiting.popleft()

    def claim(self, request: Request) -> bool:
        """Claims a position for the token that the launch samples; `start` claimed the prompt alone."""
        while request in self.running:
            try:
                if len(request.pieces) <= 1:
                    self.running[request].grow(1)
                return True
            except OutOfSlotsError as short:
                if short.wanted - short.free - short.evictable <= short.retiring:
                    return False  # the steps in flight bring enough when they retire
                self.retract(next(reversed(self.running)))
            except NeverFitsError:
                self.running.pop(request).abort()
                self.refused += 1
        return False

    def retract(self, youngest: Request) -> None:
        """One request gives way. It starts again from what is cached of it by then."""
        self.running.pop(youngest).abort()
        youngest.spare = None
        self.waiting.appendleft(youngest)
        self.retracted += 1

    def advance(self, request: Request) -> Launch:
        """Launches one piece of prefill or one token, and keeps its state where that helps."""
        seq = self.running[request]
        if request.spare and request.spare[1] <= seq.length:  # by now its tokens are known
            (slot, depth), request.spare = request.spare, None
            seq.checkpoint(depth, source=slot)
            seq.give_back_slot(slot)
        if request.pieces:
            begin, end, keep = request.pieces.popleft()
            launch = self.model.launch(seq.slot, seq.pages, begin, seq.tokens[begin:end])
            if keep:
                seq.checkpoint(end)  # Stored or Skipped: either way the request goes on
        else:  # the token that the device sampled a step ago, and the host does not know yet
            launch = self.model.launch(seq.slot, seq.pages, request.computed)
            if launch.depth == self.cache.legal_depth(launch.depth) and self.cache.usage("active").free:
                request.spare = seq.take_slot(), launch.depth
                self.model.copy_state(seq.slot, request.spare[0])
        request.computed = launch.depth
        return launch


def main() -> None:
    """Three system prompts with four questions each, and a second turn of every chat."""
    cache = PrefixCache(SPEC, active_slots=5, kv_pages=48, page_size=8, checkpoint_stride=8, format="native")
    scheduler = Scheduler(cache, FakeModel(cache.active, kv_pages=48, page_size=8))
    scheduler.run([Request([9] * 50, cancelled=True), Request([8] * 400)])
    for system in (0, 100, 200):
        chats = [Request([*range(system, system + 70), *range(n * 9, n * 9 + 20)]) for n in range(4)]
        scheduler.run(chats)
        scheduler.run(again := [Request([*it.prompt, *it.answer, 1, 2, 3]) for it in chats])
        assert all(request.answer == cold(request.prompt, ANSWER) for request in chats + again)
    cache.check()
    print(cache.stats().hits, "hits,", scheduler.retracted, "retracted,", scheduler.refused, "refused")


if __name__ == "__main__":
    main()
