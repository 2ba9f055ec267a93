//! Requests whose pages are the engine's.

use pyo3::prelude::*;
use radixstate::{PoolConfig, PoolKind};

use crate::cache::CacheBase;
use crate::config::Sizes;
use crate::errors::{Class, Failure, Result};
use crate::gate::{Core, Gate, each, each_engine};
use crate::handles::{LeaseHandle, PendingHandle};
use crate::number::Number;
use crate::page_table::PageTable;
use crate::results::{Committed, Extended, Published, Reserved};
use crate::tokens::{Pages, Tokens};

/// A prefix cache for an engine that allocates the KV pages.
#[pyclass(frozen, extends = CacheBase, module = "radixstate._native")]
pub(crate) struct EngineCache;

fn gate<'a>(cache: &'a Bound<'_, EngineCache>) -> &'a Gate {
    &cache.as_super().get().0
}

/// The engine's ids; none where the cache numbers the pages.
fn ids(core: &Core, pages: Option<Pages>) -> Result<Vec<u32>> {
    let ids = pages.map_or_else(Vec::new, |pages| pages.0);
    if matches!(core, Core::Logical(_)) && !ids.is_empty() {
        let message = format!(
            "{} pages given, 0 expected: the cache numbers them",
            ids.len()
        );
        return Err(Failure::Refused(Class::LengthMismatch, message));
    }
    Ok(ids)
}

#[pymethods]
impl EngineCache {
    /// An empty cache. Sizes are in slots (ids are 1..=size); `kv_pages=0` for a purely linear
    /// model, `active_slots=0` if the engine has running states of its own. With `logical` the
    /// cache numbers the pages that it is given. The bytes of one slot are for statistics only.
    ///
    /// Raises ConfigError for a geometry in which no prefix could ever be reused.
    #[new]
    #[pyo3(
        signature = (
            *, page_size, checkpoint_stride, kv_pages, checkpoint_slots, active_slots=0.into(), logical=false,
            kv_page_bytes=0.into(), active_bytes=0.into(), checkpoint_bytes=0.into(), policy="lru",
        ),
        text_signature = "(*, page_size, checkpoint_stride, kv_pages, checkpoint_slots, active_slots=0, \
            logical=False, kv_page_bytes=0, active_bytes=0, checkpoint_bytes=0, policy='lru')",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        page_size: Number<u32>,
        checkpoint_stride: Number<u32>,
        kv_pages: Number<u32>,
        checkpoint_slots: Number<u32>,
        active_slots: Number<u32>,
        logical: bool,
        kv_page_bytes: Number<u64>,
        active_bytes: Number<u64>,
        checkpoint_bytes: Number<u64>,
        policy: &str,
    ) -> Result<PyClassInitializer<Self>> {
        let sizes = Sizes {
            page_size,
            checkpoint_stride,
            kv: (kv_pages, kv_page_bytes),
            active: (active_slots, active_bytes),
            checkpoints: (checkpoint_slots, checkpoint_bytes),
        };
        let core = if logical {
            Core::Logical(sizes.cache(PoolConfig::logical, policy)?)
        } else {
            Core::Engine(sizes.cache(PoolConfig::engine, policy)?)
        };
        Ok(PyClassInitializer::from(CacheBase(Gate::new(core))).add_subclass(Self))
    }

    /// Shares `tokens` and the pages of the positions from the lease's depth to their end, and
    /// moves the lease there. `pages` are the engine's ids, or None where the cache numbers them:
    /// exactly those that the tree lacks are taken over. Without a state at their end, or beyond,
    /// they stay as long as somebody leases them.
    ///
    /// Raises UnalignedError off the grid of pages, PrefixMismatchError, NotLoadedError;
    /// LengthMismatchError, PageOwnershipError, or TooManyPagesError where the cache numbers them.
    #[pyo3(signature = (lease, tokens, pages=None))]
    fn extend(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pages: Option<Pages>,
    ) -> Result<Extended> {
        let given = gate(slf).ask(|core| ids(core, pages))??;
        let extended = lease.0.read(|lease| {
            gate(slf).call_with(py, &tokens, |core, tokens| match core {
                Core::Own(_) => unreachable!("an EngineCache has pages of the engine"),
                Core::Engine(cache) => cache.extend(lease, tokens, &given),
                Core::Logical(cache) => cache.extend(lease, tokens),
            })
        })?;
        Ok(Extended(extended))
    }

    /// Takes a checkpoint slot for the state after exactly `tokens`, to be published with their
    /// pages, or attached if the lease has all of them. Evicts if needed, and nothing if a rule is
    /// broken.
    ///
    /// Raises what `extend` does, and UnalignedError for an illegal depth.
    #[pyo3(signature = (lease, tokens, pages=None))]
    fn reserve(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pages: Option<Pages>,
    ) -> Result<Reserved> {
        let given = gate(slf).ask(|core| ids(core, pages))??;
        let reservation = lease.0.read(|lease| {
            gate(slf).call_with(py, &tokens, |core, tokens| match core {
                Core::Own(_) => unreachable!("an EngineCache has pages of the engine"),
                Core::Engine(cache) => cache.reserve(lease, tokens, &given),
                Core::Logical(cache) => cache.reserve(lease, tokens),
            })
        })?;
        Ok(reservation.into())
    }

    /// Publishes tokens, pages and state together, or nothing; `pages` as for `extend`.
    ///
    /// Raises what `extend` does, UnalignedError for an illegal depth, NotYourPendingError. An
    /// error consumes nothing.
    #[pyo3(signature = (lease, tokens, pages, pending, *, proven=true))]
    fn publish(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pages: Option<Pages>,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Published> {
        let given = gate(slf).ask(|core| ids(core, pages))??;
        let published = lease.0.read(|lease| {
            pending.publish(proven, |pending| {
                gate(slf).ask_with(py, &tokens, |core, tokens| match core {
                    Core::Own(_) => unreachable!("an EngineCache has pages of the engine"),
                    Core::Engine(cache) => cache.publish(lease, tokens, &given, pending),
                    Core::Logical(cache) => cache.publish(lease, tokens, pending),
                })
            })
        })?;
        Published::new(py, published)
    }

    /// Adds a state to a prefix that the lease has already.
    ///
    /// Raises DepthPastEndError past the lease's depth, PrefixMismatchError, NotYourPendingError.
    /// An error consumes nothing.
    #[pyo3(signature = (lease, tokens, pending, *, proven=true))]
    fn attach(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Committed> {
        let attached = lease.0.read(|lease| {
            pending.publish(proven, |pending| {
                gate(slf).ask_with(py, &tokens, |core, tokens| {
                    each_engine!(core, cache => cache.attach(lease, tokens, pending))
                })
            })
        })?;
        Ok(attached.into())
    }

    /// Pages that the cache has given up since the last call, each exactly once: the engine's ids,
    /// or numbers.
    fn take_freed(slf: &Bound<'_, Self>) -> Result<Vec<u32>> {
        gate(slf).ask(|core| each_engine!(core, cache => cache.take_freed()))
    }

    /// Writes what `take_freed` lists, as `copy_pages` does. A buffer that is too small takes
    /// nothing.
    ///
    /// Raises LengthMismatchError.
    fn copy_freed(slf: &Bound<'_, Self>, py: Python<'_>, out: PageTable) -> Result<usize> {
        let kv = PoolKind::Kv;
        let waiting = gate(slf).ask(|core| each!(core, cache => cache.usage(kv).outbox))?;
        out.require(waiting)?;
        out.write(py, &Self::take_freed(slf)?)
    }

    /// An active slot for the request of a lease. It goes back with the lease, or earlier.
    ///
    /// Raises OutOfSlotsError, NeverFitsError.
    fn take_slot(slf: &Bound<'_, Self>, lease: &LeaseHandle) -> Result<u32> {
        lease.0.read(|lease| {
            gate(slf).call(|core| each_engine!(core, cache => cache.take_lease_slot(lease)))
        })
    }

    /// Gives an active slot back: now, or when the steps in flight have retired.
    ///
    /// Raises NotYourSlotError.
    fn give_back_slot(slf: &Bound<'_, Self>, lease: &LeaseHandle, slot: Number<u32>) -> Result<()> {
        let slot = slot.named_or(Class::NotYourSlot, "slot")?;
        lease.0.read(|lease| {
            let back = |core: &mut Core| each_engine!(core, cache => cache.give_back_lease_slot(lease, slot));
            gate(slf).call(back)
        })
    }

    /// The active slots that a lease has taken, the oldest first.
    fn slots(slf: &Bound<'_, Self>, lease: &LeaseHandle) -> Result<Vec<u32>> {
        lease.0.read(|lease| {
            gate(slf).call(|core| {
                each_engine!(core, cache => cache.lease_slots(lease).map(|slots| slots.collect()))
            })
        })
    }
}
