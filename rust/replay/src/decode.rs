//! Operations from bytes: what a fuzzer changes, what the corpus keeps, and what the soak draws by
//! the million.
//!
//! Any bytes mean some operations, and few bytes mean many: a prompt is its length and where it
//! leaves the one that all share.

use arbitrary::{Result, Unstructured};
use radixstate::{Config, PoolConfig, PoolKind, StartOptions};

use crate::op::{Depth, Op, Wrong};
use crate::owner::Who;

/// A longer input only repeats itself; the naive cache is slow.
const MOST_OPERATIONS: usize = 200;

/// A configuration, operations, and whether the cache is emptied by pages.
pub fn decode(bytes: &[u8]) -> Result<(Drawn, Vec<Op>, bool)> {
    let mut bytes = Unstructured::new(bytes);
    let (drawn, by_page) = (config(&mut bytes)?, bytes.arbitrary()?);
    let mut ops = Vec::new();
    while !bytes.is_empty() && ops.len() < MOST_OPERATIONS {
        ops.push(operation(&mut bytes)?);
    }
    Ok((drawn, ops, by_page))
}

/// A geometry, pools small enough to run short, and who owns the pages.
#[derive(Debug, Clone, Copy)]
pub struct Drawn {
    /// As of a cache that owns its pages.
    pub config: Config,
    /// Who owns them.
    pub who: Who,
}

/// Draws a configuration.
pub fn config(bytes: &mut Unstructured<'_>) -> Result<Drawn> {
    let page_size = bytes.int_in_range(1..=4_u32)?;
    let checkpoint_stride = bytes.int_in_range(1..=6_u32)?;
    // More than the pages up to the first legal depth: the cache refuses less.
    let legal = (1..)
        .find(|pages| (pages * page_size).is_multiple_of(checkpoint_stride))
        .expect("an lcm exists");
    let kv = if bytes.ratio(1, 4)? {
        0
    } else {
        legal + 1 + bytes.int_in_range(0..=39)?
    };
    let engine = bytes.arbitrary()?;
    let active = bytes.int_in_range(1..=6)?;
    let who = match (engine, bytes.arbitrary()?) {
        (false, _) => Who::Cache,
        (true, false) => Who::Engine,
        (true, true) => Who::Logical,
    };
    let config = Config {
        page_size,
        checkpoint_stride,
        kv: PoolConfig::internal(kv).bytes(3),
        active: PoolConfig::internal(active).bytes(5),
        checkpoints: PoolConfig::internal(bytes.int_in_range(1..=9)?).bytes(7),
    };
    Ok(Drawn { config, who })
}

/// One operation; whole requests are the most frequent, since little happens without them.
pub fn operation(bytes: &mut Unstructured<'_>) -> Result<Op> {
    match bytes.int_in_range(0..=127_u8)? {
        kind @ 0..84 => request(kind, bytes),
        kind => engine(kind, bytes),
    }
}

fn request(kind: u8, bytes: &mut Unstructured<'_>) -> Result<Op> {
    Ok(match kind {
        0..6 => Op::Start {
            tenant: tenant(bytes)?,
            tokens: tokens(bytes)?,
            options: options(bytes)?,
        },
        6..34 => Op::Serve {
            tenant: tenant(bytes)?,
            tokens: tokens(bytes)?,
            ends: bytes.arbitrary()?,
        },
        34..40 => Op::Loaded(number(bytes)?),
        40..43 => Op::Grow(number(bytes)?, bytes.int_in_range(0..=9)?),
        43..46 => Op::Append(number(bytes)?, tokens(bytes)?),
        46..48 => Op::Shrink(number(bytes)?),
        48 => Op::TakeSlot(number(bytes)?),
        49 => Op::GiveBackSlot {
            sequence: number(bytes)?,
            slot: number(bytes)?,
        },
        50..58 => Op::Reserve {
            sequence: number(bytes)?,
            depth: depth(bytes)?,
            source: number(bytes)?,
        },
        58..68 => Op::Commit {
            pending: number(bytes)?,
            proven: !bytes.ratio(1, 6)?,
        },
        68 => Op::DropPending(number(bytes)?),
        69 => Op::Discard(number(bytes)?),
        70..82 => Op::Finish(number(bytes)?),
        _ => Op::DropSequences {
            first: number(bytes)?,
            count: bytes.int_in_range(1..=3)?,
        },
    })
}

fn engine(kind: u8, bytes: &mut Unstructured<'_>) -> Result<Op> {
    Ok(match kind {
        84..90 => {
            let (tenant, tokens) = (tenant(bytes)?, tokens(bytes)?);
            let max_length = if bytes.ratio(1, 10)? {
                Some(bytes.int_in_range(0..=19)?)
            } else {
                None
            };
            Op::Lookup {
                tenant,
                tokens,
                max_length,
            }
        }
        90..94 => Op::Lease(number(bytes)?),
        94 => Op::LeaseLoaded(number(bytes)?),
        95 => {
            let lease = number(bytes)?;
            if bytes.ratio(1, 2)? {
                Op::ForkLease(lease)
            } else {
                Op::LeaseLoaded(lease)
            }
        }
        96..101 => Op::ReserveLeased {
            lease: number(bytes)?,
            more: tokens(bytes)?,
            depth: depth(bytes)?,
        },
        101..104 => Op::Release(number(bytes)?),
        104 => Op::Extend {
            lease: number(bytes)?,
            more: tokens(bytes)?,
        },
        105 => Op::DropLease(number(bytes)?),
        106..108 => Op::Evict(pool(bytes)?, bytes.int_in_range(0..=3)?),
        108 if bytes.ratio(1, 2)? => Op::Touch {
            tenant: tenant(bytes)?,
            tokens: tokens(bytes)?,
        },
        108 => Op::TakeFreed,
        109 if bytes.ratio(1, 3)? => match bytes.arbitrary()? {
            true => Op::CancelStep(bytes.arbitrary::<u8>()?.into()),
            false => Op::DropStep(number(bytes)?),
        },
        109 => complete(bytes)?,
        110..112 => Op::Wrong(wrong(bytes)?, number(bytes)?),
        112..116 => Op::BeginStep,
        116..126 => {
            let refused = if bytes.ratio(1, 5)? {
                Some(number(bytes)?)
            } else {
                None
            };
            Op::RetireStep {
                step: bytes.arbitrary::<u8>()?.into(),
                refused,
            }
        }
        126 => Op::Refuse(number(bytes)?),
        _ if bytes.ratio(1, 4)? => Op::Reset,
        _ => Op::TakeFreed,
    })
}

fn complete(bytes: &mut Unstructured<'_>) -> Result<Op> {
    Ok(Op::Complete {
        proof: number(bytes)?,
        finite: !bytes.ratio(1, 4)?,
    })
}

/// The tokens 0, 0, 0, ... but for at most two places.
fn tokens(bytes: &mut Unstructured<'_>) -> Result<Vec<u32>> {
    let longest = if bytes.arbitrary()? { 32 } else { 12 };
    let mut tokens = vec![0; bytes.int_in_range(1..=longest)?];
    for _ in 0..2 {
        if let Some(token) = tokens.get_mut(bytes.int_in_range(0..=63_usize)?) {
            *token = 1;
        }
    }
    Ok(tokens)
}

/// Names a live thing, modulo how many there are.
fn number(bytes: &mut Unstructured<'_>) -> Result<usize> {
    bytes.int_in_range(0..=63)
}

/// Two namespaces, one of them busy.
fn tenant(bytes: &mut Unstructured<'_>) -> Result<bool> {
    bytes.ratio(1, 8)
}

fn depth(bytes: &mut Unstructured<'_>) -> Result<Depth> {
    Ok(match bytes.int_in_range(0..=10_u8)? {
        0..6 => Depth::Deepest,
        6..10 => Depth::Legal(bytes.int_in_range(0..=3)?),
        _ => Depth::Any(bytes.int_in_range(0..=11)?),
    })
}

fn options(bytes: &mut Unstructured<'_>) -> Result<StartOptions> {
    let reserve = if bytes.ratio(1, 3)? {
        Some(bytes.int_in_range(0..=29)?)
    } else {
        None
    };
    let max_length = if bytes.ratio(1, 10)? {
        Some(bytes.int_in_range(0..=19)?)
    } else {
        None
    };
    Ok(StartOptions {
        reserve,
        max_length,
        no_read: bytes.ratio(1, 20)?,
        no_store: bytes.ratio(1, 20)?,
        slots: match bytes.int_in_range(0..=15_u8)? {
            0 => 0,
            1 => 2,
            2 => 3,
            _ => 1,
        },
    })
}

fn wrong(bytes: &mut Unstructured<'_>) -> Result<Wrong> {
    Ok(match bytes.int_in_range(0..=7_u8)? {
        0 => Wrong::EmptyPrompt,
        1 => Wrong::OtherCache,
        2..5 => Wrong::OtherPending,
        _ => Wrong::Pages,
    })
}

fn pool(bytes: &mut Unstructured<'_>) -> Result<PoolKind> {
    bytes
        .choose(&[PoolKind::Checkpoint, PoolKind::Kv, PoolKind::Active])
        .copied()
}
