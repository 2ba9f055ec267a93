//! Counters of the core as frozen classes.

use std::fmt;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// How a field of a record appears in a plain dict.
trait Plain {
    fn plain(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>>;
}

impl Plain for u64 {
    fn plain(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

impl Plain for usize {
    fn plain(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

/// A record of the core, field for field, as a class with a repr and a dict.
macro_rules! record {
    ($(#[$meta:meta])* $record:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[pyclass(frozen, eq, get_all, module = "radixstate._native", skip_from_py_object)]
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $record { $($(#[$field_meta])* $field: $type,)* }

        impl From<radixstate::$record> for $record {
            fn from(record: radixstate::$record) -> Self {
                let radixstate::$record { $($field,)* } = record;
                Self { $($field: $field.into(),)* }
            }
        }

        impl fmt::Display for $record {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let fields = [$(format!(concat!(stringify!($field), "={}"), self.$field)),*];
                write!(f, concat!(stringify!($record), "({})"), fields.join(", "))
            }
        }

        impl Plain for $record {
            fn plain(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
                Ok(self.as_dict(py)?.into_any())
            }
        }

        #[pymethods]
        impl $record {
            /// The counters by name; what is nested here is a nested dict.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let dict = PyDict::new(py);
                $(dict.set_item(stringify!($field), self.$field.plain(py)?)?;)*
                Ok(dict)
            }

            fn __repr__(&self) -> String {
                self.to_string()
            }
        }
    };
}

record! {
    /// What an eviction really freed, in all pools.
    Freed {
        /// KV pages.
        kv: usize,
        /// Checkpoint slots.
        checkpoints: usize,
    }
}

record! {
    /// Where the slots of a pool are. For an internal pool all but `capacity` add up to it.
    Usage {
        /// All slots.
        capacity: usize,
        /// Ready to be taken; for an external pool always 0, the engine knows.
        free: usize,
        /// With sequences and pending checkpoints.
        held: usize,
        /// In the tree, unpinned.
        evictable: usize,
        /// In the tree, pinned.
        pinned: usize,
        /// Given back, waiting for steps in flight.
        retiring: usize,
        /// Freed and not yet taken by the engine (external pools).
        outbox: usize,
    }
}

record! {
    /// Starts and leases that reused nothing, by reason.
    Misses {
        /// No whole page was cached.
        no_prefix: u64,
        /// The prefix was there, no state at or below the limit.
        no_state: u64,
        /// What matched is shorter than the first legal depth.
        unaligned: u64,
        /// The state was still being written, or not yet known to be finite.
        not_ready: u64,
    }
}

record! {
    /// Checkpoints that were not stored, by reason.
    Skips {
        /// No slot was free or evictable.
        no_room: u64,
        /// The request asked not to store.
        no_store: u64,
        /// The sequence is older than the last reset, or the prefix that it leases turned out invalid.
        reset: u64,
        /// Nothing to cache at depth 0.
        not_aligned: u64,
        /// Pages on its path were still being written by another request.
        not_ready: u64,
        /// The state held a value that is not finite, or the checkpoint stood on pages that came with
        /// such a state.
        non_finite: u64,
    }
}

record! {
    /// What eviction freed, by cause.
    Evictions {
        /// Pages for a sequence.
        for_kv: Freed,
        /// A slot for a new checkpoint.
        for_checkpoint: Freed,
        /// Calls of `evict`.
        asked: Freed,
        /// Calls of `reset`.
        reset: Freed,
    }
}

record! {
    /// Bytes in use (held, cached, retiring), from the unit sizes given to the cache.
    Bytes {
        /// KV pages.
        kv: u64,
        /// Running states.
        active: u64,
        /// Cached states.
        checkpoints: u64,
    }
}

record! {
    /// All counters of a cache. All of them only grow, except `bytes`.
    Stats {
        /// Calls of `lookup`; hits and misses are counted where a match is used.
        lookups: u64,
        /// Sequences started.
        starts: u64,
        /// Starts and leases that reused a state.
        hits: u64,
        /// Tokens they reused.
        hit_tokens: u64,
        /// Tokens of KV that matched, reusable or not.
        kv_matched_tokens: u64,
        /// Starts and leases that reused none.
        misses: Misses,
        /// Checkpoints stored.
        stored: u64,
        /// Checkpoints that were there already.
        duplicates: u64,
        /// Checkpoints not stored.
        skipped: Skips,
        /// What eviction freed.
        evictions: Evictions,
        /// Calls of `reset`.
        resets: u64,
        /// Memory in use now.
        bytes: Bytes,
    }
}

/// Adds the counters to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Freed>()?;
    module.add_class::<Usage>()?;
    module.add_class::<Misses>()?;
    module.add_class::<Skips>()?;
    module.add_class::<Evictions>()?;
    module.add_class::<Bytes>()?;
    module.add_class::<Stats>()
}
