//! Who gets slots and when they come back: pools, cached prefixes, and work in flight. Knows no
//! handles.

use std::ops::Range;

use crate::checkpoint::{Encoded, Skip, Stored};
use crate::error::{OutOfSlots, Shortage};
use crate::event::{Cause, Event};
use crate::flight::Flight;
use crate::lookup::Reusable;
use crate::namespace::Namespace;
use crate::outline::Outline;
use crate::policy::Creation;
use crate::pool::{ActiveState, CachedState, KvPage, Pool, PoolKind, Slot, Slots};
use crate::prefixes::{Ahead, CheckpointId, Origin, Prefixes, Request, Write};
use crate::stats::Bytes;
use crate::tree::NodeIdx;

/// What one owner holds and will give back as a whole.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    /// A pin on a node, so on the KV of its whole path.
    pub(crate) node: Option<NodeIdx>,
    /// A pin on the checkpoint being loaded.
    pub(crate) checkpoint: Option<CheckpointId>,
    /// Private pages.
    pub(crate) pages: Slots<KvPage>,
    /// Running states.
    pub(crate) active: Slots<ActiveState>,
    /// A checkpoint slot that is being written.
    pub(crate) state: Option<Slot<CachedState>>,
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
    /// Resets of the cache before it began.
    pub(crate) resets: u64,
    /// End of the leased node, 0 for none.
    pub(crate) depth: usize,
    /// How often the state it started from had been encoded.
    pub(crate) encodings: u32,
    /// What the policy knows of it.
    pub(crate) request: Request,
    pub(crate) holdings: Holdings,
}

/// A state that may enter the tree.
#[derive(Debug)]
pub(crate) struct Admitted {
    state: Encoded,
    /// There is one already.
    checkpoint: bool,
}

/// What publishing a prefix did to its pages.
#[derive(Debug)]
struct Placed {
    node: NodeIdx,
    /// Depth from which on the tree lacked pages.
    brought: usize,
    exchanged: Exchanged,
}

/// Given pages that the tree had already, and the tokens they are of. The tree's hold from now on.
#[derive(Debug, Default)]
pub(crate) struct Exchanged {
    pub(crate) duplicates: Slots<KvPage>,
    pub(crate) replaced: Range<usize>,
}

pub(crate) struct Ledger {
    pub(crate) prefixes: Prefixes,
    pub(crate) active: Pool<ActiveState>,
    pub(crate) flight: Flight<Holdings>,
    /// Counts resets: a lease from before the last one publishes nothing.
    pub(crate) resets: u64,
    serial: u64,
}

impl Ledger {
    pub(crate) fn new(prefixes: Prefixes, active: Pool<ActiveState>) -> Self {
        Self {
            prefixes,
            active,
            flight: Flight::new(),
            resets: 0,
            serial: 0,
        }
    }

    #[inline(always)]
    pub(crate) fn emit(&mut self, event: Event) {
        self.prefixes.emit(event);
    }

    pub(crate) fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Pages that positions `0..tokens` take.
    pub(crate) fn pages_for(&self, tokens: usize) -> usize {
        if self.prefixes.has_kv() {
            tokens.div_ceil(self.prefixes.grid().page)
        } else {
            0
        }
    }

    /// Pins what a lookup found, in place.
    pub(crate) fn lease(&mut self, namespace: &Namespace, reusable: Reusable) -> Leased {
        let mut holdings = Holdings::default();
        if let Some(CheckpointId { node, .. }) = reusable.checkpoint {
            // The checkpoint first, so that the policy is told once.
            holdings.checkpoint = Some(self.prefixes.pin_checkpoint(node.index));
            self.prefixes.pin(node.index);
            holdings.node = Some(node.index);
        }
        Leased {
            namespace: namespace.clone(),
            resets: self.resets,
            depth: reusable.length,
            encodings: reusable.encodings,
            request: Request::default(),
            holdings,
        }
    }

    /// A request or lease begins.
    pub(crate) fn begin(&mut self, outline: Outline) -> Request {
        let mark = self.prefixes.begin(&outline);
        Request { outline, mark }
    }

    /// Counts a match that is being used, and tells the policy of the checkpoint it continues.
    pub(crate) fn consume(&mut self, reusable: Reusable) {
        self.emit(Event::Use {
            reason: reusable.reason,
            length: reusable.length,
            kv_length: reusable.kv_length,
        });
        if let Some(CheckpointId { node, .. }) = reusable.checkpoint {
            self.prefixes.touch(node.index);
        }
    }

    /// Fails if `tokens` positions are more than the pool could ever give.
    pub(crate) fn feasible(&self, tokens: usize) -> Result<(), Shortage> {
        let wanted = self.pages_for(tokens);
        let capacity = self.prefixes.kv().config().capacity as usize;
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Kv,
                wanted,
                capacity,
            });
        }
        Ok(())
    }

    /// An error when one owner can never have `wanted` running states.
    pub(crate) fn feasible_slots(&self, wanted: usize) -> Result<(), Shortage> {
        let capacity = self.active.config().capacity as usize;
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Active,
                wanted,
                capacity,
            });
        }
        Ok(())
    }

    /// Takes `slots` running states and `pages` pages, evicting exactly the pages that are missing;
    /// or changes nothing.
    pub(crate) fn claim(&mut self, pages: usize, slots: usize) -> Result<Holdings, OutOfSlots> {
        // Before anything is evicted for pages.
        self.active.shortfall(slots)?;
        let pages = self.claim_pages(pages)?;
        let active = self.active.take_many(slots)?;
        Ok(Holdings {
            pages,
            active,
            ..Holdings::default()
        })
    }

    /// Takes pages, evicting exactly what is missing; or changes nothing.
    pub(crate) fn claim_pages(&mut self, wanted: usize) -> Result<Slots<KvPage>, OutOfSlots> {
        let missing = self.prefixes.kv().shortfall(wanted)?;
        if missing > 0 {
            let freed = self.prefixes.evict_kv(missing);
            let cause = Cause::Kv;
            self.emit(Event::Freed { cause, freed });
        }
        self.prefixes.kv_mut().take_many(wanted)
    }

    /// A checkpoint slot for the state at the end of `tokens`, or why there is to be none.
    pub(crate) fn reserve(
        &mut self,
        lease: &Leased,
        tokens: &[u32],
    ) -> Result<Slot<CachedState>, Skip> {
        let slot = self.try_reserve(lease, tokens);
        if let Err(skip) = slot {
            self.emit(Event::Skip(skip));
        }
        slot
    }

    fn try_reserve(&mut self, lease: &Leased, tokens: &[u32]) -> Result<Slot<CachedState>, Skip> {
        if tokens.is_empty() {
            return Err(Skip::NotAligned);
        }
        if self.ahead(lease, tokens)?.checkpoint {
            return Err(Skip::Duplicate);
        }
        let missing = self.prefixes.checkpoints().shortfall(1);
        let missing = missing.map_err(Skip::NoRoom)?;
        if missing > 0 {
            let freed = self.prefixes.evict_checkpoints(missing);
            let cause = Cause::Checkpoint;
            self.emit(Event::Freed { cause, freed });
        }
        let slot = self.prefixes.checkpoints_mut().take();
        Ok(slot.expect("what eviction frees is usable when it returns"))
    }

    /// A lease brings nothing into the tree if it is older than the last reset, or if its prefix
    /// turned out invalid.
    fn check_current(&self, lease: &Leased) -> Result<(), Skip> {
        let tree = self.prefixes.tree();
        let node = lease.holdings.node;
        let attached = node.is_none_or(|node| tree.node(node).attached);
        if lease.resets != self.resets || !attached {
            return Err(Skip::Reset);
        }
        Ok(())
    }

    /// What the tree holds of `tokens` past the lease, if a state may be stored at their end. It
    /// may not if it would get pages that another request is still writing.
    fn ahead(&self, lease: &Leased, tokens: &[u32]) -> Result<Ahead, Skip> {
        self.check_current(lease)?;
        let ahead = self.prefixes.ahead(self.origin(lease), tokens);
        match (ahead.unproven, ahead.checkpoint) {
            (true, true) => Err(Skip::Duplicate),
            (true, false) => Err(Skip::NotReady),
            (false, _) => Ok(ahead),
        }
    }

    /// Asks whether a lease may publish `tokens` now, before anything of its owner moves; gives the
    /// state's slot back if not.
    pub(crate) fn admit(
        &mut self,
        lease: &Leased,
        tokens: &[u32],
        state: Encoded,
    ) -> Result<Admitted, Skip> {
        let admitted = self.ahead(lease, tokens);
        match admitted {
            Ok(Ahead { checkpoint, .. }) => Ok(Admitted { state, checkpoint }),
            Err(skip) => {
                self.give_back_state(state.slot);
                self.emit(Event::Skip(skip));
                Err(skip)
            }
        }
    }

    /// Publishes tokens, pages and state together. `pages` are those of the positions past the
    /// lease's depth. The lease moves only deeper.
    pub(crate) fn publish(
        &mut self,
        cache: u64,
        lease: &mut Leased,
        tokens: &[u32],
        pages: Slots<KvPage>,
        admitted: Admitted,
    ) -> (Result<Stored, Skip>, Exchanged) {
        let Admitted { state, checkpoint } = admitted;
        let ready = state.proven && self.flight.newest_open().is_none();
        let placed = self.place(lease, tokens, pages, ready);
        let outcome = if checkpoint {
            self.give_back_state(state.slot);
            self.emit(Event::Skip(Skip::Duplicate));
            Err(Skip::Duplicate)
        } else {
            let creation = self
                .prefixes
                .creation(&mut lease.request, &lease.namespace, tokens);
            Ok(self.store(cache, &placed, state, (lease.encodings + 1, creation)))
        };
        self.deepen(lease, placed.node);
        (outcome, placed.exchanged)
    }

    /// Places tokens past the lease, and their pages, without a state; otherwise as
    /// [`Ledger::publish`]. The caller has asked [`Ledger::may_extend`].
    pub(crate) fn extend(
        &mut self,
        lease: &mut Leased,
        tokens: &[u32],
        pages: Slots<KvPage>,
    ) -> Exchanged {
        if tokens.len() <= lease.depth {
            return Exchanged::default();
        }
        let ticket = self.flight.newest_open();
        let placed = self.place(lease, tokens, pages, ticket.is_none());
        let Placed { node, brought, .. } = placed;
        if let Some(ticket) = ticket.filter(|_| brought < tokens.len()) {
            self.prefixes.pin(node);
            let write = Write {
                node: self.prefixes.tree().id(node),
                serial: None,
                brought,
                step: self.flight.writer(),
                proof: None,
            };
            self.flight.writes(ticket, write);
        }
        self.deepen(lease, node);
        placed.exchanged
    }

    /// Why a lease may not bring `tokens` into the tree: it would get pages that another request is
    /// still writing.
    pub(crate) fn may_extend(&self, lease: &Leased, tokens: &[u32]) -> Result<(), Skip> {
        self.check_current(lease)?;
        let past = tokens.len() > lease.depth;
        if past && self.prefixes.ahead(self.origin(lease), tokens).unproven {
            return Err(Skip::NotReady);
        }
        Ok(())
    }

    /// Gives back what an owner held: at once, or when no step in flight can touch it any more.
    pub(crate) fn give_back(&mut self, holdings: Holdings) {
        if holdings.is_empty() || !self.flight.any_step() {
            return self.release(holdings);
        }
        self.prefixes.kv_mut().retire(holdings.pages.len());
        self.active.retire(holdings.active.len());
        let states = holdings.state.iter().len();
        self.prefixes.checkpoints_mut().retire(states);
        self.flight.wait(holdings);
    }

    pub(crate) fn give_back_state(&mut self, slot: Slot<CachedState>) {
        self.give_back(Holdings {
            state: Some(slot),
            ..Holdings::default()
        });
    }

    /// Makes ready what is written by now, and releases what was waiting for steps that have
    /// retired.
    pub(crate) fn land(&mut self) {
        while let Some(written) = self.flight.next_written() {
            written.into_iter().for_each(|it| self.prefixes.written(it));
        }
        while let Some(holdings) = self.flight.next_retired() {
            let kv = self.prefixes.kv_mut();
            kv.end_retirement(holdings.pages.len());
            self.active.end_retirement(holdings.active.len());
            let states = holdings.state.iter().len();
            self.prefixes.checkpoints_mut().end_retirement(states);
            self.release(holdings);
        }
    }

    /// Gives back at once what no step can have touched.
    pub(crate) fn release(&mut self, holdings: Holdings) {
        let Holdings {
            node,
            checkpoint,
            pages,
            active,
            state,
        } = holdings;
        // The node first, so that the policy is told once. A node stays for its checkpoint, and a
        // withdrawn checkpoint needs none.
        if let Some(node) = node {
            self.prefixes.unpin(node);
        }
        if let Some(pin) = checkpoint {
            self.prefixes.unpin_checkpoint(pin);
        }
        self.prefixes.kv_mut().release(pages);
        self.active.release(active);
        if let Some(slot) = state {
            self.prefixes.checkpoints_mut().release(slot);
        }
    }

    /// Bytes of each pool that are not free.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes {
            kv: self.prefixes.kv().bytes(),
            active: self.active.bytes(),
            checkpoints: self.prefixes.checkpoints().bytes(),
        }
    }

    /// Where a lease's keys start in the tree.
    fn origin(&self, lease: &Leased) -> Option<NodeIdx> {
        let root = || self.prefixes.tree().root(&lease.namespace);
        lease.holdings.node.or_else(root)
    }

    /// Makes the tree hold `tokens`, moving in the pages that it lacks.
    fn place(
        &mut self,
        lease: &Leased,
        tokens: &[u32],
        mut pages: Slots<KvPage>,
        ready: bool,
    ) -> Placed {
        let depth = tokens.len();
        let from = self.origin(lease);
        let from = from.unwrap_or_else(|| self.prefixes.ensure_root(&lease.namespace));
        if depth <= lease.depth {
            return Placed {
                node: self.prefixes.node_at(from, depth),
                brought: depth,
                exchanged: Exchanged::default(),
            };
        }
        let mut node = self.prefixes.descend(from, tokens);
        let existing = self.prefixes.tree().node(node).end;
        let missing = pages.split_off((existing - lease.depth) / self.prefixes.grid().page);
        if existing < depth {
            let proven = ready || !self.prefixes.has_kv();
            let rest = &tokens[existing..];
            node = self.prefixes.extend(node, rest, missing, proven);
        }
        let replaced = if pages.is_empty() {
            0..0
        } else {
            lease.depth..existing
        };
        let has_kv = self.prefixes.has_kv();
        Placed {
            node,
            brought: if has_kv { existing } else { depth },
            exchanged: Exchanged {
                duplicates: pages,
                replaced,
            },
        }
    }

    fn store(
        &mut self,
        cache: u64,
        placed: &Placed,
        state: Encoded,
        (encodings, creation): (u32, Creation),
    ) -> Stored {
        let &Placed {
            node,
            brought,
            ref exchanged,
        } = placed;
        let slot = state.slot.id();
        let serial = self.next_serial();
        let step = self.flight.writer();
        let proof = (!state.proven).then(|| self.flight.await_proof());
        // The newest open one, even if it does not write this state: it may write pages that the
        // state stands on.
        let ticket = self.flight.newest_open();
        let origin = Origin {
            serial,
            ready: ticket.is_none(),
            encodings,
            creation,
        };
        self.prefixes.attach(node, state.slot, origin);
        let id = CheckpointId {
            node: self.prefixes.tree().id(node),
            serial,
        };
        if let Some(ticket) = ticket {
            let write = Write {
                node: id.node,
                serial: Some(serial),
                brought,
                step,
                proof,
            };
            self.flight.writes(ticket, write);
        }
        let depth = self.prefixes.tree().node(node).end;
        let replaced = exchanged.replaced.clone();
        self.emit(Event::Store {
            slot,
            depth,
            replaced: replaced.end,
        });
        Stored {
            depth,
            slot,
            serial,
            step,
            ticket: proof,
            encodings,
            replaced,
            id,
            brought,
            cache,
        }
    }

    /// Moves a lease to `node` if that is deeper.
    fn deepen(&mut self, lease: &mut Leased, node: NodeIdx) {
        let depth = self.prefixes.tree().node(node).end;
        if depth <= lease.depth {
            return;
        }
        // The new pin before the old one goes, so that nothing of the path is left bare between.
        self.prefixes.pin(node);
        if let Some(before) = lease.holdings.node.replace(node) {
            self.prefixes.unpin(before);
        }
        lease.depth = depth;
    }
}
