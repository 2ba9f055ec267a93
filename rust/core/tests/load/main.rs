//! A scheduler under load: overlapped steps, aborts, retractions, and a shortage at every place
//! that allocates.
//!
//! After each turn the counters equal what the scheduler knows to be out; now and then `check()`
//! recounts everything; at the end every slot is back. A test runs a hundredth of the whole, which
//! is `RADIXSTATE_LOAD=full`, 100,000 leaves and 4,096 sequences at once:
//!
//! ```text
//! RADIXSTATE_LOAD=full cargo test --release -p radixstate --test load -- --nocapture --test-threads=1
//! ```

mod process;
mod prompts;

use std::time::{Duration, Instant};

use prompts::{LEGAL, PAGE, Prompts};
use radixstate::policy::by_name;
use radixstate::{
    Cache, Commit, Config, Namespace, PoolConfig, PoolKind, Reservation, StartOptions, Stats,
};
use radixstate_replay::{Engine, Habits, Random, Scheduler, Seen, Sequences};

const HABITS: Habits = Habits {
    chunk: (LEGAL, LEGAL),
    draft: 4,
    most_out: 4,
    rush: 2,
    whole: 2,
    track: 100,
    abort: 100,
    drop_pending: 50,
};
const SEED: u64 = 28_185;

#[derive(Clone, Copy)]
struct Size {
    leaves: usize,
    /// Sequences that could run at once.
    concurrent: usize,
    turns: usize,
    /// Turns from one whole recount to the next: it costs as much as the tree is large.
    recount: usize,
}

impl Size {
    fn from_environment() -> Self {
        match std::env::var("RADIXSTATE_LOAD").as_deref() {
            Err(_) => Self {
                leaves: 1_000,
                concurrent: 400,
                turns: 100,
                recount: 5,
            },
            Ok("full") => Self {
                leaves: 100_000,
                concurrent: 4_096,
                turns: 1_000,
                recount: 25,
            },
            Ok(other) => panic!("RADIXSTATE_LOAD is {other:?}, it can be \"full\""),
        }
    }
}

fn config(kv: usize, active: usize, checkpoints: usize) -> Config {
    let pool = |capacity: usize| {
        PoolConfig::internal(u32::try_from(capacity).expect("a pool has 32-bit ids"))
    };
    Config {
        page_size: PAGE as u32,
        checkpoint_stride: LEGAL as u32,
        kv: pool(kv),
        active: pool(active),
        checkpoints: pool(checkpoints),
    }
}

/// A scheduler, who asks it, and how much.
struct Load {
    scheduler: Scheduler<Sequences>,
    prompts: Prompts,
    arrivals: Random,
    size: Size,
}

impl Load {
    fn new(config: Config, size: Size, seed: u64, policy: &str) -> Self {
        let policy = by_name(policy).expect("a policy of the crate");
        let engine = Sequences::with_policy(config, policy);
        Self {
            scheduler: Scheduler::new(engine, HABITS, seed),
            prompts: Prompts::new(size.leaves),
            arrivals: Random::new(seed),
            size,
        }
    }

    fn cache(&mut self) -> &mut Cache {
        self.scheduler.engine.cache()
    }

    /// Caches every user's history: one leaf each.
    fn plant(&mut self) {
        for user in 0..self.prompts.users {
            let namespace = self.prompts.namespace(user).clone();
            let tokens = self.prompts.history(user);
            plant(self.cache(), &namespace, &tokens);
        }
        let (users, pages) = (self.prompts.users, self.prompts.cached_pages());
        let kv = self.cache().usage(PoolKind::Kv);
        assert_eq!((kv.evictable, kv.free), (pages, kv.capacity - pages));
        let checkpoints = self.cache().usage(PoolKind::Checkpoint);
        assert_eq!(checkpoints.evictable, users, "one checkpoint for each leaf");
    }

    /// Turns, each with its books balanced, and the time that the turns alone took.
    fn run(&mut self, turns: usize) -> Duration {
        let mut spent = Duration::ZERO;
        for turn in 0..turns {
            let begun = Instant::now();
            self.arrive();
            self.scheduler.turn();
            spent += begun.elapsed();
            self.scheduler.balance();
            if turn % self.size.recount == 0 {
                self.scheduler.engine.recount();
            }
        }
        spent
    }

    fn arrive(&mut self) {
        while self.scheduler.waiting() < 1 + self.size.concurrent / 8 {
            let (user, tokens) = self.prompts.draw(&mut self.arrivals);
            let target = tokens.len() + 1 + self.arrivals.below(LEGAL);
            self.scheduler
                .submit(self.prompts.namespace(user).clone(), tokens, target);
        }
    }

    /// Ends everything, demands every slot, and prints one line of figures.
    fn conclude(mut self, name: &str, spent: Duration) -> (Seen, Stats) {
        let operations = self.scheduler.operations;
        self.scheduler.shut_down();
        let stats = self.cache().stats();
        self.cache().evict(PoolKind::Checkpoint, usize::MAX);
        self.scheduler.engine.recount();
        for pool in [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint] {
            let usage = self.cache().usage(pool);
            assert_eq!(usage.free, usage.capacity, "{pool}: all slots are back");
        }
        let rate = operations as f64 / spent.as_secs_f64();
        let Size {
            concurrent, turns, ..
        } = self.size;
        println!(
            "load, {name}: {turns} turns of {concurrent} sequences, {operations} operations, \
             {rate:.0} per second, peak memory {}, digest {:016x}, {:?}, {stats:?}",
            process::peak_memory(),
            self.scheduler.engine.cache().digest(),
            self.scheduler.seen
        );
        (self.scheduler.seen, stats)
    }
}

/// A request that computes `tokens`, stores the state behind them and ends.
fn plant(cache: &mut Cache, namespace: &Namespace, tokens: &[u32]) {
    let started = cache.start(namespace, tokens, StartOptions::default());
    let sequence = started.expect("it is empty").sequence;
    cache.loaded(&sequence).expect("it was started just now");
    let slot = cache.view(&sequence).expect("it is ours").slot();
    let reserved = cache.reserve_checkpoint(&sequence, tokens.len(), slot);
    let Ok(Reservation::Pending(pending)) = reserved else {
        panic!("{reserved:?}")
    };
    let stored = cache.commit(&sequence, pending);
    assert!(matches!(stored, Ok(Commit::Stored(_))), "{stored:?}");
    cache.finish(sequence).expect("it is ours");
}

/// A tree of many leaves, from which requests start and which makes way for them.
#[test]
fn many_sequences_over_a_large_tree_leak_nothing() {
    serve_a_large_tree("lru");
}

/// Every recount compares what a policy holds with the tree.
#[test]
fn a_policy_that_learns_holds_what_can_be_evicted_under_load() {
    serve_a_large_tree("hit-density");
}

fn serve_a_large_tree(policy: &str) {
    let size = Size::from_environment();
    let tree = Prompts::new(size.leaves).cached_pages();
    let states = size.leaves + size.concurrent / 8;
    let config = config(tree + size.concurrent, size.concurrent, states);
    let mut load = Load::new(config, size, SEED, policy);
    load.plant();
    let spent = load.run(size.turns);
    let planted = size.leaves as u64;
    let (seen, stats) = load.conclude(&format!("large tree, {policy}"), spent);
    let least = size.concurrent as u64;
    assert!(
        stats.hits > least && seen.finished > least && stats.stored - planted > least,
        "{seen:?} {stats:?}"
    );
    let (pages, states) = evicted(&stats);
    assert!(
        pages > least && states > least,
        "the tree made way: {stats:?}"
    );
}

/// Pools far smaller than what runs would like to have.
#[test]
fn many_sequences_in_small_pools_run_short_everywhere_and_leak_nothing() {
    let size = Size::from_environment();
    // Slots run out when the cache is young, pages when requests have grown.
    let (pages, slots) = (size.concurrent * 13 / 2, size.concurrent * 5 / 8);
    let config = config(pages, slots, size.concurrent / 8);
    let mut load = Load::new(config, size, SEED + 1, "lru");
    let mut spent = load.run(size.turns / 2);
    load.cache().reset();
    spent += load.run(size.turns / 2);
    let (seen, stats) = load.conclude("small pools", spent);
    let met = [
        seen.no_active_to_start,
        seen.no_active_to_track,
        seen.no_pages_to_start,
        seen.no_pages_to_grow,
        stats.skipped.no_room,
        stats.hits,
        seen.finished,
        seen.aborted,
        seen.retracted,
        seen.refused,
        stats.skipped.reset,
    ];
    assert!(
        met.iter().all(|&count| count > 0),
        "all of it happened: {met:?}"
    );
}

/// Pages and states that made way for others.
fn evicted(stats: &Stats) -> (u64, u64) {
    let (pages, slots) = (stats.evictions.for_kv, stats.evictions.for_checkpoint);
    (
        (pages.kv + slots.kv) as u64,
        (pages.checkpoints + slots.checkpoints) as u64,
    )
}
