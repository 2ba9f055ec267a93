//! What callers hold: small tokens for records that live in the cache.
//!
//! A record stays in the cache, so `check()` sees every slot, whoever holds the handle. Dropping a
//! handle, on any thread, only leaves a note. The cache gives everything back at its next call, in
//! the order in which the handles were made.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Which of the cache's tables holds the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Step,
    Lease,
    Sequence,
    Pending,
}

/// A dropped handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Dropped {
    pub(crate) serial: u64,
    pub(crate) kind: Kind,
    pub(crate) key: usize,
}

/// Handles dropped since the cache last looked.
#[derive(Debug)]
pub(crate) struct Inbox {
    /// Which cache this is. Only ever compared for equality: no decision depends on it.
    pub(crate) cache: u64,
    any: AtomicBool,
    dropped: Mutex<Vec<Dropped>>,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let cache = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            cache,
            any: AtomicBool::new(false),
            dropped: Mutex::new(Vec::new()),
        }
    }

    fn push(&self, dropped: Dropped) {
        // A poisoned queue is still whole: nothing that holds the lock panics halfway.
        self.dropped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(dropped);
        self.any.store(true, Ordering::Release);
    }

    /// Whether anything was dropped. A load, where `drain` takes the cache line from other threads.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// What was dropped, in the order in which the handles were made.
    pub(crate) fn drain(&self) -> Vec<Dropped> {
        if !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        let mut dropped =
            std::mem::take(&mut *self.dropped.lock().unwrap_or_else(PoisonError::into_inner));
        dropped.sort_unstable();
        dropped
    }
}

/// The part that leases, sequences and pending checkpoints share.
#[derive(Debug)]
pub(crate) struct Handle {
    inbox: Arc<Inbox>,
    pub(crate) serial: u64,
    kind: Kind,
    pub(crate) key: usize,
    armed: bool,
}

impl Handle {
    pub(crate) fn new(inbox: &Arc<Inbox>, serial: u64, kind: Kind, key: usize) -> Self {
        Self {
            inbox: Arc::clone(inbox),
            serial,
            kind,
            key,
            armed: true,
        }
    }

    /// The cache this handle belongs to.
    pub(crate) fn cache(&self) -> u64 {
        self.inbox.cache
    }

    /// Gives up the handle without noting a drop: the caller takes the record out itself.
    pub(crate) fn disarm(mut self) -> usize {
        self.armed = false;
        self.key
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.armed {
            let Self {
                serial, kind, key, ..
            } = *self;
            self.inbox.push(Dropped { serial, kind, key });
        }
    }
}

/// Pins one cached prefix until it is dropped.
///
/// A lease can't be cloned: the pin it stands for is counted once.
///
/// ```compile_fail
/// use radixstate::{Cache, Config, Namespace, PoolConfig};
/// let pools = [1, 2].map(PoolConfig::internal);
/// let mut cache = Cache::new(Config::linear(64, pools[0], pools[1])).unwrap();
/// let matched = cache.lookup(&Namespace::default(), &[1, 2, 3], None).unwrap();
/// let lease = cache.lease(&matched).unwrap();
/// let other = lease.clone(); // not Clone
/// ```
///
/// A match can:
///
/// ```
/// use radixstate::{Cache, Config, Namespace, PoolConfig};
/// let pools = [1, 2].map(PoolConfig::internal);
/// let mut cache = Cache::new(Config::linear(64, pools[0], pools[1])).unwrap();
/// let matched = cache.lookup(&Namespace::default(), &[1, 2, 3], None).unwrap();
/// let lease = cache.lease(&matched).unwrap();
/// let other = matched.clone();
/// ```
#[derive(Debug)]
#[must_use = "dropping a lease ends it"]
pub struct Lease(pub(crate) Handle);

/// A running request. Dropping it gives back its slots, pages and pins.
#[derive(Debug)]
#[must_use = "dropping a sequence ends it"]
pub struct Sequence(pub(crate) Handle);

/// Work in flight, until it is [retired](crate::Cache::retire_step). Dropping it earlier
/// [cancels](crate::Cache::cancel_step) it: a step that nobody reported is not known to have
/// written anything.
#[derive(Debug)]
#[must_use = "dropping a step cancels it"]
pub struct Step(pub(crate) Handle);

impl Step {
    /// Its number; later steps have higher ones.
    pub fn id(&self) -> u64 {
        self.0.key as u64
    }
}

/// Names a step: by its handle, or by the number that the handle gave.
pub trait StepId {
    /// The number.
    fn id(&self) -> u64;

    /// The cache that began it, which a number alone does not tell.
    #[doc(hidden)]
    fn cache(&self) -> Option<u64> {
        None
    }
}

impl StepId for Step {
    fn id(&self) -> u64 {
        Step::id(self)
    }

    fn cache(&self) -> Option<u64> {
        Some(self.0.cache())
    }
}

impl<T: StepId> StepId for &T {
    fn id(&self) -> u64 {
        T::id(self)
    }

    fn cache(&self) -> Option<u64> {
        T::cache(self)
    }
}

impl StepId for u64 {
    fn id(&self) -> u64 {
        *self
    }
}

/// A checkpoint slot that is being written. Dropping it gives the slot back.
#[derive(Debug)]
#[must_use = "dropping a pending checkpoint gives its slot back"]
pub struct Pending {
    pub(crate) handle: Handle,
    pub(crate) slot: u32,
    pub(crate) depth: usize,
    /// Whether its state will be known to be finite when it is committed.
    pub(crate) proven: bool,
}

impl Pending {
    /// The checkpoint slot to encode into.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The depth, in tokens, that the written state must have.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Marks the state as not yet known to be finite, as on a device that has not run yet. What is
    /// stored then has a ticket to [complete](crate::Cache::complete).
    pub fn unproven(self) -> Self {
        Self {
            proven: false,
            ..self
        }
    }

    /// Marks the state as known to be finite, which every pending checkpoint is at first.
    pub fn proven(self) -> Self {
        Self {
            proven: true,
            ..self
        }
    }
}
