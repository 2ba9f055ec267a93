//! Tensors whose addresses somebody has kept: keeps them alive, and sees whether they moved.

use pyo3::prelude::*;
use radixstate_codec::Plan;

use crate::codec::{Given, Pools};
use crate::errors::{Failure, Result};
use crate::gather::gather;
use crate::tensor::{Place, hold, misuse};

/// A tensor, and where it was.
#[derive(Debug)]
struct Kept {
    /// As errors name it.
    name: String,
    /// Its `data_ptr`, bound: that keeps the tensor alive, and saves a look-up at each check.
    data_ptr: Py<PyAny>,
    address: usize,
}

impl Kept {
    fn new(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let data_ptr = tensor.getattr("data_ptr")?;
        Ok(Self {
            name: name.to_owned(),
            address: data_ptr.call0()?.extract()?,
            data_ptr: data_ptr.unbind(),
        })
    }

    fn check(&self, py: Python<'_>) -> Result<()> {
        let now: usize = self.data_ptr.bind(py).call0()?.extract()?;
        if now == self.address {
            return Ok(());
        }
        Err(misuse(format!(
            "{}: the tensor's memory is not what it was when its pool was made: data_ptr was {:#x}, it is {now:#x}. \
             A pool's tensors must not be resized, pointed elsewhere (data, set_) or shared with another process \
             (share_memory_, a queue): do that first, then make the pools and the cache",
            self.name, self.address
        )))
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
    /// Kept alive with their memory: a tensor that is pointed elsewhere lets go of its own.
    storages: Vec<Py<PyAny>>,
}

impl Held {
    /// Notes where a tensor is.
    pub(crate) fn hold(&mut self, name: &str, tensor: &Bound<'_, PyAny>) -> Result<()> {
        let storage = tensor.call_method0("untyped_storage")?;
        if !self.storages.iter().any(|held| held.is(&storage)) {
            self.storages.push(storage.unbind());
        }
        self.tensors.push(Kept::new(name, tensor)?);
        Ok(())
    }

    /// Notes what another one has noted.
    fn join(&mut self, other: Self) {
        self.tensors.extend(other.tensors);
        self.storages.extend(other.storages);
    }

    /// Refuses when a tensor is no longer where it was. That is enough: a storage that is given other
    /// memory, if only less of it, moves the tensors that lie in it.
    pub(crate) fn check(&self, py: Python<'_>) -> Result<()> {
        self.tensors.iter().try_for_each(|kept| kept.check(py))
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
            group: None,
            active,
            checkpoint,
            scale,
            conv,
        };
        let Pools { spec, held } = Pools::read(given, layout, format)?;
        Plan::new(spec).map_err(|error| misuse(error.to_string()))?;
        Ok(Self(held))
    }

    /// Holds the tensors of two pools on any device whose layers are groups of different shapes,
    /// after the checks of `CodecPlan`, and one more: the memory of two groups is apart.
    ///
    /// Args:
    ///     groups: of each the arguments of `CodecPlan`, all of them, in a dict.
    ///
    /// Raises:
    ///     TensorError, ConfigError: as `CodecPlan`, or two groups overlap.
    #[staticmethod]
    fn of_groups(groups: &Bound<'_, PyAny>) -> Result<Self> {
        let mut held = Held::default();
        let mut plans: Vec<Plan> = Vec::new();
        gather(groups, |group| {
            let group: Group<'_> = group.extract()?;
            let second = plans.len();
            let pools = Pools::read(group.given(second), &group.layout, &group.format)?;
            let plan = Plan::new(pools.spec).map_err(|error| misuse(error.to_string()))?;
            for (first, before) in plans.iter().enumerate() {
                before.require_apart(&plan).map_err(|error| {
                    misuse(format!("groups {first} and {second} of layers: {error}"))
                })?;
            }
            plans.push(plan);
            held.join(pools.held);
            Ok::<_, Failure>(())
        })?;
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

/// One group of layers of two pools.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Group<'py> {
    active: Bound<'py, PyAny>,
    checkpoint: Bound<'py, PyAny>,
    scale: Option<Bound<'py, PyAny>>,
    conv: Option<Bound<'py, PyAny>>,
    layout: String,
    format: String,
}

impl<'py> Group<'py> {
    /// Its tensors, which errors say are of the group with this number.
    fn given(&self, number: usize) -> Given<'_, 'py> {
        Given {
            place: Place::Any,
            group: Some(number),
            active: &self.active,
            checkpoint: &self.checkpoint,
            scale: self.scale.as_ref(),
            conv: self.conv.as_ref(),
        }
    }
}

/// Adds this file's class to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HeldTensors>()
}
