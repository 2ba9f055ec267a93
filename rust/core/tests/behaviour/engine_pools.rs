//! External pools and the lower layer: the engine allocates, the cache adopts.

use radixstate::{
    Begin, Cache, Commit, Config, Lease, Namespace, PoolConfig, PoolKind, Published, Reservation,
    Rule, Skip, StartOptions, Started,
};

use crate::*;

fn external() -> Cache {
    let kv = PoolConfig::external(12).bytes(100);
    Cache::new(Config {
        kv,
        active: PoolConfig::external(3),
        ..config()
    })
    .unwrap()
}

fn lease(cache: &mut Cache, tokens: &[u32]) -> Lease {
    let matched = look_up(cache, tokens);
    cache.lease(&matched).unwrap()
}

fn publish(cache: &mut Cache, lease: &Lease, tokens: &[u32], pages: &[u32]) -> Published {
    let pending = pending(cache.reserve(lease, tokens).unwrap());
    cache.publish(lease, tokens, pages, pending).unwrap()
}

#[test]
fn publishing_adopts_exactly_the_pages_that_the_tree_lacks() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    let first = publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    assert_eq!(
        (first.canonical, first.duplicates),
        (vec![1, 2, 3, 4], vec![])
    );
    assert_eq!(cache.lease_depth(&one).unwrap(), 8);
    let two = lease(&mut cache, &fork(&prompt(1, 6), 1, 3));
    assert_eq!(
        cache.lease_depth(&two).unwrap(),
        0,
        "there is no state to start from"
    );
    let second = publish(&mut cache, &two, &fork(&prompt(1, 6), 1, 2), &[5, 6, 7, 8]);
    assert_eq!(
        (second.canonical, second.duplicates),
        (vec![1, 2, 3, 8], vec![5, 6, 7])
    );
    assert_eq!(cache.lease_pages(&two).unwrap(), [1, 2, 3, 8]);
    let stored = stored(second.outcome);
    assert_eq!((stored.depth, stored.replaced), (8, 0..6));
    cache.check(Some(&[5, 6, 7, 9, 10, 11, 12])).unwrap();
}

#[test]
fn a_duplicate_stays_the_callers() {
    let mut cache = external();
    let (one, two) = (
        lease(&mut cache, &prompt(1, 9)),
        lease(&mut cache, &prompt(1, 9)),
    );
    let late = pending(cache.reserve(&two, &prompt(1, 8)).unwrap());
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let published = cache
        .publish(&two, &prompt(1, 8), &[9, 10, 11, 12], late)
        .unwrap();
    assert_eq!(published.outcome, Commit::Skipped(Skip::Duplicate));
    assert_eq!(
        (published.canonical, published.duplicates),
        (vec![1, 2, 3, 4], vec![9, 10, 11, 12])
    );
    assert_eq!(
        cache.lease_depth(&two).unwrap(),
        8,
        "it shares the cached pages from now on"
    );
    cache.check(Some(&[5, 6, 7, 8, 9, 10, 11, 12])).unwrap();
}

#[test]
fn a_hit_is_published_from_its_own_depth() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 13));
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let two = lease(&mut cache, &prompt(1, 13));
    assert_eq!(cache.lease_pages(&two).unwrap(), [1, 2, 3, 4]);
    assert!(cache.lease_state(&two).unwrap().is_some());
    cache.lease_loaded(&two).unwrap();
    assert_eq!(cache.lease_state(&two).unwrap(), None);
    let published = publish(&mut cache, &two, &prompt(1, 12), &[7, 8]);
    assert_eq!(published.canonical, [7, 8]);
    let inner = publish(&mut cache, &two, &prompt(1, 4), &[]);
    assert_eq!(
        (stored(inner.outcome).depth, inner.canonical),
        (4, vec![]),
        "on the way, without pages"
    );
    assert_eq!(cache.lease_depth(&two).unwrap(), 12);
    cache.check(None).unwrap();
}

#[test]
fn what_eviction_frees_appears_once() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    publish(&mut cache, &one, &prompt(1, 8), &[4, 3, 2, 1]);
    assert_eq!(cache.evict(PoolKind::Kv, 1).kv, 0, "it is leased");
    cache.release(one).unwrap();
    assert_eq!(cache.stats().bytes.kv, 400);
    assert_eq!(cache.evict(PoolKind::Kv, 1).kv, 4);
    assert_eq!(cache.usage(PoolKind::Kv).outbox, 4);
    let mut freed = cache.take_freed(PoolKind::Kv);
    freed.sort_unstable();
    assert_eq!(freed, [1, 2, 3, 4]);
    assert_eq!(cache.take_freed(PoolKind::Kv), []);
    assert_eq!(cache.take_freed(PoolKind::Checkpoint), []);
    assert_eq!(cache.stats().bytes.kv, 0);
}

#[test]
fn a_page_free_in_the_engine_and_owned_here_is_found() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let report = cache.check(Some(&[4, 5])).unwrap_err();
    assert_eq!(report.violations.len(), 1);
    assert_eq!(report.violations[0].rule, Rule::EngineFree);
    assert!(
        report
            .to_string()
            .contains("kv page 4 is free in the engine"),
        "{report}"
    );
    let mut internal = crate::cache();
    assert!(
        internal.check(Some(&[12])).is_err(),
        "an internal pool leaves the engine no page"
    );
    internal.check(Some(&[13])).unwrap();
}

#[test]
fn a_dropped_lease_ends_at_the_next_call() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    assert_eq!(cache.usage(PoolKind::Kv).pinned, 4);
    drop(one);
    assert_eq!(
        (
            cache.usage(PoolKind::Kv).pinned,
            cache.usage(PoolKind::Kv).evictable
        ),
        (0, 4)
    );
}

#[test]
fn a_sequence_may_publish_the_engines_pages() {
    let mut cache = external();
    let sequence = start(&mut cache, &prompt(1, 9));
    assert_eq!(
        (
            pages(&cache, &sequence),
            cache.view(&sequence).unwrap().slot()
        ),
        (vec![], None)
    );
    let pending = pending(cache.reserve_checkpoint(&sequence, 8, 3).unwrap());
    let published = cache
        .commit_pages(&sequence, &[5, 6, 7, 8], pending)
        .unwrap();
    assert_eq!(published.canonical, [5, 6, 7, 8]);
    assert_eq!(pages(&cache, &sequence), [5, 6, 7, 8]);
    cache.finish(sequence).unwrap();
    let Started {
        begin, sequence, ..
    } = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    assert_eq!(
        begin,
        Begin::Load {
            src: stored(published.outcome).slot,
            dst: None
        }
    );
    assert_eq!(cache.view(&sequence).unwrap().slots().count(), 0);
    cache.check(Some(&[1, 2, 3, 4])).unwrap();
}

#[test]
fn after_a_reset_the_pages_stay_the_engines() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    let late = pending(cache.reserve(&one, &prompt(1, 8)).unwrap());
    cache.reset();
    let published = cache
        .publish(&one, &prompt(1, 8), &[1, 2, 3, 4], late)
        .unwrap();
    assert_eq!(published.outcome, Commit::Skipped(Skip::Reset));
    assert_eq!(
        (published.canonical, published.duplicates),
        (vec![1, 2, 3, 4], vec![]),
        "none is to be freed yet"
    );
    assert!(matches!(
        cache.reserve(&one, &prompt(1, 8)).unwrap(),
        Reservation::Skipped(Skip::Reset)
    ));
    cache.check(Some(&(1..=12).collect::<Vec<u32>>())).unwrap();
}

#[test]
fn a_lease_without_a_hit_pins_nothing_and_counts_as_a_miss() {
    let mut cache = external();
    let one = lease(&mut cache, &prompt(1, 9));
    assert_eq!(
        (
            cache.lease_depth(&one).unwrap(),
            cache.lease_state(&one).unwrap()
        ),
        (0, None)
    );
    assert_eq!(cache.lease_pages(&one).unwrap(), []);
    assert_eq!((cache.stats().hits, cache.stats().misses.no_prefix), (0, 1));
}

#[test]
fn a_purely_linear_engine_publishes_states_alone() {
    let mut cache = Cache::new(Config::linear(
        4,
        PoolConfig::external(2),
        PoolConfig::internal(2),
    ))
    .unwrap();
    let one = lease(&mut cache, &prompt(1, 9));
    let published = publish(&mut cache, &one, &prompt(1, 8), &[]);
    assert_eq!(stored(published.outcome).depth, 8);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    let other = Namespace::new(0, None, 1);
    assert_eq!(cache.lookup(&other, &prompt(1, 9), None).unwrap().length, 0);
    assert_sound(&mut cache);
}
