//! Random operations that proptest makes and, when they fail, makes small.
//!
//! A failure prints its seed and the smallest operations that show it. `PROPTEST_RNG_SEED=<seed>`
//! repeats it, `PROPTEST_CASES=<n>` tries more.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use proptest::prelude::*;
use proptest::test_runner::{Config as RunnerConfig, RngSeed, TestRunner};
use radixstate::{Config, PoolConfig, PoolKind, StartOptions, Stats};

use crate::differential;
use radixstate_replay::decode::Drawn;
use radixstate_replay::{Depth, Op, Who, Wrong};

/// A geometry, and pools small enough to run short.
fn config() -> impl Strategy<Value = Drawn> {
    let kv = prop_oneof![1 => Just(None), 3 => (0..20u32).prop_map(Some)];
    let who = prop_oneof![2 => Just(Who::Cache), 1 => Just(Who::Engine), 1 => Just(Who::Logical)];
    let pools = (kv, who, 1..4u32, 1..7u32);
    (1..=4u32, 1..=6u32, pools).prop_map(|(page_size, checkpoint_stride, pools)| {
        let (kv, who, active, checkpoints) = pools;
        // More than the pages up to the first legal depth: the cache refuses less.
        let legal = (1..)
            .find(|pages| (pages * page_size).is_multiple_of(checkpoint_stride))
            .expect("an lcm exists");
        let kv = kv.map_or(0, |more| legal + 1 + more);
        let config = Config {
            page_size,
            checkpoint_stride,
            kv: PoolConfig::internal(kv).bytes(3),
            active: PoolConfig::internal(active).bytes(5),
            checkpoints: PoolConfig::internal(checkpoints).bytes(7),
        };
        Drawn { config, who }
    })
}

fn tokens(longest: usize) -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![16 => Just(0u32), 1 => Just(1u32)];
    prop::collection::vec(token, 1..=longest)
}

fn depth() -> impl Strategy<Value = Depth> {
    prop_oneof![
        6 => Just(Depth::Deepest),
        4 => (0..4usize).prop_map(Depth::Legal),
        1 => (0..12usize).prop_map(Depth::Any),
    ]
}

fn options() -> impl Strategy<Value = StartOptions> {
    let sometimes = |odds: f64| prop::bool::weighted(odds);
    let reserve = prop::option::weighted(0.3, 0..30usize);
    let max_length = prop::option::weighted(0.1, 0..20usize);
    let slots = prop_oneof![12 => Just(1usize), 1 => Just(0), 2 => Just(2), 1 => Just(3)];
    let flags = (sometimes(0.05), sometimes(0.05));
    (reserve, max_length, flags, slots).prop_map(
        |(reserve, max_length, (no_read, no_store), slots)| StartOptions {
            reserve,
            max_length,
            no_read,
            no_store,
            slots,
        },
    )
}

fn pool() -> impl Strategy<Value = PoolKind> {
    prop_oneof![4 => Just(PoolKind::Checkpoint), 4 => Just(PoolKind::Kv), 1 => Just(PoolKind::Active)]
}

fn wrong() -> impl Strategy<Value = Wrong> {
    prop::sample::select(vec![
        Wrong::EmptyPrompt,
        Wrong::OtherCache,
        Wrong::OtherPending,
        Wrong::Pages,
    ])
}

/// A tenant seldom: two namespaces, one of them busy.
fn tenant() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.15)
}

fn request() -> impl Strategy<Value = Op> {
    let n = 0..64usize;
    prop_oneof![
        6 => (tenant(), tokens(32), options())
            .prop_map(|(tenant, tokens, options)| Op::Start { tenant, tokens, options }),
        24 => (tenant(), tokens(32), any::<bool>())
            .prop_map(|(tenant, tokens, ends)| Op::Serve { tenant, tokens, ends }),
        8 => n.clone().prop_map(Op::Loaded),
        4 => (n.clone(), 0..10usize).prop_map(|(n, by)| Op::Grow(n, by)),
        4 => (n.clone(), tokens(8)).prop_map(|(n, tokens)| Op::Append(n, tokens)),
        2 => n.clone().prop_map(Op::Shrink),
        2 => n.clone().prop_map(Op::TakeSlot),
        2 => (n.clone(), n.clone())
            .prop_map(|(sequence, slot)| Op::GiveBackSlot { sequence, slot }),
        14 => (n.clone(), depth(), n.clone())
            .prop_map(|(sequence, depth, source)| Op::Reserve { sequence, depth, source }),
        14 => (n.clone(), prop::bool::weighted(0.8))
            .prop_map(|(pending, proven)| Op::Commit { pending, proven }),
        4 => (n.clone(), prop::bool::weighted(0.8))
            .prop_map(|(proof, finite)| Op::Complete { proof, finite }),
        1 => n.clone().prop_map(Op::DropPending),
        1 => n.clone().prop_map(Op::Discard),
        6 => n.clone().prop_map(Op::Finish),
        1 => (n, 1..4usize).prop_map(|(first, count)| Op::DropSequences { first, count }),
    ]
}

fn engine() -> impl Strategy<Value = Op> {
    let n = 0..64usize;
    prop_oneof![
        6 => (tenant(), tokens(32), prop::option::weighted(0.1, 0..20usize))
            .prop_map(|(tenant, tokens, max_length)| Op::Lookup { tenant, tokens, max_length }),
        4 => n.clone().prop_map(Op::Lease),
        2 => n.clone().prop_map(Op::LeaseLoaded),
        1 => n.clone().prop_map(Op::ForkLease),
        1 => (tenant(), tokens(32)).prop_map(|(tenant, tokens)| Op::Touch { tenant, tokens }),
        5 => (n.clone(), tokens(20), depth())
            .prop_map(|(lease, more, depth)| Op::ReserveLeased { lease, more, depth }),
        3 => (n.clone(), tokens(20)).prop_map(|(lease, more)| Op::Extend { lease, more }),
        2 => n.clone().prop_map(Op::Release),
        1 => n.clone().prop_map(Op::DropLease),
        2 => (pool(), 0..4usize).prop_map(|(pool, n)| Op::Evict(pool, n)),
        3 => Just(Op::TakeFreed),
        4 => Just(Op::BeginStep),
        6 => (any::<u64>(), prop::option::weighted(0.2, n.clone()))
            .prop_map(|(step, refused)| Op::RetireStep { step, refused }),
        1 => any::<u64>().prop_map(Op::CancelStep),
        1 => n.clone().prop_map(Op::DropStep),
        1 => n.clone().prop_map(Op::Refuse),
        2 => (wrong(), n).prop_map(|(wrong, n)| Op::Wrong(wrong, n)),
        1 => prop::bool::weighted(0.3).prop_map(|reset| if reset { Op::Reset } else { Op::TakeFreed }),
    ]
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(prop_oneof![3 => request(), 2 => engine()], 1..120)
}

/// What all cases together have met; a rule that no case reaches is a rule that is not tested.
#[derive(Debug, Default)]
struct Met {
    counts: BTreeMap<&'static str, u64>,
}

impl Met {
    fn add(&mut self, stats: &Stats) {
        let Stats {
            misses,
            skipped,
            evictions,
            ..
        } = stats;
        let counts = [
            ("hits", stats.hits),
            ("no prefix", misses.no_prefix),
            ("no state", misses.no_state),
            ("unaligned", misses.unaligned),
            ("not ready", misses.not_ready),
            ("stored", stats.stored),
            ("duplicates", stats.duplicates),
            ("no room", skipped.no_room),
            ("no store", skipped.no_store),
            ("reset refused", skipped.reset),
            ("not aligned", skipped.not_aligned),
            ("not finite", skipped.non_finite),
            ("pages evicted for pages", evictions.for_kv.kv as u64),
            (
                "states evicted for states",
                evictions.for_checkpoint.checkpoints as u64,
            ),
            (
                "pages evicted for states",
                evictions.for_checkpoint.kv as u64,
            ),
            ("evicted when asked", evictions.asked.checkpoints as u64),
            ("evicted by reset", evictions.reset.checkpoints as u64),
        ];
        counts
            .into_iter()
            .for_each(|(what, n)| *self.counts.entry(what).or_default() += n);
    }
}

fn seed() -> u64 {
    match RunnerConfig::default().rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().hash_one(()),
    }
}

#[test]
fn the_cache_and_the_naive_one_agree_after_every_operation() {
    let seed = seed();
    println!("seed {seed}: repeat with PROPTEST_RNG_SEED={seed}");
    let cases =
        std::env::var_os("PROPTEST_CASES").map_or(10_000, |_| RunnerConfig::default().cases);
    let runner = RunnerConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..RunnerConfig::default()
    };
    let met = RefCell::new(Met::default());
    let strategy = (config(), operations(), any::<bool>());
    let result = TestRunner::new(runner).run(&strategy, |(config, ops, by_page)| {
        let stats = differential::run(config, &ops, by_page);
        met.borrow_mut().add(&stats);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let met = met.into_inner().counts;
    println!("{met:?}");
    let least = u64::from(cases / 500);
    assert!(
        met.values().all(|&n| n >= least),
        "seed {seed}: some rule was met fewer than {least} times: {met:?}"
    );
}
