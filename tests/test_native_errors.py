"""Misuse, shortages and bugs at the boundary to the core: names, rules and numbers."""

import pickle
from collections.abc import Callable

import pytest
from native import DEPTH, PROMPT, engine, make, publish, reserve, running, store
from radixstate import _native


def errors_of(parent: type[BaseException]) -> set[type[BaseException]]:
    return {error for error in parent.__subclasses__() if error.__module__ == "radixstate._native"}


def test_shortage_bug_and_misuse_never_mix() -> None:
    assert errors_of(_native.CacheError) == {
        _native.OutOfSlotsError,
        _native.NeverFitsError,
        _native.PoisonedError,
        _native.CheckError,
        _native.MisuseError,
    }
    assert issubclass(_native.MisuseError, ValueError)
    assert not issubclass(_native.OutOfSlotsError, ValueError)
    exported = {getattr(_native, name) for name in _native.__all__ if name.endswith("Error")}
    assert exported == errors_of(_native.CacheError) | errors_of(_native.MisuseError) | {_native.CacheError}
    assert all(error.__doc__ for error in exported)


def test_a_shortage_has_the_numbers_to_act_on() -> None:
    cache = make(kv_pages=6)
    store(cache)
    first = running(cache, [7, 8, 9])
    with pytest.raises(_native.OutOfSlotsError) as caught:
        cache.start([1] * 12)
    error = caught.value
    assert vars(error) == {"pool": "kv", "wanted": 6, "free": 0, "evictable": 4, "retiring": 0}
    assert str(error) == "kv pool: wanted 6, 0 free, 4 evictable, 0 retiring"
    with pytest.raises(_native.NeverFitsError) as never:
        cache.grow(first.sequence, 10)
    assert (never.value.pool, never.value.wanted, never.value.capacity) == ("kv", 7, 6)
    assert str(never.value) == "kv pool: wanted 7, capacity 6: this can never fit"
    for shortage in (error, never.value):
        restored = pickle.loads(pickle.dumps(shortage))
        assert (str(restored), vars(restored)) == (str(shortage), vars(shortage))


def test_check_lists_every_violation() -> None:
    cache = engine()
    publish(cache, [5, 6, 7, 8])
    cache.check()
    cache.check(engine_free={1, 2, 3, 4})
    with pytest.raises(_native.CheckError, match="2 invariants broken") as caught:
        cache.check(engine_free=[4, 5, 6])
    assert caught.value.violations == [
        "EngineFree: kv page 5 is free in the engine and adopted here",
        "EngineFree: kv page 6 is free in the engine and adopted here",
    ]


def misuse_config() -> None:
    make(checkpoint_slots=0)


def misuse_unaligned() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 6, 1)


def misuse_depth_past_end() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 12, 1)


def misuse_not_your_slot() -> None:
    cache = make()
    cache.reserve_checkpoint(running(cache).sequence, 8, 2)


def misuse_running_slot() -> None:
    cache = make()
    cache.give_back_slot(running(cache).sequence, 1)


def misuse_depth_passed() -> None:
    cache = make()
    store(cache)
    cache.reserve_checkpoint(running(cache).sequence, 4, 1)


def misuse_not_loaded() -> None:
    cache = make()
    cache.reserve_checkpoint(cache.start(PROMPT).sequence, 8, 1)


def misuse_already_loaded() -> None:
    cache = make()
    cache.loaded(running(cache).sequence)


def misuse_not_claimed() -> None:
    cache = make()
    cache.append(running(cache).sequence, [1, 2])


def misuse_length_mismatch() -> None:
    publish(engine(), [1, 2, 3])


def misuse_not_your_pending() -> None:
    cache = make()
    first, second = running(cache), running(cache)
    cache.commit(second.sequence, reserve(cache, first))


def misuse_stale_after_eviction() -> None:
    cache = make()
    store(cache)
    match = cache.lookup(PROMPT)
    cache.evict("checkpoint", 1)
    cache.lease(match)


def misuse_stale_after_reset() -> None:
    cache = make()
    match = cache.lookup(PROMPT)
    cache.reset()
    cache.lease(match)


def misuse_unknown_step() -> None:
    cache = make()
    cache.begin_step()
    cache.retire_step(7)


def misuse_page_range() -> None:
    publish(engine(), [1, 2, 3, 17])


def misuse_page_sign() -> None:
    publish(engine(), [1, 2, -3, 4])


def misuse_page_twice() -> None:
    publish(engine(), [1, 2, 3, 3])


def misuse_prefix_mismatch() -> None:
    cache = engine()
    publish(cache, [5, 6, 7, 8])
    cache.reserve(cache.lease(cache.lookup(PROMPT)), [9] * DEPTH, [])


def misuse_too_many_pages() -> None:
    cache = engine(logical=True, kv_pages=3)
    cache.extend(cache.lease(cache.lookup(PROMPT)), PROMPT[:8])


def misuse_numbered_pages() -> None:
    cache = engine(logical=True)
    cache.extend(cache.lease(cache.lookup(PROMPT)), PROMPT[:8], [1, 2, 3, 4])


def misuse_slot_of_a_lease() -> None:
    cache = engine(active_slots=2)
    cache.give_back_slot(cache.lease(cache.lookup(PROMPT)), 1)


def misuse_pool_name() -> None:
    make().usage("kvs")  # type: ignore[arg-type]  # the mistake itself


MISUSES: list[tuple[str, str, Callable[[], object]]] = [
    ("Config", "the checkpoint pool has 0 slots: nothing could ever be reused", misuse_config),
    ("EmptyPrompt", "a prompt has at least one token, got 0", lambda: make().start([])),
    (
        "Unaligned",
        "checkpoint depth 6 is not a multiple of 4 = lcm(page size, checkpoint stride)",
        misuse_unaligned,
    ),
    (
        "DepthPastEnd",
        "checkpoint depth 12 is past the 9 tokens this sequence has written",
        misuse_depth_past_end,
    ),
    ("NotYourSlot", "active slot 2 is not one of this request's slots", misuse_not_your_slot),
    (
        "RunningSlot",
        "active slot 1 holds the running state: it goes back with its sequence",
        misuse_running_slot,
    ),
    (
        "DepthPassed",
        "checkpoint depth 4 is behind active slot 1, whose state is of 8 tokens or more",
        misuse_depth_passed,
    ),
    (
        "NotLoaded",
        "a slot is a source only after its load or clear was reported by loaded()",
        misuse_not_loaded,
    ),
    ("AlreadyLoaded", "loaded() is reported once for each sequence", misuse_already_loaded),
    ("NotClaimed", "append would reach 11 tokens, only 9 are claimed: grow first", misuse_not_claimed),
    ("LengthMismatch", "3 pages given, 4 expected", misuse_length_mismatch),
    (
        "NotYourPending",
        "this pending checkpoint was reserved by another sequence or lease",
        misuse_not_your_pending,
    ),
    ("Stale", "stale match: its checkpoint was evicted after the lookup", misuse_stale_after_eviction),
    ("Stale", "stale match: the cache was reset after the lookup", misuse_stale_after_reset),
    ("UnknownStep", "step 7 was never begun, the newest is 1", misuse_unknown_step),
    ("PageOwnership", "kv page 17 is outside 1..=capacity", misuse_page_range),
    ("PageOwnership", "kv page -3 at position 2 is outside 1..=capacity", misuse_page_sign),
    ("PageOwnership", "kv page 3 is given twice", misuse_page_twice),
    (
        "PrefixMismatch",
        "the tokens do not begin with the 8 tokens of the leased prefix",
        misuse_prefix_mismatch,
    ),
    (
        "TooManyPages",
        "4 kv pages handed over, 3 numbers are free and 0 wait for take_freed()",
        misuse_too_many_pages,
    ),
    ("LengthMismatch", "4 pages given, 0 expected: the cache numbers them", misuse_numbered_pages),
    ("NotYourSlot", "active slot 1 is not one of this request's slots", misuse_slot_of_a_lease),
    ("Misuse", "pool 'kvs' is none of 'kv', 'active', 'checkpoint'", misuse_pool_name),
]


@pytest.mark.parametrize(("name", "message", "misuse"), MISUSES)
def test_a_misuse_names_the_rule_and_the_numbers(
    name: str, message: str, misuse: Callable[[], object]
) -> None:
    with pytest.raises(_native.MisuseError) as caught:
        misuse()
    assert (type(caught.value).__name__, str(caught.value)) == (f"{name}Error", message)
