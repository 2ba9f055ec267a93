"""Layers of several shapes, and layers with convolution windows alone: pools, codecs and a cache over them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from cuda_on_cpu import CpuDevice
from radixstate import (
    ActivePool,
    CheckpointPool,
    ConvSpec,
    PrefixCache,
    Skipped,
    StateSpec,
    Stored,
    Transfer,
    budget,
    cuda,
    transfer,
)
from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.reference.codec import decode, encode
from radixstate.states import GroupTensors, Rows
from radixstate.states.groups import parts
from transformers.cache_utils import DynamicCache

WINDOWS = StateSpec.of_windows(layers=3, conv=(ConvSpec((5, 3), "bfloat16"), ConvSpec((4,), "float32")))
SPEC = StateSpec(
    layers=2,
    heads=3,
    d_k=5,
    d_v=7,
    dtype="float32",
    layout="v_last",
    conv=(ConvSpec((6, 3), "bfloat16"),),
    more=(StateSpec(layers=1, heads=2, d_k=4, d_v=3, dtype="bfloat16", layout="k_last"), WINDOWS),
)
NAMES = ["state", "conv.0", "1.state", "2.conv.0", "2.conv.1"]
CHECKED = ["state", "1.state", "2.conv.0"]
"""What a store looks at: matrices, and the first window where there is none."""
FORMATS = ["int8", "bf16", "native"]
DEVICES = ["cpu", "cuda"]


def codec_of(active: ActivePool, kept: CheckpointPool, device: str) -> transfer.Codec:
    """The CPU's codec, or the CUDA one with a CPU in the place of the device."""
    if device == "cpu":
        return transfer.codec(active, kept)
    on_cpu = CpuDevice()
    groups = parts(active, kept)
    codecs = [cuda.describe(active, kept, on_cpu, group=number) for number in range(len(groups))]
    return transfer.join(groups, codecs)


def fill(pool: ActivePool, *, seed: int = 0) -> None:
    """Random numbers in every row, the sink included, so that a wrong row shows."""
    generator = torch.Generator().manual_seed(seed)
    for rows in pool.rows.values():
        for layer in rows.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator))


def soil(pool: CheckpointPool) -> None:
    """Bytes that no test stores, so that an unwritten element shows."""
    for layer in layers_of(pool):
        layer.view(torch.uint8).fill_(0x5A)


def layers_of(pool: ActivePool | CheckpointPool) -> Iterator[torch.Tensor]:
    for rows in pool.rows.values():
        yield from rows.layers


def row(pool: ActivePool | CheckpointPool, name: str, slot: int) -> torch.Tensor:
    return pool.rows[name].row(slot)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def snapshot(*pools: ActivePool | CheckpointPool) -> list[torch.Tensor]:
    return [bits(layer).clone() for pool in pools for layer in layers_of(pool)]


def unchanged(before: list[torch.Tensor], *pools: ActivePool | CheckpointPool) -> bool:
    return all(torch.equal(*pair) for pair in zip(before, snapshot(*pools), strict=True))


def prefix(number: int) -> str:
    return f"{number}." if number else ""


# --- the spec ---


def test_one_group_is_what_the_spec_says_itself() -> None:
    alone = StateSpec(layers=2, heads=3, d_k=5, d_v=7, layout="v_last")
    assert alone.groups == (alone,)
    assert list(alone.tensors("int8")) == ["state", "scale"]


def test_each_group_has_tensors_of_its_own() -> None:
    assert list(SPEC.tensors()) == NAMES
    assert list(SPEC.tensors("int8")) == [
        *("state", "scale", "conv.0"),
        *("1.state", "1.scale"),
        *("2.conv.0", "2.conv.1"),
    ]
    assert SPEC.tensors("int8")["1.scale"].shape == (2, 4)
    assert [group.layers for group in SPEC.groups] == [2, 1, 3]


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_a_slot_are_those_of_all_groups(format: Any) -> None:
    plan = budget.plan(SPEC, active_slots=2, checkpoint_slots=5, format=format)
    assert plan.active_bytes == ActivePool(SPEC, 2).nbytes
    assert plan.checkpoint_bytes == CheckpointPool(SPEC, 5, format=format).nbytes
    assert SPEC.conv_bytes == 2 * 36 + 3 * (30 + 16)
    assert SPEC.state_bytes == 2 * 3 * 5 * 7 * 4 + 1 * 2 * 4 * 3 * 2


def test_windows_alone_cost_the_same_in_every_format() -> None:
    assert {WINDOWS.slot_bytes(format) for format in ("int8", "bf16", "native")} == {3 * (30 + 16)}
    assert (WINDOWS.windows_only, WINDOWS.state_bytes, SPEC.windows_only) == (True, 0, False)
    with pytest.raises(ConfigError, match="int8, bf16, native, got 'fp8'"):
        WINDOWS.slot_bytes("fp8")  # type: ignore[arg-type]


def test_a_spec_refuses_groups_that_hold_nothing_or_others() -> None:
    with pytest.raises(ConfigError, match="at least 1 conv window, got 0"):
        StateSpec.of_windows(layers=2, conv=())
    with pytest.raises(ConfigError, match="heads must be at least 1, got 0"):
        StateSpec(layers=1, heads=0, d_k=0, d_v=0, layout="v_last")
    with pytest.raises(ConfigError, match="group 1 has 2 groups of its own"):
        StateSpec.of_windows(layers=1, conv=WINDOWS.conv, more=(SPEC,))


def test_pools_that_differ_in_one_group_are_refused() -> None:
    other = StateSpec.of_windows(layers=3, conv=WINDOWS.conv, more=(SPEC.groups[1],))
    changed = StateSpec.of_windows(layers=3, conv=WINDOWS.conv, more=(SPEC.groups[0],))
    with pytest.raises(TensorError, match="the active pool holds"):
        Transfer(ActivePool(other, 1), CheckpointPool(changed, 1))


# --- the codec ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_store_equals_the_reference_bit_for_bit_in_every_group(format: Any, device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 4, format=format)
    fill(active)
    soil(kept)
    others = [name for name in kept.rows if "conv" in name]
    assert list(codec_of(active, kept, device).store([(1, 4), (3, 2)])) == [True, True]
    for source, slot in ((1, 4), (3, 2)):
        for number, group in enumerate(SPEC.groups[:2]):
            state = active.state(source, group=number)
            code, scale = state, None
            if format == "int8":
                code, scale = encode(state, k_axis=-1 if group.layout == "k_last" else -2)
            elif format == "bf16":
                code = state.to(torch.bfloat16)
            assert torch.equal(bits(kept.state(slot, group=number)), bits(code))
            if scale is not None:
                assert torch.equal(bits(kept.scale(slot, group=number)), bits(scale))
        for name in others:
            assert torch.equal(bits(row(kept, name, slot)), bits(row(active, name, source))), name
    for slot in (0, 1, 3):
        assert all((bits(row(kept, name, slot)) == 0x5A).all() for name in kept.rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_load_equals_the_reference_bit_for_bit_in_every_group(format: Any, device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 4, format=format)
    fill(active)
    codec = codec_of(active, kept, device)
    assert list(codec.store([(1, 4)])) == [True]
    before = [row(active, name, slot).clone() for name in NAMES for slot in (0, 1, 3)]
    codec.load([(4, 2)])
    for number, group in enumerate(SPEC.groups[:2]):
        state = active.state(1, group=number)
        k_axis = -1 if group.layout == "k_last" else -2
        if format == "int8":
            state = decode(*encode(state, k_axis=k_axis), k_axis=k_axis, dtype=state.dtype)
        elif format == "bf16":
            state = state.to(torch.bfloat16).to(state.dtype)
        assert torch.equal(bits(active.state(2, group=number)), bits(state))
    for index, number in ((0, 0), (0, 2), (1, 2)):
        loaded = active.conv(index, 2, group=number)
        assert torch.equal(bits(loaded), bits(active.conv(index, 1, group=number)))
    after = [row(active, name, slot) for name in NAMES for slot in (0, 1, 3)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CHECKED)
def test_a_group_that_is_not_finite_makes_the_state_of_its_pair_unusable(
    name: str, format: Any, device: str
) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3, format=format)
    fill(active)
    row(active, name, 2)[-1].view(-1)[-1] = torch.nan
    verdicts = codec_of(active, kept, device).store([(1, 1), (2, 2), (3, 3)])
    assert (len(verdicts), list(verdicts), verdicts[1:]) == (3, [True, False, True], [False, True])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 0)], [(4, 1)], [(1, 4)], [(1, 2), (3, 2)]])
def test_wrong_slots_write_nothing_in_any_group(pairs: list[tuple[int, int]], device: str) -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill(active)
    before = snapshot(active, kept)
    codec = codec_of(active, kept, device)
    for move in (codec.store, codec.load):
        with pytest.raises(SlotError, match=r"slot \d"):
            move(pairs)
    assert unchanged(before, active, kept)
    assert list(codec.store([])) == []


def test_on_cuda_one_codec_serves_one_group_which_must_be_named() -> None:
    active, kept = ActivePool(SPEC, 2), CheckpointPool(SPEC, 2)
    with pytest.raises(ConfigError, match="pools hold 3: give group=0 to 2"):
        cuda.describe(active, kept, CpuDevice())
    with pytest.raises(ConfigError, match=r"group 3 is not in 0\.\.=2"):
        cuda.describe(active, kept, CpuDevice(), group=3)


def test_on_cuda_every_group_is_one_launch_and_its_verdict_is_not_waited_for() -> None:
    active, kept, device = ActivePool(SPEC, 2), CheckpointPool(SPEC, 2), CpuDevice()
    groups = parts(active, kept)
    codec = transfer.join(groups, [cuda.describe(active, kept, device, group=i) for i in range(3)])
    verdicts = codec.store([(1, 2), (2, 1)])
    assert [launch.grid[1] for launch in device.launches] == [2, 1, 3]
    assert not isinstance(verdicts, list)  # what is known at once is a list


# --- memory ---

move_ways: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(tensor.clone()),
    "data": lambda tensor: setattr(tensor, "data", tensor.clone()),
    "shared": lambda tensor: tensor.share_memory_(),
}


def bound(*, listed: bool) -> tuple[ActivePool, dict[str, list[torch.Tensor]]]:
    """A pool over tensors of torch's own, and these by name."""
    allocated = ActivePool(SPEC, 3)
    fill(allocated)
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, rows in allocated.rows.items():
        assert rows.whole is not None
        tensors[name] = [layer.clone() for layer in rows.layers] if listed else [rows.whole.clone()]
    given: dict[str, Any] = {name: each if listed else each[0] for name, each in tensors.items()}
    more = (GroupTensors(given["1.state"]), GroupTensors(conv=[given["2.conv.0"], given["2.conv.1"]]))
    return ActivePool.bind(SPEC, state=given["state"], conv=[given["conv.0"]], more=more), tensors


@pytest.mark.parametrize("listed", [False, True], ids=["whole", "by layer"])
def test_an_engines_tensors_of_every_group_are_used_in_place(listed: bool) -> None:
    active, tensors = bound(listed=listed)
    allocated, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 2)
    fill(allocated)
    twin = CheckpointPool(SPEC, 2)
    assert Transfer(active, kept).store([(3, 1)]) == Transfer(allocated, twin).store([(3, 1)]) == [True]
    assert unchanged(snapshot(kept), twin)
    active.clear(2)
    for name, each in tensors.items():
        rows = each if listed else list(each[0])
        assert all((layer[2] == 0).all() and (layer[1] != 0).any() for layer in rows), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("way", move_ways)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_any_group_that_moved_is_named_and_no_group_is_written(
    name: str, way: str, listed: bool, device: str
) -> None:
    active, tensors = bound(listed=listed)
    kept = CheckpointPool(SPEC, 3)
    codec = codec_of(active, kept, device)
    codec.store([(1, 1)])
    move_ways[way](tensors[name][-1])
    before = snapshot(active, kept)
    number = int(name[0]) if name[0].isdigit() else 0
    for call in (codec.store, codec.load):
        with pytest.raises(TensorError, match=f"^group {number}, .*: the tensor's memory"):
            call([(1, 2)])
    with pytest.raises(TensorError, match=f"^{name}: the tensor's memory"):
        active.clear(1)
    assert unchanged(before, active, kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", move_ways)
def test_windows_alone_that_moved_are_named(way: str, device: str) -> None:
    windows = [torch.ones(3, 4, 5, 3, dtype=torch.bfloat16), torch.ones(3, 4, 4)]
    active, kept = ActivePool.bind(WINDOWS, conv=windows), CheckpointPool(WINDOWS, 3)
    codec = codec_of(active, kept, device)
    codec.store([(1, 1)])
    move_ways[way](windows[0])
    for call in (codec.store, codec.load):
        with pytest.raises(TensorError, match=r"^active: the tensor's memory"):
            call([(1, 2)])


@pytest.mark.parametrize("device", DEVICES)
def test_groups_that_share_memory_are_refused(device: str) -> None:
    spec = StateSpec(
        layers=2,
        heads=1,
        d_k=4,
        d_v=4,
        dtype="float32",
        layout="k_last",
        more=(StateSpec.of_windows(layers=1, conv=(ConvSpec((4,), "float32"),)),),
    )
    # A page of a slot holds two layers of 16 numbers and a window of 4.
    pages = torch.zeros(4, 36)
    layers = [pages[:, at : at + 16].view(4, 1, 4, 4) for at in (0, 16)]

    def codec(at: int) -> transfer.Codec:
        more = (GroupTensors(conv=[[pages[:, at : at + 4]]]),)
        return codec_of(ActivePool.bind(spec, state=layers, more=more), CheckpointPool(spec, 3), device)

    assert list(codec(32).store([(1, 1)])) == [True]
    with pytest.raises(
        TensorError, match=r"^groups 0 and 1 of layers: layer 1 of the active pool overlaps layer 0"
    ):
        codec(28)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": ()}, "1 groups of layers given, the spec has 3"),
        ({"state": None}, "state: none given, the spec has 3 heads"),
        ({"1.state": None}, "group 1: state: none given, the spec has 2 heads"),
        ({"1.state": torch.zeros(1, 4, 2, 4, 3)}, r"group 1: state \(k_last\): .*\(slots \+ 1, 2, 3, 4\)"),
        (
            {"1.state": torch.zeros(1, 5, 2, 3, 4).bfloat16()},
            r"group 1: state \(k_last\): 5 rows .* state has 4",
        ),
        (
            {"2.state": torch.zeros(3, 4, 1)},
            "group 2: state: one given, the spec keeps conv windows and no matrix",
        ),
        ({"2.conv": []}, "group 2: 0 conv tensors given, the spec has 2 windows"),
        (
            {"2.conv": [torch.zeros(3, 4, 5, 3), torch.zeros(3, 4, 4)]},
            r"group 2: conv\[0\]: the spec says bfloat16",
        ),
    ],
)
def test_bind_names_the_group_that_does_not_fit(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "state": torch.zeros(2, 4, 3, 5, 7),
        "conv": [torch.zeros(2, 4, 6, 3).bfloat16()],
        "1.state": torch.zeros(1, 4, 2, 3, 4).bfloat16(),
        "2.state": None,
        "2.conv": [torch.zeros(3, 4, 5, 3).bfloat16(), torch.zeros(3, 4, 4)],
    } | change
    more = (GroupTensors(given["1.state"]), GroupTensors(given["2.state"], given["2.conv"]))
    with pytest.raises(TensorError, match=message):
        ActivePool.bind(SPEC, state=given["state"], conv=given["conv"], more=given.get("more", more))


# --- pools ---


def test_views_name_the_group_they_are_of() -> None:
    active, kept = ActivePool(SPEC, 2), CheckpointPool(SPEC, 2)
    assert active.state(1, group=1).shape == (1, 2, 3, 4)
    assert active.conv(1, 1, group=2).shape == (3, 4)
    assert kept.scale(1, group=1).shape == (1, 2, 4)
    for access in (active.state, kept.state):
        with pytest.raises(TensorError, match="group 2 keeps conv windows and no matrix"):
            access(1, group=2)
        with pytest.raises(ConfigError, match=r"group 3 is not in 0\.\.=2"):
            access(1, group=3)
    with pytest.raises(TensorError, match="group 2, which keeps no matrix, has no scales"):
        kept.scale(1, group=2)


def test_clearing_poisoning_and_spending_reach_every_group() -> None:
    active, kept = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3)
    fill(active)
    before = [row(active, name, 2).clone() for name in NAMES]
    active.clear(1)
    active.poison(3)
    assert all((row(active, name, 1) == 0).all() for name in NAMES)
    assert all(row(active, name, 3).isnan().all() for name in NAMES)
    assert Transfer(active, kept).store([(1, 1), (2, 2), (3, 3)]) == [True, True, False]
    assert all(
        torch.equal(*pair) for pair in zip(before, (row(active, name, 2) for name in NAMES), strict=True)
    )
    active.spend(2)
    for name in NAMES:
        assert row(active, name, 2).flatten(1).isnan().sum(dim=1).eq(1).all(), name


@pytest.mark.parametrize("written", CHECKED)
def test_a_spent_slot_is_refused_until_every_group_is_written(written: str) -> None:
    active, kept = ActivePool(SPEC, 1), CheckpointPool(SPEC, 1)
    active.spend(1)
    for name in NAMES:
        if name != written:
            row(active, name, 1).fill_(1)
    assert Transfer(active, kept).store([(1, 1)]) == [False]
    row(active, written, 1).fill_(1)
    assert Transfer(active, kept).store([(1, 1)]) == [True]


# --- a cache ---


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", [SPEC, WINDOWS], ids=["three groups", "windows alone"])
def test_a_hit_brings_every_group_back(spec: StateSpec, format: Any) -> None:
    cache = PrefixCache(
        spec, active_slots=3, checkpoint_slots=4, kv_pages=32, page_size=2, checkpoint_stride=4, format=format
    )
    names = list(cache.active.rows)
    with cache.start(range(9)) as first:
        fill(cache.active)
        state = {name: row(cache.active, name, first.slot).clone() for name in names}
        assert isinstance(first.checkpoint(8), Stored)
        fill(cache.active, seed=1)
    with cache.start([*range(8), 77]) as second, cache.start(range(50, 59)) as other:
        assert (second.reused, other.reused) == (8, 0)
        for name in names:
            loaded = row(cache.active, name, second.slot)
            exact = "conv" in name or format == "native"
            assert torch.allclose(loaded, state[name], rtol=2**-8, atol=0 if exact else 0.03), name
            assert not exact or torch.equal(loaded, state[name]), name
            assert (row(cache.active, name, other.slot) == 0).all(), name
    assert cache.check() is None


def test_windows_alone_that_are_not_finite_are_not_stored() -> None:
    cache = PrefixCache(
        WINDOWS, active_slots=1, checkpoint_slots=2, kv_pages=8, page_size=2, checkpoint_stride=4
    )
    with cache.start(range(9)) as seq:
        cache.active.poison(seq.slot)
        assert seq.checkpoint(8) == Skipped("non_finite")
    assert cache.lookup(range(9)).length == 0


def test_a_model_of_short_convolutions_continues_from_its_windows() -> None:
    """LFM2: a prefix is the keys and values of attention, which the test keeps, and the windows in a slot."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        initializer_range=0.5,  # with the default one the windows hardly matter
        dtype="float32",
    )
    model = transformers.Lfm2ForCausalLM(config).eval()
    prompt = torch.arange(21) * 5 % 64
    cache = PrefixCache(StateSpec.from_config(config), active_slots=1, page_size=4, checkpoint_stride=4)
    pages: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def prefill(slot: int) -> None:
        running = DynamicCache(config=config)
        model(prompt[None, :16], cache=running)
        pages.append((running.layers[1].keys, running.layers[1].values))
        for window, layer in zip(cache.active.conv(0, slot), (0, 2), strict=True):
            window.copy_(running.layers[layer].conv_states[0][0])

    @torch.no_grad()
    def continued(slot: int) -> torch.Tensor:
        running = DynamicCache(config=config)
        running.update(*pages[0], 1)
        for window, layer in zip(cache.active.conv(0, slot), (0, 2), strict=True):
            running.update_conv_state(window[None], layer, conv_kernel_size=config.conv_L_cache)
        logits: torch.Tensor = model(prompt[None, 16:], cache=running).logits[0]
        return logits

    with cache.start(prompt.tolist()) as first:
        prefill(first.slot)
        assert isinstance(first.checkpoint(16), Stored)
        live = continued(first.slot)
        cache.active.poison(first.slot)
    with cache.start(prompt.tolist()) as second:
        assert second.reused == 16
        assert torch.equal(continued(second.slot), live)
        cache.active.clear(second.slot)
        zeroed = continued(second.slot)
    with torch.no_grad():
        cold = model(prompt[None]).logits[0, 16:]
    assert torch.allclose(live, cold, atol=1e-5)
    assert (zeroed[0] - cold[0]).abs().max() > 0.1  # a check that restoring the windows is what did it


def test_flat_rows_are_given_to_a_codec_as_the_tensors_that_may_move() -> None:
    rows = Rows.zeros(WINDOWS.conv[0], 3, 2, "cpu")
    flat = rows.flat()
    assert flat.given is rows.whole
    assert flat.layers[0].shape == (3, 1, 1, 15)
    assert flat.layers[1].data_ptr() == rows.layers[1].data_ptr()
