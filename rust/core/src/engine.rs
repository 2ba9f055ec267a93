//! For engines that allocate the KV pages: what they have computed joins the tree, and what the tree
//! gives up comes back.
//!
//! [`extend`](Cache::extend) moves a lease deeper and shares the pages of the tokens in between,
//! [`attach`](Cache::attach) adds a state to a prefix that is leased, and [`publish`](Cache::publish)
//! does both or neither.

use std::ops::Range;

use crate::cache::Cache;
use crate::checkpoint::{Commit, Encoded, Rejected, Reservation, Skip, check_depth};
use crate::error::Misuse;
use crate::event::Event;
use crate::handle::{Lease, Pending};
use crate::ledger::{Exchanged, Leased, Ledger};
use crate::pool::{EngineOwned, EnginePages, LogicalPages};

/// What sharing pages did.
///
/// The pages of `replaced` were cached already: the engine frees its own, reads those of the
/// [lease](Cache::lease_pages) in their place, and gives up the other pages it handed over, which
/// are the cache's now. If sharing was skipped, nothing was taken over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extended {
    /// Why the tree did not take the tokens; `None` when it has all of them.
    pub skipped: Option<Skip>,
    /// Tokens whose pages were cached already. They follow the lease's depth before the call.
    pub replaced: Range<usize>,
}

/// What publishing tokens, pages and state did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Whether the state is in the tree. For [`Skip::Duplicate`] the pages are.
    pub outcome: Commit,
    /// As in [`Extended`].
    pub replaced: Range<usize>,
}

impl<O: EngineOwned> Cache<O> {
    /// Pages that the cache has given up since the last call, each exactly once: the engine's ids,
    /// or the numbers of pages that the engine may free.
    pub fn take_freed(&mut self) -> Vec<u32> {
        self.collect_dropped();
        let freed = self.ledger.prefixes.kv_mut().take_outbox();
        let pages = freed.len();
        self.ledger.emit(Event::TakeFreed { pages });
        freed.ids().collect()
    }

    /// Adds a state to a prefix that the lease has already, as after [`extend`](Cache::extend).
    /// `tokens` are those of the reservation.
    ///
    /// Pages and state then stand for themselves: the pages stay if the state turns out not to be
    /// finite, where those of [`publish`](Cache::publish) go with it.
    ///
    /// # Errors
    /// [`Misuse::DepthPastEnd`] past the lease's depth, otherwise as
    /// [`publish`](Cache::publish). The pending checkpoint comes back with the error.
    pub fn attach(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pending: Pending,
    ) -> Result<Commit, Rejected> {
        let allowed = self.check_publish(lease, tokens, &pending);
        let allowed = allowed.and_then(|()| {
            let (depth, end) = (tokens.len(), self.leased(lease)?.depth);
            if depth > end {
                return Err(Misuse::DepthPastEnd { depth, end });
            }
            Ok(())
        });
        let pending = Rejected::unless(allowed, pending)?;
        Ok(self.place_state(lease, tokens, &[], pending).outcome)
    }

    fn check_publish(
        &self,
        lease: &Lease,
        tokens: &[u32],
        pending: &Pending,
    ) -> Result<(), Misuse> {
        let leased = self.leased(lease)?;
        self.check_reserved_by(lease.0.serial, pending)?;
        check_length("tokens", tokens.len(), pending.depth)?;
        check_tokens(&self.ledger, leased, tokens)
    }

    fn check_extend(&self, lease: &Lease, tokens: &[u32], pages: &[u32]) -> Result<(), Misuse> {
        let leased = self.leased(lease)?;
        let page = self.ledger.prefixes.grid().page;
        if !tokens.len().is_multiple_of(page) {
            let depth = tokens.len();
            return Err(Misuse::Unaligned { depth, legal: page });
        }
        check_tokens(&self.ledger, leased, tokens)?;
        check_pages(&self.ledger, leased, tokens.len(), pages)?;
        check_loaded(leased, tokens.len())
    }

    fn try_reserve(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Reservation, Misuse> {
        self.own(&lease.0)?;
        check_depth(&self.ledger, tokens.len())?;
        self.check_extend(lease, tokens, pages)?;
        self.collect_dropped();
        let leased = &self.leases[lease.0.key];
        let slot = self.ledger.reserve(leased, tokens);
        Ok(self.pend(lease.0.serial, tokens.len(), slot))
    }

    /// The pages that the engine hands over with `depth` tokens, which were checked.
    fn pages_to(&self, lease: &Lease, depth: usize) -> usize {
        new_pages(&self.ledger, &self.leases[lease.0.key], depth)
    }

    fn place(&mut self, lease: &Lease, tokens: &[u32], pages: &[u32]) -> Extended {
        self.collect_dropped();
        let n = self.pages_to(lease, tokens.len());
        let leased = &mut self.leases[lease.0.key];
        let (owner, depth) = (lease.0.serial, tokens.len());
        if let Err(skip) = self.ledger.may_extend(leased, tokens) {
            self.ledger.emit(Event::Extend {
                owner,
                depth: 0,
                replaced: 0,
            });
            return Extended {
                skipped: Some(skip),
                replaced: 0..0,
            };
        }
        let adopted = self.ledger.prefixes.kv_mut().adopt(n, pages);
        let exchanged = self.ledger.extend(leased, tokens, adopted);
        self.ledger.emit(Event::Extend {
            owner,
            depth,
            replaced: exchanged.replaced.end,
        });
        Extended {
            skipped: None,
            replaced: self.ledger.hand_back(exchanged),
        }
    }

    fn place_state(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: Pending,
    ) -> Published {
        self.collect_dropped();
        let n = self.pages_to(lease, tokens.len());
        let state = self.encoded(pending);
        let leased = &mut self.leases[lease.0.key];
        let cache = self.inbox.cache;
        publish(&mut self.ledger, cache, leased, tokens, (n, pages), state)
    }
}

impl Cache<EnginePages> {
    /// Shares `tokens` and the engine's `pages` for the positions from the lease's depth to their
    /// end, and moves the lease there. Exactly the pages that the tree lacks are taken over.
    ///
    /// Without a state at their end, or beyond, the pages stay as long as somebody leases them.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`] off the grid of pages; [`Misuse::LengthMismatch`],
    /// [`Misuse::PageOwnership`], [`Misuse::PrefixMismatch`], [`Misuse::NotLoaded`],
    /// [`Misuse::WrongCache`].
    pub fn extend(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Extended, Misuse> {
        self.check_extend(lease, tokens, pages)?;
        Ok(self.place(lease, tokens, pages))
    }

    /// Takes a checkpoint slot for the state after exactly `tokens`, to be published with their
    /// pages, or attached if the lease has all of them. Evicts if needed, and nothing if a rule is
    /// broken.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`] for an illegal depth, and as [`extend`](Cache::extend).
    pub fn reserve(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Reservation, Misuse> {
        self.try_reserve(lease, tokens, pages)
    }

    /// Publishes tokens, pages and state together, or nothing: `tokens` and `pages` as for
    /// [`extend`](Cache::extend), the state that was reserved for them.
    ///
    /// # Errors
    /// As [`extend`](Cache::extend), and [`Misuse::NotYourPending`]. The pending checkpoint comes
    /// back with the error.
    pub fn publish(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pages: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        let allowed = self.check_publish(lease, tokens, &pending);
        let allowed = allowed.and_then(|()| self.check_extend(lease, tokens, pages));
        let pending = Rejected::unless(allowed, pending)?;
        Ok(self.place_state(lease, tokens, pages, pending))
    }
}

impl Cache<LogicalPages> {
    /// Shares `tokens`, whose pages from the lease's depth to their end the engine has, and moves
    /// the lease there. The tree numbers exactly the pages that it lacks: all past
    /// [`Extended::replaced`] are new numbers, to be read by [`lease_pages`](Cache::lease_pages).
    ///
    /// Without a state at their end, or beyond, the pages stay as long as somebody leases them.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`] off the grid of pages; [`Misuse::TooManyPages`],
    /// [`Misuse::PrefixMismatch`], [`Misuse::NotLoaded`], [`Misuse::WrongCache`].
    pub fn extend(&mut self, lease: &Lease, tokens: &[u32]) -> Result<Extended, Misuse> {
        self.check_extend(lease, tokens, &[])?;
        Ok(self.place(lease, tokens, &[]))
    }

    /// Takes a checkpoint slot for the state after exactly `tokens`, to be published with their
    /// pages, or attached if the lease has all of them. Evicts if needed, and nothing if a rule is
    /// broken.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`] for an illegal depth, and as [`extend`](Cache::extend).
    pub fn reserve(&mut self, lease: &Lease, tokens: &[u32]) -> Result<Reservation, Misuse> {
        self.try_reserve(lease, tokens, &[])
    }

    /// Publishes tokens, pages and state together, or nothing: `tokens` as for
    /// [`extend`](Cache::extend), the state that was reserved for them.
    ///
    /// # Errors
    /// As [`extend`](Cache::extend), and [`Misuse::NotYourPending`]. The pending checkpoint comes
    /// back with the error.
    pub fn publish(
        &mut self,
        lease: &Lease,
        tokens: &[u32],
        pending: Pending,
    ) -> Result<Published, Rejected> {
        let allowed = self.check_publish(lease, tokens, &pending);
        let allowed = allowed.and_then(|()| self.check_extend(lease, tokens, &[]));
        let pending = Rejected::unless(allowed, pending)?;
        Ok(self.place_state(lease, tokens, &[], pending))
    }
}

impl Ledger {
    /// Gives the pages that were not needed back to the engine, and says of which tokens they are.
    fn hand_back(&mut self, exchanged: Exchanged) -> Range<usize> {
        let Exchanged {
            duplicates,
            replaced,
        } = exchanged;
        self.prefixes.kv_mut().hand_back(duplicates);
        replaced
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

/// `tokens` go on from the leased prefix, or end within it.
fn check_tokens(ledger: &Ledger, leased: &Leased, tokens: &[u32]) -> Result<(), Misuse> {
    let tree = ledger.prefixes.tree();
    let node = leased.holdings.node;
    if node.is_some_and(|node| !tree.agrees(node, tokens)) {
        let leased = leased.depth;
        return Err(Misuse::PrefixMismatch { leased });
    }
    Ok(())
}

/// What goes on from the leased prefix was computed from its state, so that was loaded.
fn check_loaded(leased: &Leased, depth: usize) -> Result<(), Misuse> {
    if leased.holdings.checkpoint.is_some() && depth > leased.depth {
        return Err(Misuse::NotLoaded);
    }
    Ok(())
}

/// Pages between the lease's depth and `depth`.
fn new_pages(ledger: &Ledger, leased: &Leased, depth: usize) -> usize {
    if ledger.prefixes.has_kv() {
        depth.saturating_sub(leased.depth) / ledger.prefixes.grid().page
    } else {
        0
    }
}

fn check_pages(
    ledger: &Ledger,
    leased: &Leased,
    depth: usize,
    pages: &[u32],
) -> Result<(), Misuse> {
    let kv = ledger.prefixes.kv();
    let new = new_pages(ledger, leased, depth);
    if kv.takes_ids() {
        check_length("pages", pages.len(), new)?;
    }
    kv.check_adoptable(new, pages)
}

fn publish(
    ledger: &mut Ledger,
    cache: u64,
    leased: &mut Leased,
    tokens: &[u32],
    (n, pages): (usize, &[u32]),
    state: Encoded,
) -> Published {
    let admitted = match ledger.admit(leased, tokens, state) {
        Ok(admitted) => admitted,
        Err(skip) => {
            // A duplicate that is not admitted is still being written, and so are its pages: none
            // are shared, where the pages of a duplicate are.
            let skip = match skip {
                Skip::Duplicate => Skip::NotReady,
                other => other,
            };
            return Published {
                outcome: Commit::Skipped(skip),
                replaced: 0..0,
            };
        }
    };
    let adopted = ledger.prefixes.kv_mut().adopt(n, pages);
    let (outcome, exchanged) = ledger.publish(cache, leased, tokens, adopted, admitted);
    Published {
        outcome: outcome.into(),
        replaced: ledger.hand_back(exchanged),
    }
}
