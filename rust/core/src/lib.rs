//! A prefix cache for models with recurrent state: Gated DeltaNet, KDA, Mamba2 and their hybrids
//! with attention.
//!
//! Such a layer keeps one state per sequence instead of a KV cache that grows. Reusing a prefix
//! takes its state at exactly that depth and, for the attention layers, its KV pages. This crate
//! keeps both in a radix tree, lends them to running requests, and decides what goes when a pool is
//! short. It decides and moves nothing: it sees tokens and slot numbers, never tensors, and says
//! *which* row of which pool the engine, or a codec, is to fill.
//!
//! ```
//! use radixstate::{
//!     Begin, Cache, Commit, Config, Namespace, PoolConfig, Reservation, StartOptions, Started,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut cache = Cache::new(Config {
//!     page_size: 16,
//!     checkpoint_stride: 64,
//!     kv: PoolConfig::internal(256),
//!     active: PoolConfig::internal(4),
//!     checkpoints: PoolConfig::internal(8),
//! })?;
//! let (model, prompt) = (Namespace::default(), (0..200).collect::<Vec<u32>>());
//!
//! // The first request finds nothing.
//! let Started { sequence, begin, .. } = cache.start(&model, &prompt, StartOptions::default())?;
//! assert_eq!(begin, Begin::Clear { dst: 1 }); // zero row 1 of the active pool, then:
//! cache.loaded(&sequence)?;
//!
//! // Prefill up to the deepest depth at which a checkpoint may stand, and offer the state.
//! let depth = cache.legal_depth(prompt.len());
//! assert_eq!(depth, 192);
//! if let Reservation::Pending(pending) = cache.reserve_checkpoint(&sequence, depth, 1)? {
//!     // Encode row 1 of the active pool into row `pending.slot()` of the checkpoint pool, then:
//!     assert!(matches!(cache.commit(&sequence, pending)?, Commit::Stored(_)));
//! }
//! cache.finish(sequence)?; // or drop it
//!
//! // The second begins where the checkpoint ends and shares its pages.
//! let Started { matched, begin, .. } = cache.start(&model, &prompt, StartOptions::default())?;
//! assert_eq!((matched.length, begin), (192, Begin::Load { src: 1, dst: 1 }));
//! # Ok(())
//! # }
//! ```
//!
//! `examples/embed.rs` is a whole scheduler loop, with chunked prefill and shortages.
//!
//! # Pools
//!
//! | pool | one slot | who owns it while it is in use |
//! |---|---|---|
//! | [`PoolKind::Kv`] | a page of `page_size` tokens; none in a purely linear model | a sequence, or the tree |
//! | [`PoolKind::Active`] | the full-precision state of a running request | a sequence; by type never the tree |
//! | [`PoolKind::Checkpoint`] | an encoded state | the tree, or a pending checkpoint |
//!
//! Ids are `1..=capacity`: row 0 of every tensor is the sink for padding. [`Cache::usage`] says at
//! any moment where the slots are: `capacity = free + held + evictable + pinned + retiring`.
//! [`Cache::check`] proves it from nothing.
//!
//! # Two layers
//!
//! A [`Sequence`] owns all of a request: [`start`](Cache::start), [`loaded`](Cache::loaded),
//! [`grow`](Cache::grow), [`append`](Cache::append),
//! [`reserve_checkpoint`](Cache::reserve_checkpoint), [`commit`](Cache::commit),
//! [`finish`](Cache::finish). It is made from the lower layer, which engines that allocate the KV
//! pages call instead: [`lookup`](Cache::lookup), [`lease`](Cache::lease),
//! [`extend`](Cache::extend), [`publish`](Cache::publish), [`evict`](Cache::evict),
//! [`take_freed`](Cache::take_freed). Who allocates is a type: a [`Cache<OwnPages>`](Cache) has
//! sequences; a [`Cache<EnginePages>`](EnginePages) takes over the pages that the tree lacks when
//! a prefix is published, and lists each once when it gives it up; a
//! [`Cache<LogicalPages>`](LogicalPages) does the same with pages whose ids it never sees.
//!
//! ```compile_fail
//! use radixstate::{Cache, Config, EnginePages, Namespace, StartOptions};
//! fn start(cache: &mut Cache<EnginePages>) {
//!     cache.start(&Namespace::default(), &[1][..], StartOptions::default()); // pages are the engine's
//! }
//! ```
//!
//! Handles may be dropped at any time, on any thread; what they held comes back at the cache's next
//! call.
//!
//! # Steps
//!
//! An engine whose device runs behind brackets each launch with [`begin_step`](Cache::begin_step)
//! and [`retire_step`](Cache::retire_step). Slots and pins that are given back during a step become
//! usable when every step begun before has ended. A checkpoint can be hit once the step that writes
//! it, and every earlier one, has retired. [`begin_step`](Cache::begin_step) gives a [`Step`]:
//! dropping it before it is retired cancels it, and what was stored in it is withdrawn. Without
//! steps everything is usable at once.
//!
//! # What goes wrong
//!
//! A shortage is normal: [`Shortage`] says what a scheduler needs to act, and nothing was evicted
//! for it. Storing a checkpoint is optional work, so want of room is a [`Skip`], not an error.
//! [`Misuse`] names the rule a caller broke. Neither has changed anything. What remains is a bug of
//! this crate, and panics with the invariant.
#![forbid(unsafe_code)]

mod audit;
mod cache;
mod checkpoint;
mod digest;
mod draw;
mod engine;
mod error;
mod event;
mod flight;
mod further;
mod handle;
mod lease;
mod ledger;
mod lookup;
mod namespace;
mod outline;
mod pieces;
pub mod policy;
pub mod pool;
mod prefixes;
mod sequence;
mod spans;
mod stats;
mod tree;

pub use audit::{Report, Rule, Violation};
pub use cache::{Cache, Config, Outcome, Unproven};
pub use checkpoint::{Commit, Rejected, Reservation, Skip, Stored};
pub use engine::{Extended, Published};
pub use error::{Error, Misuse, OutOfSlots, Shortage};
pub use handle::{Lease, Pending, Sequence, Step, StepId};
pub use lookup::{Match, Reason};
pub use namespace::Namespace;
pub use pieces::Piece;
pub use pool::{
    EngineOwned, EnginePages, LogicalPages, OwnPages, PageOwner, PoolConfig, PoolKind, Usage,
};
pub use prefixes::Freed;
pub use sequence::{Begin, SequenceView, StartOptions, StartRequest, Started};
pub use spans::{Span, SpanKeys};
pub use stats::{Bytes, Evictions, Misses, Skips, Stats};

/// The README's Rust block is a test like those above.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The page about policies holds an example that is a test as well.
#[cfg(doctest)]
#[doc = include_str!("../docs/add-a-policy.md")]
struct AddAPolicy;
