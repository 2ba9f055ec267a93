//! What the tree is made of.

use std::fmt;
use std::num::NonZeroU32;

use crate::checkpoint::Cached;
use crate::pool::{KvPage, Slots};

/// Place of a node in the tree. Only the tree makes one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeIdx(NonZeroU32);

impl NodeIdx {
    /// The `n`-th place, from 0.
    pub(super) fn new(n: usize) -> Self {
        let place = u32::try_from(n + 1).expect("a tree has fewer than 2^32 - 1 nodes");
        Self(NonZeroU32::new(place).expect("one more than a length is not 0"))
    }

    /// Names a node without asking the tree, for tests that damage one.
    #[cfg(test)]
    pub(crate) fn forged(n: usize) -> Self {
        Self::new(n)
    }

    pub(super) fn place(self) -> usize {
        self.0.get() as usize - 1
    }

    /// The place as a number that a hash or a policy can use.
    pub(crate) fn number(self) -> u32 {
        self.0.get() - 1
    }
}

impl fmt::Display for NodeIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

impl fmt::Debug for NodeIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// Names a node for as long as it lives: its place is used again, the pair is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId {
    pub(crate) index: NodeIdx,
    pub(crate) version: u32,
}

/// A run of whole pages, and perhaps the recurrent state at its end. A root has an empty run.
#[derive(Debug)]
pub(crate) struct Node {
    /// `None` for a root.
    pub(crate) parent: Option<NodeIdx>,
    /// The tokens of this run.
    pub(crate) key: Box<[u32]>,
    /// Depth of the run's end, in tokens from the prompt's start.
    pub(crate) end: usize,
    /// One page for each `page_size` tokens of the run; none in a purely linear model.
    pub(crate) pages: Slots<KvPage>,
    /// How many nodes name this one as their parent.
    pub(crate) children: u32,
    /// The first of them: the one that was linked last.
    pub(super) first_child: Option<NodeIdx>,
    pub(super) next_sibling: Option<NodeIdx>,
    pub(super) previous_sibling: Option<NodeIdx>,
    /// Key in the table of children, kept so that unlinking and growing read no tokens.
    pub(super) hash: u64,
    /// Leases on this node, plus children that have pins.
    pub(crate) pins: u32,
    /// A node that branches and has none is a tombstone.
    pub(crate) checkpoint: Option<Cached>,
    /// Whether lookups can reach it. A reset or an invalid state hides a node that is pinned, and
    /// removes others.
    pub(crate) attached: bool,
    /// Whether the writer of its pages is done. Until then no other request may get them.
    pub(crate) proven: bool,
}

impl Node {
    /// A node without links, pins or state.
    pub(super) fn new(parent: Option<NodeIdx>, key: Box<[u32]>, end: usize) -> Self {
        Self {
            parent,
            key,
            end,
            pages: Slots::default(),
            children: 0,
            first_child: None,
            next_sibling: None,
            previous_sibling: None,
            hash: 0,
            pins: 0,
            checkpoint: None,
            attached: true,
            proven: true,
        }
    }

    pub(crate) fn start(&self) -> usize {
        self.end - self.key.len()
    }

    /// Nothing keeps this node.
    pub(crate) fn is_bare(&self) -> bool {
        self.children == 0 && self.pins == 0 && self.checkpoint.is_none()
    }

    /// True if evicting the checkpoint also removes this node and its pages: no children, no pins.
    pub(crate) fn is_free_leaf(&self) -> bool {
        self.children == 0 && self.pins == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A walk touches every node on its path.
    #[test]
    fn a_node_is_two_cache_lines_at_most() {
        let entry = size_of::<Option<Node>>() + size_of::<u32>();
        assert!(entry <= 128, "{entry} bytes");
    }
}
