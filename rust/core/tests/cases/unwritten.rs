//! States that nobody wrote, as far as the core can tell.

use radixstate::{Begin, Misuse, OutOfSlots, Shortage, Skip, StartOptions, Started};

use crate::*;

#[test]
fn a_sequence_has_no_state_above_what_it_started_from() {
    let mut cache = cache(32, 2, 4);
    store_at(&mut cache, &prompt(1, 9), &[8]);
    let sequence = start(&mut cache, &prompt(1, 13));
    assert_eq!(cache.view(&sequence).unwrap().reused(), 8);
    let source = slot(&cache, &sequence);
    let refused = cache.reserve_checkpoint(&sequence, 4, source);
    assert!(
        refused.is_err(),
        "a state above the reused prefix was accepted"
    );
}

#[test]
fn a_slot_never_goes_back_to_a_shallower_state() {
    let mut cache = cache(32, 2, 4);
    let sequence = start(&mut cache, &prompt(1, 13));
    checkpoint(&mut cache, &sequence, 8);
    let source = slot(&cache, &sequence);
    let refused = cache.reserve_checkpoint(&sequence, 4, source);
    assert!(refused.is_err(), "a slot went back from 8 tokens to 4");
}

#[test]
fn two_pending_checkpoints_of_one_slot_cannot_have_two_depths() {
    let mut cache = cache(32, 2, 4);
    let sequence = start(&mut cache, &prompt(1, 13));
    let _deep = pending(&mut cache, &sequence, 8);
    let source = slot(&cache, &sequence);
    let refused = cache.reserve_checkpoint(&sequence, 4, source);
    assert!(refused.is_err(), "two depths were accepted for one state");
}

#[test]
fn a_lease_whose_state_was_never_loaded_publishes_nothing_deeper() {
    let mut cache = engine(32, 4);
    let first = lease(&mut cache, &prompt(1, 9));
    let Reservation::Pending(pending) = cache.reserve(&first, &prompt(1, 4), &[1, 2]).unwrap()
    else {
        panic!("there is room")
    };
    let published = cache.publish(&first, &prompt(1, 4), &[1, 2], pending);
    published.expect("a miss has no state to load");
    let lease = lease(&mut cache, &prompt(1, 9));
    assert!(cache.lease_state(&lease).unwrap().is_some(), "not loaded");
    let refused = cache.reserve(&lease, &prompt(1, 8), &[3, 4]);
    assert_eq!(
        refused.err(),
        Some(Misuse::NotLoaded),
        "a lease whose state was never loaded went deeper"
    );
}

#[test]
fn the_state_of_one_depth_may_be_offered_again() {
    let mut cache = cache(32, 2, 4);
    let sequence = start(&mut cache, &prompt(1, 13));
    checkpoint(&mut cache, &sequence, 8);
    assert!(matches!(
        reserve(&mut cache, &sequence, 8),
        Reservation::Skipped(Skip::Duplicate)
    ));
    assert_eq!(checkpoint(&mut cache, &sequence, 12).depth, 12);
}

#[test]
fn a_state_that_was_not_kept_is_no_shallower_for_it() {
    let mut cache = cache(32, 2, 1);
    let options = StartOptions {
        no_store: true,
        ..StartOptions::default()
    };
    let sequence = start_with(&mut cache, &prompt(1, 13), options);
    assert!(matches!(
        reserve(&mut cache, &sequence, 8),
        Reservation::Skipped(Skip::NoStore)
    ));
    let misuse = Misuse::DepthPassed {
        depth: 4,
        slot: 1,
        reached: 8,
    };
    let refused = cache.reserve_checkpoint(&sequence, 4, 1);
    assert_eq!(refused.unwrap_err(), misuse);
}

#[test]
fn each_slot_has_a_depth_of_its_own_that_ends_with_it() {
    let mut cache = cache(32, 3, 4);
    let sequence = start(&mut cache, &prompt(1, 13));
    let further = cache.take_slot(&sequence).unwrap();
    checkpoint(&mut cache, &sequence, 12);
    drop(cache.reserve_checkpoint(&sequence, 8, further).unwrap());
    let passed = cache.reserve_checkpoint(&sequence, 4, further);
    assert!(passed.is_err());
    cache.give_back_slot(&sequence, further).unwrap();
    assert_eq!(cache.take_slot(&sequence), Ok(further), "the same again");
    drop(cache.reserve_checkpoint(&sequence, 4, further).unwrap());
    assert_sound(&mut cache);
}

#[test]
fn a_lease_publishes_what_it_has_before_its_state_is_loaded_and_more_after() {
    let mut cache = engine(16, 4);
    let first = lease(&mut cache, &prompt(1, 9));
    let Reservation::Pending(pending) = cache.reserve(&first, &prompt(1, 4), &[1, 2]).unwrap()
    else {
        panic!("there is room")
    };
    let published = cache.publish(&first, &prompt(1, 4), &[1, 2], pending);
    published.expect("a miss has no state to load");
    let second = lease(&mut cache, &prompt(1, 9));
    let within = cache.extend(&second, &prompt(1, 4), &[]).unwrap();
    assert_eq!((within.skipped, within.replaced), (None, 0..0));
    let more = prompt(1, 8);
    let refused = cache.extend(&second, &more, &[3, 4]);
    assert_eq!(refused.unwrap_err(), Misuse::NotLoaded);
    assert_eq!(
        cache.reserve(&second, &more, &[3, 4]).unwrap_err(),
        Misuse::NotLoaded
    );
    cache.lease_loaded(&second).unwrap();
    cache.extend(&second, &more, &[3, 4]).unwrap();
    assert!(matches!(
        cache.reserve(&second, &more, &[]),
        Ok(Reservation::Pending(_))
    ));
}

fn with_slots(slots: usize) -> StartOptions {
    StartOptions {
        slots,
        ..StartOptions::default()
    }
}

#[test]
fn a_start_takes_its_further_slots_or_evicts_nothing() {
    let mut cache = cache(7, 3, 4);
    store(&mut cache, &prompt(1, 8));
    let running = start(&mut cache, &prompt(2, 2));
    let (before, found) = (free(&mut cache), look_up(&mut cache, &prompt(1, 9)));
    let short = OutOfSlots {
        pool: PoolKind::Active,
        wanted: 3,
        free: 2,
        evictable: 0,
        retiring: 0,
    };
    let error = try_start(&mut cache, &prompt(3, 10), with_slots(3)).unwrap_err();
    assert_eq!(error, short.into());
    let never = Shortage::NeverFits {
        pool: PoolKind::Active,
        wanted: 4,
        capacity: 3,
    };
    let error = try_start(&mut cache, &prompt(3, 10), with_slots(4)).unwrap_err();
    assert_eq!(error, never.into());
    assert_eq!(free(&mut cache), before);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).length, found.length);
    cache.finish(running).unwrap();
    let Started {
        sequence, begin, ..
    } = try_start(&mut cache, &prompt(3, 10), with_slots(3)).unwrap();
    assert_eq!(begin, Begin::Clear { dst: 1 });
    let slots: Vec<u32> = cache.view(&sequence).unwrap().slots().collect();
    assert_eq!(slots, [1, 2, 3]);
    drop(sequence);
    assert_eq!(free(&mut cache)[1], 3);
    assert_sound(&mut cache);
}

#[test]
fn a_start_takes_at_least_the_slot_it_runs_in() {
    let mut cache = cache(8, 2, 2);
    let error = try_start(&mut cache, &prompt(1, 2), with_slots(0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a sequence has at least 1 active slot, got slots=0"
    );
}

#[test]
fn a_further_slot_goes_back_alone_when_the_steps_in_flight_have_retired() {
    let mut cache = cache(8, 3, 2);
    let sequence = start_with(&mut cache, &prompt(1, 5), with_slots(3));
    let step = cache.begin_step();
    cache.give_back_slot(&sequence, 2).unwrap();
    let slots: Vec<u32> = cache.view(&sequence).unwrap().slots().collect();
    assert_eq!(slots, [1, 3]);
    assert_eq!(
        cache.give_back_slot(&sequence, 2),
        Err(Misuse::NotYourSlot { slot: 2 }),
        "once"
    );
    assert_eq!(
        cache.give_back_slot(&sequence, 1),
        Err(Misuse::RunningSlot { slot: 1 })
    );
    assert_eq!(cache.usage(PoolKind::Active).retiring, 1);
    assert!(cache.take_slot(&sequence).is_err(), "the step may write it");
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(cache.take_slot(&sequence), Ok(2));
    assert_sound(&mut cache);
}
