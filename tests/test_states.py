"""Specs, pools and the codec path through them, compared with the reference bit for bit."""

from typing import Any

import pytest
import torch
from radixstate import ActivePool, CheckpointPool, ConvSpec, StateSpec, Transfer
from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.reference.codec import decode, encode

DTYPES = ["bfloat16", "float16", "float32"]
LAYOUTS = ["k_last", "v_last"]
FORMATS = ["int8", "bf16", "native"]


def spec_of(dtype: str = "float32", layout: str = "v_last", **sizes: int) -> StateSpec:
    shape = {"layers": 2, "heads": 3, "d_k": 5, "d_v": 7} | sizes
    return StateSpec(
        **shape, dtype=dtype, layout=layout, conv=(ConvSpec((6, 3), "bfloat16"), ConvSpec((4,), "float32"))
    )


def fill(pool: ActivePool, *, seed: int = 0) -> None:
    """Random states in every row, the sink included, so that a wrong row shows."""
    generator = torch.Generator().manual_seed(seed)
    for rows in pool.rows.values():
        for layer in rows.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))


def poison(pool: CheckpointPool) -> None:
    """Bytes that no test stores, so that an unwritten element shows."""
    for rows in pool.rows.values():
        for layer in rows.layers:
            layer.view(torch.uint8).fill_(0x5A)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def expected(state: torch.Tensor, spec: StateSpec, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    if format == "int8":
        return encode(state, k_axis=-1 if spec.layout == "k_last" else -2)
    return (state.to(torch.bfloat16) if format == "bf16" else state), None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_store_equals_the_reference_bit_for_bit(dtype: str, layout: str, format: str) -> None:
    spec = spec_of(dtype, layout)
    active, checkpoints = ActivePool(spec, 3), CheckpointPool(spec, 4, format=format)
    fill(active)
    poison(checkpoints)
    untouched = bits(checkpoints.state(3)).clone()
    assert Transfer(active, checkpoints).store([(1, 4), (3, 2)]) == [True, True]
    for source, kept in ((1, 4), (3, 2)):
        code, scale = expected(active.state(source), spec, format)
        assert torch.equal(bits(checkpoints.state(kept)), bits(code))
        if scale is not None:
            assert torch.equal(bits(checkpoints.scale(kept)), bits(scale))
        for window in range(2):
            assert torch.equal(bits(checkpoints.conv(window, kept)), bits(active.conv(window, source)))
    assert torch.equal(bits(checkpoints.state(3)), untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_load_equals_the_reference_bit_for_bit(dtype: str, layout: str, format: str) -> None:
    spec = spec_of(dtype, layout)
    active, checkpoints = ActivePool(spec, 3), CheckpointPool(spec, 4, format=format)
    fill(active)
    Transfer(active, checkpoints).store([(1, 4)])
    kept = bits(active.state(3)).clone()
    Transfer(active, checkpoints).load([(4, 2)])
    code, scale = expected(active.state(1), spec, format)
    k_axis = -1 if layout == "k_last" else -2
    state = code if scale is None else decode(code, scale, k_axis=k_axis, dtype=active.state(1).dtype)
    assert torch.equal(bits(active.state(2)), bits(state.to(active.state(1).dtype)))
    assert torch.equal(bits(active.conv(0, 2)), bits(active.conv(0, 1)))
    assert torch.equal(bits(active.state(3)), kept)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_state_that_is_not_finite_is_reported_for_its_pair_alone(format: str, bad: float) -> None:
    spec = spec_of()
    active, checkpoints = ActivePool(spec, 3), CheckpointPool(spec, 3, format=format)
    fill(active)
    active.state(2)[1, 2, 3, 4] = bad
    assert Transfer(active, checkpoints).store([(1, 1), (2, 2), (3, 3)]) == [True, False, True]


def test_a_state_that_overflows_bfloat16_is_not_finite_there() -> None:
    spec = spec_of()
    active = ActivePool(spec, 1)
    active.state(1).fill_(torch.finfo(torch.float32).max)
    assert Transfer(active, CheckpointPool(spec, 1, format="bf16")).store([(1, 1)]) == [False]
    assert Transfer(active, CheckpointPool(spec, 1, format="int8")).store([(1, 1)]) == [True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_channels_equal_the_reference(dtype: str) -> None:
    spec = spec_of(dtype, "k_last", d_k=6)
    active, checkpoints = ActivePool(spec, 1), CheckpointPool(spec, 1)
    fill(active)
    top = torch.finfo(active.state(1).dtype).max
    for channel, value in enumerate([0.0, 1e-8, 1e-4, top, -top]):
        active.state(1)[..., channel] = value
    assert Transfer(active, checkpoints).store([(1, 1)]) == [True]
    code, scale = encode(active.state(1), k_axis=-1)
    assert torch.equal(checkpoints.state(1), code)
    assert torch.equal(bits(checkpoints.scale(1)), bits(scale))


def test_an_engines_tensors_are_used_in_place_one_per_layer_or_all_in_one() -> None:
    spec = spec_of("bfloat16", "k_last")
    wide = torch.randn(2, 8, 3, 7, 5).to(torch.bfloat16)
    conv = [torch.randn(2, 4, 6, 3).to(torch.bfloat16), torch.randn(2, 4, 4)]
    state = wide[:, ::2]  # every other row: slots need not be adjacent
    whole = ActivePool.bind(spec, state=state, conv=conv)
    listed = ActivePool.bind(spec, state=list(state), conv=[list(window) for window in conv])
    kept = [CheckpointPool(spec, 2) for _ in range(2)]
    for checkpoints, active in zip(kept, (whole, listed), strict=True):
        Transfer(active, checkpoints).store([(3, 1)])
    assert torch.equal(kept[0].state(1), kept[1].state(1))
    assert torch.equal(kept[0].state(1), encode(state[:, 3], k_axis=-1)[0])
    Transfer(listed, kept[0]).load([(1, 2)])
    assert torch.equal(wide[:, 4], decode(*encode(state[:, 3], k_axis=-1), k_axis=-1, dtype=wide.dtype))


def test_a_view_of_all_layers_needs_one_tensor() -> None:
    spec = StateSpec(layers=2, heads=1, d_k=2, d_v=3, dtype="float32", layout="v_last")
    pool = ActivePool.bind(spec, state=[torch.ones(2, 1, 2, 3) for _ in range(2)])
    with pytest.raises(TensorError, match="one tensor per layer"):
        pool.state(1)
    pool.clear(1)
    assert pool.rows["state"].layers[1][1].sum() == 0
    assert pool.rows["state"].layers[1][0].sum() == 6, "the sink is left alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": torch.zeros(2, 4, 3, 7, 5)},
            r"state \(v_last\): .*\(slots \+ 1, 3, 5, 7\).*got \(4, 3, 7, 5\)",
        ),
        ({"state": torch.zeros(3, 4, 3, 5, 7)}, r"state \(v_last\): 3 layers given, the spec has 2"),
        ({"state": torch.zeros(2, 1, 3, 5, 7)}, r"at least 1 slot, got \(1, 3, 5, 7\)"),
        ({"state": torch.zeros(2, 4, 3, 5, 7).half()}, "the spec says float32, got float16"),
        ({"state": torch.zeros(2, 4, 3, 5, 7, device="meta")}, "on cpu, but state has 4 on meta"),
        ({"state": torch.zeros(2, 4, 3, 7, 5).mT}, "a slot must be contiguous"),
        ({"state": [torch.zeros(4, 3, 5, 7), torch.zeros(8, 3, 5, 7)[::2]]}, "strides of the first"),
        ({"state": [torch.zeros(4, 3, 5, 7), torch.zeros(5, 3, 5, 7)]}, "must have 4 rows, got 5"),
        ({"state": [torch.zeros(4, 3, 5, 7), torch.zeros(4, 3, 5, 7, device="meta")]}, "cpu and meta"),
        ({"conv": []}, "0 conv tensors given, the spec has 2 windows"),
        ({"conv": [torch.zeros(2, 4, 6, 3), torch.zeros(2, 4, 4)]}, r"conv\[0\]: the spec says bfloat16"),
        ({"conv": [torch.zeros(2, 5, 6, 3).bfloat16(), torch.zeros(2, 4, 4)]}, r"conv\[0\]: 5 rows"),
    ],
)
def test_bind_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    conv = [torch.zeros(2, 4, 6, 3).bfloat16(), torch.zeros(2, 4, 4)]
    tensors: dict[str, Any] = {"state": torch.zeros(2, 4, 3, 5, 7), "conv": conv} | change
    with pytest.raises(TensorError, match=message):
        ActivePool.bind(spec_of(), **tensors)


@pytest.mark.parametrize("slot", [0, -1, 4])
def test_a_slot_outside_the_pool_is_refused(slot: int) -> None:
    active, checkpoints = ActivePool(spec_of(), 3), CheckpointPool(spec_of(), 3)
    for access in (active.state, active.clear, checkpoints.state, checkpoints.scale):
        with pytest.raises(SlotError, match=f"slot {slot} is not in 1..=3"):
            access(slot)


@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 0)], [(4, 1)], [(1, 4)], [(1, 2), (3, 2)]])
def test_wrong_or_duplicate_slots_write_nothing(pairs: list[tuple[int, int]]) -> None:
    active, checkpoints = ActivePool(spec_of(), 3), CheckpointPool(spec_of(), 3)
    fill(active)
    poison(checkpoints)
    before = [bits(rows.whole).clone() for rows in (checkpoints.rows["state"], active.rows["state"])]
    transfer = Transfer(active, checkpoints)
    for move in (transfer.store, transfer.load):
        with pytest.raises(SlotError, match=r"slot \d"):
            move([(1, 1), *pairs])
    after = [bits(rows.whole) for rows in (checkpoints.rows["state"], active.rows["state"])]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_pools_of_different_specs_or_devices_are_refused() -> None:
    checkpoints = CheckpointPool(spec_of(), 2)
    with pytest.raises(TensorError, match="d_k=6"):
        Transfer(ActivePool(spec_of(d_k=6), 2), checkpoints)
    with pytest.raises(TensorError, match="on meta, the checkpoint pool on cpu"):
        Transfer(ActivePool(spec_of(), 2, device="meta"), checkpoints)
    with pytest.raises(TensorError, match="no codec for pools on meta"):
        Transfer(ActivePool(spec_of(), 2, device="meta"), CheckpointPool(spec_of(), 2, device="meta"))


def test_only_int8_has_scales() -> None:
    with pytest.raises(TensorError, match="native has no scales"):
        CheckpointPool(spec_of(), 2, format="native").scale(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"dtype": "float64"}, "bfloat16, float16, float32, got 'float64'"),
        ({"layout": "last"}, "k_last, v_last, got 'last'"),
    ],
)
def test_a_spec_refuses_what_no_pool_can_hold(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StateSpec(**({"layers": 1, "heads": 1, "d_k": 1, "d_v": 1, "layout": "v_last"} | change))


def test_pools_and_windows_refuse_impossible_sizes() -> None:
    with pytest.raises(ConfigError, match="active pool needs at least 1 slot, got 0"):
        ActivePool(spec_of(), 0)
    with pytest.raises(ConfigError, match="int8, bf16, native, got 'fp8'"):
        CheckpointPool(spec_of(), 1, format="fp8")
    with pytest.raises(ConfigError, match=r"at least one element, got shape \(0,\)"):
        ConvSpec((0,), "float32")
