"""Faults of memory, found by attack: storages that move, lengths that lie, limits, threads that cannot start."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import CpuDevice
from native import PROMPT, engine, make
from radixstate import (
    ActivePool,
    CheckpointPool,
    ConvSpec,
    PrefixCache,
    StateSpec,
    _native,
    cuda,
    transfer,
)
from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.states import Rows
from radixstate.transfer import Transfer

SPEC = StateSpec(
    layers=2, heads=1, d_k=4, d_v=4, dtype="float32", layout="k_last", conv=(ConvSpec((3,), "float32"),)
)


def run_alone(code: str, *, address_space: int | None = None) -> None:
    """Runs code in a process of its own, which must end well. What it may add to its memory can be limited."""
    limit = f"""
        import resource, torch
        from radixstate import ActivePool, CheckpointPool, PrefixCache, StateSpec, _native, transfer
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + {address_space},) * 2)
    """
    code = (textwrap.dedent(limit) if address_space else "") + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"


# --- storages that move ---


def share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def send(tensor: torch.Tensor) -> None:
    """What the queue of another process does."""
    ForkingPickler.dumps(tensor[0])


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shrink(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)


def assign(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def point_elsewhere(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros_like(tensor))


MOVES = [share, send, free, shrink, assign, point_elsewhere]
every_move = pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)


def bound_pools(*, listed: bool) -> tuple[ActivePool, CheckpointPool, dict[str, list[torch.Tensor]]]:
    """Two pools over tensors of torch's own, and the tensors by the name that a codec gives them."""

    def tensors(rows: Rows) -> list[torch.Tensor]:
        assert rows.whole is not None
        whole = rows.whole.clone()
        return [layer.clone() for layer in whole] if listed else [whole]

    def given(tensors: list[torch.Tensor]) -> Any:
        return tensors if listed else tensors[0]

    model, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    state, window = tensors(model.rows["state"]), tensors(model.rows["conv.0"])
    stored, scales = tensors(kept.rows["state"]), tensors(kept.rows["scale"])
    active = ActivePool.bind(SPEC, state=given(state), conv=[given(window)])
    for name, each in (("state", stored), ("scale", scales)):
        kept.rows[name] = Rows.bind(name, given(each), SPEC.layers, SPEC.tensors("int8")[name])
    return active, kept, {"active": state, "conv 0": window, "checkpoint": stored, "scale": scales}


@every_move
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("name", ["active", "conv 0", "checkpoint", "scale"])
@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
def test_a_tensor_that_moved_is_named_and_nothing_is_written(
    move: Callable[[torch.Tensor], None], listed: bool, name: str, on_cuda: bool
) -> None:
    active, kept, tensors = bound_pools(listed=listed)
    device = CpuDevice()
    codec: Any = cuda.describe(active, kept, device) if on_cuda else transfer.codec(active, kept)
    codec.store([(1, 1)])
    codec.load([(1, 2)])
    launched, before = len(device.launches), {key: [t.clone() for t in each] for key, each in tensors.items()}
    layer = len(tensors[name]) - 1
    move(tensors[name][layer])
    calls = [
        lambda: codec.store([(1, 3)]),
        lambda: codec.load([(1, 3)]),
        lambda: codec.fill(1, 3),
        lambda: codec.fill(None, 3),
    ]
    for call in calls:
        with pytest.raises(
            TensorError, match=rf"^{name}.*{'layer 1' if listed else ''}: the tensor's memory"
        ):
            call()
    assert len(device.launches) == launched
    for key, each in tensors.items():
        same = [i for i in range(len(each)) if (key, i) != (name, layer)]
        assert all(torch.equal(each[i], before[key][i]) for i in same)


@every_move
def test_a_cache_whose_pool_moved_refuses_and_keeps_no_slot(move: Callable[[torch.Tensor], None]) -> None:
    state = torch.zeros(2, 4, 1, 4, 4)
    active = ActivePool.bind(SPEC, state=state, conv=[torch.zeros(2, 4, 3)])
    cache = PrefixCache(SPEC, active=active, checkpoint_slots=4, page_size=2, checkpoint_stride=4)
    with cache.start(range(9)) as seq:
        seq.checkpoint(8)
    move(state)
    for _ in range(5):
        for prompt in (range(9), range(50, 59)):  # a load, and a clear
            with pytest.raises(TensorError, match=r"(state|active): the tensor's memory"):
                cache.start(prompt)
    assert cache.usage("active").free == 3
    cache.check()


@every_move
@pytest.mark.parametrize("touch", ["clear", "poison", "spend", "state"])
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
@pytest.mark.parametrize("name", ["state", "conv.0"])
def test_operations_of_torch_on_a_slot_are_refused_as_well(
    move: Callable[[torch.Tensor], None], touch: str, inference: bool, name: str
) -> None:
    with torch.inference_mode(inference):
        tensors = {"state": torch.ones(2, 4, 1, 4, 4), "conv.0": torch.ones(2, 4, 3)}
        active = ActivePool.bind(SPEC, state=tensors["state"], conv=[tensors["conv.0"]])
        move(tensors[name])
    with pytest.raises(TensorError, match=rf"^{name}: the tensor's memory is not what it was"):
        getattr(active, touch)(1)
    assert all((tensor == 1).all() for key, tensor in tensors.items() if key != name)


def test_a_pool_may_be_of_tensors_that_were_shared_before() -> None:
    state = torch.ones(2, 4, 1, 4, 4).share_memory_()
    active = ActivePool.bind(SPEC, state=state, conv=[torch.zeros(2, 4, 3).share_memory_()])
    moves = Transfer(active, CheckpointPool(SPEC, 3))
    assert list(moves.store([(1, 1)])) == [True]
    ForkingPickler.dumps(state)
    active.clear(1)
    moves.load([(1, 1)])
    assert (state == 1).all()


def test_an_object_that_moves_a_tensor_while_slots_are_read_is_seen() -> None:
    active, kept, tensors = bound_pools(listed=False)
    codec = transfer.codec(active, kept)

    class Slot:
        def __index__(self) -> int:
            share(tensors["checkpoint"][0])
            return 1

    with pytest.raises(TensorError, match="checkpoint: the tensor's memory"):
        codec.store([(1, Slot())])  # type: ignore[list-item]  # that is the point


def test_a_codec_keeps_the_tensors_of_its_pools_alive() -> None:
    for on_cuda in (False, True):
        active, kept, tensors = bound_pools(listed=True)
        codec: Any = cuda.describe(active, kept, CpuDevice()) if on_cuda else transfer.codec(active, kept)
        address = tensors["checkpoint"][1].data_ptr()
        batch = codec.batch("store", 1) if on_cuda else None
        del active, kept, tensors
        others = [torch.full((4, 1, 4, 4), 77, dtype=torch.int8) for _ in range(100)]
        assert address not in {other.data_ptr() for other in others}
        codec.store([(1, 1)])
        if batch is not None:
            del codec
            batch.fill([(1, 2)])
            batch.enqueue()
            assert list(batch.verdicts()) == [True]
        assert all((other == 77).all() for other in others)


def test_a_captured_batch_is_not_filled_for_pools_that_moved() -> None:
    active, kept, tensors = bound_pools(listed=False)
    batch = cuda.describe(active, kept, CpuDevice()).batch("store", 1)
    share(tensors["active"][0])
    for call in (lambda: batch.fill([(1, 1)]), batch.enqueue):
        with pytest.raises(TensorError, match="active: the tensor's memory"):
            call()


# --- pools that overlap ---


def test_cuda_refuses_the_overlaps_that_the_cpu_refuses_in_the_same_words() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)

    def at(offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        return memory[offset : offset + count].view(dtype).view(shape)

    apart: dict[str, Any] = {
        "active": at(0, torch.float32, 2, 4, 1, 4, 4),
        "checkpoint": at(1024, torch.int8, 2, 4, 1, 4, 4),
        "scale": at(2048, torch.float32, 2, 4, 1, 4),
        "conv": (at(2560, torch.float32, 2, 4, 3), at(3072, torch.float32, 2, 4, 3)),
    }
    overlaps: list[dict[str, Any]] = [
        {"checkpoint": at(64, torch.int8, 2, 4, 1, 4, 4)},
        {"scale": at(1024, torch.float32, 2, 4, 1, 4)},
        {"conv": (at(256, torch.float32, 2, 4, 3), apart["conv"][1])},
        {"conv": (apart["conv"][0], apart["conv"][0])},
        {"active": [at(0, torch.float32, 4, 1, 4, 4), at(64, torch.float32, 4, 1, 4, 4)]},
        {"active": at(0, torch.float32, 2, 1, 1, 4, 4).expand(2, 4, 1, 4, 4)},
    ]

    def refusal(on_cuda: bool, **changed: Any) -> str | None:
        given = apart | changed
        common = {"layout": "k_last"}
        try:
            if not on_cuda:
                _native.CodecPlan(**(given | common | {"conv": [given["conv"]], "format": "int8"}))
            else:
                rows = {key: as_rows(given[key]) for key in ("active", "checkpoint", "scale")}
                conv = [(as_rows(given["conv"][0]), as_rows(given["conv"][1]))]
                cuda.CudaCodec(**rows, conv=conv, layout="k_last", format="int8", device=CpuDevice())
        except TensorError as error:
            return str(error)
        return None

    def as_rows(given: Any) -> Rows:
        return Rows(tuple(given), None) if isinstance(given, list) else Rows(given.unbind(0), given)

    assert [refusal(False), refusal(True)] == [None, None]
    for changed in overlaps:
        on_cpu, on_cuda = refusal(False, **changed), refusal(True, **changed)
        assert on_cpu is not None
        assert on_cpu == on_cuda


# --- views with other values than their memory ---


def test_negated_and_conjugated_views_are_refused() -> None:
    negated = torch._neg_view(torch.tensor([-1, -2, -3]))
    with pytest.raises(TensorError, match=r"holds the negated numbers: give tensor\.resolve_neg\(\)"):
        make().lookup(negated)
    assert make().lookup(negated.resolve_neg()).length == 0
    state = torch._neg_view(torch.ones(2, 4, 1, 4, 4))
    with pytest.raises(TensorError, match="state: a negated view has other values than its memory"):
        ActivePool.bind(SPEC, state=state, conv=[torch.zeros(2, 4, 3)])
    conjugated = torch.zeros(2, 4, 3, dtype=torch.complex64).conj()
    tensors = {"active": torch.zeros(2, 4, 1, 4, 4), "checkpoint": torch.zeros(2, 4, 1, 4, 4)}
    with pytest.raises(TensorError, match="conv 0, active: a conjugated view"):
        _native.CodecPlan(**tensors, conv=[(conjugated, conjugated)], layout="k_last", format="native")


def test_a_table_of_slots_is_in_its_storage_and_not_negated() -> None:
    active, kept, _ = bound_pools(listed=False)
    codec = cuda.describe(active, kept, CpuDevice())
    table = torch.zeros(3, 100, dtype=torch.int32)
    with pytest.raises(TensorError, match="not a view that negates"):
        codec.enqueue_store(torch._neg_view(table))
    shrink(table)
    with pytest.raises(TensorError, match="1200 bytes"):
        codec.enqueue_store(table)


# --- storages smaller than their tensors ---


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64])
@pytest.mark.parametrize("nbytes", [0, 8, 799])
def test_tokens_beyond_their_storage_are_not_read(dtype: torch.dtype, nbytes: int) -> None:
    tokens = torch.zeros(800 // dtype.itemsize, dtype=dtype)
    part = tokens[-1:]
    tokens.untyped_storage().resize_(nbytes)
    for given in (tokens, part):
        with pytest.raises(
            TensorError, match=f"needs 800 bytes of its storage, which has {nbytes}|at address 0x"
        ):
            make().lookup(given)


def test_a_pool_beyond_its_storage_is_not_bound() -> None:
    state = [torch.zeros(4, 1, 4, 4) for _ in range(2)]
    shrink(state[1])
    with pytest.raises(
        TensorError, match="state: the tensor must lie in its storage, it needs 256 bytes of 128"
    ):
        ActivePool.bind(SPEC, state=state, conv=[torch.zeros(2, 4, 3)])


# --- lengths that lie ---


class Hinted:
    """Iterates over a few tokens, and claims to have many."""

    def __init__(self, tokens: Iterable[int], hint: int) -> None:
        self._tokens, self._hint = iter(tokens), hint

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._tokens)

    def __length_hint__(self) -> int:
        return self._hint


@pytest.mark.parametrize("hint", [0, 2**21 + 1, 2**40, 2**61, 2**63 - 1])
def test_a_hint_of_a_length_is_only_a_hint(hint: int) -> None:
    cache = make(kv_pages=64)
    assert cache.tokens(cache.start(Hinted(range(100), hint)).sequence) == list(range(100))
    assert _native.StartRequest(Hinted(PROMPT, hint)).tokens == PROMPT


def test_a_length_that_no_memory_holds_is_a_memory_error() -> None:
    run_alone(
        """
        cache = _native.Cache(page_size=2, checkpoint_stride=4, kv_pages=16, active_slots=2, checkpoint_slots=2)
        sequence = cache.start(range(9)).sequence
        for call in (cache.lookup, cache.start, _native.StartRequest, lambda tokens: cache.append(sequence, tokens)):
            for length in (2**40, 2**62, 2**63 - 1):
                try:
                    call(range(length))
                    raise SystemExit("a length was believed")
                except MemoryError:
                    pass
            try:
                call(range(2**80))
                raise SystemExit("a length was believed")
            except OverflowError:
                pass
        cache.check()
        """,
        address_space=1 << 30,
    )


def test_what_has_no_end_is_a_memory_error_when_memory_ends() -> None:
    run_alone(
        """
        import itertools
        cache = _native.Cache(page_size=2, checkpoint_stride=4, kv_pages=16, active_slots=2, checkpoint_slots=2)
        request = _native.StartRequest([1, 2, 3])
        plan = CheckpointPool(spec := StateSpec(layers=1, heads=1, d_k=1, d_v=1, layout="k_last"), 2)
        plan = transfer.codec(ActivePool(spec, 2), plan)
        for call, item in (
            (cache.lookup, 7), (cache.start_many, request), (plan.store, (1, 1)), (plan.load, (1, 1)),
        ):
            try:
                call(itertools.repeat(item))
                raise SystemExit("an endless iterator ended")
            except MemoryError:
                pass
        cache.check()
        """,
        address_space=200 << 20,
    )


def test_what_has_no_end_can_be_interrupted() -> None:
    run_alone(
        """
        import itertools, signal
        from radixstate import _native
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            _native.StartRequest(itertools.repeat(7))
            raise SystemExit("an endless iterator ended")
        except TimeoutError:
            pass
        """
    )


@pytest.mark.parametrize("length", [2**40, 2**61])
def test_pairs_and_windows_may_lie_about_their_length(length: int) -> None:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return length

    active, kept, _ = bound_pools(listed=False)
    codec: Any = transfer.codec(active, kept)
    assert codec.store(Lying([(1, 2)])) == [True]
    codec.load(Lying([(2, 3)]))
    with pytest.raises(TypeError):
        codec.store(range(length))
    state = torch.zeros(1, 2, 1, 1, 1)
    with pytest.raises(TypeError):
        _native.CodecPlan(
            active=state, checkpoint=state.clone(), layout="k_last", format="native", conv=range(length)
        )


# --- numbers that change between check and use ---


class Changing:
    """Another number each time it is asked."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = itertools.chain(numbers, itertools.repeat(numbers[-1]))

    def __index__(self) -> int:
        return next(self._numbers)


def test_a_slot_is_converted_once() -> None:
    active, kept, tensors = bound_pools(listed=False)
    device = CpuDevice()
    for codec in (cuda.describe(active, kept, device), transfer.codec(active, kept)):
        tensors["checkpoint"][0].fill_(5)
        codec.store([(1, Changing(2, 3, 4000))])  # type: ignore[list-item]  # that is the point
        assert (tensors["checkpoint"][0] == 5).all(dim=(0, 2, 3, 4)).tolist() == [True, True, False, True]
        with pytest.raises(SlotError, match="slot 4000 is not in"):
            codec.store([(1, Changing(4000, 2))])  # type: ignore[list-item]  # that is the point
    with pytest.raises(SlotError, match=r"slot 7 is not in 1\.\.=3"):
        active.clear(Changing(7, 1))  # type: ignore[arg-type]  # that is the point
    active.clear(Changing(1, 7))  # type: ignore[arg-type]  # that is the point


# --- limits ---


@pytest.mark.parametrize("pool", ["kv_page", "active", "checkpoint"])
def test_bytes_beyond_a_counter_are_refused_when_a_cache_is_made(pool: str) -> None:
    size = {"kv_page": "kv_pages", "active": "active_slots", "checkpoint": "checkpoint_slots"}[pool]
    with pytest.raises(ConfigError, match=rf"^16 .* of {2**64 - 1} bytes exceed 64 bits$"):
        make(**{f"{pool}_bytes": 2**64 - 1, size: 16})
    cache = make(**{f"{pool}_bytes": (2**64 - 1) // 16, size: 16})
    cache.start(range(9))
    cache.stats()
    cache.check()


@pytest.mark.parametrize("size", ["kv_pages", "active_slots", "checkpoint_slots"])
@pytest.mark.parametrize("new", [make, engine])
def test_ids_beyond_int32_are_refused_when_a_cache_is_made(size: str, new: Callable[..., Any]) -> None:
    new(**{size: 2**31 - 1})
    with pytest.raises(
        ConfigError, match=rf"^{2**31} .*: ids must fit into an int32, .* at most {2**31 - 1}$"
    ):
        new(**{size: 2**31})


# --- threads that cannot start ---


def test_a_codec_works_where_no_thread_can_be_started() -> None:
    """The address space has no room for the stack of a thread; so it is with RLIMIT_NPROC or a limit of pids."""
    run_alone(
        """
        import threading
        spec = StateSpec(layers=8, heads=8, d_k=128, d_v=128, layout="k_last")
        active, kept = ActivePool(spec, 2), CheckpointPool(spec, 2)
        active.state(1).fill_(3)
        plan = transfer.codec(active, kept)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), most))
        threading.stack_size(2 << 20)
        try:
            threading.Thread(target=print).start()
            raise SystemExit("a thread was started")
        except RuntimeError:
            pass
        assert plan.store([(1, 1)], threads=2) == [True]
        plan.load([(1, 2)], threads=8)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        assert (active.state(2) == active.state(1)).all()
        """,
        address_space=1 << 40,
    )
