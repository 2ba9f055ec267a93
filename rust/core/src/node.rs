//! What the tree is made of.

use crate::key::Namespace;
use crate::pool::{Checkpoint as CheckpointTag, Kv, Slot, Slots};

/// Names a node for as long as it lives: the index is reused, the pair is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// What a node hangs from.
#[derive(Debug, Clone)]
pub(crate) enum Parent {
    /// Boxed: there are few roots, and every node has room for what this holds.
    Root(Box<Namespace>),
    Node(u32),
}

/// A run of whole pages, and perhaps the recurrent state at its end. A root has an empty run.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) parent: Parent,
    /// The tokens of this run.
    pub(crate) key: Box<[u32]>,
    /// Depth of the run's end, in tokens from the prompt's start.
    pub(crate) end: usize,
    /// One page for each `page_size` tokens of the run; none in a purely linear model.
    pub(crate) pages: Slots<Kv>,
    pub(crate) children: u32,
    /// The child that was linked last. Only a guess, which whoever follows it verifies.
    pub(crate) latest: u32,
    /// Under which the table of children has it, kept so that unlinking and growing read no key.
    pub(crate) hash: u64,
    /// Leases on this node, plus children that have pins.
    pub(crate) pins: u32,
    /// A node without one is a tombstone if it has children.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Whether lookups can reach it: a reset or a refusal detaches what is pinned.
    pub(crate) attached: bool,
}

impl Node {
    pub(crate) fn start(&self) -> usize {
        self.end - self.key.len()
    }

    /// Nothing keeps this node.
    pub(crate) fn is_bare(&self) -> bool {
        self.children == 0 && self.pins == 0 && self.checkpoint.is_none()
    }

    /// An unpinned leaf goes as a whole when its checkpoint goes.
    pub(crate) fn is_free_leaf(&self) -> bool {
        self.children == 0 && self.pins == 0
    }
}

/// The recurrent state at the end of a node.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) slot: Slot<CheckpointTag>,
    /// Names this store; never reused.
    pub(crate) serial: u64,
    /// How often the state has been encoded since it was computed.
    pub(crate) generation: u32,
    /// The policy's rank: the lowest is evicted first.
    pub(crate) rank: u64,
    /// Reads in progress, plus one while it is being written.
    pub(crate) pins: u32,
    /// No step that writes it is in flight: it can be hit.
    pub(crate) ready: bool,
    pub(crate) listed: Listed,
}

/// In which eviction orders a checkpoint stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Its state can be evicted.
    pub(crate) state: bool,
    /// Its node can be evicted, with its KV.
    pub(crate) leaf: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A walk touches every node on its path.
    #[test]
    fn a_node_is_two_cache_lines_at_most() {
        assert!(
            size_of::<Option<Node>>() + size_of::<u32>() <= 128,
            "{}",
            size_of::<Option<Node>>()
        );
    }
}
