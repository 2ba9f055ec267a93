//! Decisions of recorded operation sequences: the same slots, the same evictions, the same digest,
//! whatever was rewritten underneath.
//!
//! `RADIXSTATE_RECORD=1` prints the table anew. A line may change only with a rule that a caller
//! can see, and the commit that changes it names the rule.

use std::fmt::Write;

use arbitrary::Unstructured;
use radixstate::{Config, EnginePages, OwnPages, StartOptions};
use radixstate_replay::{Op, decode};

use crate::differential::{Both, Front};
use crate::soak::draw;

const OPERATIONS: usize = 600;
const RECORDED: &str = include_str!("recorded.txt");

/// Steps in flight and refusals have rules of their own: half of the caches live without them.
fn has_steps(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// Whether the cache serves an engine with allocators of its own, by leases; else by sequences.
fn leases(seed: u64) -> bool {
    seed % 4 > 1
}

fn config(seed: u64) -> Config {
    let drawn = decode::config(&mut Unstructured::new(&draw(seed, 0)));
    drawn.expect("any bytes do").config
}

/// The operation as it was when it was recorded: proofs, cancelled steps and further slots that are
/// part of a start or go back alone came later.
fn recorded(seed: u64, op: Op) -> Op {
    match op {
        Op::RetireStep { step, .. } if !has_steps(seed) => Op::RetireStep {
            step,
            refused: None,
        },
        Op::Commit { pending, .. } => Op::Commit {
            pending,
            proven: true,
        },
        Op::Start {
            tenant,
            tokens,
            options,
        } => Op::Start {
            tenant,
            tokens,
            options: StartOptions {
                slots: 1,
                ..options
            },
        },
        Op::GiveBackSlot { sequence, .. } => Op::TakeSlot(sequence),
        Op::Extend { lease, .. } => Op::Release(lease),
        Op::ForkLease(lease) => Op::LeaseLoaded(lease),
        Op::Touch { .. } => Op::TakeFreed,
        Op::Complete { .. } | Op::CancelStep(_) | Op::DropStep(_) => Op::TakeFreed,
        op => op,
    }
}

fn belongs(seed: u64, op: &Op) -> bool {
    match op {
        Op::BeginStep | Op::Refuse(_) => has_steps(seed),
        Op::Lease(_)
        | Op::LeaseLoaded(_)
        | Op::Release(_)
        | Op::DropLease(_)
        | Op::ReserveLeased { .. } => leases(seed),
        Op::Start { .. } | Op::Serve { .. } | Op::TakeSlot(_) => !leases(seed),
        _ => true,
    }
}

/// The digest of one cache, from empty to empty.
fn digest(seed: u64) -> u64 {
    if leases(seed) {
        digest_with(seed, Both::<EnginePages>::new(config(seed)))
    } else {
        digest_with(seed, Both::<OwnPages>::new(config(seed)))
    }
}

fn digest_with<O: Front>(seed: u64, mut both: Both<O>) -> u64 {
    for step in 1..=OPERATIONS {
        let op = decode::operation(&mut Unstructured::new(&draw(seed, step)));
        let op = recorded(seed, op.expect("any bytes do"));
        if belongs(seed, &op) {
            both.apply(&op);
        }
    }
    both.wind_down(seed.is_multiple_of(3));
    both.real.digest()
}

#[test]
fn recorded_operations_are_decided_as_they_were() {
    let mut now = String::new();
    for seed in 1_000..1_096 {
        let steps = if has_steps(seed) { "steps" } else { "plain" };
        let kind = if leases(seed) { "leases" } else { "sequences" };
        let digest = digest(seed);
        writeln!(now, "{seed} {kind} {steps} {digest:016x}").expect("a String takes all");
    }
    if std::env::var_os("RADIXSTATE_RECORD").is_some() {
        print!("{now}");
        return;
    }
    for (found, recorded) in now.lines().zip(RECORDED.lines()) {
        assert_eq!(found, recorded, "seed, front, steps, digest");
    }
    assert_eq!(now.lines().count(), RECORDED.lines().count());
}
