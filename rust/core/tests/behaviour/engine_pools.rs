//! Pages of the engine: it allocates, the cache takes over what the tree lacks and gives it back.

use radixstate::{
    Cache, Commit, Config, EnginePages, Extended, Lease, Misuse, Namespace, PageOwner, PoolConfig,
    PoolKind, Published, Reservation, Rule, Skip,
};

use crate::*;

fn lease<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> Lease {
    let matched = look_up(cache, tokens);
    cache.lease(&matched).unwrap()
}

fn publish(
    cache: &mut Cache<EnginePages>,
    lease: &Lease,
    tokens: &[u32],
    pages: &[u32],
) -> Published {
    let pending = pending(cache.reserve(lease, tokens, pages).unwrap());
    cache.publish(lease, tokens, pages, pending).unwrap()
}

#[test]
fn publishing_adopts_exactly_the_pages_that_the_tree_lacks() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    let first = publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    assert_eq!(first.replaced, 0..0);
    assert_eq!(cache.lease_pages(&one, 0).unwrap(), [1, 2, 3, 4]);
    assert_eq!(cache.lease_depth(&one).unwrap(), 8);
    let two = lease(&mut cache, &fork(&prompt(1, 6), 1, 3));
    assert_eq!(
        cache.lease_depth(&two).unwrap(),
        0,
        "there is no state to start from"
    );
    let second = publish(&mut cache, &two, &fork(&prompt(1, 6), 1, 2), &[5, 6, 7, 8]);
    assert_eq!(second.replaced, 0..6, "pages 5, 6 and 7 are to be freed");
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 8]);
    let stored = stored(second.outcome);
    assert_eq!((stored.depth, stored.replaced), (8, 0..6));
    cache.check(Some(&[5, 6, 7, 9, 10, 11, 12])).unwrap();
}

#[test]
fn a_duplicate_stays_the_callers() {
    let mut cache = engine();
    let (one, two) = (
        lease(&mut cache, &prompt(1, 9)),
        lease(&mut cache, &prompt(1, 9)),
    );
    let given = [9, 10, 11, 12];
    let late = pending(cache.reserve(&two, &prompt(1, 8), &given).unwrap());
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let published = cache.publish(&two, &prompt(1, 8), &given, late).unwrap();
    assert_eq!(published.outcome, Commit::Skipped(Skip::Duplicate));
    assert_eq!(published.replaced, 0..8);
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 4]);
    assert_eq!(
        cache.lease_depth(&two).unwrap(),
        8,
        "it shares the cached pages from now on"
    );
    cache.check(Some(&[5, 6, 7, 8, 9, 10, 11, 12])).unwrap();
}

#[test]
fn a_hit_is_published_from_its_own_depth() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 13));
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let two = lease(&mut cache, &prompt(1, 13));
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 4]);
    assert!(cache.lease_state(&two).unwrap().is_some());
    cache.lease_loaded(&two).unwrap();
    assert_eq!(cache.lease_state(&two).unwrap(), None);
    let published = publish(&mut cache, &two, &prompt(1, 12), &[7, 8]);
    assert_eq!(published.replaced, 0..0);
    assert_eq!(cache.lease_pages(&two, 8).unwrap(), [7, 8]);
    let inner = publish(&mut cache, &two, &prompt(1, 4), &[]);
    assert_eq!(
        (stored(inner.outcome).depth, inner.replaced),
        (4, 0..0),
        "on the way, without pages"
    );
    assert_eq!(cache.lease_depth(&two).unwrap(), 12);
    cache.check(None).unwrap();
}

#[test]
fn what_eviction_frees_appears_once() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    publish(&mut cache, &one, &prompt(1, 8), &[4, 3, 2, 1]);
    assert_eq!(cache.evict(PoolKind::Kv, 1).kv, 0, "it is leased");
    cache.release(one).unwrap();
    assert_eq!(cache.stats().bytes.kv, 400);
    assert_eq!(cache.evict(PoolKind::Kv, 1).kv, 4);
    assert_eq!(cache.usage(PoolKind::Kv).outbox, 4);
    let mut freed = cache.take_freed();
    freed.sort_unstable();
    assert_eq!(freed, [1, 2, 3, 4]);
    assert_eq!(cache.take_freed(), []);
    assert_eq!(cache.stats().bytes.kv, 0);
}

#[test]
fn a_page_free_in_the_engine_and_owned_here_is_found() {
    let mut cache = engine();
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
    let mut cache = engine();
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
fn after_a_reset_the_pages_stay_the_engines() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    let late = pending(cache.reserve(&one, &prompt(1, 8), &[1, 2, 3, 4]).unwrap());
    cache.reset();
    let published = cache
        .publish(&one, &prompt(1, 8), &[1, 2, 3, 4], late)
        .unwrap();
    assert_eq!(published.outcome, Commit::Skipped(Skip::Reset));
    assert_eq!(published.replaced, 0..0, "none is to be freed yet");
    let extended = cache.extend(&one, &prompt(1, 8), &[1, 2, 3, 4]).unwrap();
    assert_eq!(
        (extended.skipped, extended.replaced),
        (Some(Skip::Reset), 0..0)
    );
    assert!(matches!(
        cache.reserve(&one, &prompt(1, 8), &[1, 2, 3, 4]).unwrap(),
        Reservation::Skipped(Skip::Reset)
    ));
    cache.check(Some(&(1..=12).collect::<Vec<u32>>())).unwrap();
}

#[test]
fn a_lease_without_a_hit_pins_nothing_and_counts_as_a_miss() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    assert_eq!(
        (
            cache.lease_depth(&one).unwrap(),
            cache.lease_state(&one).unwrap()
        ),
        (0, None)
    );
    assert_eq!(cache.lease_pages(&one, 0).unwrap(), []);
    assert_eq!((cache.stats().hits, cache.stats().misses.no_prefix), (0, 1));
}

#[test]
fn a_purely_linear_engine_publishes_states_alone() {
    let mut cache = Cache::new(Config {
        page_size: 1,
        checkpoint_stride: 4,
        kv: PoolConfig::engine(0),
        active: PoolConfig::internal(0),
        checkpoints: PoolConfig::internal(2),
    })
    .unwrap();
    let one = lease(&mut cache, &prompt(1, 9));
    let published = publish(&mut cache, &one, &prompt(1, 8), &[]);
    assert_eq!(stored(published.outcome).depth, 8);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    let other = Namespace::new(0, None, 1);
    assert_eq!(cache.lookup(&other, &prompt(1, 9), None).unwrap().length, 0);
    assert_sound(&mut cache);
}

const NOTHING: Extended = Extended {
    skipped: None,
    replaced: 0..0,
};

#[test]
fn pages_without_a_state_are_shared_as_long_as_somebody_leases_them() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    let extended = cache.extend(&one, &prompt(1, 6), &[1, 2, 3]).unwrap();
    assert_eq!(extended, NOTHING);
    assert_eq!(cache.lease_depth(&one).unwrap(), 6);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).kv_length, 6);
    let two = lease(&mut cache, &prompt(1, 9));
    let extended = cache.extend(&two, &prompt(1, 8), &[4, 5, 6, 7]).unwrap();
    assert_eq!(extended.replaced, 0..6);
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 7]);
    let again = cache.extend(&two, &prompt(1, 4), &[]).unwrap();
    assert_eq!(again, NOTHING, "a lease moves only deeper");
    cache.release(one).unwrap();
    assert_eq!(cache.take_freed(), []);
    cache.release(two).unwrap();
    assert_eq!(cache.take_freed(), [1, 2, 3, 7]);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).kv_length, 0);
    assert_sound(&mut cache);
}

#[test]
fn a_forked_lease_is_as_deep_as_the_first_and_outlives_it() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    cache.extend(&one, &prompt(1, 8), &[1, 2, 3, 4]).unwrap();
    let two = cache.fork_lease(&one).unwrap();
    cache.release(one).unwrap();
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 4]);
    cache.extend(&two, &prompt(1, 10), &[5]).unwrap();
    cache.release(two).unwrap();
    assert_eq!(cache.take_freed(), [1, 2, 3, 4, 5]);
    assert_sound(&mut cache);
}

#[test]
fn a_state_is_attached_to_what_is_leased() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    cache.extend(&one, &prompt(1, 8), &[1, 2, 3, 4]).unwrap();
    for depth in [8, 4] {
        let late = pending(cache.reserve(&one, &prompt(1, depth), &[]).unwrap());
        let attached = cache.attach(&one, &prompt(1, depth), late).unwrap();
        assert_eq!(stored(attached).depth, depth as usize);
    }
    cache.release(one).unwrap();
    assert_eq!(cache.take_freed(), [], "the states keep the pages");
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    assert_eq!(cached(&mut cache, &prompt(1, 4)), 4);
    assert_sound(&mut cache);
}

/// Two requests with one prompt end on one copy of its pages although nothing is encoded twice.
#[test]
fn a_prefix_whose_state_is_there_is_extended_without_encoding_it_again() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    let two = lease(&mut cache, &prompt(1, 9));
    publish(&mut cache, &one, &prompt(1, 8), &[1, 2, 3, 4]);
    let reserved = cache.reserve(&two, &prompt(1, 8), &[5, 6, 7, 8]).unwrap();
    assert!(matches!(reserved, Reservation::Skipped(Skip::Duplicate)));
    let extended = cache.extend(&two, &prompt(1, 8), &[5, 6, 7, 8]).unwrap();
    assert_eq!(extended.replaced, 0..8);
    assert_eq!(cache.lease_pages(&two, 0).unwrap(), [1, 2, 3, 4]);
    cache.check(Some(&[5, 6, 7, 8])).unwrap();
}

#[test]
fn pages_of_a_step_in_flight_reach_nobody_else() {
    let mut cache = engine();
    let (one, two) = (
        lease(&mut cache, &prompt(1, 9)),
        lease(&mut cache, &prompt(1, 9)),
    );
    let step = cache.begin_step();
    cache.extend(&one, &prompt(1, 6), &[1, 2, 3]).unwrap();
    let early = cache.extend(&two, &prompt(1, 8), &[4, 5, 6, 7]).unwrap();
    assert_eq!(early.skipped, Some(Skip::NotReady));
    assert_eq!(cache.lease_depth(&two).unwrap(), 0);
    cache.release(one).unwrap();
    assert_eq!(cache.take_freed(), [], "the step may still write them");
    cache.retire_step(step, &[]).unwrap();
    assert_eq!(cache.take_freed(), [1, 2, 3]);
    cache.extend(&two, &prompt(1, 8), &[4, 5, 6, 7]).unwrap();
    assert_sound(&mut cache);
}

#[test]
fn a_step_that_failed_takes_its_pages_with_it() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 13));
    cache.extend(&one, &prompt(1, 4), &[1, 2]).unwrap();
    let step = cache.begin_step();
    cache.extend(&one, &prompt(1, 8), &[3, 4]).unwrap();
    let late = pending(cache.reserve(&one, &prompt(1, 8), &[]).unwrap());
    cache.attach(&one, &prompt(1, 8), late).unwrap();
    cache.cancel_step(step, &[]).unwrap();
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 0);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).kv_length, 4);
    let further = cache.extend(&one, &prompt(1, 12), &[5, 6]).unwrap();
    assert_eq!(
        further.skipped,
        Some(Skip::Reset),
        "it stands on lost pages"
    );
    cache.release(one).unwrap();
    let mut freed = cache.take_freed();
    freed.sort_unstable();
    assert_eq!(freed, [1, 2, 3, 4]);
    assert_sound(&mut cache);
}

#[test]
fn the_tree_numbers_pages_that_it_never_sees() {
    let mut cache = logical();
    let one = lease(&mut cache, &prompt(1, 9));
    let late = pending(cache.reserve(&one, &prompt(1, 8)).unwrap());
    let published = cache.publish(&one, &prompt(1, 8), late).unwrap();
    assert_eq!(published.replaced, 0..0);
    assert_eq!(cache.lease_pages(&one, 0).unwrap(), [1, 2, 3, 4]);
    let two = lease(&mut cache, &fork(&prompt(1, 4), 1, 5));
    let extended = cache.extend(&two, &fork(&prompt(1, 4), 1, 4)).unwrap();
    assert_eq!(extended.replaced, 0..4);
    let pages = cache.lease_pages(&two, 0).unwrap();
    assert_eq!(pages[..2], [1, 2]);
    assert!(pages[2..].iter().all(|&number| number > 4), "{pages:?}");
    cache.release(two).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).outbox, 2);
    let mut freed = cache.take_freed();
    freed.sort_unstable();
    assert_eq!(freed, pages[2..], "not those that it shared");
    assert_eq!(cache.usage(PoolKind::Kv).free, 8);
    assert_sound(&mut cache);
}

/// The engine reads the map of a number that it has taken. Until then no other page may have it.
#[test]
fn a_number_means_one_page_until_the_engine_has_taken_it() {
    let mut cache = logical();
    let one = lease(&mut cache, &prompt(1, 9));
    cache.extend(&one, &prompt(1, 8)).unwrap();
    let old = cache.lease_pages(&one, 0).unwrap();
    cache.release(one).unwrap();
    let two = lease(&mut cache, &prompt(2, 9));
    cache.extend(&two, &prompt(2, 8)).unwrap();
    let new = cache.lease_pages(&two, 0).unwrap();
    assert!(old.iter().all(|number| !new.contains(number)));
    let mut freed = cache.take_freed();
    freed.sort_unstable();
    assert_eq!(freed, old);
    assert_sound(&mut cache);
}

#[test]
fn an_engine_that_has_only_pages_takes_its_running_states_from_the_cache() {
    let mut cache = engine();
    let one = lease(&mut cache, &prompt(1, 9));
    let slots = [(); 3].map(|()| cache.take_lease_slot(&one).unwrap());
    assert_eq!(slots, [1, 2, 3]);
    assert!(cache.lease_slots(&one).unwrap().eq(slots));
    assert_eq!(cache.usage(PoolKind::Active).held, 3);
    cache.give_back_lease_slot(&one, 2).unwrap();
    let twice = cache.give_back_lease_slot(&one, 2);
    assert_eq!(twice, Err(Misuse::NotYourSlot { slot: 2 }));
    let two = lease(&mut cache, &prompt(2, 9));
    assert_eq!(cache.take_lease_slot(&two), Ok(2));
    let theirs = cache.give_back_lease_slot(&one, 2);
    assert_eq!(theirs, Err(Misuse::NotYourSlot { slot: 2 }));
    let step = cache.begin_step();
    drop((one, two));
    assert_eq!(cache.usage(PoolKind::Active).retiring, 3);
    cache.retire_step(step, &[]).unwrap();
    assert_eq!(cache.usage(PoolKind::Active).free, 3);
    assert_sound(&mut cache);
}
