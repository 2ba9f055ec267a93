//! Which checkpoint goes first.

use std::collections::BTreeSet;

use crate::fault::{Fault, seeded};
use crate::node::{Checkpoint, Node};

/// Ranks checkpoints: the lowest rank is evicted first. A rank is given when a checkpoint is
/// created and again when a hit consumes it, and at no other time, so a policy sees each event once
/// and costs nothing between them.
///
/// A policy must be a pure function of the calls it receives, so that ranks of a group agree.
pub trait Policy: Send {
    /// Rank of a checkpoint just stored at `depth` tokens.
    fn created(&mut self, depth: usize) -> u64;
    /// New rank of a checkpoint at `depth` that a request just started from.
    fn consumed(&mut self, depth: usize, rank: u64) -> u64;
}

/// Least recently created or consumed first.
#[derive(Debug, Clone, Default)]
pub struct Lru {
    clock: u64,
}

impl Policy for Lru {
    fn created(&mut self, _depth: usize) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn consumed(&mut self, depth: usize, _rank: u64) -> u64 {
        self.created(depth)
    }
}

/// The unpinned checkpoints in order of rank, and those of them whose node is a leaf that nothing
/// pins.
///
/// Pinned entries are not in the order at all, so they cost a victim nothing.
#[derive(Debug, Default)]
pub(crate) struct Order {
    states: BTreeSet<(u64, u32)>,
    leaves: BTreeSet<(u64, u32)>,
}

impl Order {
    /// Enters or removes a node's checkpoint as its pins and children now demand. Membership is
    /// decided only here.
    pub(crate) fn refresh(&mut self, index: u32, node: &mut Node) {
        let free_leaf = node.is_free_leaf();
        if let Some(checkpoint) = &mut node.checkpoint {
            let state = checkpoint.pins == 0 || seeded(Fault::IgnoredPin);
            self.list(index, checkpoint, state, state && free_leaf);
        }
    }

    /// Removes a checkpoint that is about to leave its node or to change rank.
    pub(crate) fn delist(&mut self, index: u32, checkpoint: &mut Checkpoint) {
        self.list(index, checkpoint, false, false);
    }

    /// The next state to evict.
    pub(crate) fn first_state(&self) -> Option<u32> {
        self.states.first().map(|&(_, index)| index)
    }

    /// The next leaf to evict with its KV.
    pub(crate) fn first_leaf(&self) -> Option<u32> {
        self.leaves.first().map(|&(_, index)| index)
    }

    pub(crate) fn states(&self) -> &BTreeSet<(u64, u32)> {
        &self.states
    }

    pub(crate) fn leaves(&self) -> &BTreeSet<(u64, u32)> {
        &self.leaves
    }

    fn list(&mut self, index: u32, checkpoint: &mut Checkpoint, state: bool, leaf: bool) {
        let entry = (checkpoint.rank, index);
        update(&mut self.states, entry, &mut checkpoint.listed.state, state);
        update(&mut self.leaves, entry, &mut checkpoint.listed.leaf, leaf);
    }
}

fn update(set: &mut BTreeSet<(u64, u32)>, entry: (u64, u32), listed: &mut bool, wanted: bool) {
    match (std::mem::replace(listed, wanted), wanted) {
        (false, true) => assert!(set.insert(entry), "a checkpoint is listed once"),
        (true, false) => assert!(
            set.remove(&entry),
            "a listed checkpoint is found by its rank"
        ),
        _ => {}
    }
}
