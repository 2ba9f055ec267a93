//! What Python holds of a cache: handles that can be given back once.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use radixstate::{Lease, Pending, Rejected, Sequence, StepId};

use crate::errors::{Class, Failure, Result};
use crate::number::Number;

/// A handle of the core until it is given back. Dropping it, on any thread, only notes that in the
/// cache's inbox.
pub(crate) struct Owned<T> {
    handle: Mutex<Option<T>>,
    gone: &'static str,
}

impl<T> Owned<T> {
    /// Wraps a handle; `gone` is the message once it was given back.
    fn new(handle: T, gone: &'static str) -> Self {
        Self {
            handle: Mutex::new(Some(handle)),
            gone,
        }
    }

    /// Calls with the handle, which stays.
    pub(crate) fn read<R>(&self, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        call(self.lock().as_ref().ok_or_else(|| self.gone())?)
    }

    /// Gives the handle to `call`, unless `check` objects.
    pub(crate) fn consume<R>(
        &self,
        check: impl FnOnce(&T) -> Result<()>,
        call: impl FnOnce(T) -> Result<R>,
    ) -> Result<R> {
        let mut held = self.lock();
        let handle = held.take().ok_or_else(|| self.gone())?;
        if let Err(objection) = check(&handle) {
            *held = Some(handle);
            return Err(objection);
        }
        call(handle)
    }

    /// Takes the handle out, if it is still there.
    fn take(&self) -> Option<T> {
        self.lock().take()
    }

    fn used(&self) -> bool {
        self.lock().is_none()
    }

    fn gone(&self) -> Failure {
        Failure::Refused(Class::UseAfterFinish, self.gone.into())
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        // A panic of the core is caught before it gets here; the option is whole at every moment.
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Owned<Pending> {
    /// Gives the pending checkpoint to `call`; one that is rejected stays here.
    fn publish<R>(
        &self,
        call: impl FnOnce(Pending) -> Result<std::result::Result<R, Rejected>>,
    ) -> Result<R> {
        let mut held = self.lock();
        let pending = held.take().ok_or_else(|| self.gone())?;
        match call(pending)? {
            Ok(published) => Ok(published),
            Err(Rejected { why, pending }) => {
                *held = Some(pending);
                Err(why.into())
            }
        }
    }
}

/// A running request: its slots, pages and pins, until it is finished, aborted or dropped.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct SequenceHandle(pub(crate) Owned<Sequence>);

impl From<Sequence> for SequenceHandle {
    fn from(sequence: Sequence) -> Self {
        Self(Owned::new(
            sequence,
            "this sequence was finished or aborted",
        ))
    }
}

impl SequenceHandle {
    /// Calls with the sequences of all these states, each of which may be named more than once.
    pub(crate) fn read_all<R>(
        states: &[(Py<Self>, usize, u32)],
        call: impl FnOnce(&[(&Sequence, usize, u32)]) -> Result<R>,
    ) -> Result<R> {
        let mut held = BTreeMap::new();
        for (handle, ..) in states {
            held.entry(handle.as_ptr())
                .or_insert_with(|| handle.get().0.lock());
        }
        let mut named = Vec::with_capacity(states.len());
        for (handle, depth, source) in states {
            let sequence = held[&handle.as_ptr()].as_ref();
            let sequence = sequence.ok_or_else(|| handle.get().0.gone())?;
            named.push((sequence, *depth, *source));
        }
        call(&named)
    }
}

#[pymethods]
impl SequenceHandle {
    /// Whether it was finished or aborted.
    #[getter]
    fn used(&self) -> bool {
        self.0.used()
    }

    fn __repr__(&self) -> String {
        format!("SequenceHandle(used={})", python_bool(self.used()))
    }
}

/// Pins one cached prefix, until it is released or dropped.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct LeaseHandle(pub(crate) Owned<Lease>);

impl From<Lease> for LeaseHandle {
    fn from(lease: Lease) -> Self {
        Self(Owned::new(lease, "this lease was released"))
    }
}

#[pymethods]
impl LeaseHandle {
    /// Whether it was released.
    #[getter]
    fn used(&self) -> bool {
        self.0.used()
    }

    fn __repr__(&self) -> String {
        format!("LeaseHandle(used={})", python_bool(self.used()))
    }
}

/// A checkpoint slot that is being written, until it is committed, published or dropped.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct PendingHandle {
    pending: Owned<Pending>,
    /// The checkpoint slot to encode into.
    #[pyo3(get)]
    slot: u32,
    /// The depth, in tokens, that the written state must have.
    #[pyo3(get)]
    depth: usize,
}

impl From<Pending> for PendingHandle {
    fn from(pending: Pending) -> Self {
        let (slot, depth) = (pending.slot(), pending.depth());
        Self {
            pending: Owned::new(pending, "this pending checkpoint was committed"),
            slot,
            depth,
        }
    }
}

impl PendingHandle {
    /// Gives the pending checkpoint to `call`, marked as known to be finite or not; one that is
    /// rejected stays here.
    pub(crate) fn publish<R>(
        &self,
        proven: bool,
        call: impl FnOnce(Pending) -> Result<std::result::Result<R, Rejected>>,
    ) -> Result<R> {
        let mark = if proven {
            Pending::proven
        } else {
            Pending::unproven
        };
        self.pending.publish(|pending| call(mark(pending)))
    }
}

#[pymethods]
impl PendingHandle {
    /// Gives its slot back now, whoever keeps this object. Repeating it changes nothing.
    fn drop(&self) {
        drop(self.pending.take());
    }

    /// Whether it was committed, published or dropped.
    #[getter]
    fn used(&self) -> bool {
        self.pending.used()
    }

    fn __repr__(&self) -> String {
        let Self { slot, depth, .. } = self;
        format!(
            "PendingHandle(slot={slot}, depth={depth}, used={})",
            python_bool(self.used())
        )
    }
}

/// Work in flight, until it is retired. It counts as its number. Dropping it earlier cancels it: a
/// step that nobody reported is not known to have written anything.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct Step(pub(crate) radixstate::Step);

#[pymethods]
impl Step {
    /// Its number; later steps have higher ones.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id()
    }

    fn __index__(&self) -> u64 {
        self.0.id()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .extract::<u64>()
            .is_ok_and(|other| other == self.0.id())
    }

    fn __hash__(&self) -> u64 {
        self.0.id()
    }

    fn __repr__(&self) -> String {
        format!("Step({})", self.0.id())
    }
}

/// A step as callers name it: by its handle, which belongs to a cache, or by its number.
pub(crate) struct StepName {
    number: Number<u64>,
    cache: Option<u64>,
}

impl StepName {
    /// The step, unless its number is none of a step.
    pub(crate) fn known(self) -> Result<impl StepId> {
        let Self { number, cache } = self;
        let id = number.named_or(Class::UnknownStep, "step")?;
        Ok(KnownStep { id, cache })
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for StepName {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let handle = object.cast::<Step>().ok();
        Ok(Self {
            number: object.extract()?,
            cache: handle.and_then(|step| step.get().0.cache()),
        })
    }
}

struct KnownStep {
    id: u64,
    cache: Option<u64>,
}

impl StepId for KnownStep {
    fn id(&self) -> u64 {
        self.id
    }

    fn cache(&self) -> Option<u64> {
        self.cache
    }
}

fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Adds the handles to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SequenceHandle>()?;
    module.add_class::<LeaseHandle>()?;
    module.add_class::<PendingHandle>()?;
    module.add_class::<Step>()
}
