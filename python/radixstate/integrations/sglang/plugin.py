"""What sglang calls at its start, by the entry point group `sglang.srt.plugins`. Nothing of sglang is patched."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from radixstate.errors import ConfigError

if TYPE_CHECKING:
    from radixstate.integrations.sglang.backend import RadixStateCache

NAME = "radixstate"
"""What `--radix-cache-backend` selects."""

INT8_POOL = "RADIXSTATE_INT8_POOL"
"""The variable that turns on the pool for sglang's own tree, with `--enable-int8-mamba-checkpoint`."""

SGLANG = "0.5.23"
"""The surface of sglang's caches is internal and moves with its minor versions."""


def require_version(found: str) -> None:
    """Raises ConfigError unless this is the version of sglang that the backend is written for."""
    if not re.fullmatch(rf"{re.escape(SGLANG)}(\.post\d+)?(\+.*)?", found):
        raise ConfigError(
            f"this radixstate works with sglang {SGLANG}, found {found}: install sglang=={SGLANG}, "
            "or drop --radix-cache-backend radixstate"
        )


def build(context: Any) -> RadixStateCache:
    """Makes the cache of one scheduler from sglang's `TreeCacheBuildContext`.

    Raises:
        ConfigError: another version of sglang, an option that does not work with it, or a variable with a bad value.
        BudgetError: not enough free memory for the checkpoints.
        TensorError: states of a shape that is not known here.
    """
    import sglang

    require_version(sglang.__version__)
    from radixstate.integrations.sglang.backend import RadixStateCache
    from radixstate.integrations.sglang.options import Options, refuse

    refuse(context)
    return RadixStateCache(context.params, Options.read())


def register() -> None:
    """Registers the backend, and the pool for sglang's own tree where the environment asks for it.

    Whether sglang has the right version is asked only when somebody selects one of them.

    Raises:
        ConfigError: the pool is asked for, and this is another version of sglang.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(NAME, build)
    if int8_pool_wanted():
        import sglang

        require_version(sglang.__version__)
        from radixstate.integrations.sglang.int8_pool import install

        install()


def int8_pool_wanted() -> bool:
    """Whether the environment asks for radixstate's codec behind sglang's own tree.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(INT8_POOL) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{INT8_POOL} must be 0 or 1, got {value!r}")
    return value == "1"
