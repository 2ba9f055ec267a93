//! A long run over many small caches. `RADIXSTATE_MODEL_SECONDS` says how long; without it, it is
//! one of the tests.
//!
//! Each cache lives for some hundred operations, all drawn from one number, so a failure names what
//! repeats it: `RADIXSTATE_MODEL_SEED=<seed>` runs that cache alone.

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use arbitrary::Unstructured;
use radixstate::{EnginePages, LogicalPages, OwnPages, PoolKind};

use crate::differential::{Both, Front};
use radixstate_replay::Who;
use radixstate_replay::decode::{self, Drawn};

/// Operations on one cache, from small to large.
const OPERATIONS: usize = 400;
#[derive(Default)]
struct Soaked {
    steps: u64,
    visited: HashSet<u64>,
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}, a number is expected")),
    )
}

fn hash(value: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

/// More bytes than one operation takes.
pub(crate) fn draw(seed: u64, step: usize) -> [u8; 16] {
    (u128::from(hash((seed, step))) << 64 | u128::from(hash((step, seed)))).to_le_bytes()
}

/// What a cache holds: where its slots are, and which prefixes have states.
fn fingerprint<O: Front>(both: &mut Both<O>) -> u64 {
    let usage =
        [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint].map(|pool| both.real.usage(pool));
    let places = usage.map(|usage| {
        [
            usage.free,
            usage.held,
            usage.evictable,
            usage.pinned,
            usage.retiring,
        ]
    });
    let states: Vec<_> = both
        .naive
        .states
        .keys()
        .map(|prefix| (&prefix.namespace, &prefix.tokens))
        .collect();
    hash((both.naive.legal, places, states))
}

impl Soaked {
    /// One cache, from empty to empty.
    fn live(&mut self, seed: u64) {
        let drawn = decode::config(&mut Unstructured::new(&draw(seed, 0)));
        let Drawn { config, who } = drawn.expect("any bytes mean a configuration");
        match who {
            Who::Cache => self.live_with(seed, Both::<OwnPages>::new(config)),
            Who::Engine => self.live_with(seed, Both::<EnginePages>::new(config)),
            Who::Logical => self.live_with(seed, Both::<LogicalPages>::new(config)),
        }
    }

    fn live_with<O: Front>(&mut self, seed: u64, mut both: Both<O>) {
        for step in 1..=OPERATIONS {
            let op = decode::operation(&mut Unstructured::new(&draw(seed, step)))
                .expect("any bytes mean an operation");
            both.apply(&op);
            both.verify();
            self.steps += 1;
            self.visited.insert(fingerprint(&mut both));
        }
        both.wind_down(seed.is_multiple_of(2));
    }
}

#[test]
fn a_long_run_over_many_caches_finds_nothing() {
    let (seconds, only) = (
        variable("RADIXSTATE_MODEL_SECONDS"),
        variable("RADIXSTATE_MODEL_SEED"),
    );
    let begun = Instant::now();
    let spent = || seconds.map_or(Duration::ZERO, Duration::from_secs) <= begun.elapsed();
    let first = only.unwrap_or_else(|| {
        if seconds.is_some() {
            RandomState::new().hash_one(())
        } else {
            0
        }
    });
    let least = if only.is_some() { 1 } else { 50 };
    let mut soaked = Soaked::default();
    for n in 0.. {
        if n >= least && (only.is_some() || spent()) {
            break;
        }
        let seed = first.wrapping_add(n);
        if let Err(found) = catch_unwind(AssertUnwindSafe(|| soaked.live(seed))) {
            println!(
                "soak: {} steps, 1 finding: repeat it with RADIXSTATE_MODEL_SEED={seed}",
                soaked.steps
            );
            resume_unwind(found);
        }
    }
    let Soaked { steps, visited } = soaked;
    let rate = steps as f64 / begun.elapsed().as_secs_f64();
    println!(
        "soak: {steps} steps, {} distinct states, {rate:.0} steps per second, 0 findings",
        visited.len()
    );
    // A run that goes round in circles tests nothing; after some ten million steps little is left
    // that is new.
    assert!(
        visited.len() as u64 > steps.min(10_000_000) / 10,
        "{} states in {steps} steps",
        visited.len()
    );
}
