//! Torch tensors as addresses, without torch: what a tensor says of itself is read and checked
//! once, and before each use whether it is still there.
//!
//! The only file of the binding that touches a tensor's memory.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use radixstate_codec::{Pair, PairError, Plan, Spec, Strided};

use crate::errors::{Class, Failure, Result};
use crate::held::Held;
use crate::tokens::is_tensor;

/// A tensor that cannot be used.
pub(crate) fn misuse(message: String) -> Failure {
    Failure::Refused(Class::Tensor, message)
}

/// Which devices a tensor may be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Cpu,
    Any,
}

/// A tensor, or one layer of it.
#[derive(Debug)]
pub(crate) struct TensorRef {
    address: usize,
    /// As torch names it, without the module.
    dtype: String,
    element_bytes: usize,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<usize>,
}

impl TensorRef {
    fn new(what: &str, tensor: &Bound<'_, PyAny>, place: Place) -> Result<Self> {
        if !is_tensor(tensor)? {
            return Err(misuse(format!(
                "{what}: expected a torch tensor, got {}",
                tensor.get_type().name()?
            )));
        }
        let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
        if place == Place::Cpu && device != "cpu" {
            return Err(misuse(format!(
                "{what}: the tensor must be on the cpu, it is on {device}"
            )));
        }
        let layout = tensor.getattr("layout")?.str()?.to_string();
        if layout != "torch.strided" {
            return Err(misuse(format!(
                "{what}: the tensor must be strided, it is {layout}"
            )));
        }
        for (view, ask) in [("negated", "is_neg"), ("conjugated", "is_conj")] {
            if tensor.call_method0(ask)?.extract()? {
                return Err(misuse(format!(
                    "{what}: a {view} view has other values than its memory, which is what is read"
                )));
            }
        }
        let element_bytes: usize = tensor.call_method0("element_size")?.extract()?;
        let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
        if shape.contains(&0) {
            return Err(misuse(format!(
                "{what}: every dimension must be at least 1, the shape is {shape:?}"
            )));
        }
        let strides: Vec<usize> = tensor.call_method0("stride")?.extract()?;
        let storage = tensor.call_method0("untyped_storage")?;
        let dtype = tensor.getattr("dtype")?.str()?.to_string();
        let tensor = Self {
            address: tensor.call_method0("data_ptr")?.extract()?,
            dtype: dtype.trim_start_matches("torch.").to_owned(),
            element_bytes,
            shape,
            strides: strides
                .into_iter()
                .map(|stride| stride * element_bytes)
                .collect(),
        };
        tensor.check_storage(what, &storage, place)?;
        Ok(tensor)
    }

    /// A tensor without memory, such as a fake one, has an address too.
    fn check_storage(&self, what: &str, storage: &Bound<'_, PyAny>, place: Place) -> Result<()> {
        let start: usize = storage.call_method0("data_ptr")?.extract()?;
        let bytes: usize = storage.call_method0("nbytes")?.extract()?;
        let last: usize = self
            .shape
            .iter()
            .zip(&self.strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum();
        let end = self
            .address
            .saturating_sub(start)
            .saturating_add(last + self.element_bytes);
        let nowhere = start == 0 && place == Place::Cpu;
        if nowhere || self.address < start || end > bytes {
            return Err(misuse(format!(
                "{what}: the tensor must lie in its storage, it needs {end} bytes of {bytes}"
            )));
        }
        Ok(())
    }
}

/// Reads a tensor, which `held` keeps from then on.
pub(crate) fn hold(
    what: &str,
    tensor: &Bound<'_, PyAny>,
    place: Place,
    held: &mut Held,
) -> Result<TensorRef> {
    let read = TensorRef::new(what, tensor, place)?;
    held.hold(what, tensor)?;
    Ok(read)
}

/// One tensor per layer, all alike: given as a list, or as one tensor whose first dimension is the
/// layer.
#[derive(Debug)]
pub(crate) struct Layers {
    addresses: Vec<usize>,
    dtype: String,
    element_bytes: usize,
    /// Slots first, without the layers.
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Layers {
    /// Reads a tensor or a list of them, which `held` keeps from then on; `what` names it in
    /// errors.
    pub(crate) fn new(
        what: &str,
        tensors: &Bound<'_, PyAny>,
        place: Place,
        held: &mut Held,
    ) -> Result<Self> {
        let listed = tensors.is_instance_of::<PyList>() || tensors.is_instance_of::<PyTuple>();
        if !listed {
            return Self::of_one(what, hold(what, tensors, place, held)?);
        }
        let each = tensors.try_iter()?.enumerate();
        let each = each
            .map(|(layer, tensor)| hold(&format!("{what}, layer {layer}"), &tensor?, place, held));
        Self::of_each(what, each.collect::<Result<Vec<_>>>()?)
    }

    fn of_one(what: &str, tensor: TensorRef) -> Result<Self> {
        let (Some((&layers, shape)), Some((&stride, strides))) =
            (tensor.shape.split_first(), tensor.strides.split_first())
        else {
            return Err(misuse(format!(
                "{what}: a tensor of all layers has at least two dimensions, this one has 0"
            )));
        };
        Ok(Self {
            addresses: (0..layers)
                .map(|layer| tensor.address + layer * stride)
                .collect(),
            dtype: tensor.dtype,
            element_bytes: tensor.element_bytes,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
        })
    }

    fn of_each(what: &str, tensors: Vec<TensorRef>) -> Result<Self> {
        let Some(first) = tensors.first() else {
            return Err(misuse(format!("{what}: at least 1 layer is needed, got 0")));
        };
        let alike = |tensor: &TensorRef| {
            (&tensor.dtype, &tensor.shape, &tensor.strides)
                == (&first.dtype, &first.shape, &first.strides)
        };
        if let Some(layer) = tensors.iter().position(|tensor| !alike(tensor)) {
            return Err(misuse(format!(
                "{what}: layer {layer} differs from layer 0 in dtype, shape or strides"
            )));
        }
        Ok(Self {
            addresses: tensors.iter().map(|tensor| tensor.address).collect(),
            dtype: first.dtype.clone(),
            element_bytes: first.element_bytes,
            shape: first.shape.clone(),
            strides: first.strides.clone(),
        })
    }

    pub(crate) fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Shape of one layer, slots first.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Refuses any other dtype.
    pub(crate) fn expect_dtype(&self, what: &str, dtype: &str) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(misuse(format!(
            "{what}: dtype must be {dtype}, it is {}",
            self.dtype
        )))
    }

    /// Refuses any other shape of one slot.
    pub(crate) fn expect_slot_shape(&self, what: &str, slot: &[usize]) -> Result<()> {
        if self.shape.get(1..) == Some(slot) {
            return Ok(());
        }
        Err(misuse(format!(
            "{what}: one slot must have shape {slot:?}, a layer with its slots has {:?}",
            self.shape
        )))
    }

    /// `[slots, ..., row]` as strided memory: between slots and row the shape has heads, then rows.
    pub(crate) fn strided(&self, what: &str) -> Result<Strided> {
        let (Some(&row), Some(&inner)) = (self.shape.last(), self.strides.last()) else {
            return Err(misuse(format!(
                "{what}: a layer has its slots as first dimension, this one has none"
            )));
        };
        if row > 1 && inner != self.element_bytes {
            return Err(misuse(format!(
                "{what}: the last dimension must be contiguous, its stride is {inner} bytes"
            )));
        }
        Ok(self.strided_with(self.strides[1], self.strides.get(2).copied().unwrap_or(0)))
    }

    /// `[slots, ...]` as strided memory and the bytes of a slot, which is dense: its dimensions may
    /// be in any order.
    pub(crate) fn window(&self, what: &str) -> Result<(Strided, usize)> {
        let mut dimensions = self.inner_dimensions();
        dimensions.sort_unstable();
        let mut bytes = self.element_bytes;
        for (stride, size) in dimensions {
            if stride != bytes {
                return Err(misuse(format!(
                    "{what}: one slot must be dense, a stride of {stride} bytes follows {bytes} bytes"
                )));
            }
            bytes *= size;
        }
        Ok((self.strided_with(0, 0), bytes))
    }

    /// The same with a slot as one head of one row, in the order of memory: a slot is dense.
    pub(crate) fn flat(&self, what: &str) -> Result<Self> {
        let (dense, bytes) = self.window(what)?;
        Ok(Self {
            addresses: dense.layers,
            dtype: self.dtype.clone(),
            element_bytes: self.element_bytes,
            shape: vec![dense.slots, 1, 1, bytes / self.element_bytes],
            strides: vec![dense.slot_stride, 0, 0, self.element_bytes],
        })
    }

    /// (stride, size) of the dimensions after the slots; those of size 1 are left out, since their
    /// stride is free.
    pub(crate) fn inner_dimensions(&self) -> Vec<(usize, usize)> {
        let dimensions = self
            .strides
            .iter()
            .copied()
            .zip(self.shape.iter().copied())
            .skip(1);
        dimensions.filter(|&(_, size)| size > 1).collect()
    }

    fn strided_with(&self, head_stride: usize, row_stride: usize) -> Strided {
        Strided {
            layers: self.addresses.clone(),
            slots: self.shape.first().copied().unwrap_or(0),
            slot_stride: self.strides.first().copied().unwrap_or(0),
            head_stride,
            row_stride,
        }
    }
}

/// A plan and the memory it works on.
pub(crate) struct Mover {
    /// Two calls at a time could write the same slot.
    plan: Mutex<Plan>,
    /// Keeps the memory alive, and says whether the plan's addresses are still its.
    held: Held,
}

impl Mover {
    /// Checks a spec whose pools were all made from what `held` holds.
    pub(crate) fn new(spec: Spec, held: Held) -> Result<Self> {
        let plan = Plan::new(spec).map_err(|error| misuse(error.to_string()))?;
        Ok(Self {
            plan: Mutex::new(plan),
            held,
        })
    }

    /// Encodes, detached from the interpreter; says of each pair whether its state is finite.
    pub(crate) fn store(
        &self,
        py: Python<'_>,
        pairs: &[Pair],
        threads: NonZeroUsize,
    ) -> Result<Vec<bool>> {
        // SAFETY: the addresses lie within the storages, which `self` keeps alive and has seen to
        // be where they were; nobody else moves states of this plan, since it is locked; who
        // writes to a tensor from another thread meanwhile, or moves it, breaks torch's rule too.
        self.locked(py, |plan| unsafe { plan.store(pairs, threads) })
    }

    /// Decodes, detached from the interpreter.
    pub(crate) fn load(&self, py: Python<'_>, pairs: &[Pair], threads: NonZeroUsize) -> Result<()> {
        // SAFETY: as for `store`.
        self.locked(py, |plan| unsafe { plan.load(pairs, threads) })
    }

    /// Zeroes an active slot, detached from the interpreter.
    pub(crate) fn clear(&self, py: Python<'_>, slot: u32, threads: NonZeroUsize) -> Result<()> {
        // SAFETY: as for `store`.
        self.locked(py, |plan| unsafe { plan.clear(slot, threads) })
    }

    /// Works on memory that is where it was. The lock is taken and released while detached, so
    /// that waiting for it never holds up the interpreter.
    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Plan) -> std::result::Result<T, PairError> + Send,
    ) -> Result<T> {
        self.held.check(py)?;
        let plan = &self.plan;
        // A plan has no state that a panic could leave half changed.
        let result = py.detach(move || work(&plan.lock().unwrap_or_else(PoisonError::into_inner)));
        result.map_err(|error| Failure::Refused(Class::Slot, error.to_string()))
    }
}
