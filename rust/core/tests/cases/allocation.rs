//! Shortages: never fatal, never paid for by more than is needed, and named.

use radixstate::{Error, PoolKind, Reservation, Shortage, Skip, StartOptions};

use crate::*;

// sgl-project/sglang #36770, #37619, #40128, #40416
#[test]
fn a_checkpoint_among_pinned_ones_is_skipped_and_the_request_goes_on() {
    let mut cache = cache(32, 3, 4);
    (1..=4).for_each(|family| store(&mut cache, &prompt(family, 4)));
    let pins = [1, 2, 3, 4].map(|family| lease(&mut cache, &prompt(family, 5)));
    let sequence = start(&mut cache, &prompt(9, 8));
    let before = (
        free(&mut cache),
        pages(&cache, &sequence),
        slot(&cache, &sequence),
    );
    for _ in 0..100 {
        assert!(matches!(
            reserve(&mut cache, &sequence, 8),
            Reservation::Skipped(Skip::NoRoom(_))
        ));
    }
    assert_eq!(
        (
            free(&mut cache),
            pages(&cache, &sequence),
            slot(&cache, &sequence)
        ),
        before
    );
    assert_eq!(
        (
            cache.stats().skipped.no_room,
            reused(&mut cache, &prompt(9, 8))
        ),
        (100, 0)
    );
    drop(pins);
    assert_eq!(
        checkpoint(&mut cache, &sequence, 8).depth,
        8,
        "an unpinned one makes room"
    );
    assert_sound(&mut cache);
}

// sgl-project/sglang #34676
#[test]
fn what_a_start_was_promised_cannot_be_taken_by_others() {
    let mut cache = cache(12, 3, 4);
    store(&mut cache, &prompt(1, 8));
    let sequence = start_with(&mut cache, &prompt(1, 9), chunk(16));
    let greedy = start(&mut cache, &prompt(2, 8));
    assert!(
        try_start(&mut cache, &prompt(3, 2), StartOptions::default()).is_err(),
        "every page is taken or pinned"
    );
    cache.append(&sequence, &prompt(4, 7)).unwrap();
    assert_eq!(pages(&cache, &sequence).len(), 8);
    cache.finish(greedy).unwrap();
    assert_sound(&mut cache);
}

// sgl-project/sglang #38151
#[test]
fn a_chunk_that_has_its_pages_evicts_nothing() {
    let mut cache = cache(12, 3, 4);
    let sequence = start_with(&mut cache, &prompt(1, 8), chunk(3));
    [2, 3]
        .into_iter()
        .for_each(|family| store(&mut cache, &prompt(family, 8)));
    cache.grow(&sequence, 1).unwrap();
    cache.grow(&sequence, 4).unwrap();
    assert_eq!(
        (free(&mut cache)[0], cache.stats().evictions.for_kv.kv),
        (0, 0),
        "no page was missing"
    );
    cache.grow(&sequence, 2).unwrap();
    assert_eq!(
        cache.stats().evictions.for_kv.checkpoints,
        1,
        "one page was: one victim"
    );
    assert_sound(&mut cache);
}

// sgl-project/sglang #37943, #37066
#[test]
fn a_late_checkpoint_takes_nothing_from_the_slots_a_request_was_given() {
    let mut cache = cache(32, 2, 1);
    let sequence = start(&mut cache, &prompt(1, 8));
    let track = cache.take_slot(&sequence).unwrap();
    let early = pending(&mut cache, &sequence, 4);
    assert!(cache.take_slot(&sequence).is_err(), "the pool is full");
    assert!(matches!(
        reserve(&mut cache, &sequence, 8),
        Reservation::Skipped(Skip::NoRoom(_))
    ));
    let slots: Vec<u32> = cache.view(&sequence).unwrap().slots().collect();
    assert_eq!(slots, [slot(&cache, &sequence), track]);
    cache.commit(&sequence, early).unwrap();
    assert_eq!(
        reused(&mut cache, &prompt(1, 4)),
        4,
        "what was planned first is done"
    );
    assert_sound(&mut cache);
}

// vllm-project/vllm #52520, #35541
#[test]
fn a_request_too_large_by_its_rounding_never_starts_to_work() {
    let mut cache = cache(4, 1, 2);
    let before = free(&mut cache);
    for _ in 0..100 {
        let never = Shortage::NeverFits {
            pool: PoolKind::Kv,
            wanted: 5,
            capacity: 4,
        };
        let error = try_start(&mut cache, &prompt(1, 9), StartOptions::default()).unwrap_err();
        assert_eq!(
            error,
            Error::Shortage(never),
            "9 tokens round up to 5 pages"
        );
        let first_chunk = try_start(&mut cache, &prompt(1, 9), chunk(2)).unwrap_err();
        assert_eq!(
            first_chunk,
            Error::Shortage(never),
            "although the first chunk would fit"
        );
    }
    assert_eq!(free(&mut cache), before);
    assert!(try_start(&mut cache, &prompt(1, 8), StartOptions::default()).is_ok());
}

// sgl-project/sglang #34441, #36713, #33773
#[test]
fn a_shortage_names_the_pool_that_is_short_and_eviction_there_helps_at_once() {
    let mut cache = cache(12, 1, 4);
    store(&mut cache, &prompt(1, 20));
    let _step = cache.begin_step();
    let _pin = lease(&mut cache, &prompt(1, 21));
    let error = try_start(&mut cache, &prompt(2, 8), StartOptions::default()).unwrap_err();
    let Error::Shortage(Shortage::Busy(short)) = error else {
        panic!("{error}")
    };
    assert_eq!(
        (short.pool, short.wanted, short.free, short.evictable),
        (PoolKind::Kv, 4, 2, 0)
    );
    store(&mut cache, &prompt(3, 4));
    cache.retire_step(1, &[]).unwrap();
    let freed = cache.evict(short.pool, 2);
    assert_eq!(
        (freed.kv, free(&mut cache)[0]),
        (2, 2),
        "what it says it freed is free"
    );
}

// sgl-project/sglang-rtxpro6000 #5
#[test]
fn the_number_of_running_requests_reaches_every_slot() {
    let mut cache = cache(64, 7, 4);
    let running: Vec<Sequence> = (0..7)
        .map(|family| start(&mut cache, &prompt(family, 4)))
        .collect();
    assert_eq!(free(&mut cache)[1], 0);
    let mut slots: Vec<u32> = running
        .iter()
        .map(|sequence| slot(&cache, sequence))
        .collect();
    slots.sort_unstable();
    assert_eq!(
        slots,
        [1, 2, 3, 4, 5, 6, 7],
        "each has its own, and none has the padding row 0"
    );
}
