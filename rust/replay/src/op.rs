//! Calls as data.

#![expect(
    missing_docs,
    reason = "variants and fields are named after the methods and their arguments"
)]

use radixstate::{PoolKind, StartOptions};

/// One operation; `Serve` and `Wrong` are several. A number that names a live thing is taken modulo
/// how many there are.
#[derive(Debug, Clone)]
pub enum Op {
    Start {
        tenant: bool,
        tokens: Vec<u32>,
        options: StartOptions,
    },
    /// Starts, reports loaded, checkpoints the deepest legal depth, and may end: a short request as
    /// a whole.
    Serve {
        tenant: bool,
        tokens: Vec<u32>,
        ends: bool,
    },
    Loaded(usize),
    Grow(usize, usize),
    Append(usize, Vec<u32>),
    Shrink(usize),
    TakeSlot(usize),
    GiveBackSlot {
        sequence: usize,
        slot: usize,
    },
    Reserve {
        sequence: usize,
        depth: Depth,
        source: usize,
    },
    ReserveLeased {
        lease: usize,
        more: Vec<u32>,
        depth: Depth,
    },
    Extend {
        lease: usize,
        more: Vec<u32>,
    },
    Commit {
        pending: usize,
        proven: bool,
    },
    /// It is known now whether a state is finite.
    Complete {
        proof: usize,
        finite: bool,
    },
    DropPending(usize),
    Discard(usize),
    Finish(usize),
    DropSequences {
        first: usize,
        count: usize,
    },
    Lookup {
        tenant: bool,
        tokens: Vec<u32>,
        max_length: Option<usize>,
    },
    Lease(usize),
    LeaseLoaded(usize),
    ForkLease(usize),
    Touch {
        tenant: bool,
        tokens: Vec<u32>,
    },
    Release(usize),
    DropLease(usize),
    Evict(PoolKind, usize),
    TakeFreed,
    BeginStep,
    RetireStep {
        step: u64,
        refused: Option<usize>,
    },
    CancelStep(u64),
    DropStep(usize),
    Refuse(usize),
    Reset,
    Wrong(Wrong, usize),
}

/// A call that breaks a rule whatever the cache holds.
#[derive(Debug, Clone, Copy)]
pub enum Wrong {
    EmptyPrompt,
    OtherCache,
    OtherPending,
    Pages,
}

/// A depth to checkpoint: the deepest legal one of what is written, or one that may break a rule.
#[derive(Debug, Clone, Copy)]
pub enum Depth {
    Deepest,
    Legal(usize),
    Any(usize),
}

impl Depth {
    pub fn pick(self, legal: usize, written: usize) -> usize {
        match self {
            Self::Deepest => written / legal * legal,
            Self::Legal(n) => n * legal,
            Self::Any(depth) => depth,
        }
    }
}
