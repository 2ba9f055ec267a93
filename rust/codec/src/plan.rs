//! Moves slots between the pools of a checked spec: validates, splits among threads, collects the
//! verdicts.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::backend::Backend;
use crate::error::{PairError, Side, SpecError};
use crate::format;
use crate::overlap;
use crate::spec::{HeadBytes, Pair, Spec};
use crate::tiles::{self, Direction, Share};

/// A thread is worth its start from this many bytes on.
const BYTES_PER_THREAD: usize = 1 << 20;

/// A checked [`Spec`] and the backend that serves it.
#[derive(Clone, Debug)]
pub struct Plan {
    spec: Spec,
    head: HeadBytes,
    backend: Backend,
}

impl Plan {
    /// Checks `spec` and picks the fastest backend. Touches no memory of the pools.
    ///
    /// # Errors
    ///
    /// When dimensions, layers, slots or strides of the spec contradict each other, or memory
    /// overlaps.
    pub fn new(spec: Spec) -> Result<Self, SpecError> {
        let head = format::head_bytes(&spec);
        overlap::check(&spec, head)?;
        Ok(Self {
            spec,
            head,
            backend: Backend::fastest(),
        })
    }

    /// Refuses a plan that moves other memory of the same pools, such as layers of another shape,
    /// if that overlaps the memory of this one.
    ///
    /// # Errors
    ///
    /// When an element of one may share an address with an element of the other.
    pub fn require_apart(&self, other: &Self) -> Result<(), SpecError> {
        overlap::check_between((&self.spec, self.head), (&other.spec, other.head))
    }

    /// The same plan, served by `backend`.
    #[must_use]
    pub fn with_backend(self, backend: Backend) -> Self {
        Self { backend, ..self }
    }

    /// Encodes active slots (sources) into checkpoint slots (destinations); says of each pair
    /// whether its state, windows included, is finite, and so may become a checkpoint. The result does not depend
    /// on `threads`.
    ///
    /// # Errors
    ///
    /// When a slot is out of range or a destination occurs twice; nothing was written.
    ///
    /// # Safety
    ///
    /// During the call:
    /// - every byte of the source slots is valid for reads, and nobody writes it;
    /// - every byte of the destination slots is valid for writes, and nobody else reads or writes
    ///   it.
    pub unsafe fn store(
        &self,
        pairs: &[Pair],
        threads: NonZeroUsize,
    ) -> Result<Vec<bool>, PairError> {
        let finite: Vec<_> = pairs.iter().map(|_| AtomicBool::new(true)).collect();
        self.check_pairs(pairs, Direction::Store)?;
        // SAFETY: the caller owes the same; the spec was checked in `new` and the pairs just now.
        let shares = unsafe {
            tiles::split(
                &self.spec,
                self.head,
                pairs,
                Direction::Store,
                self.parts(pairs, threads),
            )
        };
        run(shares, |share| {
            self.backend
                .store(share, |pair| finite[pair].store(false, Ordering::Relaxed))
        });
        Ok(finite.into_iter().map(AtomicBool::into_inner).collect())
    }

    /// Decodes checkpoint slots (sources) into active slots (destinations). The result does not
    /// depend on `threads`.
    ///
    /// # Errors
    ///
    /// When a slot is out of range or a destination occurs twice; nothing was written.
    ///
    /// # Safety
    ///
    /// As for [`store`](Self::store).
    pub unsafe fn load(&self, pairs: &[Pair], threads: NonZeroUsize) -> Result<(), PairError> {
        self.check_pairs(pairs, Direction::Load)?;
        // SAFETY: the caller owes the same; the spec was checked in `new` and the pairs just now.
        let shares = unsafe {
            tiles::split(
                &self.spec,
                self.head,
                pairs,
                Direction::Load,
                self.parts(pairs, threads),
            )
        };
        run(shares, |share| self.backend.load(share));
        Ok(())
    }

    /// Zeroes an active slot, windows included: the state before the first token.
    ///
    /// # Errors
    ///
    /// When the slot is out of range; nothing was written.
    ///
    /// # Safety
    ///
    /// During the call every byte of the slot is valid for writes, and nobody else reads or writes
    /// it.
    pub unsafe fn clear(&self, slot: u32, threads: NonZeroUsize) -> Result<(), PairError> {
        // The sink, which every pool has, is named as the source and not read.
        let pairs = [Pair {
            source: 0,
            destination: slot,
        }];
        in_range((Side::Active, self.spec.active.slots), 0, slot)?;
        // SAFETY: the caller owes the same for the slot; the spec was checked in `new`, the slot just
        // now, and `Share::clear` reads nothing.
        let shares = unsafe {
            tiles::split(
                &self.spec,
                self.head,
                &pairs,
                Direction::Load,
                self.parts(&pairs, threads),
            )
        };
        run(shares, Share::clear);
        Ok(())
    }

    fn check_pairs(&self, pairs: &[Pair], direction: Direction) -> Result<(), PairError> {
        let active = (Side::Active, self.spec.active.slots);
        let checkpoint = (Side::Checkpoint, self.spec.checkpoint.rows.slots);
        let (from, to) = match direction {
            Direction::Store => (active, checkpoint),
            Direction::Load => (checkpoint, active),
        };
        let usable = to.1.saturating_sub(1);
        if pairs.len() > usable {
            return Err(PairError::TooMany {
                pairs: pairs.len(),
                usable,
            });
        }
        for (
            pair,
            &Pair {
                source,
                destination,
            },
        ) in pairs.iter().enumerate()
        {
            in_range(from, pair, source)?;
            in_range(to, pair, destination)?;
        }
        distinct(pairs)
    }

    /// How many threads the bytes to be moved are worth.
    fn parts(&self, pairs: &[Pair], threads: NonZeroUsize) -> usize {
        let spec = &self.spec;
        let state = spec.shape.heads * spec.shape.d_k * spec.shape.d_v * spec.state.bytes();
        let windows: usize = spec.windows.iter().map(|window| window.bytes).sum();
        let bytes = spec.active.layers.len() * pairs.len() * (state + windows);
        threads.get().min(bytes / BYTES_PER_THREAD).max(1)
    }
}

fn in_range((side, slots): (Side, usize), pair: usize, slot: u32) -> Result<(), PairError> {
    if (1..slots).contains(&(slot as usize)) {
        return Ok(());
    }
    Err(PairError::SlotOutOfRange {
        side,
        pair,
        slot,
        slots,
    })
}

fn distinct(pairs: &[Pair]) -> Result<(), PairError> {
    if pairs.len() < 2 {
        return Ok(()); // without memory for their order
    }
    let mut order: Vec<_> = pairs.iter().map(|pair| pair.destination).zip(0..).collect();
    order.sort_unstable();
    match order.windows(2).find(|two| two[0].0 == two[1].0) {
        Some(two) => Err(PairError::DuplicateDestination {
            slot: two[0].0,
            first: two[0].1,
            second: two[1].1,
        }),
        None => Ok(()),
    }
}

/// Works on every share, each taken by whichever thread is free; the calling one is the first.
fn run<'a>(mut shares: Vec<Share<'a>>, work: impl Fn(Share<'a>) + Sync) {
    if shares.len() == 1 {
        return shares.drain(..).for_each(work); // a scope costs more than a small state
    }
    let helpers = shares.len().saturating_sub(1);
    let shares = Mutex::new(shares.into_iter());
    // A panic elsewhere leaves the rest of the shares as they are.
    let next = || shares.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(share) = next() {
            work(share);
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no further thread can be started, those that run do its share.
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}
