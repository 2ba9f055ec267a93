//! What the core reports, as Python exceptions: one class for each kind of misuse, shortages with
//! their fields.

use pyo3::CastError;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use radixstate::{Error, Misuse, OutOfSlots, Report, Shortage};

/// What an operation of this module ends with when it does not succeed.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Everything that can keep an operation from succeeding.
#[derive(Debug)]
pub(crate) enum Failure {
    Shortage(Shortage),
    Misuse(Misuse),
    /// A misuse that only this side of the boundary can see.
    Refused(Class, String),
    Check(Report),
    Python(PyErr),
}

impl From<Shortage> for Failure {
    fn from(shortage: Shortage) -> Self {
        Self::Shortage(shortage)
    }
}

impl From<Misuse> for Failure {
    fn from(misuse: Misuse) -> Self {
        Self::Misuse(misuse)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Shortage(shortage) => Self::Shortage(shortage),
            Error::Misuse(misuse) => Self::Misuse(misuse),
        }
    }
}

impl From<Report> for Failure {
    fn from(report: Report) -> Self {
        Self::Check(report)
    }
}

impl From<CastError<'_, '_>> for Failure {
    fn from(error: CastError<'_, '_>) -> Self {
        Self::Python(error.into())
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| match failure {
            Failure::Shortage(shortage) => shortage_error(py, shortage),
            Failure::Misuse(misuse) => class_of(&misuse).error(py, misuse.to_string()),
            Failure::Refused(class, message) => class.error(py, message),
            Failure::Check(report) => check_error(py, &report),
            Failure::Python(error) => error,
        })
    }
}

/// What a class derives from.
#[derive(Debug, Clone, Copy)]
enum Parent {
    Exception,
    Cache,
    CacheAndValue,
    Misuse,
}

macro_rules! classes {
    ($($class:ident: $parent:ident, $doc:literal;)*) => {
        /// An exception class of the module. The Python name has `Error` appended.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Class { $($class),* }

        /// Name, parent and docstring of each [`Class`], in the order of its variants.
        const CLASSES: &[(&str, Parent, &str)] =
            &[$((concat!(stringify!($class), "Error"), Parent::$parent, $doc)),*];
    };
}

// A parent comes before its children.
classes! {
    Cache: Exception, "Anything that radixstate raises.";
    OutOfSlots: Cache, "A pool is short just now: `wanted` more units of `pool` than `free` + `evictable`. Another `retiring` come free when the steps in flight have retired. Nothing has changed.";
    NeverFits: Cache, "`wanted` more units of `pool` than its whole `capacity`: waiting does not help. Nothing has changed.";
    Poisoned: Cache, "A bug of the library broke an invariant of this cache; it refuses further calls.";
    Check: Cache, "check() found broken invariants, listed in `violations`.";
    Misuse: CacheAndValue, "The call breaks a rule. Nothing has changed.";
    Config: Misuse, "A configuration that cannot work.";
    EmptyPrompt: Misuse, "A prompt of no tokens.";
    Unaligned: Misuse, "A depth off the grid of legal depths.";
    DepthPastEnd: Misuse, "A depth that the sequence has not reached.";
    NotYourSlot: Misuse, "An active slot that does not belong to the sequence.";
    RunningSlot: Misuse, "The slot of the running state, which goes back with its sequence alone.";
    NotLoaded: Misuse, "The sequence's state was not yet reported loaded or cleared, or a lease's not yet loaded.";
    DepthPassed: Misuse, "A depth that the state in a slot has left behind.";
    AlreadyLoaded: Misuse, "The load or clear was reported before.";
    NotClaimed: Misuse, "More tokens than positions claimed.";
    LengthMismatch: Misuse, "A list whose length does not follow from the rest.";
    WrongCache: Misuse, "A handle or match of another cache.";
    NotYourPending: Misuse, "A pending checkpoint that another sequence or lease reserved.";
    Stale: Misuse, "A match that no longer describes the cache.";
    UseAfterFinish: Misuse, "A handle that was given back before.";
    Forked: Misuse, "A cache of the parent process, called in a forked child.";
    UnknownStep: Misuse, "A step that was never begun.";
    PageOwnership: Misuse, "A page that is out of range or already owned.";
    PrefixMismatch: Misuse, "Tokens that do not continue the leased prefix.";
    TooManyPages: Misuse, "More pages handed over than the cache has numbers for.";
    TokenRange: Misuse, "A token outside 0..2**32 - 1.";
    Tensor: Misuse, "A tensor or buffer of the wrong shape, dtype, device or layout.";
    Slot: Misuse, "A slot id that the codec can't use: out of range, or a destination given twice.";
}

static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

impl Class {
    /// An exception of this class.
    pub(crate) fn error(self, py: Python<'_>, message: String) -> PyErr {
        match types(py) {
            Ok(types) => PyErr::from_type(types[self as usize].bind(py).clone(), message),
            Err(error) => error,
        }
    }

    /// The same with attributes.
    fn with_attributes<'py>(
        self,
        py: Python<'py>,
        message: String,
        attributes: Bound<'py, PyDict>,
    ) -> PyResult<PyErr> {
        let value = types(py)?[self as usize].bind(py).call1((message,))?;
        for (name, attribute) in attributes {
            value.setattr(name.cast_into()?, attribute)?;
        }
        Ok(PyErr::from_value(value))
    }
}

/// Adds the exception classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let types = types(module.py())?;
    CLASSES
        .iter()
        .zip(types)
        .try_for_each(|(&(name, ..), class)| module.add(name, class))
}

fn types(py: Python<'_>) -> PyResult<&Vec<Py<PyType>>> {
    TYPES.get_or_try_init(py, || {
        let mut made = Vec::with_capacity(CLASSES.len());
        for &(name, parent, doc) in CLASSES {
            made.push(make(py, name, bases(py, parent, &made)?, doc)?);
        }
        Ok(made)
    })
}

fn make<'py>(
    py: Python<'py>,
    name: &str,
    bases: Bound<'py, PyTuple>,
    doc: &str,
) -> PyResult<Py<PyType>> {
    let body = PyDict::new(py);
    body.set_item("__module__", "radixstate._native")?;
    body.set_item("__doc__", doc)?;
    Ok(py
        .get_type::<PyType>()
        .call1((name, bases, body))?
        .cast_into::<PyType>()?
        .unbind())
}

fn bases<'py>(
    py: Python<'py>,
    parent: Parent,
    made: &[Py<PyType>],
) -> PyResult<Bound<'py, PyTuple>> {
    match parent {
        Parent::Exception => PyTuple::new(py, [py.get_type::<PyException>()]),
        Parent::Cache => PyTuple::new(py, [&made[Class::Cache as usize]]),
        Parent::CacheAndValue => PyTuple::new(
            py,
            [
                made[Class::Cache as usize].bind(py),
                &py.get_type::<PyValueError>(),
            ],
        ),
        Parent::Misuse => PyTuple::new(py, [&made[Class::Misuse as usize]]),
    }
}

fn shortage_error(py: Python<'_>, shortage: Shortage) -> PyErr {
    let message = shortage.to_string();
    let fields = PyDict::new(py);
    let raise = || match shortage {
        Shortage::Busy(OutOfSlots {
            pool,
            wanted,
            free,
            evictable,
            retiring,
        }) => {
            fields.set_item("pool", pool.to_string())?;
            fields.set_item("wanted", wanted)?;
            fields.set_item("free", free)?;
            fields.set_item("evictable", evictable)?;
            fields.set_item("retiring", retiring)?;
            Class::OutOfSlots.with_attributes(py, message, fields)
        }
        Shortage::NeverFits {
            pool,
            wanted,
            capacity,
        } => {
            fields.set_item("pool", pool.to_string())?;
            fields.set_item("wanted", wanted)?;
            fields.set_item("capacity", capacity)?;
            Class::NeverFits.with_attributes(py, message, fields)
        }
    };
    raise().unwrap_or_else(|error| error)
}

fn check_error(py: Python<'_>, report: &Report) -> PyErr {
    let violations: Vec<String> = report.violations.iter().map(ToString::to_string).collect();
    let fields = PyDict::new(py);
    let raise = || {
        fields.set_item("violations", violations)?;
        Class::Check.with_attributes(py, report.to_string(), fields)
    };
    raise().unwrap_or_else(|error| error)
}

fn class_of(misuse: &Misuse) -> Class {
    match misuse {
        Misuse::Config(_) => Class::Config,
        Misuse::EmptyPrompt => Class::EmptyPrompt,
        Misuse::Unaligned { .. } => Class::Unaligned,
        Misuse::DepthPastEnd { .. } => Class::DepthPastEnd,
        Misuse::NotYourSlot { .. } => Class::NotYourSlot,
        Misuse::RunningSlot { .. } => Class::RunningSlot,
        Misuse::DepthPassed { .. } => Class::DepthPassed,
        Misuse::NotLoaded => Class::NotLoaded,
        Misuse::AlreadyLoaded => Class::AlreadyLoaded,
        Misuse::NotClaimed { .. } => Class::NotClaimed,
        Misuse::LengthMismatch { .. } => Class::LengthMismatch,
        Misuse::WrongCache => Class::WrongCache,
        Misuse::NotYourPending => Class::NotYourPending,
        Misuse::Stale(_) => Class::Stale,
        Misuse::UnknownStep { .. } => Class::UnknownStep,
        Misuse::PageOwnership { .. } => Class::PageOwnership,
        Misuse::PrefixMismatch { .. } => Class::PrefixMismatch,
        Misuse::TooManyPages { .. } => Class::TooManyPages,
    }
}
