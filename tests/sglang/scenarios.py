"""What a cache must do in sglang, as functions of a `World`. `SCENARIOS` has them all."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from world import ACTIVE, SLOTS, World, prompt

Scenario = Callable[[World], None]
SCENARIOS: list[Scenario] = []


class NotHereError(Exception):
    """A scenario has no meaning in a setting."""


def scenario(of: Scenario) -> Scenario:
    SCENARIOS.append(of)
    return of


# ---- hits


@scenario
def a_finished_prompt_is_found_with_its_state(w: World) -> None:
    w.serve(prompt(1, 256))
    assert w.cached(prompt(1, 256)) == 256
    req = w.admit(w.request(prompt(1, 256) + prompt(2, 64)))
    assert (req.prefix_len, req.hit_ok) == (256, True)


@scenario
def a_match_never_passes_its_limit(w: World) -> None:
    w.serve(prompt(1, 256))
    assert w.match(prompt(1, 256), 255).device_prefix_len < 256
    assert w.request(prompt(1, 256)).prefix_len <= 255


@scenario
def a_key_without_a_limit_is_found_to_its_end(w: World) -> None:
    w.serve(prompt(1, 256))
    assert w.match(prompt(1, 256), 256).device_prefix_len == 256
    assert w.match([], 0).device_prefix_len == 0


@scenario
def the_branching_point_is_reported_and_lies_within_the_limit(w: World) -> None:
    stem = prompt(1, 192)
    w.serve(stem + prompt(2, 64))
    found = w.match(stem + prompt(3, 64), 255)
    assert (found.device_prefix_len, found.full_kv_hit_length, found.mamba_branching_seqlen) == (0, 192, 192)
    whole = w.match([*stem, *prompt(2, 64), 1], 256)
    assert (whole.device_prefix_len, whole.mamba_branching_seqlen) == (256, None)
    capped = w.match(stem + prompt(2, 64), 130)
    assert (capped.full_kv_hit_length <= 130, capped.mamba_branching_seqlen) == (True, 128)


@scenario
def keys_and_salts_keep_prompts_apart(w: World) -> None:
    a = prompt(1, 128)
    w.serve(a, extra_key="lora-1")
    w.serve(a, salt="tenant")
    asked = ({}, {"extra_key": "lora-1"}, {"salt": "tenant"}, {"extra_key": "tenant"}, {"salt": "x"})
    assert [w.cached(a, **names) for names in asked] == [0, 128, 128, 0, 0]
    assert w.cached(a, extra_key="lora-1", salt="tenant") == 0


# ---- eviction of states


@scenario
def cached_states_take_no_active_slots(w: World) -> None:
    for i in range(SLOTS):
        w.serve(prompt(i, 64))
    assert w.pool.mamba_allocator.available_size() == ACTIVE
    assert w.cache.mamba_evictable_size() == SLOTS
    assert w.pool.mamba_ckpt_pool.available_size() == 0


@scenario
def the_oldest_state_goes_first(w: World) -> None:
    for i in range(SLOTS + 1):
        w.serve(prompt(i, 64))
    assert [w.cached(prompt(i, 64)) for i in range(SLOTS + 1)] == [0] + [64] * SLOTS


@scenario
def a_hit_that_was_served_is_kept_longest(w: World) -> None:
    for i in range(SLOTS):
        w.serve(prompt(i, 64))
    w.serve(prompt(0, 64) + prompt(99, 64))
    assert (w.cached(prompt(0, 64)), w.cached(prompt(1, 64))) == (64, 0)


@scenario
def what_a_waiting_request_will_reuse_is_kept(w: World) -> None:
    for i in range(SLOTS):
        w.serve(prompt(i, 64))
    w.cache.touch_prefix(RadixKey(array("q", [*prompt(0, 64), 1, 2])))
    w.serve(prompt(99, 64))
    assert (w.cached(prompt(0, 64)), w.cached(prompt(1, 64))) == (64, 0)


@scenario
def a_pool_full_of_pinned_states_is_no_error(w: World) -> None:
    if w.extra:
        raise NotHereError("a request holds three active slots")
    for i in range(SLOTS):
        w.serve(prompt(i, 64))
    locks = [w.cache.lock(w.match([*prompt(i, 64), 1, 2], 65).last_device_node) for i in range(SLOTS)]
    try:
        w.serve(prompt(1000, 128))
    finally:
        for lock in locks:
            w.cache.unlock(lock)
    assert w.cached(prompt(1000, 128)) == 0


@scenario
def no_active_slot_is_a_miss(w: World) -> None:
    w.serve(prompt(1, 128))
    taken = w.pool.mamba_allocator.alloc(ACTIVE)
    try:
        req = w.request([*prompt(1, 128), 1, 2, 3])
        assert (req.prefix_len, req.kv.holds_mamba) == (0, False)
    finally:
        w.pool.mamba_allocator.free(taken)
    assert w.cached(prompt(1, 128)) == 128


@scenario
def a_state_that_is_not_finite_is_not_served(w: World) -> None:
    a = prompt(1, 128)
    req = w.admit(w.request(a))
    slots = list(req.kv.mamba_ping_pong_track_buffer) if w.extra else [req.kv.mamba_pool_idx]
    for slot in slots:
        w.states.temporal[0, int(slot), 0, 0, 0] = float("nan")
    w.finish(req)
    assert w.cached(a) == 0


# ---- KV


@scenario
def kv_that_was_there_goes_back(w: World) -> None:
    a = prompt(1, 128)
    one, two = w.request(a), w.request(a)
    w.admit(one), w.admit(two)
    free = w.kv.available_size()
    checkpoint_kv_cache(one, w.cache)
    checkpoint_kv_cache(two, w.cache)
    assert torch.equal(w.row(one, 128), w.row(two, 128))
    assert w.kv.available_size() == free + 128
    assert two.kv.cache_protected_len == 128
    w.audit()


@scenario
def chunks_are_published_as_they_come(w: World) -> None:
    a = prompt(1, 320)
    req = w.admit(w.request(a), end=128)
    checkpoint_kv_cache(req, w.cache)
    assert w.cached(a[:128]) == 128
    w.extend(req, 320)
    checkpoint_kv_cache(req, w.cache)
    assert (w.cached(a), req.kv.cache_protected_len) == (320, 320)
    w.audit()
    w.finish(req)


@scenario
def evicted_tokens_are_free(w: World) -> None:
    for i in range(4):
        w.serve(prompt(i, 256))
    free = w.kv.available_size()
    said = w.cache.evict_for_alloc(EvictParams(num_tokens=300)).num_tokens_evicted
    assert said >= 300
    assert w.kv.available_size() == free + said


@scenario
def a_shortage_of_kv_evicts_by_itself(w: World) -> None:
    for i in range(20):
        w.serve(prompt(i, 512))
        w.audit()
    assert w.cached(prompt(19, 512)) == 512


@scenario
def kv_whose_state_is_gone_is_free_when_nobody_runs_on_it(w: World) -> None:
    req = w.admit(w.request(prompt(1000, 128)))
    checkpoint_kv_cache(req, w.cache)
    for i in range(SLOTS):
        w.serve(prompt(i, 64))
    w.audit()
    w.drop(req)
    assert w.kv.available_size() + w.cache.full_evictable_size() == w.capacity


# ---- ends of requests


@scenario
def an_abort_gives_all_back(w: World) -> None:
    w.serve(prompt(1, 128))
    w.drop(w.admit(w.request(prompt(1, 128) + prompt(2, 128))))
    assert w.cached(prompt(1, 128)) == 128


@scenario
def a_candidate_that_is_rejected_leaves_nothing(w: World) -> None:
    w.serve(prompt(1, 128))
    req = w.request([*prompt(1, 128), 1, 2, 3])
    assert req.kv.holds_mamba
    req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
    w.pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
    req.kv.mamba_pool_idx = None
    assert w.cache.mamba_protected_size() == 0


@scenario
def a_stop_behind_the_last_state_stores_the_one_before(w: World) -> None:
    if not w.extra:
        raise NotHereError("there is no second slot")
    a = prompt(1, 256)
    req = w.admit(w.request(a), end=128)
    w.extend(req, 256)
    req.kv.kv_committed_len = 200
    req.finished_reason = FINISH_LENGTH(length=0)
    w.cache.checkpoint(req, up_to=192)
    assert w.cached(a) == 128
    w.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, 256)])
    w.cache.unlock(req.lock)
    w.pool.free(req)
    req.kv.mark_kv_released()
    w.running.remove(req)
    assert w.admit(w.request(a[:128] + prompt(9, 64))).hit_ok


@scenario
def what_is_locked_stays(w: World) -> None:
    w.serve(prompt(1, 128))
    req = w.admit(w.request(prompt(1, 128) + prompt(2, 64)))
    assert (w.cache.full_protected_size(), w.cache.mamba_protected_size()) == (128, 1)
    w.cache.evict(EvictParams(num_tokens=w.capacity, mamba_num=SLOTS))
    assert w.cached(prompt(1, 128)) == 128
    w.drop(req)
    assert (w.cache.full_protected_size(), w.cache.full_evictable_size()) == (0, 128)


@scenario
def a_flush_leaves_nothing(w: World) -> None:
    w.serve(prompt(1, 128))
    w.cache.reset()
    w.pool.clear()
    w.kv.clear()
    assert (w.cached(prompt(1, 128)), w.kv.available_size()) == (0, w.capacity)
    w.serve(prompt(1, 128))
    assert w.cached(prompt(1, 128)) == 128


# ---- scheduling


@scenario
def every_report_can_be_made(w: World) -> None:
    w.serve(prompt(1, 128))
    assert w.cache.total_size()[0] == 128
    assert "128" in w.cache.available_and_evictable_str()
    assert (list(w.cache.take_events()), w.cache.session_records()) == ([], {})
    w.cache.touch_prefix(RadixKey(array("q", prompt(1, 128))))
    w.cache.touch_prefix(RadixKey(array("q")))
    w.cache.pretty_print()


@scenario
def sglangs_policies_order_the_queue(w: World) -> None:
    w.serve(prompt(1, 256)), w.serve(prompt(2, 128))
    for policy in ("fcfs", "lpm", "dfs-weight"):
        prompts = (prompt(3, 64), prompt(2, 128), prompt(1, 256), prompt(2, 128))
        queue = [w.request([*p, 7, 8], match=False) for p in prompts]
        for req in queue:
            req.refresh_fill_ids()
        SchedulePolicy(policy, w.cache, False, False, False).calc_priority(queue)
        found = [req.prefix_len for req in queue]
        if policy == "lpm":
            assert found == [256, 128, 128, 0]
        if policy == "dfs-weight":
            assert found == [128, 128, 256, 0], "the heavier subtree first, what matched nothing last"


@scenario
def sglangs_admission_cuts_and_locks(w: World) -> None:
    w.serve(prompt(1, 256))
    adder = PrefillAdder(w.page, w.cache, w.kv, None, 1.0, 4096, 320)
    req, long = w.request(prompt(1, 256) + prompt(2, 64)), w.request(prompt(3, 600))
    added = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert added == AddReqResult.CONTINUE
    adder.add_one_req(long, has_chunked_req=False, truncation_align_size=None)
    assert (adder.can_run_list, adder.new_chunked_req) == ([req, long], long)
    assert long.extend_end == 256
    for admitted in adder.can_run_list:
        w.extend(admitted, admitted.extend_end)
        w.running.append(admitted)
    w.audit()
    assert req.hit_ok


@scenario
def random_work_keeps_its_books(w: World) -> None:
    rng, hits = random.Random(5), 0
    stems = [prompt(i, 64 * rng.randrange(1, 5)) for i in range(12)]
    for _ in range(200):
        op = rng.random()
        if op < 0.5 and len(w.running) < (2 if w.extra else 4):
            tokens = rng.choice(stems) + prompt(rng.randrange(40), 64 * rng.randrange(1, 3))
            req = w.admit(w.request(tokens if len(tokens) < 450 else prompt(rng.randrange(1000), 64)))
            assert req.hit_ok in (None, True)
            hits += req.hit_ok is True
        elif w.running:
            req = rng.choice(w.running)
            if op < 0.65 and not getattr(req, "stored", False):
                checkpoint_kv_cache(req, w.cache)
                req.stored = True
            elif op < 0.9:
                w.finish(req)
                stems[rng.randrange(len(stems))] = list(req.origin_input_ids)
            else:
                w.drop(req)
        w.audit()
    assert hits > 5
