//! Starting, growing and ending a request.

use radixstate::{
    Begin, Cache, Config, Error, Freed, Namespace, OutOfSlots, PoolConfig, PoolKind, Reason,
    Reservation, Shortage, Skip, StartOptions, StartRequest, Started,
};

use crate::*;

#[test]
fn a_prompt_reuses_at_most_all_its_tokens_but_the_last() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let whole = look_up(&mut cache, &prompt(1, 9));
    assert_eq!(
        (whole.length, whole.kv_length, whole.reason),
        (8, 8, Reason::Hit)
    );
    let exact = look_up(&mut cache, &prompt(1, 8));
    assert_eq!(
        (exact.length, exact.kv_length, exact.reason),
        (0, 8, Reason::NoState)
    );
    assert_eq!(
        exact.branch,
        Some(4),
        "a checkpoint there would serve the same prompt again"
    );
}

#[test]
fn a_start_says_how_the_state_begins() {
    let mut cache = cache();
    let first = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    assert_eq!(first.begin, Begin::Clear { dst: 1 });
    cache.loaded(&first.sequence).unwrap();
    let stored = checkpoint(&mut cache, &first.sequence, 8);
    let second = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    assert_eq!(
        second.begin,
        Begin::Load {
            src: stored.slot,
            dst: 2
        }
    );
    let view = cache.view(&second.sequence).unwrap();
    assert_eq!((view.reused(), view.leased(), view.claimed()), (8, 8, 9));
    assert_eq!(
        view.pages()[..4],
        pages(&cache, &first.sequence)[..4],
        "the cached pages are shared"
    );
    assert_eq!(view.tokens(), prompt(1, 9));
}

#[test]
fn a_shortage_of_pages_evicts_and_takes_nothing() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let running = start(&mut cache, &prompt(2, 8));
    let before = usage(&mut cache);
    let error = cache
        .start(
            &Namespace::default(),
            prompt(3, 18),
            StartOptions::default(),
        )
        .unwrap_err();
    let short = OutOfSlots {
        pool: PoolKind::Kv,
        wanted: 9,
        free: 4,
        evictable: 4,
        retiring: 0,
    };
    assert_eq!(error, Error::Shortage(Shortage::Busy(short)));
    assert_eq!(
        error.to_string(),
        "kv pool: wanted 9, 4 free, 4 evictable, 0 retiring"
    );
    assert_eq!(usage(&mut cache), before);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    cache.finish(running).unwrap();
    assert!(
        cache
            .start(
                &Namespace::default(),
                prompt(3, 18),
                StartOptions::default()
            )
            .is_ok()
    );
}

#[test]
fn a_shortage_of_active_slots_evicts_nothing() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let _running = [2, 3, 4].map(|family| start(&mut cache, &prompt(family, 2)));
    let before = usage(&mut cache);
    let error = cache
        .start(
            &Namespace::default(),
            prompt(5, 16),
            StartOptions::default(),
        )
        .unwrap_err();
    let short = OutOfSlots {
        pool: PoolKind::Active,
        wanted: 1,
        free: 0,
        evictable: 0,
        retiring: 0,
    };
    assert_eq!(
        error,
        Error::Shortage(Shortage::Busy(short)),
        "eight pages would have needed an eviction"
    );
    assert_eq!(usage(&mut cache), before);
}

#[test]
fn a_start_evicts_exactly_the_pages_it_lacks() {
    let mut cache = cache();
    for family in 1..=3 {
        store(&mut cache, &prompt(family, 8));
    }
    let _running = start(&mut cache, &prompt(4, 10));
    assert_eq!(
        cache.stats().evictions.for_kv.kv,
        8,
        "five pages, in two prefixes of four"
    );
    let lengths = [1, 2, 3].map(|family| cached(&mut cache, &prompt(family, 8)));
    assert_eq!(
        lengths,
        [0, 0, 8],
        "the oldest go first, and no more than needed"
    );
}

#[test]
fn a_start_does_not_evict_what_it_reuses() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    store(&mut cache, &prompt(2, 8));
    let started = start_with(&mut cache, &prompt(1, 24), StartOptions::default());
    assert_eq!(started.matched.length, 8, "although it was the oldest");
    assert_eq!(cached(&mut cache, &prompt(2, 8)), 0);
    assert_sound(&mut cache);
}

#[test]
fn a_shortage_counts_its_own_match_as_pinned() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let _running = start(&mut cache, &prompt(2, 2));
    let error = cache
        .start(
            &Namespace::default(),
            prompt(1, 24),
            StartOptions::default(),
        )
        .unwrap_err();
    let short = OutOfSlots {
        pool: PoolKind::Kv,
        wanted: 8,
        free: 7,
        evictable: 0,
        retiring: 0,
    };
    assert_eq!(error, Error::Shortage(Shortage::Busy(short)));
    assert_eq!(
        cache.usage(PoolKind::Kv).evictable,
        4,
        "the pins went with the attempt"
    );
}

#[test]
fn what_can_never_fit_is_another_error_than_busy() {
    let mut cache = cache();
    let error = cache
        .start(
            &Namespace::default(),
            prompt(1, 25),
            StartOptions::default(),
        )
        .unwrap_err();
    let never = Shortage::NeverFits {
        pool: PoolKind::Kv,
        wanted: 13,
        capacity: 12,
    };
    assert_eq!(error, Error::Shortage(never));
    assert_eq!(
        error.to_string(),
        "kv pool: wanted 13, capacity 12: this can never fit"
    );
    let sequence = start(&mut cache, &prompt(1, 8));
    for n in [17, usize::MAX] {
        let error = cache.grow(&sequence, n).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Shortage(Shortage::NeverFits {
                    pool: PoolKind::Kv,
                    ..
                })
            ),
            "{error}"
        );
    }
    let huge = StartOptions {
        reserve: Some(usize::MAX),
        ..StartOptions::default()
    };
    let error = cache
        .start(&Namespace::default(), prompt(2, 1), huge)
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Shortage(Shortage::NeverFits {
                pool: PoolKind::Kv,
                ..
            })
        ),
        "{error}"
    );
    for _ in 0..2 {
        cache.take_slot(&sequence).unwrap();
    }
    let never = Shortage::NeverFits {
        pool: PoolKind::Active,
        wanted: 4,
        capacity: 3,
    };
    assert_eq!(
        cache.take_slot(&sequence).unwrap_err(),
        Error::Shortage(never)
    );
}

#[test]
fn a_cache_without_active_slots_can_start_nothing() {
    let mut cache = Cache::new(Config {
        active: PoolConfig::internal(0),
        ..config()
    })
    .unwrap();
    let error = cache
        .start(&Namespace::default(), prompt(1, 1), StartOptions::default())
        .unwrap_err();
    assert_eq!(
        error,
        Error::Shortage(Shortage::NeverFits {
            pool: PoolKind::Active,
            wanted: 1,
            capacity: 0
        })
    );
}

#[test]
fn a_chunked_prefill_claims_its_pages_chunk_by_chunk() {
    let mut cache = cache();
    let chunk = StartOptions {
        reserve: Some(5),
        ..StartOptions::default()
    };
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), chunk);
    assert_eq!(
        (
            pages(&cache, &sequence).len(),
            cache.view(&sequence).unwrap().claimed()
        ),
        (3, 5)
    );
    cache.grow(&sequence, 1).unwrap();
    assert_eq!(
        pages(&cache, &sequence).len(),
        3,
        "position 5 lies in the third page"
    );
    cache.grow(&sequence, 3).unwrap();
    assert_eq!(pages(&cache, &sequence).len(), 5);
}

#[test]
fn a_verify_step_keeps_only_what_it_accepted() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 8));
    cache.grow(&sequence, 6).unwrap();
    let grown = pages(&cache, &sequence);
    cache.append(&sequence, &[7, 7, 7]).unwrap();
    cache.shrink(&sequence).unwrap();
    let view = cache.view(&sequence).unwrap();
    assert_eq!((view.tokens().len(), view.claimed()), (11, 11));
    assert_eq!(view.pages(), grown[..6]);
    assert_eq!(cache.usage(PoolKind::Kv).free, 6);
}

#[test]
fn shrinking_does_not_claim_positions_that_were_never_reserved() {
    let mut cache = cache();
    let chunk = StartOptions {
        reserve: Some(4),
        ..StartOptions::default()
    };
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), chunk);
    cache.shrink(&sequence).unwrap();
    assert_eq!(cache.view(&sequence).unwrap().claimed(), 4);
    assert_sound(&mut cache);
}

#[test]
fn the_checkpoint_is_pinned_until_loaded_and_the_pages_until_the_end() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    let pinned = |cache: &mut Cache| {
        (
            cache.usage(PoolKind::Checkpoint).pinned,
            cache.usage(PoolKind::Kv).pinned,
        )
    };
    assert_eq!(pinned(&mut cache), (1, 4));
    cache.loaded(&sequence).unwrap();
    assert_eq!(pinned(&mut cache), (0, 4));
    cache.finish(sequence).unwrap();
    assert_eq!(pinned(&mut cache), (0, 0));
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
}

#[test]
fn dropping_a_sequence_gives_everything_back() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    cache.take_slot(&sequence).unwrap();
    let pending = pending(reserve(&mut cache, &sequence, 8));
    assert_eq!(usage(&mut cache).map(|usage| usage.held), [5, 2, 1]);
    drop(sequence);
    assert_eq!(
        usage(&mut cache).map(|usage| usage.held),
        [0, 0, 1],
        "a pending checkpoint is its own owner"
    );
    drop(pending);
    assert_eq!(usage(&mut cache).map(|usage| usage.free), [12, 3, 4]);
    assert_sound(&mut cache);
}

#[test]
fn handles_may_be_dropped_on_other_threads_and_after_the_cache() {
    let mut cache = cache();
    let (one, two) = (
        start(&mut cache, &prompt(1, 4)),
        start(&mut cache, &prompt(2, 4)),
    );
    std::thread::spawn(move || drop(one)).join().unwrap();
    assert_eq!(cache.usage(PoolKind::Active).held, 1);
    drop(cache);
    drop(two);
}

#[test]
fn the_order_in_which_handles_are_dropped_decides_nothing() {
    let next_slot = |reversed: bool| {
        let mut cache = cache();
        let mut sequences = vec![
            start(&mut cache, &prompt(1, 4)),
            start(&mut cache, &prompt(2, 4)),
        ];
        if reversed {
            sequences.reverse();
        }
        sequences.into_iter().for_each(drop);
        start_with(&mut cache, &prompt(3, 4), StartOptions::default()).begin
    };
    assert_eq!(
        next_slot(false),
        next_slot(true),
        "ranks whose collectors differ still agree"
    );
}

#[test]
fn a_further_slot_may_be_the_source_of_a_checkpoint() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let track = cache.take_slot(&sequence).unwrap();
    assert_eq!(
        cache.view(&sequence).unwrap().slots().collect::<Vec<u32>>(),
        [1, track]
    );
    let pending = pending(cache.reserve_checkpoint(&sequence, 4, track).unwrap());
    assert_eq!(stored(cache.commit(&sequence, pending).unwrap()).depth, 4);
    let _others = [2, 3].map(|family| {
        cache.start(
            &Namespace::default(),
            prompt(family, 2),
            StartOptions::default(),
        )
    });
    let short = OutOfSlots {
        pool: PoolKind::Active,
        wanted: 1,
        free: 0,
        evictable: 0,
        retiring: 0,
    };
    assert_eq!(
        cache.take_slot(&sequence).unwrap_err(),
        Error::Shortage(Shortage::Busy(short))
    );
}

#[test]
fn a_request_may_refuse_to_read_or_to_store() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let before = cache.stats();
    let options = StartOptions {
        no_read: true,
        no_store: true,
        ..StartOptions::default()
    };
    let Started {
        sequence,
        matched,
        begin,
    } = start_with(&mut cache, &prompt(1, 9), options);
    assert_eq!(
        (matched.length, matched.kv_length, begin),
        (0, 0, Begin::Clear { dst: 1 })
    );
    assert_eq!(
        (cache.stats().hits, cache.stats().misses),
        (before.hits, before.misses),
        "it asked for nothing"
    );
    cache.loaded(&sequence).unwrap();
    assert!(matches!(
        reserve(&mut cache, &sequence, 8),
        Reservation::Skipped(Skip::NoStore)
    ));
    assert_eq!(cache.stats().skipped.no_store, 1);
}

#[test]
fn a_caller_may_limit_how_much_is_reused() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    checkpoint(&mut cache, &sequence, 4);
    checkpoint(&mut cache, &sequence, 8);
    let lengths = [9, 8, 7, 4, 3, 0].map(|max| {
        cache
            .lookup(&Namespace::default(), &prompt(1, 9), Some(max))
            .unwrap()
            .length
    });
    assert_eq!(lengths, [8, 8, 4, 4, 0, 0]);
}

#[test]
fn keys_in_different_namespaces_never_match() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let others = [
        Namespace::new(1, None, 0),
        Namespace::new(0, Some("a"), 0),
        Namespace::new(0, None, 1),
    ];
    for namespace in &others {
        assert_eq!(
            cache.lookup(namespace, &prompt(1, 9), None).unwrap().reason,
            Reason::NoPrefix
        );
        let Started { sequence, .. } = cache
            .start(namespace, prompt(1, 9), StartOptions::default())
            .unwrap();
        cache.loaded(&sequence).unwrap();
        if let Reservation::Pending(pending) = reserve(&mut cache, &sequence, 8) {
            stored(cache.commit(&sequence, pending).unwrap());
        }
        cache.finish(sequence).unwrap();
        assert_eq!(
            cache.lookup(namespace, &prompt(1, 9), None).unwrap().length,
            8
        );
        assert_sound(&mut cache);
    }
    let [adapter, tenant, weights] = &others;
    assert_eq!(
        (adapter.adapter(), tenant.tenant(), weights.weights()),
        (1, Some("a"), 1)
    );
}

#[test]
fn many_requests_start_in_order_and_fail_alone() {
    let mut cache = cache();
    let (namespace, tokens) = (
        Namespace::default(),
        [prompt(1, 9), Vec::new(), prompt(2, 9)],
    );
    let requests = tokens.iter().map(|tokens| StartRequest {
        namespace: &namespace,
        tokens,
        options: StartOptions::default(),
    });
    let results = cache.start_many(requests);
    assert_eq!(
        results.iter().map(Result::is_ok).collect::<Vec<bool>>(),
        [true, false, true]
    );
    assert_eq!(cache.stats().starts, 2);
}

#[test]
fn a_linear_model_caches_states_without_pages() {
    let mut cache = Cache::new(Config::linear(
        4,
        PoolConfig::internal(1),
        PoolConfig::internal(2),
    ))
    .unwrap();
    let sequence = start(&mut cache, &prompt(1, 7));
    assert_eq!(pages(&cache, &sequence), []);
    assert_eq!(checkpoint(&mut cache, &sequence, 4).replaced, 0..0);
    cache.finish(sequence).unwrap();
    let found = look_up(&mut cache, &prompt(1, 7));
    assert_eq!(
        (found.length, found.kv_length),
        (4, 4),
        "of KV there is nothing to lack"
    );
    assert_eq!(
        cache.evict(PoolKind::Kv, 1),
        Freed::default(),
        "there are no pages to free"
    );
    assert_eq!(cached(&mut cache, &prompt(1, 4)), 4);
    let huge = StartOptions {
        reserve: Some(usize::MAX),
        ..StartOptions::default()
    };
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 7), huge);
    cache.grow(&sequence, usize::MAX).unwrap();
    assert_eq!(cache.view(&sequence).unwrap().claimed(), usize::MAX);
    assert_sound(&mut cache);
}

#[test]
fn caches_and_handles_can_be_sent_to_other_threads() {
    fn sends<T: Send>() {}
    sends::<Cache>();
    sends::<radixstate::Sequence>();
    sends::<radixstate::Lease>();
    sends::<radixstate::Pending>();
    sends::<radixstate::Match>();
}

#[test]
fn a_cache_prints_where_its_slots_are() {
    let mut cache = cache();
    let _sequence = start(&mut cache, &prompt(1, 9));
    let text = format!("{cache:?}");
    assert!(
        text.contains("sequences: 1") && text.contains("capacity: 12, free: 7, held: 5"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_counts_how_often_its_state_was_encoded() {
    let mut cache = cache();
    assert_eq!(store(&mut cache, &prompt(1, 4)).encodings, 1);
    assert_eq!(look_up(&mut cache, &prompt(1, 5)).encodings, 1);
    assert_eq!(
        store(&mut cache, &prompt(1, 8)).encodings,
        2,
        "it continued a state that had been encoded once"
    );
    assert_eq!(store(&mut cache, &prompt(2, 8)).encodings, 1);
    assert_eq!(look_up(&mut cache, &prompt(3, 5)).encodings, 0);
}

#[test]
fn bookkeeping_grows_with_use_and_not_with_capacity() {
    let whole = PoolConfig::internal(i32::MAX as u32);
    let mut cache = Cache::new(Config {
        kv: whole,
        active: whole,
        checkpoints: whole,
        ..config()
    })
    .unwrap();
    store(&mut cache, &prompt(1, 8));
    assert_eq!(cache.usage(PoolKind::Kv).free, i32::MAX as usize - 4);
    let sequence = start(&mut cache, &prompt(1, 9));
    assert_eq!(pages(&cache, &sequence), [1, 2, 3, 4, 5]);
}
