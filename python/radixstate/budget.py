"""Bytes to slots: what the pools cost, to the byte, before anything is allocated."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from radixstate.errors import BudgetError, ConfigError, TensorError
from radixstate.states import ActivePool, Format, StateSpec

if TYPE_CHECKING:
    import torch

CHECKPOINTS_PER_ACTIVE = 2
"""Default of `checkpoint_slots`: twice the active slots, which int8 fits in about their bytes in bfloat16."""


@dataclass(frozen=True)
class Plan:
    """Slots and exact bytes of each pool, the padding sink (row 0) of each counted.

    Attributes:
        active_slots: running sequences.
        checkpoint_slots: cached states.
        kv_pages: pages of the engine's KV cache.
        active_bytes: of the active pool.
        checkpoint_bytes: of the checkpoint pool.
        kv_bytes: of the KV pool; 0 when pages have no size.
    """

    active_slots: int
    checkpoint_slots: int
    kv_pages: int
    active_bytes: int
    checkpoint_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return self.active_bytes + self.checkpoint_bytes + self.kv_bytes

    def check(self, device: str | torch.device = "cpu") -> None:
        """Compares the plan with the free memory of `device`, before allocating.

        Where free memory cannot be read (neither CUDA nor Linux's /proc/meminfo), a RuntimeWarning says so.

        Raises:
            BudgetError: the plan needs more than is free; the message says what to lower.
        """
        free = free_bytes(device)
        if free is None:
            warnings.warn(
                f"free memory of {device} cannot be read: a plan of {self.total_bytes} bytes goes unchecked",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self.total_bytes > free:
            raise BudgetError(self._shortage(f"{device} has", free))

    def warn_if_crowded(self, prompt_tokens: int, stride: int) -> None:
        """Says with a RuntimeWarning when running prompts store more states than there are checkpoint slots.

        Each then evicts what the others stored, mostly before anybody comes back for it.

        Args:
            prompt_tokens: tokens of a typical prompt.
            stride: tokens between two states that are stored of one prompt.

        Raises:
            ConfigError: a number is out of range.
        """
        _require_least({"prompt_tokens": (prompt_tokens, 0), "stride": (stride, 1)})
        wanted = self.active_slots * (prompt_tokens // stride)
        if wanted > self.checkpoint_slots:
            warnings.warn(
                f"{self.active_slots} running prompts of {prompt_tokens} tokens store {wanted} states, one every "
                f"{stride} tokens, in {self.checkpoint_slots} checkpoint slots: raise checkpoint_slots, or store fewer",
                RuntimeWarning,
                stacklevel=2,
            )

    def _shortage(self, who: str, available: int) -> str:
        parts = {
            "active_slots": (self.active_slots, self.active_bytes),
            "checkpoint_slots": (self.checkpoint_slots, self.checkpoint_bytes),
            "kv_pages": (self.kv_pages, self.kv_bytes),
        }
        costs = [f"{name} {count} = {nbytes} bytes" for name, (count, nbytes) in parts.items() if nbytes]
        largest = max(parts, key=lambda name: parts[name][1])
        missing = self.total_bytes - available
        return (
            f"the pools need {self.total_bytes} bytes ({', '.join(costs)}), {who} {available}: "
            f"{missing} too many, lower {largest} first"
        )


def plan(
    spec: StateSpec,
    *,
    active_slots: int | None = None,
    checkpoint_slots: int | None = None,
    format: Format = "int8",
    page_bytes: int = 0,
    kv_pages: int | None = None,
    total_bytes: int | None = None,
) -> Plan:
    """Sizes the pools. With `total_bytes`, what was not given is as large as that allows.

    Args:
        spec: what a slot holds.
        active_slots: sequences that run at once; by default half of the checkpoint slots that fit.
        checkpoint_slots: cached states; by default twice the active slots, or what `total_bytes` leaves when
            the number of pages is known.
        format: of the checkpoints.
        page_bytes: bytes of one KV page over all attention layers; 0 for a purely linear model.
        kv_pages: pages of KV; by default what `total_bytes` leaves, and 0 without it.
        total_bytes: upper bound for all pools together.

    Raises:
        ConfigError: a number of slots or bytes is out of range, or too little is given to decide the rest.
        BudgetError: the pools need more than `total_bytes`; the message says what to lower.
    """
    pages_known = kv_pages is not None or page_bytes == 0
    kv_known = (kv_pages + 1) * page_bytes if kv_pages else 0
    if active_slots is None:
        if total_bytes is None or not pages_known or checkpoint_slots is not None:
            raise ConfigError(
                "give active_slots, or total_bytes with the number of kv_pages and without checkpoint_slots"
            )
        active_slots = _active_that_fit(spec, format, total_bytes - kv_known)
    if checkpoint_slots is None:
        checkpoint_slots = CHECKPOINTS_PER_ACTIVE * active_slots
        if total_bytes is not None and pages_known:
            left = total_bytes - kv_known - (active_slots + 1) * spec.slot_bytes("native")
            checkpoint_slots = max(1, slots_that_fit(spec, left, format))
    counts = {"active_slots": (active_slots, 1), "checkpoint_slots": (checkpoint_slots, 1)}
    counts |= {"page_bytes": (page_bytes, 0), "kv_pages": (kv_pages or 0, 0)}
    _require_least(counts)
    active = (active_slots + 1) * spec.slot_bytes("native")
    checkpoints = (checkpoint_slots + 1) * spec.slot_bytes(format)
    if kv_pages is None:
        left = (total_bytes or 0) - active - checkpoints
        kv_pages = max(0, left // page_bytes - 1) if page_bytes else 0
    kv = (kv_pages + 1) * page_bytes if kv_pages else 0
    made = Plan(active_slots, checkpoint_slots, kv_pages, active, checkpoints, kv)
    if total_bytes is not None and made.total_bytes > total_bytes:
        raise BudgetError(made._shortage("total_bytes is", total_bytes))
    return made


def of_pools(
    spec: StateSpec,
    active: ActivePool | None,
    active_slots: int | None,
    checkpoint_slots: int | None,
    format: Format,
) -> Plan:
    """What a cache allocates. An engine's active tensors decide their number of slots, and cost nothing.

    Raises:
        ConfigError: see `plan`, or `active_slots` is not the number of `active`.
        TensorError: `active` holds states of another spec.
    """
    if active is None:
        slots = 16 if active_slots is None else active_slots
        return plan(spec, active_slots=slots, checkpoint_slots=checkpoint_slots, format=format)
    if active.spec != spec:
        raise TensorError(f"the active pool holds {active.spec}, the cache is for {spec}")
    if active_slots not in (None, active.slots):
        raise ConfigError(f"active_slots is {active_slots}, but the active pool has {active.slots} slots")
    needed = plan(spec, active_slots=active.slots, checkpoint_slots=checkpoint_slots, format=format)
    return replace(needed, active_bytes=0)


def _require_least(counts: dict[str, tuple[int, int]]) -> None:
    """Refuses a number below its least one."""
    for name, (given, least) in counts.items():
        if given < least:
            raise ConfigError(f"{name} must be at least {least}, got {given}")


def slots_that_fit(spec: StateSpec, nbytes: int, format: Format = "int8") -> int:
    """Slots of a checkpoint pool (an active one with `native`) that `nbytes` buy beside the padding sink."""
    return max(0, nbytes // spec.slot_bytes(format) - 1)


def _active_that_fit(spec: StateSpec, format: Format, nbytes: int) -> int:
    """The most active slots that fit with `CHECKPOINTS_PER_ACTIVE` checkpoints each and both sinks; at least 1."""
    native, encoded = spec.slot_bytes("native"), spec.slot_bytes(format)
    return max(1, (nbytes - native - encoded) // (native + CHECKPOINTS_PER_ACTIVE * encoded))


def free_bytes(device: str | torch.device = "cpu") -> int | None:
    """Free memory of a device in bytes, or None where it cannot be read.

    Of a CPU it is what Linux can give without swapping, and no more than the limits of the process's control
    groups leave, such as those of its container.
    """
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return _available_memory(Path("/")) if kind == "cpu" else None


def _available_memory(root: Path) -> int | None:
    """The least of what Linux and the control groups say is available."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    return min([int(found[1]) * 1024, *_left_by_groups(root)]) if found else None


@dataclass(frozen=True)
class _Files:
    """How a version of control groups names what it says of memory.

    Attributes:
        mount: where its hierarchy is.
        limit: bytes that a group may use.
        used: bytes that it uses, the page cache included.
        cached: key of memory.stat, bytes of the page cache that can be dropped at any time.
    """

    mount: str
    limit: str
    used: str
    cached: str

    def left(self, group: Path) -> int | None:
        """Bytes that a group may still use, or None if it has no limit."""
        try:
            limit = int((group / self.limit).read_text())
            used = int((group / self.used).read_text())
        except (OSError, ValueError):  # no such file or no right to read it; "max" where there is no limit
            return None
        with suppress(OSError):
            found = re.search(rf"^{self.cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            used -= int(found[1]) if found else 0
        return max(0, limit - used)


_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group of this process that limits its memory leaves, up to the outermost one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        mount = root / files.mount
        # Seen from inside a container the path may be the host's, or lead out: then the mount itself is the group.
        inside = Path(*(part for part in Path(path).parts if part not in ("/", "..")))
        for group in (inside, *inside.parents):
            left = files.left(mount / group)
            if left is not None:
                yield left
