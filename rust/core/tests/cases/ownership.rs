//! Every slot has one owner, and comes back exactly once.

use radixstate::{Begin, StartOptions, Started};

use crate::*;

// sgl-project/sglang #12693, #16067, #20182, #20185, #21404, #20377
#[test]
fn a_lookup_leaves_nothing_to_undo() {
    let mut cache = cache(12, 3, 2);
    store(&mut cache, &prompt(1, 8));
    let before = (free(&mut cache), cache.digest());
    for _ in 0..100 {
        assert_eq!(look_up(&mut cache, &prompt(1, 9)).length, 8);
        drop(look_up(&mut cache, &fork(&prompt(1, 3), 1, 4)));
    }
    assert_eq!((free(&mut cache), cache.digest()), before);
    assert_sound(&mut cache);
}

// sgl-project/sglang #23496
#[test]
fn a_hundred_requests_of_many_parts_leave_the_counts_as_they_were() {
    let mut cache = cache(12, 3, 2);
    store(&mut cache, &prompt(1, 8));
    let before = free(&mut cache);
    for turn in 0..100 {
        let sequence = start(&mut cache, &prompt(1, 13));
        cache.take_slot(&sequence).unwrap();
        cache.grow(&sequence, 2).unwrap();
        let pending = pending(&mut cache, &sequence, 12);
        match turn % 4 {
            0 => drop((sequence, pending)),
            1 => drop((pending, sequence)),
            2 => cache.abort(sequence).unwrap(),
            _ => cache.finish(sequence).unwrap(),
        }
    }
    assert_eq!(free(&mut cache), before);
    assert_sound(&mut cache);
}

// imp #500; sgl-project/sglang #26941
#[test]
fn live_requests_never_share_a_slot_however_they_come_and_go() {
    let mut cache = cache(64, 4, 2);
    let mut running: Vec<Sequence> = Vec::new();
    for family in 0..200_u32 {
        if running.len() == 4 {
            cache
                .finish(running.remove(family as usize * 7 % 4))
                .unwrap();
        }
        running.push(start(&mut cache, &prompt(family, 3)));
        let mut slots: Vec<u32> = running
            .iter()
            .map(|sequence| slot(&cache, sequence))
            .collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), running.len(), "after request {family}");
    }
}

// vllm-project/vllm #55450
#[test]
fn a_gap_between_checkpoints_hides_none_from_eviction() {
    let mut cache = cache(32, 1, 8);
    store_at(&mut cache, &prompt(1, 24), &[4, 8, 16, 20]);
    assert_eq!(
        cache
            .evict(radixstate::PoolKind::Checkpoint, usize::MAX)
            .checkpoints,
        4
    );
    assert_eq!(free(&mut cache), [32, 1, 8]);
}

// sgl-project/mini-sglang #142
#[test]
fn a_request_whose_pages_were_replaced_keeps_valid_ones_while_the_pool_churns() {
    let mut cache = cache(16, 3, 4);
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &prompt(1, 9)),
    );
    checkpoint(&mut cache, &one, 8);
    let own = pages(&cache, &two);
    let late = reserve(&mut cache, &two, 8);
    assert!(matches!(
        late,
        radixstate::Reservation::Skipped(radixstate::Skip::Duplicate)
    ));
    cache.grow(&two, 4).unwrap();
    cache.append(&two, &prompt(2, 3)).unwrap();
    assert_eq!(
        checkpoint(&mut cache, &two, 12).replaced,
        0..8,
        "in the same operation"
    );
    assert_eq!(pages(&cache, &two)[..4], pages(&cache, &one)[..4]);
    assert_ne!(pages(&cache, &two)[..4], own[..4]);
    cache.finish(one).unwrap();
    let kept = pages(&cache, &two);
    for family in 3..30 {
        let other = start(&mut cache, &prompt(family, 6));
        assert!(
            pages(&cache, &other)
                .iter()
                .all(|page| !kept.contains(page)),
            "family {family}"
        );
        cache.finish(other).unwrap();
    }
    assert_sound(&mut cache);
}

// Rapid-MLX #1075, #1103; unsloth #11073; ggml-org/llama.cpp #21690
#[test]
fn a_thousand_prefixes_that_nobody_repeats_stay_within_the_bytes_of_the_pools() {
    let base = config(32, 2, 8);
    let sizes = radixstate::Config {
        kv: base.kv.bytes(100),
        checkpoints: base.checkpoints.bytes(5_000),
        ..base
    };
    let mut cache = Cache::new(sizes).unwrap();
    for family in 0..1000 {
        store(&mut cache, &prompt(family, 10));
        let bytes = cache.stats().bytes;
        assert!(
            bytes.kv <= 3_200 && bytes.checkpoints <= 40_000,
            "{bytes:?} after {family}"
        );
    }
    assert_eq!(cache.stats().stored, 1000);
    assert_sound(&mut cache);
}

// pie #354; ik_llama.cpp #1932, #2260
#[test]
fn forks_share_pages_and_never_a_running_state() {
    let mut cache = cache(32, 4, 4);
    let parent = start(&mut cache, &prompt(1, 9));
    let at = checkpoint(&mut cache, &parent, 8);
    let [one, two] = [1, 2].map(|branch| {
        let tokens = fork(&prompt(1, 8), branch, 3);
        let Started {
            sequence, begin, ..
        } = try_start(&mut cache, &tokens, StartOptions::default()).unwrap();
        assert_eq!(
            begin,
            Begin::Load {
                src: at.slot,
                dst: slot(&cache, &sequence)
            }
        );
        sequence
    });
    assert_ne!(slot(&cache, &one), slot(&cache, &two));
    assert_eq!(pages(&cache, &one)[..4], pages(&cache, &two)[..4]);
    assert_ne!(pages(&cache, &one)[4..], pages(&cache, &two)[4..]);
    assert_sound(&mut cache);
}

// sgl-project/sglang #12107
#[test]
fn a_lease_of_a_tree_that_was_reset_ends_without_harm() {
    let mut cache = cache(12, 2, 4);
    store(&mut cache, &prompt(1, 8));
    let old = lease(&mut cache, &prompt(1, 9));
    cache.reset();
    store(&mut cache, &prompt(1, 8));
    let new = lease(&mut cache, &prompt(1, 9));
    cache.release(old).unwrap();
    assert_eq!(
        cache.usage(radixstate::PoolKind::Kv).pinned,
        4,
        "the pin of the new tree stands"
    );
    drop(new);
    cache.reset();
    assert_eq!(free(&mut cache), [12, 2, 4]);
    assert_sound(&mut cache);
}
