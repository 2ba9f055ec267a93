"""A model that computes nothing and notices every wrong read.

Each state and each row of KV carries a tag: a hash of all tokens up to there. A launch reads the state that it
continues and the KV of every token before it, and asserts that both carry the tags they must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from radixstate import ActivePool, StateSpec

Pages: TypeAlias = "list[int] | torch.Tensor"
SPEC = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
VOCABULARY = 1000


def mix(tag: int, token: int) -> int:
    """The tag after one more token. It is exact in float32; that of the empty state is 0."""
    return (tag * 31 + token + 1) % 16_777_213


def cold(prompt: list[int], answer: int) -> list[int]:
    """What the model answers when nothing is cached."""
    tag, tokens = 0, list(prompt)
    for token in prompt:
        tag = mix(tag, token)
    for _ in range(answer):
        tokens.append(tag % VOCABULARY)
        tag = mix(tag, tokens[-1])
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Launch:
    """What a launch has read and written: the KV of `depth` tokens, in these pages."""

    pages: Pages
    depth: int
    tag: int


class FakeModel:
    """Runs launches in their order, as a stream does. The scheduler learns what was sampled by `wait`."""

    def __init__(self, states: ActivePool, kv_pages: int, page_size: int) -> None:
        """Makes the engine's tensors. Row 0 of each is the sink for padding."""
        self.states = states
        self.kv = torch.zeros(kv_pages + 1, page_size, 2, dtype=torch.int64)  # a token and its tag
        self.sampled = torch.zeros(states.slots + 1, dtype=torch.int64)  # by slot; stays on the device
        self.launched = 0

    def launch(self, slot: int, pages: Pages, begin: int, tokens: Sequence[int] | None = None) -> Launch:
        """Computes `tokens` at positions from `begin` on, and samples the next one.

        Without `tokens` it computes the one that it sampled last in this slot, which the host need not know yet.
        """
        state = self.states.state(slot)
        tag = self._read(pages, begin)
        assert torch.all(state == tag), f"slot {slot} has not the state after {begin} tokens"
        size = self.kv.shape[1]
        for position, token in enumerate(tokens or [int(self.sampled[slot])], begin):
            tag = mix(tag, token)
            self.kv[pages[position // size], position % size] = torch.tensor([token, tag])
            begin = position + 1
        state.fill_(tag)
        self.sampled[slot] = tag % VOCABULARY
        self.launched += len(tokens or [0])
        return Launch(pages, begin, tag)

    def copy_state(self, source: int, to: int) -> None:
        """One active slot into another. A model with conv windows copies those as well."""
        self.states.state(to).copy_(self.states.state(source))

    def wait(self, launch: Launch) -> int:
        """The token that was sampled. Nobody may have written to the launch's pages before this."""
        assert self._read(launch.pages, launch.depth) == launch.tag, "a page was handed out too early"
        return launch.tag % VOCABULARY

    def _read(self, pages: Pages, depth: int) -> int:
        """The tag of the first `depth` tokens, of which every row of KV must agree."""
        tag = 0
        for token, written in self.kv[pages].flatten(0, 1)[:depth].tolist():
            tag = mix(tag, token)
            assert written == tag, f"pages {pages} do not hold the KV of one prefix of {depth} tokens"
        return tag
