//! Counters: what was asked, found, skipped and evicted, and why.

use crate::checkpoint::Skip;
use crate::event::{Cause, Event};
use crate::lookup::Reason;
use crate::prefixes::Freed;

/// Requests that found nothing to reuse, by reason. See [`Reason`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misses {
    /// No whole page was cached.
    pub no_prefix: u64,
    /// The prefix was there, no state at or below the limit.
    pub no_state: u64,
    /// What matched is shorter than the first legal depth.
    pub unaligned: u64,
    /// The state was still being written, or not yet known to be finite.
    pub not_ready: u64,
}

/// Checkpoints that were not stored, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skips {
    /// No slot was free or evictable.
    pub no_room: u64,
    /// The request asked not to store.
    pub no_store: u64,
    /// The sequence is older than the last reset, or the prefix that it leases turned out invalid.
    pub reset: u64,
    /// Nothing to cache at depth 0.
    pub not_aligned: u64,
    /// Pages on its path were still being written by another request.
    pub not_ready: u64,
    /// The state held a value that is not finite, or the checkpoint stood on pages that came with
    /// such a state.
    pub non_finite: u64,
}

/// What eviction freed, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evictions {
    /// Pages for a sequence.
    pub for_kv: Freed,
    /// A slot for a new checkpoint.
    pub for_checkpoint: Freed,
    /// Calls of `evict`.
    pub asked: Freed,
    /// Calls of `reset`.
    pub reset: Freed,
}

/// Bytes in use (held, cached, retiring), from the unit sizes of the configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// KV pages.
    pub kv: u64,
    /// Running states.
    pub active: u64,
    /// Cached states.
    pub checkpoints: u64,
}

/// All counters of a cache. All of them only grow, except `bytes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls of `lookup`; hits and misses are counted where a match is used.
    pub lookups: u64,
    /// Sequences started.
    pub starts: u64,
    /// Starts and leases that reused a state.
    pub hits: u64,
    /// Tokens they reused.
    pub hit_tokens: u64,
    /// Tokens of KV that matched, reusable or not.
    pub kv_matched_tokens: u64,
    /// Starts and leases that reused none.
    pub misses: Misses,
    /// Checkpoints stored.
    pub stored: u64,
    /// Checkpoints that were there already.
    pub duplicates: u64,
    /// Checkpoints not stored.
    pub skipped: Skips,
    /// What eviction freed.
    pub evictions: Evictions,
    /// Calls of `reset`.
    pub resets: u64,
    /// Memory in use now.
    pub bytes: Bytes,
}

impl Stats {
    /// Counts what an event counts for.
    #[inline(always)]
    pub(crate) fn fold(&mut self, event: Event) {
        match event {
            Event::Lookup => self.lookups += 1,
            Event::Start { .. } => self.starts += 1,
            Event::Use {
                reason,
                length,
                kv_length,
            } => self.count_use(reason, length, kv_length),
            Event::Skip(skip) => self.count_skip(skip),
            Event::Store { .. } => self.stored += 1,
            Event::Freed { cause, freed } => {
                *match cause {
                    Cause::Kv => &mut self.evictions.for_kv,
                    Cause::Checkpoint => &mut self.evictions.for_checkpoint,
                    Cause::Asked => &mut self.evictions.asked,
                    Cause::Reset => &mut self.evictions.reset,
                } += freed;
            }
            Event::Invalid { states } => self.skipped.non_finite += states,
            Event::Reset => self.resets += 1,
            _ => {}
        }
    }

    fn count_use(&mut self, reason: Reason, length: usize, kv_length: usize) {
        match reason {
            Reason::Hit => self.hits += 1,
            Reason::NoPrefix => self.misses.no_prefix += 1,
            Reason::NoState => self.misses.no_state += 1,
            Reason::Unaligned => self.misses.unaligned += 1,
            Reason::NotReady => self.misses.not_ready += 1,
        }
        self.hit_tokens += length as u64;
        self.kv_matched_tokens += kv_length as u64;
    }

    fn count_skip(&mut self, skip: Skip) {
        *match skip {
            Skip::Duplicate => &mut self.duplicates,
            Skip::NoRoom(_) => &mut self.skipped.no_room,
            Skip::NotAligned => &mut self.skipped.not_aligned,
            Skip::NoStore => &mut self.skipped.no_store,
            Skip::NonFinite => &mut self.skipped.non_finite,
            Skip::NotReady => &mut self.skipped.not_ready,
            Skip::Reset => &mut self.skipped.reset,
        } += 1;
    }
}
