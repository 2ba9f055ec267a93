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
#[path = "../engine/random.rs"]
mod random;
mod scheduler;

use std::time::{Duration, Instant};

use prompts::Prompts;
use radixstate::{Config, PoolConfig};
use scheduler::Scheduler;

const SEED: u64 = 28_185;

#[derive(Clone, Copy)]
struct Size {
    leaves: usize,
    /// Sequences that run at once when there is room.
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
        page_size: prompts::PAGE as u32,
        checkpoint_stride: prompts::LEGAL as u32,
        kv: pool(kv),
        active: pool(active),
        checkpoints: pool(checkpoints),
    }
}

/// Turns, each with its books balanced, and the time that the turns alone took.
fn run(scheduler: &mut Scheduler, size: Size) -> Duration {
    let mut spent = Duration::ZERO;
    for turn in 0..size.turns {
        let begun = Instant::now();
        scheduler.turn();
        spent += begun.elapsed();
        scheduler.balance();
        if turn % size.recount == 0 {
            scheduler.recount();
        }
    }
    spent
}

/// Ends everything, then prints one line of figures.
fn conclude(name: &str, size: Size, mut scheduler: Scheduler, spent: Duration) -> scheduler::Seen {
    let operations = scheduler.operations;
    scheduler.shut_down();
    let rate = operations as f64 / spent.as_secs_f64();
    let Size {
        concurrent, turns, ..
    } = size;
    println!(
        "load, {name}: {turns} turns of {concurrent} sequences, {operations} operations, {rate:.0} per second, \
         peak memory {}, digest {:016x}, {:?}",
        process::peak_memory(),
        scheduler.cache.digest(),
        scheduler.seen
    );
    scheduler.seen
}

/// A tree of many leaves, from which requests start and which makes way for them.
#[test]
fn many_sequences_over_a_large_tree_leak_nothing() {
    let size = Size::from_environment();
    let prompts = Prompts::new(size.leaves);
    let tree = prompts.cached_pages();
    let config = config(
        tree + size.concurrent,
        size.concurrent,
        size.leaves + size.concurrent / 8,
    );
    let mut scheduler = Scheduler::new(config, prompts, size.concurrent, SEED);
    scheduler.plant();
    let spent = run(&mut scheduler, size);
    let seen = conclude("large tree", size, scheduler, spent);
    let least = size.concurrent as u64;
    assert!(
        seen.hits > least && seen.finished > least && seen.stored > least,
        "{seen:?}"
    );
    assert!(
        seen.pages_evicted > least && seen.states_evicted > least,
        "the tree made way: {seen:?}"
    );
}

/// Pools far smaller than what runs would like to have.
#[test]
fn many_sequences_in_small_pools_run_short_everywhere_and_leak_nothing() {
    let size = Size::from_environment();
    let config = config(size.concurrent * 10, size.concurrent, size.concurrent / 8);
    let mut scheduler =
        Scheduler::new(config, Prompts::new(size.leaves), size.concurrent, SEED + 1);
    let half = Size {
        turns: size.turns / 2,
        ..size
    };
    let mut spent = run(&mut scheduler, half);
    scheduler.cache.reset();
    spent += run(&mut scheduler, half);
    let seen = conclude("small pools", size, scheduler, spent);
    let met = [
        seen.no_active_to_start,
        seen.no_active_to_track,
        seen.no_pages_to_start,
        seen.no_pages_to_grow,
        seen.no_room,
        seen.hits,
        seen.finished,
        seen.aborted,
        seen.retracted,
        seen.refused,
        seen.reset,
    ];
    assert!(
        met.iter().all(|&count| count > 0),
        "all of it happened: {seen:?}"
    );
}
