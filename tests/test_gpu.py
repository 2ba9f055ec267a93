"""The kernels on a GPU: the cases of the CPU tests, streams, graphs and a whole cache."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from kernel_cases import Case, cpu_codec, cuda_codec, out_of_range_problems, round_trip
from radixstate import ActivePool, CheckpointPool, PrefixCache, StateSpec, cuda
from test_kernels import CASES

SPEC = StateSpec(layers=4, heads=4, d_k=128, d_v=128, dtype="bfloat16", layout="k_last")


def missing() -> str | None:
    """Why these tests cannot run here."""
    if not torch.cuda.is_available():
        return "there is no CUDA device, or torch is built without CUDA"
    if find_spec("cupy") is None:
        return "CuPy is not installed: radixstate[cuda12] or radixstate[cuda13]"
    return None


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def pools(slots: int) -> tuple[ActivePool, CheckpointPool]:
    active = ActivePool(SPEC, slots, device="cuda")
    active.state_rows.whole.normal_()
    return active, CheckpointPool(SPEC, slots, device="cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_device_equals_the_cpu_codec(case: Case) -> None:
    codec = cuda_codec(cuda.CupyDevice(0))
    mine = round_trip(case, codec, device="cuda")
    assert mine.differences(round_trip(case, cpu_codec)) == []


def test_a_slot_out_of_range_moves_nothing_and_says_so() -> None:
    assert out_of_range_problems(cuda.CupyDevice(0), "cuda") == []


def test_a_store_follows_what_its_stream_wrote_before() -> None:
    active, kept = pools(4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        active.state_rows.whole.fill_(3.0)
        verdicts = kept.store(active, [(1, 1)])
        active.state_rows.whole.zero_()
        kept.load(active, [(1, 2)])
    assert list(verdicts) == [True]
    stream.synchronize()
    assert torch.allclose(active.state(2).float(), torch.tensor(3.0), rtol=0.01)


def test_storing_and_loading_do_not_wait_for_the_device() -> None:
    active, kept = pools(4)
    kept.store(active, [(1, 1)])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    kept.store(active, [(1, 1)])
    kept.load(active, [(1, 2)])
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_a_captured_store_and_load_replay_with_new_slots() -> None:
    active, kept = pools(4)
    codec = cuda.build(active, kept)
    there, back = codec.slots([(1, 1)], "store"), codec.slots([(1, 3)], "load")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.enqueue_store(there)
        codec.enqueue_load(back)
    there[:2] = torch.tensor([[2], [4]])
    back[:2] = torch.tensor([[4], [3]])
    graph.replay()
    torch.cuda.synchronize()
    expected = kept.scale(4).float().amax() * 0.51
    assert (active.state(3).float() - active.state(2).float()).abs().amax() <= expected
    assert there[2].tolist() == back[2].tolist() == [0]


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
                found.append((seq.reused, cache.active.state(seq.slot).cpu()))
            cache.check()
        results.append(found)
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
    assert cache.stats().refusals.non_finite == 1


def test_many_pairs_are_one_launch() -> None:
    case = Case(d_k=64, d_v=64, slots=2000, layers=1, heads=1, values="usual")
    codec = cuda_codec(cuda.CupyDevice(0))
    mine = round_trip(case, codec, device="cuda")
    assert mine.differences(round_trip(case, cpu_codec)) == []
