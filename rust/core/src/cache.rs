//! The cache: its configuration, and the operations that concern no single request.

use std::fmt;
use std::sync::Arc;

use slab::Slab;

use crate::digest::Decision;
use crate::error::{Error, Misuse};
use crate::evict::Policy;
use crate::handle::{Dropped, Handle, Inbox, Kind};
use crate::key::{Grid, Namespace};
use crate::ledger::{Holdings, Leased, Ledger, Stored};
use crate::lookup::{Hit, Match};
use crate::pool::{Pool, PoolConfig, PoolKind, Usage};
use crate::prefixes::{Freed, Prefixes};
use crate::sequence::Running;
use crate::stats::Stats;

/// Geometry and sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Tokens of one KV page; also the granularity at which prefixes match.
    pub page_size: u32,
    /// Tokens between the depths at which the engine can cut off a state.
    pub checkpoint_stride: u32,
    /// KV pages; capacity 0 for a purely linear model.
    pub kv: PoolConfig,
    /// States of running requests.
    pub active: PoolConfig,
    /// States of cached prefixes; always internal.
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
        if checkpoints.external {
            return refuse("the checkpoint pool is always internal".into());
        }
        if checkpoints.capacity == 0 {
            return refuse("the checkpoint pool has 0 slots: nothing could ever be reused".into());
        }
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
}

/// A prefix cache for recurrent states. See the crate's documentation for how its operations fit
/// together.
pub struct Cache {
    pub(crate) ledger: Ledger,
    pub(crate) leases: Slab<Leased>,
    pub(crate) sequences: Slab<Running>,
    pub(crate) pending: Slab<Writing>,
    pub(crate) inbox: Arc<Inbox>,
}

/// A checkpoint slot between reservation and commit.
#[derive(Debug)]
pub(crate) struct Writing {
    /// Serial of the sequence or lease that reserved it.
    pub(crate) owner: u64,
    pub(crate) holdings: Holdings,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ledger {
            prefixes, active, ..
        } = &self.ledger;
        f.debug_struct("Cache")
            .field("kv", &prefixes.kv.usage())
            .field("active", &active.usage())
            .field("checkpoints", &prefixes.checkpoints.usage())
            .field("sequences", &self.sequences.len())
            .finish_non_exhaustive()
    }
}

impl Cache {
    /// An empty cache that evicts the least recently used checkpoint first.
    ///
    /// # Errors
    /// [`Misuse::Config`] for a geometry in which no prefix could ever be reused.
    pub fn new(config: Config) -> Result<Self, Misuse> {
        let grid = config.grid()?;
        let prefixes = Prefixes::new(grid, config.kv, config.checkpoints);
        Ok(Self {
            ledger: Ledger::new(prefixes, Pool::new(config.active)),
            leases: Slab::new(),
            sequences: Slab::new(),
            pending: Slab::new(),
            inbox: Arc::new(Inbox::new()),
        })
    }

    /// An empty cache that evicts as `policy` ranks.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn with_policy(config: Config, policy: Box<dyn Policy>) -> Result<Self, Misuse> {
        let mut cache = Self::new(config)?;
        cache.ledger.prefixes.set_policy(policy);
        Ok(cache)
    }

    /// The deepest depth, at most `tokens`, at which a checkpoint may stand: a multiple of
    /// lcm(page size, checkpoint stride), counted from zero.
    pub fn legal_depth(&self, tokens: usize) -> usize {
        self.ledger.prefixes.grid.legal_depth(tokens)
    }

    /// How much of a prompt can be reused, at most `max_length` tokens. Changes nothing that
    /// eviction looks at.
    ///
    /// # Errors
    /// [`Misuse::EmptyPrompt`].
    pub fn lookup(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        max_length: Option<usize>,
    ) -> Result<Match, Misuse> {
        self.settle();
        let hit = self.find(namespace, tokens, max_length)?;
        self.ledger.stats.lookups += 1;
        Ok(self.describe(namespace, hit))
    }

    /// Evicts at least `n` units of a pool if it can, and says what it really freed, all pools.
    /// What it frees is usable when it returns. The tree owns no active slot, so of that pool
    /// it frees none.
    pub fn evict(&mut self, pool: PoolKind, n: usize) -> Freed {
        self.settle();
        let freed = match pool {
            PoolKind::Kv => self.ledger.prefixes.evict_kv(n),
            PoolKind::Checkpoint => self.ledger.prefixes.evict_checkpoints(n),
            PoolKind::Active => Freed::default(),
        };
        self.ledger.stats.evictions.asked += freed;
        self.note(Decision::Evict, [pool as u64, n as u64]);
        freed
    }

    /// Pages of an external KV pool that the cache has given up since the last call, each exactly
    /// once. Empty for the other pools: of those nothing is ever adopted.
    pub fn take_freed(&mut self, pool: PoolKind) -> Vec<u32> {
        self.settle();
        let freed = if pool == PoolKind::Kv {
            self.ledger.prefixes.kv.take_outbox()
        } else {
            Vec::new()
        };
        self.note(Decision::TakeFreed, [freed.len() as u64]);
        freed
    }

    /// Declares a step: work that may touch what running sequences hold, until
    /// [`Cache::retire_step`].
    pub fn begin_step(&mut self) -> u64 {
        self.settle();
        let step = self.ledger.steps.begin();
        self.note(Decision::BeginStep, []);
        step
    }

    /// A step has ended. Steps may retire in any order; a repeated one changes nothing, its
    /// `refused` included. `refused` are the checkpoints whose writer found a value that is not
    /// finite: they were never matchable, and are withdrawn as [`Cache::refuse`] does, which is
    /// for what is learnt later.
    ///
    /// # Errors
    /// [`Misuse::UnknownStep`], [`Misuse::WrongCache`].
    pub fn retire_step(&mut self, step: u64, refused: &[Stored]) -> Result<(), Misuse> {
        self.settle();
        refused
            .iter()
            .try_for_each(|stored| self.own_id(stored.cache))?;
        if !self.ledger.steps.retire(step)? {
            return Ok(());
        }
        self.note(Decision::RetireStep, [step]);
        refused.iter().for_each(|stored| self.withdraw(stored));
        while let Some(written) = self.ledger.steps.next_written() {
            written
                .into_iter()
                .for_each(|pin| self.ledger.prefixes.written(pin));
        }
        self.ledger.release_retired();
        Ok(())
    }

    /// Withdraws a checkpoint whose content turned out not to be finite. The pages that the tree
    /// got with it are as suspect: no lookup finds them any more, nor any checkpoint whose path
    /// they lie on. Sequences that share them keep them to their end, and publish nothing
    /// further.
    ///
    /// Repeating it changes nothing. Nor does a refusal after the prefix was evicted, even if
    /// another checkpoint still needs some of its pages; refused with its step, it can't have
    /// been. When prefixes go on from this one, it costs a look at every cached node.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn refuse(&mut self, stored: &Stored) -> Result<(), Misuse> {
        self.settle();
        self.own_id(stored.cache)?;
        self.withdraw(stored);
        Ok(())
    }

    /// Lookups see an empty cache at once. Live sequences keep what they hold until they end; what
    /// they would publish later is refused and counted.
    pub fn reset(&mut self) {
        self.settle();
        self.note(Decision::Reset, []);
        self.ledger.epoch += 1;
        self.ledger.stats.resets += 1;
        let freed = self.ledger.prefixes.reset();
        self.ledger.stats.evictions.reset += freed;
    }

    /// All counters.
    pub fn stats(&mut self) -> Stats {
        self.settle();
        Stats {
            bytes: self.ledger.bytes(),
            ..self.ledger.stats
        }
    }

    /// Where the slots of a pool are, from O(1) counters.
    pub fn usage(&mut self, pool: PoolKind) -> Usage {
        self.settle();
        match pool {
            PoolKind::Kv => self.ledger.prefixes.kv.usage(),
            PoolKind::Active => self.ledger.active.usage(),
            PoolKind::Checkpoint => self.ledger.prefixes.checkpoints.usage(),
        }
    }

    /// One number for every decision so far, so that ranks of a group can compare what they did:
    /// equal after the same calls, different, but for one chance in 2^64, once they have
    /// diverged. It costs a few nanoseconds a call.
    ///
    /// It covers what each call took, reused, stored, refused, evicted, ended or lacked. Of tokens
    /// it sees how many there are and which is the last; of namespaces, what was found there.
    /// What only reads (`lookup`, `stats`, `check`) and what was misuse decides nothing.
    ///
    /// A handle that was dropped counts from the cache's next call of any kind on. A garbage
    /// collector runs at other moments on other ranks: there, end requests by
    /// [`Cache::finish`].
    pub fn digest(&self) -> u64 {
        self.ledger.prefixes.digest.value()
    }

    /// Adds a decision to the digest.
    pub(crate) fn note<const N: usize>(&mut self, decision: Decision, numbers: [u64; N]) {
        self.ledger.prefixes.digest.note(decision, numbers);
    }

    /// Makes a call that takes slots, and notes when there were too few.
    pub(crate) fn attempt<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let outcome = call(self);
        if let Err(Error::Shortage(short)) = &outcome {
            self.note(Decision::Short, [short.wanted() as u64]);
        }
        outcome
    }

    /// Takes back what dropped handles held. Every operation does this first.
    pub(crate) fn settle(&mut self) {
        for Dropped { serial, kind, key } in self.inbox.drain() {
            self.note(Decision::End, [serial]);
            let holdings = match kind {
                Kind::Lease => self.leases.remove(key).holdings,
                Kind::Sequence => self.sequences.remove(key).lease.holdings,
                Kind::Pending => self.pending.remove(key).holdings,
            };
            self.ledger.give_back(holdings);
        }
    }

    pub(crate) fn find(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        max_length: Option<usize>,
    ) -> Result<Hit, Misuse> {
        let last = tokens.len().checked_sub(1).ok_or(Misuse::EmptyPrompt)?;
        Ok(self.ledger.prefixes.find(
            namespace,
            tokens,
            max_length.map_or(last, |max| max.min(last)),
        ))
    }

    pub(crate) fn describe(&self, namespace: &Namespace, hit: Hit) -> Match {
        let Hit {
            length,
            kv_length,
            branch,
            reason,
            generation,
            found,
        } = hit;
        let (namespace, cache, epoch) = (namespace.clone(), self.inbox.cache, self.ledger.epoch);
        Match {
            length,
            kv_length,
            branch,
            reason,
            generation,
            found,
            namespace,
            cache,
            epoch,
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
        let Stored {
            node,
            serial,
            brought,
            ..
        } = *stored;
        self.ledger.stats.refusals.non_finite += self.ledger.prefixes.refuse(node, serial, brought);
    }
}
