"""Plans in bytes: exact, checked before anything is allocated, and clear about what to lower."""

from pathlib import Path

import pytest
import torch
from radixstate import ActivePool, CheckpointPool, ConvSpec, PrefixCache, StateSpec, budget
from radixstate.errors import BudgetError, ConfigError

SPEC = StateSpec(
    layers=3,
    heads=2,
    d_k=8,
    d_v=16,
    dtype="bfloat16",
    layout="k_last",
    conv=(ConvSpec((12, 3), "bfloat16"), ConvSpec((5,), "float32")),
)


@pytest.mark.parametrize("format", ["int8", "bf16", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_plan_is_exact_to_the_byte(dtype: str, format: str) -> None:
    spec = StateSpec(layers=3, heads=2, d_k=8, d_v=16, dtype=dtype, layout="v_last", conv=SPEC.conv)
    plan = budget.plan(spec, active_slots=4, checkpoint_slots=6, format=format)
    assert plan.active_bytes == ActivePool(spec, 4).nbytes
    assert plan.checkpoint_bytes == CheckpointPool(spec, 6, format=format).nbytes
    assert plan.total_bytes == plan.active_bytes + plan.checkpoint_bytes


def test_bytes_of_a_slot_are_those_of_its_tensors() -> None:
    assert SPEC.state_bytes == 3 * 2 * 8 * 16 * 2
    assert SPEC.conv_bytes == 3 * (12 * 3 * 2 + 5 * 4)
    assert SPEC.slot_bytes("native") == SPEC.state_bytes + SPEC.conv_bytes
    assert SPEC.slot_bytes("int8") == 3 * 2 * (8 * 16 + 8 * 2) + SPEC.conv_bytes


def test_there_are_twice_as_many_checkpoints_as_running_sequences() -> None:
    assert budget.plan(SPEC, active_slots=5).checkpoint_slots == 10


def test_pages_take_what_the_total_leaves() -> None:
    states = budget.plan(SPEC, active_slots=2).total_bytes
    plan = budget.plan(SPEC, active_slots=2, page_bytes=1000, total_bytes=states + 10_999)
    assert (plan.kv_pages, plan.kv_bytes) == (9, 10_000), "nine pages and the sink"
    assert plan.total_bytes <= states + 10_999
    assert budget.plan(SPEC, active_slots=2, page_bytes=1000).kv_pages == 0


@pytest.mark.parametrize("kv", [{}, {"kv_pages": 5, "page_bytes": 1000}])
def test_bytes_alone_decide_the_slots_of_each_pool(kv: dict[str, int]) -> None:
    for total in range(60_000, 90_000, 1_111):
        plan = budget.plan(SPEC, total_bytes=total, **kv)
        assert plan.checkpoint_slots >= 2 * plan.active_slots
        assert plan.total_bytes <= total < plan.total_bytes + SPEC.slot_bytes("int8"), "not one more fits"
        more = budget.plan(SPEC, active_slots=plan.active_slots + 1, **kv)
        assert more.total_bytes > total, "twice as many checkpoints would not fit with one more"


def test_checkpoints_take_what_a_total_leaves_for_states() -> None:
    plan = budget.plan(SPEC, active_slots=2, total_bytes=100_000)
    assert plan.total_bytes <= 100_000 < plan.total_bytes + SPEC.slot_bytes("int8")
    left = 100_000 - plan.active_bytes
    assert plan.checkpoint_slots == budget.slots_that_fit(SPEC, left) > 4


def test_a_plan_that_nothing_decides_is_refused() -> None:
    for given in (
        {},
        {"total_bytes": 10**6, "page_bytes": 100},
        {"total_bytes": 10**6, "checkpoint_slots": 4},
    ):
        with pytest.raises(ConfigError, match="give active_slots, or total_bytes"):
            budget.plan(SPEC, **given)


def test_a_total_that_is_too_small_says_what_to_lower() -> None:
    needed = budget.plan(SPEC, active_slots=2, checkpoint_slots=100).total_bytes
    with pytest.raises(BudgetError, match=f"need {needed} bytes.*1 too many, lower checkpoint_slots first"):
        budget.plan(SPEC, active_slots=2, checkpoint_slots=100, total_bytes=needed - 1)
    with pytest.raises(BudgetError, match="lower kv_pages first"):
        budget.plan(SPEC, active_slots=2, page_bytes=10**6, kv_pages=50, total_bytes=10**7)


def test_a_plan_beyond_the_free_memory_is_refused_before_allocating() -> None:
    free = budget.free_bytes()
    assert free is not None
    slots = 2 * free // SPEC.slot_bytes("int8")
    with pytest.raises(BudgetError, match=r"cpu has .* lower checkpoint_slots first"):
        budget.plan(SPEC, active_slots=2, checkpoint_slots=slots).check("cpu")
    budget.plan(SPEC, active_slots=2).check("cpu")


def test_memory_that_cannot_be_read_is_said_to_be_unchecked() -> None:
    plan = budget.plan(SPEC, active_slots=2)
    with pytest.warns(
        RuntimeWarning, match=f"free memory of mps cannot be read: a plan of {plan.total_bytes}"
    ):
        plan.check("mps")


def test_states_of_running_prompts_beyond_the_checkpoint_slots_are_announced() -> None:
    plan = budget.plan(SPEC, active_slots=4, checkpoint_slots=31)
    plan.warn_if_crowded(64 * 7 + 63, 64)  # 28 states
    message = (
        "4 running prompts of 512 tokens store 32 states, one every 64 tokens, in 31 checkpoint slots: "
        "raise checkpoint_slots, or store fewer"
    )
    with pytest.warns(RuntimeWarning, match=f"^{message}$"):
        plan.warn_if_crowded(512, 64)
    with pytest.warns(RuntimeWarning, match="4 running prompts of 64 tokens store 4 states"):
        budget.plan(SPEC, active_slots=4, checkpoint_slots=3).warn_if_crowded(64, 64)
    with pytest.raises(ConfigError, match="prompt_tokens must be at least 0, got -1"):
        plan.warn_if_crowded(-1, 64)
    with pytest.raises(ConfigError, match="stride must be at least 1, got 0"):
        plan.warn_if_crowded(512, 0)


def test_a_cache_that_is_told_its_prompts_announces_that_their_states_do_not_fit() -> None:
    sizes = {"active_slots": 4, "checkpoint_slots": 31, "page_size": 16, "checkpoint_stride": 24}
    PrefixCache(SPEC, **sizes, prompt_tokens=7 * 48)
    with pytest.warns(RuntimeWarning, match="4 running prompts of 384 tokens store 32 states, one every 48 "):
        PrefixCache(SPEC, **sizes, prompt_tokens=8 * 48)


def test_free_memory_is_what_linux_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "proc/meminfo"
    assert budget._available_memory(tmp_path) is None
    meminfo.parent.mkdir()
    meminfo.write_text("MemTotal:       999 kB\nMemFree:  5 kB\nMemAvailable:     12 kB\n")
    assert budget._available_memory(tmp_path) == 12 * 1024
    meminfo.write_text("MemTotal:       999 kB\n")
    assert budget._available_memory(tmp_path) is None


def machine(root: Path, groups: str, **files: str) -> Path:
    """A root directory with 1000 MB available, the groups of the process, and files by path."""
    written = {"proc/meminfo": f"MemAvailable: {1000 << 10} kB\n", "proc/self/cgroup": groups} | files
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def left(root: Path) -> int:
    """Available MB."""
    nbytes = budget._available_memory(root)
    assert nbytes is not None
    return nbytes >> 20


def v1(limit: int | str, used: int, group: str = "", stat: str | None = None) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{group}"
    files = {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used << 20}\n",
    }
    return files | ({f"{folder}/memory.stat": stat} if stat else {})


def v2(limit: int | str, used: int, group: str = "", stat: str | None = None) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{group}"
    files = {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used << 20}\n"}
    return files | ({f"{folder}/memory.stat": stat} if stat else {})


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("0::/\n", {}, 1000),
        ("0::/a/b\n", v2("max", 5, "a/b"), 1000),
        ("0::/a/b\n", v2(300 << 20, 100, "a/b"), 200),
        ("0::/a/b\n", v2("max", 5, "a/b") | v2(400 << 20, 100, "a"), 300),
        ("0::/a/b\n", v2(300 << 20, 100, "a/b") | v2(400 << 20, 350, "a"), 50),
        ("0::/a\n", v2(5000 << 20, 100, "a"), 1000),
        ("0::/a\n", v2(100 << 20, 130, "a"), 0),
        ("0::/a\n", v2(300 << 20, 290, "a", f"anon 5\nfile 7\ninactive_file {200 << 20}\n"), 210),
        ("0::/of/the/host\n", v2(300 << 20, 100), 200),
        ("0::/../other\n", v2(300 << 20, 100), 200),
        ("0::/a\n", v2("nonsense", 100, "a"), 1000),
        ("9:name=systemd:/a\n4:memory:/a\n0::/\n", v1(300 << 20, 100, "a"), 200),
        ("4:cpu,memory:/a/b\n", v1(2**63 - 4096, 100, "a/b") | v1(2**63 - 4096, 100), 1000),
        ("4:memory:/a/b\n", v1(2**63 - 4096, 100, "a/b") | v1(300 << 20, 100), 200),
        ("4:memory:/docker/4711\n", v1(300 << 20, 100), 200),
        ("4:memory:/a\n", v1(300 << 20, 290, "a", f"inactive_file 1\ntotal_inactive_file {20 << 20}\n"), 30),
        ("4:cpuset:/a\n", v1(300 << 20, 100, "a"), 1000),
    ],
)
def test_free_memory_is_no_more_than_a_container_allows(
    tmp_path: Path, groups: str, files: dict[str, str], wanted: int
) -> None:
    assert left(machine(tmp_path, groups, **files)) == wanted


def test_free_memory_is_what_linux_says_where_there_are_no_control_groups(tmp_path: Path) -> None:
    (machine(tmp_path, "0::/\n") / "proc/self/cgroup").unlink()
    assert left(tmp_path) == 1000


@pytest.mark.gpu
def test_free_memory_of_a_device_is_read() -> None:
    free = budget.free_bytes("cuda")
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"active_slots": 0}, "active_slots must be at least 1, got 0"),
        ({"active_slots": 1, "checkpoint_slots": 0}, "checkpoint_slots must be at least 1, got 0"),
        ({"active_slots": 1, "kv_pages": -1}, "kv_pages must be at least 0, got -1"),
        ({"active_slots": 1, "page_bytes": -1}, "page_bytes must be at least 0, got -1"),
    ],
)
def test_sizes_out_of_range_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        budget.plan(SPEC, **sizes)
