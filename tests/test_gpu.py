"""The kernels on a GPU: the cases of the CPU tests, streams, graphs and a whole cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import (
    Case,
    cpu_codec,
    cuda_codec,
    out_of_range_problems,
    reference_problems,
    round_trip,
    scale_problems,
    tie_problems,
)
from radixstate import ActivePool, CheckpointPool, ConvSpec, PrefixCache, StateSpec, Transfer, cuda
from radixstate.errors import MisuseError
from radixstate.states import Format
from test_kernels import CASES, LAYOUTS, TYPES

from benchmarks.gpu import missing

SPEC = StateSpec(layers=4, heads=4, d_k=128, d_v=128, dtype="bfloat16", layout="k_last")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def pools(slots: int, device: str = "cuda") -> tuple[ActivePool, CheckpointPool]:
    """Normal numbers in the active slots, visible to every stream."""
    active, kept = ActivePool(SPEC, slots, device=device), CheckpointPool(SPEC, slots, device=device)
    active.rows["state"].whole.normal_()
    torch.cuda.synchronize(device)
    return active, kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_device_equals_the_cpu_codec(case: Case) -> None:
    codec = cuda_codec(cuda.CupyDevice(0))
    mine = round_trip(case, codec, device="cuda")
    assert mine.differences(round_trip(case, cpu_codec)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_largest_value_of_a_channel_gets_the_right_scale(dtype: torch.dtype) -> None:
    assert scale_problems(cuda.CupyDevice(0), dtype, "cuda") == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_quotients_next_to_a_tie_are_rounded_as_by_true_division(dtype: torch.dtype, seed: int) -> None:
    assert tie_problems(cuda.CupyDevice(0), dtype, seed, "cuda") == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_device_equals_the_torch_reference(dtype: torch.dtype, layout: str) -> None:
    assert reference_problems(cuda.CupyDevice(0), dtype, layout, "cuda") == []


def test_a_slot_out_of_range_moves_nothing_and_says_so() -> None:
    assert out_of_range_problems(cuda.CupyDevice(0), "cuda") == []


@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
def test_groups_of_layers_equal_the_cpu_codec(format: Format) -> None:
    more = (StateSpec.of_windows(layers=3, conv=(ConvSpec((96, 3), "bfloat16"),)),)
    spec = dataclasses.replace(SPEC, more=more)
    both = {
        device: (ActivePool(spec, 3, device=device), CheckpointPool(spec, 3, format=format, device=device))
        for device in ("cpu", "cuda")
    }
    for name, rows in both["cpu"][0].rows.items():
        rows.whole.normal_()
        both["cuda"][0].rows[name].whole.copy_(rows.whole)
    both["cpu"][0].conv(0, 3, group=1)[1].fill_(torch.nan)
    both["cuda"][0].conv(0, 3, group=1)[1].fill_(torch.nan)
    for active, kept in both.values():
        moves = Transfer(active, kept)
        assert list(moves.store([(1, 2), (3, 1)])) == [True, False]
        moves.load([(2, 2)])
    for one, other in zip(both["cpu"], both["cuda"], strict=True):
        for name, rows in one.rows.items():
            mine, theirs = rows.whole[:, 2], other.rows[name].whole[:, 2].cpu()
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), (
                name
            )


def test_a_store_and_a_load_keep_their_place_on_a_stream() -> None:
    active, kept = pools(4)
    transfer = Transfer(active, kept)  # compiles, and waits
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        active.state(1).fill_(3.0)
        verdicts = transfer.store([(1, 1)])
        active.state(1).zero_()
        transfer.load([(1, 2)])
        kept.state(1).zero_()
    assert list(verdicts) == [True]
    stream.synchronize()
    assert float((active.state(2).float() - 3).abs().amax()) < 0.03
    assert not active.state(1).any()


def test_storing_and_loading_do_not_wait_for_the_device() -> None:
    transfer = Transfer(*pools(4))

    def behind_a_pause(cycles: int) -> torch.cuda.Event:
        """An event after a store and a load that cannot begin before the pause is over."""
        torch.cuda._sleep(cycles)
        verdicts = transfer.store([(1, 1)])
        transfer.load([(1, 2)])
        done = torch.cuda.Event()
        done.record()
        assert len(verdicts) == 1
        return done

    # Allocating page-locked memory may wait for the device. After this torch has a block for each copy that is under
    # way at once; on an idle stream the second copy would have taken the block of the first.
    behind_a_pause(100_000_000)
    torch.cuda.synchronize()
    assert not behind_a_pause(2_000_000_000).query()
    torch.cuda.synchronize()


def test_a_store_works_whatever_torchs_default_device_is() -> None:
    active, kept = pools(2)
    with torch.device("cuda"):
        transfer = Transfer(active, kept)
        assert list(transfer.store([(1, 1)])) == [True]
        transfer.load([(1, 2)])
    assert active.state(2).any()


def test_a_captured_batch_replays_with_new_slots() -> None:
    active, kept = pools(6)
    codec = cuda.build(active, kept)
    there, back = codec.batch("store", 4), codec.batch("load", 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.enqueue()
        back.enqueue()
    for pairs in ([(1, 4), (2, 5)], [(3, 1)], [(1, 2), (2, 3), (3, 6)]):
        there.fill(pairs)
        back.fill([(stored, 7 - source) for source, stored in pairs])
        graph.replay()
        assert list(there.verdicts()) == [True] * len(pairs)
    codec.load([(2, 1), (3, 2), (6, 3)])
    for slot in (1, 2, 3):
        assert torch.equal(active.state(slot), active.state(7 - slot))
    assert torch.equal(kept.state(4), kept.state(2))


def test_what_copies_is_refused_in_a_capture_and_leaves_it_whole() -> None:
    active, kept = pools(2)
    codec = cuda.build(active, kept)
    transfer = Transfer(active, kept)
    batch = codec.batch("store", 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.enqueue()
        for refused in (
            lambda: transfer.store([(1, 2)]),
            lambda: codec.load([(1, 2)]),
            lambda: batch.fill([(1, 2)]),
            batch.verdicts,
        ):
            with pytest.raises(MisuseError, match="a graph is being captured"):
                refused()
    batch.fill([(2, 1)])
    graph.replay()
    assert list(batch.verdicts()) == [True]
    assert kept.state(1).any()
    assert not kept.state(2).any()


def test_pools_on_a_second_device_are_moved_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    results = []
    for device in ("cuda:0", "cuda:1"):
        active, kept = pools(2, device)
        active.state(1).copy_(torch.arange(SPEC.d_k, dtype=torch.float32))
        transfer = Transfer(active, kept)
        assert list(transfer.store([(1, 2)])) == [True]
        transfer.load([(2, 2)])
        results.append(active.state(2).cpu())
    assert torch.equal(*results)


def test_a_cache_on_the_device_gives_what_a_cache_on_the_cpu_gives() -> None:
    results = []
    for device in ("cpu", "cuda"):
        cache = PrefixCache(SPEC, active_slots=4, checkpoint_slots=6, device=device)
        found, random = [], torch.Generator().manual_seed(0)
        for seed in range(12):
            prompt = [seed % 3] * 64 + [seed] * 64
            with cache.start(prompt) as seq:
                cache.active.state(seq.slot).copy_(torch.randn(cache.active.state(1).shape, generator=random))
                seq.checkpoint()
            with cache.start([*prompt, 1]) as seq:
                found.append((seq.reused, cache.active.state(seq.slot).clone().cpu()))
            cache.check()
        results.append(found)
    assert [reused for reused, _ in results[0]] == [128] * 12
    for (reused, state), (same_reused, same) in zip(*results, strict=True):
        assert reused == same_reused
        assert torch.equal(state, same)


def test_a_state_that_is_not_finite_is_not_reused() -> None:
    cache = PrefixCache(SPEC, active_slots=2, checkpoint_slots=2, device="cuda")
    prompt = list(range(65))
    with cache.start(prompt[:64]) as seq:
        cache.active.state(seq.slot)[0, 0, 0, 0] = torch.nan
        seq.checkpoint()
    assert cache.lookup(prompt).length == 0
    assert cache.stats().skipped.non_finite == 1


def test_thousands_of_pairs_are_moved_at_once() -> None:
    case = Case(d_k=64, d_v=64, slots=4000, layers=1, heads=1, values="usual")
    mine = round_trip(case, cuda_codec(cuda.CupyDevice(0)), device="cuda")
    assert mine.differences(round_trip(case, cpu_codec)) == []
