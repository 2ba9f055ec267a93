//! The calls whose cost across the Python boundary `benchmarks/speed/layers.py` measures, without
//! that boundary.
//!
//! ```text
//! cargo bench -p radixstate --bench calls
//! ```

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use radixstate::{
    Begin, Cache, Commit, Config, Namespace, PoolConfig, PoolKind, Reservation, StartOptions,
    Started,
};

const LONG: u32 = 1000;
const LEAF: u32 = 16;

/// A cache with pages of one token, and its only namespace.
struct Bench {
    cache: Cache,
    namespace: Namespace,
}

impl Bench {
    /// Thirty-two documents of 16 tokens and one of 1000.
    fn new() -> Self {
        let config = Config {
            page_size: 1,
            checkpoint_stride: 1,
            kv: PoolConfig::internal(4 * LONG),
            active: PoolConfig::internal(8),
            checkpoints: PoolConfig::internal(64),
        };
        let cache = Cache::new(config).expect("the sizes are sound");
        let mut bench = Self {
            cache,
            namespace: Namespace::default(),
        };
        for i in 0..32 {
            bench.store(&key(i, LEAF));
        }
        bench.store(&key(100, LONG));
        bench
    }

    fn start(&mut self, tokens: &[u32]) -> Started {
        self.cache
            .start(&self.namespace, tokens, StartOptions::default())
            .expect("there is room")
    }

    /// A request that computes `tokens` and stores the state behind them.
    fn store(&mut self, tokens: &[u32]) {
        let Started {
            sequence, begin, ..
        } = self.start(tokens);
        self.cache.loaded(&sequence).expect("it is the first time");
        let slot = match begin {
            Begin::Clear { dst } | Begin::Load { dst, .. } => dst,
        };
        let reserved = self
            .cache
            .reserve_checkpoint(&sequence, tokens.len(), slot)
            .expect("the depth is legal");
        let Reservation::Pending(pending) = reserved else {
            panic!("{reserved:?}")
        };
        let stored = self
            .cache
            .commit(&sequence, pending)
            .expect("it is this sequence's");
        assert!(matches!(stored, Commit::Stored(_)));
        self.cache.finish(sequence).expect("it runs");
    }
}

fn key(i: u32, n: u32) -> Vec<u32> {
    (i * 10_000..i * 10_000 + n).collect()
}

/// The key with one token behind it: the last of a prompt is always computed.
fn ask(key: &[u32]) -> Vec<u32> {
    [key, &[7]].concat()
}

fn calls(criterion: &mut Criterion) {
    let mut bench = Bench::new();
    let (short, long) = (ask(&key(3, LEAF)), ask(&key(100, LONG)));
    let fresh = key(200, LONG);
    let mut group = criterion.benchmark_group("calls");
    group.bench_function("legal depth", |b| {
        b.iter(|| bench.cache.legal_depth(black_box(LONG as usize)))
    });
    group.bench_function("usage", |b| {
        b.iter(|| bench.cache.usage(black_box(PoolKind::Kv)))
    });
    for (name, tokens) in [
        ("lookup, 1 token", &[7][..]),
        ("lookup, 16 tokens", &short),
        ("lookup, 1000 tokens", &long),
    ] {
        group.bench_function(name, |b| {
            b.iter(|| {
                bench
                    .cache
                    .lookup(&bench.namespace, black_box(tokens), None)
            })
        });
    }
    let matched = bench
        .cache
        .lookup(&bench.namespace, &long, None)
        .expect("the prompt is not empty");
    group.bench_function("lease + release", |b| {
        b.iter(|| {
            let lease = bench
                .cache
                .lease(black_box(&matched))
                .expect("nothing was evicted");
            bench.cache.release(lease)
        });
    });
    let lease = bench.cache.lease(&matched).expect("nothing was evicted");
    group.bench_function("pages of a lease, 1000 tokens", |b| {
        b.iter(|| bench.cache.lease_pages(black_box(&lease), 0))
    });
    group.bench_function("start + finish, 1000 tokens", |b| {
        b.iter(|| {
            let Started { sequence, .. } = bench.start(black_box(&long));
            bench.cache.finish(sequence)
        });
    });
    bench.cache.evict(PoolKind::Checkpoint, 32); // so that what is stored is what is evicted
    group.bench_function("store and evict 1000 tokens", |b| {
        b.iter(|| {
            bench.store(black_box(&fresh));
            bench.cache.evict(PoolKind::Checkpoint, 1)
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    targets = calls
}
criterion_main!(benches);
