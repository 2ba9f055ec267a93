//! What goes first, and what goes with it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use radixstate::policy::{Candidate, CandidateId, NAMES, Policy, Scope, by_name};
use radixstate::{
    Cache, Config, Freed, Namespace, OutOfSlots, PoolConfig, PoolKind, Reason, Reservation, Skip,
    StartOptions, Started,
};

use crate::*;

/// One path with checkpoints at 4 and 8.
fn path(cache: &mut Cache) {
    let sequence = start(cache, &prompt(1, 8));
    checkpoint(cache, &sequence, 4);
    checkpoint(cache, &sequence, 8);
    cache.finish(sequence).unwrap();
}

#[test]
fn evicting_an_inner_checkpoint_leaves_a_tombstone() {
    let mut cache = cache();
    path(&mut cache);
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed {
            kv: 0,
            checkpoints: 1
        }
    );
    let other = look_up(&mut cache, &fork(&prompt(1, 4), 1, 2));
    assert_eq!(
        (other.length, other.kv_length, other.reason),
        (0, 4, Reason::NoState)
    );
    assert_eq!(other.branch, Some(4));
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    assert_sound(&mut cache);
}

#[test]
fn evicting_a_leaf_frees_its_pages_and_those_left_bare_above() {
    let mut cache = cache();
    path(&mut cache);
    cache.evict(PoolKind::Checkpoint, 1);
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed {
            kv: 4,
            checkpoints: 1
        },
        "the tombstone went too"
    );
    assert_eq!(cache.usage(PoolKind::Kv).free, 12);
    assert_sound(&mut cache);
}

#[test]
fn evicting_pages_takes_leaves_before_what_they_stand_on() {
    let mut cache = cache();
    path(&mut cache);
    assert_eq!(
        cache.evict(PoolKind::Kv, 1),
        Freed {
            kv: 2,
            checkpoints: 1
        }
    );
    assert_eq!(
        cached(&mut cache, &prompt(1, 8)),
        4,
        "the older checkpoint was no leaf"
    );
    assert_eq!(
        cache.evict(PoolKind::Kv, usize::MAX),
        Freed {
            kv: 2,
            checkpoints: 1
        },
        "all there is"
    );
}

#[test]
fn asking_for_active_slots_evicts_nothing() {
    let mut cache = cache();
    path(&mut cache);
    assert_eq!(cache.evict(PoolKind::Active, 1), Freed::default());
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
}

#[test]
fn only_the_consumed_checkpoint_is_refreshed() {
    let mut cache = cache();
    path(&mut cache);
    store(&mut cache, &prompt(2, 4));
    drop(start_with(
        &mut cache,
        &prompt(1, 9),
        StartOptions::default(),
    ));
    cache.evict(PoolKind::Checkpoint, 1);
    assert_eq!(
        cached(&mut cache, &prompt(1, 4)),
        0,
        "the hit at 8 did not refresh the checkpoint at 4"
    );
    cache.evict(PoolKind::Checkpoint, 1);
    assert_eq!(cached(&mut cache, &prompt(2, 4)), 0);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
}

#[test]
fn a_lookup_and_a_failed_start_refresh_nothing() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 4));
    store(&mut cache, &prompt(2, 4));
    assert_eq!(cached(&mut cache, &prompt(1, 4)), 4);
    let _running = [3, 4, 5].map(|family| start(&mut cache, &prompt(family, 2)));
    cache
        .start(&Namespace::default(), prompt(1, 5), StartOptions::default())
        .unwrap_err();
    cache.evict(PoolKind::Checkpoint, 1);
    assert_eq!(
        (
            cached(&mut cache, &prompt(1, 4)),
            cached(&mut cache, &prompt(2, 4))
        ),
        (0, 4)
    );
}

#[test]
fn a_leaf_left_bare_while_pinned_goes_with_its_last_pin() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &prompt(1, 9)),
    );
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed {
            kv: 0,
            checkpoints: 1
        }
    );
    cache.finish(one).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).pinned, 4);
    cache.finish(two).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).free, 12);
    assert_sound(&mut cache);
}

#[test]
fn a_state_being_loaded_is_never_evicted() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    assert_eq!(cache.evict(PoolKind::Checkpoint, 1), Freed::default());
    assert_eq!(cache.evict(PoolKind::Kv, 1), Freed::default());
    cache.loaded(&sequence).unwrap();
    assert_eq!(
        cache.evict(PoolKind::Kv, 1),
        Freed::default(),
        "its pages are still read"
    );
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed {
            kv: 0,
            checkpoints: 1
        }
    );
}

#[test]
fn a_new_checkpoint_evicts_the_oldest_and_no_other() {
    let mut cache = cache();
    for family in 1..=5 {
        store(&mut cache, &prompt(family, 4));
    }
    assert_eq!(
        [1, 2, 3, 4, 5].map(|family| cached(&mut cache, &prompt(family, 4))),
        [0, 4, 4, 4, 4]
    );
    assert_eq!(
        cache.stats().evictions.for_checkpoint,
        Freed {
            kv: 2,
            checkpoints: 1
        }
    );
}

#[test]
fn want_of_room_for_a_checkpoint_is_not_an_error() {
    let mut cache = Cache::new(Config {
        checkpoints: PoolConfig::internal(1),
        ..config()
    })
    .unwrap();
    let sequence = start(&mut cache, &prompt(1, 9));
    let writing = pending(reserve(&mut cache, &sequence, 8));
    let short = OutOfSlots {
        pool: PoolKind::Checkpoint,
        wanted: 1,
        free: 0,
        evictable: 0,
        retiring: 0,
    };
    match reserve_on_the_way(&mut cache, &sequence, 4) {
        Reservation::Skipped(skip) => assert_eq!(skip, Skip::NoRoom(short)),
        reserved => panic!("{reserved:?}"),
    }
    assert_eq!(cache.stats().skipped.no_room, 1);
    drop(writing);
    checkpoint_on_the_way(&mut cache, &sequence, 4);
}

/// Shallow checkpoints go first.
#[derive(Default)]
struct Deepest(BTreeSet<(usize, CandidateId)>);

impl Policy for Deepest {
    fn insert(&mut self, candidate: &Candidate) {
        self.0.insert((candidate.depth, candidate.id));
    }

    fn update(&mut self, candidate: &Candidate) {
        assert!(self.holds(candidate));
    }

    fn remove(&mut self, candidate: &Candidate) {
        assert!(self.0.remove(&(candidate.depth, candidate.id)));
    }

    fn victim(&mut self, _: Scope) -> Option<CandidateId> {
        self.0.first().map(|&(_, id)| id)
    }

    fn holds(&self, candidate: &Candidate) -> bool {
        self.0.contains(&(candidate.depth, candidate.id))
    }

    fn count(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_policy_decides_what_goes_first() {
    let mut cache = Cache::with_policy(config(), Box::new(Deepest::default())).unwrap();
    store(&mut cache, &prompt(1, 8));
    store(&mut cache, &prompt(2, 4));
    drop(start_with(
        &mut cache,
        &prompt(2, 5),
        StartOptions::default(),
    ));
    cache.evict(PoolKind::Checkpoint, 1);
    assert_eq!(
        (
            cached(&mut cache, &prompt(1, 8)),
            cached(&mut cache, &prompt(2, 4))
        ),
        (8, 0)
    );
    assert_sound(&mut cache);
}

/// Least time of one eviction among batches, in a cache of `n` prefixes, some of them pinned.
fn time_of_a_victim(policy: &str, n: u32) -> Duration {
    let config = Config::linear(1, PoolConfig::internal(n), PoolConfig::internal(n));
    let mut cache = Cache::with_policy(config, by_name(policy).unwrap()).unwrap();
    for family in 0..n {
        store(&mut cache, &[family, 0]);
    }
    let _pinned: Vec<Started> = (0..n / 10)
        .map(|family| start_with(&mut cache, &[family, 0, 1], StartOptions::default()))
        .collect();
    let batch = |cache: &mut Cache| {
        let begin = Instant::now();
        assert_eq!(
            (0..50)
                .map(|_| cache.evict(PoolKind::Checkpoint, 1).checkpoints)
                .sum::<usize>(),
            50
        );
        begin.elapsed() / 50
    };
    (0..8)
        .map(|_| batch(&mut cache))
        .min()
        .expect("eight batches")
}

#[test]
fn a_victim_costs_about_the_same_however_much_is_cached_or_pinned() {
    for policy in NAMES {
        let small = time_of_a_victim(policy, 500);
        let large = time_of_a_victim(policy, 50_000);
        println!("{policy}: {small:?} among 500, {large:?} among 50000");
        assert!(
            large < small * 20,
            "a scan would cost 100 times as much: {policy}, {small:?}, {large:?}"
        );
    }
}
