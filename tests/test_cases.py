"""Faults that other prefix caches had in the field, where tensors, formats or the front are concerned.

Each test names the behaviour; the comment above it, the public threads that reported the fault. CASES.md
lists all of them.
"""

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from radixstate import (
    ActivePool,
    CheckpointPool,
    ConvSpec,
    PrefixCache,
    Sequence,
    Skipped,
    StateSpec,
    Stored,
    Transfer,
    budget,
)
from radixstate._native import CodecPlan

CONV = (ConvSpec((5, 3), "bfloat16"), ConvSpec((7,), "float32"))
SPEC = StateSpec(layers=2, heads=2, d_k=4, d_v=6, dtype="float32", layout="v_last", conv=CONV)
PROMPT = list(range(20))
every_format = pytest.mark.parametrize("format", ["native", "bf16", "int8"])
Pool = ActivePool | CheckpointPool


def make(**changes: Any) -> PrefixCache:
    sizes = {"active_slots": 3, "checkpoint_slots": 4, "kv_pages": 32, "page_size": 4, "checkpoint_stride": 8}
    return PrefixCache(SPEC, **(sizes | changes))


def components(pool: Pool, slot: int) -> list[torch.Tensor]:
    """Views (layers, ...) of everything a row holds, the padding sink's row 0 too."""
    return [rows.row(slot) for rows in pool.rows.values()]


def snapshot(pool: Pool, slot: int) -> list[torch.Tensor]:
    return [part.clone() for part in components(pool, slot)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(found, expected, strict=True))


def fill(pool: Pool, slot: int, owner: float) -> None:
    for part in components(pool, slot):
        part.fill_(owner if part.is_floating_point() else 127)


def advance(cache: PrefixCache, seq: Sequence, tokens: list[int]) -> None:
    """Stands for the model: a recurrence that forgets, each element of each component in its own way."""
    for part in components(cache.active, seq.slot):
        ramp = torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape).to(part.dtype)
        for token in tokens:
            part.mul_(0.5).add_(ramp * (1 + token % 7))


def serve(cache: PrefixCache, prompt: list[int], *depths: int) -> list[torch.Tensor]:
    """A whole request, which caches its state at `depths`; what its slot held at the end."""
    with cache.start(prompt) as seq:
        at = seq.reused
        for depth in (*depths, len(prompt)):
            advance(cache, seq, prompt[at:depth])
            at = depth
            if depth in depths:
                assert isinstance(seq.checkpoint(depth), Stored)
        return snapshot(cache.active, seq.slot)


# --- ownership and memory ---


# ml-explore/mlx-lm #1077
@every_format
def test_a_checkpoint_of_a_view_keeps_nothing_of_what_it_was_a_view_of(format: str) -> None:
    spec = StateSpec(layers=2, heads=2, d_k=4, d_v=6, dtype="float32", layout="v_last")
    buffer = np.ones((2, 3000, 2, 4, 6), np.float32)
    alive = weakref.ref(buffer)
    active = ActivePool.bind(spec, state=torch.from_numpy(buffer)[:, ::1000])
    checkpoints = CheckpointPool(spec, 2, format=format)
    assert Transfer(active, checkpoints).store([(1, 1), (2, 2)]) == [True, True]
    del active, buffer
    gc.collect()
    assert alive() is None
    assert checkpoints.nbytes == 3 * spec.slot_bytes(format)


# sgl-project/sglang #17404, #38997; lightseekorg/tokenspeed #700; NVIDIA/TensorRT-LLM #13179, #13151
@every_format
def test_padding_rows_are_nobodys_and_stay_as_they_are(format: str) -> None:
    cache = make(format=format)
    for pool in (cache.active, cache.checkpoints):
        fill(pool, 0, 77)
    before = [snapshot(pool, 0) for pool in (cache.active, cache.checkpoints)]
    running = [cache.start([token, *PROMPT]) for token in (30, 31, 32)]
    assert sorted(seq.slot for seq in running) == [1, 2, 3]
    stored = [seq.checkpoint(16) for seq in running]
    assert 0 not in [it.slot for it in stored]
    for seq in running:
        seq.finish()
    for token in (30, 31, 32):
        serve(cache, [token, *PROMPT])
    assert all(map(same, [snapshot(pool, 0) for pool in (cache.active, cache.checkpoints)], before))


# pie #354; ik_llama.cpp #1932, #2260
def test_a_fork_is_a_checkpoint_and_two_starts_and_each_branch_equals_a_cold_run() -> None:
    cold = [serve(make(format="native"), [*PROMPT[:16], *branch]) for branch in ([50, 51], [60, 61, 62])]
    cache = make(format="native")
    serve(cache, PROMPT, 16)
    one, two = cache.start([*PROMPT[:16], 50, 51]), cache.start([*PROMPT[:16], 60, 61, 62])
    assert (one.reused, two.reused, one.slot != two.slot) == (16, 16, True)
    assert one.pages[:4] == two.pages[:4]
    for seq, tokens in ((one, [50]), (two, [60, 61]), (one, [51]), (two, [62])):
        advance(cache, seq, tokens)
    assert [
        same(snapshot(cache.active, seq.slot), run) for seq, run in zip((one, two), cold, strict=True)
    ] == [True] * 2


# FreeToken #287
@every_format
def test_later_writes_to_a_running_state_do_not_reach_its_checkpoint(format: str) -> None:
    cache = make(format=format)
    with cache.start(PROMPT) as seq:
        advance(cache, seq, PROMPT[:16])
        slot = seq.checkpoint(16).slot
        before = snapshot(cache.checkpoints, slot)
        fill(cache.active, seq.slot, 9)
    assert same(snapshot(cache.checkpoints, slot), before)


# --- unwritten states ---


# sgl-project/sglang #31474, #30862, #30243
@every_format
def test_a_further_slot_that_no_kernel_wrote_is_not_cached(format: str) -> None:
    cache = make(format=format)
    serve(cache, [40, *PROMPT])
    with cache.start(PROMPT) as seq:
        spare = seq.take_slot()
        assert seq.checkpoint(8, source=spare) == Skipped("non_finite")
        fill(cache.active, spare, 2)
        assert isinstance(seq.checkpoint(8, source=spare), Stored)
    assert cache.lookup(PROMPT).length == 8


def poison_free_rows(cache: PrefixCache, stored: list[Stored]) -> None:
    for slot in (1, 2, 3):
        fill(cache.active, slot, torch.nan)
    for slot in {1, 2, 3, 4} - {it.slot for it in stored}:
        fill(cache.checkpoints, slot, torch.nan)


# vllm-project/vllm #35219, #56524; ggml-org/llama.cpp #29092; vllm-project/tpu-inference #3412
@every_format
def test_nothing_of_a_previous_owner_reaches_the_next(format: str) -> None:
    cache, clean = make(format=format), make(format=format)
    stored: list[Stored] = []
    for turn in range(12):
        prompt = [100 + turn % 3, *PROMPT]
        poison_free_rows(cache, stored)
        found = [serve(it, prompt) for it in (cache, clean)]
        assert same(*found), f"turn {turn}"
        assert all(part.isfinite().all() for part in found[0])
        for it in (cache, clean):
            with it.start(prompt, no_read=True) as seq:
                advance(it, seq, prompt[:16])
                outcome = seq.checkpoint(16)
            if it is cache and isinstance(outcome, Stored):
                stored.append(outcome)
    assert cache.stats().hits == 9, "all but the first turn of each prompt"


# --- every component of a state ---


# sgl-project/sglang #38619, #39862, #39830; vmlx-swift #465
@pytest.mark.parametrize("format", ["native", "bf16"])
def test_a_hit_brings_back_every_component_of_the_slot(format: str) -> None:
    cache = make(format=format)
    with cache.start(PROMPT) as seq:
        for number, part in enumerate(components(cache.active, seq.slot)):
            part.copy_(torch.arange(part.numel()).reshape(part.shape) % 100 + 1 + number)
        before, slot = snapshot(cache.active, seq.slot), seq.slot
        seq.checkpoint(16)
    fill(cache.active, slot, 0)
    with cache.start(PROMPT) as seq:
        after = snapshot(cache.active, seq.slot)
    assert len(after) == 1 + len(CONV)
    assert [a.equal(b) for a, b in zip(after, before, strict=True)] == [True] * len(after)


# sgl-project/sglang #22493, #35957
def test_a_request_retracted_while_it_decodes_resumes_as_if_it_never_stopped() -> None:
    prompt, answer = PROMPT[:13], [3, 1, 4]
    straight = serve(make(format="native"), [*prompt, *answer, 1, 5])
    cache = make(format="native", active_slots=1)
    seq = cache.start(prompt, reserve=16)
    advance(cache, seq, prompt)
    seq.append(answer)
    advance(cache, seq, answer)
    assert isinstance(seq.checkpoint(), Stored)
    tokens = seq.tokens
    seq.abort()
    serve(cache, [70, 71, 72])
    with cache.start([*tokens, 1, 5]) as again:
        assert again.reused == 16
        advance(cache, again, [1, 5])
        assert same(snapshot(cache.active, again.slot), straight)


# sgl-project/sglang #37584, #22493
def test_an_unknown_option_is_an_error_at_every_call() -> None:
    cache = make()
    calls = (cache.lookup, cache.start, cache.evict, cache.step, cache._native.lookup, cache._native.start)
    for call in calls:
        with pytest.raises(TypeError, match="priority"):
            call(PROMPT, priority=1)


# --- plans ---


# sgl-project/sglang #20858, #18786, #19169, #28185; Ascend/sglang #428
@every_format
def test_one_plan_is_what_is_allocated_and_what_is_handed_out(format: str) -> None:
    plan = budget.plan(SPEC, active_slots=3, format=format)
    explicit = make(checkpoint_slots=plan.checkpoint_slots, format=format)
    for cache in (make(checkpoint_slots=None, format=format), explicit):
        assert (cache.active.nbytes, cache.checkpoints.nbytes) == (plan.active_bytes, plan.checkpoint_bytes)
        assert (cache.active.slots, cache.checkpoints.slots) == (plan.active_slots, plan.checkpoint_slots)
        capacities = [cache.usage(pool).capacity for pool in ("active", "checkpoint")]
        assert capacities == [plan.active_slots, plan.checkpoint_slots]


# sgl-project/sglang #28185
@pytest.mark.parametrize("total", [20_000, 50_000, 123_457])
def test_pools_planned_for_so_many_bytes_fit_into_them(total: int) -> None:
    plan = budget.plan(SPEC, active_slots=3, page_bytes=1_000, total_bytes=total)
    cache = make(active_slots=plan.active_slots, checkpoint_slots=plan.checkpoint_slots)
    pages = (plan.kv_pages + 1) * 1_000
    allocated = cache.active.nbytes + cache.checkpoints.nbytes + pages
    assert total - 1_000 < allocated <= total


# --- numbers ---


# vllm-project/vllm #55196, #52962
@every_format
def test_storing_leaves_the_running_state_bit_for_bit(format: str) -> None:
    cache = make(format=format)
    with cache.start(PROMPT) as seq:
        advance(cache, seq, PROMPT[:16])
        before = snapshot(cache.active, seq.slot)
        for depth in (8, 16):
            seq.checkpoint(depth)
        assert same(snapshot(cache.active, seq.slot), before), "only idle checkpoints are rounded"


def turns_through_int8(turns: int, *, forget: float) -> float:
    """Relative error of a state that a conversation takes through int8 at every turn."""
    active, checkpoints = ActivePool(SPEC, 1), CheckpointPool(SPEC, 1)
    transfer = Transfer(active, checkpoints)
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros_like(active.state(1))
    for _ in range(turns):
        news = torch.randn(exact.shape, generator=generator)
        exact.mul_(forget).add_(news)
        active.state(1).mul_(forget).add_(news)
        assert transfer.store([(1, 1)]) == [True]
        transfer.load([(1, 1)])
    return ((active.state(1) - exact).norm() / exact.norm()).item()


# lattice #484; omlx #2644
@pytest.mark.parametrize("forget", [0.0, 0.5, 0.9])
def test_fifty_turns_through_int8_err_no_more_than_a_recurrence_that_forgets_lets_them(forget: float) -> None:
    once, fifty = turns_through_int8(1, forget=forget), turns_through_int8(50, forget=forget)
    independent = (1 / (1 - forget**2)) ** 0.5
    assert fifty < 2 * once * independent, f"{once:.4f} after a turn, {fifty:.4f} after fifty"


# lattice #484
def test_a_state_that_is_only_stored_and_loaded_again_settles_after_the_first_time() -> None:
    active, checkpoints = ActivePool(SPEC, 1), CheckpointPool(SPEC, 1)
    active.state(1).copy_(torch.randn(active.state(1).shape, generator=torch.Generator().manual_seed(1)))
    transfer = Transfer(active, checkpoints)
    seen = []
    for _ in range(50):
        transfer.store([(1, 1)])
        transfer.load([(1, 1)])
        seen.append(snapshot(active, 1))
    assert all(same(state, seen[0]) for state in seen)


# sgl-project/sglang #28185
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("amplitude", [0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1.0])
def test_int8_errs_by_half_a_step_at_any_amplitude(dtype: str, amplitude: float) -> None:
    spec = StateSpec(layers=1, heads=2, d_k=3, d_v=50, dtype=dtype, layout="k_last")
    active, checkpoints = ActivePool(spec, 1), CheckpointPool(spec, 1)
    generator = torch.Generator().manual_seed(2)
    active.state(1).copy_(amplitude * (2 * torch.rand(active.state(1).shape, generator=generator) - 1))
    before = active.state(1).double()
    transfer = Transfer(active, checkpoints)
    assert transfer.store([(1, 1)]) == [True]
    transfer.load([(1, 1)])
    after = active.state(1).double()
    step = before.abs().amax(dim=-2, keepdim=True).clamp(min=1e-8) / 127
    # The scale, the state's type and the two roundings to it add to the half step.
    spacing = (
        torch.finfo(active.state(1).dtype).eps * before.abs()
        + torch.finfo(active.state(1).dtype).smallest_normal
    )
    assert ((after - before).abs() <= 0.51 * step + 2 * spacing).all()
    assert amplitude or after.eq(0).all()


# sgl-project/sglang #28185
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_keeps_its_state_out_and_is_counted(bad: float) -> None:
    cache = make()
    with cache.start(PROMPT) as seq:
        advance(cache, seq, PROMPT[:16])
        cache.active.state(seq.slot)[1, 1, 3, 5] = bad
        assert seq.checkpoint(16) == Skipped("non_finite")
    assert (
        cache.stats().skipped.non_finite,
        cache.lookup(PROMPT).kv_length,
        cache.usage("checkpoint").free,
    ) == (1, 0, 4)


# flashinfer-ai/flashinfer #3230; sgl-project/sglang #31934; FlagGems #6083
@every_format
def test_the_last_slot_of_pools_beyond_32_bits_comes_back(format: str) -> None:
    rows, side = 2**31 // 2**20 + 2, 2**10
    kept = torch.int8 if format == "int8" else torch.bfloat16
    active = torch.empty(1, rows, 1, side, side, dtype=torch.bfloat16)  # touched in the last row alone
    checkpoint = torch.empty(1, rows, 1, side, side, dtype=kept)
    scale = torch.empty(1, rows, 1, side, dtype=torch.bfloat16) if format == "int8" else None
    assert checkpoint[:, :-1].numel() > 2**31
    plan = CodecPlan(active=active, checkpoint=checkpoint, scale=scale, layout="k_last", format=format)
    last = active[0, -1, 0]
    last.copy_(torch.arange(side).expand(side, side) % 3 * 127)
    before = last.clone()
    assert plan.store([(rows - 1, rows - 1)]) == [True]
    last.fill_(torch.nan)
    plan.load([(rows - 1, rows - 1)])
    assert last.equal(before)


# --- ranks ---


def one_rank(cache: PrefixCache) -> int:
    for turn in range(30):
        serve(cache, [turn % 5, *PROMPT[: 9 + turn % 8]])
        with cache.step(), cache.start([turn % 7, *PROMPT]) as seq:
            seq.checkpoint(8)
    return cache.digest()


def test_ranks_agree_until_one_call_differs() -> None:
    one, two = make(checkpoint_slots=3), make(checkpoint_slots=3)
    assert one_rank(one) == one_rank(two) != make().digest()
    two.start([99]).finish()
    assert one.digest() != two.digest()


def cyclic(seq: Sequence) -> list[object]:
    """Something that only the garbage collector ends."""
    cycle: list[object] = [seq]
    cycle.append(cycle)
    return cycle


def test_the_digest_does_not_depend_on_where_and_in_what_order_sequences_are_dropped() -> None:
    def run(order: list[int]) -> int:
        cache = make()
        running = [cyclic(cache.start([token, *PROMPT[:4]])) for token in (1, 2, 3)]
        for n in order:
            running[n] = []
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
        serve(cache, PROMPT, 16)
        return cache.digest()

    assert run([0, 1, 2]) == run([2, 0, 1]) == run([1, 2, 0])


RANK = """
from radixstate import _native
cache = _native.Cache(page_size=4, checkpoint_stride=8, kv_pages=16, active_slots=2, checkpoint_slots=2)
for turn in range(50):
    namespace = _native.Namespace(turn % 2, tenant=f"tenant {turn % 3}")
    started = cache.start([turn % 5, *range(20)], namespace)
    cache.loaded(started.sequence)
    pending = cache.reserve_checkpoint(started.sequence, 16, started.slot)
    if not isinstance(pending, _native.Skipped):
        cache.commit(started.sequence, pending)
    cache.finish(started.sequence)
print(cache.digest())
"""


def digests(seeds: list[str]) -> Iterator[str]:
    for seed in seeds:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        yield subprocess.run(
            [sys.executable, "-c", RANK], env=environment, check=True, capture_output=True
        ).stdout


# LMCache/LMCache #1139, #2136, #2979; vllm-project/vllm #51875
def test_processes_agree_whatever_their_hash_seeds() -> None:
    assert len(set(digests(["0", "1", "random"]))) == 1


# --- the list ---

ROOT = Path(__file__).parent.parent


def test_the_list_has_every_case_and_every_test_it_names_exists() -> None:
    rows = [
        line.split(" | ")
        for line in (ROOT / "tests/CASES.md").read_text().splitlines()
        if line.startswith("| C")
    ]
    assert [row[0] for row in rows] == [f"| C{n:02}" for n in range(1, 100)]
    for *_, here in rows:
        assert here.startswith(("test `", "impossible: ", "out of scope")), here
    named = {name for *_, here in rows for name in re.findall(r"`([a-z_]+(?:\.py)?::[\w:]+)`", here)}
    assert len(named) > 90
    assert not [name for name in sorted(named) if not is_defined(name)]


def is_defined(test: str) -> bool:
    """Whether the file that a test's name begins with defines it."""
    *where, name = test.split("::")
    core = ROOT / "rust/core"
    if where[0].endswith(".py"):
        source = ROOT / "tests" / where[0]
    elif where[-1] == "tests":
        # In a file of their own, or at the end of what they test.
        apart = core / "src" / where[0] / "tests.rs"
        source = apart if apart.exists() else core / "src" / f"{where[0]}.rs"
    else:
        source = core / "tests" / where[0] / f"{(where[1:] or ['main'])[0]}.rs"
    return source.exists() and re.search(rf"\b(fn|def) {name}\(", source.read_text()) is not None
