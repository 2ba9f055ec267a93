//! A checkpoint from reservation to commit: what requests and leases share.

use std::ops::Range;

use crate::cache::Cache;
use crate::error::{Error, Misuse, OutOfSlots};
use crate::event::Event;
use crate::handle::{Kind, Pending};
use crate::ledger::{Holdings, Ledger};
use crate::pool::{CachedState, PageOwner, Slot};
use crate::prefixes::CheckpointId;

/// The recurrent state at the end of a node.
#[derive(Debug)]
pub(crate) struct Cached {
    pub(crate) slot: Slot<CachedState>,
    /// Names this store; never used again.
    pub(crate) serial: u64,
    /// How often the state has been encoded since it was computed.
    pub(crate) encodings: u32,
    /// When it was stored, or last hit.
    pub(crate) used: u64,
    /// Reads in progress, plus one until it is ready.
    pub(crate) pins: u32,
    /// It is written and known to be finite: it can be hit.
    pub(crate) ready: bool,
    pub(crate) listed: Listed,
}

/// What the policy was told of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listed {
    /// Nothing: it is pinned.
    No,
    /// Its state can be evicted.
    State,
    /// Its node can be evicted too, with its KV.
    Leaf,
}

/// Why a checkpoint was not stored. Storing is optional work: none of these is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// There is one at this depth already, ready or being written.
    Duplicate,
    /// No slot is free or evictable.
    NoRoom(OutOfSlots),
    /// Depth 0: the prompt has not reached a legal depth.
    NotAligned,
    /// The sequence was started with `no_store`.
    NoStore,
    /// The state held a value that is not finite.
    NonFinite,
    /// The tree has pages of this prefix that another request is still writing. A checkpoint on
    /// them would stand or fall with that request.
    NotReady,
    /// The cache was reset after this sequence started, or the prefix that it leases turned out
    /// invalid.
    Reset,
}

/// A checkpoint that is now in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Tokens that the state stands for.
    pub depth: usize,
    /// Its slot in the checkpoint pool.
    pub slot: u32,
    /// Names this store; never used again.
    pub serial: u64,
    /// The step that writes it, if one is in flight. Lookups ignore the checkpoint until that step
    /// and all begun before it have retired.
    pub step: Option<u64>,
    /// The ticket to complete when it is known whether the state is finite, if the pending
    /// checkpoint was [`unproven`](Pending::unproven). Lookups ignore the checkpoint until then.
    pub ticket: Option<u64>,
    /// How often this state has been encoded since it was computed: 1 for a prompt computed from
    /// its start, one more than the checkpoint it continued otherwise.
    pub encodings: u32,
    /// Tokens whose private pages were replaced by pages that were cached already; empty if none.
    pub replaced: Range<usize>,
    pub(crate) id: CheckpointId,
    /// Depth from which on the tree's pages came with this store.
    pub(crate) brought: usize,
    pub(crate) cache: u64,
}

/// Result of reserving a checkpoint.
#[derive(Debug)]
pub enum Reservation {
    /// Encode into its slot, then commit.
    Pending(Pending),
    /// Nothing is to be stored.
    Skipped(Skip),
}

/// Result of committing a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Commit {
    /// It is in the tree.
    Stored(Stored),
    /// It is not, and its slot was given back.
    Skipped(Skip),
}

impl From<Result<Stored, Skip>> for Commit {
    fn from(outcome: Result<Stored, Skip>) -> Self {
        match outcome {
            Ok(stored) => Self::Stored(stored),
            Err(skip) => Self::Skipped(skip),
        }
    }
}

/// A call that breaks a rule, with the pending checkpoint that it would have consumed.
#[derive(Debug)]
pub struct Rejected {
    /// The rule.
    pub why: Misuse,
    /// Still reserved.
    pub pending: Pending,
}

impl std::fmt::Display for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.why.fmt(f)
    }
}

impl std::error::Error for Rejected {}

impl From<Rejected> for Misuse {
    fn from(rejected: Rejected) -> Self {
        rejected.why
    }
}

impl From<Rejected> for Error {
    fn from(rejected: Rejected) -> Self {
        rejected.why.into()
    }
}

impl Rejected {
    /// Hands `pending` back if a rule was broken.
    pub(crate) fn unless(allowed: Result<(), Misuse>, pending: Pending) -> Result<Pending, Self> {
        match allowed {
            Ok(()) => Ok(pending),
            Err(why) => Err(Self { why, pending }),
        }
    }
}

/// A checkpoint slot between reservation and commit.
#[derive(Debug)]
pub(crate) struct Reserved {
    /// Serial of the sequence or lease that reserved it.
    pub(crate) owner: u64,
    pub(crate) holdings: Holdings,
}

/// A state on its way into the tree.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub(crate) slot: Slot<CachedState>,
    /// Whether it is known to be finite.
    pub(crate) proven: bool,
}

pub(crate) fn check_depth(ledger: &Ledger, depth: usize) -> Result<(), Misuse> {
    let legal = ledger.prefixes.grid().legal;
    if depth.is_multiple_of(legal) {
        Ok(())
    } else {
        Err(Misuse::Unaligned { depth, legal })
    }
}

impl<O: PageOwner> Cache<O> {
    /// Ends a reservation whose encoded state turned out not to be finite: its slot goes back, and
    /// it is counted.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`], with the pending checkpoint.
    pub fn discard(&mut self, pending: Pending) -> Result<Skip, Rejected> {
        let pending = Rejected::unless(self.own(&pending.handle), pending)?;
        self.collect_dropped();
        self.ledger.emit(Event::End {
            owner: pending.handle.serial,
        });
        let Encoded { slot, .. } = self.encoded(pending);
        self.ledger.give_back_state(slot);
        self.ledger.emit(Event::Skip(Skip::NonFinite));
        Ok(Skip::NonFinite)
    }

    /// Makes a reservation, or passes on why there is none.
    pub(crate) fn pend(
        &mut self,
        owner: u64,
        depth: usize,
        slot: Result<Slot<CachedState>, Skip>,
    ) -> Reservation {
        self.ledger.emit(Event::Reserve {
            owner,
            depth,
            slot: slot.as_ref().ok().map(Slot::id),
        });
        let slot = match slot {
            Ok(slot) => slot,
            Err(skip) => return Reservation::Skipped(skip),
        };
        let id = slot.id();
        let holdings = Holdings {
            state: Some(slot),
            ..Holdings::default()
        };
        let key = self.pending.insert(Reserved { owner, holdings });
        Reservation::Pending(Pending {
            handle: self.handle(Kind::Pending, key),
            slot: id,
            depth,
            proven: true,
        })
    }

    pub(crate) fn check_reserved_by(&self, owner: u64, pending: &Pending) -> Result<(), Misuse> {
        self.own(&pending.handle)?;
        if self.pending[pending.handle.key].owner == owner {
            Ok(())
        } else {
            Err(Misuse::NotYourPending)
        }
    }

    /// Takes the slot out of a pending checkpoint.
    pub(crate) fn encoded(&mut self, pending: Pending) -> Encoded {
        self.ledger.emit(Event::Publish {
            pending: pending.handle.serial,
        });
        let proven = pending.proven;
        let Reserved { holdings, .. } = self.pending.remove(pending.handle.disarm());
        let slot = holdings.state.expect("a pending checkpoint holds its slot");
        Encoded { slot, proven }
    }
}
