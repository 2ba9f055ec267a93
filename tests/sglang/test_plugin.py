"""sglang finds the backend by the entry point that the package declares, and selects it by one flag."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

import prometheus_client
import sglang
from radixstate.errors import BudgetError, ConfigError
from radixstate.integrations.sglang import options, plugin
from radixstate.integrations.sglang.backend import RadixStateCache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.runtime_context import get_parallel
from world import SETTINGS, Setting, World, context_of, prompt

ROOT = Path(__file__).parents[2]
GROUP = "sglang.srt.plugins"

LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.mem_cache import registry
print("radixstate.integrations.sglang.backend" in sys.modules, registry.registered_radix_cache_backends())
"""


def test_sglang_loads_the_plugin_that_is_installed(tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    info = tmp_path / "radixstate-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: radixstate\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in declared.items())
    )
    assert list(declared) == ["radixstate"]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1:] == ["False ['radixstate']"], done.stdout + done.stderr


def test_the_flag_selects_the_backend() -> None:
    assert isinstance(World(Setting()).cache, RadixStateCache)


def test_this_sglang_is_the_one_that_is_named() -> None:
    plugin.require_version(sglang.__version__)
    assert importlib.metadata.version("sglang") == plugin.SGLANG


def test_another_version_is_refused_before_anything_of_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(ConfigError, match=r"sglang 0\.5\.23, found 0\.5\.24"):
        plugin.build(None)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_sglang_starts_with_is_not_refused(setting: Setting) -> None:
    options.refuse(context_of(setting))


def test_a_real_context_with_a_refused_option_names_it() -> None:
    context = context_of(Setting())
    context.params.is_eagle = True
    context.tp_size = 2
    with pytest.raises(ConfigError, match=r"--speculative-algorithm: .*; --tp-size > 1: "):
        plugin.build(context)


def test_the_bytes_of_the_pool_are_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = World(Setting()).cache.cache.checkpoints
    assert whole.slots == 24
    monkeypatch.setenv(options.BYTES, str(whole.nbytes // 5))
    fewer = World(Setting()).cache.cache.checkpoints
    assert (fewer.slots, fewer.nbytes <= whole.nbytes // 5) == (4, True)
    monkeypatch.setenv(options.BYTES, "")
    monkeypatch.setenv(options.SLOTS, "7")
    monkeypatch.setenv(options.FORMAT, "bf16")
    pool = World(Setting()).cache.cache.checkpoints
    assert (pool.slots, pool.format) == (7, "bf16")


def test_too_large_a_pool_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.SLOTS, str(10**10))
    with pytest.raises(BudgetError, match="lower checkpoint_slots first"):
        World(Setting())


def test_the_budget_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="radixstate"):
        pool = World(Setting()).cache.cache.checkpoints
    line = (
        f"radixstate: 24 checkpoint slots of int8, {pool.nbytes} bytes, beside 12 active slots and 2048 pages"
    )
    assert any(line in message for message in caplog.messages)


def test_states_of_another_shape_are_refused() -> None:
    context = context_of(Setting())
    states = context.params.req_to_token_pool.mamba_pool
    object.__setattr__(states.mamba_cache, "temporal", states.mamba_cache.temporal.flatten(3))
    with pytest.raises(Exception, match=r"must be \(layers, slots \+ 1, heads, d_v, d_k\)"):
        plugin.build(context)


def test_evictions_are_among_sglangs_metrics() -> None:
    def make(context: Any) -> Any:
        context.params.enable_metrics = True
        return create_tree_cache(context)

    with get_parallel().override(tp_rank=0, pp_rank=0):
        world = World(Setting(), make)
    world.serve(prompt(1, 128))
    world.cache.evict(EvictParams(num_tokens=128))
    page = prometheus_client.generate_latest().decode()
    counted = [line for line in page.splitlines() if line.startswith("sglang:evicted_tokens_total{")]
    assert len(counted) == 1
    assert 'cache_type="RadixStateCache"' in counted[0]
    assert counted[0].endswith(" 128.0")


def test_states_that_are_not_cached_are_counted_in_the_log_ever_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(Setting())
    for turn in range(5):
        req = world.admit(world.request(prompt(turn, 64)))
        world.states.temporal[0, int(req.kv.mamba_pool_idx), 0, 0, 0] = float("nan")
        world.finish(req)
    told = [message for message in caplog.messages if "were not cached" in message]
    assert told == [f"radixstate: {n} states were not cached: non_finite" for n in (1, 2, 4)]
