"""The launch path of the CUDA codec, from a whole cache down, with a CPU in the place of the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import CpuDevice, Launch
from kernel_cases import Case, Pools, cpu_codec, cuda_codec
from radixstate import (
    ActivePool,
    CheckpointPool,
    ConvSpec,
    PrefixCache,
    StateSpec,
    Stored,
    Transfer,
    cuda,
    transfer,
)
from radixstate.cuda import CupyDevice, specialise
from radixstate.cuda.specialise import CHANGING, Program, arguments_type
from radixstate.errors import MisuseError, SlotError, TensorError
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SPEC = StateSpec(
    layers=2,
    heads=3,
    d_k=16,
    d_v=24,
    dtype="bfloat16",
    layout="v_last",
    conv=(ConvSpec((10, 3), "bfloat16"),),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    """Makes the codec of every pair of pools the CUDA one."""
    device = CpuDevice()
    monkeypatch.setattr(transfer, "codec", lambda active, kept: cuda.describe(active, kept, device))
    return device


def fill(pool: ActivePool, slot: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    pool.state(slot).copy_(torch.randn(pool.state(slot).shape, generator=random))
    pool.conv(0, slot).copy_(torch.randn(pool.conv(0, slot).shape, generator=random))


@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
def test_a_store_is_one_launch_of_one_struct(device: CpuDevice, format: Any) -> None:
    active, kept = ActivePool(SPEC, 8), CheckpointPool(SPEC, 8, format=format)
    Transfer(active, kept).store([(1, 8), (2, 7), (3, 6)])
    (launch,) = device.launches
    assert launch.arguments.shape == (1,)
    assert launch.arguments.nbytes == launch.program["ARGUMENT_BYTES"] <= 4096
    assert launch.threads % 32 == 0
    blocks_of_a_pair = int(launch.arguments["units"][0])
    assert launch.grid == (3 * blocks_of_a_pair, SPEC.layers)
    assert blocks_of_a_pair == SPEC.heads * launch.program["CHUNKS"] + 1


def test_a_launch_describes_nothing_anew_but_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    struct, device, (active, kept) = arguments_type(1), CpuDevice(), filled_pools(3)
    at = [struct.fields[name][1] for name in ("pairs", "pair_count", "source_slots")]
    assert at == [0, 8, CHANGING.size]
    codec = cuda.describe(active, kept, device)

    def refuse(*_: Any) -> None:
        raise AssertionError("described anew")

    for owner, name in ((cuda.codec, "arguments_type"), (specialise, "window_blocks"), (np, "zeros")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(Program, "__getitem__", refuse)
    tables = [torch.tensor([[pair], [pair], [0]], dtype=torch.int32) for pair in (1, 2)]
    with device.capture() as launches:
        for table in tables:
            codec.enqueue_store(table)
            codec.enqueue_load(table)
    # Those of an earlier launch stay as they were: a device may read them later.
    found = [(launch.direction, int(launch.arguments["pairs"][0])) for launch in launches]
    assert found == [(way, table.data_ptr()) for table in tables for way in ("store", "load")]


def test_storing_nothing_launches_and_copies_nothing(device: CpuDevice) -> None:
    moves = Transfer(ActivePool(SPEC, 2), CheckpointPool(SPEC, 2))
    assert list(moves.store([])) == []
    moves.load([])
    assert (device.launches, device.copies) == ([], 0)


def test_pools_of_one_spec_share_a_program(device: CpuDevice) -> None:
    for slots in (2, 5):
        Transfer(ActivePool(SPEC, slots), CheckpointPool(SPEC, slots)).store([(1, 2)])
    assert len({launch.program for launch in device.launches}) == 1


def test_a_verdict_is_read_when_it_is_asked_for(device: CpuDevice) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill(active, 1, seed=1)
    fill(active, 2, seed=2)
    active.state(2)[1, 2, 3, 4] = torch.inf
    verdicts = Transfer(active, kept).store([(1, 1), (2, 2)])
    assert len(verdicts) == 2
    assert device.waits == 0
    assert list(verdicts) == [True, False]
    assert list(verdicts) == [True, False]
    assert device.waits == 1


@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
def test_the_pools_hold_what_the_cpu_codec_stores(monkeypatch: pytest.MonkeyPatch, format: Any) -> None:
    kept = []
    for on_cuda in (False, True):
        active, checkpoints = ActivePool(SPEC, 4), CheckpointPool(SPEC, 4, format=format)
        for slot in range(1, 5):
            fill(active, slot, seed=slot)
        if on_cuda:
            device = CpuDevice()
            monkeypatch.setattr(
                transfer, "codec", lambda active, kept, device=device: cuda.describe(active, kept, device)
            )
        moves = Transfer(active, checkpoints)
        assert list(moves.store([(4, 1), (2, 3)])) == [True, True]
        moves.load([(1, 2), (3, 1)])
        kept.append((active, checkpoints))
    (active, checkpoints), (cuda_active, cuda_checkpoints) = kept
    for slot in range(1, 5):
        assert torch.equal(active.state(slot), cuda_active.state(slot))
        assert torch.equal(active.conv(0, slot), cuda_active.conv(0, slot))
        assert torch.equal(checkpoints.state(slot), cuda_checkpoints.state(slot))


@pytest.mark.parametrize(
    "pairs", [[(1, 0)], [(0, 1)], [(1, 5)], [(5, 1)], [(1, 2), (3, 2)], [(2, 2), (2, 3), (1, 2)]]
)
@pytest.mark.parametrize("direction", ["store", "load"])
def test_pairs_are_refused_in_the_words_of_the_cpu_codec(
    pairs: list[tuple[int, int]], direction: str
) -> None:
    case, device, messages = Case(slots=4), CpuDevice(), []
    for make in (cuda_codec(device), cpu_codec):
        pools = Pools(case, "cpu")
        with pytest.raises(SlotError) as error:
            getattr(make(pools, pools.active, []), direction)(pairs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert device.launches == []


class NoOperations(TorchDispatchMode):
    """Torch may not do anything: neither allocate nor copy."""

    def __torch_dispatch__(self, operation: Any, *_: Any) -> None:
        raise AssertionError(f"{operation} was called")


def filled_pools(slots: int) -> tuple[ActivePool, CheckpointPool]:
    active, kept = ActivePool(SPEC, slots), CheckpointPool(SPEC, slots)
    for slot in range(1, slots + 1):
        fill(active, slot, seed=slot)
    return active, kept


def test_a_captured_batch_only_launches_and_replays_with_new_slots() -> None:
    device, (active, kept) = CpuDevice(), filled_pools(6)
    moves = cuda.describe(active, kept, device)
    there, back = moves.batch("store", 3), moves.batch("load", 3)
    with device.capture() as graph, NoOperations():
        there.enqueue()
        back.enqueue()
    assert device.launches == []
    for pairs in ([(1, 4), (2, 5)], [(3, 1)], [(1, 2), (2, 3), (3, 6)]):
        there.fill(pairs)
        back.fill([(stored, 7 - source) for source, stored in pairs])
        device.replay(graph)
        assert list(there.verdicts()) == [True] * len(pairs)
    moves.load([(2, 1), (3, 2), (6, 3)])
    for slot in (1, 2, 3):
        assert torch.equal(active.state(slot), active.state(7 - slot))
    assert torch.equal(kept.state(4), kept.state(2))


def test_a_batch_that_was_filled_anew_moves_no_earlier_pair() -> None:
    device, (active, kept) = CpuDevice(), filled_pools(3)
    batch = cuda.describe(active, kept, device).batch("store", 3)
    batch.fill([(1, 1), (2, 2), (3, 3)])
    batch.fill([(3, 1)])
    batch.enqueue()
    assert list(batch.verdicts()) == [True]
    assert not kept.state(2).any()
    active.state(1)[0, 0, 0, 0] = torch.nan
    batch.fill([(1, 2), (2, 3)])
    batch.enqueue()
    assert list(batch.verdicts()) == [False, True]
    batch.fill([(2, 2)])
    batch.enqueue()
    assert list(batch.verdicts()) == [True]


def test_a_batch_starts_the_blocks_of_its_capacity_and_says_how_many() -> None:
    device, (active, kept) = CpuDevice(), filled_pools(3)
    batch = cuda.describe(active, kept, device).batch("store", 5)
    batch.fill([(1, 1)])
    batch.enqueue()
    columns, rows = device.launches[0].grid
    assert columns * rows == 5 * batch.blocks_of_pair
    assert batch.blocks_of_pair == SPEC.layers * (SPEC.heads + 1)
    assert list(batch.verdicts()) == [True]
    assert not kept.state(2).any()


def test_a_batch_refuses_what_a_store_refuses_and_stays_as_it_was() -> None:
    device, (active, kept) = CpuDevice(), filled_pools(3)
    batch = cuda.describe(active, kept, device).batch("store", 2)
    batch.fill([(1, 3)])
    for pairs, message in [
        ([(1, 2), (3, 2)], "distinct"),
        ([(4, 1)], "not in the active pool"),
        ([(1, 1), (2, 2), (3, 3)], "room for 2 pairs, got 3"),
    ]:
        with pytest.raises(SlotError, match=message):
            batch.fill(pairs)
    batch.enqueue()
    assert list(batch.verdicts()) == [True]
    assert kept.state(3).any()


def test_what_copies_or_waits_is_refused_while_a_graph_is_captured() -> None:
    device, (active, kept) = CpuDevice(), filled_pools(3)
    moves = cuda.describe(active, kept, device)
    batch = moves.batch("store", 1)
    refused = [
        lambda: moves.store([(1, 1)]),
        lambda: moves.load([(1, 1)]),
        lambda: moves.batch("load", 1),
        lambda: cuda.describe(active, kept, device),
        lambda: batch.fill([(1, 1)]),
        batch.verdicts,
    ]
    with device.capture() as graph:
        for call in refused:
            with pytest.raises(MisuseError, match="captured"):
                call()
    assert graph == []


def test_a_slot_that_is_no_whole_number_is_refused() -> None:
    pools = Pools(Case(), "cpu")
    with pytest.raises(TypeError, match="integer"):
        cuda_codec(CpuDevice())(pools, pools.active, []).store([(1.5, 1)])


@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int32).T,
    ],
    ids=["type", "rows", "axes", "strides"],
)
def test_a_table_of_slots_must_be_what_the_kernel_reads(slots: torch.Tensor) -> None:
    pools = Pools(Case(), "cpu")
    with pytest.raises(TensorError, match="int32"):
        cuda_codec(CpuDevice())(pools, pools.active, []).enqueue_store(slots)


def test_more_windows_than_arguments_hold_are_refused() -> None:
    pools = Pools(Case(conv=((2,),) * 33), "cpu")
    with pytest.raises(TensorError, match="at most 32 conv windows"):
        cuda_codec(CpuDevice())(pools, pools.active, [a for a, _, _ in pools.windows])


def test_slots_on_another_device_are_refused() -> None:
    pools = Pools(Case(), "cpu")
    slots = torch.zeros(3, 2, dtype=torch.int32, device="meta")
    with pytest.raises(TensorError, match="on cpu with the pools, got meta"):
        cuda_codec(CpuDevice())(pools, pools.active, []).enqueue_store(slots)


def test_more_layers_than_a_grid_has_rows_are_refused() -> None:
    pools = Pools(Case(d_k=1, d_v=1, heads=1), "cpu")
    pools.active.rows = type(pools.active.rows)(pools.active.rows.layers * 32768, None)
    with pytest.raises(TensorError, match="at most 65535 layers, got 65536"):
        cuda_codec(CpuDevice())(pools, pools.active, [])


def test_elements_that_share_an_address_are_refused() -> None:
    spec = StateSpec(layers=2, heads=1, d_k=4, d_v=4, dtype="bfloat16", layout="k_last")
    slots = torch.zeros(2, 1, 1, 4, 4, dtype=torch.bfloat16).expand(2, 3, 1, 4, 4)
    twice = [torch.zeros(3, 1, 4, 4, dtype=torch.bfloat16)] * 2
    for state, message in [
        (slots, "a stride of 0 bytes is less than the "),
        (twice, "overlaps layer 1 of the active"),
    ]:
        with pytest.raises(TensorError, match=message):
            cuda.describe(ActivePool.bind(spec, state=state), CheckpointPool(spec, 2), CpuDevice())


def test_rows_that_are_not_contiguous_are_refused() -> None:
    pools = Pools(Case(d_k=8, d_v=8), "cpu")
    transposed = [layer.transpose(2, 3) for layer in pools.active.rows.layers]
    pools.active.rows = type(pools.active.rows)(tuple(transposed), None)
    with pytest.raises(TensorError, match="contiguous"):
        cuda_codec(CpuDevice())(pools, pools.active, [])


def test_pools_that_are_not_on_cuda_or_differ_have_no_cuda_codec() -> None:
    with pytest.raises(TensorError, match="must be on cuda, they are on cpu"):
        cuda.build(ActivePool(SPEC, 2), CheckpointPool(SPEC, 2))
    with pytest.raises(TensorError, match="the active pool holds"):
        cuda.build(ActivePool(SPEC, 2), CheckpointPool(replace(SPEC, heads=4), 2))


def test_importing_the_package_needs_no_cupy() -> None:
    code = "import sys; sys.modules['cupy'] = None; import radixstate, radixstate.cuda"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_cupy_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match=r"radixstate\[cuda12\] or radixstate\[cuda13\]"):
        CupyDevice(0)


class FakeCupy:
    """The few calls of CuPy that are used, noted in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        stream = SimpleNamespace(from_external=lambda it: self._entered("stream", *it.__cuda_stream__()))
        self.cuda = SimpleNamespace(Device=lambda index: self._entered("device", index), Stream=stream)

    @contextmanager
    def _entered(self, *what: Any) -> Iterator[None]:
        self.calls.append(what)
        yield
        self.calls.append(("left", what[0]))

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802
        self.calls.append(("module", "#include" in code, options))
        return SimpleNamespace(get_function=self._kernel)

    def _kernel(self, name: str) -> Any:
        fake = self

        class Kernel:
            def compile(self) -> None:
                fake.calls.append(("compile", name))

            @property
            def num_regs(self) -> int:
                fake.calls.append(("load", name))
                return 64

            def __call__(self, *arguments: Any) -> None:
                fake.calls.append((name, *arguments))

        return Kernel()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy, and the few functions of `torch.cuda` that are used, on a machine with neither."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda device: fake._entered("torch", device.index))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.calls.append(("wait", device.index)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def a_launch() -> Launch:
    device, pools = CpuDevice(), Pools(Case(), "cpu")
    cuda_codec(device)(pools, pools.active, []).store([(1, 1)])
    return device.launches[0]


def test_cupy_compiles_a_program_once_and_loads_its_kernels_on_their_device(fake_cuda: FakeCupy) -> None:
    program, device = a_launch().program, CupyDevice(3)
    device.prepare(program)
    inside = [(what, f"int8_{name}") for name in ("store", "load") for what in ("compile", "load")]
    assert fake_cuda.calls == [
        ("torch", 3),
        ("module", False, program.options),
        ("device", 3),
        *inside,
        ("left", "device"),
        ("wait", 3),
        ("left", "torch"),
    ]
    fake_cuda.calls.clear()
    device.prepare(program)
    assert fake_cuda.calls == [("torch", 3), ("wait", 3), ("left", "torch")]


def test_a_launch_goes_to_the_stream_of_torch_and_does_nothing_else(fake_cuda: FakeCupy) -> None:
    launch, device = a_launch(), CupyDevice(3)
    device.prepare(launch.program)
    fake_cuda.calls.clear()
    with NoOperations():
        device.launch(launch.program, "store", launch.grid, launch.threads, launch.arguments)
    assert fake_cuda.calls == [
        ("device", 3),
        ("stream", 0, 77),
        ("int8_store", launch.grid, (launch.threads,), (launch.arguments,)),
        ("left", "stream"),
        ("left", "device"),
    ]


@pytest.mark.usefixtures("fake_cuda")
def test_a_cuda_device_refuses_to_copy_or_compile_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device, words, program = CupyDevice(0), torch.zeros(3, 1, dtype=torch.int32), a_launch().program
    array = words.numpy()
    refused = [
        lambda: device.put(array),
        lambda: device.refill(words, array),
        lambda: device.prepare(program),
        lambda: device.fetch(words),
    ]
    for call in refused:
        with NoOperations(), pytest.raises(MisuseError, match="a graph is being captured"):
            call()


class PinnedElsewhere(TorchFunctionMode):
    """Page-locked memory without a driver, and a device that is another part of the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        options.pop("pin_memory", None)
        if function in (torch.Tensor.pin_memory, torch.Tensor.to):
            return arguments[0].clone()
        return function(*arguments, **options)


@pytest.mark.usefixtures("fake_cuda")
def test_what_is_copied_between_host_and_device_does_not_follow_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    device, words = CupyDevice(0), np.array([1, 2, 3], dtype=np.int32)
    with torch.device("meta"), PinnedElsewhere():
        there = device.put(words)
        device.refill(there, words + 1)
        assert device.fetch(there)() == [2, 3, 4]


def tokens(seed: int, n: int) -> list[int]:
    return torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache() -> PrefixCache:
    return PrefixCache(
        SPEC, active_slots=4, checkpoint_slots=6, kv_pages=40, page_size=4, checkpoint_stride=8
    )


def put(cache: PrefixCache, prompt: list[int], seed: int) -> Any:
    """Runs a prompt whose state is random, and caches it."""
    with cache.start(prompt) as seq:
        fill(cache.active, seq.slot, seed)
        if seed < 0:
            cache.active.state(seq.slot)[0, 0, 0, 0] = torch.nan
        return seq.checkpoint()


def restored(cache: PrefixCache, prompt: list[int]) -> tuple[int, torch.Tensor]:
    """What a start reuses, and the state that its slot then has."""
    with cache.start(prompt) as seq:
        return seq.reused, cache.active.state(seq.slot).clone()


def test_a_cache_on_the_device_gives_what_a_cache_on_the_cpu_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for on_cuda in (False, True):
        device = CpuDevice()
        if on_cuda:
            monkeypatch.setattr(
                transfer, "codec", lambda active, kept, device=device: cuda.describe(active, kept, device)
            )
        cache, found = new_cache(), []
        for seed in range(12):
            prompt = tokens(seed % 5, 8) + tokens(seed, 9 + seed % 3)
            put(cache, prompt[:16], seed)
            reused, state = restored(cache, prompt)
            found.append((reused, state))
            cache.check()
        results.append(found)
        assert bool(device.launches) == on_cuda
    assert [reused for reused, _ in results[0]] == [reused for reused, _ in results[1]]
    for (_, state), (_, same) in zip(*results, strict=True):
        assert torch.equal(state, same)


def test_a_lookup_that_hits_waits_for_the_verdict_and_a_miss_does_not(device: CpuDevice) -> None:
    cache, good, bad = new_cache(), tokens(1, 17), tokens(2, 17)
    put(cache, good[:16], seed=1)
    put(cache, bad[:16], seed=-1)
    assert cache.lookup(tokens(3, 17)).length == 0
    assert device.waits == 0
    assert cache.lookup(bad).length == 0
    assert device.waits == 2
    assert cache.lookup(good).length == 16
    assert cache.stats().skipped.non_finite == 1
    assert device.waits == 2
    cache.check()


def test_a_start_that_would_hit_waits_for_the_verdict(device: CpuDevice) -> None:
    cache, bad = new_cache(), tokens(2, 17)
    put(cache, bad[:16], seed=-1)
    with cache.start(tokens(3, 17)):
        assert device.waits == 0
    with cache.start(bad) as seq:
        assert seq.reused == 0
    assert device.waits == 1
    cache.check()


def test_tokens_that_can_be_read_once_are_enough(device: CpuDevice) -> None:
    cache, prompt = new_cache(), tokens(1, 17)
    put(cache, prompt[:16], seed=1)
    assert cache.lookup(iter(prompt)).length == 16
    assert device.waits == 1


def test_with_steps_verdicts_are_read_when_their_step_retires(device: CpuDevice) -> None:
    cache, good, bad = new_cache(), tokens(1, 17), tokens(2, 17)
    first = cache.begin_step()
    put(cache, good[:16], seed=1)
    second = cache.begin_step()
    put(cache, bad[:16], seed=-1)
    assert cache.lookup(good).reason == "not_ready"
    assert device.waits == 0
    cache.retire_step(first)
    assert device.waits == 1
    assert cache.lookup(good).length == 16
    assert cache.lookup(bad).length == 0
    cache.retire_step(second)
    assert device.waits == 2
    assert cache.lookup(bad).length == 0
    assert cache.stats().skipped.non_finite == 1
    cache.check()


def test_states_nobody_asks_for_make_room_when_it_runs_out(device: CpuDevice) -> None:
    cache = new_cache()
    for seed in range(20):
        assert isinstance(put(cache, tokens(seed, 16), seed), Stored)
    assert 0 < device.waits < 20
    assert cache.usage("checkpoint").free == 0
    cache.check()


# --- settling ---


def test_settling_reads_what_has_run_and_waits_for_nothing(device: CpuDevice) -> None:
    cache = PrefixCache(SPEC, active_slots=2, kv_pages=8, page_size=4, checkpoint_stride=4)
    device.lags = True
    with cache.start(range(9)) as seq:
        fill(cache.active, seq.slot, seed=1)
        assert isinstance(seq.checkpoint(8), Stored)
    cache.settle()
    assert (cache.usage("checkpoint").evictable, device.waits) == (0, 0)
    device.lags = False
    cache.settle()
    assert (cache.usage("checkpoint").evictable, device.waits) == (1, 1)
    cache.settle(wait=True)
    assert device.waits == 1, "it is known"


def test_settling_can_wait_and_leaves_what_a_step_wrote_to_its_end(device: CpuDevice) -> None:
    cache = PrefixCache(SPEC, active_slots=2, kv_pages=16, page_size=4, checkpoint_stride=4)
    device.lags = True
    for first in (0, 100):
        with cache.start(range(first, first + 9)) as seq:
            fill(cache.active, seq.slot, seed=1)
            if first:
                cache.active.state(seq.slot)[0, 0, 0, 0] = torch.nan
            seq.checkpoint(8)
    cache.settle(wait=True)
    assert (cache.usage("checkpoint").evictable, cache.stats().skipped.non_finite) == (1, 1)
    device.lags = False
    with cache.step():
        with cache.start(range(200, 209)) as seq:
            fill(cache.active, seq.slot, seed=1)
            seq.checkpoint(8)
        cache.settle()
        assert cache.usage("checkpoint").evictable == 1
    assert cache.usage("checkpoint").evictable == 2
