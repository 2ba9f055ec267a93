"""Groups of layers in a pair of pools, as a codec takes them: one codec moves one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from radixstate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixstate.states.formats import Format
    from radixstate.states.pools import ActivePool, CheckpointPool
    from radixstate.states.presets import Layout
    from radixstate.states.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Part:
    """The tensors of one group of layers in both pools.

    Attributes:
        active: states of running sequences.
        checkpoint: the same, as the format keeps them.
        scale: of the checkpoints, in a format with scales.
        conv: each window in the active and in the checkpoint pool.
        layout: of a head's matrix; `flat` where a slot is one row of numbers.
        format: of the checkpoints.
    """

    active: Rows
    checkpoint: Rows
    scale: Rows | None
    conv: Sequence[tuple[Rows, Rows]]
    layout: Layout | Literal["flat"]
    format: Format

    @property
    def given(self) -> dict[str, Any]:
        """The same with tensors: arguments of `_native.CodecPlan`."""
        return {
            "active": self.active.given,
            "checkpoint": self.checkpoint.given,
            "scale": self.scale.given if self.scale else None,
            "conv": [(source.given, kept.given) for source, kept in self.conv],
            "layout": self.layout,
            "format": self.format,
        }


def parts(active: ActivePool, checkpoints: CheckpointPool) -> list[Part]:
    """The groups of two pools of one spec.

    In a group without a matrix the first window is moved as the state, bit for bit.
    """
    found = []
    for source, kept in zip(active.groups, checkpoints.groups, strict=True):
        conv = list(zip(source.windows, kept.windows, strict=True))
        if source.state is not None and kept.state is not None:
            part = Part(
                active=source.state,
                checkpoint=kept.state,
                scale=kept.scale,
                conv=conv,
                layout=source.spec.layout,
                format=checkpoints.format,
            )
        else:
            (window, copy), *others = conv
            part = Part(
                active=window.flat(),
                checkpoint=copy.flat(),
                scale=None,
                conv=others,
                layout="flat",
                format="native",
            )
        found.append(part)
    return found


def part(active: ActivePool, checkpoints: CheckpointPool, group: int | None) -> Part:
    """One group of two pools of one spec, which need not be named where there is no other.

    Raises:
        ConfigError: there is no such group, or there are several and none is named.
    """
    found = parts(active, checkpoints)
    if group is None and len(found) > 1:
        raise ConfigError(
            f"a codec moves one group of layers and the pools hold {len(found)}: give group=0 to {len(found) - 1}"
        )
    number = group or 0
    if not 0 <= number < len(found):
        raise ConfigError(f"group {number} is not in 0..={len(found) - 1}")
    return found[number]
