//! Counters: true, monotonic, cheap, and a report rather than an end.

use std::time::{Duration, Instant};

use radixstate::{PoolKind, Reason, StartOptions, Usage};

use crate::*;

// sgl-project/sglang #35270, #12432
#[test]
fn pages_that_many_share_are_counted_once() {
    let mut cache = cache(64, 6, 4);
    store(&mut cache, &prompt(1, 16));
    let running: Vec<Sequence> = (0..6)
        .map(|branch| start(&mut cache, &fork(&prompt(1, 16), branch, 2)))
        .collect();
    let expected = Usage {
        capacity: 64,
        free: 50,
        held: 6,
        pinned: 8,
        ..Usage::default()
    };
    assert_eq!(cache.usage(PoolKind::Kv), expected);
    drop(running);
    assert_eq!(
        cache.usage(PoolKind::Kv),
        Usage {
            free: 56,
            held: 0,
            pinned: 0,
            evictable: 8,
            ..expected
        }
    );
    assert_sound(&mut cache);
}

/// Least time of a thousand looks at the counters in a cache of `n` prefixes.
fn time_of_the_counters(n: u32) -> Duration {
    let sizes = radixstate::Config::linear(1, PoolConfig::internal(1), PoolConfig::internal(n));
    let mut cache = Cache::new(sizes).unwrap();
    (0..n).for_each(|family| store(&mut cache, &[family, 0]));
    let look = |cache: &mut Cache| {
        let begin = Instant::now();
        for _ in 0..1000 {
            std::hint::black_box((cache.stats(), free(cache)));
        }
        begin.elapsed()
    };
    (0..8).map(|_| look(&mut cache)).min().expect("eight looks")
}

// sgl-project/sglang #26796
#[test]
fn the_counters_cost_the_same_however_much_is_cached() {
    let (small, large) = (time_of_the_counters(100), time_of_the_counters(50_000));
    println!("{small:?} with 100, {large:?} with 50000");
    assert!(
        large < small * 20,
        "a count would take 500 times as long: {small:?}, {large:?}"
    );
}

// sgl-project/sglang #26608, #25972
#[test]
fn counters_only_grow_and_no_request_reuses_more_than_its_prompt() {
    let mut cache = cache(64, 1, 4);
    store(&mut cache, &prompt(1, 8));
    let mut before = cache.stats();
    for (tokens, hit) in [
        (prompt(1, 9), 8),
        (prompt(2, 1), 0),
        (prompt(1, 9), 8),
        (prompt(3, 30), 0),
    ] {
        drop(try_start(&mut cache, &tokens, StartOptions::default()).unwrap());
        let now = cache.stats();
        assert_eq!(now.hit_tokens - before.hit_tokens, hit);
        assert_eq!(
            (now.starts, now.hits + now.misses.no_prefix),
            (before.starts + 1, before.hits + before.misses.no_prefix + 1)
        );
        assert!(now.kv_matched_tokens - before.kv_matched_tokens <= tokens.len() as u64);
        before = now;
    }
}

// sgl-project/sglang #38018, #37594; vllm-project/vllm #52527
#[test]
fn a_hit_lost_for_want_of_a_state_is_told_from_a_cold_miss() {
    let mut cache = cache(64, 1, 4);
    store_at(&mut cache, &prompt(1, 16), &[8, 16]);
    cache.evict(PoolKind::Checkpoint, 1);
    let before = cache.stats();
    let reasons = [fork(&prompt(1, 10), 1, 4), prompt(2, 9)].map(|tokens| {
        let matched = try_start(&mut cache, &tokens, StartOptions::default())
            .unwrap()
            .matched;
        matched.reason
    });
    assert_eq!(reasons, [Reason::NoState, Reason::NoPrefix]);
    let now = cache.stats();
    assert_eq!(
        (
            now.misses.no_state,
            now.misses.no_prefix - before.misses.no_prefix
        ),
        (1, 1)
    );
    assert_eq!(
        now.kv_matched_tokens - before.kv_matched_tokens,
        10,
        "what a state would have saved is counted"
    );
}
