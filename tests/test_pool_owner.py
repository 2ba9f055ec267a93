"""An active pool belongs to one cache."""

import gc
from typing import Any

import pytest
import torch
from radixstate import ActivePool, PrefixCache, StateSpec
from radixstate.errors import BudgetError, ConfigError

SPEC = StateSpec(layers=2, heads=2, d_k=4, d_v=4, dtype="float32", layout="v_last")


def make(active: ActivePool, **changes: Any) -> PrefixCache:
    return PrefixCache(
        SPEC, active=active, **({"kv_pages": 16, "page_size": 4, "checkpoint_stride": 4} | changes)
    )


def bound() -> ActivePool:
    return ActivePool.bind(SPEC, state=torch.zeros(2, 4, 2, 4, 4))


@pytest.mark.parametrize("pool", [lambda: ActivePool(SPEC, 3), bound], ids=["allocated", "bound"])
def test_a_second_cache_over_one_pool_is_refused_and_the_first_goes_on(pool: Any) -> None:
    active = pool()
    first = make(active)
    with first.start([1, 2, 3]) as seq:
        active.state(seq.slot).fill_(5)
        with pytest.raises(ConfigError, match=r"belongs to one cache: this one, of 3 slots, has one already"):
            make(active)
        assert (active.state(seq.slot) == 5).all()
    first.check()


def test_a_cache_that_is_refused_leaves_the_pool_to_the_first() -> None:
    active = ActivePool(SPEC, 3)
    first = make(active)
    with pytest.raises(ConfigError) as kept:
        make(active)
    del first
    gc.collect()
    assert kept.value
    with make(active).start([1]) as seq:
        assert seq.slot == 1


def test_a_pool_is_free_again_when_its_cache_is_gone() -> None:
    active = ActivePool(SPEC, 3)
    for _ in range(3):
        cache = make(active)
        with cache.start([1, 2]) as seq:
            assert seq.slot == 1
        del cache, seq
        gc.collect()


def test_a_running_sequence_keeps_the_pool_for_its_cache() -> None:
    active = ActivePool(SPEC, 3)
    seq = make(active).start([1, 2])
    gc.collect()
    with pytest.raises(ConfigError, match="belongs to one cache"):
        make(active)
    seq.finish()
    del seq
    gc.collect()
    make(active).check()


def test_a_cache_that_could_not_be_made_owns_no_pool() -> None:
    active = ActivePool(SPEC, 3)
    with pytest.raises(BudgetError) as kept:
        make(active, checkpoint_slots=2**40)
    assert kept.value
    make(active).check()
