//! Evicting: for checkpoint slots, for pages, and all at once.

use super::{Freed, Prefixes};
use crate::audit::faults::{Fault, seeded};
use crate::checkpoint::Listed;
use crate::event::Event;
use crate::policy::{CandidateId, Scope};
use crate::tree::NodeIdx;

impl Prefixes {
    /// The next to be evicted.
    pub(crate) fn victim(&mut self, scope: Scope) -> Option<CandidateId> {
        self.policy.victim(scope)
    }

    /// Evicts states until `n` more checkpoint slots are free, or none is left to evict.
    pub(crate) fn evict_checkpoints(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.checkpoints < n
            && let Some(CandidateId(index)) = self.policy.victim(Scope::State)
        {
            freed += self.evict(index);
        }
        freed
    }

    /// Evicts leaves until `n` more pages are free, or none is left to evict. A purely linear model
    /// has no pages, so nothing is evicted there.
    pub(crate) fn evict_kv(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.kv < n
            && self.kv.usage().evictable > 0
            && let Some(CandidateId(index)) = self.policy.victim(Scope::Leaf)
        {
            freed += self.evict(index);
        }
        freed
    }

    /// Frees everything unpinned and hides the rest from lookups; pinned checkpoints wait as
    /// withdrawn.
    pub(crate) fn reset(&mut self) -> Freed {
        let nodes: Vec<NodeIdx> = self.tree.nodes().map(|(index, _)| index).collect();
        let (_, freed) = self.evict_all(nodes);
        self.tree.detach_all();
        freed
    }

    /// Takes the checkpoint from a node, and the node if nothing else keeps it.
    pub(super) fn evict(&mut self, index: NodeIdx) -> Freed {
        let mut freed = self.drop_checkpoint(index);
        freed.kv += self.prune(index);
        freed
    }

    /// Frees a node's state, or lets it wait for its last pin.
    fn drop_checkpoint(&mut self, index: NodeIdx) -> Freed {
        self.list(index, Listed::No);
        let checkpoint = self.tree.node_mut(index).checkpoint.take();
        let checkpoint = checkpoint.expect("the caller saw a checkpoint here");
        self.emit(Event::Withdraw {
            slot: checkpoint.slot.id(),
            serial: checkpoint.serial,
        });
        self.push_anchors(index);
        if checkpoint.pins > 0 && !seeded(Fault::EarlyFree) {
            self.withdrawn.insert(checkpoint.serial, checkpoint);
            return Freed::default();
        }
        if checkpoint.pins > 0 {
            self.checkpoints.unpin(1);
        }
        self.checkpoints.release_cached(checkpoint.slot);
        Freed {
            kv: 0,
            checkpoints: 1,
        }
    }
}
