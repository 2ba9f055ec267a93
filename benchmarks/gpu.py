"""The CUDA codec on a GPU: its tests, then its speed against a plain copy and against torch's operations.

Writes out/gpu.json and ends with an error where a test fails or a goal is missed; without a GPU it says so and ends
well. It needs no Rust where radixstate is installed from a wheel, with the extras cuda12 or cuda13 and, for the tests,
testing and pytest. Run it from the repository's root:

    python -m benchmarks.gpu [--out FILE] [--skip-tests]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from radixstate import ActivePool, CheckpointPool, ConvSpec, StateSpec, Transfer
from radixstate.cuda import CudaCodec, build
from radixstate.cuda.specialise import Direction

PAIRS = (1, 4, 16, 64)
SHORT = 4
"""Up to so many pairs the goal is a fraction of a copy of the same size, beyond it of a long one."""

TARGETS = {"copy_fraction": 0.9, "store_ratio": 10.0, "load_ratio": 6.0}
REPEATS = 20


@dataclass(frozen=True)
class Setup:
    """What is moved: states like those of Qwen3-Next, 36 layers of 32 heads of 128 x 128, and a window of 8192 x 3.

    Attributes:
        by_layer: one tensor for each layer, whose addresses the kernel reads from a table.
    """

    dtype: str = "bfloat16"
    layout: str = "k_last"
    format: str = "int8"
    by_layer: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {self.layout} {self.format}" + (" by layer" if self.by_layer else "")

    def spec(self) -> StateSpec:
        """What a slot holds."""
        window = ConvSpec((8192, 3), "bfloat16")
        sizes = {"layers": 36, "heads": 32, "d_k": 128, "d_v": 128}
        return StateSpec(**sizes, dtype=self.dtype, layout=self.layout, conv=(window,))

    def pools(self, spec: StateSpec, slots: int, device: str = "cuda") -> tuple[ActivePool, CheckpointPool]:
        """An active pool of normal numbers, and a checkpoint pool."""
        active, kept = (
            ActivePool(spec, slots, device=device),
            CheckpointPool(spec, slots, format=self.format, device=device),
        )
        if self.by_layer:
            layers = {name: [layer.clone() for layer in rows.layers] for name, rows in active.rows.items()}
            active = ActivePool.bind(spec, state=layers["state"], conv=[layers["conv.0"]])
        for layer in active.rows["state"].layers:
            layer.normal_()
        return active, kept


MAIN = Setup()
SETUPS = (
    MAIN,
    Setup(dtype="float32"),
    Setup(format="native"),
    Setup(layout="v_last"),
    Setup(by_layer=True),
)


@dataclass(frozen=True)
class Row:
    """One direction at one size.

    Attributes:
        setup: what is moved.
        pairs: moved by one launch.
        milliseconds: median of the launch.
        gb_per_s: of the fewest bytes that can be moved, read and written.
        copy_fraction: of the rate of a long device-to-device copy in the same run.
        same_size_fraction: of the rate of a copy that moves as many bytes: a short one is slower than a long one.
        torch_ratio: how many times as long torch's operations take, which leave out the window; none where there are
            no such operations or their temporaries do not fit into memory.
    """

    setup: Setup
    direction: Direction
    pairs: int
    milliseconds: float
    gb_per_s: float
    copy_fraction: float
    same_size_fraction: float
    torch_ratio: float | None

    def missed(self) -> list[str]:
        """The goals that it misses. There is none for one pair, and none against torch but for bf16 as int8."""
        if self.pairs == 1:
            return []
        found = []
        short = self.pairs <= SHORT
        fraction = self.same_size_fraction if short else self.copy_fraction
        if fraction < TARGETS["copy_fraction"]:
            of = "a copy of the same size" if short else "a long copy"
            found.append(f"{fraction:.2f} of {of}, wanted {TARGETS['copy_fraction']}")
        ratio = TARGETS[f"{self.direction}_ratio"]
        compared = self.setup.dtype == "bfloat16" and self.setup.format == "int8"
        if compared and self.torch_ratio is not None and self.torch_ratio < ratio:
            found.append(f"{self.torch_ratio:.1f} times as fast as torch, wanted {ratio}")
        return found


def milliseconds(work: Callable[[], Any], flush: torch.Tensor) -> float:
    """Median time of `work` on the device, each time with nothing of it in the cache.

    `flush` is read and not written: lines that were would have to be written back while `work` is timed. The pause
    lets the host enqueue all of `work` before the clock starts.
    """
    times = []
    for _ in range(REPEATS + 3):
        flush.sum()
        torch.cuda._sleep(1_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def host_microseconds(work: Callable[[], Any]) -> float:
    """Median time that the host needs for `work`, which waits for nothing; the device is idle each time."""
    times = []
    for _ in range(10 * REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[REPEATS:]) * 1e6


def copy_rate(nbytes: int, flush: torch.Tensor) -> float:
    """GB/s of a copy from the device to itself that reads and writes `nbytes` together."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return nbytes / milliseconds(lambda: target.copy_(source), flush) / 1e6


def torch_store(active: ActivePool, kept: CheckpointPool, slots: torch.Tensor) -> None:
    """The same states in torch operations, without the care for edges: gather, quantize, scatter."""
    states, kept_states = active.rows["state"].whole[:, slots], kept.rows["state"].whole
    if kept.format != "int8":
        kept_states[:, slots] = states.to(kept_states.dtype)
        return
    x, axis = states.float(), _reduced_axis(active)
    scale = (x.abs().amax(dim=axis, keepdim=True).clamp(min=1e-8) / 127.0).to(kept.rows["scale"].whole.dtype)
    kept_states[:, slots] = (x / scale.float()).round().clamp(-127, 127).to(torch.int8)
    kept.rows["scale"].whole[:, slots] = scale.squeeze(axis)


def torch_load(active: ActivePool, kept: CheckpointPool, slots: torch.Tensor) -> None:
    """The same states in torch operations: gather, multiply, scatter."""
    states, q = active.rows["state"].whole, kept.rows["state"].whole[:, slots]
    if kept.format != "int8":
        states[:, slots] = q.to(states.dtype)
        return
    scale = kept.rows["scale"].whole[:, slots].float().unsqueeze(_reduced_axis(active))
    states[:, slots] = (q.float() * scale).to(states.dtype)


def _reduced_axis(active: ActivePool) -> int:
    """The axis of d_v."""
    return -2 if active.spec.layout == "k_last" else -1


DIRECTIONS: dict[Direction, Callable[[ActivePool, CheckpointPool, torch.Tensor], None]] = {
    "store": torch_store,
    "load": torch_load,
}


def torch_milliseconds(work: Callable[[], Any], flush: torch.Tensor) -> float | None:
    """Median time, or none where the operations' temporaries do not fit."""
    try:
        return milliseconds(work, flush)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def measure(setup: Setup, copied: float, flush: torch.Tensor) -> Iterator[Row]:
    """Both directions for every number of pairs."""
    spec = setup.spec()
    active, kept = setup.pools(spec, max(PAIRS))
    codec = build(active, kept)
    for pairs in PAIRS:
        slots = torch.arange(1, pairs + 1, device="cuda")
        nbytes = pairs * (spec.slot_bytes("native") + spec.slot_bytes(setup.format))
        same_size = copy_rate(nbytes, flush)
        for direction, in_torch in DIRECTIONS.items():
            batch = codec.batch(direction, pairs)
            batch.fill([(slot, slot) for slot in range(1, pairs + 1)])
            fused = milliseconds(batch.enqueue, flush)
            by_torch = None
            if not setup.by_layer:
                by_torch = torch_milliseconds(partial(in_torch, active, kept, slots), flush)
            rate, ratio = nbytes / fused / 1e6, by_torch / fused if by_torch else None
            yield Row(setup, direction, pairs, fused, rate, rate / copied, rate / same_size, ratio)


def measure_overhead(flush: torch.Tensor) -> dict[str, float]:
    """What a launch costs beside moving: the host's time, and that of blocks without a pair."""
    active, kept = MAIN.pools(MAIN.spec(), max(PAIRS))
    codec: CudaCodec = build(active, kept)
    transfer, found = Transfer(active, kept), {}
    for pairs in (1, max(PAIRS)):
        slots = [(slot, slot) for slot in range(1, pairs + 1)]
        found[f"host us of an eager store, {pairs} pairs"] = host_microseconds(partial(transfer.store, slots))
        found[f"host us of an eager load, {pairs} pairs"] = host_microseconds(partial(transfer.load, slots))
    empty = codec.batch("store", max(PAIRS))
    found["host us of enqueueing a batch"] = host_microseconds(empty.enqueue)
    found[f"ms of a store of {max(PAIRS)} empty pairs"] = milliseconds(empty.enqueue, flush)
    found["blocks of an empty pair"] = empty.blocks_of_pair
    return found


def missing() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return "no GPU: torch finds no CUDA device, so nothing was tested or measured"
    if find_spec("cupy") is None:
        return "no CuPy: install radixstate[cuda12] or radixstate[cuda13]"
    return None


def benchmark() -> dict[str, Any]:
    """Measures everything and prints the table."""
    flush = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    copied = copy_rate(1 << 31, flush)
    print(f"{torch.cuda.get_device_name()}: a copy moves {copied:.0f} GB/s, read and written")
    line = "{:32} {:6} {:>5} {:>10} {:>8} {:>8} {:>10} {:>9}  {}"
    print(line.format("state", "", "pairs", "ms", "GB/s", "of copy", "same size", "x torch", ""))
    rows = []
    for setup in SETUPS:
        for row in measure(setup, copied, flush):
            numbers = (f"{row.milliseconds:.4f}", f"{row.gb_per_s:.0f}")
            fractions = (f"{row.copy_fraction:.2f}", f"{row.same_size_fraction:.2f}")
            ratio = "" if row.torch_ratio is None else f"{row.torch_ratio:.1f}"
            verdict = "; ".join(row.missed())
            print(line.format(str(setup), row.direction, row.pairs, *numbers, *fractions, ratio, verdict))
            rows.append(row)
        torch.cuda.empty_cache()
    overhead = measure_overhead(flush)
    for name, value in overhead.items():
        print(f"{name}: {value:.4g}")
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": copied,
        "targets": TARGETS,
        "rows": [asdict(row) | {"missed": row.missed()} for row in rows],
        "overhead": overhead,
    }


def run_tests() -> int:
    """Exit code of the GPU tests. A warning of this machine's libraries is shown, and fails nothing."""
    return subprocess.run([sys.executable, "-m", "pytest", "-W", "default", "tests/test_gpu.py"]).returncode


def main() -> None:
    """Tests, measures, writes; ends with an error if a test failed or a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"), help="default: %(default)s")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"missing": missing()}
    failed, began = 0, time.monotonic()
    if result["missing"]:
        print(result["missing"])
    else:
        if not arguments.skip_tests:
            failed = run_tests()
            result["tests_passed"] = failed == 0
        result |= benchmark() | {"seconds": time.monotonic() - began}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")
    missed = [row for row in result.get("rows", ()) if row["missed"]]
    if missed:
        print(f"{len(missed)} of {len(result['rows'])} rows miss a goal")
    sys.exit(failed or int(bool(missed)))


if __name__ == "__main__":
    main()
