//! Tensors whose addresses somebody has kept: keeps them alive, and sees whether they moved.

use pyo3::prelude::*;
use radixstate_codec::Plan;

use crate::codec::{Given, Pools};
use crate::errors::Result;
use crate::gather::gather;
use crate::tensor::{Place, hold, misuse};

/// A tensor or storage, and what it said of its memory.
#[derive(Debug)]
struct Kept {
    /// As errors name it.
    name: String,
    object: Py<PyAny>,
    /// Methods by name and bound, which saves a look-up at each check, and what they returned.
    said: Vec<(&'static str, Py<PyAny>, usize)>,
}

impl Kept {
    fn new(name: &str, object: &Bound<'_, PyAny>, methods: &[&'static str]) -> PyResult<Self> {
        let said = methods.iter().map(|&name| {
            let method = object.getattr(name)?;
            let number = method.call0()?.extract()?;
            Ok((name, method.unbind(), number))
        });
        Ok(Self {
            name: name.to_owned(),
            object: object.clone().unbind(),
            said: said.collect::<PyResult<_>>()?,
        })
    }

    fn check(&self, py: Python<'_>) -> Result<()> {
        for (name, method, before) in &self.said {
            let now: usize = method.bind(py).call0()?.extract()?;
            if now != *before {
                return Err(misuse(format!(
                    "{}: the tensor's memory is not what it was when its pool was made: {name} was {before:#x}, it \
                     is {now:#x}. A pool's tensors must not be resized, pointed elsewhere (data, set_) or shared with \
                     another process (share_memory_, a queue): do that first, then make the pools and the cache",
                    self.name
                )));
            }
        }
        Ok(())
    }
}

/// Tensors that must stay where they are.
///
/// A storage can be given other memory (by `share_memory_`, by pickling for another process, by
/// `resize_`) and a tensor another storage (by `set_`, by assigning `data`). Whoever uses an
/// address asks first whether it still holds.
#[derive(Debug, Default)]
pub(crate) struct Held {
    tensors: Vec<Kept>,
    /// Each once, however many tensors lie in it.
    storages: Vec<Kept>,
}

impl Held {
    /// Notes where a tensor is.
    pub(crate) fn hold(&mut self, name: &str, tensor: &Bound<'_, PyAny>) -> Result<()> {
        let storage = tensor.call_method0("untyped_storage")?;
        if !self.storages.iter().any(|held| held.object.is(&storage)) {
            self.storages
                .push(Kept::new(name, &storage, &["data_ptr", "nbytes"])?);
        }
        self.tensors.push(Kept::new(name, tensor, &["data_ptr"])?);
        Ok(())
    }

    /// Refuses when a tensor is no longer where it was.
    pub(crate) fn check(&self, py: Python<'_>) -> Result<()> {
        let mut kept = self.storages.iter().chain(&self.tensors);
        kept.try_for_each(|kept| kept.check(py))
    }
}

/// Keeps tensors of any device alive, and says when they have moved.
///
/// Args:
///     tensors: (name, tensor) pairs; errors use the name.
///
/// Raises:
///     TensorError: an object is no strided tensor, is empty, lies outside its storage, or is a
/// view of negated or conjugated numbers.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct HeldTensors(Held);

#[pymethods]
impl HeldTensors {
    #[new]
    fn new(tensors: &Bound<'_, PyAny>) -> Result<Self> {
        let mut held = Held::default();
        gather(tensors, |item| {
            let (name, tensor): (String, Bound<'_, PyAny>) = item.extract()?;
            hold(&name, &tensor, Place::Any, &mut held).map(drop)
        })?;
        Ok(Self(held))
    }

    /// Holds the tensors of two pools on any device, after the checks of `CodecPlan`, whose
    /// arguments these are.
    ///
    /// Raises:
    ///     TensorError, ConfigError: as `CodecPlan`.
    #[staticmethod]
    #[pyo3(signature = (*, active, checkpoint, layout, format, scale=None, conv=None))]
    fn of_pools(
        active: &Bound<'_, PyAny>,
        checkpoint: &Bound<'_, PyAny>,
        layout: &str,
        format: &str,
        scale: Option<&Bound<'_, PyAny>>,
        conv: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let given = Given {
            place: Place::Any,
            active,
            checkpoint,
            scale,
            conv,
        };
        let Pools { spec, held } = Pools::read(given, layout, format)?;
        Plan::new(spec).map_err(|error| misuse(error.to_string()))?;
        Ok(Self(held))
    }

    /// Looks at every address again.
    ///
    /// Raises:
    ///     TensorError: a tensor is elsewhere, or the memory of its storage is.
    fn check(&self, py: Python<'_>) -> Result<()> {
        self.0.check(py)
    }
}

/// Adds this file's class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HeldTensors>()
}
