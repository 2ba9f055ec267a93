//! Chunked prefill, speculative decode, checkpoints, retraction, and steps whose results come late
//! and out of order.

use std::collections::VecDeque;

use radixstate::{
    Cache, Commit, Config, Error, OutOfSlots, PoolKind, Reservation, Sequence, Shortage, Skip,
    StartOptions, Started, Stored, Usage,
};

use crate::prompts::{LEGAL, PAGE, Prompts};
use crate::random::Random;

/// Tokens of one prefill launch.
const CHUNK: usize = LEGAL;
/// Tokens that one decode drafts; at least the first is accepted.
const DRAFT: usize = 4;
/// Steps that may be out at the end of a turn.
const MOST_OUT: usize = 4;
const POOLS: [PoolKind; 3] = [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint];

/// A request that waits, and the length at which it ends.
struct Waiting {
    user: usize,
    tokens: Vec<u32>,
    target: usize,
}

struct Request {
    user: usize,
    target: usize,
    sequence: Sequence,
    /// Row of the running state.
    slot: u32,
    loaded: bool,
    /// Depth of the last checkpoint that was tried.
    checkpointed: usize,
}

struct Step {
    id: radixstate::Step,
    stored: Vec<Stored>,
}

/// What happened.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) started: u64,
    pub(crate) hits: u64,
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
    pub(crate) retracted: u64,
    pub(crate) stored: u64,
    pub(crate) refused: u64,
    pub(crate) reset: u64,
    pub(crate) pages_evicted: u64,
    pub(crate) states_evicted: u64,
    pub(crate) no_active_to_start: u64,
    pub(crate) no_active_to_track: u64,
    pub(crate) no_pages_to_start: u64,
    pub(crate) no_pages_to_grow: u64,
    pub(crate) no_room: u64,
}

pub(crate) struct Scheduler {
    pub(crate) cache: Cache,
    prompts: Prompts,
    concurrent: usize,
    random: Random,
    waiting: VecDeque<Waiting>,
    running: Vec<Request>,
    steps: Vec<Step>,
    /// How many requests may still be retracted in this turn.
    to_retract: usize,
    pub(crate) seen: Seen,
    /// Calls of the cache that decide something.
    pub(crate) operations: u64,
}

/// The shortage, when that is what went wrong.
fn short(error: &Error) -> OutOfSlots {
    match error {
        Error::Shortage(Shortage::Busy(short)) => *short,
        other => panic!("a scheduler that keeps the rules is only ever short: {other}"),
    }
}

impl Scheduler {
    pub(crate) fn new(config: Config, prompts: Prompts, concurrent: usize, seed: u64) -> Self {
        Self {
            cache: Cache::new(config).expect("a usable configuration"),
            prompts,
            concurrent,
            random: Random::new(seed),
            waiting: VecDeque::new(),
            running: Vec::new(),
            steps: Vec::new(),
            to_retract: 0,
            seen: Seen::default(),
            operations: 0,
        }
    }

    /// Caches every user's history: one leaf each.
    pub(crate) fn plant(&mut self) {
        for user in 0..self.prompts.users {
            let tokens = self.prompts.history(user);
            let Started { sequence, .. } = self
                .cache
                .start(
                    self.prompts.namespace(user),
                    &tokens,
                    StartOptions::default(),
                )
                .expect("it is empty");
            self.cache
                .loaded(&sequence)
                .expect("it was started just now");
            let source = self
                .cache
                .view(&sequence)
                .expect("it is ours")
                .slot()
                .expect("the pool is internal");
            let reserved = self
                .cache
                .reserve_checkpoint(&sequence, tokens.len(), source)
                .expect("a legal depth");
            let Reservation::Pending(pending) = reserved else {
                panic!("{reserved:?}")
            };
            let stored = self
                .cache
                .commit(&sequence, pending)
                .expect("reserved just now");
            assert!(matches!(stored, Commit::Stored(_)), "{stored:?}");
            self.cache.finish(sequence).expect("it is ours");
        }
        let (kv, checkpoints) = (
            self.cache.usage(PoolKind::Kv),
            self.cache.usage(PoolKind::Checkpoint),
        );
        assert_eq!(
            (kv.evictable, kv.free),
            (
                self.prompts.cached_pages(),
                kv.capacity - self.prompts.cached_pages()
            )
        );
        assert_eq!(
            checkpoints.evictable, self.prompts.users,
            "one checkpoint for each leaf"
        );
    }

    /// One step of the engine.
    pub(crate) fn turn(&mut self) {
        let id = self.cache.begin_step();
        self.steps.push(Step {
            id,
            stored: Vec::new(),
        });
        self.operations += 1;
        self.admit();
        self.to_retract = 1 + self.running.len() / 32;
        // From the newest on, so that `swap_remove` moves only those that had their turn.
        for n in (0..self.running.len()).rev() {
            match self.random.below(200) {
                0 => self.abort(n),
                1 => self.drop_handle(n),
                _ => self.advance(n),
            }
        }
        while self.steps.len() > self.random.below(MOST_OUT) + 1 {
            self.retire();
        }
    }

    fn admit(&mut self) {
        while self.waiting.len() < 1 + self.concurrent / 8 {
            let (user, tokens) = self.prompts.draw(&mut self.random);
            let target = tokens.len() + 1 + self.random.below(LEGAL);
            self.waiting.push_back(Waiting {
                user,
                tokens,
                target,
            });
        }
        // Mostly it leaves room for what runs to grow; without that, all would be retracted and
        // started in turn.
        let rush = self.random.one_in(8);
        while rush || self.has_headroom() {
            let Some(waiting) = self.waiting.pop_front() else {
                return;
            };
            if let Err(waiting) = self.start(waiting) {
                return self.waiting.push_front(waiting);
            }
        }
    }

    /// Whether running requests could still get a few pages if another one started.
    fn has_headroom(&mut self) -> bool {
        let Usage {
            free, evictable, ..
        } = self.cache.usage(PoolKind::Kv);
        free + evictable > self.running.len()
    }

    /// Starts a request, or gives it back when the pools are short.
    fn start(&mut self, waiting: Waiting) -> Result<(), Waiting> {
        self.operations += 1;
        let Waiting {
            user,
            tokens,
            target,
        } = &waiting;
        // Seldom the whole prompt at once.
        let reserve = if self.random.one_in(16) {
            None
        } else {
            Some(tokens.len().min(CHUNK))
        };
        let options = StartOptions {
            reserve,
            ..StartOptions::default()
        };
        let Started {
            sequence, matched, ..
        } = match self
            .cache
            .start(self.prompts.namespace(*user), tokens, options)
        {
            Ok(started) => started,
            Err(error) => {
                match short(&error).pool {
                    PoolKind::Active => self.seen.no_active_to_start += 1,
                    _ => self.seen.no_pages_to_start += 1,
                }
                return Err(waiting);
            }
        };
        self.seen.started += 1;
        self.seen.hits += u64::from(matched.length > 0);
        let slot = self
            .cache
            .view(&sequence)
            .expect("it is ours")
            .slot()
            .expect("the pool is internal");
        let (user, target, checkpointed) = (*user, *target, matched.length);
        self.running.push(Request {
            user,
            target,
            sequence,
            slot,
            loaded: false,
            checkpointed,
        });
        Ok(())
    }

    /// The next chunk, the next few tokens, or the end of a request.
    fn advance(&mut self, n: usize) {
        let request = &mut self.running[n];
        if !std::mem::replace(&mut request.loaded, true) {
            self.operations += 1;
            self.cache
                .loaded(&request.sequence)
                .expect("it is reported once");
        }
        let view = self.cache.view(&request.sequence).expect("it is ours");
        let (known, claimed) = (view.tokens().len(), view.claimed());
        if claimed < known {
            if !self.grow(n, CHUNK.min(known - claimed)) {
                return self.retract(n);
            }
        } else if known >= request.target {
            self.seen.finished += 1;
            return self.finish(n);
        } else if !self.decode(n) {
            return self.retract(n);
        }
        self.track(n);
        self.checkpoint(n);
    }

    /// Whether there was room.
    fn grow(&mut self, n: usize, by: usize) -> bool {
        self.operations += 1;
        let grown = self.cache.grow(&self.running[n].sequence, by);
        if let Err(error) = &grown {
            assert_eq!(short(error).pool, PoolKind::Kv);
            self.seen.no_pages_to_grow += 1;
        }
        grown.is_ok()
    }

    /// Drafts, keeps what is accepted, and gives the rest of the claim back. Whether there was
    /// room.
    fn decode(&mut self, n: usize) -> bool {
        if !self.grow(n, DRAFT) {
            return false;
        }
        let accepted: Vec<u32> = (0..1 + self.random.below(DRAFT))
            .map(|_| self.random.token())
            .collect();
        let sequence = &self.running[n].sequence;
        self.cache
            .append(sequence, &accepted)
            .expect("as many were claimed");
        self.cache.shrink(sequence).expect("it is ours");
        self.operations += 2;
        true
    }

    /// Seldom a second slot, which goes back with the sequence.
    fn track(&mut self, n: usize) {
        if !self.random.one_in(100) {
            return;
        }
        self.operations += 1;
        if let Err(error) = self.cache.take_slot(&self.running[n].sequence) {
            assert_eq!(short(&error).pool, PoolKind::Active);
            self.seen.no_active_to_track += 1;
        }
    }

    fn checkpoint(&mut self, n: usize) {
        let request = &mut self.running[n];
        let view = self.cache.view(&request.sequence).expect("it is ours");
        let depth = self
            .cache
            .legal_depth(view.tokens().len().min(view.claimed()));
        if depth <= request.checkpointed {
            return;
        }
        request.checkpointed = depth;
        self.operations += 1;
        match self
            .cache
            .reserve_checkpoint(&request.sequence, depth, request.slot)
            .expect("the slot is loaded")
        {
            Reservation::Skipped(skip) => self.seen.count(skip),
            Reservation::Pending(pending) if self.random.one_in(50) => drop(pending),
            Reservation::Pending(pending) => {
                self.operations += 1;
                match self
                    .cache
                    .commit(&request.sequence, pending)
                    .expect("reserved just now")
                {
                    Commit::Skipped(skip) => self.seen.count(skip),
                    Commit::Stored(stored) => self.keep(stored),
                }
            }
        }
    }

    fn keep(&mut self, stored: Stored) {
        self.seen.stored += 1;
        let step = self.steps.last_mut().expect("a turn has begun a step");
        assert_eq!(stored.step, Some(step.id.id()));
        step.stored.push(stored);
    }

    fn finish(&mut self, n: usize) {
        self.operations += 1;
        let request = self.running.swap_remove(n);
        self.cache.finish(request.sequence).expect("it is ours");
    }

    fn abort(&mut self, n: usize) {
        self.operations += 1;
        self.seen.aborted += 1;
        let request = self.running.swap_remove(n);
        self.cache.abort(request.sequence).expect("it is ours");
    }

    fn drop_handle(&mut self, n: usize) {
        self.operations += 1;
        self.seen.aborted += 1;
        drop(self.running.swap_remove(n));
    }

    /// Makes room for the others, and goes on later from what is cached of it then. What it gives
    /// back comes free when the steps that are out have retired, so only some are retracted in
    /// one turn; the others try again in the next.
    fn retract(&mut self, n: usize) {
        let Some(left) = self.to_retract.checked_sub(1) else {
            return;
        };
        self.to_retract = left;
        self.operations += 1;
        self.seen.retracted += 1;
        let Request {
            user,
            target,
            sequence,
            ..
        } = self.running.swap_remove(n);
        let tokens = self
            .cache
            .view(&sequence)
            .expect("it is ours")
            .tokens()
            .to_vec();
        self.cache.abort(sequence).expect("it is ours");
        self.waiting.push_back(Waiting {
            user,
            tokens,
            target,
        });
    }

    /// The result of any step that is out, sometimes twice, sometimes with states that are not
    /// finite.
    fn retire(&mut self) {
        self.operations += 1;
        let Step { id, stored } = self.steps.swap_remove(self.random.below(self.steps.len()));
        let refused: Vec<Stored> = stored
            .into_iter()
            .filter(|_| self.random.one_in(20))
            .collect();
        self.seen.refused += refused.len() as u64;
        self.cache.retire_step(&id, &refused).expect("it was begun");
        if self.random.one_in(20) {
            self.cache
                .retire_step(&id, &refused)
                .expect("a repeated result changes nothing");
        }
    }

    /// The counters equal what is known to be out.
    pub(crate) fn balance(&mut self) {
        let [kv, active, checkpoints] = POOLS.map(|pool| self.cache.usage(pool));
        for Usage {
            capacity,
            free,
            held,
            evictable,
            pinned,
            retiring,
            outbox,
        } in [kv, active, checkpoints]
        {
            assert_eq!(free + held + evictable + pinned + retiring, capacity);
            assert_eq!(outbox, 0);
        }
        let (mut pages, mut slots) = (0, 0);
        for request in &self.running {
            let view = self.cache.view(&request.sequence).expect("it is ours");
            pages += view.claimed().div_ceil(PAGE) - view.leased() / PAGE;
            slots += view.slots().count();
        }
        assert_eq!((kv.held, active.held, checkpoints.held), (pages, slots, 0));
    }

    /// Every invariant, from nothing.
    pub(crate) fn recount(&mut self) {
        self.cache
            .check(None)
            .unwrap_or_else(|report| panic!("{report}"));
    }

    /// Aborts what runs, lets every step retire, and empties the tree: every slot is back.
    pub(crate) fn shut_down(&mut self) {
        while !self.running.is_empty() {
            self.abort(self.running.len() - 1);
        }
        while !self.steps.is_empty() {
            self.retire();
        }
        self.recount();
        let evicted = self.cache.stats().evictions;
        self.seen.pages_evicted = (evicted.for_kv.kv + evicted.for_checkpoint.kv) as u64;
        self.seen.states_evicted =
            (evicted.for_kv.checkpoints + evicted.for_checkpoint.checkpoints) as u64;
        self.cache.evict(PoolKind::Checkpoint, usize::MAX);
        self.recount();
        for pool in POOLS {
            let Usage { capacity, free, .. } = self.cache.usage(pool);
            assert_eq!(free, capacity, "{pool}: all slots are back");
        }
    }
}

impl Seen {
    fn count(&mut self, skip: Skip) {
        match skip {
            Skip::NoRoom(_) => self.no_room += 1,
            Skip::Reset => self.reset += 1,
            Skip::Duplicate | Skip::NotReady => {}
            Skip::NotAligned | Skip::NoStore | Skip::NonFinite => {
                unreachable!("a scheduler that stores at legal depths: {skip:?}")
            }
        }
    }
}
