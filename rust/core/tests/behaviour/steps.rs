//! Steps in flight, refusals and resets.

use radixstate::{
    Commit, Freed, Misuse, Outcome, PoolKind, Reason, Reservation, Skip, StartOptions, Started,
};

use crate::*;

#[test]
fn a_checkpoint_is_matched_only_when_the_step_that_writes_it_has_retired() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let (older, step) = (cache.begin_step(), cache.begin_step());
    assert_eq!(checkpoint(&mut cache, &sequence, 8).step, Some(step.id()));
    let early = look_up(&mut cache, &prompt(1, 9));
    assert_eq!(
        (early.length, early.branch, early.reason),
        (0, None, Reason::NotReady)
    );
    assert!(
        matches!(
            reserve(&mut cache, &sequence, 8),
            Reservation::Skipped(Skip::Duplicate)
        ),
        "its place is taken"
    );
    cache.finish(sequence).unwrap();
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed::default(),
        "it is being written"
    );
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 0, "an older one is out");
    cache.retire_step(&older, &[]).unwrap();
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    assert_eq!(cache.evict(PoolKind::Checkpoint, 1).checkpoints, 1);
    assert_sound(&mut cache);
}

fn not_ready(reservation: &Reservation) -> bool {
    matches!(reservation, Reservation::Skipped(Skip::NotReady))
}

#[test]
fn pages_that_a_step_still_writes_reach_no_other_request() {
    let mut cache = cache();
    let one = start(&mut cache, &prompt(1, 9));
    let two = start(&mut cache, &prompt(1, 13));
    let own = cache.view(&two).unwrap().pages();
    let first = cache.begin_step();
    let shallow = checkpoint(&mut cache, &one, 8);
    let second = cache.begin_step();
    assert!(not_ready(&reserve(&mut cache, &two, 4)));
    assert!(
        matches!(
            reserve(&mut cache, &two, 8),
            Reservation::Skipped(Skip::Duplicate)
        ),
        "the state is there, its pages are not handed out"
    );
    assert!(not_ready(&reserve(&mut cache, &two, 12)));
    assert_eq!(cache.view(&two).unwrap().pages(), own);
    cache.retire_step(&second, &[]).unwrap();
    assert!(not_ready(&reserve(&mut cache, &two, 12)));
    assert_eq!(cache.stats().skipped.not_ready, 3);
    cache.retire_step(&first, &[]).unwrap();
    assert_eq!(checkpoint(&mut cache, &two, 12).replaced, 0..8);
    assert_eq!(shallow.depth, 8);
    assert_sound(&mut cache);
}

#[test]
fn a_store_that_was_reserved_in_time_takes_no_page_that_is_still_written() {
    let mut cache = cache();
    let one = start(&mut cache, &prompt(1, 9));
    let two = start(&mut cache, &prompt(1, 13));
    let own = cache.view(&two).unwrap().pages();
    let same = pending(reserve(&mut cache, &two, 8));
    let deep = pending(reserve(&mut cache, &two, 12));
    let step = cache.begin_step();
    let failed = checkpoint(&mut cache, &one, 8);
    let commit = cache.commit(&two, deep).unwrap();
    assert_eq!(commit, Commit::Skipped(Skip::NotReady));
    let commit = cache.commit(&two, same).unwrap();
    assert_eq!(commit, Commit::Skipped(Skip::Duplicate));
    assert_eq!(cache.view(&two).unwrap().pages(), own);
    cache.retire_step(&step, &[failed]).unwrap();
    let stored = checkpoint(&mut cache, &two, 12);
    assert_eq!(
        stored.replaced,
        0..0,
        "a refusal takes no good state with it"
    );
    assert_eq!(cached(&mut cache, &prompt(1, 12)), 12);
    assert_sound(&mut cache);
}

#[test]
fn a_checkpoint_waits_for_the_proofs_of_what_it_stands_on() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let unproven = pending(reserve(&mut cache, &sequence, 4)).unproven();
    let Commit::Stored(shallow) = cache.commit(&sequence, unproven).unwrap() else {
        panic!("there is room");
    };
    let ticket = shallow.ticket.unwrap();
    let deep = checkpoint(&mut cache, &sequence, 8);
    assert_eq!(deep.ticket, None);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NotReady);
    cache.complete(ticket, Outcome::Done).unwrap();
    cache.complete(ticket, Outcome::Failed).unwrap();
    assert_eq!(
        cached(&mut cache, &prompt(1, 8)),
        8,
        "repeating it changes nothing"
    );
    assert_sound(&mut cache);
}

#[test]
fn a_state_that_is_not_finite_goes_with_what_stands_on_its_pages() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let unproven = pending(reserve(&mut cache, &sequence, 4)).unproven();
    let Commit::Stored(shallow) = cache.commit(&sequence, unproven).unwrap() else {
        panic!("there is room");
    };
    checkpoint(&mut cache, &sequence, 8);
    let ticket = shallow.ticket.unwrap();
    cache.complete(ticket, Outcome::Failed).unwrap();
    assert_eq!(cache.stats().skipped.non_finite, 2);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NoPrefix);
    assert_eq!(
        cache.complete(ticket + 1, Outcome::Done),
        Err(Misuse::UnknownStep {
            step: ticket + 1,
            newest: ticket
        })
    );
    assert_sound(&mut cache);
}

#[test]
fn a_step_that_is_dropped_is_cancelled_and_keeps_nothing_waiting() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let step = cache.begin_step();
    checkpoint(&mut cache, &sequence, 4);
    cache.finish(sequence).unwrap();
    assert!(cache.usage(PoolKind::Active).retiring > 0);
    drop(step);
    assert_eq!(cache.usage(PoolKind::Active).retiring, 0);
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NoPrefix);
    assert_sound(&mut cache);
}

#[test]
fn a_step_that_retired_may_be_dropped() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let step = cache.begin_step();
    checkpoint(&mut cache, &sequence, 8);
    cache.retire_step(&step, &[]).unwrap();
    let digest = cache.digest();
    drop(step);
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 8);
    assert_eq!(cache.digest(), digest);
}

#[test]
fn a_cancelled_step_leaves_nothing_that_was_stored_in_it() {
    let mut cache = cache();
    store(&mut cache, &prompt(2, 4));
    let sequence = start(&mut cache, &prompt(1, 9));
    let step = cache.begin_step();
    checkpoint(&mut cache, &sequence, 4);
    checkpoint(&mut cache, &sequence, 8);
    cache.cancel_step(&step, &[]).unwrap();
    cache.cancel_step(&step, &[]).unwrap();
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NoPrefix);
    assert_eq!(cached(&mut cache, &prompt(2, 4)), 4);
    assert_sound(&mut cache);
}

#[test]
fn a_refused_checkpoint_is_never_matched() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let step = cache.begin_step();
    let stored = checkpoint(&mut cache, &sequence, 8);
    cache
        .retire_step(&step, std::slice::from_ref(&stored))
        .unwrap();
    assert_eq!(
        look_up(&mut cache, &prompt(1, 9)).reason,
        Reason::NoPrefix,
        "nor the pages that came with it"
    );
    assert_eq!(cache.stats().skipped.non_finite, 1);
    assert_eq!(cache.usage(PoolKind::Checkpoint).free, 4);
    cache.invalidate(&stored).unwrap();
    assert_eq!(
        cache.stats().skipped.non_finite,
        1,
        "repeating it changes nothing"
    );
    assert!(
        matches!(
            reserve(&mut cache, &sequence, 8),
            Reservation::Skipped(Skip::Reset)
        ),
        "its pages are suspect"
    );
    store(&mut cache, &prompt(1, 8));
    assert_eq!(
        cached(&mut cache, &prompt(1, 8)),
        8,
        "another may bring it again"
    );
    assert_sound(&mut cache);
    cache.finish(sequence).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).held, 0);
    assert_sound(&mut cache);
}

#[test]
fn what_stands_on_refused_pages_goes_with_them_and_no_more() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 4));
    let one = start(&mut cache, &prompt(1, 9));
    let two = start(&mut cache, &prompt(1, 13));
    let stored = checkpoint(&mut cache, &one, 8);
    let deeper = checkpoint(&mut cache, &two, 12);
    assert_eq!(
        deeper.replaced,
        4..8,
        "it shares pages that seemed to be good"
    );
    cache.invalidate(&stored).unwrap();
    assert_eq!(cache.stats().skipped.non_finite, 2);
    let left = look_up(&mut cache, &prompt(1, 13));
    assert_eq!((left.length, left.kv_length), (4, 4), "as it was before");
    let pages = cache.view(&two).unwrap().pages();
    assert_eq!(pages.len(), 7, "it keeps what it holds");
    assert!(matches!(
        reserve(&mut cache, &two, 12),
        Reservation::Skipped(Skip::Reset)
    ));
    assert_sound(&mut cache);
    cache.finish(one).unwrap();
    cache.finish(two).unwrap();
    let kv = cache.usage(PoolKind::Kv);
    assert_eq!((kv.free, kv.evictable), (10, 2));
    assert_sound(&mut cache);
}

#[test]
fn a_refusal_after_its_prefix_was_evicted_changes_nothing() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let late = checkpoint(&mut cache, &sequence, 8);
    checkpoint_on_the_way(&mut cache, &sequence, 4);
    cache.finish(sequence).unwrap();
    assert_eq!(cache.evict(PoolKind::Checkpoint, 1).kv, 2);
    let digest = cache.digest();
    cache.invalidate(&late).unwrap();
    assert_eq!(
        (cached(&mut cache, &prompt(1, 4)), cache.digest()),
        (4, digest)
    );
}

#[test]
fn a_refused_state_that_brought_no_pages_goes_alone() {
    let mut cache = cache();
    let long = start(&mut cache, &prompt(1, 9));
    checkpoint(&mut cache, &long, 8);
    let inner = checkpoint_on_the_way(&mut cache, &long, 4);
    cache.invalidate(&inner).unwrap();
    assert_eq!(
        (
            cached(&mut cache, &prompt(1, 4)),
            cached(&mut cache, &prompt(1, 8))
        ),
        (0, 8)
    );
    assert_sound(&mut cache);
}

#[test]
fn a_state_refused_while_it_is_read_keeps_its_slot_until_then() {
    let mut cache = cache();
    let stored = store(&mut cache, &prompt(1, 8));
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    cache.invalidate(&stored).unwrap();
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 0);
    assert_eq!(cache.usage(PoolKind::Checkpoint).pinned, 1);
    assert_sound(&mut cache);
    cache.loaded(&sequence).unwrap();
    assert_eq!(cache.usage(PoolKind::Checkpoint).free, 4);
    assert_eq!(
        cache.usage(PoolKind::Kv).pinned,
        4,
        "the reader keeps the pages to its end"
    );
    cache.finish(sequence).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).free, 12);
}

#[test]
fn what_a_sequence_gives_back_waits_for_every_step_begun_before() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let sequence = start(&mut cache, &prompt(1, 11));
    let (first, second) = (cache.begin_step(), cache.begin_step());
    cache.finish(sequence).unwrap();
    let later = cache.begin_step();
    let waiting = |cache: &mut Cache| {
        let [kv, active, _] = usage(cache);
        (kv.retiring, kv.pinned, active.retiring)
    };
    assert_eq!(waiting(&mut cache), (2, 4, 1), "pages, slot and pins alike");
    cache.retire_step(&second, &[]).unwrap();
    assert_eq!(waiting(&mut cache), (2, 4, 1), "the first is still out");
    assert_sound(&mut cache);
    cache.retire_step(&first, &[]).unwrap();
    assert_eq!(
        waiting(&mut cache),
        (0, 0, 0),
        "the last one began afterwards"
    );
    cache.retire_step(&first, &[]).unwrap();
    cache.retire_step(&later, &[]).unwrap();
    assert_sound(&mut cache);
}

#[test]
fn a_repeated_retirement_changes_nothing_whatever_it_refuses() {
    let mut cache = cache();
    let step = cache.begin_step();
    let stored = store(&mut cache, &prompt(1, 8));
    cache.retire_step(&step, &[]).unwrap();
    cache
        .retire_step(&step, std::slice::from_ref(&stored))
        .unwrap();
    assert_eq!(
        (
            cached(&mut cache, &prompt(1, 8)),
            cache.stats().skipped.non_finite
        ),
        (8, 0)
    );
    cache.invalidate(&stored).unwrap();
    assert_eq!(
        (
            cached(&mut cache, &prompt(1, 8)),
            cache.stats().skipped.non_finite
        ),
        (0, 1),
        "what is learnt later"
    );
}

#[test]
fn a_discarded_reservation_gives_its_slot_back_and_is_counted() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    let before = usage(&mut cache);
    let bad = pending(reserve(&mut cache, &sequence, 8));
    assert_eq!(cache.discard(bad).unwrap(), Skip::NonFinite);
    assert_eq!(
        (usage(&mut cache), cache.stats().skipped.non_finite),
        (before, 1)
    );
    assert_sound(&mut cache);
}

#[test]
fn a_loaded_checkpoint_stays_pinned_until_the_step_that_reads_it_retires() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let step = cache.begin_step();
    let _sequence = start(&mut cache, &prompt(1, 9));
    assert_eq!(cache.usage(PoolKind::Checkpoint).pinned, 1);
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(cache.usage(PoolKind::Checkpoint).pinned, 0);
}

#[test]
fn what_eviction_frees_is_usable_at_once_even_with_a_step_out() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let _step = cache.begin_step();
    let freed = cache.evict(PoolKind::Kv, 1);
    assert_eq!(
        freed,
        Freed {
            kv: 4,
            checkpoints: 1
        }
    );
    assert_eq!(
        usage(&mut cache).map(|usage| (usage.free, usage.retiring)),
        [(12, 0), (3, 0), (4, 0)]
    );
}

#[test]
fn replaced_pages_and_dropped_slots_wait_for_steps_too() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 4));
    let no_read = StartOptions {
        no_read: true,
        ..StartOptions::default()
    };
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 8), no_read);
    cache.loaded(&sequence).unwrap();
    let step = cache.begin_step();
    drop(pending(reserve(&mut cache, &sequence, 8)));
    assert_eq!(checkpoint(&mut cache, &sequence, 8).replaced, 0..4);
    assert_eq!(usage(&mut cache).map(|usage| usage.retiring), [2, 0, 1]);
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(usage(&mut cache).map(|usage| usage.retiring), [0, 0, 0]);
}

#[test]
fn a_reset_hides_everything_and_takes_nothing_from_live_sequences() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    store(&mut cache, &prompt(2, 4));
    let sequence = start(&mut cache, &prompt(1, 13));
    let late = pending(reserve(&mut cache, &sequence, 12));
    let held = pages(&cache, &sequence);
    cache.reset();
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).reason, Reason::NoPrefix);
    assert_eq!(pages(&cache, &sequence), held);
    assert_eq!(
        (
            cache.usage(PoolKind::Kv).pinned,
            cache.usage(PoolKind::Kv).evictable
        ),
        (4, 0)
    );
    assert_eq!(
        cache.stats().evictions.reset,
        Freed {
            kv: 2,
            checkpoints: 2
        }
    );
    assert!(matches!(
        reserve(&mut cache, &sequence, 12),
        Reservation::Skipped(Skip::Reset)
    ));
    assert_eq!(
        cache.commit(&sequence, late).unwrap(),
        Commit::Skipped(Skip::Reset)
    );
    assert_eq!((cache.stats().resets, cache.stats().skipped.reset), (1, 2));
    assert_sound(&mut cache);
    store(&mut cache, &prompt(1, 8));
    assert_eq!(
        cached(&mut cache, &prompt(1, 8)),
        8,
        "the same prefix again, beside the old one"
    );
    assert_sound(&mut cache);
    cache.finish(sequence).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).free, 8);
    assert_sound(&mut cache);
}

#[test]
fn a_checkpoint_being_written_or_read_survives_a_reset_only_as_a_slot() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let Started {
        sequence: reader, ..
    } = start_with(&mut cache, &prompt(1, 9), StartOptions::default());
    let writer = start(&mut cache, &prompt(2, 5));
    let step = cache.begin_step();
    checkpoint(&mut cache, &writer, 4);
    cache.reset();
    assert_eq!(cache.usage(PoolKind::Checkpoint).pinned, 2);
    assert_sound(&mut cache);
    cache.retire_step(&step, &[]).unwrap();
    assert_eq!(
        cached(&mut cache, &prompt(2, 4)),
        0,
        "it became ready in a tree that nobody sees"
    );
    assert_eq!(cache.usage(PoolKind::Checkpoint).pinned, 1);
    cache.abort(reader).unwrap();
    cache.abort(writer).unwrap();
    assert_eq!(usage(&mut cache).map(|usage| usage.free), [12, 3, 4]);
    assert_sound(&mut cache);
}
