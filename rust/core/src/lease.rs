//! Leases: a cached prefix that stays as long as somebody needs it.
//!
//! A request whose pages are the engine's is a lease, which `engine.rs` moves deeper. In a cache that
//! owns its pages, a lease keeps a prefix that should not be evicted.

use crate::cache::Cache;
use crate::error::Misuse;
use crate::event::Event;
use crate::handle::{Kind, Lease};
use crate::ledger::{Holdings, Leased};
use crate::lookup::{Match, Reusable};
use crate::pool::PageOwner;
use crate::prefixes::CheckpointId;
use crate::tree::Node;

impl<O: PageOwner> Cache<O> {
    /// Pins what a lookup found: its node until the lease ends, its checkpoint until
    /// [`Cache::lease_loaded`].
    ///
    /// A match without a hit gives a lease at depth 0, which pins nothing and from which a prefix
    /// can be published.
    ///
    /// # Errors
    /// [`Misuse::Stale`] when that checkpoint is gone; [`Misuse::WrongCache`].
    pub fn lease(&mut self, matched: &Match) -> Result<Lease, Misuse> {
        self.own_id(matched.cache)?;
        self.collect_dropped();
        if matched.resets != self.ledger.resets {
            return Err(Misuse::Stale("the cache was reset after the lookup"));
        }
        // The tree says how deep it is: a match is the caller's to change.
        let length = match matched.checkpoint {
            None => 0,
            Some(CheckpointId { node, serial }) => {
                let node = self.ledger.prefixes.tree().get(node);
                let holds = |node: &&Node| {
                    let checkpoint = node.checkpoint.as_ref();
                    checkpoint.is_some_and(|checkpoint| checkpoint.serial == serial)
                };
                let gone = Misuse::Stale("its checkpoint was evicted after the lookup");
                node.filter(holds).ok_or(gone)?.end
            }
        };
        let reusable = Reusable {
            length,
            kv_length: matched.kv_length,
            branch: matched.branch,
            reason: matched.reason,
            encodings: matched.encodings,
            not_ready: matched.not_ready,
            checkpoint: matched.checkpoint,
        };
        self.ledger.emit(Event::Lease {
            length,
            serial: matched.checkpoint.map_or(0, |found| found.serial),
        });
        let request = self.ledger.begin(matched.outline.clone());
        let mut leased = self.ledger.lease(&matched.namespace, reusable);
        leased.request = request;
        self.ledger.consume(reusable);
        let key = self.leases.insert(leased);
        Ok(Lease(self.handle(Kind::Lease, key)))
    }

    /// Another lease of what a lease has: its prefix, as deep as it is by now. It has no state to
    /// load.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn fork_lease(&mut self, lease: &Lease) -> Result<Lease, Misuse> {
        self.own(&lease.0)?;
        self.collect_dropped();
        let leased = &self.leases[lease.0.key];
        let node = leased.holdings.node;
        let forked = Leased {
            namespace: leased.namespace.clone(),
            request: leased.request.clone(),
            holdings: Holdings {
                node,
                ..Holdings::default()
            },
            ..*leased
        };
        self.ledger.emit(Event::Lease {
            length: forked.depth,
            serial: lease.0.serial,
        });
        if let Some(node) = node {
            self.ledger.prefixes.pin(node);
        }
        let key = self.leases.insert(forked);
        Ok(Lease(self.handle(Kind::Lease, key)))
    }

    /// The checkpoint slot to load from, until the load is reported; `None` for a lease at depth 0.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn lease_state(&self, lease: &Lease) -> Result<Option<u32>, Misuse> {
        Ok(self.state_of(self.leased(lease)?))
    }

    /// Tokens of the leased prefix. A lease moves only deeper.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn lease_depth(&self, lease: &Lease) -> Result<usize, Misuse> {
        Ok(self.leased(lease)?.depth)
    }

    /// Page ids of the leased prefix past `depth` tokens, a multiple of the page size.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`], [`Misuse::Unaligned`].
    pub fn lease_pages(&self, lease: &Lease, depth: usize) -> Result<Vec<u32>, Misuse> {
        let node = self.leased(lease)?.holdings.node;
        let page = self.ledger.prefixes.grid().page;
        if !depth.is_multiple_of(page) {
            return Err(Misuse::Unaligned { depth, legal: page });
        }
        let tree = self.ledger.prefixes.tree();
        Ok(node.map_or_else(Vec::new, |node| tree.pages_past(node, depth)))
    }

    /// Reports that the load from the leased checkpoint is enqueued: the checkpoint may be evicted
    /// again. Repeating it changes nothing.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn lease_loaded(&mut self, lease: &Lease) -> Result<(), Misuse> {
        self.own(&lease.0)?;
        self.collect_dropped();
        self.ledger.emit(Event::Loaded {
            owner: lease.0.serial,
        });
        let checkpoint = self.leases[lease.0.key].holdings.checkpoint.take();
        self.ledger.give_back(Holdings {
            checkpoint,
            ..Holdings::default()
        });
        Ok(())
    }

    /// Ends a lease; dropping it does the same at the cache's next call.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`]: the lease then ends in its own cache.
    pub fn release(&mut self, lease: Lease) -> Result<(), Misuse> {
        self.own(&lease.0)?;
        self.collect_dropped();
        self.ledger.emit(Event::End {
            owner: lease.0.serial,
        });
        let leased = self.leases.remove(lease.0.disarm());
        self.ledger.give_back(leased.holdings);
        Ok(())
    }

    /// The checkpoint slot that a lease or a sequence still pins for loading.
    pub(crate) fn state_of(&self, leased: &Leased) -> Option<u32> {
        let pin = leased.holdings.checkpoint?;
        Some(self.ledger.prefixes.pinned_slot(pin))
    }

    pub(crate) fn leased(&self, lease: &Lease) -> Result<&Leased, Misuse> {
        self.own(&lease.0)?;
        Ok(&self.leases[lease.0.key])
    }
}
