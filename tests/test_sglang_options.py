"""What the backend for sglang is told and what it refuses. sglang is not needed for this."""

from __future__ import annotations

from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from radixstate import StateSpec
from radixstate.errors import BudgetError, ConfigError
from radixstate.integrations.sglang.options import BYTES, FORMAT, POLICY, SLOTS, Options, refuse
from radixstate.integrations.sglang.order import depth_first
from radixstate.integrations.sglang.plugin import INT8_POOL, int8_pool_wanted, require_version

SPEC = StateSpec(layers=2, heads=2, d_k=8, d_v=8, dtype="float32", layout="k_last")


def context(**changes: Any) -> Any:
    """What sglang gives to the maker of a cache, as far as it is read: all options are off."""
    pool = SimpleNamespace(
        mamba_pool=SimpleNamespace(replayssm_write_pos=None, replayssm_spec_write_pos=None),
        mamba_ckpt_pool=None,
        short_conv_pool=SimpleNamespace(enabled=False),
        ngram_pool=SimpleNamespace(enabled=False),
    )
    params = SimpleNamespace(
        req_to_token_pool=pool,
        is_eagle=False,
        pp_size=1,
        attn_cp_size=1,
        enable_mamba_extra_buffer_lazy=False,
        eviction_policy="lru",
        sliding_window_size=None,
        enable_kv_cache_events=False,
        enable_session_radix_cache=False,
    )
    args = SimpleNamespace(
        speculative_algorithm=None,
        dcp_size=1,
        mamba_max_states_per_path=-1,
        disaggregation_mode="null",
        enable_lmcache=False,
        enable_flexkv=False,
        enable_unified_memory=False,
    )
    made = SimpleNamespace(
        params=params,
        server_args=args,
        is_hybrid_ssm=True,
        is_hybrid_swa=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        tp_size=1,
    )
    for path, value in changes.items():
        *where, name = path.split("__")
        holder: Any = made
        for part in where:
            holder = getattr(holder, part)
        assert hasattr(holder, name), path
        setattr(holder, name, value)
    return made


REFUSED = [
    ("disable_radix_cache", True, "--disable-radix-cache"),
    ("params__is_eagle", True, "--speculative-algorithm"),
    ("server_args__speculative_algorithm", "NGRAM", "--speculative-algorithm"),
    ("tp_size", 2, "--tp-size"),
    ("params__pp_size", 2, "--pp-size"),
    ("params__attn_cp_size", 2, "--attn-cp-size"),
    ("server_args__dcp_size", 2, "--dcp-size"),
    ("params__enable_mamba_extra_buffer_lazy", True, "--mamba-radix-cache-strategy extra_buffer_lazy"),
    ("server_args__mamba_max_states_per_path", 4, "--mamba-max-states-per-path"),
    ("params__eviction_policy", "lfu", "--radix-eviction-policy"),
    ("is_hybrid_swa", True, "sliding windows"),
    ("params__sliding_window_size", 128, "sliding windows"),
    ("params__enable_kv_cache_events", True, "--kv-events-config"),
    ("params__enable_session_radix_cache", True, "--enable-session-radix-cache"),
    ("server_args__disaggregation_mode", "prefill", "--disaggregation-mode"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("server_args__enable_lmcache", True, "--enable-lmcache"),
    ("server_args__enable_flexkv", True, "--enable-flexkv"),
    ("server_args__enable_unified_memory", True, "--enable-unified-memory"),
    ("params__req_to_token_pool__mamba_pool__replayssm_write_pos", object(), "--enable-linear-replayssm"),
    (
        "params__req_to_token_pool__mamba_pool__replayssm_spec_write_pos",
        object(),
        "--enable-linear-replayssm",
    ),
    ("params__req_to_token_pool__mamba_ckpt_pool", object(), "--enable-int8-mamba-checkpoint"),
    ("params__req_to_token_pool__short_conv_pool__enabled", True, "side states"),
    ("params__req_to_token_pool__ngram_pool__enabled", True, "side states"),
    ("is_hybrid_ssm", False, "models with recurrent layers"),
]


def test_a_server_without_any_of_them_is_served() -> None:
    refuse(context())


@pytest.mark.parametrize(("path", "value", "option"), REFUSED, ids=[path for path, *_ in REFUSED])
def test_an_option_that_does_not_work_is_refused_by_its_name(path: str, value: object, option: str) -> None:
    with pytest.raises(ConfigError, match="--radix-cache-backend radixstate") as refused:
        refuse(context(**{path: value}))
    assert option in str(refused.value)


def test_all_refused_options_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--tp-size > 1: .*; --pp-size > 1: "):
        refuse(context(tp_size=2, params__pp_size=2))


# --- what is chosen ---


def test_nothing_said_means_int8_and_least_recently_used() -> None:
    assert Options.read({}) == Options.read({SLOTS: "", BYTES: ""}) == Options(None, None, "int8", "lru")
    assert Options.read({}).slots(SPEC) is None


def test_slots_or_bytes_size_the_pool() -> None:
    assert Options.read({SLOTS: "9"}).slots(SPEC) == 9
    assert Options.read({BYTES: str(10 * SPEC.slot_bytes("int8"))}).slots(SPEC) == 9
    assert [Options.read({BYTES: f"2{unit}"}).checkpoint_bytes for unit in "KMG"] == [
        2 << 10,
        2 << 20,
        2 << 30,
    ]
    read = Options.read({FORMAT: "native", POLICY: "mine"})
    assert (read.format, read.policy) == ("native", "mine")


def test_bytes_without_room_for_a_slot_say_how_many_are_needed() -> None:
    with pytest.raises(BudgetError, match=rf"{BYTES} is 100, but .* need {2 * SPEC.slot_bytes('int8')}"):
        Options.read({BYTES: "100"}).slots(SPEC)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({SLOTS: "many"}, SLOTS),
        ({SLOTS: "0"}, SLOTS),
        ({SLOTS: "-3"}, SLOTS),
        ({SLOTS: "2K"}, SLOTS),
        ({BYTES: "4T"}, BYTES),
        ({BYTES: "1.5G"}, BYTES),
        ({FORMAT: "int4"}, FORMAT),
        ({SLOTS: "4", BYTES: "4G"}, BYTES),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_variable(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Options.read(given)


def test_the_pool_for_sglangs_tree_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("", "0", "1"):
        monkeypatch.setenv(INT8_POOL, value)
        found.append(int8_pool_wanted())
    assert found == [False, False, True]
    monkeypatch.setenv(INT8_POOL, "yes")
    with pytest.raises(ConfigError, match=f"{INT8_POOL} must be 0 or 1, got 'yes'"):
        int8_pool_wanted()


# --- versions ---


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_builds_of_the_version_are_taken(version: str) -> None:
    require_version(version)


@pytest.mark.parametrize(
    "version", ["0.5.14", "0.5.24", "0.5.230", "0.6.0", "10.5.23", "0.5.23rc1", "0.0.0.dev0"]
)
def test_other_versions_are_refused_with_the_one_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"found {version}: install sglang==0\.5\.23"):
        require_version(version)


# --- order ---


def order(*paths: list[int]) -> list[int]:
    return depth_first([np.array(path, dtype=np.int32) for path in paths])


def test_requests_that_share_a_prefix_are_neighbours_the_heavier_first() -> None:
    assert order([1, 2], [5], [1, 3], [5], [5, 6], [1, 2]) == [0, 5, 2, 4, 1, 3]


def test_what_ends_at_an_inner_node_comes_after_those_below_and_what_matched_nothing_last() -> None:
    assert order([], [1], [1, 2, 3], []) == [2, 1, 0, 3]


def test_equal_weights_keep_their_order() -> None:
    assert order([3], [1], [2]) == [0, 1, 2]
    assert order() == []


def by_definition(paths: list[list[int]], members: list[int], depth: int = 0) -> list[int]:
    children: dict[int, list[int]] = {}
    for member in members:
        if len(paths[member]) > depth:
            children.setdefault(paths[member][depth], []).append(member)
    below = [
        by_definition(paths, child, depth + 1) for child in sorted(children.values(), key=len, reverse=True)
    ]
    return [*chain.from_iterable(below), *(member for member in members if len(paths[member]) == depth)]


def test_the_order_is_that_of_the_definition_whatever_the_prefixes() -> None:
    random = Random(4)
    for _ in range(300):
        paths = [
            [random.randrange(3) for _ in range(random.randrange(5))] for _ in range(random.randrange(1, 12))
        ]
        assert order(*paths) == by_definition(paths, list(range(len(paths)))), paths


def test_a_chain_as_long_as_the_queue_needs_no_deep_stack() -> None:
    paths = [list(range(1, n + 1)) for n in range(3000)]
    assert order(*paths) == list(range(2999, -1, -1))
