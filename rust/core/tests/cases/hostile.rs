//! Tokens that somebody chose to do harm.

use std::time::{Duration, Instant};

use crate::*;

/// Two caches have different secrets, so their tables hash everything differently.
#[test]
fn no_decision_depends_on_the_secret_of_the_hash() {
    let run = || {
        let mut cache = cache(64, 4, 8);
        let mut seed = 1_u32;
        let mut seen = Vec::new();
        for _ in 0..500 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let family = seed >> 29;
            let tokens = fork(&prompt(family, 4 + (seed >> 16) % 9), (seed >> 8) % 3, 6);
            let sequence = start(&mut cache, &tokens);
            let depth = cache.legal_depth(tokens.len());
            seen.push(format!(
                "{:?}",
                reserve_and_commit(&mut cache, &sequence, depth)
            ));
            seen.push(format!("{:?}", pages(&cache, &sequence)));
            cache.finish(sequence).unwrap();
            seen.push(cache.digest().to_string());
        }
        assert_sound(&mut cache);
        seen
    };
    assert_eq!(run(), run());
}

/// The slot and depth of what was stored, or why nothing was.
fn reserve_and_commit(
    cache: &mut Cache,
    sequence: &Sequence,
    depth: usize,
) -> Option<(u32, usize)> {
    let Reservation::Pending(pending) = reserve(cache, sequence, depth) else {
        return None;
    };
    match cache.commit(sequence, pending).unwrap() {
        Commit::Stored(stored) => Some((stored.slot, stored.depth)),
        Commit::Skipped(_) => None,
    }
}

/// How long it takes to refuse the shallowest of `n` states on one path: the best of three tries.
fn refuse_the_shallowest(n: u32) -> Duration {
    let try_once = || {
        let config = Config {
            page_size: 1,
            checkpoint_stride: 1,
            ..config(n, 1, n)
        };
        let mut cache = Cache::new(config).unwrap();
        let sequence = start(&mut cache, &prompt(1, n));
        let first = checkpoint(&mut cache, &sequence, 1);
        for depth in 2..=n as usize {
            checkpoint(&mut cache, &sequence, depth);
        }
        cache.finish(sequence).unwrap();
        let began = Instant::now();
        cache.invalidate(&first).unwrap();
        let took = began.elapsed();
        assert_eq!(
            free(&mut cache)[2],
            n as usize,
            "nothing stands on a refused state"
        );
        took
    };
    (0..3).map(|_| try_once()).min().unwrap()
}

/// A ratio of times, and so a generous one: eight times the states took sixty times as long when
/// each of them was asked for its whole path.
#[test]
fn refusing_the_shallowest_of_a_long_chain_looks_at_each_state_once() {
    let (short, long) = (refuse_the_shallowest(500), refuse_the_shallowest(4000));
    assert!(
        long < short * 25,
        "{short:?} for 500 states, {long:?} for 4000"
    );
}
