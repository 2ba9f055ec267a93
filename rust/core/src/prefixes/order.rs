//! What the policy is told: which checkpoints can be evicted, and how each stands.

use super::Prefixes;
use crate::audit::faults::{Fault, seeded};
use crate::checkpoint::Listed;
use crate::policy::{Candidate, CandidateId};
use crate::tree::NodeIdx;

impl Prefixes {
    /// Tells the policy that a leaf frees other pages than before.
    pub(super) fn resized(&mut self, index: NodeIdx) {
        let checkpoint = self.tree.node(index).checkpoint.as_ref();
        if checkpoint.is_some_and(|it| it.listed == Listed::Leaf) {
            let candidate = self.candidate(index);
            self.policy.update(&candidate);
        }
    }

    /// Tells the policy whether the checkpoint of a node can be evicted. This is decided only here.
    pub(super) fn refresh(&mut self, index: NodeIdx) {
        let node = self.tree.node(index);
        let Some(checkpoint) = &node.checkpoint else {
            return;
        };
        let wanted = if checkpoint.pins > 0 && !seeded(Fault::IgnoredPin) {
            Listed::No
        } else if node.is_free_leaf() {
            Listed::Leaf
        } else {
            Listed::State
        };
        if checkpoint.listed != wanted {
            self.list(index, wanted);
        }
    }

    pub(super) fn list(&mut self, index: NodeIdx, wanted: Listed) {
        let before = self.checkpoint_mut(index).listed;
        if wanted == Listed::No {
            if before != Listed::No {
                // As it was last told.
                let candidate = self.candidate(index);
                self.checkpoint_mut(index).listed = wanted;
                self.policy.remove(&candidate);
            }
            return;
        }
        self.checkpoint_mut(index).listed = wanted;
        let candidate = self.candidate(index);
        if before == Listed::No {
            self.policy.insert(&candidate);
        } else {
            self.policy.update(&candidate);
        }
    }

    /// The checkpoint of a node as a policy sees it.
    pub(crate) fn candidate(&self, index: NodeIdx) -> Candidate {
        let node = self.tree.node(index);
        let checkpoint = node.checkpoint.as_ref();
        let checkpoint = checkpoint.expect("a candidate is a checkpoint");
        let leaf = checkpoint.listed == Listed::Leaf;
        let pages = if leaf { node.pages.len() as u64 } else { 0 };
        let state_bytes = self.checkpoints.config().unit_bytes;
        Candidate {
            id: CandidateId(index),
            depth: node.end,
            anchor: if self.anchors { self.anchor(index) } else { 0 },
            used: checkpoint.used,
            leaf,
            // Each pool is checked to have less than 2^64 bytes, their sum is not.
            bytes: state_bytes.saturating_add(pages * self.kv.config().unit_bytes),
        }
    }

    /// Depth of the nearest checkpoint above a node, 0 if there is none.
    fn anchor(&self, index: NodeIdx) -> usize {
        let mut above = self.tree.path(index).skip(1);
        let anchor = above.find(|&at| self.tree.node(at).checkpoint.is_some());
        anchor.map_or(0, |at| self.tree.node(at).end)
    }

    /// Tells the policy the new anchors of the nearest checkpoints below a node, after that node
    /// has got or lost its own.
    pub(super) fn push_anchors(&mut self, index: NodeIdx) {
        if !self.anchors {
            return;
        }
        let mut next: Vec<NodeIdx> = self.tree.children(index).collect();
        while let Some(at) = next.pop() {
            match &self.tree.node(at).checkpoint {
                None => next.extend(self.tree.children(at)),
                Some(checkpoint) if checkpoint.listed == Listed::No => {}
                Some(_) => {
                    let candidate = self.candidate(at);
                    self.policy.update(&candidate);
                }
            }
        }
    }
}
