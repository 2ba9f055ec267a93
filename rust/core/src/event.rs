//! Everything that is decided or counted, said once: the digest and the counters are read off it.

use crate::checkpoint::Skip;
use crate::digest::Digest;
use crate::lookup::Reason;
use crate::pool::PoolKind;
use crate::prefixes::Freed;
use crate::stats::Stats;

/// Why something was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Pages for a sequence.
    Kv,
    /// A slot for a new checkpoint.
    Checkpoint,
    /// A call of `evict`.
    Asked,
    /// A call of `reset`.
    Reset,
}

/// One thing that happened. Owners are named by the serial of their handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Somebody asked what could be reused.
    Lookup,
    /// A sequence began. `prompt` is its digest.
    Start {
        prompt: u64,
        reused: usize,
        claimed: usize,
        slot: u32,
    },
    Lease {
        length: usize,
        serial: u64,
    },
    /// The caller made a checkpoint recent.
    Touch {
        serial: u64,
    },
    /// A sequence or lease used what a lookup found, or found nothing.
    Use {
        reason: Reason,
        length: usize,
        kv_length: usize,
    },
    Loaded {
        owner: u64,
    },
    Grow {
        owner: u64,
        by: usize,
    },
    /// `tokens` is their digest.
    Append {
        owner: u64,
        tokens: u64,
    },
    Shrink {
        owner: u64,
    },
    TakeSlot {
        owner: u64,
        slot: u32,
    },
    GiveBackSlot {
        owner: u64,
        slot: u32,
    },
    Reserve {
        owner: u64,
        depth: usize,
        slot: Option<u32>,
    },
    /// A checkpoint was not stored.
    Skip(Skip),
    /// A pending checkpoint is on its way into the tree.
    Publish {
        pending: u64,
    },
    /// Tokens and pages entered the tree without a state. `replaced` as in a store.
    Extend {
        owner: u64,
        depth: usize,
        replaced: usize,
    },
    /// A checkpoint entered the tree.
    Store {
        slot: u32,
        depth: usize,
        replaced: usize,
    },
    /// A sequence, lease or pending checkpoint ended.
    End {
        owner: u64,
    },
    /// A checkpoint left the tree.
    Withdraw {
        slot: u32,
        serial: u64,
    },
    Evict {
        pool: PoolKind,
        n: usize,
    },
    Freed {
        cause: Cause,
        freed: Freed,
    },
    TakeFreed {
        pages: usize,
    },
    BeginStep,
    RetireStep {
        step: u64,
    },
    /// The state of a proof ticket turned out finite, or not.
    Prove {
        ticket: u64,
        finite: bool,
    },
    Reset,
    /// A call lacked slots and changed nothing.
    Short {
        wanted: usize,
    },
    /// An invalid state was found in the tree.
    Invalidate {
        serial: u64,
    },
    /// This many states were withdrawn because of an invalid one.
    Invalid {
        states: u64,
    },
}

/// The consumers of events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    pub(crate) digest: Digest,
    pub(crate) stats: Stats,
}

impl Events {
    /// Shows the event to every consumer. It goes by value and is inlined, so a counter costs what
    /// `+= 1` does.
    #[inline(always)]
    pub(crate) fn emit(&mut self, event: Event) {
        self.digest.fold(event);
        self.stats.fold(event);
    }
}
