//! Publishing: sharing, forking and duplicates.

use radixstate::{Commit, PoolKind, Reason, Reservation, Skip};

use crate::*;

#[test]
fn a_fork_is_told_where_a_checkpoint_would_have_helped() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 12));
    let other = fork(&prompt(1, 10), 1, 2);
    let first = look_up(&mut cache, &other);
    assert_eq!(
        (first.length, first.kv_length, first.branch, first.reason),
        (0, 10, Some(8), Reason::NoState)
    );
    let sequence = start(&mut cache, &other);
    checkpoint(&mut cache, &sequence, 8);
    let second = look_up(&mut cache, &other);
    assert_eq!(
        (second.length, second.kv_length, second.branch),
        (8, 10, None)
    );
    assert_eq!(
        cached(&mut cache, &prompt(1, 12)),
        12,
        "the first branch is still there"
    );
    assert_sound(&mut cache);
}

#[test]
fn a_match_shorter_than_the_first_legal_depth_is_unaligned() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let found = look_up(&mut cache, &fork(&prompt(1, 3), 1, 4));
    assert_eq!(
        (found.length, found.kv_length, found.branch, found.reason),
        (0, 2, None, Reason::Unaligned)
    );
    assert_eq!(
        look_up(&mut cache, &fork(&prompt(1, 1), 1, 4)).reason,
        Reason::NoPrefix,
        "not one whole page"
    );
}

#[test]
fn duplicate_pages_are_replaced_by_the_cached_ones() {
    let mut cache = cache();
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &fork(&prompt(1, 4), 1, 5)),
    );
    checkpoint(&mut cache, &one, 8);
    let before = pages(&cache, &two);
    let stored = checkpoint(&mut cache, &two, 8);
    assert_eq!(stored.replaced, 0..4);
    let after = pages(&cache, &two);
    assert_eq!(after[..2], pages(&cache, &one)[..2]);
    assert_eq!(
        after[2..],
        before[2..],
        "what the tree lacked was adopted, not copied"
    );
    assert_eq!(
        cache.usage(PoolKind::Kv).free,
        12 - 5 - 3,
        "two duplicates went back"
    );
    assert_sound(&mut cache);
}

#[test]
fn a_second_writer_of_a_depth_is_a_duplicate_and_shares_the_pages() {
    let mut cache = cache();
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &prompt(1, 9)),
    );
    let late = pending(reserve(&mut cache, &two, 8));
    checkpoint(&mut cache, &one, 8);
    assert!(
        matches!(
            reserve(&mut cache, &two, 8),
            Reservation::Skipped(Skip::Duplicate)
        ),
        "decided at once"
    );
    assert_eq!(
        cache.commit(&two, late).unwrap(),
        Commit::Skipped(Skip::Duplicate)
    );
    assert_eq!(pages(&cache, &two)[..4], pages(&cache, &one)[..4]);
    assert_eq!(cache.view(&two).unwrap().leased(), 8);
    assert_eq!((cache.stats().stored, cache.stats().duplicates), (1, 2));
    assert_eq!(
        cache.usage(PoolKind::Checkpoint).free,
        3,
        "the late slot went back"
    );
    assert_sound(&mut cache);
}

#[test]
fn a_duplicate_is_decided_before_anything_is_evicted() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 4));
    checkpoint(&mut cache, &sequence, 4);
    for family in 2..=4 {
        store(&mut cache, &prompt(family, 4));
    }
    assert_eq!(cache.usage(PoolKind::Checkpoint).free, 0);
    assert!(matches!(
        reserve(&mut cache, &sequence, 4),
        Reservation::Skipped(Skip::Duplicate)
    ));
    assert!(matches!(
        reserve_on_the_way(&mut cache, &sequence, 0),
        Reservation::Skipped(Skip::NotAligned)
    ));
    assert_eq!(cache.stats().evictions.for_checkpoint.checkpoints, 0);
}

#[test]
fn a_lease_moves_only_deeper() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 12));
    let leased = |cache: &Cache| cache.view(&sequence).unwrap().leased();
    checkpoint(&mut cache, &sequence, 8);
    assert_eq!(leased(&cache), 8);
    let inner = checkpoint_on_the_way(&mut cache, &sequence, 4);
    assert_eq!(
        (inner.depth, leased(&cache)),
        (4, 8),
        "a checkpoint on the way is set without giving up the rest"
    );
    checkpoint(&mut cache, &sequence, 12);
    assert_eq!(leased(&cache), 12);
    assert_eq!(cache.usage(PoolKind::Kv).pinned, 6);
    assert_sound(&mut cache);
}

#[test]
fn a_pin_covers_its_path_and_nothing_beside_it() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 12));
    store(&mut cache, &fork(&prompt(1, 4), 1, 4));
    let sequence = start(&mut cache, &prompt(1, 13));
    let usage = cache.usage(PoolKind::Kv);
    assert_eq!((usage.pinned, usage.evictable, usage.held), (6, 2, 1));
    cache.evict(PoolKind::Kv, usize::MAX);
    assert_eq!(cached(&mut cache, &prompt(1, 12)), 12);
    cache.finish(sequence).unwrap();
    assert_sound(&mut cache);
}

#[test]
fn a_pending_checkpoint_survives_the_eviction_of_its_prefix() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let sequence = start(&mut cache, &fork(&prompt(1, 4), 1, 5));
    let late = pending(reserve(&mut cache, &sequence, 8));
    cache.evict(PoolKind::Kv, usize::MAX);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 0);
    assert_eq!(
        stored(cache.commit(&sequence, late).unwrap()).replaced,
        0..0
    );
    assert_eq!(cached(&mut cache, &fork(&prompt(1, 4), 1, 4)), 8);
    assert_sound(&mut cache);
}
