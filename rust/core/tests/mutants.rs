//! What mutation testing found that no other test would notice. MUTANTS.md lists the mutants that
//! are left.

use radixstate::{
    Cache, Config, Misuse, Namespace, Pending, PoolConfig, Reservation, Sequence, Skip,
    StartOptions, Started,
};

fn cache(active: PoolConfig) -> Cache {
    Cache::new(Config::linear(4, active, PoolConfig::internal(2))).unwrap()
}

fn start(cache: &mut Cache) -> Sequence {
    let Started { sequence, .. } = cache
        .start(&Namespace::default(), &[0; 9], StartOptions::default())
        .unwrap();
    cache.loaded(&sequence).unwrap();
    sequence
}

fn reserve(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Pending {
    match cache.reserve_checkpoint(sequence, depth, 1).unwrap() {
        Reservation::Pending(pending) => pending,
        skipped @ Reservation::Skipped(_) => panic!("{skipped:?}"),
    }
}

#[test]
fn a_namespace_says_what_it_was_made_of() {
    let namespace = Namespace::new(7, Some("tenant"), 9);
    assert_eq!(
        (namespace.adapter(), namespace.tenant(), namespace.weights()),
        (7, Some("tenant"), 9)
    );
    let bare = Namespace::default();
    assert_eq!(
        (bare.adapter(), bare.tenant(), bare.weights()),
        (0, None, 0)
    );
}

#[test]
fn a_pending_checkpoint_says_where_and_how_deep() {
    let mut cache = cache(PoolConfig::internal(1));
    let sequence = start(&mut cache);
    for depth in [4, 8] {
        let pending = reserve(&mut cache, &sequence, depth);
        assert_eq!((pending.depth(), pending.slot()), (depth, 1));
    }
}

/// Their drop alone would give back what they hold, so only what the call says tells that it
/// looked.
#[test]
fn handles_of_another_cache_are_refused_even_where_they_only_end() {
    let (mut one, mut other) = (
        cache(PoolConfig::internal(1)),
        cache(PoolConfig::internal(1)),
    );
    let sequence = start(&mut one);
    let pending = reserve(&mut one, &sequence, 4);
    let rejected = other.discard(pending).unwrap_err();
    assert_eq!(rejected.why, Misuse::WrongCache);
    assert_eq!(one.discard(rejected.pending).unwrap(), Skip::NonFinite);
    assert_eq!(other.abort(sequence), Err(Misuse::WrongCache));
}

#[test]
fn the_digest_knows_which_slot_a_request_got() {
    let mut ranks = [(); 2].map(|()| cache(PoolConfig::internal(2)));
    let [mut one, mut other] = ranks.each_mut().map(|rank| {
        let first = start(rank);
        (first, start(rank))
    });
    // Both give back a slot and start again; only the slot differs.
    ranks[0].finish(one.0).unwrap();
    ranks[1].finish(other.1).unwrap();
    one.0 = start(&mut ranks[0]);
    other.1 = start(&mut ranks[1]);
    let slots = [
        ranks[0].view(&one.0).unwrap().slot(),
        ranks[1].view(&other.1).unwrap().slot(),
    ];
    assert_eq!(slots, [1, 2]);
    assert_ne!(ranks[0].digest(), ranks[1].digest());
}
