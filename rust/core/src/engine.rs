//! The lower layer: leases and publishing, for engines whose allocators own KV pages or running
//! states.

use crate::cache::Cache;
use crate::checkpoint::{Commit, Encoded, Rejected, Reservation, check_depth};
use crate::error::Misuse;
use crate::event::Event;
use crate::handle::{Kind, Lease, Pending, Sequence};
use crate::ledger::{Holdings, Leased, Ledger};
use crate::lookup::{Match, Reusable};
use crate::prefixes::CheckpointId;
use crate::tree::Node;

/// What publishing with the engine's own pages did.
///
/// In every case the engine puts `canonical` into its page table and frees `duplicates`; the pages
/// past [`Cache::lease_depth`] are then its own. After a reset nothing is adopted, so these are the
/// given ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Whether the state is in the tree.
    pub outcome: Commit,
    /// The pages now valid for the positions from the lease's old depth to the published depth.
    pub canonical: Vec<u32>,
    /// Given pages that were cached already: not adopted, still the caller's to free.
    pub duplicates: Vec<u32>,
}

impl Cache {
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
        self.ledger.prefixes.begin();
        let leased = self.ledger.lease(&matched.namespace, reusable);
        self.ledger.consume(reusable);
        let key = self.leases.insert(leased);
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

    /// Page ids of the leased prefix.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn lease_pages(&self, lease: &Lease) -> Result<Vec<u32>, Misuse> {
        let node = self.leased(lease)?.holdings.node;
        Ok(node.map_or_else(Vec::new, |node| {
            self.ledger.prefixes.tree().path_pages(node)
        }))
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

    /// Takes a checkpoint slot for the state after exactly `tokens`. Evicts if needed.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`], [`Misuse::PrefixMismatch`], [`Misuse::WrongCache`];
    /// [`Misuse::NotLoaded`] past the leased prefix, before its state was loaded.
    pub fn reserve(&mut self, lease: &Lease, tokens: &[u32]) -> Result<Reservation, Misuse> {
        self.own(&lease.0)?;
        self.collect_dropped();
        let leased = &self.leases[lease.0.key];
        check_depth(&self.ledger, tokens.len())?;
        check_prefix(&self.ledger, leased, tokens)?;
        check_loaded(leased, tokens.len())?;
        let slot = self.ledger.reserve(leased, tokens);
        Ok(self.pend(lease.0.serial, tokens.len(), slot))
    }

    /// Asks whether [`Cache::publish`] will be allowed, before a slot is reserved and anything
    /// evicted for it.
    ///
    /// # Errors
    /// As [`Cache::reserve`] and [`Cache::publish`].
    pub fn can_publish(&self, lease: &Lease, tokens: &[u32], pages: &[u32]) -> Result<(), Misuse> {
        let leased = self.leased(lease)?;
        check_depth(&self.ledger, tokens.len())?;
        check_prefix(&self.ledger, leased, tokens)?;
        check_pages(&self.ledger, leased, tokens.len(), pages)?;
        check_loaded(leased, tokens.len())
    }

    /// Publishes tokens, pages and state together, or nothing. `pages` are the engine's, for the
    /// positions from the lease's depth to the end of `tokens`; exactly those that the tree lacks
    /// are adopted.
    ///
    /// # Errors
    /// [`Misuse::LengthMismatch`], [`Misuse::PageOwnership`], [`Misuse::PrefixMismatch`],
    /// [`Misuse::NotLoaded`], [`Misuse::NotYourPending`], [`Misuse::PoolMode`] with an internal KV pool, whose pages
    /// belong to sequences. The pending checkpoint comes back with the error.
    pub fn publish(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        let allowed = self.check_publish(lease, tokens, pages, &pending);
        let pending = Rejected::unless(allowed, pending)?;
        self.collect_dropped();
        let state = self.encoded(pending);
        let leased = &mut self.leases[lease.0.key];
        let cache = self.inbox.cache;
        Ok(publish(
            &mut self.ledger,
            cache,
            leased,
            tokens,
            pages,
            state,
        ))
    }

    fn check_publish(
        &self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: &Pending,
    ) -> Result<(), Misuse> {
        self.own(&lease.0)?;
        self.check_reserved_by(lease.0.serial, pending)?;
        check_length("tokens", tokens.len(), pending.depth)?;
        self.can_publish(lease, tokens, pages)
    }

    /// [`Cache::commit`] for a sequence whose KV pages are the engine's. See [`Cache::publish`].
    ///
    /// # Errors
    /// As [`Cache::publish`].
    pub fn commit_pages(
        &mut self,
        sequence: &Sequence,
        pages: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        let allowed = self.check_commit_pages(sequence, pages, &pending);
        let pending = Rejected::unless(allowed, pending)?;
        self.collect_dropped();
        let depth = pending.depth;
        let state = self.encoded(pending);
        let running = &mut self.sequences[sequence.0.key];
        let tokens = &running.tokens[..depth];
        let lease = &mut running.lease;
        let cache = self.inbox.cache;
        Ok(publish(
            &mut self.ledger,
            cache,
            lease,
            tokens,
            pages,
            state,
        ))
    }

    fn check_commit_pages(
        &self,
        sequence: &Sequence,
        pages: &[u32],
        pending: &Pending,
    ) -> Result<(), Misuse> {
        self.own(&sequence.0)?;
        self.check_reserved_by(sequence.0.serial, pending)?;
        let lease = &self.sequences[sequence.0.key].lease;
        check_pages(&self.ledger, lease, pending.depth, pages)
    }

    /// The checkpoint slot that a lease still pins for loading.
    pub(crate) fn state_of(&self, leased: &Leased) -> Option<u32> {
        let pin = leased.holdings.checkpoint?;
        Some(self.ledger.prefixes.pinned_slot(pin))
    }

    fn leased(&self, lease: &Lease) -> Result<&Leased, Misuse> {
        self.own(&lease.0)?;
        Ok(&self.leases[lease.0.key])
    }
}

fn check_length(what: &'static str, given: usize, expected: usize) -> Result<(), Misuse> {
    if given == expected {
        Ok(())
    } else {
        Err(Misuse::LengthMismatch {
            what,
            given,
            expected,
        })
    }
}

/// A state past the leased one goes on from it, so that was loaded.
fn check_loaded(leased: &Leased, depth: usize) -> Result<(), Misuse> {
    if leased.holdings.checkpoint.is_some() && depth > leased.depth {
        return Err(Misuse::NotLoaded);
    }
    Ok(())
}

fn check_prefix(ledger: &Ledger, leased: &Leased, tokens: &[u32]) -> Result<(), Misuse> {
    let Some(node) = leased.holdings.node else {
        return Ok(());
    };
    if ledger.prefixes.tree().agrees(node, tokens) {
        Ok(())
    } else {
        let leased = leased.depth;
        Err(Misuse::PrefixMismatch { leased })
    }
}

fn check_pages(
    ledger: &Ledger,
    leased: &Leased,
    depth: usize,
    pages: &[u32],
) -> Result<(), Misuse> {
    if ledger.allocates_kv() {
        return Err(Misuse::PoolMode(
            "the cache owns the kv pages: commit a sequence instead",
        ));
    }
    let new = depth.saturating_sub(leased.depth);
    let expected = if ledger.prefixes.has_kv() {
        new / ledger.prefixes.grid().page
    } else {
        0
    };
    check_length("pages", pages.len(), expected)?;
    ledger.prefixes.kv().check_adoptable(pages)
}

fn publish(
    ledger: &mut Ledger,
    cache: u64,
    leased: &mut Leased,
    tokens: &[u32],
    pages: &[u32],
    state: Encoded,
) -> Published {
    let admitted = match ledger.admit(leased, tokens, state) {
        Ok(admitted) => admitted,
        Err(skip) => {
            return Published {
                outcome: Commit::Skipped(skip),
                canonical: pages.to_vec(),
                duplicates: Vec::new(),
            };
        }
    };
    let adopted = ledger.prefixes.kv_mut().adopt(pages);
    let (outcome, duplicates) = ledger.publish(cache, leased, tokens, adopted, admitted);
    let duplicates = ledger.prefixes.kv_mut().hand_back(duplicates);
    let mut canonical = match leased.holdings.node {
        Some(node) => ledger.prefixes.tree().path_pages(node),
        None => Vec::new(),
    };
    canonical.drain(..canonical.len() - pages.len());
    Published {
        outcome: outcome.into(),
        canonical,
        duplicates,
    }
}
