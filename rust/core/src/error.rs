//! What can go wrong, in three kinds that never mix.
//!
//! *Shortage* is normal and carries what a scheduler needs to act. *Misuse* is the caller's
//! mistake, names the rule and the numbers, and has changed nothing. A *bug* is ours: it panics
//! with the invariant that was broken.

use std::fmt;

use crate::pool::PoolKind;

/// A pool cannot give what was asked for now; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfSlots {
    /// The pool that is short.
    pub pool: PoolKind,
    /// Units asked for.
    pub wanted: usize,
    /// Units free.
    pub free: usize,
    /// Units that eviction could have freed.
    pub evictable: usize,
    /// Units given back that come free when the steps in flight have retired.
    pub retiring: usize,
}

impl fmt::Display for OutOfSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pool,
            wanted,
            free,
            evictable,
            retiring,
        } = self;
        write!(
            f,
            "{pool} pool: wanted {wanted}, {free} free, {evictable} evictable, {retiring} retiring"
        )
    }
}

/// Why capacity could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// Busy: worth trying again when something has ended.
    Busy(OutOfSlots),
    /// More than the pool's whole capacity: waiting does not help.
    NeverFits {
        /// The pool that is too small.
        pool: PoolKind,
        /// Units needed at once.
        wanted: usize,
        /// All units of the pool.
        capacity: usize,
    },
}

impl Shortage {
    /// Units asked for.
    pub fn wanted(&self) -> usize {
        match self {
            Self::Busy(OutOfSlots { wanted, .. }) | Self::NeverFits { wanted, .. } => *wanted,
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy(short) => short.fmt(f),
            Self::NeverFits {
                pool,
                wanted,
                capacity,
            } => {
                write!(
                    f,
                    "{pool} pool: wanted {wanted}, capacity {capacity}: this can never fit"
                )
            }
        }
    }
}

/// A call that breaks a rule. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Misuse {
    /// A configuration that cannot work.
    Config(String),
    /// A prompt of no tokens.
    EmptyPrompt,
    /// A depth off the grid of legal depths.
    Unaligned {
        /// The depth given, in tokens.
        depth: usize,
        /// Legal depths are multiples of this.
        legal: usize,
    },
    /// A depth the sequence has not reached.
    DepthPastEnd {
        /// The depth given.
        depth: usize,
        /// The deepest depth the sequence holds tokens and pages for.
        end: usize,
    },
    /// A slot that does not belong to the sequence.
    NotYourSlot {
        /// The slot given.
        slot: u32,
    },
    /// The slot of the running state, which goes back with its sequence alone.
    RunningSlot {
        /// The slot given.
        slot: u32,
    },
    /// The sequence's state was not yet reported loaded or cleared, or a lease's not yet loaded.
    NotLoaded,
    /// A depth that the state in a slot has left behind: a state only goes deeper.
    DepthPassed {
        /// The depth given.
        depth: usize,
        /// The slot given.
        slot: u32,
        /// Tokens that its state is of, or more: those reused, or those of an earlier checkpoint.
        reached: usize,
    },
    /// The load or clear was reported before.
    AlreadyLoaded,
    /// More tokens than positions claimed.
    NotClaimed {
        /// Length the append would reach.
        wanted: usize,
        /// Positions claimed.
        claimed: usize,
    },
    /// A list whose length does not follow from the rest.
    LengthMismatch {
        /// What is counted.
        what: &'static str,
        /// Length given.
        given: usize,
        /// Length that the rule demands.
        expected: usize,
    },
    /// A handle of another cache.
    WrongCache,
    /// A pending checkpoint that another sequence or lease reserved.
    NotYourPending,
    /// A match that no longer describes the cache.
    Stale(&'static str),
    /// A step that was never begun.
    UnknownStep {
        /// The step given.
        step: u64,
        /// The newest step begun.
        newest: u64,
    },
    /// A page that is out of range or already owned.
    PageOwnership {
        /// The page id.
        page: u32,
        /// What it is instead.
        why: &'static str,
    },
    /// Tokens that do not continue the leased prefix.
    PrefixMismatch {
        /// Depth of the leased prefix.
        leased: usize,
    },
    /// More pages handed over than the cache has numbers for.
    TooManyPages {
        /// Pages handed over.
        wanted: usize,
        /// Numbers without a page.
        free: usize,
        /// Numbers given up that the engine has not taken.
        outbox: usize,
    },
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(why) => f.write_str(why),
            Self::EmptyPrompt => f.write_str("a prompt has at least one token, got 0"),
            Self::Unaligned { depth, legal } => {
                write!(
                    f,
                    "checkpoint depth {depth} is not a multiple of {legal} = lcm(page size, checkpoint stride)"
                )
            }
            Self::DepthPastEnd { depth, end } => {
                write!(
                    f,
                    "checkpoint depth {depth} is past the {end} tokens this sequence has written"
                )
            }
            Self::NotYourSlot { slot } => {
                write!(f, "active slot {slot} is not one of this request's slots")
            }
            Self::RunningSlot { slot } => {
                write!(
                    f,
                    "active slot {slot} holds the running state: it goes back with its sequence"
                )
            }
            Self::DepthPassed {
                depth,
                slot,
                reached,
            } => {
                write!(
                    f,
                    "checkpoint depth {depth} is behind active slot {slot}, whose state is of {reached} tokens or more"
                )
            }
            Self::NotLoaded => f.write_str(
                "a slot is a source only after its load or clear was reported by loaded()",
            ),
            Self::AlreadyLoaded => f.write_str("loaded() is reported once for each sequence"),
            Self::NotClaimed { wanted, claimed } => {
                write!(
                    f,
                    "append would reach {wanted} tokens, only {claimed} are claimed: grow first"
                )
            }
            Self::LengthMismatch {
                what,
                given,
                expected,
            } => write!(f, "{given} {what} given, {expected} expected"),
            Self::WrongCache => f.write_str("this handle belongs to another cache"),
            Self::NotYourPending => {
                f.write_str("this pending checkpoint was reserved by another sequence or lease")
            }
            Self::Stale(why) => write!(f, "stale match: {why}"),
            Self::UnknownStep { step, newest } => {
                write!(f, "step {step} was never begun, the newest is {newest}")
            }
            Self::PageOwnership { page, why } => write!(f, "kv page {page} {why}"),
            Self::PrefixMismatch { leased } => {
                write!(
                    f,
                    "the tokens do not begin with the {leased} tokens of the leased prefix"
                )
            }
            Self::TooManyPages {
                wanted,
                free,
                outbox,
            } => {
                write!(
                    f,
                    "{wanted} kv pages handed over, {free} numbers are free and {outbox} wait for take_freed()"
                )
            }
        }
    }
}

/// An operation that can be short of room or misused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// See [`Shortage`].
    Shortage(Shortage),
    /// See [`Misuse`].
    Misuse(Misuse),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shortage(short) => short.fmt(f),
            Self::Misuse(misuse) => misuse.fmt(f),
        }
    }
}

impl std::error::Error for OutOfSlots {}
impl std::error::Error for Shortage {}
impl std::error::Error for Misuse {}
impl std::error::Error for Error {}

impl From<OutOfSlots> for Error {
    fn from(short: OutOfSlots) -> Self {
        Self::Shortage(Shortage::Busy(short))
    }
}

impl From<Shortage> for Error {
    fn from(short: Shortage) -> Self {
        Self::Shortage(short)
    }
}

impl From<Misuse> for Error {
    fn from(misuse: Misuse) -> Self {
        Self::Misuse(misuse)
    }
}
