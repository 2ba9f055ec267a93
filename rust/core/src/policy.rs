//! Which checkpoint goes first. The cache knows what *can* go; a policy knows what goes *first*.

mod lru;

pub use lru::Lru;

use crate::tree::NodeIdx;

/// Names a candidate for as long as it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CandidateId(pub(crate) NodeIdx);

impl CandidateId {
    /// A small number, used again after the candidate has gone: an index for a dense table.
    pub fn number(self) -> usize {
        self.0.number() as usize
    }
}

/// A checkpoint that could be evicted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub id: CandidateId,
    /// Tokens that its state stands for.
    pub depth: usize,
    /// Depth of the nearest checkpoint above it, 0 if there is none: a prompt that misses this one
    /// computes `depth - anchor` tokens again. Always 0 if the policy does not ask for anchors.
    pub anchor: usize,
    /// When it was stored, or last hit: a count of both over all checkpoints, so no two are equal.
    pub used: u64,
    /// Whether its KV pages go with it: nothing continues its prefix, and nothing has leased it.
    pub leaf: bool,
    /// Bytes that evicting it frees, by the configured unit sizes: its state, and for a leaf the
    /// pages of its node.
    pub bytes: u64,
}

/// What an eviction is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// A checkpoint slot: any candidate will do.
    State,
    /// KV pages: only leaves free some.
    Leaf,
}

/// Orders the candidates for eviction.
///
/// The cache tells a policy what becomes evictable and what ceases to be, so a pinned checkpoint
/// costs a victim nothing. These hold: `update` and `remove` name a candidate that was inserted and
/// not removed since; `hit` names one that its reader has pinned, so it is not inserted.
///
/// A policy must be a pure function of the calls it receives, so that ranks of a group agree.
pub trait Policy: Send {
    /// A checkpoint can be evicted from now on.
    fn insert(&mut self, candidate: &Candidate);

    /// An inserted candidate has become a leaf or ceased to be one, its anchor has moved, or it
    /// frees other pages than before. Where pages have no size it may be as it was.
    fn update(&mut self, candidate: &Candidate);

    /// An inserted candidate is pinned or gone. `candidate` is as it was last told.
    fn remove(&mut self, candidate: &Candidate);

    /// A request continues from a checkpoint.
    fn hit(&mut self, candidate: &Candidate) {
        _ = candidate;
    }

    /// A request begins: the clock of everything that ages.
    fn begin(&mut self) {}

    /// The next to go; it stays inserted until `remove`. `None` only if no candidate fits.
    fn victim(&mut self, scope: Scope) -> Option<CandidateId>;

    /// Whether a candidate is inserted just as it is described. For `Cache::check`.
    fn holds(&self, candidate: &Candidate) -> bool;

    /// How many candidates are inserted. For `Cache::check`.
    fn count(&self) -> usize;

    /// Whether the policy reads [`Candidate::anchor`]. Keeping anchors costs a look at the nodes
    /// between a stored or evicted checkpoint and the nearest ones below it.
    fn wants_anchors(&self) -> bool {
        false
    }
}

/// A policy of this crate by its name: `lru`.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    match name {
        "lru" => Some(Box::new(Lru::default())),
        _ => None,
    }
}

/// Names that [`by_name`] knows.
pub const NAMES: [&str; 1] = ["lru"];
