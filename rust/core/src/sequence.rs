//! Running requests: start, grow, checkpoint, end. Built on the ledger alone, like the lower layer
//! in `lease.rs`.

use std::borrow::Cow;

use crate::cache::{Cache, Writing};
use crate::digest::{Decision, tail};
use crate::error::{Error, Misuse, Shortage};
use crate::handle::{Kind, Pending, Sequence};
use crate::key::Namespace;
use crate::ledger::{Holdings, Leased, Ledger, Skip, Stored};
use crate::lookup::{Hit, Match};
use crate::pool::{Checkpoint, Kv, PoolKind, Slot, Slots};

/// The record behind a [`Sequence`].
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) lease: Leased,
    pub(crate) tokens: Vec<u32>,
    /// Positions for which pages are held.
    pub(crate) claimed: usize,
    reused: usize,
    loaded: bool,
    no_store: bool,
}

/// Choices of one [`Cache::start`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartOptions {
    /// Positions to claim pages for; the whole prompt when `None`. A chunked prefill claims its
    /// first chunk.
    pub reserve: Option<usize>,
    /// Reuse at most this many tokens.
    pub max_length: Option<usize>,
    /// Reuse nothing.
    pub no_read: bool,
    /// Store nothing.
    pub no_store: bool,
}

/// How a sequence's state begins. There is no third way to a usable slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The prompt starts from nothing: clear the slot.
    Clear {
        /// Active slot; `None` with an external active pool.
        dst: Option<u32>,
    },
    /// The prompt continues a checkpoint: decode it into the slot.
    Load {
        /// Checkpoint slot.
        src: u32,
        /// Active slot; `None` with an external active pool.
        dst: Option<u32>,
    },
}

/// A sequence that has everything it asked for.
#[derive(Debug)]
pub struct Started {
    /// Owns the slots, pages and pins.
    pub sequence: Sequence,
    /// What was reused.
    pub matched: Match,
    /// What to do with the active slot before calling [`Cache::loaded`].
    pub begin: Begin,
}

/// Result of reserving a checkpoint.
#[derive(Debug)]
pub enum Reservation {
    /// Encode into its slot, then commit.
    Pending(Pending),
    /// Nothing is to be stored.
    Skipped(Skip),
}

/// Result of committing a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Commit {
    /// It is in the tree.
    Stored(Stored),
    /// It is not, and its slot was given back.
    Skipped(Skip),
}

impl From<Result<Stored, Skip>> for Commit {
    fn from(outcome: Result<Stored, Skip>) -> Self {
        match outcome {
            Ok(stored) => Self::Stored(stored),
            Err(skip) => Self::Skipped(skip),
        }
    }
}

/// What a sequence holds, read in place.
#[derive(Clone, Copy)]
pub struct SequenceView<'a> {
    running: &'a Running,
    ledger: &'a Ledger,
}

impl<'a> SequenceView<'a> {
    /// The slot of the running state; `None` with an external active pool.
    pub fn slot(self) -> Option<u32> {
        self.slots().next()
    }

    /// All active slots, that of the running state first.
    pub fn slots(self) -> impl Iterator<Item = u32> + 'a {
        self.running.lease.holdings.active.ids()
    }

    /// Tokens whose KV and state came from the cache at the start.
    pub fn reused(self) -> usize {
        self.running.reused
    }

    /// Every token known so far.
    pub fn tokens(self) -> &'a [u32] {
        &self.running.tokens
    }

    /// Positions for which pages are held.
    pub fn claimed(self) -> usize {
        self.running.claimed
    }

    /// Depth up to which KV pages are shared with the tree.
    pub fn leased(self) -> usize {
        self.running.lease.depth
    }

    /// Page ids of positions `0..claimed`, shared ones first. With an external KV pool only the
    /// shared ones.
    pub fn pages(self) -> Vec<u32> {
        let holdings = &self.running.lease.holdings;
        let mut pages = holdings
            .node
            .map_or_else(Vec::new, |node| self.ledger.prefixes.tree.path_pages(node));
        holdings.pages.write_ids(&mut pages);
        pages
    }
}

impl Running {
    /// Private pages that a deeper lease at `depth` takes over or replaces.
    fn pages_to(&mut self, depth: usize, page: usize) -> Slots<Kv> {
        let pages = &mut self.lease.holdings.pages;
        let rest = pages.split_off(depth.saturating_sub(self.lease.depth) / page);
        std::mem::replace(pages, rest)
    }

    /// Pages held beyond the leased ones must cover what is claimed.
    fn private_pages(&self, ledger: &Ledger) -> usize {
        ledger.pages_for(self.claimed) - ledger.pages_for(self.lease.depth)
    }

    /// Depth up to which the sequence has both tokens and pages.
    fn written(&self) -> usize {
        self.tokens.len().min(self.claimed)
    }

    fn check_source(&self, ledger: &Ledger, depth: usize, source: u32) -> Result<(), Misuse> {
        check_depth(ledger, depth)?;
        let known = if ledger.active.config().external {
            ledger.active.in_range(source)
        } else {
            self.lease.holdings.active.ids().any(|slot| slot == source)
        };
        match () {
            () if depth > self.written() => Err(Misuse::DepthPastEnd {
                depth,
                end: self.written(),
            }),
            () if !known => Err(Misuse::NotYourSlot { slot: source }),
            () if !self.loaded => Err(Misuse::NotLoaded),
            () => Ok(()),
        }
    }
}

pub(crate) fn check_depth(ledger: &Ledger, depth: usize) -> Result<(), Misuse> {
    let legal = ledger.prefixes.grid.legal;
    if depth.is_multiple_of(legal) {
        Ok(())
    } else {
        Err(Misuse::Unaligned { depth, legal })
    }
}

/// A slot in a digest; no slot has id 0.
fn number(slot: Option<u32>) -> u64 {
    slot.unwrap_or_default().into()
}

/// One prompt of [`Cache::start_many`].
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Where its keys live.
    pub namespace: &'a Namespace,
    /// The prompt.
    pub tokens: &'a [u32],
    /// Choices.
    pub options: StartOptions,
}

impl Cache {
    /// Starts a request, all or nothing: pins what it reuses, takes an active slot and the pages it
    /// reserves.
    ///
    /// Feasibility is judged with its own pins in place, and exactly the missing pages are evicted.
    /// The sequence keeps the tokens: a `Vec` is moved in, a slice is copied.
    ///
    /// # Errors
    /// [`Shortage`] when a pool is short: nothing was evicted or refreshed.
    /// [`Misuse::EmptyPrompt`].
    pub fn start<'a>(
        &mut self,
        namespace: &Namespace,
        tokens: impl Into<Cow<'a, [u32]>>,
        options: StartOptions,
    ) -> Result<Started, Error> {
        self.settle();
        self.attempt(|cache| cache.try_start(namespace, tokens.into(), options))
    }

    fn try_start(
        &mut self,
        namespace: &Namespace,
        tokens: Cow<'_, [u32]>,
        options: StartOptions,
    ) -> Result<Started, Error> {
        let hit = self.find(namespace, &tokens, options.max_length)?;
        let hit = if options.no_read { Hit::NOTHING } else { hit };
        let reserve = options.reserve.unwrap_or(tokens.len());
        self.ledger.feasible(reserve.max(tokens.len()))?;

        let claimed = reserve.max(hit.length);
        let pages = self.ledger.pages_for(claimed) - self.ledger.pages_for(hit.length);
        let mut lease = self.ledger.lease(namespace, hit);
        match self.ledger.claim(pages) {
            Ok(Holdings { pages, active, .. }) => {
                lease.holdings = Holdings {
                    pages,
                    active,
                    ..lease.holdings
                };
            }
            Err(short) => {
                self.ledger.release(lease.holdings);
                return Err(short.into());
            }
        }
        self.ledger.stats.starts += 1;
        if !options.no_read {
            self.ledger.consume(hit);
        }
        let (tokens, reused) = (tokens.into_owned(), hit.length);
        let running = Running {
            lease,
            tokens,
            claimed,
            reused,
            loaded: false,
            no_store: options.no_store,
        };
        Ok(self.admit(running, self.describe(namespace, hit)))
    }

    /// A scheduler step's worth of starts, in order; each succeeds or fails on its own.
    pub fn start_many<'a>(
        &mut self,
        requests: impl IntoIterator<Item = Request<'a>>,
    ) -> Vec<Result<Started, Error>> {
        let start = |Request {
                         namespace,
                         tokens,
                         options,
                     }| self.start(namespace, tokens, options);
        requests.into_iter().map(start).collect()
    }

    /// The load or clear of the sequence's slot is enqueued: the checkpoint it came from may be
    /// evicted again (with steps in flight, when they have retired), and the slot may be the
    /// source of checkpoints.
    ///
    /// # Errors
    /// [`Misuse::AlreadyLoaded`].
    pub fn loaded(&mut self, sequence: &Sequence) -> Result<(), Misuse> {
        let running = self.running(sequence)?;
        if std::mem::replace(&mut running.loaded, true) {
            return Err(Misuse::AlreadyLoaded);
        }
        let checkpoint = running.lease.holdings.checkpoint.take();
        self.note(Decision::Loaded, [sequence.0.serial]);
        self.ledger.give_back(Holdings {
            checkpoint,
            ..Holdings::default()
        });
        Ok(())
    }

    /// What the sequence holds.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn view(&self, sequence: &Sequence) -> Result<SequenceView<'_>, Misuse> {
        self.own(&sequence.0)?;
        Ok(SequenceView {
            running: &self.sequences[sequence.0.key],
            ledger: &self.ledger,
        })
    }

    /// Claims pages for `n` further tokens that need not be known yet, evicting exactly what is
    /// missing.
    ///
    /// # Errors
    /// [`Shortage`]: nothing has changed.
    pub fn grow(&mut self, sequence: &Sequence, n: usize) -> Result<(), Error> {
        self.running(sequence)?;
        self.note(Decision::Grow, [sequence.0.serial, n as u64]);
        self.attempt(|cache| cache.try_grow(sequence, n))
    }

    fn try_grow(&mut self, sequence: &Sequence, n: usize) -> Result<(), Error> {
        let running = &mut self.sequences[sequence.0.key];
        let claimed = running.claimed.saturating_add(n);
        self.ledger.feasible(claimed)?;
        let wanted = self.ledger.pages_for(claimed) - self.ledger.pages_for(running.claimed);
        let pages = self.ledger.claim_pages(wanted)?;
        running.lease.holdings.pages.append(pages);
        running.claimed = claimed;
        Ok(())
    }

    /// Fills claimed positions with tokens that are now known.
    ///
    /// # Errors
    /// [`Misuse::NotClaimed`].
    pub fn append(&mut self, sequence: &Sequence, tokens: &[u32]) -> Result<(), Misuse> {
        let running = self.running(sequence)?;
        let wanted = running.tokens.len() + tokens.len();
        if wanted > running.claimed {
            return Err(Misuse::NotClaimed {
                wanted,
                claimed: running.claimed,
            });
        }
        running.tokens.extend_from_slice(tokens);
        self.note(Decision::Append, [sequence.0.serial, tail(tokens)]);
        Ok(())
    }

    /// Gives back the claim on positions past the appended tokens, as after a verify that accepted
    /// only some.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn shrink(&mut self, sequence: &Sequence) -> Result<(), Misuse> {
        self.running(sequence)?;
        let running = &mut self.sequences[sequence.0.key];
        running.claimed = running.written();
        let keep = running.private_pages(&self.ledger);
        let pages = running.lease.holdings.pages.split_off(keep);
        self.note(Decision::Shrink, [sequence.0.serial]);
        self.ledger.give_back(Holdings {
            pages,
            ..Holdings::default()
        });
        Ok(())
    }

    /// A further active slot, for kernels that write an intermediate state while the request goes
    /// on.
    ///
    /// # Errors
    /// [`Shortage`]; [`Misuse::PoolMode`] with an external active pool.
    pub fn take_slot(&mut self, sequence: &Sequence) -> Result<u32, Error> {
        self.running(sequence)?;
        let id = self.attempt(|cache| cache.try_take_slot(sequence))?;
        self.note(Decision::TakeSlot, [sequence.0.serial, id.into()]);
        Ok(id)
    }

    fn try_take_slot(&mut self, sequence: &Sequence) -> Result<u32, Error> {
        let Ledger { active, .. } = &mut self.ledger;
        if active.config().external {
            return Err(
                Misuse::PoolMode("the engine allocates active slots: take one there").into(),
            );
        }
        let (holdings, capacity) = (
            &mut self.sequences[sequence.0.key].lease.holdings,
            active.config().capacity as usize,
        );
        let wanted = holdings.active.len() + 1;
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Active,
                wanted,
                capacity,
            }
            .into());
        }
        let slot = active.take()?;
        let id = slot.id();
        holdings.active.append(slot.into());
        Ok(id)
    }

    /// Takes a checkpoint slot for the state in `source`, which its writer says has exactly `depth`
    /// tokens. Evicts if needed. Storing is optional work: want of room is not an error.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`], [`Misuse::DepthPastEnd`], [`Misuse::NotYourSlot`],
    /// [`Misuse::NotLoaded`].
    pub fn reserve_checkpoint(
        &mut self,
        sequence: &Sequence,
        depth: usize,
        source: u32,
    ) -> Result<Reservation, Misuse> {
        self.check_checkpoint(sequence, depth, source)?;
        self.settle();
        let running = &self.sequences[sequence.0.key];
        let slot = if running.no_store {
            self.ledger.stats.refusals.no_store += 1;
            Err(Skip::NoStore)
        } else {
            self.ledger
                .reserve(&running.lease, &running.tokens[..depth])
        };
        Ok(self.pend(sequence.0.serial, depth, slot))
    }

    /// Publishes tokens, pages and state together, or nothing. Consumes the pending checkpoint in
    /// every case.
    ///
    /// Private pages that turn out to be cached already are replaced by the cached ones in the same
    /// operation; read the sequence's pages again when [`Stored::replaced`] is not empty or the
    /// result is [`Skip::Duplicate`].
    ///
    /// # Errors
    /// [`Misuse::NotYourPending`]; [`Misuse::PoolMode`] with an external KV pool, see
    /// [`Cache::commit_pages`].
    pub fn commit(&mut self, sequence: &Sequence, pending: Pending) -> Result<Commit, Misuse> {
        self.check_commit(sequence, &pending)?;
        self.settle();
        let running = &self.sequences[sequence.0.key];
        if let Err(skip) = self.ledger.check_current(&running.lease) {
            return Ok(Commit::Skipped(skip));
        }
        let depth = pending.depth;
        let state = self.writing(pending);
        let running = &mut self.sequences[sequence.0.key];
        let pages = running.pages_to(depth, self.ledger.prefixes.grid.page);
        let (lease, tokens) = (&mut running.lease, &running.tokens[..depth]);
        let (outcome, pages) = self
            .ledger
            .publish(self.inbox.cache, lease, tokens, pages, state);
        self.ledger.give_back(Holdings {
            pages,
            ..Holdings::default()
        });
        Ok(outcome.into())
    }

    /// Ends a reservation whose encoded state turned out not to be finite: its slot goes back, and
    /// it is counted.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`]: the slot then goes back in its own cache.
    pub fn discard(&mut self, pending: Pending) -> Result<Skip, Misuse> {
        self.own(&pending.handle)?;
        self.settle();
        self.note(Decision::End, [pending.handle.serial]);
        let state = Some(self.writing(pending));
        self.ledger.give_back(Holdings {
            state,
            ..Holdings::default()
        });
        self.ledger.stats.refusals.non_finite += 1;
        Ok(Skip::NonFinite)
    }

    /// Asks, before [`Cache::discard`] consumes it, whether a pending checkpoint was reserved in
    /// this cache.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn check_pending(&self, pending: &Pending) -> Result<(), Misuse> {
        self.own(&pending.handle)
    }

    /// Asks, before it consumes the pending checkpoint, whether [`Cache::commit`] is allowed.
    ///
    /// # Errors
    /// As [`Cache::commit`].
    pub fn check_commit(&self, sequence: &Sequence, pending: &Pending) -> Result<(), Misuse> {
        self.own(&sequence.0)?;
        if self.ledger.has_kv() && !self.ledger.allocates_kv() {
            return Err(Misuse::PoolMode(
                "the engine owns the kv pages: commit_pages names them",
            ));
        }
        self.check_reserved_by(sequence.0.serial, pending)
    }

    /// Asks, before anything is evicted for it, whether [`Cache::reserve_checkpoint`] is allowed.
    ///
    /// # Errors
    /// As [`Cache::reserve_checkpoint`].
    pub fn check_checkpoint(
        &self,
        sequence: &Sequence,
        depth: usize,
        source: u32,
    ) -> Result<(), Misuse> {
        self.own(&sequence.0)?;
        self.sequences[sequence.0.key].check_source(&self.ledger, depth, source)
    }

    /// Ends a request. Gives back its slots, private pages and pins: now, or when the steps in
    /// flight have retired.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`]: the sequence then ends in its own cache.
    pub fn finish(&mut self, sequence: Sequence) -> Result<(), Misuse> {
        self.running(&sequence)?;
        self.note(Decision::End, [sequence.0.serial]);
        let running = self.sequences.remove(sequence.0.disarm());
        self.ledger.give_back(running.lease.holdings);
        Ok(())
    }

    /// Ends a request that did not complete. The same path as [`Cache::finish`]: a retracted
    /// request that was checkpointed before is resumed by [`Cache::start`].
    ///
    /// # Errors
    /// As [`Cache::finish`].
    pub fn abort(&mut self, sequence: Sequence) -> Result<(), Misuse> {
        self.finish(sequence)
    }

    /// Settles, then finds the record of a sequence of this cache.
    fn running(&mut self, sequence: &Sequence) -> Result<&mut Running, Misuse> {
        self.own(&sequence.0)?;
        self.settle();
        Ok(&mut self.sequences[sequence.0.key])
    }

    fn admit(&mut self, running: Running, matched: Match) -> Started {
        let dst = running.lease.holdings.active.ids().next();
        let numbers = [
            tail(&running.tokens),
            running.reused as u64,
            running.claimed as u64,
            number(dst),
        ];
        self.note(Decision::Start, numbers);
        let begin = match self.state_of(&running.lease) {
            Some(src) => Begin::Load { src, dst },
            None => Begin::Clear { dst },
        };
        let key = self.sequences.insert(running);
        let sequence = Sequence(self.handle(Kind::Sequence, key));
        Started {
            sequence,
            matched,
            begin,
        }
    }

    pub(crate) fn pend(
        &mut self,
        owner: u64,
        depth: usize,
        slot: Result<Slot<Checkpoint>, Skip>,
    ) -> Reservation {
        self.note(
            Decision::Reserve,
            [
                owner,
                depth as u64,
                number(slot.as_ref().ok().map(Slot::id)),
            ],
        );
        let slot = match slot {
            Ok(slot) => slot,
            Err(skip) => return Reservation::Skipped(skip),
        };
        let id = slot.id();
        let holdings = Holdings {
            state: Some(slot),
            ..Holdings::default()
        };
        let key = self.pending.insert(Writing { owner, holdings });
        Reservation::Pending(Pending {
            handle: self.handle(Kind::Pending, key),
            slot: id,
            depth,
        })
    }

    pub(crate) fn check_reserved_by(&self, owner: u64, pending: &Pending) -> Result<(), Misuse> {
        self.own(&pending.handle)?;
        if self.pending[pending.handle.key].owner == owner {
            Ok(())
        } else {
            Err(Misuse::NotYourPending)
        }
    }

    /// Takes the slot out of a pending checkpoint.
    pub(crate) fn writing(&mut self, pending: Pending) -> Slot<Checkpoint> {
        self.note(Decision::Publish, [pending.handle.serial]);
        let Writing { holdings, .. } = self.pending.remove(pending.handle.disarm());
        holdings.state.expect("a pending checkpoint holds its slot")
    }
}
