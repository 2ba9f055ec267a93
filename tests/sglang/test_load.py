"""Much work at once: an oracle of contents, shortages and storms of retractions. The seeds are the tests' names."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

import torch
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from world import SETTINGS, Setting, World, prompt

REQUESTS = int(os.environ.get("RADIXSTATE_SGLANG_REQUESTS", "10000"))
"""In all three settings together."""


class Contents:
    """What every token's KV holds, by its index, and who wrote it: a hash of the tokens up to there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kv = torch.full((world.capacity + world.page,), -1, dtype=torch.int64)

    @staticmethod
    def _hashes(tokens: list[int]) -> torch.Tensor:
        value, hashes = 17, []
        for token in tokens:
            value = (value * 1_000_003 + token) % (2**61 - 1)
            hashes.append(value)
        return torch.tensor(hashes)

    def computed(self, req: Any, start: int) -> None:
        """A request has written its KV from `start` on; what it reuses must be what its tokens give."""
        end = req.kv.kv_allocated_len
        row, want = self.world.row(req, end).long(), self._hashes(list(req.full_untruncated_fill_ids)[:end])
        self.kv[row[start:]] = want[start:]
        self.require(req)

    def require(self, req: Any) -> None:
        end = req.kv.kv_allocated_len
        row, want = self.world.row(req, end).long(), self._hashes(list(req.full_untruncated_fill_ids)[:end])
        assert torch.equal(self.kv[row], want), f"{req.rid}: the KV of other tokens"


def tokens_of(rng: random.Random, page: int) -> list[int]:
    """Prompts that share stems of a few lengths, in units of 16 tokens or pages."""
    unit = max(16, page)
    length = rng.randrange(1, 5)
    stem = prompt(rng.randrange(6), unit * length)
    return stem[: unit * rng.randrange(1, length + 1)] + prompt(
        100 + rng.randrange(30), unit * rng.randrange(1, 3)
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_random_requests_reuse_what_their_tokens_give(setting: Setting) -> None:
    rng, world = random.Random(11), World(setting, kv=1024)
    contents, hits = Contents(world), 0
    for serial in range(REQUESTS // len(SETTINGS)):
        while len(world.running) > rng.randrange(3 if setting.extra else 4):
            old = rng.choice(world.running)
            contents.require(old)
            (world.finish if rng.random() < 0.8 else world.drop)(old)
        namespace = {"salt": "other"} if rng.random() < 0.1 else {}
        req = world.request(tokens_of(rng, setting.page), **namespace)  # type: ignore[arg-type]
        end = len(req.full_untruncated_fill_ids)
        cut = req.prefix_len + (end - req.prefix_len) // 2 // setting.page * setting.page
        if cut > req.prefix_len and rng.random() < 0.3:
            world.admit(req, cut)
            contents.computed(req, req.prefix_len)
            checkpoint_kv_cache(req, world.cache)
            contents.require(req)
            world.extend(req, end)
            contents.computed(req, cut)
        else:
            world.admit(req)
            contents.computed(req, req.prefix_len)
        assert req.hit_ok in (None, True), f"{req.rid} continues the state of other tokens"
        hits += req.hit_ok is True
        if rng.random() < 0.5:
            checkpoint_kv_cache(req, world.cache)
        for other in world.running:
            contents.require(other)
        if serial % 50 == 0:
            world.audit()
    assert hits > REQUESTS // len(SETTINGS) // 10
    world.end()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_shortage_of_pages_and_states_at_once_ends_nothing(setting: Setting) -> None:
    world = World(setting, kv=768, active=6)
    for turn in range(60):
        req = world.admit(world.request(prompt(turn % 7, 256) + prompt(turn, 64)))
        assert req.hit_ok in (None, True)
        checkpoint_kv_cache(req, world.cache)
        world.audit()
        world.finish(req)
        world.audit()
    assert world.cached(prompt(59 % 7, 256) + prompt(59, 64)) == 320
    world.end()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_requests_that_are_retracted_again_and_again_leave_nothing_and_resume(setting: Setting) -> None:
    world, rng = World(setting), random.Random(3)
    waiting = [prompt(seed % 3, 128) + prompt(10 + seed, 128) for seed in range(12)]
    done = 0
    for _ in range(150):
        while waiting and len(world.running) < 3:
            req = world.admit(world.request(waiting.pop(0)), end=128 if rng.random() < 0.5 else None)
            assert req.hit_ok in (None, True)
            checkpoint_kv_cache(req, world.cache)
        victim = rng.choice(world.running)
        if rng.random() < 0.7:
            waiting.append(list(victim.origin_input_ids))
            world.drop(victim)
        elif victim.kv.kv_allocated_len == 256:
            world.finish(victim)
            done += 1
            waiting.append(prompt(done % 3, 128) + prompt(50 + done, 128))
        world.audit()
    assert done > 5
    world.end()
