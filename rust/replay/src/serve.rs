//! Serves a recorded trace through a real cache, one request after the other.

use radixstate::policy::{Cost, Policy};
use radixstate::{
    Begin, Cache, Commit, Config, Error, Namespace, PoolConfig, Reservation, Sequence, StartOptions,
};

/// Tokens of one block of a trace.
pub const BLOCK: usize = 512;

/// A recorded request. Equal ids mean an equal prefix up to and with that block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Tokens of the prompt, at least 1.
    pub tokens: usize,
    /// One for each block of the prompt, the last of which may be partial.
    pub blocks: Vec<u32>,
}

impl Recorded {
    /// Blocks that could be reused: whole ones, and less than all of the prompt.
    pub fn reusable(&self) -> usize {
        let whole = self.tokens.saturating_sub(1) / BLOCK;
        whole.min(self.blocks.len())
    }
}

/// A cache in which a block of the trace is one page of one token, so that no token is copied.
pub struct Replay {
    /// The cache.
    pub cache: Cache,
    namespace: Namespace,
    cost: Cost,
    prompt: Vec<u32>,
}

/// What became of the requests of a trace.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    /// Recordeds.
    pub requests: u64,
    /// Tokens of their prompts.
    pub tokens: u64,
    /// Tokens of those that were reused.
    pub reused: u64,
    /// Cost of all prompts without a cache.
    pub cost: f64,
    /// Cost of what was computed.
    pub computed: f64,
}

impl Totals {
    /// Share of the tokens that was reused.
    pub fn reuse(&self) -> f64 {
        self.reused as f64 / self.tokens as f64
    }

    /// Share of the cost that was still to be paid.
    pub fn recomputed(&self) -> f64 {
        self.computed / self.cost
    }
}

impl Replay {
    /// An empty cache of `states` checkpoints, and KV pages for the whole trace.
    ///
    /// # Errors
    /// [`Error`] for sizes that a cache refuses.
    pub fn new(
        trace: &[Recorded],
        states: u32,
        cost: Cost,
        policy: Box<dyn Policy>,
    ) -> Result<Self, Error> {
        // More than there are different blocks, and one prompt on top.
        let ids = trace.iter().flat_map(|request| &request.blocks);
        let longest = trace.iter().map(Recorded::reusable).max().unwrap_or(0) + 1;
        let different = ids.max().map_or(0, |&id| id as usize + 1);
        let all: usize = trace.iter().map(|request| request.reusable() + 1).sum();
        let pages = different.min(all) + longest;
        let config = Config {
            page_size: 1,
            checkpoint_stride: 1,
            kv: PoolConfig::internal(u32::try_from(pages).unwrap_or(u32::MAX)),
            active: PoolConfig::internal(1),
            checkpoints: PoolConfig::internal(states),
        };
        Ok(Self {
            cache: Cache::with_policy(config, policy)?,
            namespace: Namespace::default(),
            cost,
            prompt: Vec::new(),
        })
    }

    /// Serves a request: reuses what it can, stores a state at the fork where an earlier prompt
    /// leaves this one, and at the deepest depth at which this one could be continued.
    ///
    /// # Errors
    /// None, unless the cache is at fault.
    pub fn serve(&mut self, request: &Recorded, totals: &mut Totals) -> Result<usize, Error> {
        let reusable = request.reusable();
        self.prompt.clear();
        self.prompt.extend_from_slice(&request.blocks[..reusable]);
        // Always computed, so what it is does not matter.
        self.prompt.push(0);
        let options = StartOptions::default();
        let started = self
            .cache
            .start(&self.namespace, &self.prompt[..], options)?;
        let sequence = started.sequence;
        self.cache.loaded(&sequence)?;
        let (Begin::Clear { dst } | Begin::Load { dst, .. }) = started.begin;
        let reused = started.matched.length;
        let fork = started.matched.branch.filter(|&fork| fork < reusable);
        for depth in fork.into_iter().chain([reusable]) {
            if depth > reused {
                self.store(&sequence, depth, dst)?;
            }
        }
        self.cache.finish(sequence)?;

        let whole = self.cost.of(request.tokens);
        totals.requests += 1;
        totals.tokens += request.tokens as u64;
        totals.reused += (reused * BLOCK) as u64;
        totals.cost += whole;
        totals.computed += whole - self.cost.of(reused * BLOCK);
        Ok(reused * BLOCK)
    }

    fn store(&mut self, sequence: &Sequence, depth: usize, slot: u32) -> Result<(), Error> {
        let reserved = self.cache.reserve_checkpoint(sequence, depth, slot)?;
        if let Reservation::Pending(pending) = reserved {
            let commit = self.cache.commit(sequence, pending)?;
            assert!(
                matches!(commit, Commit::Stored(_)),
                "one request runs at a time"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use radixstate::policy::by_name;

    use super::*;

    #[test]
    fn the_last_token_is_never_reusable_and_only_whole_blocks_are() {
        let reusable = |tokens, blocks| {
            let blocks = (0..blocks).collect();
            Recorded { tokens, blocks }.reusable()
        };
        let found = [
            reusable(512, 1),
            reusable(513, 2),
            reusable(1024, 2),
            reusable(2000, 2),
        ];
        assert_eq!(found, [0, 1, 1, 2]);
    }

    /// By hand: the second prompt reuses nothing and stores the fork at 2 blocks, the third reuses
    /// that, the fourth all but its last token.
    #[test]
    fn a_trace_is_served_as_its_numbers_say() {
        let request = |blocks: &[u32]| Recorded {
            tokens: blocks.len() * BLOCK + 1,
            blocks: blocks.into(),
        };
        let trace = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 3]].map(|ids| request(&ids));
        let linear = Cost::new(1.0, 0.0);
        let policy = by_name("lru").expect("a policy of the crate");
        let mut replay = Replay::new(&trace, 8, linear, policy).expect("usable sizes");
        let mut totals = Totals::default();
        let mut serve = |request| replay.serve(request, &mut totals).expect("it fits");
        assert_eq!(trace.each_ref().map(&mut serve), [0, 0, 1024, 1536]);
        replay.cache.check(None).expect("a sound cache");
        let all = 4 * 1537;
        assert_eq!(
            (totals.requests, totals.tokens, totals.reused),
            (4, all, 2560)
        );
        assert_eq!(totals.recomputed(), 1.0 - 2560.0 / all as f64);
        assert_eq!(totals.reuse(), 2560.0 / all as f64);
    }
}
