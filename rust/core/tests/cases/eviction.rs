//! What goes first, and what stays because it is used.

use radixstate::{PoolKind, Reservation, StartOptions, Started};

use crate::*;

// sgl-project/sglang #31643, #31648
#[test]
fn hits_at_the_ends_let_the_states_on_the_way_go_first() {
    let mut cache = cache(64, 1, 8);
    [1, 2]
        .into_iter()
        .for_each(|family| store_at(&mut cache, &prompt(family, 16), &[4, 8, 12, 16]));
    for turn in 0..6 {
        drop(
            try_start(
                &mut cache,
                &prompt(1 + turn % 2, 17),
                StartOptions::default(),
            )
            .unwrap(),
        );
        cache.evict(PoolKind::Checkpoint, 1);
    }
    assert_eq!(
        [1, 2].map(|family| reused(&mut cache, &prompt(family, 16))),
        [16, 16]
    );
    assert_eq!(
        [1, 2].map(|family| reused(&mut cache, &prompt(family, 12))),
        [0, 0],
        "six others went"
    );
}

// vllm-project/vllm #45238, #43628
#[test]
fn a_shared_part_is_reused_wherever_the_prompts_end() {
    for shift in [0, 100, 300, 500] {
        let sizes = radixstate::Config {
            page_size: 16,
            checkpoint_stride: 528,
            ..config(4096, 1, 64)
        };
        let mut cache = Cache::new(sizes).unwrap();
        let serve = |branch| {
            let tokens = fork(&prompt(1, 1500 + shift), branch, 700);
            let Started {
                sequence, matched, ..
            } = try_start(&mut cache, &tokens, StartOptions::default()).unwrap();
            cache.loaded(&sequence).unwrap();
            for depth in matched
                .branch
                .into_iter()
                .chain([cache.legal_depth(tokens.len())])
            {
                reserve_and_commit(&mut cache, &sequence, depth);
            }
            matched.length
        };
        let hits: Vec<usize> = (0..10).map(serve).collect();
        let junction = (1500 + shift as usize) / 528 * 528;
        assert_eq!(hits[2..], [junction; 8], "{shift} tokens further: {hits:?}");
    }
}

fn reserve_and_commit(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Option<Commit> {
    match reserve(cache, sequence, depth) {
        Reservation::Pending(pending) => Some(cache.commit(sequence, pending).unwrap()),
        Reservation::Skipped(_) => None,
    }
}

// syv-ai/qwen38-27b-rtx3090 #52
#[test]
fn the_state_a_turn_resumed_from_outlives_what_was_stored_before_it() {
    let mut cache = cache(64, 2, 4);
    store(&mut cache, &prompt(1, 8));
    (2..=4).for_each(|family| store(&mut cache, &prompt(family, 8)));
    let turn = start(&mut cache, &prompt(1, 9));
    (5..=7).for_each(|family| store(&mut cache, &prompt(family, 8)));
    cache.finish(turn).unwrap();
    assert_eq!(
        reused(&mut cache, &prompt(1, 8)),
        8,
        "three new ones took the place of three older"
    );
}

// GLM-5.3-Flash-EXL3-2x-DGX-Sparks #95; sgl-project/sglang #38069
#[test]
fn a_batch_that_stores_nothing_leaves_a_session_its_states() {
    let mut cache = cache(64, 2, 2);
    store_at(&mut cache, &prompt(1, 16), &[8, 16]);
    for family in 2..52 {
        let no_store = StartOptions {
            no_store: true,
            ..StartOptions::default()
        };
        let sequence = start_with(&mut cache, &prompt(family, 9), no_store);
        assert!(reserve_and_commit(&mut cache, &sequence, 8).is_none());
        cache.finish(sequence).unwrap();
    }
    assert_eq!(
        (
            reused(&mut cache, &prompt(1, 16)),
            reused(&mut cache, &prompt(1, 8))
        ),
        (16, 8)
    );
    assert_eq!(cache.stats().skipped.no_store, 50);
}

// mlx-vlm #1901
#[test]
fn a_shallow_hit_does_not_stop_a_deeper_state() {
    let mut cache = cache(64, 1, 8);
    store(&mut cache, &prompt(1, 4));
    let shared = fork(&prompt(1, 4), 7, 40);
    for branch in 0..5 {
        let Started {
            sequence, matched, ..
        } = try_start(
            &mut cache,
            &fork(&shared, branch, 4),
            StartOptions::default(),
        )
        .unwrap();
        cache.loaded(&sequence).unwrap();
        assert_eq!(
            matched.length,
            [4, 4, 44, 44, 44][branch as usize],
            "request {branch}"
        );
        let depth = matched.branch.unwrap_or(48);
        reserve_and_commit(&mut cache, &sequence, depth);
        cache.finish(sequence).unwrap();
        if branch == 0 {
            store(&mut cache, &fork(&shared, 50, 4));
        }
    }
}
