"""What to fuzz with: prompts that share prefixes, caches that are always short of something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from radixstate import ConvSpec, Namespace, StateSpec

NAMESPACES = (
    Namespace(),
    Namespace(adapter=1),
    Namespace(tenant="a"),
    Namespace(tenant="b"),
    Namespace(weights=1),
    Namespace(salts=("a",)),
)
"""The bare model's, and one for each thing that keeps prefixes apart."""

_FORKS = (0, 3, 6, 8, 11, 12)


def prompts(*, longest: int = 20, tokens: Sequence[int] = (0, 1)) -> st.SearchStrategy[list[int]]:
    """Prompts of 1 to `longest` tokens: any two share a prefix, and part ways somewhere or nowhere.

    They repeat the first of two `tokens`, and from one of a few forks on the second.
    """
    lengths, forks = (
        st.sampled_from(range(1, longest + 1)),
        st.sampled_from([*_FORKS, longest, longest, longest]),
    )
    return st.builds(lambda n, fork: [tokens[i >= fork] for i in range(n)], lengths, forks)


def namespaces() -> st.SearchStrategy[Namespace]:
    """Namespaces, mostly the bare model's, so that prefixes meet."""
    return st.sampled_from([NAMESPACES[0]] * 6 + [*NAMESPACES[1:]])


def specs() -> st.SearchStrategy[StateSpec]:
    """Tiny states of every type and layout, with a convolution window or none."""
    return st.builds(
        lambda dtype, layout, conv: StateSpec(
            layers=2, heads=1, d_k=2, d_v=3, dtype=dtype, layout=layout, conv=conv
        ),
        st.sampled_from(["float32", "bfloat16", "float16"]),
        st.sampled_from(["v_last", "k_last"]),
        st.sampled_from([(ConvSpec((2,), "float32"),), ()]),
    )


def sizes() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a `PrefixCache` beside its spec: any format, page size and stride, and pools too small for comfort.

    A model may also have no KV at all.
    """
    return st.builds(_options, _few(), _few(), _tokens(), st.integers(2, 5), _few(), _formats())


def engine_sizes() -> st.SearchStrategy[dict[str, Any]]:
    """The same for an `EngineCache`: with pages under the engine's ids or under numbers, and slots of either's."""
    kind = st.fixed_dictionaries({"logical": st.booleans(), "own_slots": st.booleans()})
    return st.builds(lambda options, kind: options | kind, sizes(), kind)


def _few() -> st.SearchStrategy[int]:
    return st.sampled_from([2, 1, 2, 3, 3, 4])


def _tokens() -> st.SearchStrategy[int]:
    """Tokens of all KV pages."""
    return st.sampled_from([0, 13, 20, 30, 50])


def _formats() -> st.SearchStrategy[str]:
    return st.sampled_from(["int8", "bf16", "native"])


def _options(
    page: int, stride: int, tokens: int, active: int, checkpoints: int, format: str
) -> dict[str, Any]:
    return {
        "page_size": page,
        "checkpoint_stride": stride,
        "kv_pages": -(-tokens // page),
        "active_slots": active,
        "checkpoint_slots": checkpoints,
        "format": format,
    }
