"""The CPU codec against the contract, written with torch operations."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from radixstate._native import CodecPlan
from radixstate.errors import ConfigError, MisuseError, SlotError, TensorError

LAYERS, ACTIVE_SLOTS, CHECKPOINT_SLOTS = 3, 4, 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
STORE = [(1, 3), (4, 5), (2, 1)]
LOAD = [(3, 2), (5, 1), (1, 3)]
UNWRITTEN = 0x7F

every_state = pytest.mark.parametrize("state", DTYPES)
every_layout = pytest.mark.parametrize("layout", ["k_last", "v_last"])
every_format = pytest.mark.parametrize("format", ["native", "bf16", "int8"])


@dataclass
class Pools:
    """Tensors [layers, slots + 1, ...] and what they hold."""

    state: str
    layout: str
    format: str
    active: torch.Tensor
    checkpoint: torch.Tensor
    scale: torch.Tensor | None
    conv: list[tuple[torch.Tensor, torch.Tensor]]

    def plan(self, **changes) -> CodecPlan:
        arguments = {
            "active": self.active,
            "checkpoint": self.checkpoint,
            "scale": self.scale,
            "conv": self.conv,
            "layout": self.layout,
            "format": self.format,
        }
        return CodecPlan(**(arguments | changes))

    def per_layer(self) -> CodecPlan:
        return self.plan(
            active=list(self.active),
            checkpoint=tuple(self.checkpoint),
            scale=None if self.scale is None else list(self.scale),
            conv=[(list(source), list(kept)) for source, kept in self.conv],
        )


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape, dtype.itemsize), UNWRITTEN, dtype=torch.uint8).view(dtype).squeeze(-1)


def pools(state, layout, format, *, heads=3, d_k=20, d_v=33) -> Pools:
    dtype = DTYPES[state]
    matrix = (d_v, d_k) if layout == "k_last" else (d_k, d_v)
    kept = {"native": dtype, "bf16": torch.bfloat16, "int8": torch.int8}[format]
    scale = unwritten(LAYERS, CHECKPOINT_SLOTS + 1, heads, d_k, dtype=SCALE_DTYPES[state])
    windows = [((6, 4), torch.bfloat16), ((5,), torch.float32)]
    return Pools(
        state=state,
        layout=layout,
        format=format,
        active=torch.randn(LAYERS, ACTIVE_SLOTS + 1, heads, *matrix).to(dtype),
        checkpoint=unwritten(LAYERS, CHECKPOINT_SLOTS + 1, heads, *matrix, dtype=kept),
        scale=scale if format == "int8" else None,
        conv=[
            (
                torch.randn(LAYERS, ACTIVE_SLOTS + 1, *shape).to(window),
                unwritten(LAYERS, CHECKPOINT_SLOTS + 1, *shape, dtype=window),
            )
            for shape, window in windows
        ],
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns, with one pattern for every NaN."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(bits(actual), bits(expected), rtol=0, atol=0)


def reference_scale(x: torch.Tensor, layout: str, scale_dtype: torch.dtype) -> torch.Tensor:
    """Scales [..., d_k] of states x [..., rows, columns]; NaN where a channel is not finite."""
    amax = x.float().abs().amax(-2 if layout == "k_last" else -1)
    scale = (amax.clamp(min=1e-8) / torch.tensor(127.0)).to(scale_dtype)
    overflows = amax.isfinite() & ~(127 * scale.float()).to(x.dtype).isfinite()
    integers = scale.view(INTEGERS[scale.element_size()])
    scale = torch.where(overflows, integers - 1, integers).view(scale_dtype)
    return torch.where(amax.isfinite(), scale, torch.nan)


def along_channels(scale: torch.Tensor, layout: str) -> torch.Tensor:
    return scale.float().unsqueeze(-2 if layout == "k_last" else -1)


def reference_store(x: torch.Tensor, scale: torch.Tensor, layout: str) -> torch.Tensor:
    steps = (x.float() / along_channels(scale, layout)).round().clamp(-127, 127)
    return torch.where(along_channels(scale, layout).isnan(), 0, steps).nan_to_num(0).to(torch.int8)


def reference_load(pool: Pools, slot: int) -> torch.Tensor:
    """The state [layers, heads, rows, columns] that a checkpoint slot holds."""
    kept = pool.checkpoint[:, slot]
    if pool.scale is None:
        return kept.to(pool.active.dtype)
    return (kept.float() * along_channels(pool.scale[:, slot], pool.layout)).to(pool.active.dtype)


def check_store(pool: Pools, plan: CodecPlan, pairs=STORE, threads=1) -> None:
    """Stores, and compares every slot of the checkpoint pool."""
    checkpoint = pool.checkpoint.clone()
    scale = None if pool.scale is None else pool.scale.clone()
    windows = [kept.clone() for _, kept in pool.conv]
    finite = []
    for source, destination in pairs:
        x = pool.active[:, source]
        if scale is None:
            checkpoint[:, destination] = x.to(checkpoint.dtype)
            finite.append(bool(x.to(checkpoint.dtype).to(x.dtype).isfinite().all()))
        else:
            scale[:, destination] = reference_scale(x, pool.layout, scale.dtype)
            checkpoint[:, destination] = reference_store(x, scale[:, destination], pool.layout)
            finite.append(bool(x.isfinite().all()))
        for window, (active, _) in zip(windows, pool.conv, strict=True):
            window[:, destination] = active[:, source]
    assert plan.store(pairs, threads) == finite
    assert_same_bits(pool.checkpoint, checkpoint)
    if scale is not None:
        assert_same_bits(pool.scale, scale)
    for window, (_, kept) in zip(windows, pool.conv, strict=True):
        assert_same_bits(kept, window)


def check_load(pool: Pools, plan: CodecPlan, pairs=LOAD, threads=1) -> None:
    """Loads, and compares every slot of the active pool."""
    active = pool.active.clone()
    windows = [source.clone() for source, _ in pool.conv]
    for source, destination in pairs:
        active[:, destination] = reference_load(pool, source)
        for window, (_, kept) in zip(windows, pool.conv, strict=True):
            window[:, destination] = kept[:, source]
    assert plan.load(pairs, threads) is None
    assert_same_bits(pool.active, active)
    for window, (source, _) in zip(windows, pool.conv, strict=True):
        assert_same_bits(source, window)


def check(pool: Pools, plan: CodecPlan | None = None) -> None:
    plan = plan or pool.plan()
    check_store(pool, plan)
    check_load(pool, plan)


@every_state
@every_layout
@every_format
@pytest.mark.parametrize(("d_k", "d_v"), [(1, 1), (7, 63), (63, 7), (64, 128), (100, 65), (128, 1)])
def test_random_states(state, layout, format, d_k, d_v):
    check(pools(state, layout, format, d_k=d_k, d_v=d_v))


@every_state
@every_layout
@every_format
@pytest.mark.parametrize("value", ["zero", "subnormal", "tiny", "huge", "largest", "inf", "-inf", "nan"])
def test_extreme_values(state, layout, format, value):
    """Whole states of one value, and single elements of it among usual ones."""
    pool = pools(state, layout, format)
    info = torch.finfo(pool.active.dtype)
    extreme = {
        "zero": 0.0,
        "subnormal": info.smallest_normal / 2,
        "tiny": 3e-9,
        "huge": info.max / 3,
        "largest": info.max,
    }
    element = extreme.get(value)
    element = float(value) if element is None else element
    pool.active[:, 1] = element
    pool.active[0, 4, 1, 2, 3] = element
    pool.active[1, 2, :, :, 5] = -element
    check(pool)


@every_state
@every_layout
def test_flushing_denormals_to_zero_changes_no_code(state, layout):
    """As `torch.set_flush_denormal` and some engines do. The heads are of all magnitudes, to the largest."""
    pool = pools(state, layout, "int8", heads=48, d_k=64, d_v=64)
    top = torch.finfo(pool.active.dtype).max
    magnitudes = torch.linspace(-30, 127, 48).exp2()[:, None, None]
    pool.active.copy_((pool.active.double() * magnitudes).clamp(-top / 2, top / 2))
    plan = pool.plan()
    plan.store([(1, 1)], 1)
    assert torch.set_flush_denormal(True)
    try:
        plan.store([(1, 2)], 1)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(pool.checkpoint[:, 2], pool.checkpoint[:, 1])
    assert_same_bits(pool.scale[:, 2], pool.scale[:, 1])


@pytest.mark.parametrize("format", ["native", "int8"])
@every_state
@every_layout
def test_the_largest_value_reloads_finite(state, layout, format):
    pool = pools(state, layout, format)
    pool.active[:] = torch.finfo(pool.active.dtype).max
    plan = pool.plan()
    assert plan.store([(1, 1)]) == [True]
    plan.load([(1, 2)])
    assert pool.active[:, 2].isfinite().all()


@pytest.mark.parametrize(("state", "largest"), [("fp16", 65376.0), ("fp32", 3.389e38)])
def test_a_state_that_overflows_in_bf16_is_refused(state, largest):
    pool = pools(state, "k_last", "bf16")
    pool.active[:, 1] = largest
    pool.active[:, 2] = largest
    pool.active[0, 2, 0, 0, 0] = torch.finfo(pool.active.dtype).max
    assert pool.plan().store([(1, 1), (2, 2)]) == [True, False]


@every_state
@every_layout
@every_format
def test_one_bad_element_refuses_its_pair_alone(state, layout, format):
    for bad in (torch.nan, torch.inf, -torch.inf):
        pool = pools(state, layout, format)
        pool.active[2, 4, 2, 19, 18] = bad
        assert pool.plan().store(STORE) == [True, False, True]


@every_state
@every_layout
@every_format
def test_one_tensor_per_layer(state, layout, format):
    pool = pools(state, layout, format)
    check(pool, pool.per_layer())


@every_state
@every_layout
@every_format
def test_views_with_gaps(state, layout, format):
    """Every dimension but the last has room between its elements; conv windows are transposed."""
    pool = pools(state, layout, format)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        room = unwritten(*(size + 1 for size in tensor.shape), dtype=tensor.dtype)
        view = room[tuple(slice(1, None) for _ in tensor.shape)]
        return view.copy_(tensor)

    def transposed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    pool.active, pool.checkpoint = spread(pool.active), spread(pool.checkpoint)
    pool.scale = None if pool.scale is None else spread(pool.scale)
    pool.conv[0] = (transposed(pool.conv[0][0]), transposed(pool.conv[0][1]))
    check(pool)


@every_layout
@every_format
def test_layers_interleaved_in_one_page_per_slot(layout, format):
    """[slots, layers, ...], as engines that keep all layers of a slot together have it."""
    pool = pools("bf16", layout, format)
    pool.active = pool.active.transpose(0, 1).contiguous().transpose(0, 1)
    check(pool)
    check(pool, pool.per_layer())


def test_state_and_conv_in_one_page():
    """One buffer per layer with pages [conv | state], as vLLM has it."""
    pool = pools("fp32", "v_last", "int8")
    state, (window, kept) = pool.active, pool.conv[1]
    per_slot = state[0, 0].numel()
    pages = torch.randn(LAYERS, ACTIVE_SLOTS + 1, per_slot + window.shape[-1])
    pool.conv = [(pages[..., : window.shape[-1]], kept)]
    pool.active = pages[..., window.shape[-1] :].unflatten(-1, state.shape[2:])
    check(pool)
    check(pool, pool.per_layer())


@every_state
@every_format
@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_the_result_does_not_depend_on_threads(state, format, threads):
    pool = pools(state, "k_last", format, heads=12, d_k=128, d_v=128)
    pool.active[1, 4, 7, 5, 5] = torch.nan
    check_store(pool, pool.plan(), threads=threads)
    check_load(pool, pool.plan(), threads=threads)


def test_a_plan_may_be_shared_by_threads():
    pool = pools("bf16", "k_last", "int8", heads=8, d_k=64, d_v=64)
    plan = pool.plan()
    pool.plan().store([(1, 1)])
    expected = pool.checkpoint[:, 1].clone()
    results: list[list[bool]] = []

    def work() -> None:
        for _ in range(50):
            results.append(plan.store([(1, 1), (2, 2)], 2))
            plan.load([(2, 3)], 2)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [[True, True]] * 200
    assert_same_bits(pool.checkpoint[:, 1], expected)


def test_a_plan_keeps_its_memory():
    """Dropping the tensors leaves the plan what it was built on."""
    pool = pools("fp32", "k_last", "native")
    active, checkpoint = pool.active.clone(), pool.checkpoint
    plan = pool.plan()
    pool.active = torch.zeros(1)
    pool.conv.clear()
    assert plan.store([(1, 1)]) == [True]
    assert_same_bits(checkpoint[:, 1], active[:, 1])


def test_no_pairs_is_no_work():
    pool = pools("bf16", "k_last", "int8")
    check_store(pool, pool.plan(), pairs=[])
    check_load(pool, pool.plan(), pairs=[])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 1), (0, 2)], "pair 1: slot 0 of the active pool is the padding sink"),
        ([(1, 0)], "pair 0: slot 0 of the checkpoint pool is the padding sink"),
        ([(5, 1)], "pair 0: slot 5 is not in the active pool, whose last slot is 4"),
        ([(1, 6)], "pair 0: slot 6 is not in the checkpoint pool, whose last slot is 5"),
        ([(1, 2), (2, 2)], "pairs 0 and 1 both write slot 2"),
        ([(1, 1)] * 6, "6 pairs, but the destination pool has 5 usable slots"),
        ([(-1, 1)], "slot -1 is outside 0..2\\*\\*32 - 1"),
        ([(1, 2**70)], f"slot {2**70} is outside"),
    ],
)
def test_refused_pairs_write_nothing(pairs, message):
    pool = pools("bf16", "k_last", "int8")
    before = [tensor.clone() for tensor in (pool.checkpoint, pool.scale)]
    with pytest.raises(SlotError, match=message):
        pool.plan().store(pairs)
    assert_same_bits(pool.checkpoint, before[0])
    assert_same_bits(pool.scale, before[1])


def test_a_refused_load_writes_nothing():
    pool = pools("bf16", "k_last", "int8")
    before = pool.active.clone()
    with pytest.raises(SlotError, match="slot 5 is not in the active pool"):
        pool.plan().load([(1, 1), (2, 5)])
    assert_same_bits(pool.active, before)


@pytest.mark.parametrize("pairs", [[(1,)], [1], [("1", 1)], [(1.0, 1)], None])
def test_pairs_are_tuples_of_two_integers(pairs):
    with pytest.raises((TypeError, ValueError)):
        pools("bf16", "k_last", "int8").plan().store(pairs)


@pytest.mark.parametrize(
    ("threads", "message"),
    [(0, "threads must be at least 1, got 0"), (-1, r"threads -1 is outside 0\.\.2\*\*64 - 1")],
)
def test_at_least_one_thread(threads, message):
    with pytest.raises(MisuseError, match=message):
        pools("bf16", "k_last", "int8").plan().store([(1, 1)], threads)


def overlapping(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :1].expand(tensor.shape)


BAD = {
    "unknown state dtype": (
        lambda p: {"active": p.active.double()},
        "active: dtype must be bfloat16, float16 or float32, it is float64",
    ),
    "state dimensions": (lambda p: {"active": p.active[0]}, "active: a layer must have dimensions"),
    "not a tensor": (lambda p: {"active": "state"}, "active: expected a torch tensor, got str"),
    "not a tensor in a list": (
        lambda p: {"active": [3]},
        "active, layer 0: expected a torch tensor, got int",
    ),
    "no layers": (lambda p: {"active": []}, "active: at least 1 layer is needed, got 0"),
    "no dimensions": (lambda p: {"active": torch.zeros(())}, "active: a tensor of all layers has at least"),
    "empty": (lambda p: {"active": p.active[:, :0]}, "active: every dimension must be at least 1"),
    "device": (
        lambda p: {"active": p.active.to("meta")},
        "active: the tensor must be on the cpu, it is on meta",
    ),
    "sparse": (lambda p: {"active": p.active.to_sparse()}, "active: the tensor must be strided"),
    "unlike layers": (
        lambda p: {"active": [p.active[0], p.active[1, 1:], p.active[2]]},
        "active: layer 1 differs from layer 0",
    ),
    "layer count": (
        lambda p: {"checkpoint": p.checkpoint[:2]},
        "checkpoint pool: 2 layers, the active pool has 3",
    ),
    "checkpoint shape": (
        lambda p: {"checkpoint": p.checkpoint[..., :19]},
        r"checkpoint: one slot must have shape \[3, 33, 20\], a layer with its slots has \[6, 3, 33, 19\]",
    ),
    "checkpoint dtype": (
        lambda p: {"checkpoint": p.checkpoint.view(torch.uint8)},
        "checkpoint: dtype must be int8, it is uint8",
    ),
    "inner dimension": (
        lambda p: {"active": p.active.transpose(-1, -2).contiguous().transpose(-1, -2)},
        "active: the last dimension must be contiguous, its stride is 66 bytes",
    ),
    "no scale": (lambda p: {"scale": None}, "scale: the int8 format needs a tensor of scales, got none"),
    "scale dtype": (lambda p: {"scale": p.scale.float()}, "scale: dtype must be bfloat16, it is float32"),
    "scale shape": (lambda p: {"scale": p.scale[..., 1:]}, r"scale: one slot must have shape \[3, 20\]"),
    "scale slots": (lambda p: {"scale": p.scale[:, 1:]}, "checkpoint scales: 5 slots, its pool has 6"),
    "needless scale": (lambda p: {"format": "native"}, "scale: the native format has no scales"),
    "conv dtype": (
        lambda p: {"conv": [(p.conv[0][0], p.conv[1][1])]},
        "conv 0, checkpoint: dtype must be bfloat16, it is float32",
    ),
    "conv shape": (
        lambda p: {"conv": [(p.conv[1][0], p.conv[1][1][..., 1:])]},
        "conv 0, checkpoint: one slot must",
    ),
    "conv slots": (
        lambda p: {"conv": [(p.conv[0][0][:, 1:], p.conv[0][1])]},
        "active window: 4 slots, its pool has 5",
    ),
    "conv order": (
        lambda p: {"conv": [(p.conv[0][0].transpose(-1, -2).contiguous().transpose(-1, -2), p.conv[0][1])]},
        "conv 0, checkpoint: the strides of a slot must be those of the active tensor",
    ),
    "conv gaps": (
        lambda p: {"conv": [tuple(window[..., :3] for window in p.conv[0])]},
        "conv 0, active: one slot must be dense, a stride of 8 bytes follows 6 bytes",
    ),
    "expanded": (
        lambda p: {"active": overlapping(p.active)},
        "active pool: a stride of 0 bytes is less than the [0-9]+ bytes within it",
    ),
    "one layer twice": (
        lambda p: {"active": [p.active[0], p.active[1], p.active[0]]},
        "layer 0 of the active pool overlaps layer 2 of the active pool",
    ),
    "pools in one memory": (
        lambda p: {"format": "native", "scale": None, "checkpoint": p.active[:, 1:], "conv": []},
        "layer 0 of the active pool overlaps layer 0 of the checkpoint pool",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unfit_tensors_are_refused(case):
    pool = pools("bf16", "k_last", "int8")
    changes, message = BAD[case]
    with pytest.raises(TensorError, match=message):
        pool.plan(**changes(pool))


def test_unknown_names_are_refused():
    pool = pools("bf16", "k_last", "int8")
    with pytest.raises(ConfigError, match='layout must be k_last, v_last or flat, got "rows"'):
        pool.plan(layout="rows")
    with pytest.raises(ConfigError, match='format must be native, bf16 or int8, got "int4"'):
        pool.plan(format="int4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(7,), (6, 3), (2, 3, 5), (2, 1, 3, 4)])
def test_flat_slots_of_any_shape_are_copied_and_looked_at(shape, dtype):
    active, kept = torch.randn(2, 4, *shape).to(dtype), unwritten(2, 3, *shape, dtype=dtype)
    active[:, 2].flatten(1)[1, -1] = torch.nan
    before = kept.clone()
    plan = CodecPlan(active=active, checkpoint=kept, layout="flat", format="native")
    assert plan.store([(3, 1), (2, 2)]) == [True, False]
    assert_same_bits(kept[:, 1], active[:, 3])
    assert_same_bits(kept[:, 0], before[:, 0])
    plan.load([(1, 1)])
    assert_same_bits(active[:, 1], active[:, 3])


FLAT = {
    "shape": (
        lambda a: {"checkpoint": torch.zeros(2, 4, 3, 6)},
        r"checkpoint: one slot must have shape \[6, 3\]",
    ),
    "dtype": (lambda a: {"checkpoint": a.half()}, "checkpoint: dtype must be float32, it is float16"),
    "order": (
        lambda a: {"checkpoint": torch.zeros(2, 4, 3, 6).transpose(-1, -2)},
        "checkpoint: the strides of a slot must be those of the active tensor",
    ),
    "gaps": (
        lambda a: {"active": a[..., :2], "checkpoint": a.clone()[..., :2]},
        "active: one slot must be dense",
    ),
    "state dtype": (
        lambda a: {"active": a.double(), "checkpoint": a.double()},
        "active: dtype must be bfloat16",
    ),
    "one memory": (lambda a: {"checkpoint": a}, "active pool overlaps layer 0 of the checkpoint pool"),
}


@pytest.mark.parametrize("case", FLAT)
def test_flat_slots_must_be_alike_in_both_pools(case):
    changes, message = FLAT[case]
    active = torch.zeros(2, 4, 6, 3)
    given = {"active": active, "checkpoint": torch.zeros(2, 5, 6, 3)} | changes(active)
    with pytest.raises(TensorError, match=message):
        CodecPlan(**given, layout="flat", format="native")


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_flat_slots_are_kept_as_they_are(format):
    given = {"active": torch.zeros(1, 2, 3), "checkpoint": torch.zeros(1, 2, 3)}
    with pytest.raises(ConfigError, match=f'the layout flat is kept native, got format "{format}"'):
        CodecPlan(**given, layout="flat", format=format)
