//! The books: pools, cached prefixes, steps in flight and counters. Knows no handles.

use std::ops::Range;

use crate::digest::Decision;
use crate::error::{OutOfSlots, Shortage};
use crate::key::Namespace;
use crate::lookup::{Found, Hit};
use crate::node::NodeId;
use crate::pool::{Active, Checkpoint, Kv, Pool, PoolKind, Slot, Slots};
use crate::prefixes::{CheckpointPin, Origin, Prefixes};
use crate::stats::{Bytes, Stats};
use crate::steps::Steps;

/// What one owner holds and will give back as a whole.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    /// A pin on a node, so on the KV of its whole path.
    pub(crate) node: Option<u32>,
    /// A pin on the checkpoint being loaded.
    pub(crate) checkpoint: Option<CheckpointPin>,
    /// Private pages.
    pub(crate) pages: Slots<Kv>,
    /// Running states.
    pub(crate) active: Slots<Active>,
    /// A checkpoint slot that is being written.
    pub(crate) state: Option<Slot<Checkpoint>>,
}

impl Holdings {
    fn is_empty(&self) -> bool {
        let Self {
            node,
            checkpoint,
            pages,
            active,
            state,
        } = self;
        node.is_none()
            && checkpoint.is_none()
            && pages.is_empty()
            && active.is_empty()
            && state.is_none()
    }
}

/// A leased prefix: where it ends, and in which tree.
#[derive(Debug)]
pub(crate) struct Leased {
    pub(crate) namespace: Namespace,
    pub(crate) epoch: u64,
    /// End of the leased node, 0 for none.
    pub(crate) depth: usize,
    /// How often the state it started from had been encoded.
    pub(crate) generation: u32,
    pub(crate) holdings: Holdings,
}

/// Why a checkpoint was not stored. Storing is optional work: none of these is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// There is one at this depth already, ready or being written.
    Duplicate,
    /// No slot is free or evictable.
    NoRoom(OutOfSlots),
    /// Depth 0: the prompt has not reached a legal depth.
    NotAligned,
    /// The sequence was started with `no_store`.
    NoStore,
    /// The state held a value that is not finite.
    NonFinite,
    /// The cache was reset after this sequence started, or the prefix that it leases was refused.
    Reset,
}

/// A checkpoint that is now in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Tokens that the state stands for.
    pub depth: usize,
    /// Its slot in the checkpoint pool.
    pub slot: u32,
    /// Names this store; never reused.
    pub serial: u64,
    /// The step that writes it; lookups ignore it until that step and all begun before it have
    /// retired. `None`: ready at once.
    pub step: Option<u64>,
    /// How often this state has been encoded since it was computed: 1 for a prompt computed from
    /// its start, one more than the checkpoint it continued otherwise.
    pub generation: u32,
    /// Tokens whose private pages were replaced by pages that were cached already; empty if none.
    pub replaced: Range<usize>,
    pub(crate) node: NodeId,
    /// Depth from which on the tree's pages came with this store.
    pub(crate) brought: usize,
    pub(crate) cache: u64,
}

/// What publishing a prefix did to its pages.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    pub(crate) node: u32,
    /// Depth from which on the tree lacked pages.
    pub(crate) brought: usize,
    /// Given pages that the tree had already.
    pub(crate) duplicates: Slots<Kv>,
    pub(crate) replaced: Range<usize>,
}

pub(crate) struct Ledger {
    pub(crate) prefixes: Prefixes,
    pub(crate) active: Pool<Active>,
    pub(crate) steps: Steps<Holdings>,
    /// Counts resets: a lease of an earlier epoch publishes nothing.
    pub(crate) epoch: u64,
    pub(crate) stats: Stats,
    serial: u64,
}

impl Ledger {
    pub(crate) fn new(prefixes: Prefixes, active: Pool<Active>) -> Self {
        Self {
            prefixes,
            active,
            steps: Steps::new(),
            epoch: 0,
            stats: Stats::default(),
            serial: 0,
        }
    }

    pub(crate) fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Whether nodes own pages; not in a purely linear model.
    pub(crate) fn has_kv(&self) -> bool {
        self.prefixes.kv.config().capacity > 0
    }

    /// Whether the cache hands out pages itself.
    pub(crate) fn allocates_kv(&self) -> bool {
        self.has_kv() && !self.prefixes.kv.config().external
    }

    /// Pages that positions `0..tokens` take from the internal pool.
    pub(crate) fn pages_for(&self, tokens: usize) -> usize {
        if self.allocates_kv() {
            tokens.div_ceil(self.prefixes.grid.page)
        } else {
            0
        }
    }

    /// Pins what a lookup found, in place.
    pub(crate) fn lease(&mut self, namespace: &Namespace, hit: Hit) -> Leased {
        let mut holdings = Holdings::default();
        if let Some(Found { node, .. }) = hit.found {
            self.prefixes.pin(node.index);
            holdings.checkpoint = Some(self.prefixes.pin_checkpoint(node.index));
            holdings.node = Some(node.index);
        }
        let (
            namespace,
            Hit {
                length: depth,
                generation,
                ..
            },
        ) = (namespace.clone(), hit);
        Leased {
            namespace,
            epoch: self.epoch,
            depth,
            generation,
            holdings,
        }
    }

    /// Counts a match that is being used, and refreshes the checkpoint it consumes.
    pub(crate) fn consume(&mut self, hit: Hit) {
        self.stats.count_use(hit.reason, hit.length, hit.kv_length);
        if let Some(found) = hit.found {
            self.prefixes.touch(found.node.index);
        }
    }

    /// An error when `tokens` positions or one running state exceed what the pools could ever give.
    pub(crate) fn feasible(&self, tokens: usize) -> Result<(), Shortage> {
        let (wanted, capacity) = (
            self.pages_for(tokens),
            self.prefixes.kv.config().capacity as usize,
        );
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Kv,
                wanted,
                capacity,
            });
        }
        if !self.active.config().external && self.active.config().capacity == 0 {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Active,
                wanted: 1,
                capacity: 0,
            });
        }
        Ok(())
    }

    /// Takes a running state and `pages` pages, evicting exactly the pages that are missing; or
    /// changes nothing.
    pub(crate) fn claim(&mut self, pages: usize) -> Result<Holdings, OutOfSlots> {
        let external = self.active.config().external;
        if !external && self.active.usage().free == 0 {
            return Err(self.active.short(1));
        }
        let pages = self.claim_pages(pages)?;
        let active = self.active.take_many(usize::from(!external))?;
        Ok(Holdings {
            pages,
            active,
            ..Holdings::default()
        })
    }

    /// Takes pages, evicting exactly what is missing; or changes nothing.
    pub(crate) fn claim_pages(&mut self, wanted: usize) -> Result<Slots<Kv>, OutOfSlots> {
        let missing = self.prefixes.kv.shortfall(wanted)?;
        if missing > 0 {
            self.stats.evictions.for_kv += self.prefixes.evict_kv(missing);
        }
        self.prefixes.kv.take_many(wanted)
    }

    /// A checkpoint slot for the state at the end of `tokens`, or why there is to be none.
    pub(crate) fn reserve(
        &mut self,
        lease: &Leased,
        tokens: &[u32],
    ) -> Result<Slot<Checkpoint>, Skip> {
        if tokens.is_empty() {
            self.stats.refusals.not_aligned += 1;
            return Err(Skip::NotAligned);
        }
        self.check_current(lease)?;
        if self.prefixes.has_checkpoint(self.origin(lease), tokens) {
            self.stats.duplicates += 1;
            return Err(Skip::Duplicate);
        }
        let room = self.prefixes.checkpoints.shortfall(1);
        let missing = room.map_err(|short| {
            self.stats.refusals.no_room += 1;
            Skip::NoRoom(short)
        })?;
        if missing > 0 {
            self.stats.evictions.for_checkpoint += self.prefixes.evict_checkpoints(missing);
        }
        Ok(self
            .prefixes
            .checkpoints
            .take()
            .expect("what eviction frees is usable when it returns"))
    }

    /// Counts and reports a lease that is older than the last reset, or whose prefix was refused.
    pub(crate) fn check_current(&mut self, lease: &Leased) -> Result<(), Skip> {
        let attached = lease
            .holdings
            .node
            .is_none_or(|node| self.prefixes.tree.node(node).attached);
        if lease.epoch == self.epoch && attached {
            return Ok(());
        }
        self.stats.refusals.reset += 1;
        Err(Skip::Reset)
    }

    /// Publishes tokens, pages and state together. `pages` are those of the positions past the
    /// lease's depth. The lease moves only deeper. The caller has seen that the lease is
    /// current.
    pub(crate) fn publish(
        &mut self,
        cache: u64,
        lease: &mut Leased,
        tokens: &[u32],
        pages: Slots<Kv>,
        state: Slot<Checkpoint>,
    ) -> (Result<Stored, Skip>, Slots<Kv>) {
        let duplicate = self.prefixes.has_checkpoint(self.origin(lease), tokens);
        let placed = self.place(lease, tokens, pages);
        let outcome = if duplicate {
            self.stats.duplicates += 1;
            self.give_back(Holdings {
                state: Some(state),
                ..Holdings::default()
            });
            Err(Skip::Duplicate)
        } else {
            Ok(self.store(cache, &placed, state, lease.generation + 1))
        };
        self.deepen(lease, placed.node);
        (outcome, placed.duplicates)
    }

    /// Gives back what an owner held: at once, or when no step in flight can touch it any more.
    pub(crate) fn give_back(&mut self, holdings: Holdings) {
        if holdings.is_empty() || !self.steps.any_in_flight() {
            return self.release(holdings);
        }
        self.prefixes.kv.retire(holdings.pages.len());
        self.active.retire(holdings.active.len());
        self.prefixes
            .checkpoints
            .retire(holdings.state.iter().len());
        self.steps.wait(holdings);
    }

    /// Releases what was waiting for steps that have retired by now.
    pub(crate) fn release_retired(&mut self) {
        while let Some(holdings) = self.steps.next_retired() {
            self.prefixes.kv.end_retirement(holdings.pages.len());
            self.active.end_retirement(holdings.active.len());
            self.prefixes
                .checkpoints
                .end_retirement(holdings.state.iter().len());
            self.release(holdings);
        }
    }

    /// Gives back at once, for what no step can have touched.
    pub(crate) fn release(&mut self, holdings: Holdings) {
        let Holdings {
            node,
            checkpoint,
            pages,
            active,
            state,
        } = holdings;
        // The checkpoint's pin first: it relies on the node's.
        if let Some(pin) = checkpoint {
            self.prefixes.unpin_checkpoint(pin);
        }
        if let Some(node) = node {
            self.prefixes.unpin(node);
        }
        self.prefixes.kv.release(pages);
        self.active.release(active);
        state
            .into_iter()
            .for_each(|slot| self.prefixes.checkpoints.release(slot));
    }

    /// Bytes of each pool that are not free.
    pub(crate) fn bytes(&self) -> Bytes {
        fn used<P: crate::pool::Tag>(pool: &Pool<P>) -> u64 {
            let usage = pool.usage();
            let units = usage.held + usage.evictable + usage.pinned + usage.retiring;
            units as u64 * pool.config().unit_bytes
        }
        Bytes {
            kv: used(&self.prefixes.kv),
            active: used(&self.active),
            checkpoints: used(&self.prefixes.checkpoints),
        }
    }

    /// Where a lease's keys start in the tree.
    fn origin(&self, lease: &Leased) -> Option<u32> {
        lease
            .holdings
            .node
            .or_else(|| self.prefixes.tree.root(&lease.namespace))
    }

    /// Makes the tree hold `tokens`, moving in the pages that it lacks.
    fn place(&mut self, lease: &Leased, tokens: &[u32], mut pages: Slots<Kv>) -> Placed {
        let depth = tokens.len();
        let from = self
            .origin(lease)
            .unwrap_or_else(|| self.prefixes.tree.ensure_root(&lease.namespace));
        if depth <= lease.depth {
            return Placed {
                node: self.prefixes.node_at(from, depth),
                brought: depth,
                ..Placed::default()
            };
        }
        let mut node = self.prefixes.descend(from, tokens);
        let existing = self.prefixes.tree.node(node).end;
        let missing = pages.split_off((existing - lease.depth) / self.prefixes.grid.page);
        if existing < depth {
            node = self.prefixes.extend(node, &tokens[existing..], missing);
        }
        let replaced = if pages.is_empty() {
            0..0
        } else {
            lease.depth..existing
        };
        let brought = if self.has_kv() { existing } else { depth };
        Placed {
            node,
            brought,
            duplicates: pages,
            replaced,
        }
    }

    fn store(
        &mut self,
        cache: u64,
        placed: &Placed,
        state: Slot<Checkpoint>,
        generation: u32,
    ) -> Stored {
        let &Placed {
            node,
            brought,
            ref replaced,
            ..
        } = placed;
        let (slot, serial, step) = (state.id(), self.next_serial(), self.steps.writer());
        self.prefixes.attach(
            node,
            state,
            Origin {
                serial,
                ready: step.is_none(),
                generation,
            },
        );
        let id = self.prefixes.tree.id(node);
        if let Some(step) = step {
            self.steps.writes(step, CheckpointPin { node: id, serial });
        }
        self.stats.stored += 1;
        let depth = self.prefixes.tree.node(node).end;
        self.prefixes.digest.note(
            Decision::Store,
            [slot.into(), depth as u64, replaced.end as u64],
        );
        Stored {
            depth,
            slot,
            serial,
            step,
            generation,
            replaced: replaced.clone(),
            node: id,
            brought,
            cache,
        }
    }

    /// Moves a lease to `node` if that is deeper.
    fn deepen(&mut self, lease: &mut Leased, node: u32) {
        let depth = self.prefixes.tree.node(node).end;
        if depth <= lease.depth {
            return;
        }
        self.prefixes.pin(node);
        if let Some(before) = lease.holdings.node.replace(node) {
            self.prefixes.unpin(before);
        }
        lease.depth = depth;
    }
}
