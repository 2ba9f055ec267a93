//! An engine that owns its KV and active allocators drives the cache through the lower layer. Its
//! device knows what every row holds: on every read it demands the content that belongs to the
//! prefix.

use radixstate::{Config, EnginePages, LogicalPages, Namespace, PoolConfig, Stats};
use radixstate_replay::{Engine, Habits, Leases, Random, Scheduler, Seen, Sharing};

const HABITS: Habits = Habits {
    chunk: (1, 6),
    draft: 1,
    most_out: 3,
    rush: 1,
    whole: 1,
    track: 2,
    abort: 40,
    drop_pending: 20,
};

fn config(random: &mut Random) -> Config {
    let page_size = 1 + random.below(3) as u32;
    let checkpoint_stride = 1 + random.below(4) as u32;
    Config {
        page_size,
        checkpoint_stride,
        // At least a whole request of 40 tokens, at most three.
        kv: PoolConfig::internal(40_u32.div_ceil(page_size) * (1 + random.below(3) as u32)),
        active: PoolConfig::internal(2 + random.below(5) as u32),
        checkpoints: PoolConfig::internal(1 + random.below(8) as u32),
    }
}

/// Serves random requests; returns what the engine and the cache counted.
fn serve<O: Sharing>(seed: u64) -> (Seen, Stats) {
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let engine = Leases::<O>::new(config(&mut random));
    let mut scheduler = Scheduler::new(engine, HABITS, seed + 1);
    for _ in 0..150 {
        if random.one_in(3) {
            let tokens: Vec<u32> = (0..1 + random.below(24)).map(|_| random.token()).collect();
            let target = tokens.len() + random.below(40 - tokens.len());
            scheduler.submit(Namespace::default(), tokens, target);
        }
        scheduler.turn();
        scheduler.balance();
        if random.one_in(60) {
            scheduler.engine.cache().reset();
            scheduler.balance();
        }
    }
    scheduler.shut_down();
    scheduler.engine.demand_all();
    (scheduler.seen, scheduler.engine.cache().stats())
}

#[test]
fn every_read_finds_what_belongs_to_its_prefix_and_nothing_leaks() {
    serve_many::<EnginePages>();
}

#[test]
fn every_read_finds_its_content_where_pages_have_numbers() {
    serve_many::<LogicalPages>();
}

fn serve_many<O: Sharing>() {
    let mut total = [0; 11];
    for seed in 0..400 {
        let (seen, stats) = serve::<O>(seed);
        let counts = [
            seen.finished,
            seen.aborted,
            seen.retracted,
            seen.stale,
            seen.tracked,
            seen.duplicates,
            stats.hits,
            stats.stored,
            stats.resets,
            stats.skipped.non_finite,
            stats.skipped.reset,
        ];
        total
            .iter_mut()
            .zip(counts)
            .for_each(|(total, count)| *total += count);
    }
    println!("{total:?}");
    assert!(
        total.iter().all(|&count| count > 100),
        "all of it happened: {total:?}"
    );
}
