//! The real cache and the naive one, driven together: equal results, equal pools, equal counters,
//! equal eviction order.

mod leases;
mod misuses;
mod sequences;

use std::collections::BTreeSet;

use radixstate::policy::{Lru, Policy};
use radixstate::{
    Bytes, Cache, Commit, Config, EnginePages, Lease, LogicalPages, Match, Namespace, Outcome,
    OwnPages, Pending, PoolConfig, PoolKind, Reservation, Sequence, Skip, Stats, Step, Stored,
    Usage,
};
use radixstate_replay::decode::Drawn;
use radixstate_replay::{Op, Owner, Who, Wrong};

use crate::oracle::{Found, Naive, Published as Expected};

/// Ends every prompt of a probe, so that a checkpoint at the end of the cached part can be hit.
const END: u32 = 9;

/// A reserved slot. Its owner may have ended meanwhile.
struct Waiting {
    id: u64,
    pending: Pending,
    proven: bool,
}

/// A lookup that a later lease may use.
struct Looked {
    namespace: Namespace,
    tokens: Vec<u32>,
    real: Match,
    found: Found,
}

/// The real cache, the naive one, and what their caller holds.
pub(crate) struct Both<O: Front> {
    config: Config,
    pub(crate) real: Cache<O>,
    pub(crate) naive: Naive,
    sequences: Vec<(u64, Sequence)>,
    leases: Vec<(u64, Lease)>,
    pending: Vec<Waiting>,
    looked: Vec<Looked>,
    stored: Vec<Stored>,
    /// Retired ones too: their drop must change nothing.
    steps: Vec<Step>,
    engine_free: BTreeSet<u32>,
    next: u64,
}

/// What only caches of one owner of pages can do.
pub(crate) trait Front: Owner {
    /// Operations on requests.
    fn apply(both: &mut Both<Self>, op: &Op) -> Option<()>;

    /// Brings the pending checkpoint at `n` of a live owner into the tree.
    fn commit(both: &mut Both<Self>, n: usize, owner: u64) -> Option<()>;

    /// A pending checkpoint with another owner, or with pages that can't be.
    fn wrong(both: &mut Both<Self>, wrong: Wrong, n: usize) -> Option<()>;

    fn take_freed(_: &mut Both<Self>) {}

    /// Whatever holders can see is equal.
    fn verify(both: &Both<Self>);
}

/// Runs operations with a comparison after each, then gives everything back. Returns what was
/// counted.
pub(crate) fn run(drawn: Drawn, ops: &[Op], by_page: bool) -> Stats {
    match drawn.who {
        Who::Cache => run_with::<OwnPages>(drawn.config, ops, by_page),
        Who::Engine => run_with::<EnginePages>(drawn.config, ops, by_page),
        Who::Logical => run_with::<LogicalPages>(drawn.config, ops, by_page),
    }
}

fn run_with<O: Front>(config: Config, ops: &[Op], by_page: bool) -> Stats {
    let mut both = Both::<O>::new(config);
    for op in ops {
        both.apply(op);
        both.verify();
    }
    both.wind_down(by_page);
    both.naive.stats
}

fn namespace(tenant: bool) -> Namespace {
    if tenant {
        Namespace::new(0, Some("tenant"), 0)
    } else {
        Namespace::default()
    }
}

fn pick<T>(list: &[T], n: usize) -> Option<usize> {
    (!list.is_empty()).then(|| n % list.len())
}

/// A configuration for tests of one call.
#[cfg(test)]
fn small() -> Config {
    Config {
        page_size: 2,
        checkpoint_stride: 4,
        kv: PoolConfig::internal(8),
        active: PoolConfig::internal(2),
        checkpoints: PoolConfig::internal(2),
    }
}

/// The store that an outcome names.
fn serial(outcome: &Commit) -> Option<u64> {
    match outcome {
        Commit::Stored(stored) => Some(stored.serial),
        Commit::Skipped(_) => None,
    }
}

fn assert_same_match(real: &Match, found: &Found) {
    let Found {
        length,
        kv_length,
        branch,
        reason,
        encodings,
        ..
    } = *found;
    assert_eq!(
        (real.length, real.kv_length, real.branch, real.reason),
        (length, kv_length, branch, reason)
    );
    assert_eq!(real.encodings, encodings);
}

impl<O: Front> Both<O> {
    pub(crate) fn new(config: Config) -> Self {
        Self::with_policy(config, Box::new(Lru::default()))
    }

    /// With a policy that evicts as the naive cache does: the least recently used first.
    pub(crate) fn with_policy(config: Config, policy: Box<dyn Policy>) -> Self {
        let engine_free = match O::WHO {
            Who::Engine => (1..=config.kv.capacity).collect(),
            Who::Cache | Who::Logical => BTreeSet::new(),
        };
        Self {
            config,
            real: Cache::with_policy(O::config(config), policy)
                .expect("the strategy makes usable configurations"),
            naive: Naive::new(config, O::WHO),
            sequences: Vec::new(),
            leases: Vec::new(),
            pending: Vec::new(),
            looked: Vec::new(),
            stored: Vec::new(),
            steps: Vec::new(),
            engine_free,
            next: 0,
        }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Applies `op` to both caches. `None` when it names something and there is none: its numbers
    /// were drawn before it was known what lives, or who owns the pages.
    pub(crate) fn apply(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Commit { pending, proven } => {
                let n = self.mark(*pending, *proven)?;
                let owner = self.naive.reserved[&self.pending[n].id].owner;
                if self.naive.holders.contains_key(&owner) {
                    return O::commit(self, n, owner);
                }
                self.drop_pending(n)
            }
            Op::DropPending(n) => self.drop_pending(*n),
            Op::Discard(n) => self.discard(*n),
            Op::Wrong(wrong, n) => self.wrong(*wrong, *n),
            Op::Lookup {
                tenant,
                tokens,
                max_length,
            } => {
                self.look_up(&namespace(*tenant), tokens, *max_length);
                Some(())
            }
            Op::TakeFreed => {
                O::take_freed(self);
                Some(())
            }
            Op::Touch { tenant, tokens } => {
                let namespace = namespace(*tenant);
                let touched = self.real.touch(&namespace, tokens);
                assert_eq!(touched, self.naive.touch(&namespace, tokens));
                Some(())
            }
            Op::Evict(..)
            | Op::BeginStep
            | Op::DropStep(_)
            | Op::RetireStep { .. }
            | Op::CancelStep(_)
            | Op::Complete { .. }
            | Op::Refuse(_)
            | Op::Reset => self.apply_whole(op),
            Op::Lease(_)
            | Op::LeaseLoaded(_)
            | Op::ForkLease(_)
            | Op::Release(_)
            | Op::DropLease(_) => self.apply_pin(op),
            _ => O::apply(self, op),
        }
    }

    fn apply_pin(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Lease(n) => self.lease(pick(&self.looked, *n)?),
            Op::LeaseLoaded(n) => {
                let (id, lease) = &self.leases[pick(&self.leases, *n)?];
                self.real.lease_loaded(lease).unwrap();
                self.naive.lease_loaded(*id);
            }
            Op::ForkLease(n) => {
                let new = self.id();
                let (id, lease) = &self.leases[pick(&self.leases, *n)?];
                let forked = self.real.fork_lease(lease).unwrap();
                self.naive.fork_lease(*id, new);
                self.leases.push((new, forked));
            }
            Op::Release(n) => {
                let (id, lease) = self.leases.swap_remove(pick(&self.leases, *n)?);
                self.real.release(lease).unwrap();
                self.naive.finish(id);
            }
            Op::DropLease(n) => {
                let (id, lease) = self.leases.swap_remove(pick(&self.leases, *n)?);
                drop(lease);
                self.naive.finish(id);
            }
            _ => unreachable!("{op:?} pins nothing"),
        }
        Some(())
    }

    fn lease(&mut self, n: usize) {
        let id = self.id();
        let Looked {
            namespace,
            tokens,
            real,
            found,
        } = &self.looked[n];
        let leased = self.real.lease(real);
        match self.naive.lease(id, namespace, tokens, found) {
            Ok(()) => self.leases.push((id, leased.expect("the model leases it"))),
            Err(misuse) => assert_eq!(leased.unwrap_err(), misuse),
        }
    }

    /// What concerns no single request.
    fn apply_whole(&mut self, op: &Op) -> Option<()> {
        match *op {
            Op::Evict(pool, n) => assert_eq!(self.real.evict(pool, n), self.naive.evict(pool, n)),
            Op::BeginStep => {
                let step = self.real.begin_step();
                assert_eq!(step.id(), self.naive.begin_step());
                self.steps.push(step);
            }
            Op::DropStep(n) => {
                let step = self.steps.swap_remove(pick(&self.steps, n)?);
                self.naive.cancel_step(step.id()).unwrap();
            }
            Op::RetireStep { step, refused } => self.retire_step(self.name_step(step), refused),
            Op::CancelStep(step) => {
                let step = self.name_step(step);
                assert_eq!(
                    self.real.cancel_step(step, &[]),
                    self.naive.cancel_step(step)
                );
            }
            Op::Complete { proof, finite } => {
                let tickets: Vec<u64> = self.naive.proofs.keys().copied().collect();
                self.complete(tickets[pick(&tickets, proof)?], finite);
            }
            Op::Refuse(n) => {
                let stored = &self.stored[pick(&self.stored, n)?];
                self.real.invalidate(stored).unwrap();
                self.naive.invalidate(stored.serial);
            }
            Op::Reset => {
                self.real.reset();
                self.naive.reset();
            }
            _ => unreachable!("{op:?} concerns a request"),
        }
        Some(())
    }

    /// Mostly a step that is out; sometimes one that retired before, or was never begun.
    fn name_step(&self, n: u64) -> u64 {
        let out = &self.naive.outstanding;
        let known = out
            .iter()
            .nth((n / 4) as usize % out.len().max(1))
            .filter(|_| !n.is_multiple_of(4));
        known.copied().unwrap_or(n % (self.naive.newest + 2))
    }

    fn retire_step(&mut self, step: u64, refused: Option<usize>) {
        let refused = refused
            .and_then(|n| pick(&self.stored, n))
            .map(|n| self.stored[n].clone());
        let serials: Vec<u64> = refused.iter().map(|stored| stored.serial).collect();
        assert_eq!(
            self.real.retire_step(step, refused.as_slice()),
            self.naive.retire_step(step, &serials)
        );
    }

    fn complete(&mut self, ticket: u64, finite: bool) {
        let outcome = if finite {
            Outcome::Done
        } else {
            Outcome::Failed
        };
        self.real.complete(ticket, outcome).unwrap();
        self.naive.complete(ticket, finite);
    }

    fn look_up(&mut self, namespace: &Namespace, tokens: &[u32], max_length: Option<usize>) {
        let real = self.real.lookup(namespace, tokens, max_length).unwrap();
        self.naive.stats.lookups += 1;
        let found = self.naive.find(namespace, tokens, max_length);
        assert_same_match(&real, &found);
        self.looked.push(Looked {
            namespace: namespace.clone(),
            tokens: tokens.to_vec(),
            real,
            found,
        });
    }

    /// Mostly a slot that the holder may name.
    fn source(slots: &[u32], n: usize) -> u32 {
        match slots.len() {
            count if count > 0 && n < 60 => slots[n % count],
            _ => 0,
        }
    }

    fn reserved(&mut self, id: u64, owner: u64, tokens: &[u32], reservation: Reservation) {
        let slot = match &reservation {
            Reservation::Pending(pending) => Some(pending.slot()),
            Reservation::Skipped(_) => None,
        };
        match (reservation, self.naive.reserve(id, owner, tokens, slot)) {
            (Reservation::Pending(pending), Ok(())) => {
                assert_eq!(pending.depth(), tokens.len());
                self.pending.push(Waiting {
                    id,
                    pending,
                    proven: true,
                });
            }
            (Reservation::Skipped(skip), Err(expected)) => assert_eq!(skip, expected),
            (real, expected) => panic!("{real:?}, the model says {expected:?}"),
        }
    }

    fn drop_pending(&mut self, n: usize) -> Option<()> {
        let Waiting { id, pending, .. } = self.pending.swap_remove(pick(&self.pending, n)?);
        drop(pending);
        self.naive.drop_reserved(id);
        Some(())
    }

    fn discard(&mut self, n: usize) -> Option<()> {
        let Waiting { id, pending, .. } = self.pending.swap_remove(pick(&self.pending, n)?);
        assert_eq!(self.real.discard(pending).unwrap(), Skip::NonFinite);
        self.naive.drop_reserved(id);
        self.naive.stats.skipped.non_finite += 1;
        Some(())
    }

    /// Marks the pending checkpoint that is named as proven or not, and puts it last.
    fn mark(&mut self, n: usize, proven: bool) -> Option<usize> {
        let Waiting { id, pending, .. } = self.pending.swap_remove(pick(&self.pending, n)?);
        let pending = if proven { pending } else { pending.unproven() };
        self.pending.push(Waiting {
            id,
            pending,
            proven,
        });
        Some(self.pending.len() - 1)
    }

    /// Compares what became of a pending checkpoint.
    fn committed(&mut self, outcome: Commit, expected: Expected) {
        match outcome {
            Commit::Skipped(skip) => assert_eq!(expected, Expected::Skipped(skip)),
            Commit::Stored(stored) => {
                let Stored {
                    depth,
                    step,
                    ticket,
                    encodings,
                    replaced,
                    ..
                } = stored.clone();
                assert_eq!(
                    expected,
                    Expected::Stored {
                        depth,
                        step,
                        ticket,
                        encodings,
                        replaced
                    }
                );
                self.stored.push(stored);
            }
        }
    }

    /// Both caches agree on everything that can be seen, and the real one is sound.
    pub(crate) fn verify(&mut self) {
        let free: Vec<u32> = self.engine_free.iter().copied().collect();
        let free = (O::WHO != Who::Logical).then_some(free.as_slice());
        self.real
            .check(free)
            .unwrap_or_else(|report| panic!("{report}"));
        for pool in [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint] {
            assert_eq!(self.real.usage(pool), self.naive.usage(pool), "{pool}");
        }
        let stats = Stats {
            bytes: self.bytes(),
            ..self.naive.stats
        };
        assert_eq!(self.real.stats(), stats);
        self.verify_leases();
        O::verify(self);
        self.verify_cached();
    }

    fn bytes(&self) -> Bytes {
        let bytes = |pool, unit: u64| {
            let Usage {
                held,
                evictable,
                pinned,
                retiring,
                ..
            } = self.naive.usage(pool);
            (held + evictable + pinned + retiring) as u64 * unit
        };
        Bytes {
            kv: bytes(PoolKind::Kv, self.config.kv.unit_bytes),
            active: bytes(PoolKind::Active, self.config.active.unit_bytes),
            checkpoints: bytes(PoolKind::Checkpoint, self.config.checkpoints.unit_bytes),
        }
    }

    fn verify_leases(&self) {
        for (id, lease) in &self.leases {
            let holder = &self.naive.holders[id];
            assert_eq!(self.real.lease_depth(lease).unwrap(), holder.depth());
            let pages = self.naive.path_pages(*id);
            let page = self.config.page_size as usize;
            for n in 0..=pages.len() {
                let past = self.real.lease_pages(lease, n * page).unwrap();
                assert_eq!(past, pages[n..]);
            }
            let state = self.real.lease_state(lease).unwrap();
            assert_eq!(state, self.naive.lease_state(*id));
        }
    }

    /// Every cached state is found by the prompt that goes on from it.
    fn verify_cached(&mut self) {
        for prefix in self.naive.states.keys() {
            let prompt = [prefix.tokens.as_slice(), &[END]].concat();
            let real = self.real.lookup(&prefix.namespace, &prompt, None).unwrap();
            let whole = self.real.lookup_whole(&prefix.namespace, &prefix.tokens);
            let found = self
                .naive
                .find_within(&prefix.namespace, &prefix.tokens, prefix.depth());
            assert_same_match(&whole.unwrap(), &found);
            assert_same_match(&real, &self.naive.find(&prefix.namespace, &prompt, None));
        }
        self.naive.stats.lookups += 2 * self.naive.states.len() as u64;
    }

    /// Retires and ends everything, then evicts victim by victim: nothing stays behind.
    pub(crate) fn wind_down(&mut self, by_page: bool) {
        for step in self.naive.outstanding.clone() {
            self.retire_step(step, None);
        }
        for ticket in self.naive.proofs.keys().copied().collect::<Vec<u64>>() {
            self.complete(ticket, true);
        }
        while !self.sequences.is_empty() {
            self.apply(&Op::Finish(0));
        }
        while !self.leases.is_empty() {
            self.apply(&Op::DropLease(0));
        }
        self.pending
            .drain(..)
            .for_each(|waiting| self.naive.drop_reserved(waiting.id));
        self.verify();
        let pool = if by_page && self.naive.has_kv() {
            PoolKind::Kv
        } else {
            PoolKind::Checkpoint
        };
        while !self.naive.states.is_empty() {
            self.apply(&Op::Evict(pool, 1));
            self.verify();
        }
        O::take_freed(self);
        for pool in [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint] {
            let Usage {
                capacity,
                free,
                held,
                evictable,
                pinned,
                retiring,
                outbox,
            } = self.real.usage(pool);
            assert_eq!(held + evictable + pinned + retiring + outbox, 0, "{pool}");
            assert!(
                free == capacity || free == 0,
                "{pool}: {free} of {capacity} are free"
            );
        }
        let engine = match O::WHO {
            Who::Engine => self.config.kv.capacity as usize,
            Who::Cache | Who::Logical => 0,
        };
        assert_eq!(
            self.engine_free.len(),
            engine,
            "every page is back with the engine"
        );
    }
}
