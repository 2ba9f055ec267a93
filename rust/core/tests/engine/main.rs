//! A fake engine that owns its KV and active allocators drives the cache through the lower layer.
//! Its device knows what every row holds: on every read it demands the content that belongs to the
//! prefix.

mod device;
mod random;
mod scheduler;

use radixstate::{Config, PoolConfig, Stats};
use random::Random;
use scheduler::Engine;

fn config(random: &mut Random) -> Config {
    let page_size = 1 + random.below(3) as u32;
    let checkpoint_stride = 1 + random.below(4) as u32;
    Config {
        page_size,
        checkpoint_stride,
        // At least a whole request of 40 tokens, at most three.
        kv: PoolConfig::external(40_u32.div_ceil(page_size) * (1 + random.below(3) as u32)),
        active: PoolConfig::external(2 + random.below(5) as u32),
        checkpoints: PoolConfig::internal(1 + random.below(8) as u32),
    }
}

/// Serves random requests; returns what the engine and the cache counted.
fn serve(seed: u64) -> (scheduler::Seen, Stats) {
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let mut engine = Engine::new(config(&mut random), seed + 1);
    for _ in 0..150 {
        if random.one_in(3) {
            let tokens = (0..1 + random.below(24))
                .map(|_| random.token())
                .collect::<Vec<u32>>();
            let target = tokens.len() + random.below(40 - tokens.len());
            engine.submit(tokens, target);
        }
        engine.turn();
        engine.check();
        if random.one_in(60) {
            engine.flush();
            engine.check();
        }
    }
    engine.shut_down();
    (engine.seen, engine.cache.stats())
}

#[test]
fn every_read_finds_what_belongs_to_its_prefix_and_nothing_leaks() {
    let mut total = [0; 10];
    for seed in 0..400 {
        let (seen, stats) = serve(seed);
        let counts = [
            seen.finished,
            seen.retracted,
            seen.stale,
            seen.tracked,
            seen.duplicates,
            stats.hits,
            stats.stored,
            stats.resets,
            stats.refusals.non_finite,
            stats.refusals.reset,
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
