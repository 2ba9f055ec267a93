//! Which checkpoint goes first. The cache knows what *can* go; a policy knows what goes *first*.

mod bag;
mod cost;
mod history;
mod hit_density;
mod lru;
mod survival;

pub use cost::Cost;
pub use hit_density::HitDensity;
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

/// Stands for the tokens of a prefix and their namespace: equal for equal ones, on every rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub u64);

/// What a policy wants to know of a request when that request creates a checkpoint. The cache does
/// not read it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mark(pub u32);

/// How a checkpoint came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Creation {
    /// Its prefix; meaningless if the policy does not ask for prefixes.
    pub prefix: Fingerprint,
    /// What [`Policy::begin`] answered to the request that stored it.
    pub mark: Mark,
    /// Whether it is as deep as the prompt could be reused, or deeper. Others are for those who
    /// leave the prompt on the way. Always `true` if the policy does not ask for prefixes.
    pub end: bool,
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

    /// A request begins: the clock of everything that ages. `prompt` has its prefixes at the legal
    /// depths that it could reuse, shallowest first, resident or not; none if the policy does not
    /// ask for prefixes. The answer comes back with each checkpoint that the request creates.
    fn begin(&mut self, prompt: &[Fingerprint]) -> Mark {
        _ = prompt;
        Mark::default()
    }

    /// A checkpoint was stored. `insert` follows when nobody reads or writes it.
    fn created(&mut self, candidate: &Candidate, creation: Creation) {
        _ = (candidate, creation);
    }

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

    /// Whether the policy reads fingerprints. Making them costs a look at each token of a prompt,
    /// and at each token of an answer whose state is stored.
    fn wants_prefixes(&self) -> bool {
        false
    }
}

/// A policy of this crate by its name: `lru` or `hit-density`.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    by_name_for(name, Cost::default())
}

/// A policy of this crate by its name, for a model whose prefill costs `cost`.
pub fn by_name_for(name: &str, cost: Cost) -> Option<Box<dyn Policy>> {
    match name {
        "lru" => Some(Box::new(Lru::default())),
        "hit-density" => Some(Box::new(HitDensity::new(cost))),
        _ => None,
    }
}

/// Names that [`by_name`] knows.
pub const NAMES: [&str; 2] = ["lru", "hit-density"];
