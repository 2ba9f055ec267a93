//! What mutation testing found that no other test would notice. MUTANTS.md lists the mutants that are left.

use radixstate::{Cache, Config, Namespace, PoolConfig, Reservation, StartOptions, Started};

#[test]
fn a_namespace_says_what_it_was_made_of() {
    let namespace = Namespace::new(7, Some("tenant"), 9);
    assert_eq!((namespace.adapter(), namespace.tenant(), namespace.epoch()), (7, Some("tenant"), 9));
    let bare = Namespace::default();
    assert_eq!((bare.adapter(), bare.tenant(), bare.epoch()), (0, None, 0));
}

#[test]
fn a_pending_checkpoint_says_where_and_how_deep() {
    let pools = (PoolConfig::internal(1), PoolConfig::internal(2));
    let mut cache = Cache::new(Config::linear(4, pools.0, pools.1)).unwrap();
    let started = cache.start(&Namespace::default(), &[0; 9], StartOptions::default()).unwrap();
    let Started { sequence, .. } = started;
    cache.loaded(&sequence).unwrap();
    for depth in [4, 8] {
        let reserved = cache.reserve_checkpoint(&sequence, depth, 1).unwrap();
        let Reservation::Pending(pending) = reserved else { panic!("{reserved:?}") };
        assert_eq!((pending.depth(), pending.slot()), (depth, 1));
    }
}
