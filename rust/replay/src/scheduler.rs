//! A scheduler: admission, chunked prefill, decode with drafts, checkpoints, retraction, aborts,
//! and steps whose results come late and out of order.

use std::collections::VecDeque;

use radixstate::{Cache, Commit, Match, Namespace, PageOwner, PoolKind, Skip, Stored};

use crate::random::Random;

/// A request that waits: its tokens so far, and how many it is to have in the end.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Where its prefixes are cached.
    pub namespace: Namespace,
    /// The prompt, and what it had produced before it was retracted.
    pub tokens: Vec<u32>,
    /// The length at which it ends.
    pub target: usize,
    /// An earlier lookup, stale by now or not.
    pub looked: Option<Match>,
}

/// A request that runs.
#[derive(Debug)]
pub struct Running<H> {
    /// Where its prefixes are cached.
    pub namespace: Namespace,
    /// Known tokens.
    pub tokens: Vec<u32>,
    /// The length at which it ends.
    pub target: usize,
    /// Tokens whose KV and state are computed, or will be when the device gets there.
    pub computed: usize,
    /// Another prompt left the cached one here: a state is worth keeping.
    branch: Option<usize>,
    /// Depth of the last checkpoint that was tried.
    checkpointed: usize,
    /// The handles that the engine keeps for it.
    pub held: H,
}

/// How a request ends.
#[derive(Debug, Clone, Copy)]
pub enum End {
    /// It has all its tokens.
    Finish,
    /// It was given up.
    Abort,
    /// Its handles are dropped.
    Drop,
}

/// How a scheduler's requests reach the cache. Shortages name the pool that is short.
pub trait Engine {
    /// What it keeps for a running request.
    type Held;
    /// Who owns the KV pages.
    type Pages: PageOwner;

    /// The cache.
    fn cache(&mut self) -> &mut Cache<Self::Pages>;

    /// A step has begun: what is enqueued from now on belongs to it.
    fn begin(&mut self, _step: u64) {}

    /// Pins what the request reuses, and takes a slot.
    ///
    /// # Errors
    ///
    /// The pool that is short.
    fn start(
        &mut self,
        waiting: &Waiting,
        reserve: Option<usize>,
        seen: &mut Seen,
    ) -> Result<(Self::Held, Match), PoolKind>;

    /// Positions in which running requests could grow if another one started, in pages.
    fn free_pages(&mut self) -> usize;

    /// Has pages for `positions`.
    ///
    /// # Errors
    ///
    /// The pool that is short.
    fn claim(&mut self, held: &mut Self::Held, positions: usize) -> Result<(), PoolKind>;

    /// Drafted tokens were accepted; what is claimed beyond them goes back.
    fn accept(&mut self, held: &mut Self::Held, tokens: &[u32]);

    /// Takes a slot for a state on the way, if the request has none.
    ///
    /// # Errors
    ///
    /// The pool that is short.
    fn track(&mut self, held: &mut Self::Held) -> Result<(), PoolKind>;

    /// Computes up to `to`. Whether the state at `legal`, the deepest legal depth on the way, can
    /// then be stored.
    fn run(&mut self, request: &mut Running<Self::Held>, to: usize, legal: usize) -> bool;

    /// Stores the state at `depth`, which [`run`](Self::run) said can be stored; or only reserves
    /// its slot, and gives it back.
    fn checkpoint(
        &mut self,
        request: &mut Running<Self::Held>,
        depth: usize,
        keep: bool,
        seen: &mut Seen,
    ) -> Option<Commit>;

    /// Gives everything back.
    fn end(&mut self, held: Self::Held, end: End);

    /// The device runs the oldest step that it has not run.
    fn execute(&mut self) {}

    /// A step has retired; `_oldest` is the oldest that has not.
    fn retired(&mut self, _oldest: Option<u64>) {}

    /// Demands that the counters equal what is known to be out; may be quicker than a recount.
    fn balance(&mut self, _running: &[Running<Self::Held>]) {
        self.recount();
    }

    /// Demands every invariant, recomputed from nothing.
    fn recount(&mut self);
}

/// Sizes and odds. A chance of `n` is one in `n`.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Tokens of one prefill launch, from and to.
    pub chunk: (usize, usize),
    /// Tokens that one decode drafts; at least the first is accepted.
    pub draft: usize,
    /// Steps that may be out at the end of a turn.
    pub most_out: usize,
    /// Chance that a turn admits all it can, also when that leaves no room for what runs to grow.
    pub rush: usize,
    /// Chance that a start claims pages for the whole prompt.
    pub whole: usize,
    /// Chance that a running request takes a slot for a state on the way.
    pub track: usize,
    /// Chance that a running request is aborted or dropped in a turn.
    pub abort: usize,
    /// Chance that a reserved checkpoint is given back.
    pub drop_pending: usize,
}

/// What happened, so that a test can see that it did. The rest is in the cache's own counters.
#[derive(Debug, Default, Clone, Copy)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Seen {
    pub finished: u64,
    pub aborted: u64,
    pub retracted: u64,
    pub tracked: u64,
    pub duplicates: u64,
    pub stale: u64,
    pub refused: u64,
    pub no_active_to_start: u64,
    pub no_active_to_track: u64,
    pub no_pages_to_start: u64,
    pub no_pages_to_grow: u64,
}

struct Step {
    id: radixstate::Step,
    stored: Vec<Stored>,
}

/// Serves requests through an engine.
pub struct Scheduler<E: Engine> {
    /// The engine.
    pub engine: E,
    /// What happened.
    pub seen: Seen,
    /// Calls of the engine that decide something.
    pub operations: u64,
    /// Source of all choices.
    pub random: Random,
    habits: Habits,
    waiting: VecDeque<Waiting>,
    running: Vec<Running<E::Held>>,
    /// Steps that the device has not run, the one being filled included.
    launched: VecDeque<Step>,
    /// Steps that it has run, and whose results are on their way.
    executed: Vec<Step>,
    /// How many requests may still be retracted in this turn.
    to_retract: usize,
}

impl<E: Engine> Scheduler<E> {
    /// Nothing to do yet.
    pub fn new(engine: E, habits: Habits, seed: u64) -> Self {
        Self {
            engine,
            seen: Seen::default(),
            operations: 0,
            random: Random::new(seed),
            habits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            launched: VecDeque::new(),
            executed: Vec::new(),
            to_retract: 0,
        }
    }

    /// A request arrives.
    pub fn submit(&mut self, namespace: Namespace, tokens: Vec<u32>, target: usize) {
        let looked = None;
        self.waiting.push_back(Waiting {
            namespace,
            tokens,
            target,
            looked,
        });
    }

    /// Requests that have not started.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// One step of the engine.
    pub fn turn(&mut self) {
        let id = self.engine.cache().begin_step();
        self.engine.begin(id.id());
        self.launched.push_back(Step {
            id,
            stored: Vec::new(),
        });
        self.operations += 1;
        self.admit();
        self.to_retract = 1 + self.running.len() / 32;
        // From the newest on, so that `swap_remove` moves only those that had their turn.
        for n in (0..self.running.len()).rev() {
            if self.random.one_in(self.habits.abort) {
                self.seen.aborted += 1;
                let end = if self.random.one_in(2) {
                    End::Drop
                } else {
                    End::Abort
                };
                self.end(n, end);
            } else {
                self.advance(n);
            }
        }
        self.progress(self.habits.most_out);
    }

    /// Demands that the counters equal what is known to be out.
    pub fn balance(&mut self) {
        self.engine.balance(&self.running);
    }

    /// Aborts what runs and lets every step retire. The cache still holds what was stored.
    pub fn shut_down(&mut self) {
        while !self.running.is_empty() {
            self.end(self.running.len() - 1, End::Abort);
        }
        self.progress(0);
        self.engine.retired(None);
        self.engine.recount();
    }

    fn admit(&mut self) {
        // Mostly it leaves room for what runs to grow; without that, all would be retracted and
        // started in turn.
        let rush = self.random.one_in(self.habits.rush);
        while rush || self.engine.free_pages() > self.running.len() {
            let Some(mut waiting) = self.waiting.pop_front() else {
                return;
            };
            if !self.start(&waiting) {
                waiting.looked = Some(self.look_ahead(&waiting));
                return self.waiting.push_front(waiting);
            }
        }
    }

    /// A scheduler looks at who waits; by the time it starts them the match may be stale.
    fn look_ahead(&mut self, waiting: &Waiting) -> Match {
        let Waiting {
            namespace, tokens, ..
        } = waiting;
        self.engine
            .cache()
            .lookup(namespace, tokens, None)
            .expect("no prompt is empty")
    }

    /// Whether there was room.
    fn start(&mut self, waiting: &Waiting) -> bool {
        self.operations += 1;
        let whole = self.random.one_in(self.habits.whole);
        let reserve = (!whole).then(|| waiting.tokens.len().min(self.habits.chunk.1));
        let (held, matched) = match self.engine.start(waiting, reserve, &mut self.seen) {
            Ok(started) => started,
            Err(pool) => {
                match pool {
                    PoolKind::Active => self.seen.no_active_to_start += 1,
                    _ => self.seen.no_pages_to_start += 1,
                }
                return false;
            }
        };
        self.running.push(Running {
            namespace: waiting.namespace.clone(),
            tokens: waiting.tokens.clone(),
            target: waiting.target,
            computed: matched.length,
            branch: matched.branch,
            checkpointed: matched.length,
            held,
        });
        self.track(self.running.len() - 1);
        true
    }

    /// A chunk of prefill or a few tokens of a request; or its end, or its retraction for want of
    /// pages.
    fn advance(&mut self, n: usize) {
        let Running {
            tokens,
            target,
            computed,
            ..
        } = &self.running[n];
        let (known, computed) = (tokens.len(), *computed);
        let is_decode = computed == known;
        if is_decode && known >= *target {
            self.seen.finished += 1;
            return self.end(n, End::Finish);
        }
        let to = if is_decode {
            known + self.habits.draft
        } else {
            self.chunk_end(n)
        };
        self.operations += 1;
        if let Err(pool) = self.engine.claim(&mut self.running[n].held, to) {
            assert_eq!(pool, PoolKind::Kv);
            self.seen.no_pages_to_grow += 1;
            return self.retract(n);
        }
        let to = if is_decode { self.decode(n) } else { to };
        self.track(n);
        self.compute(n, to);
    }

    /// Where the next chunk ends: a state is worth keeping where another prompt branched off.
    fn chunk_end(&mut self, n: usize) -> usize {
        let (least, most) = self.habits.chunk;
        let length = least + self.random.below(most - least + 1);
        let Running {
            tokens,
            computed,
            branch,
            ..
        } = &self.running[n];
        let to = tokens.len().min(computed + length);
        branch
            .filter(|&branch| *computed < branch && branch < to)
            .unwrap_or(to)
    }

    /// Keeps what is accepted of a draft; how many tokens are known then.
    fn decode(&mut self, n: usize) -> usize {
        let accepted: Vec<u32> = (0..1 + self.random.below(self.habits.draft))
            .map(|_| self.random.token())
            .collect();
        let request = &mut self.running[n];
        self.engine.accept(&mut request.held, &accepted);
        request.tokens.extend(&accepted);
        self.operations += 1;
        request.tokens.len()
    }

    fn track(&mut self, n: usize) {
        if self.random.one_in(self.habits.track) {
            self.operations += 1;
            if let Err(pool) = self.engine.track(&mut self.running[n].held) {
                assert_eq!(pool, PoolKind::Active);
                self.seen.no_active_to_track += 1;
            }
        }
    }

    /// Computes up to `to`, and stores the state at the deepest legal depth that can be had.
    fn compute(&mut self, n: usize, to: usize) {
        let depth = self.engine.cache().legal_depth(to);
        let request = &mut self.running[n];
        let is_there = self.engine.run(request, to, depth);
        self.seen.tracked += u64::from(is_there && depth < to);
        request.computed = to;
        if !is_there || depth <= request.checkpointed {
            return;
        }
        request.checkpointed = depth;
        self.operations += 1;
        let keep = !self.random.one_in(self.habits.drop_pending);
        match self
            .engine
            .checkpoint(&mut self.running[n], depth, keep, &mut self.seen)
        {
            Some(Commit::Stored(stored)) => {
                let step = self.launched.back_mut().expect("a turn has begun a step");
                assert_eq!(stored.step, Some(step.id.id()));
                step.stored.push(stored);
            }
            Some(Commit::Skipped(skip)) => assert!(
                matches!(
                    skip,
                    Skip::NoRoom(_) | Skip::Reset | Skip::Duplicate | Skip::NotReady
                ),
                "a scheduler that stores at legal depths: {skip:?}"
            ),
            None => {}
        }
    }

    fn end(&mut self, n: usize, end: End) {
        self.operations += 1;
        let request = self.running.swap_remove(n);
        self.engine.end(request.held, end);
    }

    /// Makes room for the others, and goes on later from what is cached of it then. What it gives
    /// back comes free when the steps that are out have retired, so only some are retracted in
    /// one turn; the others try again in the next.
    fn retract(&mut self, n: usize) {
        let Some(left) = self.to_retract.checked_sub(1) else {
            return;
        };
        self.to_retract = left;
        self.seen.retracted += 1;
        let Running {
            namespace,
            tokens,
            target,
            ..
        } = &mut self.running[n];
        let tokens = std::mem::take(tokens);
        let waiting = Waiting {
            namespace: namespace.clone(),
            tokens,
            target: *target,
            looked: None,
        };
        self.end(n, End::Abort);
        self.waiting.push_back(waiting);
    }

    /// The device executes in order, as late as it may; its reports arrive late and in any order.
    fn progress(&mut self, most_out: usize) {
        while self.launched.len() + self.executed.len() > self.random.below(most_out + 1) {
            if let Some(step) = self.launched.pop_front() {
                self.engine.execute();
                self.executed.push(step);
            }
            if most_out == 0 || self.random.one_in(2) {
                let n = self.random.below(self.executed.len());
                let step = self.executed.swap_remove(n);
                self.retire(step);
            }
        }
    }

    /// The result of a step, sometimes twice, sometimes with states that are not finite.
    fn retire(&mut self, Step { id, stored }: Step) {
        self.operations += 1;
        let refused: Vec<Stored> = stored
            .into_iter()
            .filter(|_| self.random.one_in(16))
            .collect();
        self.seen.refused += refused.len() as u64;
        let times = if self.random.one_in(20) { 2 } else { 1 };
        for _ in 0..times {
            self.engine
                .cache()
                .retire_step(&id, &refused)
                .expect("it was begun");
        }
        let out = self.launched.iter().chain(&self.executed);
        let oldest = out.map(|step| step.id.id()).min();
        self.engine.retired(oldest);
    }
}
