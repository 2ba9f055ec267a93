//! Slots and the pools they come from. Allocates; knows no tokens, no recency.

use std::fmt;
use std::marker::PhantomData;

use crate::error::{Misuse, OutOfSlots};
use crate::fault::{Fault, seeded};

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
/// use radixstate::pool::{Active, Checkpoint, Pool, PoolConfig};
/// let mut active = Pool::<Active>::new(PoolConfig::internal(1));
/// let mut checkpoints = Pool::<Checkpoint>::new(PoolConfig::internal(1));
/// let slot = active.take().unwrap();
/// checkpoints.release(slot); // a slot of the other pool
/// ```
///
/// The same with the pool it came from:
///
/// ```
/// use radixstate::pool::{Active, Checkpoint, Pool, PoolConfig};
/// let mut active = Pool::<Active>::new(PoolConfig::internal(1));
/// let mut checkpoints = Pool::<Checkpoint>::new(PoolConfig::internal(1));
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
pub enum Kv {}
/// Names the pool of running states. The tree has no field of this type: it can never own one.
#[derive(Debug, PartialEq, Eq)]
pub enum Active {}
/// Names the pool of cached states.
#[derive(Debug, PartialEq, Eq)]
pub enum Checkpoint {}

macro_rules! tags {
    ($($tag:ident),*) => {$(
        impl sealed::Sealed for $tag {}
        impl Tag for $tag {
            const KIND: PoolKind = PoolKind::$tag;
        }
    )*};
}
tags!(Kv, Active, Checkpoint);

/// One slot of pool `P`. Moving it is the only way to change its owner.
///
/// A slot can't be used twice:
///
/// ```compile_fail
/// use radixstate::pool::{Active, Pool, PoolConfig};
/// let mut pool = Pool::<Active>::new(PoolConfig::internal(2));
/// let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
/// pool.release(one);
/// pool.release(one); // moved above
/// ```
///
/// Two slots can:
///
/// ```
/// use radixstate::pool::{Active, Pool, PoolConfig};
/// let mut pool = Pool::<Active>::new(PoolConfig::internal(2));
/// let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
/// pool.release(one);
/// pool.release(two);
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slot goes back to its pool or to a new owner"]
pub struct Slot<P>(u32, PhantomData<P>);

impl<P> Slot<P> {
    /// The row of the tensors that this slot stands for, `1..=capacity`.
    pub fn id(&self) -> u32 {
        self.0
    }

    /// A slot that no pool gave out, for tests of the checker.
    #[cfg(test)]
    pub(crate) fn forged(id: u32) -> Self {
        Self(id, PhantomData)
    }
}

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
        Self { capacity, external: false, unit_bytes: 0 }
    }

    /// A pool the engine allocates from, with ids `1..=capacity`.
    pub fn external(capacity: u32) -> Self {
        Self { capacity, external: true, unit_bytes: 0 }
    }

    /// The same with the bytes of one slot.
    pub fn bytes(self, unit_bytes: u64) -> Self {
        Self { unit_bytes, ..self }
    }
}

/// Where a slot is, as its pool sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the free list.
    Free,
    /// The engine's (external pools).
    Outside,
    /// With a sequence or a pending checkpoint.
    Held,
    /// With the tree.
    Cached,
    /// Given back, but a step in flight may still touch it.
    Retiring,
    /// Freed by the tree, not yet taken by the engine (external pools).
    Outbox,
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

/// A pool of slots with O(1) counters.
#[derive(Debug)]
pub struct Pool<P> {
    config: PoolConfig,
    /// Slots given back, the latest last.
    free: Vec<u32>,
    /// The first slot never handed out. Bookkeeping grows with use, so a capacity costs nothing.
    fresh: u32,
    /// By id, as far as ids were used.
    places: Vec<Place>,
    pub(crate) counts: Usage,
    outbox: Vec<u32>,
    tag: PhantomData<P>,
}

impl<P: Tag> Pool<P> {
    /// A pool with every slot free, or with the engine.
    pub fn new(config: PoolConfig) -> Self {
        let capacity = config.capacity as usize;
        let free = if config.external { 0 } else { capacity };
        let counts = Usage { capacity, free, ..Usage::default() };
        Self { config, free: Vec::new(), fresh: 1, places: Vec::new(), counts, outbox: Vec::new(), tag: PhantomData }
    }

    /// How the pool was made.
    pub fn config(&self) -> PoolConfig {
        self.config
    }

    /// The counters.
    pub fn usage(&self) -> Usage {
        self.counts
    }

    /// A shortage of `wanted` slots, as the counters stand.
    pub(crate) fn short(&self, wanted: usize) -> OutOfSlots {
        let Usage { free, evictable, .. } = self.counts;
        OutOfSlots { pool: P::KIND, wanted, free, evictable }
    }

    /// How many slots eviction must free before `wanted` can be taken; an error when it can't.
    pub(crate) fn shortfall(&self, wanted: usize) -> Result<usize, OutOfSlots> {
        let missing = wanted.saturating_sub(self.counts.free);
        if missing > self.counts.evictable { Err(self.short(wanted)) } else { Ok(missing) }
    }

    /// Takes one slot.
    pub fn take(&mut self) -> Result<Slot<P>, OutOfSlots> {
        let Some(id) = self.free.pop().or_else(|| self.take_fresh()) else { return Err(self.short(1)) };
        self.counts.free -= 1;
        self.counts.held += 1;
        self.put(id, Place::Free, Place::Held);
        Ok(Slot(id, PhantomData))
    }

    /// Takes `n` slots, or none.
    pub fn take_many(&mut self, n: usize) -> Result<Vec<Slot<P>>, OutOfSlots> {
        if n > self.counts.free {
            return Err(self.short(n));
        }
        (0..n).map(|_| self.take()).collect()
    }

    /// Gives a held or retiring slot back.
    pub fn release(&mut self, slot: Slot<P>) {
        match self.place(slot.0) {
            Place::Held => self.counts.held -= 1,
            Place::Retiring => self.counts.retiring -= 1,
            place => unreachable!("a slot has exactly one owner: {} slot {} is {place:?}", P::KIND, slot.0),
        }
        self.set_free(slot.0);
    }

    /// Frees an unpinned slot of the tree.
    pub(crate) fn release_cached(&mut self, slot: Slot<P>) {
        self.counts.evictable -= 1;
        self.set_free(slot.0);
    }

    /// A held slot moves into the tree, unpinned.
    pub(crate) fn enter_tree(&mut self, slot: &Slot<P>) {
        self.put(slot.0, Place::Held, Place::Cached);
        self.counts.held -= 1;
        self.counts.evictable += 1;
    }

    /// A held slot waits for steps in flight.
    pub(crate) fn retire(&mut self, slot: &Slot<P>) {
        self.put(slot.0, Place::Held, Place::Retiring);
        self.counts.held -= 1;
        self.counts.retiring += 1;
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
            return Err(Misuse::PageOwnership { page: pair[0], why: "is given twice" });
        }
        match ids.iter().find(|&&id| !self.in_range(id) || self.place(id) != Place::Outside) {
            None => Ok(()),
            Some(&page) if !self.in_range(page) => Err(Misuse::PageOwnership { page, why: "is outside 1..=capacity" }),
            Some(&page) => Err(Misuse::PageOwnership { page, why: "already belongs to the cache" }),
        }
    }

    /// Takes over a page of the engine; it is then held.
    pub(crate) fn adopt(&mut self, id: u32) -> Slot<P> {
        self.put(id, Place::Outside, Place::Held);
        self.counts.held += 1;
        Slot(id, PhantomData)
    }

    /// Returns a page that was adopted a moment ago, and turned out not to be needed, to the engine.
    pub(crate) fn hand_back(&mut self, slot: Slot<P>) -> u32 {
        self.put(slot.0, Place::Held, Place::Outside);
        self.counts.held -= 1;
        slot.0
    }

    /// What eviction has freed for the engine since the last call, each id once.
    pub(crate) fn take_outbox(&mut self) -> Vec<u32> {
        let freed = std::mem::take(&mut self.outbox);
        for &id in &freed {
            self.put(id, Place::Outbox, Place::Outside);
        }
        self.counts.outbox = 0;
        freed
    }

    /// Whether `id` names a usable row.
    pub(crate) fn in_range(&self, id: u32) -> bool {
        (1..=self.config.capacity).contains(&id)
    }

    pub(crate) fn place(&self, id: u32) -> Place {
        self.places.get(id as usize).copied().unwrap_or(self.unused())
    }

    /// Where a slot is before its first use.
    fn unused(&self) -> Place {
        if self.config.external { Place::Outside } else { Place::Free }
    }

    pub(crate) fn free_ids(&self) -> impl Iterator<Item = u32> {
        let last = if self.config.external { 0 } else { self.config.capacity };
        self.free.iter().copied().chain(self.fresh..=last)
    }

    pub(crate) fn outbox_ids(&self) -> &[u32] {
        &self.outbox
    }

    fn take_fresh(&mut self) -> Option<u32> {
        let id = (!self.config.external && self.in_range(self.fresh)).then_some(self.fresh)?;
        self.fresh += 1;
        Some(id)
    }

    fn put(&mut self, id: u32, from: Place, to: Place) {
        let was = self.place(id);
        if id as usize >= self.places.len() {
            self.places.resize(id as usize + 1, self.unused());
        }
        self.places[id as usize] = to;
        assert_eq!(was, from, "a slot has exactly one owner: {} slot {id} on its way to {to:?}", P::KIND);
    }

    fn set_free(&mut self, id: u32) {
        if self.config.external {
            self.places[id as usize] = Place::Outbox;
            self.outbox.push(id);
            self.counts.outbox += 1;
            return;
        }
        self.places[id as usize] = Place::Free;
        if seeded(Fault::LostSlot) {
            return;
        }
        self.free.push(id);
        self.counts.free += 1;
        if seeded(Fault::DoubledSlot) {
            self.free.push(id);
            self.counts.free += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_handed_out_from_one_and_never_zero() {
        let mut pool = Pool::<Active>::new(PoolConfig::internal(3));
        let slots = pool.take_many(3).unwrap();
        assert_eq!(slots.iter().map(Slot::id).collect::<Vec<_>>(), [1, 2, 3]);
        let short = pool.take().unwrap_err();
        assert_eq!(short.to_string(), "active pool: wanted 1, 0 free, 0 evictable");
        slots.into_iter().for_each(|slot| pool.release(slot));
        assert_eq!(pool.usage(), Usage { capacity: 3, free: 3, ..Usage::default() });
    }

    #[test]
    fn taking_more_than_free_takes_none() {
        let mut pool = Pool::<Kv>::new(PoolConfig::internal(2));
        assert!(pool.take_many(3).is_err());
        assert_eq!(pool.usage().free, 2);
    }

    #[test]
    fn an_external_pool_adopts_only_what_the_engine_owns() {
        let mut pool = Pool::<Kv>::new(PoolConfig::external(2));
        assert!(pool.check_adoptable(&[1, 2]).is_ok());
        let page = pool.adopt(1);
        for (ids, why) in
            [(vec![1], "already belongs"), (vec![3], "outside"), (vec![0], "outside"), (vec![2, 2], "twice")]
        {
            let error = pool.check_adoptable(&ids).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        pool.release(page);
        assert!(pool.check_adoptable(&[1]).is_err(), "in the outbox it is still the cache's");
        assert_eq!(pool.take_outbox(), [1]);
        assert!(pool.check_adoptable(&[1]).is_ok());
    }
}
