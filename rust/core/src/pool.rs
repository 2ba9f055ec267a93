//! Slots and the pools they come from. Allocates; knows no tokens, no recency.

mod ids;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;

use ids::IdSet;
use slots::Run;
pub use slots::{Slot, Slots};

use crate::audit::faults::{Fault, seeded};
use crate::error::{Misuse, OutOfSlots};

/// Which of the three pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolKind {
    /// Pages of attention KV.
    Kv,
    /// Full-precision states of running requests.
    Active,
    /// Encoded states of cached prefixes.
    Checkpoint,
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kv => "kv",
            Self::Active => "active",
            Self::Checkpoint => "checkpoint",
        })
    }
}

/// Type-level name of a pool, so that a slot of one can't be given to another.
///
/// ```compile_fail
/// use radixstate::pool::{ActiveState, CachedState, Pool, PoolConfig};
/// let mut active = Pool::<ActiveState>::new(PoolConfig::internal(1));
/// let mut checkpoints = Pool::<CachedState>::new(PoolConfig::internal(1));
/// let slot = active.take().unwrap();
/// checkpoints.release(slot); // a slot of the other pool
/// ```
///
/// The same with the pool it came from:
///
/// ```
/// use radixstate::pool::{ActiveState, CachedState, Pool, PoolConfig};
/// let mut active = Pool::<ActiveState>::new(PoolConfig::internal(1));
/// let mut checkpoints = Pool::<CachedState>::new(PoolConfig::internal(1));
/// let slot = active.take().unwrap();
/// active.release(slot);
/// # let _ = checkpoints.take();
/// ```
pub trait Tag: sealed::Sealed {
    /// The pool this names.
    const KIND: PoolKind;
}

mod sealed {
    pub trait Sealed {}
}

/// Names the KV page pool.
#[derive(Debug, PartialEq, Eq)]
pub enum KvPage {}
/// Names the pool of running states. The tree has no field of this type: it can never own one.
#[derive(Debug, PartialEq, Eq)]
pub enum ActiveState {}
/// Names the pool of cached states.
#[derive(Debug, PartialEq, Eq)]
pub enum CachedState {}

macro_rules! tags {
    ($($tag:ident is $kind:ident),*) => {$(
        impl sealed::Sealed for $tag {}
        impl Tag for $tag {
            const KIND: PoolKind = PoolKind::$kind;
        }
    )*};
}
tags!(KvPage is Kv, ActiveState is Active, CachedState is Checkpoint);

/// Size and ownership of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Usable slots; their ids are `1..=capacity`, row 0 is the padding sink.
    pub capacity: u32,
    /// The engine allocates; the cache only adopts and hands back.
    pub external: bool,
    /// Bytes of one slot, for statistics; 0 when unknown.
    pub unit_bytes: u64,
}

impl PoolConfig {
    /// A pool the cache allocates from.
    pub fn internal(capacity: u32) -> Self {
        Self {
            capacity,
            external: false,
            unit_bytes: 0,
        }
    }

    /// A pool the engine allocates from, with ids `1..=capacity`.
    pub fn external(capacity: u32) -> Self {
        Self {
            capacity,
            external: true,
            unit_bytes: 0,
        }
    }

    /// The same with the bytes of one slot.
    pub fn bytes(self, unit_bytes: u64) -> Self {
        Self { unit_bytes, ..self }
    }
}

/// How many slots are where. For an internal pool the five add up to the capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// All slots.
    pub capacity: usize,
    /// Ready to be taken; for an external pool always 0, the engine knows.
    pub free: usize,
    /// With sequences and pending checkpoints.
    pub held: usize,
    /// In the tree, unpinned.
    pub evictable: usize,
    /// In the tree, pinned.
    pub pinned: usize,
    /// Given back, waiting for steps in flight.
    pub retiring: usize,
    /// Freed and not yet taken by the engine (external pools).
    pub outbox: usize,
}

/// Which ids are at hand. Bookkeeping grows with use, so a capacity costs nothing: it takes a bit
/// for each id up to the highest that was given back, or adopted.
#[derive(Debug)]
enum Ids<P> {
    /// The pool allocates: the lowest free id first.
    Internal {
        /// Given back, none above `used`.
        free: IdSet,
        /// The highest id ever handed out, 0 at first.
        used: u32,
    },
    /// The engine allocates.
    External {
        /// Taken over from the engine and not yet back, those in the outbox included.
        adopted: IdSet,
        /// Freed by the tree, not yet taken by the engine.
        outbox: Slots<P>,
    },
}

/// A pool of slots with O(1) counters. It hands out ids and takes them back. It knows how many
/// slots are in each state, never who holds them.
#[derive(Debug)]
pub struct Pool<P> {
    config: PoolConfig,
    counts: Usage,
    ids: Ids<P>,
}

impl<P: Tag> Pool<P> {
    /// A pool with every slot free, or with the engine.
    pub fn new(config: PoolConfig) -> Self {
        let capacity = config.capacity as usize;
        let (free, ids) = if config.external {
            (
                0,
                Ids::External {
                    adopted: IdSet::new(),
                    outbox: Slots::default(),
                },
            )
        } else {
            (
                capacity,
                Ids::Internal {
                    free: IdSet::new(),
                    used: 0,
                },
            )
        };
        Self {
            config,
            counts: Usage {
                capacity,
                free,
                ..Usage::default()
            },
            ids,
        }
    }

    /// How the pool was made.
    pub fn config(&self) -> PoolConfig {
        self.config
    }

    /// The counters.
    pub fn usage(&self) -> Usage {
        self.counts
    }

    /// Bytes of the slots that are not free.
    pub(crate) fn bytes(&self) -> u64 {
        let Usage {
            held,
            evictable,
            pinned,
            retiring,
            ..
        } = self.counts;
        let used = (held + evictable + pinned + retiring) as u64;
        used.saturating_mul(self.config.unit_bytes)
    }

    /// A shortage of `wanted` slots, as the counters stand.
    pub(crate) fn short(&self, wanted: usize) -> OutOfSlots {
        let Usage {
            free,
            evictable,
            retiring,
            ..
        } = self.counts;
        OutOfSlots {
            pool: P::KIND,
            wanted,
            free,
            evictable,
            retiring,
        }
    }

    /// How many slots eviction must free before `wanted` can be taken; an error when it can't.
    pub(crate) fn shortfall(&self, wanted: usize) -> Result<usize, OutOfSlots> {
        let missing = wanted.saturating_sub(self.counts.free);
        if missing > self.counts.evictable {
            Err(self.short(wanted))
        } else {
            Ok(missing)
        }
    }

    /// Takes the lowest free slot.
    pub fn take(&mut self) -> Result<Slot<P>, OutOfSlots> {
        let run = self.pop(1).ok_or_else(|| self.short(1))?;
        self.counts.free -= 1;
        self.counts.held += 1;
        Ok(Slot::new(run.first))
    }

    /// Takes the `n` lowest free slots, or none.
    pub fn take_many(&mut self, n: usize) -> Result<Slots<P>, OutOfSlots> {
        if n > self.counts.free {
            return Err(self.short(n));
        }
        let (mut slots, mut left) = (Slots::default(), n);
        while left > 0 {
            let run = self
                .pop(left)
                .expect("as many slots are free as are counted");
            left -= run.count as usize;
            slots.push(run);
        }
        self.counts.free -= n;
        self.counts.held += n;
        Ok(slots)
    }

    /// Gives held slots back.
    pub fn release(&mut self, slots: impl Into<Slots<P>>) {
        let slots = slots.into();
        self.counts.held -= slots.len();
        self.set_free(slots);
    }

    /// Frees unpinned slots of the tree.
    pub(crate) fn release_cached(&mut self, slots: impl Into<Slots<P>>) {
        let slots = slots.into();
        self.counts.evictable -= slots.len();
        self.set_free(slots);
    }

    /// `n` held slots move into the tree, unpinned.
    pub(crate) fn enter_tree(&mut self, n: usize) {
        self.counts.held -= n;
        self.counts.evictable += n;
    }

    /// `n` held slots wait for steps in flight.
    pub(crate) fn retire(&mut self, n: usize) {
        self.counts.held -= n;
        self.counts.retiring += n;
    }

    /// The steps that `n` slots waited for are over: they are held until they are released.
    pub(crate) fn end_retirement(&mut self, n: usize) {
        self.counts.retiring -= n;
        self.counts.held += n;
    }

    /// `n` slots of the tree become pinned.
    pub(crate) fn pin(&mut self, n: usize) {
        self.counts.evictable -= n;
        self.counts.pinned += n;
    }

    /// `n` slots of the tree become evictable.
    pub(crate) fn unpin(&mut self, n: usize) {
        self.counts.pinned -= n;
        self.counts.evictable += n;
    }

    /// Checks that the engine may hand over each of `ids`.
    pub(crate) fn check_adoptable(&self, ids: &[u32]) -> Result<(), Misuse> {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Misuse::PageOwnership {
                page: pair[0],
                why: "is given twice",
            });
        }
        match ids.iter().find(|&&id| !self.in_range(id) || self.owns(id)) {
            None => Ok(()),
            Some(&page) if !self.in_range(page) => Err(Misuse::PageOwnership {
                page,
                why: "is outside 1..=capacity",
            }),
            Some(&page) => Err(Misuse::PageOwnership {
                page,
                why: "already belongs to the cache",
            }),
        }
    }

    /// Takes over pages of the engine, which `check_adoptable` has seen; they are then held.
    pub(crate) fn adopt(&mut self, ids: &[u32]) -> Slots<P> {
        let mut slots = Slots::default();
        ids.iter().for_each(|&id| {
            slots.push(Run {
                first: id,
                count: 1,
            })
        });
        for &run in slots.runs() {
            assert!(
                self.adopted().insert(run),
                "a slot has exactly one owner: {} {run:?} was adopted before",
                P::KIND
            );
        }
        self.counts.held += slots.len();
        slots
    }

    /// Returns pages that were adopted a moment ago, and turned out not to be needed, to the
    /// engine.
    pub(crate) fn hand_back(&mut self, slots: Slots<P>) -> Vec<u32> {
        self.counts.held -= slots.len();
        self.disown(slots)
    }

    /// What eviction has freed for the engine since the last call, each id once.
    pub(crate) fn take_outbox(&mut self) -> Vec<u32> {
        let Ids::External { outbox, .. } = &mut self.ids else {
            return Vec::new();
        };
        let freed = std::mem::take(outbox);
        self.counts.outbox = 0;
        self.disown(freed)
    }

    /// Whether `id` names a usable row.
    pub(crate) fn in_range(&self, id: u32) -> bool {
        (1..=self.config.capacity).contains(&id)
    }

    /// Whether an id is the cache's: of an external pool, one that the engine has handed over and
    /// not got back.
    pub(crate) fn owns(&self, id: u32) -> bool {
        match &self.ids {
            Ids::Internal { .. } => self.in_range(id),
            Ids::External { adopted, .. } => adopted.contains(id),
        }
    }

    /// The highest id ever handed out; 0 for an external pool. All above it are as they were at
    /// first.
    pub(crate) fn used(&self) -> u32 {
        if let Ids::Internal { used, .. } = self.ids {
            used
        } else {
            0
        }
    }

    /// Ids given back.
    pub(crate) fn free_ids(&self) -> Vec<u32> {
        if let Ids::Internal { free, .. } = &self.ids {
            free.iter().collect()
        } else {
            Vec::new()
        }
    }

    /// Ids taken over from the engine.
    pub(crate) fn adopted_ids(&self) -> Vec<u32> {
        if let Ids::External { adopted, .. } = &self.ids {
            adopted.iter().collect()
        } else {
            Vec::new()
        }
    }

    /// Ids that wait for the engine to take them.
    pub(crate) fn outbox_ids(&self) -> Vec<u32> {
        if let Ids::External { outbox, .. } = &self.ids {
            outbox.ids().collect()
        } else {
            Vec::new()
        }
    }

    /// The lowest free ids that follow each other, at most `most`.
    fn pop(&mut self, most: usize) -> Option<Run> {
        let Ids::Internal { free, used } = &mut self.ids else {
            return None;
        };
        if let Some(run) = free.pop(most) {
            return Some(run);
        }
        let count = (self.config.capacity - *used).min(u32::try_from(most).unwrap_or(u32::MAX));
        let run = (count > 0).then(|| Run {
            first: *used + 1,
            count,
        });
        *used += count;
        run
    }

    fn set_free(&mut self, slots: Slots<P>) {
        if seeded(Fault::LostSlot) {
            return;
        }
        match &mut self.ids {
            Ids::External { outbox, .. } => {
                self.counts.outbox += slots.len();
                outbox.append(slots);
            }
            Ids::Internal { free, used } => {
                self.counts.free += slots.len();
                for &run in slots.runs() {
                    let was_out = run.last() <= *used && free.insert(run);
                    assert!(
                        was_out,
                        "a slot has exactly one owner: {} {run:?} is freed twice",
                        P::KIND
                    );
                }
            }
        }
    }

    fn adopted(&mut self) -> &mut IdSet {
        let Ids::External { adopted, .. } = &mut self.ids else {
            unreachable!("an internal pool adopts nothing")
        };
        adopted
    }

    /// The ids are the engine's again.
    fn disown(&mut self, slots: Slots<P>) -> Vec<u32> {
        for &run in slots.runs() {
            assert!(
                self.adopted().remove(run),
                "a slot has exactly one owner: {} {run:?} was not adopted",
                P::KIND
            );
        }
        slots.ids().collect()
    }
}
