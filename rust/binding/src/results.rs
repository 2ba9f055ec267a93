//! What operations return, as frozen classes.

use std::ops::Range;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use radixstate::{Begin, Commit, OutOfSlots, Reason, Reservation, Skip};

use crate::codec;
use crate::errors::{Failure, Result};
use crate::handles::{PendingHandle, SequenceHandle};

/// How much of a prompt can be reused. A hint: the cache checks it again when it is used.
#[pyclass(frozen, eq, module = "radixstate._native", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub(crate) struct Match(pub(crate) radixstate::Match);

#[pymethods]
impl Match {
    /// Tokens whose KV and state can be reused, at most the prompt's length - 1.
    #[getter]
    fn length(&self) -> usize {
        self.0.length
    }

    /// Tokens whose KV is cached, in whole pages; at least `length`.
    #[getter]
    fn kv_length(&self) -> usize {
        self.0.kv_length
    }

    /// Deepest legal depth at which a checkpoint would have helped this prompt, or None.
    #[getter]
    fn branch(&self) -> Option<usize> {
        self.0.branch
    }

    /// Why `length` is what it is: "hit", "no_prefix", "no_state", "unaligned" or "not_ready".
    #[getter]
    fn reason(&self) -> &'static str {
        match self.0.reason {
            Reason::Hit => "hit",
            Reason::NoPrefix => "no_prefix",
            Reason::NoState => "no_state",
            Reason::Unaligned => "unaligned",
            Reason::NotReady => "not_ready",
        }
    }

    /// How often the reusable state has been encoded since it was computed; 0 without a hit.
    #[getter]
    fn encodings(&self) -> u32 {
        self.0.encodings
    }

    /// Whether a deeper checkpoint of this prompt is being written, or not yet known to be finite.
    #[getter]
    fn not_ready(&self) -> bool {
        self.0.not_ready
    }

    fn __repr__(&self) -> String {
        let (length, kv_length, branch, reason) = (
            self.0.length,
            self.0.kv_length,
            python_option(self.0.branch),
            self.reason(),
        );
        format!("Match(length={length}, kv_length={kv_length}, branch={branch}, reason='{reason}')")
    }
}

/// A sequence that has everything it asked for.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct Started {
    /// Owns the slots, pages and pins.
    #[pyo3(get)]
    sequence: Py<SequenceHandle>,
    matched: radixstate::Match,
    /// The checkpoint slot to load into the active slot; None: clear it. Then call `loaded`, unless
    /// a codec was given that did all that.
    #[pyo3(get)]
    load_from: Option<u32>,
    /// The active slot.
    #[pyo3(get)]
    slot: u32,
}

impl Started {
    pub(crate) fn new(py: Python<'_>, started: radixstate::Started) -> PyResult<Self> {
        let radixstate::Started {
            sequence,
            matched,
            begin,
        } = started;
        let (load_from, slot) = match begin {
            Begin::Clear { dst } => (None, dst),
            Begin::Load { src, dst } => (Some(src), dst),
        };
        Ok(Self {
            sequence: Py::new(py, SequenceHandle::from(sequence))?,
            matched,
            load_from,
            slot,
        })
    }

    pub(crate) fn sequence(&self) -> &SequenceHandle {
        self.sequence.get()
    }

    /// Makes the active slot hold what the sequence starts from.
    pub(crate) fn fill(&self, codec: &Bound<'_, PyAny>) -> Result<()> {
        codec::fill(codec, self.load_from, self.slot)
    }
}

#[pymethods]
impl Started {
    /// What was reused.
    #[getter]
    fn r#match(&self) -> Match {
        Match(self.matched.clone())
    }

    fn __repr__(&self) -> String {
        let matched = self.r#match().__repr__();
        let (load_from, slot) = (python_option(self.load_from), self.slot);
        format!("Started(match={matched}, load_from={load_from}, slot={slot})")
    }
}

/// One result of `Cache.start_many`: a `Started`, or the exception that `start` would have raised.
pub(crate) fn started_or_error(
    py: Python<'_>,
    started: std::result::Result<radixstate::Started, radixstate::Error>,
) -> PyResult<Bound<'_, PyAny>> {
    match started {
        Ok(started) => Started::new(py, started)?.into_bound_py_any(py),
        Err(error) => Ok(PyErr::from(Failure::from(error))
            .into_value(py)
            .into_bound(py)
            .into_any()),
    }
}

/// A checkpoint that is now in the tree.
#[pyclass(frozen, eq, module = "radixstate._native", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub(crate) struct Stored(pub(crate) radixstate::Stored);

#[pymethods]
impl Stored {
    /// Tokens that the state stands for.
    #[getter]
    fn depth(&self) -> usize {
        self.0.depth
    }

    /// Its slot in the checkpoint pool.
    #[getter]
    fn slot(&self) -> u32 {
        self.0.slot
    }

    /// Names this store; never reused.
    #[getter]
    fn serial(&self) -> u64 {
        self.0.serial
    }

    /// The step that writes it; lookups ignore it until that step retires. None: ready at once.
    #[getter]
    fn step(&self) -> Option<u64> {
        self.0.step
    }

    /// The ticket to `complete` when it is known whether the state is finite, or None: it was
    /// committed as proven. Lookups ignore the checkpoint until then.
    #[getter]
    fn ticket(&self) -> Option<u64> {
        self.0.ticket
    }

    /// How often this state has been encoded since it was computed: 1 for a prompt computed from
    /// its start, one more than the checkpoint it continued otherwise.
    #[getter]
    fn encodings(&self) -> u32 {
        self.0.encodings
    }

    /// Tokens [from, to) whose private pages were replaced by pages that were cached already, or
    /// None.
    #[getter]
    fn replaced(&self) -> Option<(usize, usize)> {
        ends(&self.0.replaced)
    }

    fn __repr__(&self) -> String {
        let radixstate::Stored {
            depth,
            slot,
            serial,
            step,
            ..
        } = &self.0;
        let step = python_option(*step);
        let replaced = python_range(&self.0.replaced);
        format!(
            "Stored(depth={depth}, slot={slot}, serial={serial}, step={step}, replaced={replaced})"
        )
    }
}

/// No checkpoint was stored. Storing is optional work: this is no error.
#[pyclass(frozen, eq, module = "radixstate._native", skip_from_py_object)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Skipped(pub(crate) Skip);

impl Skipped {
    fn room(self) -> Option<OutOfSlots> {
        if let Skip::NoRoom(short) = self.0 {
            Some(short)
        } else {
            None
        }
    }
}

#[pymethods]
impl Skipped {
    /// "duplicate", "no_room", "not_aligned", "not_ready", "no_store", "non_finite" or "reset".
    #[getter]
    fn reason(&self) -> &'static str {
        match self.0 {
            Skip::Duplicate => "duplicate",
            Skip::NoRoom(_) => "no_room",
            Skip::NotAligned => "not_aligned",
            Skip::NoStore => "no_store",
            Skip::NonFinite => "non_finite",
            Skip::NotReady => "not_ready",
            Skip::Reset => "reset",
        }
    }

    /// With "no_room": checkpoint slots wanted.
    #[getter]
    fn wanted(&self) -> Option<usize> {
        Some(self.room()?.wanted)
    }

    /// With "no_room": checkpoint slots free.
    #[getter]
    fn free(&self) -> Option<usize> {
        Some(self.room()?.free)
    }

    /// With "no_room": checkpoint slots that eviction could have freed.
    #[getter]
    fn evictable(&self) -> Option<usize> {
        Some(self.room()?.evictable)
    }

    fn __repr__(&self) -> String {
        let reason = self.reason();
        match self.room() {
            None => format!("Skipped(reason='{reason}')"),
            Some(OutOfSlots {
                wanted,
                free,
                evictable,
                ..
            }) => {
                format!(
                    "Skipped(reason='{reason}', wanted={wanted}, free={free}, evictable={evictable})"
                )
            }
        }
    }
}

/// What a reservation returns.
#[derive(IntoPyObject)]
pub(crate) enum Reserved {
    Pending(PendingHandle),
    Skipped(Skipped),
}

impl From<Reservation> for Reserved {
    fn from(reservation: Reservation) -> Self {
        match reservation {
            Reservation::Pending(pending) => Self::Pending(pending.into()),
            Reservation::Skipped(skip) => Self::Skipped(Skipped(skip)),
        }
    }
}

/// What a commit returns.
#[derive(IntoPyObject)]
pub(crate) enum Committed {
    Stored(Stored),
    Skipped(Skipped),
}

impl From<Commit> for Committed {
    fn from(commit: Commit) -> Self {
        match commit {
            Commit::Stored(stored) => Self::Stored(Stored(stored)),
            Commit::Skipped(skip) => Self::Skipped(Skipped(skip)),
        }
    }
}

/// What sharing pages did. The engine frees its pages of `replaced` and reads those of the lease in
/// their place.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct Extended(pub(crate) radixstate::Extended);

#[pymethods]
impl Extended {
    /// Why the tree did not take the tokens, or None: it has all of them.
    #[getter]
    fn skipped(&self) -> Option<Skipped> {
        self.0.skipped.map(Skipped)
    }

    /// Tokens [from, to) whose pages were cached already, or None.
    #[getter]
    fn replaced(&self) -> Option<(usize, usize)> {
        ends(&self.0.replaced)
    }

    fn __repr__(&self) -> String {
        let skipped = self.skipped().map(|skipped| skipped.__repr__());
        format!(
            "Extended(skipped={}, replaced={})",
            python_option(skipped),
            python_range(&self.0.replaced)
        )
    }
}

/// What publishing tokens, pages and a state did.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct Published {
    /// A `Stored` or a `Skipped`.
    #[pyo3(get)]
    outcome: Py<PyAny>,
    replaced: Range<usize>,
}

impl Published {
    pub(crate) fn new(py: Python<'_>, published: radixstate::Published) -> Result<Self> {
        let radixstate::Published { outcome, replaced } = published;
        let outcome = Committed::from(outcome).into_py_any(py)?;
        Ok(Self { outcome, replaced })
    }
}

#[pymethods]
impl Published {
    /// As of `Extended`.
    #[getter]
    fn replaced(&self) -> Option<(usize, usize)> {
        ends(&self.replaced)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let outcome = self.outcome.bind(py).repr()?;
        let replaced = python_range(&self.replaced);
        Ok(format!("Published(outcome={outcome}, replaced={replaced})"))
    }
}

fn ends(range: &Range<usize>) -> Option<(usize, usize)> {
    (!range.is_empty()).then_some((range.start, range.end))
}

fn python_range(range: &Range<usize>) -> String {
    ends(range).map_or_else(|| "None".into(), |ends| format!("{ends:?}"))
}

fn python_option<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "None".into(), |value| value.to_string())
}

/// Adds the results to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Match>()?;
    module.add_class::<Started>()?;
    module.add_class::<Stored>()?;
    module.add_class::<Skipped>()?;
    module.add_class::<Extended>()?;
    module.add_class::<Published>()
}
