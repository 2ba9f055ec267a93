"""What a user of the backend chooses, by environment variables, and what is refused, by the name of sglang's option."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from radixstate.budget import slots_that_fit
from radixstate.errors import BudgetError, ConfigError
from radixstate.states import Format, StateSpec

SLOTS, BYTES = "RADIXSTATE_CHECKPOINT_SLOTS", "RADIXSTATE_CHECKPOINT_BYTES"
FORMAT, POLICY = "RADIXSTATE_FORMAT", "RADIXSTATE_POLICY"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Options:
    """What the environment says.

    Attributes:
        checkpoint_slots: cached states; None for as many as the bytes hold, or twice the active slots.
        checkpoint_bytes: of the checkpoint pool.
        format: of the checkpoints.
        policy: which cached state is evicted first.
    """

    checkpoint_slots: int | None = None
    checkpoint_bytes: int | None = None
    format: Format = "int8"
    policy: str = "lru"

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Reads the variables `RADIXSTATE_...`; an empty one counts as not set.

        Raises:
            ConfigError: a value is not one of those that are allowed; the message names the variable.
        """
        given = {name: value for name, value in environment.items() if value}
        slots = _number(SLOTS, given.get(SLOTS), units=("",))
        nbytes = _number(BYTES, given.get(BYTES), units=tuple(_UNITS))
        if slots is not None and nbytes is not None:
            raise ConfigError(f"{SLOTS} and {BYTES} both say how many states are cached: set one")
        format = given.get(FORMAT, cls.format)
        for known in get_args(Format):
            if format == known:
                return cls(slots, nbytes, known, given.get(POLICY, cls.policy))
        raise ConfigError(f"{FORMAT} must be one of {', '.join(get_args(Format))}, got {format!r}")

    def slots(self, spec: StateSpec) -> int | None:
        """Checkpoint slots for states of a spec; None for the default.

        Raises:
            BudgetError: the bytes hold no slot.
        """
        if self.checkpoint_bytes is None:
            return self.checkpoint_slots
        slots = slots_that_fit(spec, self.checkpoint_bytes, self.format)
        if not slots:
            raise BudgetError(
                f"{BYTES} is {self.checkpoint_bytes}, but 1 slot and the padding sink of {self.format} need "
                f"{2 * spec.slot_bytes(self.format)}"
            )
        return slots


def _number(name: str, value: str | None, *, units: tuple[str, ...]) -> int | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+)([KMG]?)", value.strip())
    if not found or found[2] not in units or not int(found[1]):
        allowed = "a positive integer" + (", with K, M or G for powers of 1024" if len(units) > 1 else "")
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
    return int(found[1]) * _UNITS[found[2]]


def refuse(context: Any) -> None:
    """Raises ConfigError with the options of a `TreeCacheBuildContext` that the backend does not work with, and why."""
    wrong = [f"{option}: {why}" for option, on, why in _refused(context) if on]
    if wrong:
        raise ConfigError(f"--radix-cache-backend radixstate does not work with {'; '.join(wrong)}")
    if not context.is_hybrid_ssm:
        raise ConfigError(
            "--radix-cache-backend radixstate is for models with recurrent layers, this model has none"
        )


def _refused(context: Any) -> list[tuple[str, bool, str]]:
    """Option, whether it is on, and why not."""
    args, params, pool = context.server_args, context.params, context.params.req_to_token_pool
    side_states = any(
        getattr(getattr(pool, name, None), "enabled", False) for name in ("short_conv_pool", "ngram_pool")
    )
    no_tier = "cached states have no tier on the host"
    agreed = "ranks do not agree yet on states that are not finite"
    states = getattr(pool, "mamba_pool", None)
    return [
        ("--disable-radix-cache", context.disable_radix_cache, "nothing would be cached"),
        (
            "--speculative-algorithm",
            params.is_eagle or args.speculative_algorithm is not None,
            "keys of two tokens and states of drafts are not known here",
        ),
        ("--tp-size > 1", context.tp_size > 1, agreed),
        ("--pp-size > 1", params.pp_size > 1, agreed),
        ("--attn-cp-size > 1", params.attn_cp_size > 1, agreed),
        ("--dcp-size > 1", args.dcp_size > 1, "a page would lie on several ranks"),
        (
            "--mamba-radix-cache-strategy extra_buffer_lazy",
            params.enable_mamba_extra_buffer_lazy,
            "use extra_buffer",
        ),
        (
            "--mamba-max-states-per-path",
            args.mamba_max_states_per_path >= 0,
            f"the pool's size is the limit: {SLOTS}",
        ),
        (
            "--radix-eviction-policy",
            params.eviction_policy.lower() != "lru",
            f"choose a policy of radixstate by {POLICY}",
        ),
        ("a model with sliding windows", _slides(context), "their pages are not cached"),
        ("--kv-events-config", params.enable_kv_cache_events, "no events are written"),
        (
            "--enable-session-radix-cache",
            params.enable_session_radix_cache,
            "sessions are part of sglang's tree",
        ),
        ("--disaggregation-mode", args.disaggregation_mode != "null", "states are not sent"),
        ("--enable-hierarchical-cache", context.enable_hierarchical_cache, no_tier),
        ("--enable-lmcache", args.enable_lmcache, no_tier),
        ("--enable-flexkv", args.enable_flexkv, no_tier),
        ("--enable-unified-memory", args.enable_unified_memory, "its slots of states move"),
        (
            "--enable-linear-replayssm",
            getattr(states, "replayssm_write_pos", None) is not None
            or getattr(states, "replayssm_spec_write_pos", None) is not None,
            "states lag behind their tokens",
        ),
        (
            "--enable-int8-mamba-checkpoint",
            getattr(pool, "mamba_ckpt_pool", None) is not None,
            "radixstate has a pool",
        ),
        ("a model with side states", side_states, "they are not cached"),
    ]


def _slides(context: Any) -> bool:
    return context.is_hybrid_swa or context.params.sliding_window_size is not None
