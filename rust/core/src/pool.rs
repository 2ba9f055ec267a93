//! Slots and the pools they come from. Allocates; knows no tokens, no recency.

mod ids;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;
use std::marker::PhantomData;

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

    pub trait Owner {
        const OWNER: Allocates;
    }

    /// Who allocates, as a value. What the engine allocates the pool may number.
    pub enum Allocates {
        Cache,
        Engine,
        Numbers,
    }
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

/// Who allocates the KV pages of a cache: its type parameter.
pub trait PageOwner: sealed::Owner + fmt::Debug + Copy + Eq {}

/// The cache allocates the pages and hands them to sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnPages {}
/// The engine allocates the pages. The cache takes over those that it is to keep, under the
/// engine's ids, and lists each once when it gives it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnginePages {}
/// The engine allocates the pages, and the cache never sees their ids. It numbers those that it is
/// to keep; the engine maps the numbers to pages, on its device if it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogicalPages {}

/// An owner of pages that is not the cache.
pub trait EngineOwned: PageOwner {}

macro_rules! owners {
    ($($owner:ident is $who:ident),*) => {$(
        impl sealed::Owner for $owner {
            const OWNER: sealed::Allocates = sealed::Allocates::$who;
        }
        impl PageOwner for $owner {}
    )*};
}
owners!(OwnPages is Cache, EnginePages is Engine, LogicalPages is Numbers);
impl EngineOwned for EnginePages {}
impl EngineOwned for LogicalPages {}

/// Size of one pool. The type parameter says who allocates its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig<O = OwnPages> {
    /// Usable slots; their ids are `1..=capacity`, row 0 is the padding sink.
    pub capacity: u32,
    /// Bytes of one slot, for statistics; 0 when unknown.
    pub unit_bytes: u64,
    owner: PhantomData<O>,
}

impl PoolConfig {
    /// A pool that the cache allocates from.
    pub fn internal(capacity: u32) -> Self {
        Self::of(capacity)
    }
}

impl PoolConfig<EnginePages> {
    /// KV pages that the engine allocates, with ids `1..=capacity`.
    pub fn engine(capacity: u32) -> Self {
        Self::of(capacity)
    }
}

impl PoolConfig<LogicalPages> {
    /// KV pages that the engine allocates, `capacity` in all, and that the cache numbers.
    pub fn logical(capacity: u32) -> Self {
        Self::of(capacity)
    }
}

impl<O> PoolConfig<O> {
    fn of(capacity: u32) -> Self {
        Self {
            capacity,
            unit_bytes: 0,
            owner: PhantomData,
        }
    }

    /// The same with the bytes of one slot.
    pub fn bytes(self, unit_bytes: u64) -> Self {
        Self { unit_bytes, ..self }
    }

    /// The same numbers, for code to which it is all one who allocates.
    pub(crate) fn sizes(self) -> PoolConfig {
        PoolConfig::of(self.capacity).bytes(self.unit_bytes)
    }
}

/// How many slots are where. They add up to the capacity, except with [`EnginePages`]: only the
/// engine knows what is free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// All slots.
    pub capacity: usize,
    /// Ready to be taken. Always 0 for [`EnginePages`]: the engine knows.
    pub free: usize,
    /// With sequences and pending checkpoints.
    pub held: usize,
    /// In the tree, unpinned.
    pub evictable: usize,
    /// In the tree, pinned.
    pub pinned: usize,
    /// Given back, waiting for steps in flight.
    pub retiring: usize,
    /// Given up and not yet taken by the engine.
    pub outbox: usize,
}

/// Ids that the pool hands out, the lowest first. Bookkeeping grows with use, so a capacity costs
/// nothing: it takes a bit for each id up to the highest that was given back, or adopted.
#[derive(Debug)]
struct Numbers {
    /// Given back, none above `used`.
    free: IdSet,
    /// The highest id ever handed out, 0 at first.
    used: u32,
}

/// Which ids are at hand.
#[derive(Debug)]
enum Ids<P> {
    /// The pool allocates.
    Own(Numbers),
    /// The pool numbers what the engine allocates. A number is free again once the engine has taken
    /// it from the outbox, and so knows that it maps to nothing.
    Logical { numbers: Numbers, outbox: Slots<P> },
    /// The engine allocates.
    Engine {
        /// Taken over from the engine and not yet back, those in the outbox included.
        adopted: IdSet,
        /// Given up by the tree, not yet taken by the engine.
        outbox: Slots<P>,
    },
}

impl<P> Ids<P> {
    fn new<O: PageOwner>() -> Self {
        let numbers = Numbers {
            free: IdSet::new(),
            used: 0,
        };
        let outbox = Slots::default();
        match O::OWNER {
            sealed::Allocates::Cache => Self::Own(numbers),
            sealed::Allocates::Numbers => Self::Logical { numbers, outbox },
            sealed::Allocates::Engine => Self::Engine {
                adopted: IdSet::new(),
                outbox,
            },
        }
    }

    fn numbers(&self) -> Option<&Numbers> {
        match self {
            Self::Own(numbers) | Self::Logical { numbers, .. } => Some(numbers),
            Self::Engine { .. } => None,
        }
    }

    fn numbers_mut(&mut self) -> Option<&mut Numbers> {
        match self {
            Self::Own(numbers) | Self::Logical { numbers, .. } => Some(numbers),
            Self::Engine { .. } => None,
        }
    }

    fn outbox(&self) -> Option<&Slots<P>> {
        match self {
            Self::Own(_) => None,
            Self::Logical { outbox, .. } | Self::Engine { outbox, .. } => Some(outbox),
        }
    }

    fn outbox_mut(&mut self) -> Option<&mut Slots<P>> {
        match self {
            Self::Own(_) => None,
            Self::Logical { outbox, .. } | Self::Engine { outbox, .. } => Some(outbox),
        }
    }
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
    pub fn new<O: PageOwner>(config: PoolConfig<O>) -> Self {
        let ids = Ids::new::<O>();
        let capacity = config.capacity as usize;
        let free = if ids.numbers().is_some() { capacity } else { 0 };
        Self {
            config: config.sizes(),
            counts: Usage {
                capacity,
                free,
                ..Usage::default()
            },
            ids,
        }
    }

    /// Its size.
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

    /// Whether the engine names the pages that it hands over.
    pub(crate) fn takes_ids(&self) -> bool {
        matches!(self.ids, Ids::Engine { .. })
    }

    /// Checks that the engine may hand over `n` pages, of which it names `ids`.
    pub(crate) fn check_adoptable(&self, n: usize, ids: &[u32]) -> Result<(), Misuse> {
        if !self.takes_ids() {
            let Usage { free, outbox, .. } = self.counts;
            return if n <= free {
                Ok(())
            } else {
                Err(Misuse::TooManyPages {
                    wanted: n,
                    free,
                    outbox,
                })
            };
        }
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

    /// Takes over `n` pages of the engine, which `check_adoptable` has seen; they are then held.
    pub(crate) fn adopt(&mut self, n: usize, ids: &[u32]) -> Slots<P> {
        let Ids::Engine { adopted, .. } = &mut self.ids else {
            let numbered = self.take_many(n);
            return numbered.expect("there are numbers for all pages of the engine");
        };
        let mut slots = Slots::default();
        ids.iter().for_each(|&id| slots.push(Run::of(id)));
        for &run in slots.runs() {
            assert!(
                adopted.insert(run),
                "a slot has exactly one owner: {} {run:?} was adopted before",
                P::KIND
            );
        }
        self.counts.held += slots.len();
        slots
    }

    /// Returns pages that were adopted a moment ago, and turned out not to be needed, to the
    /// engine.
    pub(crate) fn hand_back(&mut self, slots: Slots<P>) {
        self.counts.held -= slots.len();
        self.give_up(&slots);
    }

    /// What the tree has given up since the last call, each id once.
    pub(crate) fn take_outbox(&mut self) -> Slots<P> {
        let Some(outbox) = self.ids.outbox_mut() else {
            return Slots::default();
        };
        let freed = std::mem::take(outbox);
        self.counts.outbox = 0;
        self.give_up(&freed);
        freed
    }

    /// Whether `id` names a usable row.
    pub(crate) fn in_range(&self, id: u32) -> bool {
        (1..=self.config.capacity).contains(&id)
    }

    /// Whether an id is the cache's: of the engine's pages, one that it has handed over and not got
    /// back.
    pub(crate) fn owns(&self, id: u32) -> bool {
        match &self.ids {
            Ids::Engine { adopted, .. } => adopted.contains(id),
            Ids::Own(_) | Ids::Logical { .. } => self.in_range(id),
        }
    }

    /// Ids that have an owner, or are in the free list. All others are as they were at first.
    pub(crate) fn known_ids(&self) -> Vec<u32> {
        match &self.ids {
            Ids::Engine { adopted, .. } => adopted.iter().collect(),
            Ids::Own(numbers) | Ids::Logical { numbers, .. } => (1..=numbers.used).collect(),
        }
    }

    /// How many ids were never handed out. The engine knows of its own.
    pub(crate) fn untouched(&self) -> usize {
        let untouched = |numbers: &Numbers| (self.config.capacity - numbers.used) as usize;
        self.ids.numbers().map_or(0, untouched)
    }

    /// Ids given back.
    pub(crate) fn free_ids(&self) -> Vec<u32> {
        let numbers = self.ids.numbers();
        numbers.map_or_else(Vec::new, |numbers| numbers.free.iter().collect())
    }

    /// Ids that wait for the engine to take them.
    pub(crate) fn outbox_ids(&self) -> Vec<u32> {
        let outbox = self.ids.outbox();
        outbox.map_or_else(Vec::new, |outbox| outbox.ids().collect())
    }

    /// The lowest free ids that follow each other, at most `most`.
    fn pop(&mut self, most: usize) -> Option<Run> {
        let Numbers { free, used } = self.ids.numbers_mut()?;
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
        match self.ids.outbox_mut() {
            None => self.give_up(&slots),
            Some(outbox) => {
                self.counts.outbox += slots.len();
                outbox.append(slots);
            }
        }
    }

    /// The ids are free to be used for something else, here or in the engine.
    fn give_up(&mut self, slots: &Slots<P>) {
        for &run in slots.runs() {
            let was_out = match &mut self.ids {
                Ids::Engine { adopted, .. } => adopted.remove(run),
                Ids::Own(Numbers { free, used })
                | Ids::Logical {
                    numbers: Numbers { free, used },
                    ..
                } => run.last() <= *used && free.insert(run),
            };
            assert!(
                was_out,
                "a slot has exactly one owner: {} {run:?} is freed twice",
                P::KIND
            );
        }
        if self.ids.numbers().is_some() {
            self.counts.free += slots.len();
        }
    }
}
