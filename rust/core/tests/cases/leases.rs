//! Pins: each is taken off by the one who put it on, and by nobody else.

use radixstate::{Freed, PoolKind, StartOptions, Started};

use crate::*;

// sgl-project/sglang #27038
#[test]
fn ending_one_lease_of_a_shared_path_takes_no_pin_of_another() {
    let mut cache = cache(16, 1, 4);
    store_at(&mut cache, &prompt(1, 12), &[4, 12]);
    let (long, short) = (
        lease(&mut cache, &prompt(1, 13)),
        lease(&mut cache, &prompt(1, 5)),
    );
    cache.release(short).unwrap();
    assert_eq!(cache.usage(PoolKind::Kv).pinned, 6);
    assert_eq!(cache.evict(PoolKind::Kv, usize::MAX), Freed::default());
    cache.release(long).unwrap();
    assert_eq!(cache.evict(PoolKind::Kv, usize::MAX).kv, 6);
    assert_sound(&mut cache);
}

// sgl-project/sglang #21379, #21406
#[test]
fn a_state_whose_pages_are_in_use_goes_alone() {
    let mut cache = cache(16, 1, 4);
    store(&mut cache, &prompt(1, 8));
    let sequence = start(&mut cache, &prompt(1, 9));
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed {
            kv: 0,
            checkpoints: 1
        }
    );
    assert_eq!(look_up(&mut cache, &prompt(1, 9)).kv_length, 8);
    cache.finish(sequence).unwrap();
    assert_eq!(
        free(&mut cache),
        [16, 1, 4],
        "the pages had nothing to stand for any more"
    );
    assert_sound(&mut cache);
}

// sgl-project/sglang #22592, #23696
#[test]
fn an_emptied_chain_is_removed_up_to_the_node_somebody_still_reads() {
    let mut cache = cache(16, 1, 4);
    store_at(&mut cache, &prompt(1, 12), &[4, 8, 12]);
    let reader = lease(&mut cache, &prompt(1, 5));
    cache.lease_loaded(&reader).unwrap();
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 3),
        Freed {
            kv: 4,
            checkpoints: 3
        }
    );
    assert_eq!(
        (
            cache.lease_pages(&reader, 0).unwrap().len(),
            cache.usage(PoolKind::Kv).pinned
        ),
        (2, 2)
    );
    assert_sound(&mut cache);
    cache.release(reader).unwrap();
    assert_eq!(free(&mut cache)[0], 16);
    assert_sound(&mut cache);
}

// sgl-project/sglang #20049
#[test]
fn a_call_that_needs_room_first_collects_what_was_given_up() {
    let mut cache = cache(8, 2, 2);
    store_at(&mut cache, &prompt(1, 8), &[4, 8]);
    let pins = [
        lease(&mut cache, &prompt(1, 5)),
        lease(&mut cache, &prompt(1, 9)),
    ];
    let idle = start(&mut cache, &prompt(2, 8));
    std::thread::spawn(move || drop((pins, idle)))
        .join()
        .unwrap();
    let sequence = start(&mut cache, &prompt(3, 16));
    assert_eq!(
        pages(&cache, &sequence).len(),
        8,
        "the whole pool, with no call in between"
    );
    checkpoint(&mut cache, &sequence, 16);
    assert_sound(&mut cache);
}

// sgl-project/sglang #35931, #34975, #36317
#[test]
fn two_requests_load_one_checkpoint_at_the_same_time() {
    let mut cache = cache(16, 2, 1);
    store(&mut cache, &prompt(1, 8));
    let begin =
        |cache: &mut Cache| try_start(cache, &prompt(1, 9), StartOptions::default()).unwrap();
    let Started {
        sequence: one,
        begin: first,
        ..
    } = begin(&mut cache);
    let Started {
        sequence: two,
        begin: second,
        ..
    } = begin(&mut cache);
    let source = |begin| {
        if let radixstate::Begin::Load { src, .. } = begin {
            src
        } else {
            panic!("{begin:?}")
        }
    };
    assert_eq!(source(first), source(second), "one copy, two readers");
    cache.loaded(&one).unwrap();
    assert_eq!(
        cache.evict(PoolKind::Checkpoint, 1),
        Freed::default(),
        "the other still reads it"
    );
    cache.loaded(&two).unwrap();
    assert_eq!(cache.evict(PoolKind::Checkpoint, 1).checkpoints, 1);
}
