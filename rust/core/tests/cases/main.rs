//! Faults that other prefix caches of this kind had in the field, as scenarios that must end well
//! here.
//!
//! Each test names the behaviour, and in a comment the public threads that reported the fault.
//! `tests/CASES.md` at the repository's root lists all of them with where each is covered.

mod accounting;
mod allocation;
mod depth;
mod eviction;
mod hostile;
mod keys;
mod leases;
mod ownership;
mod ranks;
mod review;
mod speculation;
mod steps;
mod unproven;
mod unwritten;

use radixstate::{
    Cache, Commit, Config, EnginePages, Error, Lease, Match, Namespace, PageOwner, Pending,
    PoolConfig, PoolKind, Reservation, Sequence, StartOptions, Started, Stored,
};

/// Pages of 2 tokens, checkpoints at multiples of 4; so many slots of each pool.
fn config(kv: u32, active: u32, checkpoints: u32) -> Config {
    let pool = PoolConfig::internal;
    Config {
        page_size: 2,
        checkpoint_stride: 4,
        kv: pool(kv),
        active: pool(active),
        checkpoints: pool(checkpoints),
    }
}

fn cache(kv: u32, active: u32, checkpoints: u32) -> Cache {
    Cache::new(config(kv, active, checkpoints)).unwrap()
}

/// For an engine that allocates pages and slots itself.
fn engine(kv: u32, checkpoints: u32) -> Cache<EnginePages> {
    let config = Config {
        page_size: 2,
        checkpoint_stride: 4,
        kv: PoolConfig::engine(kv),
        active: PoolConfig::internal(0),
        checkpoints: PoolConfig::internal(checkpoints),
    };
    Cache::new(config).unwrap()
}

/// `n` tokens that only prompts of the same family share.
fn prompt(family: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| family * 1_000_000 + i).collect()
}

/// `tokens`, then `n` that no other branch has.
fn fork(tokens: &[u32], branch: u32, n: u32) -> Vec<u32> {
    tokens
        .iter()
        .copied()
        .chain(prompt(1000 + branch, n))
        .collect()
}

fn try_start(cache: &mut Cache, tokens: &[u32], options: StartOptions) -> Result<Started, Error> {
    cache.start(&Namespace::default(), tokens, options)
}

fn start_with(cache: &mut Cache, tokens: &[u32], options: StartOptions) -> Sequence {
    let Started { sequence, .. } = try_start(cache, tokens, options).unwrap();
    cache.loaded(&sequence).unwrap();
    sequence
}

/// A running request whose slot is loaded or cleared.
fn start(cache: &mut Cache, tokens: &[u32]) -> Sequence {
    start_with(cache, tokens, StartOptions::default())
}

/// Claims the first `n` positions, as a chunked prefill does.
fn chunk(n: usize) -> StartOptions {
    StartOptions {
        reserve: Some(n),
        ..StartOptions::default()
    }
}

fn slot(cache: &Cache, sequence: &Sequence) -> u32 {
    cache.view(sequence).unwrap().slot()
}

fn pages(cache: &Cache, sequence: &Sequence) -> Vec<u32> {
    cache.view(sequence).unwrap().pages()
}

fn reserve(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Reservation {
    let source = slot(cache, sequence);
    cache.reserve_checkpoint(sequence, depth, source).unwrap()
}

fn pending(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Pending {
    match reserve(cache, sequence, depth) {
        Reservation::Pending(pending) => pending,
        skipped @ Reservation::Skipped(_) => panic!("{skipped:?}"),
    }
}

fn checkpoint(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Stored {
    let pending = pending(cache, sequence, depth);
    match cache.commit(sequence, pending).unwrap() {
        Commit::Stored(stored) => stored,
        skipped @ Commit::Skipped(_) => panic!("{skipped:?}"),
    }
}

/// Serves a prompt and leaves a checkpoint at each of `depths`.
fn store_at(cache: &mut Cache, tokens: &[u32], depths: &[usize]) {
    let sequence = start(cache, tokens);
    depths
        .iter()
        .for_each(|&depth| assert_eq!(checkpoint(cache, &sequence, depth).depth, depth));
    cache.finish(sequence).unwrap();
}

/// The same at the deepest legal depth.
fn store(cache: &mut Cache, tokens: &[u32]) {
    let depth = cache.legal_depth(tokens.len());
    store_at(cache, tokens, &[depth]);
}

fn look_up<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> Match {
    cache.lookup(&Namespace::default(), tokens, None).unwrap()
}

/// How much of a prompt that goes on after `tokens` is reused.
fn reused(cache: &mut Cache, tokens: &[u32]) -> usize {
    look_up(cache, &fork(tokens, 99, 1)).length
}

fn lease<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> Lease {
    let matched = look_up(cache, tokens);
    cache.lease(&matched).unwrap()
}

/// Free slots of the KV, active and checkpoint pools.
fn free(cache: &mut Cache) -> [usize; 3] {
    [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint].map(|pool| cache.usage(pool).free)
}

fn assert_sound<O: PageOwner>(cache: &mut Cache<O>) {
    cache
        .check(None)
        .unwrap_or_else(|report| panic!("{report}"));
}
