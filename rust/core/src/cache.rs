//! The cache: its configuration, and the operations that concern no single request.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use slab::Slab;

use crate::checkpoint::{Reserved, Stored};
use crate::error::{Error, Misuse};
use crate::event::{Cause, Event};
use crate::handle::{Dropped, Handle, Inbox, Kind, Step, StepId};
use crate::ledger::{Leased, Ledger};
use crate::lookup::{Match, Reusable};
use crate::namespace::Namespace;
use crate::outline::Outline;
use crate::policy::{Lru, Policy};
use crate::pool::{OwnPages, PageOwner, Pool, PoolConfig, PoolKind, Usage};
use crate::prefixes::{Freed, Prefixes};
use crate::sequence::Running;
use crate::stats::Stats;
use crate::tree::Grid;

/// Geometry and sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config<O = OwnPages> {
    /// Tokens of one KV page; also the granularity at which prefixes match.
    pub page_size: u32,
    /// Tokens between the depths at which the engine can cut off a state.
    pub checkpoint_stride: u32,
    /// KV pages; capacity 0 for a purely linear model.
    pub kv: PoolConfig<O>,
    /// States of running requests that the cache hands out; capacity 0 where the engine does.
    pub active: PoolConfig,
    /// States of cached prefixes.
    pub checkpoints: PoolConfig,
}

impl Config {
    /// A model without attention: no KV, prefixes match by single tokens.
    pub fn linear(checkpoint_stride: u32, active: PoolConfig, checkpoints: PoolConfig) -> Self {
        Self {
            page_size: 1,
            checkpoint_stride,
            kv: PoolConfig::internal(0),
            active,
            checkpoints,
        }
    }
}

impl<O: PageOwner> Config<O> {
    fn grid(&self) -> Result<Grid, Misuse> {
        let Self {
            page_size,
            checkpoint_stride,
            kv,
            checkpoints,
            ..
        } = *self;
        let refuse = |why: String| Err(Misuse::Config(why));
        if page_size == 0 || checkpoint_stride == 0 {
            return refuse(format!(
                "page size {page_size} and checkpoint stride {checkpoint_stride} must be at least 1"
            ));
        }
        if checkpoints.capacity == 0 {
            return refuse("the checkpoint pool has 0 slots: nothing could ever be reused".into());
        }
        self.check_sizes()?;
        let Some(grid) = Grid::new(page_size, checkpoint_stride) else {
            return refuse(format!(
                "lcm of page size {page_size} and checkpoint stride {checkpoint_stride} exceeds 32 bits"
            ));
        };
        let positions = kv.capacity as usize * grid.page;
        if kv.capacity > 0 && positions <= grid.legal {
            return refuse(format!(
                "{} kv pages of {} tokens hold {positions} tokens, no more than the first legal depth {}: a prompt that reuses it needs one more",
                kv.capacity, grid.page, grid.legal
            ));
        }
        Ok(grid)
    }

    /// Ids fit into the int32 of page tables and kernels, bytes in use into a counter.
    fn check_sizes(&self) -> Result<(), Misuse> {
        let pools = [
            ("kv pages", self.kv.sizes()),
            ("active slots", self.active),
            ("checkpoint slots", self.checkpoints),
        ];
        for (units, pool) in pools {
            let (capacity, bytes) = (pool.capacity, pool.unit_bytes);
            if capacity > i32::MAX as u32 {
                return Err(Misuse::Config(format!(
                    "{capacity} {units}: ids must fit into an int32, so there are at most {}",
                    i32::MAX
                )));
            }
            if u64::from(capacity).checked_mul(bytes).is_none() {
                return Err(Misuse::Config(format!(
                    "{capacity} {units} of {bytes} bytes exceed 64 bits"
                )));
            }
        }
        Ok(())
    }
}

/// A prefix cache for recurrent states. See the crate's documentation for how its operations fit
/// together.
///
/// The type parameter says who allocates the KV pages. With [`OwnPages`], which is the default, the
/// cache does, and requests are [`Sequence`](crate::Sequence)s. With [`EnginePages`](crate::EnginePages)
/// or [`LogicalPages`](crate::LogicalPages) the engine does, and requests are [`Lease`](crate::Lease)s.
pub struct Cache<O = OwnPages> {
    pub(crate) ledger: Ledger,
    pub(crate) leases: Slab<Leased>,
    pub(crate) sequences: Slab<Running>,
    pub(crate) pending: Slab<Reserved>,
    pub(crate) inbox: Arc<Inbox>,
    pages: PhantomData<O>,
}

/// A stored state that is not yet known to be finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unproven {
    /// The ticket to [complete](Cache::complete).
    pub ticket: u64,
    /// Its checkpoint slot. Nobody else gets it before the ticket is completed.
    pub slot: u32,
    /// The step that writes it, while that is in flight: nobody ends it again afterwards.
    pub step: Option<u64>,
}

/// How work that was in flight has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As planned: what it wrote can be used.
    Done,
    /// It did not run to its end, or wrote a value that is not finite. What it wrote is never used.
    Failed,
}

impl<O> fmt::Debug for Cache<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ledger {
            prefixes, active, ..
        } = &self.ledger;
        f.debug_struct("Cache")
            .field("kv", &prefixes.kv().usage())
            .field("active", &active.usage())
            .field("checkpoints", &prefixes.checkpoints().usage())
            .field("sequences", &self.sequences.len())
            .finish_non_exhaustive()
    }
}

impl<O: PageOwner> Cache<O> {
    /// An empty cache that evicts the least recently used checkpoint first.
    ///
    /// # Errors
    /// [`Misuse::Config`] for a geometry in which no prefix could ever be reused.
    pub fn new(config: Config<O>) -> Result<Self, Misuse> {
        Self::with_policy(config, Box::new(Lru::default()))
    }

    /// An empty cache that evicts as `policy` says.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn with_policy(config: Config<O>, policy: Box<dyn Policy>) -> Result<Self, Misuse> {
        let grid = config.grid()?;
        let prefixes = Prefixes::new(
            grid,
            Pool::new(config.kv),
            Pool::new(config.checkpoints),
            policy,
        );
        Ok(Self {
            ledger: Ledger::new(prefixes, Pool::new(config.active)),
            leases: Slab::new(),
            sequences: Slab::new(),
            pending: Slab::new(),
            inbox: Arc::new(Inbox::new()),
            pages: PhantomData,
        })
    }

    /// The deepest depth, at most `tokens`, at which a checkpoint may stand: a multiple of
    /// lcm(page size, checkpoint stride), counted from zero.
    pub fn legal_depth(&self, tokens: usize) -> usize {
        self.ledger.prefixes.grid().legal_depth(tokens)
    }

    /// How much of a prompt can be reused, at most `max_length` tokens, and always less than all of
    /// it. Changes nothing that eviction looks at.
    ///
    /// # Errors
    /// [`Misuse::EmptyPrompt`].
    pub fn lookup(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        max_length: Option<usize>,
    ) -> Result<Match, Misuse> {
        self.collect_dropped();
        let reusable = self.find(namespace, tokens, max_length)?;
        self.ledger.emit(Event::Lookup);
        let outline = self.ledger.prefixes.outline(namespace, tokens);
        Ok(self.describe(namespace, reusable, outline))
    }

    /// How much of `tokens` is cached, the whole of them included. For what is no prompt: a prompt
    /// has a last token that is still to be computed.
    ///
    /// # Errors
    /// [`Misuse::EmptyPrompt`].
    pub fn lookup_whole(&mut self, namespace: &Namespace, tokens: &[u32]) -> Result<Match, Misuse> {
        self.collect_dropped();
        if tokens.is_empty() {
            return Err(Misuse::EmptyPrompt);
        }
        let prefixes = &self.ledger.prefixes;
        let reusable = prefixes.find(namespace, tokens, tokens.len());
        self.ledger.emit(Event::Lookup);
        let outline = self.ledger.prefixes.outline(namespace, tokens);
        Ok(self.describe(namespace, reusable, outline))
    }

    /// Makes the deepest checkpoint on the path of `tokens` as recent as if a request had continued
    /// it, for requests that wait and will. Returns its depth, 0 for none.
    pub fn touch(&mut self, namespace: &Namespace, tokens: &[u32]) -> usize {
        self.collect_dropped();
        let reusable = self.ledger.prefixes.find(namespace, tokens, tokens.len());
        if let Some(checkpoint) = reusable.checkpoint {
            let serial = checkpoint.serial;
            self.ledger.emit(Event::Touch { serial });
            let leased = self.ledger.lease(namespace, reusable);
            self.ledger.prefixes.touch(checkpoint.node.index);
            // Released at once: no step can have touched a pin that is a moment old.
            self.ledger.release(leased.holdings);
        }
        reusable.length
    }

    /// Evicts at least `n` units of a pool if it can, and says what it really freed, all pools.
    /// What it frees is usable when it returns. The tree owns no active slot, so it frees none of
    /// those.
    pub fn evict(&mut self, pool: PoolKind, n: usize) -> Freed {
        self.collect_dropped();
        let freed = match pool {
            PoolKind::Kv => self.ledger.prefixes.evict_kv(n),
            PoolKind::Checkpoint => self.ledger.prefixes.evict_checkpoints(n),
            PoolKind::Active => Freed::default(),
        };
        let cause = Cause::Asked;
        self.ledger.emit(Event::Freed { cause, freed });
        self.ledger.emit(Event::Evict { pool, n });
        freed
    }

    /// Declares a step: work that may touch what running sequences hold, until
    /// [`Cache::retire_step`]. Dropping the handle earlier cancels the step.
    pub fn begin_step(&mut self) -> Step {
        self.collect_dropped();
        let step = self.ledger.flight.begin_step();
        self.ledger.emit(Event::BeginStep);
        let key = usize::try_from(step).expect("a counter of steps does not overflow");
        // Not a serial of its own: what was begun first is collected first by its number.
        Step(Handle::new(&self.inbox, 0, Kind::Step, key))
    }

    /// A step has ended as planned. Steps may retire in any order; a repeated one changes nothing,
    /// its `invalid` included. `invalid` are the checkpoints whose writer found a value that is not
    /// finite. No lookup has found them yet, and they are withdrawn as by [`Cache::invalidate`].
    ///
    /// # Errors
    /// [`Misuse::UnknownStep`], [`Misuse::WrongCache`].
    pub fn retire_step(&mut self, step: impl StepId, invalid: &[Stored]) -> Result<(), Misuse> {
        self.collect_dropped();
        let step = self.number_of(&step)?;
        self.end_step(step, invalid, Outcome::Done)
    }

    /// A step has ended, and everything it was to write is lost: the checkpoints stored in it are
    /// withdrawn, and so are those of `invalid`, as in [`Cache::retire_step`]. Repeating it changes
    /// nothing.
    ///
    /// A later step may have stored a state that was computed from what is lost. The cache knows
    /// that only where the later state stands on pages of this step: cancel the later step too.
    ///
    /// # Errors
    /// [`Misuse::UnknownStep`], [`Misuse::WrongCache`].
    pub fn cancel_step(&mut self, step: impl StepId, invalid: &[Stored]) -> Result<(), Misuse> {
        self.collect_dropped();
        let step = self.number_of(&step)?;
        self.end_step(step, invalid, Outcome::Failed)
    }

    /// The number of a step, which is this cache's as far as its name tells.
    fn number_of(&self, step: &impl StepId) -> Result<u64, Misuse> {
        if let Some(cache) = step.cache() {
            self.own_id(cache)?;
        }
        Ok(step.id())
    }

    fn end_step(&mut self, step: u64, invalid: &[Stored], outcome: Outcome) -> Result<(), Misuse> {
        for stored in invalid {
            self.own_id(stored.cache)?;
        }
        if !self.ledger.flight.end_step(step)? {
            return Ok(());
        }
        self.ledger.emit(Event::RetireStep { step });
        for stored in invalid {
            self.withdraw(stored);
        }
        if outcome == Outcome::Failed {
            self.withdraw_written_in(step)?;
        }
        self.ledger.land();
        Ok(())
    }

    fn withdraw_written_in(&mut self, step: u64) -> Result<(), Misuse> {
        for write in self.ledger.flight.written_in(step) {
            self.ledger.prefixes.withdraw(write);
            if let Some(proof) = write.proof {
                // Nobody needs to know any more.
                self.ledger.flight.end_proof(proof)?;
            }
        }
        Ok(())
    }

    /// Reports whether a stored state is finite; [`Stored::ticket`] names it. Before that, neither
    /// this checkpoint can be hit nor any that was stored after it. Repeating the call changes
    /// nothing.
    ///
    /// # Errors
    /// [`Misuse::UnknownStep`].
    pub fn complete(&mut self, ticket: u64, outcome: Outcome) -> Result<(), Misuse> {
        self.collect_dropped();
        let Some(write) = self.ledger.flight.end_proof(ticket)? else {
            return Ok(());
        };
        let finite = outcome == Outcome::Done;
        self.ledger.emit(Event::Prove { ticket, finite });
        if !finite {
            self.ledger.prefixes.withdraw(write);
        }
        self.ledger.land();
        Ok(())
    }

    /// The stored states whose ticket is still to be [completed](Cache::complete), oldest first.
    pub fn unproven(&mut self) -> Vec<Unproven> {
        self.collect_dropped();
        let writes = self.ledger.flight.writing();
        let unproven = writes.filter_map(|(_, write)| {
            let ticket = write.proof.filter(|&it| self.ledger.flight.is_open(it))?;
            Some(Unproven {
                ticket,
                slot: self.ledger.prefixes.pinned_slot(write.checkpoint()?),
                step: write.step.filter(|&it| self.ledger.flight.in_flight(it)),
            })
        });
        unproven.collect()
    }

    /// Withdraws a checkpoint whose content turned out not to be finite. The pages that the tree
    /// got with it are as suspect: lookups no longer find them, or any checkpoint whose path they
    /// lie on. Sequences that share them keep them to their end and publish nothing further.
    ///
    /// Repeating it changes nothing. It is too late once the checkpoint has been evicted: pages
    /// that came with it and serve other checkpoints then stay. [`Cache::retire_step`] and
    /// [`Cache::complete`] are never too late, because a checkpoint is not evicted before its step
    /// has retired and its ticket is completed.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn invalidate(&mut self, stored: &Stored) -> Result<(), Misuse> {
        self.collect_dropped();
        self.own_id(stored.cache)?;
        self.withdraw(stored);
        Ok(())
    }

    /// Lookups see an empty cache at once. Live sequences keep what they hold until they end; what
    /// they would publish later is refused and counted.
    pub fn reset(&mut self) {
        self.collect_dropped();
        self.ledger.emit(Event::Reset);
        self.ledger.resets += 1;
        let freed = self.ledger.prefixes.reset();
        let cause = Cause::Reset;
        self.ledger.emit(Event::Freed { cause, freed });
    }

    /// All counters.
    pub fn stats(&mut self) -> Stats {
        self.collect_dropped();
        Stats {
            bytes: self.ledger.bytes(),
            ..self.ledger.prefixes.events().stats
        }
    }

    /// Where the slots of a pool are, from O(1) counters.
    pub fn usage(&mut self, pool: PoolKind) -> Usage {
        self.collect_dropped();
        match pool {
            PoolKind::Kv => self.ledger.prefixes.kv().usage(),
            PoolKind::Active => self.ledger.active.usage(),
            PoolKind::Checkpoint => self.ledger.prefixes.checkpoints().usage(),
        }
    }

    /// One number for every decision so far, so that ranks of a group can compare what they did:
    /// equal after the same calls, different, but for one chance in 2^64, once they have
    /// diverged. It costs a few nanoseconds a call.
    ///
    /// It covers what each call took, reused, stored, refused, evicted, ended or lacked. Of a
    /// prompt's tokens it sees their number and the last one; of a namespace, only what was found
    /// there. Calls that only read (`lookup`, `stats`, `check`) decide nothing, and neither does
    /// misuse.
    ///
    /// A handle that was dropped counts from the cache's next call of any kind on. A garbage
    /// collector runs at other moments on other ranks: there, end requests by
    /// [`Cache::finish`].
    pub fn digest(&self) -> u64 {
        self.ledger.prefixes.events().digest.value()
    }

    /// Makes a call that takes slots, and notes when there were too few.
    pub(crate) fn attempt<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let outcome = call(self);
        if let Err(Error::Shortage(short)) = &outcome {
            let wanted = short.wanted();
            self.ledger.emit(Event::Short { wanted });
        }
        outcome
    }

    /// Takes back what dropped handles held. Every operation does this first.
    #[inline]
    pub(crate) fn collect_dropped(&mut self) {
        if self.inbox.any() {
            self.collect();
        }
    }

    #[cold]
    fn collect(&mut self) {
        for Dropped { serial, kind, key } in self.inbox.drain() {
            let holdings = match kind {
                Kind::Step => {
                    let cancelled = self.end_step(key as u64, &[], Outcome::Failed);
                    cancelled.expect("a handle is of a step that was begun");
                    continue;
                }
                Kind::Lease => self.leases.remove(key).holdings,
                Kind::Sequence => self.sequences.remove(key).lease.holdings,
                Kind::Pending => self.pending.remove(key).holdings,
            };
            self.ledger.emit(Event::End { owner: serial });
            self.ledger.give_back(holdings);
        }
    }

    pub(crate) fn find(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        max_length: Option<usize>,
    ) -> Result<Reusable, Misuse> {
        let last = tokens.len().checked_sub(1).ok_or(Misuse::EmptyPrompt)?;
        let limit = max_length.map_or(last, |max| max.min(last));
        let prefixes = &self.ledger.prefixes;
        let mut reusable = prefixes.find(namespace, tokens, limit);
        if let Some(max) = max_length {
            let page = prefixes.grid().page;
            reusable.kv_length = reusable.kv_length.min(max / page * page);
        }
        Ok(reusable)
    }

    pub(crate) fn describe(
        &self,
        namespace: &Namespace,
        reusable: Reusable,
        outline: Outline,
    ) -> Match {
        Match {
            length: reusable.length,
            kv_length: reusable.kv_length,
            branch: reusable.branch,
            reason: reusable.reason,
            encodings: reusable.encodings,
            not_ready: reusable.not_ready,
            checkpoint: reusable.checkpoint,
            namespace: namespace.clone(),
            outline,
            cache: self.inbox.cache,
            resets: self.ledger.resets,
        }
    }

    pub(crate) fn own(&self, handle: &Handle) -> Result<(), Misuse> {
        self.own_id(handle.cache())
    }

    pub(crate) fn own_id(&self, cache: u64) -> Result<(), Misuse> {
        if cache == self.inbox.cache {
            Ok(())
        } else {
            Err(Misuse::WrongCache)
        }
    }

    pub(crate) fn handle(&mut self, kind: Kind, key: usize) -> Handle {
        let serial = self.ledger.next_serial();
        Handle::new(&self.inbox, serial, kind, key)
    }

    fn withdraw(&mut self, stored: &Stored) {
        self.ledger.prefixes.invalidate(stored.id, stored.brought);
    }
}
