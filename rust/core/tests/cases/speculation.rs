//! Drafts: depth moves by what was accepted, and look-ahead costs exactly what it says.

use radixstate::{Misuse, StartOptions, Started};

use crate::*;

/// Serves a prompt as an engine does that keeps `ahead` tokens for its draft heads, and returns
/// what it reused.
fn serve(cache: &mut Cache, tokens: &[u32], ahead: usize) -> usize {
    let options = StartOptions {
        max_length: Some((tokens.len() - 1).saturating_sub(ahead)),
        ..Default::default()
    };
    let Started {
        sequence, matched, ..
    } = try_start(cache, tokens, options).unwrap();
    cache.loaded(&sequence).unwrap();
    let end = cache.legal_depth(tokens.len());
    for depth in matched
        .branch
        .into_iter()
        .chain((end > matched.length).then_some(end))
    {
        if let radixstate::Reservation::Pending(pending) = reserve(cache, &sequence, depth) {
            cache.commit(&sequence, pending).unwrap();
        }
    }
    matched.length
}

// vllm-project/vllm #52244, #54360; sgl-project/sglang #32459
#[test]
fn the_third_time_a_prompt_of_any_length_hits_at_the_depth_the_formula_says() {
    for ahead in [0, 1, 3, 4] {
        let mut cache = cache(4096, 1, 256);
        for n in 1..=16_usize {
            let tokens = prompt(n as u32, n as u32);
            let lengths = [(); 3].map(|()| serve(&mut cache, &tokens, ahead));
            let formula = (n - 1).saturating_sub(ahead) / 4 * 4;
            assert_eq!(
                (lengths[0], lengths[2]),
                (0, formula),
                "{n} tokens, {ahead} ahead"
            );
        }
    }
}

// sgl-project/sglang #26351
#[test]
fn a_verify_moves_the_depth_by_what_it_accepted() {
    let mut cache = cache(32, 1, 4);
    let sequence = start(&mut cache, &prompt(1, 6));
    for accepted in [2_usize, 0, 4, 1] {
        let before = cache.view(&sequence).unwrap().tokens().len();
        cache.grow(&sequence, 4).unwrap();
        cache
            .append(&sequence, &prompt(9, accepted as u32))
            .unwrap();
        cache.shrink(&sequence).unwrap();
        let view = cache.view(&sequence).unwrap();
        assert_eq!(
            (view.tokens().len(), view.claimed()),
            (before + accepted, before + accepted)
        );
    }
    assert_eq!(checkpoint(&mut cache, &sequence, 12).depth, 12);
    assert_sound(&mut cache);
}

// vllm-project/vllm #55178
#[test]
fn positions_that_only_padding_filled_have_no_state() {
    let mut cache = cache(32, 1, 4);
    let sequence = start(&mut cache, &prompt(1, 7));
    cache.grow(&sequence, 5).unwrap();
    cache.append(&sequence, &[7]).unwrap();
    let source = slot(&cache, &sequence);
    let refused = cache.reserve_checkpoint(&sequence, 12, source).unwrap_err();
    assert_eq!(
        refused,
        Misuse::DepthPastEnd { depth: 12, end: 8 },
        "12 positions are claimed, 8 tokens known"
    );
    assert_eq!(checkpoint(&mut cache, &sequence, 8).depth, 8);
}

// vllm-project/vllm #43559, #48375, #47194, #53912; sgl-project/sglang #20217, #29633
#[test]
fn a_caller_that_must_recompute_some_tokens_steps_back_to_an_earlier_state() {
    let mut cache = cache(32, 1, 4);
    store_at(&mut cache, &prompt(1, 8), &[4, 8]);
    let tokens = prompt(1, 9);
    let hits = [1, 2, 5, 6].map(|recompute| {
        let limit = Some(tokens.len() - recompute);
        cache
            .lookup(&Namespace::default(), &tokens, limit)
            .unwrap()
            .length
    });
    assert_eq!(hits, [8, 4, 4, 0]);
}
