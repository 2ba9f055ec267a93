//! What callers can pass between calls: records that they may change, handles of other caches.

use radixstate::Misuse;

use crate::*;

#[test]
fn a_lease_is_as_deep_as_what_was_found_whatever_its_match_says() {
    let mut cache = cache(16, 2, 4);
    let tokens = prompt(1, 9);
    store_at(&mut cache, &tokens, &[4]);
    let mut matched = look_up(&mut cache, &tokens);
    matched.length = 8;
    let lease = cache.lease(&matched).unwrap();
    assert_eq!(cache.lease_depth(&lease), Ok(4));
    matched = look_up(&mut cache, &prompt(2, 9));
    matched.length = 8;
    let lease = cache.lease(&matched).unwrap();
    assert_eq!(cache.lease_depth(&lease), Ok(0));
    assert_sound(&mut cache);
}

#[test]
fn a_step_of_another_cache_ends_none_here() {
    let (mut cache, mut other) = (cache(16, 2, 4), crate::cache(16, 2, 4));
    let here = cache.begin_step();
    let there = other.begin_step();
    let sequence = start(&mut cache, &prompt(1, 9));
    cache.finish(sequence).unwrap();
    let refused = Err(Misuse::WrongCache);
    assert_eq!(cache.retire_step(&there, &[]), refused);
    assert_eq!(cache.cancel_step(&there, &[]), refused);
    assert_eq!(cache.usage(PoolKind::Active).retiring, 1);
    cache.retire_step(here, &[]).unwrap();
    assert_eq!(cache.usage(PoolKind::Active).retiring, 0);
}

/// Many stores that wait for each other end in any order: no run stays cut, and no page is kept back.
#[test]
fn cuts_that_nothing_needs_are_undone_in_whatever_order_their_proofs_come() {
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        for stores in [
            [4, 8, 12],
            [12, 4, 8],
            [12, 8, 4],
            [8, 12, 4],
            [8, 4, 12],
            [4, 12, 8],
        ] {
            for good in 0..8 {
                let mut cache = cache(16, 4, 4);
                let tokens = prompt(1, 13);
                let options = StartOptions {
                    slots: 3,
                    ..StartOptions::default()
                };
                let sequence = start_with(&mut cache, &tokens, options);
                let slots: Vec<u32> = cache.view(&sequence).unwrap().slots().collect();
                let tickets: Vec<u64> = std::iter::zip(stores, slots)
                    .map(|(depth, slot)| {
                        let reserved = cache.reserve_checkpoint(&sequence, depth, slot).unwrap();
                        let Reservation::Pending(pending) = reserved else {
                            panic!("{reserved:?}")
                        };
                        let commit = cache.commit(&sequence, pending.unproven()).unwrap();
                        let Commit::Stored(stored) = commit else {
                            panic!("{commit:?}")
                        };
                        stored.ticket.unwrap()
                    })
                    .collect();
                for which in order {
                    let done = good >> which & 1 == 1;
                    let outcome = if done {
                        radixstate::Outcome::Done
                    } else {
                        radixstate::Outcome::Failed
                    };
                    cache.complete(tickets[which], outcome).unwrap();
                    assert_sound(&mut cache);
                }
                assert!(cache.unproven().is_empty());
                cache.finish(sequence).unwrap();
                assert_sound(&mut cache);
                let picture = cache.draw();
                assert!(
                    !picture.contains("not ready") && !picture.contains("leased"),
                    "{picture}"
                );
                cache.evict(PoolKind::Checkpoint, 4);
                assert_eq!(free(&mut cache), [16, 4, 4], "{order:?} {stores:?} {good}");
            }
        }
    }
}

#[test]
fn a_picture_of_a_prompt_with_many_states_is_bounded() {
    const STATES: u32 = 5000;
    let pool = PoolConfig::internal;
    let mut cache = Cache::new(Config::linear(1, pool(1), pool(STATES))).unwrap();
    let tokens = prompt(1, STATES + 1);
    let depths: Vec<usize> = (1..=STATES as usize).collect();
    store_at(&mut cache, &tokens, &depths);
    let picture = cache.draw();
    let (lines, last) = (picture.lines().count(), picture.lines().last());
    assert_eq!(lines, 1 + 64 + 1, "the title, 64 levels and what is left");
    assert!(
        last.is_some_and(|line| line.ends_with("└─ 4936 more")),
        "{last:?}"
    );
}
