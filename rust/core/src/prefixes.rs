//! Cached prefixes: the tree with the slots it owns, their pins and what of them can be evicted.
//!
//! Everything that changes a node's pins, children or checkpoint goes through here, so counters and
//! the policy follow in one place. Knows no sequences and no steps.

mod evict;
mod order;

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::audit::faults::{Fault, seeded};
use crate::checkpoint::{Cached, Listed};
use crate::event::{Event, Events};
use crate::namespace::Namespace;
use crate::outline::Outline;
use crate::policy::{Creation, Fingerprint, Mark, Policy};
use crate::pool::{CachedState, KvPage, Pool, Slot, Slots};
use crate::tree::{Grid, Node, NodeId, NodeIdx, Tree};

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

/// One checkpoint: where it was stored, and by which store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckpointId {
    pub(crate) node: NodeId,
    pub(crate) serial: u64,
}

/// What is in the tree and not ready yet: a checkpoint, pages, or both. Pins its node, and the
/// checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write {
    pub(crate) node: NodeId,
    /// Serial of the checkpoint; none where only pages came.
    pub(crate) serial: Option<u64>,
    /// Depth from which on the tree's pages came with it.
    pub(crate) brought: usize,
    /// The step that writes it.
    pub(crate) step: Option<u64>,
    /// The ticket of the proof that it is finite.
    pub(crate) proof: Option<u64>,
}

impl Write {
    pub(crate) fn checkpoint(&self) -> Option<CheckpointId> {
        let node = self.node;
        self.serial.map(|serial| CheckpointId { node, serial })
    }
}

/// Where a state that is to be stored comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) serial: u64,
    /// It is known to be finite, and nothing is in flight that writes it.
    pub(crate) ready: bool,
    /// How often it has been encoded since it was computed.
    pub(crate) encodings: u32,
    /// What the policy learns of it.
    pub(crate) creation: Creation,
}

/// What the policy knows of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    pub(crate) outline: Outline,
    pub(crate) mark: Mark,
}

/// What the tree holds of a key past the end of a lease.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ahead {
    /// A checkpoint at exactly the key's end, ready or not.
    pub(crate) checkpoint: bool,
    /// Pages that another request is still writing.
    pub(crate) unproven: bool,
}

/// The tree with its slots. Children, pins and checkpoints decide what can be evicted; the policy
/// decides what goes first.
pub(crate) struct Prefixes {
    tree: Tree,
    kv: Pool<KvPage>,
    checkpoints: Pool<CachedState>,
    policy: Box<dyn Policy>,
    /// Whether the policy reads anchors.
    anchors: bool,
    /// Whether it reads fingerprints.
    outlines: bool,
    /// Counts stores and hits.
    clock: u64,
    /// Checkpoints that left their node while pinned; freed with their last pin.
    withdrawn: BTreeMap<u64, Cached>,
    /// Kept here because evictions are decided here.
    events: Events,
}

impl Prefixes {
    pub(crate) fn new(
        grid: Grid,
        kv: Pool<KvPage>,
        checkpoints: Pool<CachedState>,
        policy: Box<dyn Policy>,
    ) -> Self {
        Self {
            tree: Tree::new(grid),
            kv,
            checkpoints,
            anchors: policy.wants_anchors(),
            outlines: policy.wants_prefixes(),
            policy,
            clock: 0,
            withdrawn: BTreeMap::new(),
            events: Events::default(),
        }
    }

    pub(crate) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(crate) fn grid(&self) -> Grid {
        self.tree.grid()
    }

    pub(crate) fn kv(&self) -> &Pool<KvPage> {
        &self.kv
    }

    pub(crate) fn kv_mut(&mut self) -> &mut Pool<KvPage> {
        &mut self.kv
    }

    pub(crate) fn checkpoints(&self) -> &Pool<CachedState> {
        &self.checkpoints
    }

    pub(crate) fn checkpoints_mut(&mut self) -> &mut Pool<CachedState> {
        &mut self.checkpoints
    }

    pub(crate) fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    pub(crate) fn withdrawn(&self) -> &BTreeMap<u64, Cached> {
        &self.withdrawn
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    #[inline(always)]
    pub(crate) fn emit(&mut self, event: Event) {
        self.events.emit(event);
    }

    /// Whether nodes own pages; not in a purely linear model.
    pub(crate) fn has_kv(&self) -> bool {
        self.kv.config().capacity > 0
    }

    /// What the policy is to learn of a prompt.
    pub(crate) fn outline(&self, namespace: &Namespace, prompt: &[u32]) -> Outline {
        if self.outlines {
            Outline::of(self.grid(), namespace, prompt)
        } else {
            Outline::default()
        }
    }

    /// Tells the policy that a request begins.
    pub(crate) fn begin(&mut self, outline: &Outline) -> Mark {
        self.policy.begin(outline.reusable())
    }

    /// What the policy is to learn of a checkpoint at the end of `tokens`.
    pub(crate) fn creation(
        &self,
        request: &mut Request,
        namespace: &Namespace,
        tokens: &[u32],
    ) -> Creation {
        let Request { mark, outline } = request;
        let grid = self.grid();
        let prefix = if self.outlines {
            outline.at(grid, namespace, tokens)
        } else {
            Fingerprint::default()
        };
        Creation {
            prefix,
            mark: *mark,
            end: outline.is_end(grid, tokens.len()),
        }
    }

    /// Pins a node. Walks up only while a count goes from 0 to 1.
    pub(crate) fn pin(&mut self, index: NodeIdx) {
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
            next = node.parent;
        }
        self.refresh(index);
    }

    /// Takes a pin off a node; what nothing keeps any more goes with it.
    pub(crate) fn unpin(&mut self, index: NodeIdx) {
        let mut next = Some(index);
        while let Some(at) = next {
            let node = self.tree.node_mut(at);
            node.pins -= 1;
            if node.pins > 0 {
                break;
            }
            self.kv.unpin(node.pages.len());
            next = node.parent;
        }
        self.prune(index);
    }

    /// Pins the checkpoint of a node and not the node, which the caller pins as well.
    pub(crate) fn pin_checkpoint(&mut self, index: NodeIdx) -> CheckpointId {
        let node = self.tree.id(index);
        let checkpoint = self.checkpoint_mut(index);
        checkpoint.pins += 1;
        let first = checkpoint.pins == 1;
        let serial = checkpoint.serial;
        if first {
            self.checkpoints.pin(1);
        }
        self.refresh(index);
        CheckpointId { node, serial }
    }

    /// Ends a pin on a checkpoint, wherever that checkpoint is by now.
    pub(crate) fn unpin_checkpoint(&mut self, pin: CheckpointId) {
        if let Some(checkpoint) = self.withdrawn.get_mut(&pin.serial) {
            checkpoint.pins -= 1;
            if checkpoint.pins == 0 {
                let checkpoint = self.withdrawn.remove(&pin.serial);
                let checkpoint = checkpoint.expect("it was found above");
                self.checkpoints.unpin(1);
                self.checkpoints.release_cached(checkpoint.slot);
            }
            return;
        }
        let index = pin.node.index;
        let checkpoint = self.checkpoint_mut(index);
        assert_eq!(
            checkpoint.serial, pin.serial,
            "a pinned checkpoint is never replaced"
        );
        checkpoint.pins -= 1;
        if checkpoint.pins == 0 {
            self.checkpoints.unpin(1);
        }
        self.refresh(index);
    }

    fn checkpoint_mut(&mut self, index: NodeIdx) -> &mut Cached {
        let checkpoint = self.tree.node_mut(index).checkpoint.as_mut();
        checkpoint.expect("a pinned checkpoint is in its node or withdrawn")
    }

    /// The slot of a pinned checkpoint.
    pub(crate) fn pinned_slot(&self, pin: CheckpointId) -> u32 {
        let in_node = || self.tree.node(pin.node.index).checkpoint.as_ref();
        let checkpoint = self.withdrawn.get(&pin.serial).or_else(in_node);
        checkpoint
            .expect("a pinned checkpoint is in its node or withdrawn")
            .slot
            .id()
    }

    /// A request continues from the checkpoint of a node, which it has pinned.
    pub(crate) fn touch(&mut self, index: NodeIdx) {
        self.clock += 1;
        let used = self.clock;
        self.checkpoint_mut(index).used = used;
        let candidate = self.candidate(index);
        self.policy.hit(&candidate);
    }

    /// Puts a state at the end of a node. Until it is ready it is pinned, with its node.
    pub(crate) fn attach(&mut self, index: NodeIdx, slot: Slot<CachedState>, origin: Origin) {
        self.checkpoints.enter_tree(1);
        self.clock += 1;
        let checkpoint = Cached {
            slot,
            serial: origin.serial,
            encodings: origin.encodings,
            used: self.clock,
            pins: 0,
            ready: origin.ready,
            listed: Listed::No,
        };
        let before = self.tree.node_mut(index).checkpoint.replace(checkpoint);
        assert!(before.is_none(), "a node has at most one checkpoint");
        let candidate = self.candidate(index);
        self.policy.created(&candidate, origin.creation);
        if !origin.ready {
            self.pin_checkpoint(index);
            self.pin(index);
        }
        self.refresh(index);
        self.push_anchors(index);
    }

    /// A checkpoint is written and known to be finite: it can be hit, and other requests may share
    /// the pages that came with it, unless it was withdrawn meanwhile.
    pub(crate) fn written(&mut self, write: Write) {
        let index = write.node.index;
        let at = self.tree.node_mut(index);
        let checkpoint = at.checkpoint.as_mut();
        if let Some(checkpoint) = checkpoint.filter(|it| Some(it.serial) == write.serial) {
            checkpoint.ready = true;
        }
        self.prove(index, write.brought);
        if let Some(checkpoint) = write.checkpoint() {
            self.unpin_checkpoint(checkpoint);
        }
        self.unpin(index);
    }

    /// The pages of a path past `depth` may be shared from now on; splits within them that nothing
    /// needs are undone.
    fn prove(&mut self, index: NodeIdx, depth: usize) {
        let tree = &self.tree;
        let brought = tree.path(index).take_while(|&at| {
            let node = tree.node(at);
            node.end > depth && node.attached
        });
        let brought: Vec<NodeIdx> = brought.collect();
        for &at in &brought {
            self.tree.node_mut(at).proven = true;
        }
        for at in brought {
            // Its child may have taken over its run a moment ago: then it is gone.
            if let Some(parent) = self.tree.node_at(at).and_then(|node| node.parent) {
                self.join(parent);
            }
        }
    }

    /// Withdraws what was to be written.
    pub(crate) fn withdraw(&mut self, write: Write) {
        match write.checkpoint() {
            Some(checkpoint) => self.invalidate(checkpoint, write.brought),
            // Pins keep the node, but another write may have hidden it.
            None if self.tree.node(write.node.index).attached => {
                self.hide(write.node.index, write.brought);
            }
            None => {}
        }
    }

    /// Withdraws a checkpoint that is not finite, if it is still there, with the pages from depth
    /// `brought` on, which came with it.
    pub(crate) fn invalidate(&mut self, checkpoint: CheckpointId, brought: usize) {
        let CheckpointId { node: id, serial } = checkpoint;
        let stored = self.tree.get(id).and_then(|node| node.checkpoint.as_ref());
        if stored.is_some_and(|it| it.serial == serial) {
            self.emit(Event::Invalidate { serial });
            self.hide(id.index, brought);
        }
    }

    /// Hides the checkpoint of a node, the pages of its path from depth `brought` on, and all
    /// checkpoints that stand on those pages.
    fn hide(&mut self, index: NodeIdx, brought: usize) {
        let mut suspects = vec![index];
        if brought < self.tree.node(index).end {
            let top = self.tree.climb(index, brought + 1);
            if self.tree.node(top).start() < brought {
                // Pages that came before were joined with these.
                self.split(top, brought);
            }
            suspects = self.tree.detach(top);
        }
        let states = self.evict_all(suspects).0;
        self.emit(Event::Invalid { states });
    }

    /// Evicts the checkpoints of `nodes`, the oldest store first, so that the order does not depend
    /// on where nodes lie. Returns how many there were, and what that freed.
    fn evict_all(&mut self, nodes: impl IntoIterator<Item = NodeIdx>) -> (u64, Freed) {
        let checkpoint = |index| Some((self.tree.node(index).checkpoint.as_ref()?.serial, index));
        let mut found: Vec<_> = nodes.into_iter().filter_map(checkpoint).collect();
        found.sort_unstable();
        let mut freed = Freed::default();
        for &(_, index) in &found {
            freed += self.evict(index);
        }
        (found.len() as u64, freed)
    }

    /// The node of a path at `depth`, which the path from `at` reaches or passes; cuts a run if
    /// needed.
    pub(crate) fn node_at(&mut self, at: NodeIdx, depth: usize) -> NodeIdx {
        let index = self.tree.climb(at, depth);
        if self.tree.node(index).end == depth {
            index
        } else {
            self.split(index, depth)
        }
    }

    /// What the tree holds of a key past `from`, a node on its path. Changes nothing.
    pub(crate) fn ahead(&self, from: Option<NodeIdx>, tokens: &[u32]) -> Ahead {
        let Some(from) = from else {
            return Ahead::default();
        };
        let depth = tokens.len();
        let mut unproven = false;
        let index = if depth <= self.tree.node(from).end {
            self.tree.climb(from, depth)
        } else {
            let reach = self
                .tree
                .walk(from, tokens, |_, node| unproven |= !node.proven);
            unproven |= reach
                .inside
                .is_some_and(|inside| !self.tree.node(inside).proven);
            reach.node
        };
        let node = self.tree.node(index);
        Ahead {
            checkpoint: node.end == depth && node.checkpoint.is_some(),
            unproven,
        }
    }

    /// Walks from `from` along the key, cutting the run in which it leaves the tree, and returns
    /// the node it reaches.
    pub(crate) fn descend(&mut self, from: NodeIdx, tokens: &[u32]) -> NodeIdx {
        let reach = self.tree.walk(from, tokens, |_, _| ());
        match reach.inside {
            Some(inside) => self.split(inside, reach.matched),
            None => reach.node,
        }
    }

    /// The root of a namespace, made if there is none.
    pub(crate) fn ensure_root(&mut self, namespace: &Namespace) -> NodeIdx {
        self.tree.ensure_root(namespace)
    }

    /// Hangs the key's rest below `parent`; its pages move from the sequence to the tree. They are
    /// proven if no writer is in flight.
    pub(crate) fn extend(
        &mut self,
        parent: NodeIdx,
        key: &[u32],
        pages: Slots<KvPage>,
        proven: bool,
    ) -> NodeIdx {
        self.kv.enter_tree(pages.len());
        let leaf = self.tree.add_leaf(parent, key, pages, proven);
        self.refresh(parent);
        leaf
    }

    /// After a node has lost a pin, a child or its checkpoint: removes it and every node above that
    /// is left bare, joins what no longer branches, and lists what may now be evicted. Returns the
    /// pages freed.
    fn prune(&mut self, index: NodeIdx) -> usize {
        let mut freed = 0;
        let mut at = index;
        while self.tree.node(at).is_bare() {
            let Node { parent, pages, .. } = self.tree.remove(at);
            freed += pages.len();
            self.kv.release_cached(pages);
            match parent {
                Some(parent) => at = parent,
                None => return freed,
            }
        }
        self.refresh(at);
        self.join(at);
        freed
    }

    /// Joins a node with the run below it if it neither branches, nor holds a state, nor is leased.
    /// Returns whether it did. A run that is still being written keeps its end, so that a refusal
    /// finds the pages that came with it.
    fn join(&mut self, upper: NodeIdx) -> bool {
        if seeded(Fault::SplitForGood) {
            return false;
        }
        let Some(lower) = self.tree.needless(upper) else {
            return false;
        };
        self.tree.join(upper, lower);
        self.resized(lower);
        true
    }

    /// Cuts the run of `lower` at `depth`, and returns the node of the upper part.
    fn split(&mut self, lower: NodeIdx, depth: usize) -> NodeIdx {
        let upper = self.tree.split(lower, depth);
        self.resized(lower);
        upper
    }

    /// The tree and the withdrawn checkpoints, for tests that damage them.
    #[cfg(test)]
    pub(crate) fn damage(&mut self) -> (&mut Tree, &mut BTreeMap<u64, Cached>) {
        (&mut self.tree, &mut self.withdrawn)
    }
}
