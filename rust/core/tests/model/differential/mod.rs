//! The real cache and the naive one, driven together: equal results, equal pools, equal counters,
//! equal eviction order.

mod misuses;

use std::collections::BTreeSet;

use radixstate::policy::{Lru, Policy};
use radixstate::{
    Begin, Bytes, Cache, Commit, Config, Lease, Match, Namespace, Outcome, Pending, PoolKind,
    Published, Reservation, Sequence, Skip, StartOptions, Started, Stats, Step, Stored, Usage,
};

use crate::oracle::{Found, Fresh, Naive, Published as Expected, Reserved};
use radixstate_replay::{Depth, Op};

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
pub(crate) struct Both {
    config: Config,
    pub(crate) real: Cache,
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

/// Runs operations with a comparison after each, then gives everything back. Returns what was
/// counted.
pub(crate) fn run(config: Config, ops: &[Op], by_page: bool) -> Stats {
    let mut both = Both::new(config);
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

impl Both {
    pub(crate) fn new(config: Config) -> Self {
        Self::with_policy(config, Box::new(Lru::default()))
    }

    /// With a policy that evicts as the naive cache does: the least recently used first.
    pub(crate) fn with_policy(config: Config, policy: Box<dyn Policy>) -> Self {
        let engine_free = if config.kv.external {
            (1..=config.kv.capacity).collect()
        } else {
            BTreeSet::new()
        };
        Self {
            config,
            real: Cache::with_policy(config, policy)
                .expect("the strategy makes usable configurations"),
            naive: Naive::new(config),
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
    /// were drawn before it was known what lives.
    pub(crate) fn apply(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Start {
                tenant,
                tokens,
                options,
            } => self.start(&namespace(*tenant), tokens, *options),
            Op::Serve {
                tenant,
                tokens,
                ends,
            } => return self.serve(&namespace(*tenant), tokens, *ends),
            Op::Reserve {
                sequence,
                depth,
                source,
            } => return self.reserve(*sequence, *depth, *source),
            Op::ReserveLeased { lease, more, depth } => {
                return self.reserve_leased(*lease, more, *depth);
            }
            Op::Commit { pending, proven } => return self.commit(*pending, *proven),
            Op::DropPending(n) => return self.drop_pending(*n),
            Op::Discard(n) => return self.discard(*n),
            Op::Wrong(wrong, n) => return self.wrong(*wrong, *n),
            Op::Loaded(_) | Op::Grow(..) | Op::Append(..) | Op::Shrink(_) | Op::TakeSlot(_) => {
                return self.apply_running(op);
            }
            Op::GiveBackSlot { sequence, slot } => return self.give_back_slot(*sequence, *slot),
            Op::Finish(_) | Op::DropSequences { .. } | Op::Release(_) | Op::DropLease(_) => {
                return self.apply_end(op);
            }
            Op::Lookup { .. } | Op::Lease(_) | Op::LeaseLoaded(_) => return self.apply_read(op),
            _ => return self.apply_whole(op),
        }
        Some(())
    }

    fn apply_running(&mut self, op: &Op) -> Option<()> {
        let (real, naive) = (&mut self.real, &mut self.naive);
        let (Op::Loaded(n) | Op::Grow(n, _) | Op::Append(n, _) | Op::Shrink(n) | Op::TakeSlot(n)) =
            op
        else {
            unreachable!("{op:?} is not of a running sequence");
        };
        let (id, sequence) = &self.sequences[pick(&self.sequences, *n)?];
        match op {
            Op::Loaded(_) => assert_eq!(real.loaded(sequence), naive.loaded(*id)),
            Op::Append(_, tokens) => {
                assert_eq!(real.append(sequence, tokens), naive.append(*id, tokens))
            }
            Op::Grow(_, by) => {
                let before = real.view(sequence).unwrap().pages().len();
                let grown = real.grow(sequence, *by);
                let fresh = real.view(sequence).unwrap().pages().split_off(before);
                assert_eq!(grown, naive.grow(*id, *by, fresh));
            }
            Op::Shrink(_) => {
                real.shrink(sequence).unwrap();
                naive.shrink(*id);
            }
            _ => {
                let taken = real.take_slot(sequence);
                assert_eq!(taken.clone().map(drop), naive.take_slot(*id, taken.ok()));
            }
        }
        Some(())
    }

    fn give_back_slot(&mut self, n: usize, slot: usize) -> Option<()> {
        let (id, sequence) = &self.sequences[pick(&self.sequences, n)?];
        let slot = self.source(self.naive.holders[id].slots(), slot);
        let given_back = self.real.give_back_slot(sequence, slot);
        assert_eq!(given_back, self.naive.give_back_slot(*id, slot));
        Some(())
    }

    fn apply_end(&mut self, op: &Op) -> Option<()> {
        match *op {
            Op::Finish(n) => {
                let (id, sequence) = self.sequences.swap_remove(pick(&self.sequences, n)?);
                if id.is_multiple_of(2) {
                    self.real.finish(sequence)
                } else {
                    self.real.abort(sequence)
                }
                .unwrap();
                self.naive.finish(id);
            }
            Op::DropSequences { first, count } => {
                let first = pick(&self.sequences, first)?;
                let end = (first + count).min(self.sequences.len());
                let mut dropped: Vec<u64> = self
                    .sequences
                    .drain(first..end)
                    .rev()
                    .map(|(id, _)| id)
                    .collect();
                // Whatever the order of the drops, the cache takes back the oldest first.
                dropped.sort_unstable();
                dropped.into_iter().for_each(|id| self.naive.finish(id));
            }
            Op::Release(n) => {
                let (id, lease) = self.leases.swap_remove(pick(&self.leases, n)?);
                self.real.release(lease).unwrap();
                self.naive.finish(id);
            }
            Op::DropLease(n) => {
                let (id, lease) = self.leases.swap_remove(pick(&self.leases, n)?);
                drop(lease);
                self.naive.finish(id);
            }
            _ => unreachable!("{op:?} ends nothing"),
        }
        Some(())
    }

    fn apply_read(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Lookup {
                tenant,
                tokens,
                max_length,
            } => self.look_up(&namespace(*tenant), tokens, *max_length),
            Op::Lease(n) => self.lease(pick(&self.looked, *n)?),
            Op::LeaseLoaded(n) => {
                let (id, lease) = &self.leases[pick(&self.leases, *n)?];
                self.real.lease_loaded(lease).unwrap();
                self.naive.lease_loaded(*id);
            }
            _ => unreachable!("{op:?} reads nothing"),
        }
        Some(())
    }

    /// What concerns no single request.
    fn apply_whole(&mut self, op: &Op) -> Option<()> {
        match *op {
            Op::Evict(pool, n) => assert_eq!(self.real.evict(pool, n), self.naive.evict(pool, n)),
            Op::TakeFreed => self.take_freed(),
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

    fn start(&mut self, namespace: &Namespace, tokens: &[u32], options: StartOptions) {
        let id = self.id();
        let started = self.real.start(namespace, tokens, options);
        let fresh = started.as_ref().map_or_else(
            |_| Fresh::default(),
            |started| self.fresh(&started.sequence),
        );
        let found = match self.naive.start(id, namespace, tokens, options, fresh) {
            Ok(found) => found,
            Err(error) => return assert_eq!(started.unwrap_err(), error),
        };
        let Started {
            sequence,
            matched,
            begin,
        } = started.expect("the model starts it");
        assert_same_match(&matched, &found);
        let dst = self.real.view(&sequence).unwrap().slot();
        match found.state {
            Some((src, _)) => assert_eq!(begin, Begin::Load { src, dst }),
            None => assert_eq!(begin, Begin::Clear { dst }),
        }
        self.sequences.push((id, sequence));
    }

    /// A whole request, as its parts: whatever skips a part ends it.
    fn serve(&mut self, namespace: &Namespace, tokens: &[u32], ends: bool) -> Option<()> {
        let (running, waiting) = (self.sequences.len(), self.pending.len());
        self.start(namespace, tokens, StartOptions::default());
        if self.sequences.len() > running {
            self.apply(&Op::Loaded(running));
            self.reserve(running, Depth::Deepest, 0)?;
            if self.pending.len() > waiting {
                self.commit(waiting, true)?;
            }
            if ends {
                self.apply(&Op::Finish(running));
            }
        }
        Some(())
    }

    /// The slots that the real cache took for a sequence just started.
    fn fresh(&self, sequence: &Sequence) -> Fresh {
        let view = self.real.view(sequence).unwrap();
        let shared = if self.naive.has_kv() {
            view.leased() / self.config.page_size as usize
        } else {
            0
        };
        Fresh {
            pages: view.pages().split_off(shared),
            active: view.slots().collect(),
        }
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

    fn reserve(&mut self, n: usize, depth: Depth, source: usize) -> Option<()> {
        let id = self.id();
        let (owner, sequence) = &self.sequences[pick(&self.sequences, n)?];
        let holder = &self.naive.holders[owner];
        let depth = depth.pick(self.naive.legal, holder.written());
        let source = self.source(holder.slots(), source);
        let allowed = self.real.can_checkpoint(sequence, depth, source);
        assert_eq!(allowed, self.naive.check_source(*owner, depth, source));
        let reservation = self.real.reserve_checkpoint(sequence, depth, source);
        if let Err(misuse) = self.naive.check_source(*owner, depth, source) {
            assert_eq!(reservation.unwrap_err(), misuse);
            return Some(());
        }
        let (owner, tokens) = (*owner, holder.tokens[..depth].to_vec());
        self.naive.reach(owner, depth, source);
        self.reserved(id, owner, &tokens, reservation.unwrap());
        Some(())
    }

    /// Mostly a slot that the sequence may name.
    fn source(&self, slots: &[u32], n: usize) -> u32 {
        match slots.len() {
            0 => n as u32 % (self.config.active.capacity + 1),
            count if n < 60 => slots[n % count],
            _ => 0,
        }
    }

    fn reserve_leased(&mut self, n: usize, more: &[u32], depth: Depth) -> Option<()> {
        let id = self.id();
        let (owner, lease) = &self.leases[pick(&self.leases, n)?];
        let path = self.naive.holders[owner].holdings.path();
        let mut tokens = path.map_or_else(Vec::new, |path| path.tokens.clone());
        tokens.extend(more);
        tokens.truncate(depth.pick(self.naive.legal, tokens.len()));
        let reservation = self.real.reserve(lease, &tokens);
        if let Err(misuse) = self.naive.check_leased(*owner, tokens.len()) {
            assert_eq!(reservation.unwrap_err(), misuse);
            return Some(());
        }
        self.reserved(id, *owner, &tokens, reservation.unwrap());
        Some(())
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

    /// Commits or publishes, as the owner and the pools demand; drops what cannot be published any
    /// more.
    fn commit(&mut self, n: usize, proven: bool) -> Option<()> {
        let n = pick(&self.pending, n)?;
        let waiting = self.pending.swap_remove(n);
        self.pending.push(Waiting {
            id: waiting.id,
            pending: if proven {
                waiting.pending
            } else {
                waiting.pending.unproven()
            },
            proven,
        });
        let n = self.pending.len() - 1;
        let Reserved { owner, tokens, .. } = self.naive.reserved[&self.pending[n].id].clone();
        let Some(holder) = self.naive.holders.get(&owner) else {
            return self.drop_pending(n);
        };
        let missing = tokens.len().saturating_sub(holder.depth()) / self.config.page_size as usize;
        let Some(pages) = self.engine_pages(missing) else {
            return self.drop_pending(n);
        };
        if let Some(at) = self.sequences.iter().position(|(id, _)| *id == owner) {
            let Waiting {
                id,
                pending,
                proven,
            } = self.pending.swap_remove(n);
            let sequence = &self.sequences[at].1;
            if self.engine_owns_kv() {
                let published = self.real.commit_pages(sequence, &pages, pending).unwrap();
                self.published(id, &pages, published, proven);
            } else {
                let outcome = self.real.commit(sequence, pending).unwrap();
                self.committed(id, None, outcome, &[], proven);
            }
        } else if self.naive.allocates_kv() {
            self.drop_pending(n)?;
        } else {
            self.publish(n, owner, &tokens, &pages);
        }
        Some(())
    }

    fn publish(&mut self, n: usize, owner: u64, tokens: &[u32], pages: &[u32]) {
        let Waiting {
            id,
            pending,
            proven,
        } = self.pending.swap_remove(n);
        let lease = self
            .leases
            .iter()
            .find(|(id, _)| *id == owner)
            .map(|(_, lease)| lease);
        let lease = lease.expect("its holder lives");
        let allowed = self.naive.check_prefix(owner, tokens);
        assert_eq!(self.real.can_publish(lease, tokens, pages), allowed);
        let published = self.real.publish(lease, tokens, pages, pending);
        match allowed {
            Ok(()) => self.published(
                id,
                pages,
                published.expect("the model publishes it"),
                proven,
            ),
            Err(misuse) => {
                assert_eq!(published.unwrap_err().why, misuse);
                self.naive.drop_reserved(id);
            }
        }
    }

    fn published(&mut self, id: u64, given: &[u32], published: Published, proven: bool) {
        let Published {
            outcome,
            canonical,
            duplicates,
        } = published;
        assert_eq!(canonical.len(), given.len());
        self.committed(id, Some(given), outcome, &duplicates, proven);
    }

    fn engine_owns_kv(&self) -> bool {
        self.naive.has_kv() && !self.naive.allocates_kv()
    }

    /// Free pages of the engine; none when it has too few, no pages at all when it has no KV of its
    /// own.
    fn engine_pages(&self, wanted: usize) -> Option<Vec<u32>> {
        if !self.engine_owns_kv() {
            return Some(Vec::new());
        }
        let pages: Vec<u32> = self.engine_free.iter().copied().take(wanted).collect();
        (pages.len() == wanted).then_some(pages)
    }

    fn committed(
        &mut self,
        id: u64,
        given: Option<&[u32]>,
        outcome: Commit,
        duplicates: &[u32],
        proven: bool,
    ) {
        let serial = match &outcome {
            Commit::Stored(stored) => Some(stored.serial),
            Commit::Skipped(_) => None,
        };
        let (expected, expected_duplicates) = self.naive.publish(id, given, serial, proven);
        assert_eq!(duplicates, expected_duplicates);
        // A skip takes no page, but for a duplicate among proven pages.
        let kept = match &outcome {
            Commit::Skipped(Skip::Duplicate) => duplicates.is_empty(),
            Commit::Skipped(_) => true,
            Commit::Stored(_) => false,
        };
        for page in given
            .unwrap_or_default()
            .iter()
            .filter(|page| !kept && !duplicates.contains(page))
        {
            assert!(
                self.engine_free.remove(page),
                "page {page} was the engine's"
            );
        }
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

    fn take_freed(&mut self) {
        let mut freed = self.real.take_freed(PoolKind::Kv);
        self.engine_free.extend(&freed);
        let mut expected = self.naive.take_freed(PoolKind::Kv);
        freed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(freed, expected);
    }

    /// Both caches agree on everything that can be seen, and the real one is sound.
    pub(crate) fn verify(&mut self) {
        let free: Vec<u32> = self.engine_free.iter().copied().collect();
        self.real
            .check(Some(&free))
            .unwrap_or_else(|report| panic!("{report}"));
        for pool in [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint] {
            assert_eq!(self.real.usage(pool), self.naive.usage(pool), "{pool}");
        }
        let stats = Stats {
            bytes: self.bytes(),
            ..self.naive.stats
        };
        assert_eq!(self.real.stats(), stats);
        self.verify_holders();
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

    fn verify_holders(&self) {
        for (id, sequence) in &self.sequences {
            let (view, holder) = (self.real.view(sequence).unwrap(), &self.naive.holders[id]);
            assert_eq!(view.tokens(), holder.tokens);
            assert_eq!(
                (view.reused(), view.claimed(), view.leased()),
                (holder.reused, holder.claimed, holder.depth())
            );
            assert_eq!(view.slots().collect::<Vec<u32>>(), holder.slots());
            assert_eq!(view.pages(), self.naive.pages_of(*id));
        }
        for (id, lease) in &self.leases {
            assert_eq!(
                self.real.lease_depth(lease).unwrap(),
                self.naive.holders[id].depth()
            );
            assert_eq!(
                self.real.lease_pages(lease).unwrap(),
                self.naive.pages_of(*id)
            );
            assert_eq!(
                self.real.lease_state(lease).unwrap(),
                self.naive.lease_state(*id)
            );
        }
    }

    /// Every cached state is found by the prompt that goes on from it.
    fn verify_cached(&mut self) {
        for prefix in self.naive.states.keys() {
            let prompt = [prefix.tokens.as_slice(), &[END]].concat();
            let real = self.real.lookup(&prefix.namespace, &prompt, None).unwrap();
            assert_same_match(&real, &self.naive.find(&prefix.namespace, &prompt, None));
        }
        self.naive.stats.lookups += self.naive.states.len() as u64;
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
        self.leases
            .drain(..)
            .for_each(|(id, _)| self.naive.finish(id));
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
        self.take_freed();
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
        let engine = if self.config.kv.external {
            self.config.kv.capacity as usize
        } else {
            0
        };
        assert_eq!(
            self.engine_free.len(),
            engine,
            "every page is back with the engine"
        );
    }
}
