//! What a caller asks with.

use pyo3::exceptions::PyUnicodeEncodeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};
use pyo3::{PyTypeCheck, PyTypeInfo};
use radixstate::{PoolKind, StartOptions};

use crate::errors::{Class, Failure, Result};
use crate::gather::gather;
use crate::number::Number;
use crate::tokens::Tokens;

/// Keys in different namespaces never match. `adapter` and `weights` change on every reload of an
/// adapter or of the weights; `tenant` keeps one account's prefixes from another's.
#[pyclass(frozen, eq, hash, module = "radixstate._native", skip_from_py_object)]
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Namespace(pub(crate) radixstate::Namespace);

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(
        signature = (adapter=0.into(), tenant=None, weights=0.into(), *, salts=Vec::new()),
        text_signature = "(adapter=0, tenant=None, weights=0, *, salts=())",
    )]
    fn new(
        adapter: Number<u64>,
        tenant: Option<Salt>,
        weights: Number<u64>,
        salts: Vec<Option<Salt>>,
    ) -> Result<Self> {
        let salts = std::iter::once(&tenant).chain(&salts);
        let salts = salts.map(|salt| salt.as_ref().map(|salt| salt.0.as_str()));
        Ok(Self(radixstate::Namespace::with_salts(
            adapter.named("adapter")?,
            salts,
            weights.named("weights")?,
        )))
    }

    /// Identity of the adapter's loaded weights, 0 for none.
    #[getter]
    fn adapter(&self) -> u64 {
        self.0.adapter()
    }

    /// Salt of the tenant.
    #[getter]
    fn tenant(&self) -> Option<&str> {
        self.0.tenant()
    }

    /// Version of the model's weights.
    #[getter]
    fn weights(&self) -> u64 {
        self.0.weights()
    }

    /// Salts beside that of the tenant, up to the last that is not None.
    #[getter]
    fn salts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.salts().skip(1).collect::<Vec<_>>())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let tenant = self.0.tenant().into_pyobject(py)?.repr()?;
        let (adapter, weights) = (self.0.adapter(), self.0.weights());
        let salts = self.salts(py)?;
        let salts = if salts.is_empty() {
            String::new()
        } else {
            format!(", salts={}", salts.repr()?)
        };
        Ok(format!(
            "Namespace(adapter={adapter}, tenant={tenant}, weights={weights}{salts})"
        ))
    }

    /// For `pickle` and `copy`: a namespace owns nothing.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Remade<'py>> {
        let fields = (self.adapter(), self.tenant(), self.weights());
        let keywords = PyDict::new(py);
        keywords.set_item("salts", self.salts(py)?)?;
        remade::<Self>(py, fields.into_pyobject(py)?, keywords)
    }
}

/// A salt. Python's strings may hold halves of a surrogate pair; the core's are text.
struct Salt(String);

impl FromPyObject<'_, '_> for Salt {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        let error = match object.extract::<String>() {
            Ok(text) => return Ok(Self(text)),
            Err(error) => error,
        };
        let py = object.py();
        if !error.is_instance_of::<PyUnicodeEncodeError>(py) {
            return Err(error.into());
        }
        let at: usize = error.value(py).getattr("start")?.extract()?;
        let half = object.get_item(at)?.repr()?;
        let message = format!("namespace: the lone surrogate {half} at position {at} is not text");
        Err(Failure::Refused(Class::Misuse, message))
    }
}

/// `(copyreg.__newobj_ex__, (class, arguments, keywords))`: how `pickle` and `copy` make an object
/// again. The function exists for just that, and every protocol can name it.
type Remade<'py> = (
    Bound<'py, PyAny>,
    (Bound<'py, PyType>, Bound<'py, PyTuple>, Bound<'py, PyDict>),
);

fn remade<'py, T: PyTypeInfo>(
    py: Python<'py>,
    arguments: Bound<'py, PyTuple>,
    keywords: Bound<'py, PyDict>,
) -> PyResult<Remade<'py>> {
    static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let make = MAKE.import(py, "copyreg", "__newobj_ex__")?;
    Ok((make.clone(), (py.get_type::<T>(), arguments, keywords)))
}

/// The namespace of a call that names none: the bare model's.
pub(crate) fn namespace_or_default(namespace: Option<&Namespace>) -> radixstate::Namespace {
    namespace.map_or_else(radixstate::Namespace::default, |namespace| {
        namespace.0.clone()
    })
}

/// The options of a start.
pub(crate) fn start_options(
    reserve: Option<Number<usize>>,
    max_length: Option<Number<usize>>,
    no_read: bool,
    no_store: bool,
    slots: Number<usize>,
) -> Result<StartOptions> {
    let reserve = reserve.map(|tokens| tokens.named("reserve")).transpose()?;
    let max_length = max_length
        .map(|length| length.named("max_length"))
        .transpose()?;
    Ok(StartOptions {
        reserve,
        max_length,
        no_read,
        no_store,
        slots: slots.named("slots")?,
    })
}

/// One prompt of `Cache.start_many`. Its tokens are converted once, however often it is tried
/// again.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct StartRequest {
    tokens: Vec<u32>,
    namespace: radixstate::Namespace,
    options: StartOptions,
}

impl StartRequest {
    pub(crate) fn as_core(&self) -> radixstate::StartRequest<'_> {
        let Self {
            tokens,
            namespace,
            options,
        } = self;
        radixstate::StartRequest {
            namespace,
            tokens,
            options: *options,
        }
    }
}

#[pymethods]
impl StartRequest {
    #[new]
    #[pyo3(
        signature = (tokens, namespace=None, *, reserve=None, max_length=None, no_read=false, no_store=false, slots=1.into()),
        text_signature = "(tokens, namespace=None, *, reserve=None, max_length=None, no_read=False, no_store=False, slots=1)",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
        reserve: Option<Number<usize>>,
        max_length: Option<Number<usize>>,
        no_read: bool,
        no_store: bool,
        slots: Number<usize>,
    ) -> Result<Self> {
        let options = start_options(reserve, max_length, no_read, no_store, slots)?;
        Ok(Self {
            tokens: tokens.into_vec(py)?,
            namespace: namespace_or_default(namespace),
            options,
        })
    }

    /// The prompt.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.tokens.clone()
    }

    /// Where its keys live.
    #[getter]
    fn namespace(&self) -> Namespace {
        Namespace(self.namespace.clone())
    }

    /// Positions to claim pages for; `None`: the whole prompt.
    #[getter]
    fn reserve(&self) -> Option<usize> {
        self.options.reserve
    }

    /// Most tokens to reuse.
    #[getter]
    fn max_length(&self) -> Option<usize> {
        self.options.max_length
    }

    /// Whether to reuse nothing.
    #[getter]
    fn no_read(&self) -> bool {
        self.options.no_read
    }

    /// Whether to store nothing.
    #[getter]
    fn no_store(&self) -> bool {
        self.options.no_store
    }

    /// Active slots to take, that of the running state included.
    #[getter]
    fn slots(&self) -> usize {
        self.options.slots
    }

    fn __len__(&self) -> usize {
        self.tokens.len()
    }

    fn __repr__(&self) -> String {
        format!("StartRequest({} tokens)", self.tokens.len())
    }

    /// For `pickle` and `copy`: whoever tokenizes sends requests to another process.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Remade<'py>> {
        let StartOptions {
            reserve,
            max_length,
            no_read,
            no_store,
            slots,
        } = self.options;
        let keywords = PyDict::new(py);
        keywords.set_item("reserve", reserve)?;
        keywords.set_item("max_length", max_length)?;
        keywords.set_item("no_read", no_read)?;
        keywords.set_item("no_store", no_store)?;
        keywords.set_item("slots", slots)?;
        let arguments = (self.tokens.as_slice(), self.namespace()).into_pyobject(py)?;
        remade::<Self>(py, arguments, keywords)
    }
}

/// A pool by name. `checkpoints` is `checkpoint` as well: counters and tensors are named so.
pub(crate) struct PoolName(pub(crate) PoolKind);

impl FromPyObject<'_, '_> for PoolName {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        match &*object.cast::<PyString>()?.to_string_lossy() {
            "kv" => Ok(Self(PoolKind::Kv)),
            "active" => Ok(Self(PoolKind::Active)),
            "checkpoint" | "checkpoints" => Ok(Self(PoolKind::Checkpoint)),
            name => {
                let message = format!("pool '{name}' is none of 'kv', 'active', 'checkpoint'");
                Err(Failure::Refused(Class::Misuse, message))
            }
        }
    }
}

/// Objects of one class, from any iterable.
pub(crate) struct Each<'py, T>(pub(crate) Vec<Bound<'py, T>>);

impl<'py, T: PyTypeCheck> FromPyObject<'_, 'py> for Each<'py, T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        gather(&object, |item| Ok(item.cast_into()?)).map(Self)
    }
}
