//! Running requests: start, grow, checkpoint, end. Built on the ledger alone, like the lower layer
//! in `engine.rs`.

use std::borrow::Cow;

use crate::cache::Cache;
use crate::checkpoint::{Commit, Rejected, Reservation, Skip, check_depth};
use crate::digest::tail;
use crate::error::{Error, Misuse};
use crate::event::Event;
use crate::further::Depths;
use crate::handle::{Kind, Pending, Sequence};
use crate::ledger::{Holdings, Leased, Ledger};
use crate::lookup::{Match, Reusable};
use crate::namespace::Namespace;
use crate::outline::Outline;
use crate::pool::{KvPage, Slots};

/// The record behind a [`Sequence`].
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) lease: Leased,
    pub(crate) tokens: Vec<u32>,
    /// Positions for which pages are held.
    pub(crate) claimed: usize,
    reused: usize,
    /// Depth at which a checkpoint would have helped it at its start.
    branch: Option<usize>,
    loaded: bool,
    no_store: bool,
    /// How deep the state in each of its slots has come.
    pub(crate) depths: Depths,
}

/// Choices of one [`Cache::start`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Active slots to take, that of the running state included: at least 1. The others are as from
    /// [`Cache::take_slot`].
    pub slots: usize,
}

impl Default for StartOptions {
    fn default() -> Self {
        Self {
            reserve: None,
            max_length: None,
            no_read: false,
            no_store: false,
            slots: 1,
        }
    }
}

/// How a sequence's state begins. There is no third way to a usable slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The prompt starts from nothing: clear the slot.
    Clear {
        /// Active slot.
        dst: u32,
    },
    /// The prompt continues a checkpoint: decode it into the slot.
    Load {
        /// Checkpoint slot.
        src: u32,
        /// Active slot.
        dst: u32,
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

/// What a sequence holds, read in place.
#[derive(Clone, Copy)]
pub struct SequenceView<'a> {
    running: &'a Running,
    ledger: &'a Ledger,
}

impl<'a> SequenceView<'a> {
    /// The slot of the running state.
    pub fn slot(self) -> u32 {
        self.running.slot()
    }

    /// All active slots, that of the running state first.
    pub fn slots(self) -> impl Iterator<Item = u32> + 'a {
        self.running.lease.holdings.active.ids()
    }

    /// Tokens whose KV and state came from the cache at the start.
    pub fn reused(self) -> usize {
        self.running.reused
    }

    /// Depth at which a checkpoint would have helped this request at its start.
    pub(crate) fn branch(self) -> Option<usize> {
        self.running.branch
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

    /// Page ids of positions `0..claimed`, shared ones first.
    pub fn pages(self) -> Vec<u32> {
        let holdings = &self.running.lease.holdings;
        let mut pages = holdings.node.map_or_else(Vec::new, |node| {
            self.ledger.prefixes.tree().path_pages(node)
        });
        holdings.pages.write_ids(&mut pages);
        pages
    }
}

impl Running {
    pub(crate) fn slot(&self) -> u32 {
        let mut slots = self.lease.holdings.active.ids();
        slots.next().expect("a sequence has the slot of its state")
    }

    /// Private pages that a deeper lease at `depth` takes over or replaces.
    fn pages_to(&mut self, depth: usize, page: usize) -> Slots<KvPage> {
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
        if depth > self.written() {
            let end = self.written();
            return Err(Misuse::DepthPastEnd { depth, end });
        }
        let mut slots = self.lease.holdings.active.ids();
        if !slots.any(|slot| slot == source) {
            return Err(Misuse::NotYourSlot { slot: source });
        }
        if !self.loaded {
            return Err(Misuse::NotLoaded);
        }
        let reached = self.depths.reached(source).unwrap_or(self.reused);
        if depth < reached {
            return Err(Misuse::DepthPassed {
                depth,
                slot: source,
                reached,
            });
        }
        Ok(())
    }
}

/// One prompt of [`Cache::start_many`].
#[derive(Debug, Clone, Copy)]
pub struct StartRequest<'a> {
    /// Where its keys live.
    pub namespace: &'a Namespace,
    /// The prompt.
    pub tokens: &'a [u32],
    /// Choices.
    pub options: StartOptions,
}

impl Cache {
    /// Starts a request, all or nothing: pins what it reuses, takes its active slots and the pages
    /// it reserves.
    ///
    /// Feasibility is judged with its own pins in place, and exactly the missing pages are evicted.
    /// The sequence keeps the tokens: a `Vec` is moved in, a slice is copied.
    ///
    /// # Errors
    /// [`Shortage`](crate::Shortage) when a pool is short: nothing was evicted or refreshed.
    /// [`Misuse::EmptyPrompt`]; [`Misuse::Config`] for 0 slots.
    pub fn start<'a>(
        &mut self,
        namespace: &Namespace,
        tokens: impl Into<Cow<'a, [u32]>>,
        options: StartOptions,
    ) -> Result<Started, Error> {
        self.collect_dropped();
        self.attempt(|cache| cache.try_start(namespace, tokens.into(), options))
    }

    fn try_start(
        &mut self,
        namespace: &Namespace,
        tokens: Cow<'_, [u32]>,
        options: StartOptions,
    ) -> Result<Started, Error> {
        let mut reusable = self.find(namespace, &tokens, options.max_length)?;
        if options.no_read {
            reusable = Reusable::NOTHING;
        }
        let slots = options.slots;
        if slots == 0 {
            let why = "a sequence has at least 1 active slot, got slots=0";
            return Err(Misuse::Config(why.into()).into());
        }
        let reserve = options.reserve.unwrap_or(tokens.len());
        self.ledger.feasible(reserve.max(tokens.len()))?;
        self.ledger.feasible_slots(slots)?;

        let claimed = reserve.max(reusable.length);
        let pages = self.ledger.pages_for(claimed) - self.ledger.pages_for(reusable.length);
        let mut lease = self.ledger.lease(namespace, reusable);
        match self.ledger.claim(pages, slots) {
            Ok(Holdings { pages, active, .. }) => {
                lease.holdings.pages = pages;
                lease.holdings.active = active;
            }
            Err(short) => {
                // Released at once, not given back: no step can have touched a pin that is a moment
                // old.
                self.ledger.release(lease.holdings);
                return Err(short.into());
            }
        }
        let outline = self.ledger.prefixes.outline(namespace, &tokens);
        lease.request = self.ledger.begin(outline);
        if !options.no_read {
            self.ledger.consume(reusable);
        }
        let running = Running {
            lease,
            tokens: tokens.into_owned(),
            claimed,
            reused: reusable.length,
            branch: reusable.branch,
            loaded: false,
            no_store: options.no_store,
            depths: Depths::default(),
        };
        let matched = self.describe(namespace, reusable, Outline::default());
        Ok(self.admit(running, matched))
    }

    /// A scheduler step's worth of starts, in order; each succeeds or fails on its own.
    pub fn start_many<'a>(
        &mut self,
        requests: impl IntoIterator<Item = StartRequest<'a>>,
    ) -> Vec<Result<Started, Error>> {
        let start = |StartRequest {
                         namespace,
                         tokens,
                         options,
                     }| self.start(namespace, tokens, options);
        requests.into_iter().map(start).collect()
    }

    /// Reports that the load or clear of the sequence's slot is enqueued. From now on the slot may
    /// be the source of checkpoints, and the checkpoint it came from may be evicted again (with
    /// steps in flight, when they have retired).
    ///
    /// # Errors
    /// [`Misuse::AlreadyLoaded`].
    pub fn loaded(&mut self, sequence: &Sequence) -> Result<(), Misuse> {
        let running = self.running(sequence)?;
        if std::mem::replace(&mut running.loaded, true) {
            return Err(Misuse::AlreadyLoaded);
        }
        let checkpoint = running.lease.holdings.checkpoint.take();
        self.ledger.emit(Event::Loaded {
            owner: sequence.0.serial,
        });
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
    /// [`Shortage`](crate::Shortage): nothing has changed.
    pub fn grow(&mut self, sequence: &Sequence, n: usize) -> Result<(), Error> {
        self.running(sequence)?;
        self.ledger.emit(Event::Grow {
            owner: sequence.0.serial,
            by: n,
        });
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
        self.ledger.emit(Event::Append {
            owner: sequence.0.serial,
            tokens: tail(tokens),
        });
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
        self.ledger.emit(Event::Shrink {
            owner: sequence.0.serial,
        });
        self.ledger.give_back(Holdings {
            pages,
            ..Holdings::default()
        });
        Ok(())
    }

    /// Takes a checkpoint slot for the state in `source`, which its writer says has exactly `depth`
    /// tokens. Evicts if needed. Storing is optional work: want of room is not an error.
    ///
    /// A state only goes deeper, so `depth` is at least what the sequence reused, and at least what
    /// was reserved from this slot before, whatever became of that.
    ///
    /// # Errors
    /// [`Misuse::Unaligned`], [`Misuse::DepthPastEnd`], [`Misuse::NotYourSlot`],
    /// [`Misuse::NotLoaded`], [`Misuse::DepthPassed`].
    pub fn reserve_checkpoint(
        &mut self,
        sequence: &Sequence,
        depth: usize,
        source: u32,
    ) -> Result<Reservation, Misuse> {
        self.running(sequence)?;
        self.sequences[sequence.0.key].check_source(&self.ledger, depth, source)?;
        let running = &mut self.sequences[sequence.0.key];
        running.depths.reach(source, depth);
        let slot = if running.no_store {
            self.ledger.emit(Event::Skip(Skip::NoStore));
            Err(Skip::NoStore)
        } else {
            let tokens = &running.tokens[..depth];
            self.ledger.reserve(&running.lease, tokens)
        };
        Ok(self.pend(sequence.0.serial, depth, slot))
    }

    /// [`Cache::reserve_checkpoint`] for several states: sequence, depth and source of each. If a
    /// rule is broken none is reserved and nothing is evicted.
    ///
    /// # Errors
    /// As [`Cache::reserve_checkpoint`]; [`Misuse::DepthPassed`] also for a slot that is named with
    /// two depths.
    pub fn reserve_checkpoints(
        &mut self,
        states: &[(&Sequence, usize, u32)],
    ) -> Result<Vec<Reservation>, Misuse> {
        let mut depths = Depths::default();
        for &(sequence, depth, slot) in states {
            self.own(&sequence.0)?;
            self.sequences[sequence.0.key].check_source(&self.ledger, depth, slot)?;
            let other = depths.reached(slot).unwrap_or(depth);
            if other != depth {
                return Err(Misuse::DepthPassed {
                    depth: depth.min(other),
                    slot,
                    reached: depth.max(other),
                });
            }
            depths.reach(slot, depth);
        }
        let reserve = |&(sequence, depth, source): &(&Sequence, usize, u32)| {
            self.reserve_checkpoint(sequence, depth, source)
        };
        states.iter().map(reserve).collect()
    }

    /// Publishes tokens, pages and state together, or nothing.
    ///
    /// Private pages that turn out to be cached already are replaced by the cached ones in the same
    /// operation; read the sequence's pages again when [`Stored::replaced`](crate::Stored) is not
    /// empty or the result is [`Skip::Duplicate`].
    ///
    /// # Errors
    /// [`Misuse::NotYourPending`], [`Misuse::WrongCache`]. The pending checkpoint comes back with
    /// the error.
    pub fn commit(&mut self, sequence: &Sequence, pending: Pending) -> Result<Commit, Rejected> {
        let allowed = self.own(&sequence.0);
        let allowed = allowed.and_then(|()| self.check_reserved_by(sequence.0.serial, &pending));
        let pending = Rejected::unless(allowed, pending)?;
        self.collect_dropped();
        let depth = pending.depth;
        let state = self.encoded(pending);
        let running = &mut self.sequences[sequence.0.key];
        let tokens = &running.tokens[..depth];
        let admitted = match self.ledger.admit(&running.lease, tokens, state) {
            Ok(admitted) => admitted,
            Err(skip) => return Ok(Commit::Skipped(skip)),
        };
        let pages = running.pages_to(depth, self.ledger.prefixes.grid().page);
        let tokens = &running.tokens[..depth];
        let lease = &mut running.lease;
        let cache = self.inbox.cache;
        let (outcome, exchanged) = self.ledger.publish(cache, lease, tokens, pages, admitted);
        self.ledger.give_back(Holdings {
            pages: exchanged.duplicates,
            ..Holdings::default()
        });
        Ok(outcome.into())
    }

    /// Ends a request. Gives back its slots, private pages and pins: now, or when the steps in
    /// flight have retired.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`]: the sequence then ends in its own cache.
    pub fn finish(&mut self, sequence: Sequence) -> Result<(), Misuse> {
        self.running(&sequence)?;
        self.ledger.emit(Event::End {
            owner: sequence.0.serial,
        });
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

    /// Collects dropped handles, then finds the record of a sequence of this cache.
    pub(crate) fn running(&mut self, sequence: &Sequence) -> Result<&mut Running, Misuse> {
        self.own(&sequence.0)?;
        self.collect_dropped();
        Ok(&mut self.sequences[sequence.0.key])
    }

    fn admit(&mut self, running: Running, matched: Match) -> Started {
        let dst = running.slot();
        self.ledger.emit(Event::Start {
            prompt: tail(&running.tokens),
            reused: running.reused,
            claimed: running.claimed,
            slot: dst,
        });
        let begin = match self.state_of(&running.lease) {
            Some(src) => Begin::Load { src, dst },
            None => Begin::Clear { dst },
        };
        let key = self.sequences.insert(running);
        let sequence = Sequence(self.handle(Kind::Sequence, key));
        let owner = sequence.0.serial;
        let slots = &self.sequences[key].lease.holdings.active;
        if slots.len() > 1 {
            let further = slots.ids().skip(1);
            further.for_each(|slot| self.ledger.emit(Event::TakeSlot { owner, slot }));
        }
        Started {
            sequence,
            matched,
            begin,
        }
    }
}
