//! A state belongs to one number of tokens: the one its writer states.

use radixstate::{Begin, Config, Misuse, Reason, Reservation, Skip, StartOptions, Started};

use crate::*;

/// Pages of `page` tokens and checkpoints at multiples of `stride`, with room for everything.
fn grids(page: u32, stride: u32) -> Cache {
    Cache::new(Config {
        page_size: page,
        checkpoint_stride: stride,
        ..config(4096, 2, 512)
    })
    .unwrap()
}

// sgl-project/sglang #34760, #34780, #34808, #35412, #39115
#[test]
fn on_two_grids_every_length_is_reused_at_common_multiples_alone() {
    let mut cache = grids(8, 3);
    for n in 1..=200_usize {
        let tokens = prompt(n as u32, n as u32);
        let sequence = start(&mut cache, &tokens);
        let legal = n / 24 * 24;
        assert_eq!(cache.legal_depth(n), legal);
        for depth in (n / 8 * 8..=n).filter(|depth| depth % 24 != 0) {
            let source = slot(&cache, &sequence);
            let refused = cache
                .reserve_checkpoint(&sequence, depth, source)
                .unwrap_err();
            assert_eq!(refused, Misuse::Unaligned { depth, legal: 24 });
        }
        if legal > 0 {
            checkpoint(&mut cache, &sequence, legal);
        }
        cache.finish(sequence).unwrap();
        assert_eq!(reused(&mut cache, &tokens), legal, "{n} tokens");
    }
    assert_sound(&mut cache);
}

// vllm-project/vllm #34587, #34798
#[test]
fn a_block_that_a_chunk_left_half_written_is_not_published() {
    let mut cache = grids(2048, 2048);
    let tokens = prompt(1, 1866 + 1160);
    let sequence = start_with(&mut cache, &tokens, chunk(1866));
    let source = slot(&cache, &sequence);
    let refused = cache
        .reserve_checkpoint(&sequence, 2048, source)
        .unwrap_err();
    assert_eq!(
        refused,
        Misuse::DepthPastEnd {
            depth: 2048,
            end: 1866
        }
    );
    cache.grow(&sequence, 1160).unwrap();
    assert_eq!(checkpoint(&mut cache, &sequence, 2048).depth, 2048);
}

// vllm-project/vllm #53142, #54076, #55600, #55601
#[test]
fn a_match_counts_tokens_and_pages_count_pages() {
    let mut cache = grids(16, 1152);
    let tokens = prompt(1, 11_530);
    store(&mut cache, &tokens);
    let sequence = start(&mut cache, &tokens);
    let view = cache.view(&sequence).unwrap();
    assert_eq!(
        (view.reused(), view.leased(), view.pages().len()),
        (11_520, 11_520, 721)
    );
}

// NVIDIA/Megatron-LM #4758
#[test]
fn a_match_deeper_than_the_first_chunk_is_claimed_whole() {
    let mut cache = cache(32, 2, 4);
    store(&mut cache, &prompt(1, 20));
    let limit = StartOptions {
        max_length: Some(6),
        ..chunk(6)
    };
    let Started {
        sequence, matched, ..
    } = try_start(&mut cache, &prompt(1, 20), limit).unwrap();
    assert_eq!(
        (matched.length, matched.kv_length >= matched.length),
        (0, true),
        "no state within the range"
    );
    cache.finish(sequence).unwrap();
    let Started {
        sequence, matched, ..
    } = try_start(&mut cache, &prompt(1, 21), chunk(6)).unwrap();
    let view = cache.view(&sequence).unwrap();
    assert_eq!(
        (matched.length, view.claimed(), view.pages().len()),
        (20, 20, 10)
    );
    assert_sound(&mut cache);
}

// LMCache/LMCache #4247; vllm-project/vllm #47491
#[test]
fn pages_without_a_state_are_reported_and_not_reused() {
    let mut cache = cache(32, 2, 4);
    store_at(&mut cache, &prompt(1, 32), &[16, 32]);
    let found = look_up(&mut cache, &prompt(1, 32));
    assert_eq!(
        (found.kv_length, found.length),
        (32, 16),
        "the shortest over the components"
    );
    cache.evict(radixstate::PoolKind::Checkpoint, 1);
    let Started {
        sequence,
        matched,
        begin,
    } = try_start(&mut cache, &prompt(1, 32), StartOptions::default()).unwrap();
    assert_eq!(
        (matched.kv_length, matched.length, matched.reason),
        (32, 0, Reason::NoState)
    );
    assert_eq!(
        begin,
        Begin::Clear {
            dst: slot(&cache, &sequence)
        }
    );
}

// vllm-project/tpu-inference #3412, #3358
#[test]
fn a_start_past_zero_always_names_the_state_to_load() {
    let mut cache = cache(64, 1, 4);
    (1..=6).for_each(|family| store_at(&mut cache, &prompt(family, 12), &[4, 12]));
    for (family, n) in (1..=6).flat_map(|family| (1..=14).map(move |n| (family, n))) {
        let Started {
            sequence,
            matched,
            begin,
        } = try_start(&mut cache, &prompt(family, n), StartOptions::default()).unwrap();
        assert_eq!(
            matches!(begin, Begin::Load { .. }),
            matched.length > 0,
            "{n} tokens of family {family}"
        );
        cache.finish(sequence).unwrap();
    }
}

// sgl-project/sglang #29792
#[test]
fn a_late_result_is_stored_at_its_own_depth_not_at_the_requests_length() {
    let mut cache = cache(32, 1, 4);
    let sequence = start_with(&mut cache, &prompt(1, 7), chunk(12));
    cache.append(&sequence, &[77]).unwrap();
    cache.append(&sequence, &[78, 79]).unwrap();
    assert_eq!(
        checkpoint(&mut cache, &sequence, 8).depth,
        8,
        "two tokens on, the state is still that of 8"
    );
    let mut known = prompt(1, 7);
    known.push(77);
    assert_eq!(reused(&mut cache, &known), 8);
    assert_eq!(
        reused(&mut cache, &prompt(1, 8)),
        0,
        "the eighth token was another"
    );
}

// lightseekorg/tokenspeed #565
#[test]
fn a_retraction_at_a_page_boundary_publishes_the_state_of_exactly_those_tokens() {
    let mut cache = cache(32, 2, 4);
    store(&mut cache, &prompt(1, 8));
    let sequence = start_with(&mut cache, &prompt(1, 9), chunk(12));
    cache.append(&sequence, &[50, 51, 52]).unwrap();
    let known = cache.view(&sequence).unwrap().tokens().to_vec();
    let stored = checkpoint(&mut cache, &sequence, 12);
    assert!(matches!(
        reserve(&mut cache, &sequence, 12),
        Reservation::Skipped(Skip::Duplicate)
    ));
    cache.abort(sequence).unwrap();
    assert_eq!((stored.depth, stored.replaced), (12, 0..0));
    assert_eq!(
        (
            reused(&mut cache, &known),
            reused(&mut cache, &prompt(1, 8))
        ),
        (12, 8)
    );
    assert_sound(&mut cache);
}

// ggml-org/llama.cpp #20225, #22384, #24055, #25592; ik_llama.cpp #1762
#[test]
fn the_deepest_state_at_or_before_the_fork_is_taken_and_none_is_lost() {
    let mut cache = Cache::new(Config {
        page_size: 5,
        checkpoint_stride: 10,
        ..config(64, 2, 8)
    })
    .unwrap();
    store_at(&mut cache, &prompt(1, 30), &[10, 20, 30]);
    let other = fork(&prompt(1, 25), 1, 10);
    assert_eq!(look_up(&mut cache, &other).length, 20);
    store(&mut cache, &other);
    for (shared, expected) in [(10, 10), (20, 20), (25, 20), (30, 30)] {
        assert_eq!(
            reused(&mut cache, &prompt(1, shared)),
            expected,
            "{shared} shared tokens"
        );
    }
    assert_sound(&mut cache);
}

// sgl-project/sglang #21158, #22935, #21350, #38625
#[test]
fn a_lookup_that_ends_inside_a_run_cuts_nothing() {
    let mut cache = grids(16, 32);
    store(&mut cache, &prompt(1, 96));
    let before = look_up(&mut cache, &prompt(1, 97));
    let short = cache
        .lookup(&Namespace::default(), &prompt(1, 96), Some(95))
        .unwrap();
    assert_eq!(
        (short.length, short.kv_length, short.reason),
        (0, 80, Reason::NoState)
    );
    assert_eq!(
        short.branch,
        Some(64),
        "where a state would serve the identical prompt"
    );
    assert_eq!(
        look_up(&mut cache, &prompt(1, 97)),
        before,
        "the same node, uncut"
    );
    store_at(&mut cache, &prompt(1, 96), &[64]);
    assert_eq!(look_up(&mut cache, &prompt(1, 96)).length, 64);
}

// sgl-project/sglang #26450
#[test]
fn a_prompt_shorter_than_a_page_ends_without_a_checkpoint_and_without_a_fuss() {
    let mut cache = grids(32, 32);
    let sequence = start(&mut cache, &prompt(1, 29));
    let depth = cache.legal_depth(29);
    assert!(matches!(
        reserve(&mut cache, &sequence, depth),
        Reservation::Skipped(Skip::NotAligned)
    ));
    cache.finish(sequence).unwrap();
    assert_eq!(
        (
            reused(&mut cache, &prompt(1, 29)),
            cache.stats().skipped.not_aligned
        ),
        (0, 1)
    );
    assert_sound(&mut cache);
}

// vllm-project/vllm #53084; LMCache/LMCache #5004
#[test]
fn a_boundary_whose_state_was_never_committed_is_absent() {
    let mut cache = cache(32, 1, 4);
    let sequence = start(&mut cache, &prompt(1, 13));
    checkpoint(&mut cache, &sequence, 4);
    drop(pending(&mut cache, &sequence, 8));
    checkpoint(&mut cache, &sequence, 12);
    let lengths = [4, 8, 12].map(|n| reused(&mut cache, &prompt(1, n)));
    assert_eq!(lengths, [4, 4, 12]);
}

// sgl-project/sglang-jax #1456
#[test]
fn a_walk_passes_nodes_that_have_no_state() {
    let mut cache = cache(64, 1, 8);
    store_at(&mut cache, &prompt(1, 16), &[4, 8, 12, 16]);
    cache.evict(radixstate::PoolKind::Checkpoint, 3);
    assert_eq!(
        reused(&mut cache, &prompt(1, 16)),
        16,
        "four nodes, a state on the last alone"
    );
    assert_eq!(reused(&mut cache, &prompt(1, 12)), 0);
}
