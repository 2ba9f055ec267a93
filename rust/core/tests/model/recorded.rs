//! Decisions of recorded operation sequences: the same slots, the same evictions, the same digest,
//! whatever was rewritten underneath.
//!
//! `RADIXSTATE_RECORD=1` prints the table anew. A line may change only with a rule that a caller
//! can see, and the commit that changes it names the rule.

use std::fmt::Write;

use arbitrary::Unstructured;

use crate::both::Both;
use crate::decode;
use crate::ops::Op;
use crate::soak::draw;

const OPERATIONS: usize = 600;
const RECORDED: &str = include_str!("recorded.txt");

/// Steps in flight have rules of their own, so half of the caches live without them.
fn has_steps(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// The digest of one cache, from empty to empty.
fn digest(seed: u64) -> u64 {
    let config = decode::config(&mut Unstructured::new(&draw(seed, 0))).expect("any bytes do");
    let mut both = Both::new(config);
    for step in 1..=OPERATIONS {
        let op =
            decode::operation(&mut Unstructured::new(&draw(seed, step))).expect("any bytes do");
        if has_steps(seed) || !matches!(op, Op::BeginStep) {
            both.apply(&op);
        }
    }
    both.wind_down(seed.is_multiple_of(4));
    both.real.digest()
}

#[test]
fn recorded_operations_are_decided_as_they_were() {
    let mut now = String::new();
    for seed in 1_000..1_064 {
        let steps = if has_steps(seed) { "steps" } else { "plain" };
        writeln!(now, "{seed} {steps} {:016x}", digest(seed)).expect("a String takes all");
    }
    if std::env::var_os("RADIXSTATE_RECORD").is_some() {
        print!("{now}");
        return;
    }
    for (found, recorded) in now.lines().zip(RECORDED.lines()) {
        assert_eq!(found, recorded, "seed, kind, digest");
    }
    assert_eq!(now.lines().count(), RECORDED.lines().count());
}
