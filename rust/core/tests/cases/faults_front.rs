//! States that nobody wrote, as far as the core can tell.

use radixstate::Misuse;

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
    let mut cache = cache(32, 2, 4);
    store_at(&mut cache, &prompt(1, 9), &[4]);
    let lease = lease(&mut cache, &prompt(1, 9));
    assert!(cache.lease_state(&lease).unwrap().is_some(), "not loaded");
    let refused = cache.reserve(&lease, &prompt(1, 8));
    assert_eq!(
        refused.err(),
        Some(Misuse::NotLoaded),
        "a lease whose state was never loaded went deeper"
    );
}
