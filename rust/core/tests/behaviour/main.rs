//! Each rule of the cache by example. Pages have 2 tokens; checkpoints stand at multiples of 4.

mod engine_pools;
mod eviction;
mod misuse;
mod policies;
mod requests;
mod steps;
mod tree;

use radixstate::{
    Cache, Commit, Config, EnginePages, LogicalPages, Match, Namespace, PageOwner, Pending,
    PoolConfig, PoolKind, Reservation, Sequence, StartOptions, Started, Stored, Usage,
};

const POOLS: [PoolKind; 3] = [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint];

fn config() -> Config {
    let (kv, active, checkpoints) = (
        PoolConfig::internal(12),
        PoolConfig::internal(3),
        PoolConfig::internal(4),
    );
    Config {
        page_size: 2,
        checkpoint_stride: 4,
        kv,
        active,
        checkpoints,
    }
}

fn cache() -> Cache {
    Cache::new(config()).unwrap()
}

/// The same geometry and sizes, with another owner of the pages.
fn owned_by<O: PageOwner>(kv: PoolConfig<O>) -> Cache<O> {
    let Config {
        page_size,
        checkpoint_stride,
        active,
        checkpoints,
        ..
    } = config();
    let config = Config {
        page_size,
        checkpoint_stride,
        kv,
        active,
        checkpoints,
    };
    Cache::new(config).unwrap()
}

fn engine() -> Cache<EnginePages> {
    owned_by(PoolConfig::engine(12).bytes(100))
}

fn logical() -> Cache<LogicalPages> {
    owned_by(PoolConfig::logical(12).bytes(100))
}

/// `n` tokens of which the first names the family: prompts of one family share what both have.
fn prompt(family: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| family * 100 + i).collect()
}

/// The prompt, then tokens that no other prompt has.
fn fork(prompt: &[u32], other: u32, n: u32) -> Vec<u32> {
    prompt
        .iter()
        .copied()
        .chain((0..n).map(|i| 10_000 + other * 100 + i))
        .collect()
}

fn start_with(cache: &mut Cache, tokens: &[u32], options: StartOptions) -> Started {
    cache.start(&Namespace::default(), tokens, options).unwrap()
}

/// A running request whose state is loaded or cleared.
fn start(cache: &mut Cache, tokens: &[u32]) -> Sequence {
    let Started { sequence, .. } = start_with(cache, tokens, StartOptions::default());
    cache.loaded(&sequence).unwrap();
    sequence
}

fn reserve(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Reservation {
    let source = cache.view(sequence).unwrap().slot();
    cache.reserve_checkpoint(sequence, depth, source).unwrap()
}

fn pending(reservation: Reservation) -> Pending {
    match reservation {
        Reservation::Pending(pending) => pending,
        skipped @ Reservation::Skipped(_) => panic!("{skipped:?}"),
    }
}

fn stored(commit: Commit) -> Stored {
    match commit {
        Commit::Stored(stored) => stored,
        skipped @ Commit::Skipped(_) => panic!("{skipped:?}"),
    }
}

fn checkpoint(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Stored {
    let pending = pending(reserve(cache, sequence, depth));
    stored(cache.commit(sequence, pending).unwrap())
}

/// The same for a state on the way to a deeper one, which a further slot holds.
fn reserve_on_the_way(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Reservation {
    let source = cache.take_slot(sequence).unwrap();
    let reservation = cache.reserve_checkpoint(sequence, depth, source).unwrap();
    cache.give_back_slot(sequence, source).unwrap();
    reservation
}

fn checkpoint_on_the_way(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Stored {
    let pending = pending(reserve_on_the_way(cache, sequence, depth));
    stored(cache.commit(sequence, pending).unwrap())
}

/// Serves a prompt and leaves a checkpoint at its deepest legal depth.
fn store(cache: &mut Cache, tokens: &[u32]) -> Stored {
    let sequence = start(cache, tokens);
    let depth = cache.legal_depth(tokens.len());
    let stored = checkpoint(cache, &sequence, depth);
    cache.finish(sequence).unwrap();
    stored
}

fn look_up<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> Match {
    cache.lookup(&Namespace::default(), tokens, None).unwrap()
}

/// How much of a prompt that goes on after `tokens` is reused.
fn cached<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> usize {
    look_up(cache, &fork(tokens, 99, 1)).length
}

fn usage<O: PageOwner>(cache: &mut Cache<O>) -> [Usage; 3] {
    POOLS.map(|pool| cache.usage(pool))
}

fn pages(cache: &Cache, sequence: &Sequence) -> Vec<u32> {
    cache.view(sequence).unwrap().pages()
}

fn assert_sound<O: PageOwner>(cache: &mut Cache<O>) {
    cache
        .check(None)
        .unwrap_or_else(|report| panic!("{report}"));
}
