//! An engine whose pages and slots are the cache's: it runs sequences.

use radixstate::policy::{Lru, Policy};
use radixstate::{
    Cache, Commit, Config, Error, Match, OwnPages, PoolKind, Reservation, Sequence, Shortage,
    StartOptions, Started, Usage,
};

use crate::scheduler::{End, Engine, Running, Seen, Waiting};

const POOLS: [PoolKind; 3] = [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint];

/// What the engine keeps for a running request.
pub struct Held {
    sequence: Sequence,
    loaded: bool,
}

/// Requests as sequences of the cache. No device: nothing is computed.
pub struct Sequences {
    cache: Cache,
    page: usize,
}

impl Sequences {
    /// An empty cache of internal pools.
    ///
    /// # Panics
    ///
    /// The configuration is refused.
    pub fn new(config: Config) -> Self {
        Self::with_policy(config, Box::new(Lru::default()))
    }

    /// The same with another policy.
    ///
    /// # Panics
    ///
    /// The configuration is refused.
    pub fn with_policy(config: Config, policy: Box<dyn Policy>) -> Self {
        let page = config.page_size as usize;
        Self {
            cache: Cache::with_policy(config, policy).expect("a usable configuration"),
            page,
        }
    }
}

/// The pool that is short, when that is what went wrong.
fn short(error: Error) -> PoolKind {
    match error {
        Error::Shortage(Shortage::Busy(short)) => short.pool,
        other => panic!("a scheduler that keeps the rules is only ever short: {other}"),
    }
}

impl Engine for Sequences {
    type Held = Held;
    type Pages = OwnPages;

    fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }

    fn start(
        &mut self,
        waiting: &Waiting,
        reserve: Option<usize>,
        _: &mut Seen,
    ) -> Result<(Held, Match), PoolKind> {
        let options = StartOptions {
            reserve,
            ..StartOptions::default()
        };
        let started = self
            .cache
            .start(&waiting.namespace, &waiting.tokens, options);
        let Started {
            sequence, matched, ..
        } = started.map_err(short)?;
        let held = Held {
            sequence,
            loaded: false,
        };
        Ok((held, matched))
    }

    fn free_pages(&mut self) -> usize {
        let Usage {
            free, evictable, ..
        } = self.cache.usage(PoolKind::Kv);
        free + evictable
    }

    fn claim(&mut self, held: &mut Held, positions: usize) -> Result<(), PoolKind> {
        let claimed = self
            .cache
            .view(&held.sequence)
            .expect("it is ours")
            .claimed();
        match positions.checked_sub(claimed) {
            None | Some(0) => Ok(()),
            Some(more) => self.cache.grow(&held.sequence, more).map_err(short),
        }
    }

    fn accept(&mut self, held: &mut Held, tokens: &[u32]) {
        self.cache
            .append(&held.sequence, tokens)
            .expect("as many were claimed");
        self.cache.shrink(&held.sequence).expect("it is ours");
    }

    fn track(&mut self, held: &mut Held) -> Result<(), PoolKind> {
        self.cache
            .take_slot(&held.sequence)
            .map(drop)
            .map_err(short)
    }

    /// Reports before the first chunk that the state was loaded.
    fn run(&mut self, request: &mut Running<Held>, _: usize, _: usize) -> bool {
        let Held { sequence, loaded } = &mut request.held;
        if !std::mem::replace(loaded, true) {
            self.cache.loaded(sequence).expect("it is reported once");
        }
        true
    }

    fn checkpoint(
        &mut self,
        request: &mut Running<Held>,
        depth: usize,
        keep: bool,
        _: &mut Seen,
    ) -> Option<Commit> {
        let sequence = &request.held.sequence;
        let view = self.cache.view(sequence).expect("it is ours");
        let slot = view.slot();
        let reserved = self.cache.reserve_checkpoint(sequence, depth, slot);
        let pending = match reserved.expect("the slot is loaded") {
            Reservation::Skipped(skip) => return Some(Commit::Skipped(skip)),
            Reservation::Pending(_) if !keep => return None,
            Reservation::Pending(pending) => pending,
        };
        let committed = self.cache.commit(sequence, pending);
        Some(committed.expect("reserved just now"))
    }

    fn end(&mut self, held: Held, end: End) {
        match end {
            End::Finish => self.cache.finish(held.sequence).expect("it is ours"),
            End::Abort => self.cache.abort(held.sequence).expect("it is ours"),
            End::Drop => drop(held.sequence),
        }
    }

    fn balance(&mut self, running: &[Running<Held>]) {
        let [kv, active, checkpoints] = POOLS.map(|pool| self.cache.usage(pool));
        for usage in [kv, active, checkpoints] {
            let Usage {
                capacity,
                free,
                held,
                evictable,
                pinned,
                retiring,
                outbox,
            } = usage;
            assert_eq!(free + held + evictable + pinned + retiring, capacity);
            assert_eq!(outbox, 0);
        }
        let (mut pages, mut slots) = (0, 0);
        for request in running {
            let view = self.cache.view(&request.held.sequence).expect("it is ours");
            assert_eq!(
                view.tokens(),
                request.tokens,
                "the cache knows the same tokens"
            );
            pages += view.claimed().div_ceil(self.page) - view.leased() / self.page;
            slots += view.slots().count();
        }
        assert_eq!((kv.held, active.held, checkpoints.held), (pages, slots, 0));
    }

    fn recount(&mut self) {
        self.cache
            .check(None)
            .unwrap_or_else(|report| panic!("{report}"));
    }
}
