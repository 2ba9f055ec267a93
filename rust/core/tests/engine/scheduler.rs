//! An engine with allocators of its own: chunked prefill, decode, tracked slots, retraction,
//! aborts, flush, and steps that run ahead of the device. It uses only the lower layer of the
//! cache.

use std::collections::VecDeque;

use radixstate::{
    Cache, Commit, Config, Lease, Match, Misuse, Namespace, PoolKind, Published, Reservation,
    Stored,
};

use crate::device::{Device, Run, Work};
use crate::random::Random;

/// A request that waits: its tokens so far, how long it is to become, and an earlier lookup.
pub(crate) struct Waiting {
    tokens: Vec<u32>,
    target: usize,
    looked: Option<Match>,
}

struct Request {
    tokens: Vec<u32>,
    target: usize,
    lease: Lease,
    slot: u32,
    track: Option<u32>,
    /// The page table: cached pages up to the lease's depth, then pages of the engine.
    pages: Vec<u32>,
    /// Tokens whose KV and state are computed, or will be when the device gets there.
    computed: usize,
    branch: Option<usize>,
}

struct Step {
    id: radixstate::Step,
    work: Vec<Work>,
    stored: Vec<Stored>,
}

/// Rows that the engine gave up while steps were out; free once all of those have retired.
struct Deferred {
    newest: u64,
    pages: Vec<u32>,
    slots: Vec<u32>,
}

/// What happened, so that a test can see that it did.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) retracted: u64,
    pub(crate) stale: u64,
    pub(crate) tracked: u64,
    pub(crate) duplicates: u64,
    pub(crate) finished: u64,
}

pub(crate) struct Engine {
    pub(crate) cache: Cache,
    device: Device,
    page: usize,
    free_pages: Vec<u32>,
    free_slots: Vec<u32>,
    waiting: VecDeque<Waiting>,
    running: Vec<Request>,
    /// The step being filled.
    step: Option<Step>,
    launched: VecDeque<Step>,
    executed: Vec<Step>,
    deferred: Vec<Deferred>,
    random: Random,
    pub(crate) seen: Seen,
}

impl Engine {
    pub(crate) fn new(config: Config, seed: u64) -> Self {
        let (kv, active) = (config.kv.capacity, config.active.capacity);
        let page = config.page_size as usize;
        Self {
            cache: Cache::new(config).expect("a usable configuration"),
            device: Device::new(page, kv, active, config.checkpoints.capacity),
            page,
            free_pages: (1..=kv).collect(),
            free_slots: (1..=active).collect(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            launched: VecDeque::new(),
            executed: Vec::new(),
            deferred: Vec::new(),
            random: Random::new(seed),
            seen: Seen::default(),
        }
    }

    pub(crate) fn submit(&mut self, tokens: Vec<u32>, target: usize) {
        self.waiting.push_back(Waiting {
            tokens,
            target,
            looked: None,
        });
    }

    /// Schedules and launches one step, then lets the device get on with what is out.
    pub(crate) fn turn(&mut self) {
        let id = self.cache.begin_step();
        self.step = Some(Step {
            id,
            work: Vec::new(),
            stored: Vec::new(),
        });
        self.admit();
        let batch = self.running.len();
        for n in (0..batch).rev() {
            self.advance(n);
        }
        if self.random.one_in(12) && !self.running.is_empty() {
            let request = self
                .running
                .swap_remove(self.random.below(self.running.len()));
            self.end(request);
        }
        self.launched.extend(self.step.take());
        self.progress(3);
    }

    pub(crate) fn flush(&mut self) {
        self.cache.reset();
    }

    /// No page is both free here and owned by the cache.
    pub(crate) fn check(&mut self) {
        self.cache
            .check(Some(&self.free_pages))
            .unwrap_or_else(|report| panic!("{report}"));
    }

    /// Aborts everything, drains the device and empties the cache: nothing may be missing.
    pub(crate) fn shut_down(&mut self) {
        while let Some(request) = self.running.pop() {
            self.end(request);
        }
        self.progress(0);
        self.cache.evict(PoolKind::Kv, usize::MAX);
        self.collect_freed();
        self.check();
        self.free_pages.sort_unstable();
        self.free_slots.sort_unstable();
        assert!(
            self.free_pages
                .iter()
                .copied()
                .eq(1..self.device.kv.len() as u32),
            "{:?}",
            self.free_pages
        );
        assert!(
            self.free_slots
                .iter()
                .copied()
                .eq(1..self.device.active.len() as u32),
            "{:?}",
            self.free_slots
        );
        let checkpoints = self.cache.usage(PoolKind::Checkpoint);
        assert_eq!(checkpoints.free, checkpoints.capacity);
    }

    fn step(&mut self) -> &mut Step {
        self.step
            .as_mut()
            .expect("work is enqueued while a step is filled")
    }

    fn enqueue(&mut self, work: Work) {
        self.step().work.push(work);
    }

    fn admit(&mut self) {
        while let Some(waiting) = self.waiting.pop_front() {
            let Some(slot) = self.free_slots.pop() else {
                let looked = self.look_ahead(waiting);
                return self.waiting.push_front(looked);
            };
            let (lease, matched) = self.lease(&waiting);
            let pages = self.cache.lease_pages(&lease).unwrap();
            let state = self.cache.lease_state(&lease).unwrap();
            let prefix = waiting.tokens[..matched.length].to_vec();
            self.enqueue(match state {
                Some(src) => Work::Load {
                    src,
                    dst: slot,
                    prefix,
                },
                None => Work::Clear { slot },
            });
            self.cache.lease_loaded(&lease).unwrap();
            let track = if self.random.one_in(2) {
                self.free_slots.pop()
            } else {
                None
            };
            let Waiting { tokens, target, .. } = waiting;
            let (computed, branch) = (matched.length, matched.branch);
            self.running.push(Request {
                tokens,
                target,
                lease,
                slot,
                track,
                pages,
                computed,
                branch,
            });
        }
    }

    /// A scheduler looks at who waits; by the time it starts them the match may be stale.
    fn look_ahead(&mut self, waiting: Waiting) -> Waiting {
        let looked = self
            .cache
            .lookup(&Namespace::default(), &waiting.tokens, None)
            .unwrap();
        Waiting {
            looked: Some(looked),
            ..waiting
        }
    }

    fn lease(&mut self, waiting: &Waiting) -> (Lease, Match) {
        if let Some(matched) = &waiting.looked {
            match self.cache.lease(matched) {
                Ok(lease) => return (lease, matched.clone()),
                Err(Misuse::Stale(_)) => self.seen.stale += 1,
                Err(other) => panic!("{other}"),
            }
        }
        let matched = self
            .cache
            .lookup(&Namespace::default(), &waiting.tokens, None)
            .unwrap();
        (
            self.cache
                .lease(&matched)
                .expect("nothing happened since the lookup"),
            matched,
        )
    }

    /// One chunk of prefill or one token of a request, or its end, or its retraction for want of
    /// pages.
    fn advance(&mut self, n: usize) {
        let request = &mut self.running[n];
        if request.computed == request.tokens.len() {
            if request.tokens.len() >= request.target {
                let request = self.running.swap_remove(n);
                self.seen.finished += 1;
                return self.end(request);
            }
            request.tokens.push(self.random.token());
        }
        let request = &self.running[n];
        let mut to = request
            .tokens
            .len()
            .min(request.computed + 1 + self.random.below(6));
        if let Some(branch) = request
            .branch
            .filter(|&branch| request.computed < branch && branch < to)
        {
            to = branch;
        }
        let missing = to.div_ceil(self.page).saturating_sub(request.pages.len());
        let Some(pages) = self.allocate(missing) else {
            return self.retract(n);
        };
        self.running[n].pages.extend(pages);
        self.launch(n, to);
    }

    /// Enqueues the chunk up to `to`, and a checkpoint at the last legal depth in it whose state
    /// can be had.
    fn launch(&mut self, n: usize, to: usize) {
        let request = &mut self.running[n];
        let depth = self.cache.legal_depth(to);
        let track = request
            .track
            .filter(|_| depth > request.computed && depth < to);
        let run = Work::Run(Run {
            slot: request.slot,
            pages: request.pages.clone(),
            tokens: request.tokens[..to].to_vec(),
            from: request.computed,
            track: track.map(|track| (track, depth)),
        });
        request.computed = to;
        let source = if depth == to {
            Some(request.slot)
        } else {
            track
        };
        self.seen.tracked += u64::from(track.is_some());
        self.enqueue(run);
        if let Some(source) = source {
            self.checkpoint(n, depth, source);
        }
    }

    fn checkpoint(&mut self, n: usize, depth: usize, source: u32) {
        let request = &self.running[n];
        let prefix = request.tokens[..depth].to_vec();
        let Reservation::Pending(pending) = self.cache.reserve(&request.lease, &prefix).unwrap()
        else {
            return;
        };
        let (slot, leased) = (
            pending.slot(),
            self.cache.lease_depth(&request.lease).unwrap(),
        );
        self.device.checkpoints[slot as usize] = None;
        if self.random.one_in(20) {
            return drop(pending);
        }
        self.enqueue(Work::Encode {
            src: source,
            dst: slot,
            prefix: prefix.clone(),
        });
        let table = leased / self.page..depth.max(leased) / self.page;
        let request = &mut self.running[n];
        let given = request.pages[table.clone()].to_vec();
        let Published {
            outcome,
            canonical,
            duplicates,
        } = self
            .cache
            .publish(&request.lease, &prefix, &given, pending)
            .unwrap();
        request.pages.splice(table, canonical);
        self.seen.duplicates += duplicates.len() as u64;
        self.defer(duplicates, Vec::new());
        if let Commit::Stored(stored) = outcome {
            self.step().stored.push(stored);
        }
    }

    /// Pages of the engine, after the cache has given up what it can.
    fn allocate(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.free_pages.len() {
            self.cache.evict(PoolKind::Kv, n - self.free_pages.len());
            self.collect_freed();
        }
        let rest = self.free_pages.len().checked_sub(n)?;
        Some(self.free_pages.split_off(rest))
    }

    fn collect_freed(&mut self) {
        let freed = self.cache.take_freed(PoolKind::Kv);
        self.free(freed, Vec::new());
    }

    /// Gives a request's place to others; it goes on later from what is cached of it then.
    fn retract(&mut self, n: usize) {
        let request = self.running.swap_remove(n);
        let (tokens, target) = (request.tokens.clone(), request.target);
        self.end(request);
        self.waiting.push_back(Waiting {
            tokens,
            target,
            looked: None,
        });
        self.seen.retracted += 1;
    }

    fn end(&mut self, request: Request) {
        let leased = self.cache.lease_depth(&request.lease).unwrap();
        let own = request.pages[leased / self.page..].to_vec();
        self.defer(
            own,
            request.track.into_iter().chain([request.slot]).collect(),
        );
        if self.random.one_in(2) {
            self.cache.release(request.lease).unwrap();
        }
    }

    /// The newest step that has not retired, the one being filled included.
    fn newest(&self) -> Option<u64> {
        let out = self.launched.iter().chain(&self.executed).chain(&self.step);
        out.map(|step| step.id.id()).max()
    }

    fn defer(&mut self, pages: Vec<u32>, slots: Vec<u32>) {
        match self.newest() {
            Some(newest) => self.deferred.push(Deferred {
                newest,
                pages,
                slots,
            }),
            None => self.free(pages, slots),
        }
    }

    fn free(&mut self, pages: Vec<u32>, slots: Vec<u32>) {
        pages
            .iter()
            .for_each(|&page| self.device.kv[page as usize] = None);
        slots
            .iter()
            .for_each(|&slot| self.device.active[slot as usize] = None);
        self.free_pages.extend(pages);
        self.free_slots.extend(slots);
    }

    /// The device executes in order, as late as it may; its reports arrive late and in any order.
    fn progress(&mut self, most_out: usize) {
        while self.launched.len() + self.executed.len() > self.random.below(most_out + 1) {
            if let Some(step) = self.launched.pop_front() {
                step.work.iter().for_each(|work| self.device.execute(work));
                self.executed.push(step);
            }
            if most_out == 0 || self.random.one_in(2) {
                let step = self
                    .executed
                    .swap_remove(self.random.below(self.executed.len()));
                self.retire(&step);
            }
        }
    }

    fn retire(&mut self, step: &Step) {
        let refused: Vec<Stored> = step
            .stored
            .iter()
            .filter(|_| self.random.one_in(15))
            .cloned()
            .collect();
        self.cache.retire_step(&step.id, &refused).unwrap();
        let oldest = self
            .launched
            .iter()
            .chain(&self.executed)
            .map(|step| step.id.id())
            .min();
        let is_free =
            |deferred: &mut Deferred| oldest.is_none_or(|oldest| deferred.newest < oldest);
        let free: Vec<Deferred> = self.deferred.extract_if(.., is_free).collect();
        free.into_iter()
            .for_each(|Deferred { pages, slots, .. }| self.free(pages, slots));
    }
}
