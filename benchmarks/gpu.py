"""The CUDA codec on a GPU: its tests, then its speed against a plain copy and against torch's operations.

Writes out/gpu.json; without a GPU it says so and ends. It needs no Rust where radixstate is installed from a
wheel, with the extras cuda12 or cuda13 and, for the tests, testing and pytest. Run it from the repository's root:

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
from radixstate import ActivePool, CheckpointPool, ConvSpec, StateSpec
from radixstate.cuda import CudaCodec, build
from radixstate.cuda.specialise import Direction

PAIRS = (1, 4, 16, 64)
TARGETS = {"copy_fraction": 0.9, "store_ratio": 10.0, "load_ratio": 6.0}
REPEATS = 20


@dataclass(frozen=True)
class Row:
    """One direction at one size.

    Attributes:
        dtype: of the states, which are else like those of Qwen3-Next, see `qwen3_next`.
        pairs: moved by one launch.
        milliseconds: median of the launch.
        gb_per_s: of the fewest bytes that can be moved, read and written.
        copy_fraction: of the rate of a long device-to-device copy in the same run.
        same_size_fraction: of the rate of a copy that moves as many bytes: a short one is slower than a long one.
        torch_ratio: how many times as long torch's operations take, which leave out the window; none where
            their temporaries do not fit into memory.
    """

    dtype: str
    direction: str
    pairs: int
    milliseconds: float
    gb_per_s: float
    copy_fraction: float
    same_size_fraction: float
    torch_ratio: float | None


def qwen3_next(dtype: str) -> StateSpec:
    """36 layers of 32 heads of 128 x 128, and a conv window of 8192 x 3."""
    window = ConvSpec((8192, 3), "bfloat16")
    return StateSpec(layers=36, heads=32, d_k=128, d_v=128, dtype=dtype, layout="k_last", conv=(window,))


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


def copy_rate(nbytes: int, flush: torch.Tensor) -> float:
    """GB/s of a copy from the device to itself that reads and writes `nbytes` together."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return nbytes / milliseconds(lambda: target.copy_(source), flush) / 1e6


def pools(spec: StateSpec, slots: int) -> tuple[ActivePool, CheckpointPool, CudaCodec]:
    """An active pool of normal numbers, a checkpoint pool, and what moves states between them."""
    active, kept = ActivePool(spec, slots, device="cuda"), CheckpointPool(spec, slots, device="cuda")
    assert active.rows["state"].whole is not None
    active.rows["state"].whole.normal_()
    return active, kept, build(active, kept)


def torch_store(active: ActivePool, kept: CheckpointPool, slots: torch.Tensor) -> None:
    """The same states in torch operations, without the care for edges: gather, quantize, scatter."""
    x = active.rows["state"].whole[:, slots].float()
    scale = (x.abs().amax(dim=-2, keepdim=True).clamp(min=1e-8) / 127.0).to(kept.rows["scale"].whole.dtype)
    kept.rows["state"].whole[:, slots] = (x / scale.float()).round().clamp(-127, 127).to(torch.int8)
    kept.rows["scale"].whole[:, slots] = scale.squeeze(-2)


def torch_load(active: ActivePool, kept: CheckpointPool, slots: torch.Tensor) -> None:
    """The same states in torch operations: gather, multiply, scatter."""
    q, scale = kept.rows["state"].whole[:, slots], kept.rows["scale"].whole[:, slots]
    states = active.rows["state"].whole
    states[:, slots] = (q.float() * scale.float().unsqueeze(-2)).to(states.dtype)


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


def measure(dtype: str, copied: float, flush: torch.Tensor) -> Iterator[Row]:
    """Both directions for every number of pairs."""
    spec = qwen3_next(dtype)
    active, kept, codec = pools(spec, max(PAIRS))
    for pairs in PAIRS:
        slots = torch.arange(1, pairs + 1, device="cuda")
        nbytes = pairs * (spec.slot_bytes("native") + spec.slot_bytes("int8"))
        same_size = copy_rate(nbytes, flush)
        for direction, in_torch in DIRECTIONS.items():
            batch = codec.batch(direction, pairs)
            batch.fill([(slot, slot) for slot in range(1, pairs + 1)])
            fused = milliseconds(batch.enqueue, flush)
            by_torch = torch_milliseconds(partial(in_torch, active, kept, slots), flush)
            rate, ratio = nbytes / fused / 1e6, by_torch / fused if by_torch else None
            yield Row(dtype, direction, pairs, fused, rate, rate / copied, rate / same_size, ratio)


def met(row: Row) -> bool:
    """Whether a row reaches its goal. There is none for one pair, nor for the ratio in float32."""
    if row.pairs < 4:
        return True
    wanted = TARGETS[f"{row.direction}_ratio"] if row.dtype == "bfloat16" else 0.0
    return row.copy_fraction >= TARGETS["copy_fraction"] and (
        row.torch_ratio is None or row.torch_ratio >= wanted
    )


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
    line = "{:9} {:6} {:>5} {:>10} {:>8} {:>8} {:>10} {:>9}  {}"
    print(line.format("state", "", "pairs", "ms", "GB/s", "of copy", "same size", "x torch", ""))
    rows = []
    for dtype in ("bfloat16", "float32"):
        for row in measure(dtype, copied, flush):
            numbers = (f"{row.milliseconds:.4f}", f"{row.gb_per_s:.0f}")
            fractions = (f"{row.copy_fraction:.2f}", f"{row.same_size_fraction:.2f}")
            verdict = "" if met(row) else "below the goal"
            ratio = "no memory" if row.torch_ratio is None else f"{row.torch_ratio:.1f}"
            print(line.format(row.dtype, row.direction, row.pairs, *numbers, *fractions, ratio, verdict))
            rows.append(row)
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": copied,
        "targets": TARGETS,
        "rows": [asdict(row) | {"met": met(row)} for row in rows],
    }


def run_tests() -> int:
    """Exit code of the GPU tests. A warning of this machine's libraries is shown, and fails nothing."""
    return subprocess.run([sys.executable, "-m", "pytest", "-W", "default", "tests/test_gpu.py"]).returncode


def main() -> None:
    """Tests, measures, writes; ends with an error if a test failed."""
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
    sys.exit(failed)


if __name__ == "__main__":
    main()
