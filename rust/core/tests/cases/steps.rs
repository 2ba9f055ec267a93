//! Work in flight: late, repeated and reordered results do no harm, and nothing is reused too
//! early.

use radixstate::{Freed, PoolKind, Reason, StartOptions};

use crate::*;

// sgl-project/sglang #36926
#[test]
fn results_that_arrive_after_an_abort_settle_in_any_order() {
    for order in [[1, 2, 1, 2], [2, 1, 2, 1], [1, 1, 2, 2], [2, 2, 1, 1]] {
        let mut cache = cache(16, 2, 2);
        let sequence = start_with(&mut cache, &prompt(1, 8), chunk(4));
        let _one = cache.begin_step();
        let first = pending(&mut cache, &sequence, 4);
        cache.grow(&sequence, 4).unwrap();
        let _two = cache.begin_step();
        let second = pending(&mut cache, &sequence, 8);
        cache.abort(sequence).unwrap();
        drop((second, first));
        for step in order {
            cache.retire_step(step, &[]).unwrap();
            assert_sound(&mut cache);
        }
        assert_eq!(
            free(&mut cache),
            [16, 2, 2],
            "everything, exactly once: {order:?}"
        );
        assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NoPrefix);
    }
}

// vllm-project/vllm-ascend #14055; sgl-project/sglang #29353, #18746, #29449, #34786
#[test]
fn what_a_request_gave_up_is_not_reused_before_the_next_step_retires() {
    let mut cache = cache(8, 1, 2);
    let sequence = start(&mut cache, &prompt(1, 16));
    let (first, second) = (cache.begin_step(), cache.begin_step());
    cache.retire_step(&first, &[]).unwrap();
    cache.finish(sequence).unwrap();
    assert!(
        try_start(&mut cache, &prompt(2, 2), StartOptions::default()).is_err(),
        "the second step may still write"
    );
    assert_eq!(free(&mut cache), [0, 0, 2]);
    cache.retire_step(&second, &[]).unwrap();
    assert!(try_start(&mut cache, &prompt(2, 16), StartOptions::default()).is_ok());
    assert_sound(&mut cache);
}

// lightseekorg/tokenspeed #279; vllm-project/vllm #45704
#[test]
fn a_slot_that_a_copy_still_reads_is_not_handed_out() {
    let mut cache = cache(16, 2, 1);
    store(&mut cache, &prompt(1, 8));
    let step = cache.begin_step();
    let reader = start(&mut cache, &prompt(1, 9));
    let source = slot(&cache, &reader);
    cache.finish(reader).unwrap();
    let other = start(&mut cache, &prompt(2, 4));
    assert_ne!(slot(&cache, &other), source);
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed::default(),
        "nor is the checkpoint it was loaded from"
    );
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(cache.evict(PoolKind::Checkpoint, 1).checkpoints, 1);
}

// sgl-project/sglang #24221, #24954, #31474
#[test]
fn a_state_is_matched_only_after_its_writer_and_all_before_have_retired() {
    let mut cache = cache(16, 1, 4);
    let sequence = start(&mut cache, &prompt(1, 9));
    let early = cache.begin_step();
    checkpoint(&mut cache, &sequence, 4);
    let late = cache.begin_step();
    checkpoint(&mut cache, &sequence, 8);
    let seen = |cache: &mut Cache| [4, 8].map(|n| reused(cache, &prompt(1, n)));
    assert_eq!(seen(&mut cache), [0, 0]);
    cache.retire_step(&late, &[]).unwrap();
    assert_eq!(
        seen(&mut cache),
        [0, 0],
        "its first pages are of the early step"
    );
    cache.retire_step(&early, &[]).unwrap();
    assert_eq!(seen(&mut cache), [4, 8]);
}

// vllm-backport #63
#[test]
fn a_copy_that_was_planned_keeps_its_slot_and_depth_whatever_happens_meanwhile() {
    let mut cache = cache(32, 3, 4);
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &prompt(2, 13)),
    );
    let step = cache.begin_step();
    let (first, second) = (pending(&mut cache, &one, 8), pending(&mut cache, &two, 12));
    let planned = (first.slot(), second.slot());
    let _next = (cache.begin_step(), start(&mut cache, &prompt(3, 4)));
    let stored = cache.commit(&two, second).unwrap();
    let radixstate::Commit::Stored(stored) = stored else {
        panic!("{stored:?}")
    };
    assert_eq!((stored.slot, stored.depth), (planned.1, 12));
    let stored = cache.commit(&one, first).unwrap();
    let radixstate::Commit::Stored(stored) = stored else {
        panic!("{stored:?}")
    };
    assert_eq!((stored.slot, stored.depth), (planned.0, 8));
    cache.retire_step(&step, &[]).unwrap();
    assert_sound(&mut cache);
}

// The watermark lags by a step for ever when an engine always has one in flight; sgl-project/sglang
// #20049
#[test]
fn a_cache_that_always_has_a_step_in_flight_still_evicts_and_reuses() {
    let mut cache = cache(8, 2, 2);
    let mut before = cache.begin_step();
    for turn in 0..100 {
        let step = cache.begin_step();
        let tokens = prompt(1 + turn / 2, 9);
        let sequence = start_with(&mut cache, &tokens, chunk(9));
        assert_eq!(
            cache.view(&sequence).unwrap().reused(),
            if turn % 2 == 0 { 0 } else { 8 },
            "turn {turn}"
        );
        if turn % 2 == 0 {
            checkpoint(&mut cache, &sequence, 8);
        }
        drop(sequence);
        cache.retire_step(&before, &[]).unwrap();
        cache.retire_step(&step, &[]).unwrap();
        before = cache.begin_step();
        assert_sound(&mut cache);
    }
    assert!(cache.stats().evictions.for_kv.kv > 100);
}
