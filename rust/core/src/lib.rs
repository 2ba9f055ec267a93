//! A prefix cache for models with recurrent state.
//!
//! The crate decides; it moves nothing. It sees tokens and slot numbers, never tensors: it says *which* row of which
//! pool, the engine or a codec fills it.
#![forbid(unsafe_code)]

mod cache;
mod check;
mod error;
mod evict;
mod fault;
mod handle;
mod key;
mod lease;
mod ledger;
mod lookup;
mod node;
pub mod pool;
mod prefixes;
#[cfg(test)]
mod seeded;
mod sequence;
mod stats;
mod steps;
mod tree;

pub use cache::{Cache, Config};
pub use check::{Report, Rule, Violation};
pub use error::{Error, Misuse, OutOfSlots, Shortage};
pub use evict::{Lru, Policy};
pub use handle::{Lease, Pending, Sequence};
pub use key::Namespace;
pub use lease::Published;
pub use ledger::{Skip, Stored};
pub use lookup::{Match, Reason};
pub use pool::{PoolConfig, PoolKind, Usage};
pub use prefixes::Freed;
pub use sequence::{Begin, Commit, Request, Reservation, SequenceView, StartOptions, Started};
pub use stats::{Bytes, Evictions, Misses, Refusals, Stats};
