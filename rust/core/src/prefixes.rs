//! Cached prefixes: the tree with the slots it owns, their pins and the order in which they are
//! evicted.
//!
//! Everything that changes a node's pins, children or checkpoint goes through here, so that
//! counters and eviction order follow in one place. Knows no sequences and no steps.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::digest::{Decision, Digest};
use crate::evict::{Lru, Order, Policy};
use crate::fault::{Fault, seeded};
use crate::key::Grid;
use crate::node::{Checkpoint, Listed, Node, NodeId, Parent};
use crate::pool::{Checkpoint as CheckpointTag, Kv, Pool, PoolConfig, Slot, Slots};
use crate::tree::Tree;

/// What an eviction really freed, in all pools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Freed {
    /// KV pages.
    pub kv: usize,
    /// Checkpoint slots.
    pub checkpoints: usize,
}

impl AddAssign for Freed {
    fn add_assign(&mut self, other: Self) {
        self.kv += other.kv;
        self.checkpoints += other.checkpoints;
    }
}

/// A pin on one checkpoint: which store, and where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckpointPin {
    pub(crate) node: NodeId,
    pub(crate) serial: u64,
}

/// Where a stored state comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) serial: u64,
    /// No step is writing it.
    pub(crate) ready: bool,
    /// How often it has been encoded since it was computed.
    pub(crate) generation: u32,
}

pub(crate) struct Prefixes {
    pub(crate) grid: Grid,
    pub(crate) tree: Tree,
    pub(crate) kv: Pool<Kv>,
    pub(crate) checkpoints: Pool<CheckpointTag>,
    pub(crate) order: Order,
    /// Checkpoints that left their node while pinned; freed with their last pin.
    pub(crate) withdrawn: BTreeMap<u64, Checkpoint>,
    /// Of the whole cache: it lives where victims are chosen, which nothing above this sees.
    pub(crate) digest: Digest,
    policy: Box<dyn Policy>,
}

impl Prefixes {
    pub(crate) fn new(grid: Grid, kv: PoolConfig, checkpoints: PoolConfig) -> Self {
        Self {
            grid,
            tree: Tree::new(grid),
            kv: Pool::new(kv),
            checkpoints: Pool::new(checkpoints),
            order: Order::default(),
            withdrawn: BTreeMap::new(),
            digest: Digest::default(),
            policy: Box::new(Lru::default()),
        }
    }

    pub(crate) fn set_policy(&mut self, policy: Box<dyn Policy>) {
        self.policy = policy;
    }

    /// Pins a node. Walks up only while a count goes from 0 to 1.
    pub(crate) fn pin(&mut self, index: u32) {
        let mut next = Some(index);
        while let Some(at) = next {
            let node = self.tree.node_mut(at);
            node.pins += 1;
            if node.pins > 1 {
                break;
            }
            if !seeded(Fault::WrongCounter) {
                self.kv.pin(node.pages.len());
            }
            next = self.tree.parent(at);
        }
        self.order.refresh(index, self.tree.node_mut(index));
    }

    /// Takes a pin off a node; what nothing keeps any more goes with it.
    pub(crate) fn unpin(&mut self, index: u32) {
        let mut next = Some(index);
        while let Some(at) = next {
            let node = self.tree.node_mut(at);
            node.pins -= 1;
            if node.pins > 0 {
                break;
            }
            self.kv.unpin(node.pages.len());
            next = self.tree.parent(at);
        }
        self.settle_node(index);
    }

    /// Pins the checkpoint of a node, and nothing else: the caller holds the node as well.
    pub(crate) fn pin_checkpoint(&mut self, index: u32) -> CheckpointPin {
        let id = self.tree.id(index);
        let node = self.tree.node_mut(index);
        let checkpoint = node
            .checkpoint
            .as_mut()
            .expect("a hit is a node with a checkpoint");
        let pin = CheckpointPin {
            node: id,
            serial: checkpoint.serial,
        };
        checkpoint.pins += 1;
        if checkpoint.pins == 1 {
            self.checkpoints.pin(1);
        }
        self.order.refresh(index, node);
        pin
    }

    /// Ends a pin on a checkpoint, wherever that checkpoint is by now.
    pub(crate) fn unpin_checkpoint(&mut self, pin: CheckpointPin) {
        if let Some(checkpoint) = self.withdrawn.get_mut(&pin.serial) {
            checkpoint.pins -= 1;
            if checkpoint.pins == 0 {
                let checkpoint = self
                    .withdrawn
                    .remove(&pin.serial)
                    .expect("it was found above");
                self.checkpoints.unpin(1);
                self.checkpoints.release_cached(checkpoint.slot);
            }
            return;
        }
        let index = pin.node.index;
        let node = self.tree.node_mut(index);
        let checkpoint = node
            .checkpoint
            .as_mut()
            .expect("a pinned checkpoint is in its node or withdrawn");
        assert_eq!(
            checkpoint.serial, pin.serial,
            "a pinned checkpoint is never replaced"
        );
        checkpoint.pins -= 1;
        if checkpoint.pins == 0 {
            self.checkpoints.unpin(1);
        }
        self.order.refresh(index, node);
    }

    /// The slot of a pinned checkpoint.
    pub(crate) fn pinned_slot(&self, pin: CheckpointPin) -> u32 {
        let in_node = || self.tree.node(pin.node.index).checkpoint.as_ref();
        let checkpoint = self.withdrawn.get(&pin.serial).or_else(in_node);
        checkpoint
            .expect("a pinned checkpoint is in its node or withdrawn")
            .slot
            .id()
    }

    /// Gives the checkpoint that a hit consumed a new rank.
    pub(crate) fn touch(&mut self, index: u32) {
        let node = self.tree.node_mut(index);
        let depth = node.end;
        let checkpoint = node
            .checkpoint
            .as_mut()
            .expect("a hit is a node with a checkpoint");
        self.order.delist(index, checkpoint);
        checkpoint.rank = self.policy.consumed(depth, checkpoint.rank);
        self.order.refresh(index, node);
    }

    /// Puts a state at the end of a node. Until it is ready it is pinned, with its node.
    pub(crate) fn attach(&mut self, index: u32, slot: Slot<CheckpointTag>, origin: Origin) {
        let Origin {
            serial,
            ready,
            generation,
        } = origin;
        self.checkpoints.enter_tree(1);
        let depth = self.tree.node(index).end;
        let rank = self.policy.created(depth);
        let checkpoint = Checkpoint {
            slot,
            serial,
            generation,
            rank,
            pins: 0,
            ready,
            listed: Listed::default(),
        };
        let before = self.tree.node_mut(index).checkpoint.replace(checkpoint);
        assert!(before.is_none(), "a node has at most one checkpoint");
        if !ready {
            self.pin_checkpoint(index);
            self.pin(index);
        }
        self.order.refresh(index, self.tree.node_mut(index));
    }

    /// The step that wrote a checkpoint has retired: it can be hit, unless it was withdrawn
    /// meanwhile.
    pub(crate) fn written(&mut self, pin: CheckpointPin) {
        let node = self.tree.node_mut(pin.node.index);
        if let Some(checkpoint) = node
            .checkpoint
            .as_mut()
            .filter(|checkpoint| checkpoint.serial == pin.serial)
        {
            checkpoint.ready = true;
        }
        self.unpin_checkpoint(pin);
        self.unpin(pin.node.index);
    }

    /// Takes a refused checkpoint out of lookups' sight, and all that stands on the pages from
    /// `brought` on, which came with it. Returns how many checkpoints that were. Once its node
    /// is gone, nothing tells which pages above it those were.
    pub(crate) fn refuse(&mut self, id: NodeId, serial: u64, brought: usize) -> u64 {
        let Some(node) = self.tree.get(id) else {
            return 0;
        };
        let suspects = if node.attached && brought < node.end {
            self.tree.detach(self.tree.climb(id.index, brought + 1))
        } else if node
            .checkpoint
            .as_ref()
            .is_some_and(|checkpoint| checkpoint.serial == serial)
        {
            vec![id.index]
        } else {
            return 0;
        };
        self.digest.note(Decision::Refuse, [serial]);
        let mut withdrawn = 0;
        for index in suspects {
            // What nothing keeps may have gone with one before it.
            if self
                .tree
                .node_at(index)
                .is_some_and(|node| node.checkpoint.is_some())
            {
                self.evict(index);
                withdrawn += 1;
            }
        }
        withdrawn
    }

    /// The node of a path at `depth`, which the path from `at` reaches or passes; cuts a run if
    /// needed.
    pub(crate) fn node_at(&mut self, at: u32, depth: usize) -> u32 {
        let index = self.tree.climb(at, depth);
        if self.tree.node(index).end == depth {
            index
        } else {
            self.tree.split(index, depth)
        }
    }

    /// Whether the key has a checkpoint, ready or being written, at exactly its end. Changes
    /// nothing.
    pub(crate) fn has_checkpoint(&self, from: Option<u32>, tokens: &[u32]) -> bool {
        let Some(from) = from else { return false };
        let depth = tokens.len();
        let index = if depth <= self.tree.node(from).end {
            self.tree.climb(from, depth)
        } else {
            self.tree.walk(from, tokens, |_, _| ()).node
        };
        let node = self.tree.node(index);
        node.end == depth && node.checkpoint.is_some()
    }

    /// Walks from `from` along the key, cutting the run in which it leaves the tree, and returns
    /// the node it reaches.
    pub(crate) fn descend(&mut self, from: u32, tokens: &[u32]) -> u32 {
        let reach = self.tree.walk(from, tokens, |_, _| ());
        if reach.matched == self.tree.node(reach.node).end {
            return reach.node;
        }
        let rest = &tokens[self.tree.node(reach.node).end..];
        let (child, _) = self
            .tree
            .step(reach.node, rest)
            .expect("the walk stopped inside this child");
        self.tree.split(child, reach.matched)
    }

    /// Hangs the key's rest below `parent`; its pages move from the sequence to the tree.
    pub(crate) fn extend(&mut self, parent: u32, key: &[u32], pages: Slots<Kv>) -> u32 {
        self.kv.enter_tree(pages.len());
        let leaf = self.tree.add_leaf(parent, key, pages);
        self.order.refresh(parent, self.tree.node_mut(parent));
        leaf
    }

    /// Evicts states until `n` checkpoint slots are free that were not, or none is left to evict.
    pub(crate) fn evict_checkpoints(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.checkpoints < n
            && let Some(index) = self.order.first_state()
        {
            freed += self.evict(index);
        }
        freed
    }

    /// Evicts leaves until `n` pages are free that were not, or none is left to evict. In a purely
    /// linear model, where leaves have no pages, that is at once.
    pub(crate) fn evict_kv(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.kv < n
            && self.kv.usage().evictable > 0
            && let Some(index) = self.order.first_leaf()
        {
            freed += self.evict(index);
        }
        freed
    }

    /// Frees everything unpinned and hides the rest from lookups; pinned checkpoints wait as
    /// withdrawn.
    pub(crate) fn reset(&mut self) -> Freed {
        let with_checkpoint: Vec<u32> = self
            .tree
            .nodes()
            .filter(|(_, node)| node.checkpoint.is_some())
            .map(|(index, _)| index)
            .collect();
        let mut freed = Freed::default();
        for index in with_checkpoint {
            freed += self.evict(index);
        }
        self.tree.detach_all();
        freed
    }

    /// Takes the checkpoint from a node, and the node if nothing else keeps it.
    fn evict(&mut self, index: u32) -> Freed {
        let mut freed = self.drop_checkpoint(index);
        freed.kv += self.settle_node(index);
        freed
    }

    /// Frees a node's state, or lets it wait for its last pin.
    fn drop_checkpoint(&mut self, index: u32) -> Freed {
        let node = self.tree.node_mut(index);
        let mut checkpoint = node
            .checkpoint
            .take()
            .expect("the caller saw a checkpoint here");
        self.digest.note(
            Decision::Withdraw,
            [checkpoint.slot.id().into(), checkpoint.serial],
        );
        self.order.delist(index, &mut checkpoint);
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

    /// After a node has lost a pin, a child or its checkpoint: removes it and every node above that
    /// is left bare, and lists what may now be evicted. Returns the pages freed.
    fn settle_node(&mut self, index: u32) -> usize {
        let mut freed = 0;
        let mut at = index;
        while self.tree.node(at).is_bare() {
            let Node { parent, pages, .. } = self.tree.remove(at);
            freed += pages.len();
            self.kv.release_cached(pages);
            match parent {
                Parent::Node(parent) => at = parent,
                Parent::Root(_) => return freed,
            }
        }
        self.order.refresh(at, self.tree.node_mut(at));
        freed
    }
}
