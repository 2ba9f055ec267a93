//! The codec for a pair of pools of torch tensors on the CPU.

use std::num::NonZeroUsize;

use pyo3::intern;
use pyo3::prelude::*;
use radixstate_codec::{
    Checkpoint, Dtype, Format, Layout, Pair, Shape, Spec, SpecError, StateType, Window,
};

use crate::errors::{Class, Failure, Result};
use crate::fork;
use crate::gather::gather;
use crate::held::Held;
use crate::number::Number;
use crate::tensor::{Layers, Mover, Place, misuse};

/// Adds this file's classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CodecPlan>()
}

/// Slots to move between.
struct Pairs(Vec<Pair>);

impl FromPyObject<'_, '_> for Pairs {
    type Error = Failure;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> Result<Self> {
        let slot = |number: Number<u32>| number.named_or(Class::Slot, "slot");
        gather(&object, |pair| {
            let (source, destination) = pair.extract()?;
            Ok(Pair {
                source: slot(source)?,
                destination: slot(destination)?,
            })
        })
        .map(Self)
    }
}

/// Moves states between an active and a checkpoint pool. Built once per pair of pools; safe to
/// share by threads.
///
/// Each pool is one tensor with the layers as first dimension, or a list with one tensor per layer.
///
/// Args:
///     active: [slots + 1, heads, d_v, d_k] per layer with layout `k_last`,
///         [slots + 1, heads, d_k, d_v] with `v_last`.
///     checkpoint: the same with slots of its own, in the dtype and the rows of the format.
///     scale: [slots + 1, heads, d_k] per layer, for the int8 format only.
///     conv: (active, checkpoint) pairs, each [slots + 1, ...] per layer, copied as bytes.
///     layout: `k_last`, `v_last`, or `flat` for layers without matrices: then `active` and
///         `checkpoint` are [slots + 1, ...], a slot is dense, and the format is `native`.
///     format: `native`, `bf16` or `int8`.
///
/// Raises:
///     TensorError: shapes, dtypes, strides, devices or layer counts do not fit, or memory
///         overlaps.
///     ConfigError: an unknown layout or format.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct CodecPlan {
    mover: Mover,
    /// What the process may use, asked once: the answer comes from files of the kernel and takes
    /// some 30 microseconds.
    parallelism: NonZeroUsize,
    /// The process that made it. A thread of that one could have held the plan's lock when it
    /// forked.
    process: u64,
}

#[pymethods]
impl CodecPlan {
    #[new]
    #[pyo3(signature = (*, active, checkpoint, layout, format, scale=None, conv=None))]
    fn new(
        active: &Bound<'_, PyAny>,
        checkpoint: &Bound<'_, PyAny>,
        layout: &str,
        format: &str,
        scale: Option<&Bound<'_, PyAny>>,
        conv: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let given = Given {
            place: Place::Cpu,
            group: None,
            active,
            checkpoint,
            scale,
            conv,
        };
        let Pools { spec, held } = Pools::read(given, layout, format)?;
        let parallelism = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Ok(Self {
            mover: Mover::new(spec, held)?,
            parallelism,
            process: fork::process(),
        })
    }

    /// Encodes (active slot, checkpoint slot) pairs; says of each whether its state reloads finite, windows of
    /// bfloat16, float16 and float32 included.
    ///
    /// Args:
    ///     threads: at most this many; if None, all that the process could use when the plan was
    ///         made. The result does not depend on it.
    ///
    /// Raises:
    ///     SlotError: a slot is out of range, or two pairs write the same one; nothing was written.
    ///     TensorError: a tensor is no longer where it was; nothing was written.
    #[pyo3(signature = (pairs, threads=None))]
    fn store(
        &self,
        py: Python<'_>,
        pairs: Pairs,
        threads: Option<Number<usize>>,
    ) -> Result<Vec<bool>> {
        fork::check(self.process, "codec plan")?;
        self.mover.store(py, &pairs.0, self.threads(threads)?)
    }

    /// Decodes (checkpoint slot, active slot) pairs.
    ///
    /// Args:
    ///     threads: at most this many; if None, all that the process could use when the plan was
    ///         made. The result does not depend on it.
    ///
    /// Raises:
    ///     SlotError: a slot is out of range, or two pairs write the same one; nothing was written.
    ///     TensorError: a tensor is no longer where it was; nothing was written.
    #[pyo3(signature = (pairs, threads=None))]
    fn load(&self, py: Python<'_>, pairs: Pairs, threads: Option<Number<usize>>) -> Result<()> {
        fork::check(self.process, "codec plan")?;
        self.mover.load(py, &pairs.0, self.threads(threads)?)
    }

    /// Makes one active slot hold checkpoint slot `source`, or the empty state if that is None:
    /// zeros, windows included.
    ///
    /// Raises:
    ///     SlotError: a slot is out of range; nothing was written.
    ///     TensorError: a tensor is no longer where it was; nothing was written.
    fn fill(&self, py: Python<'_>, source: Option<Number<u32>>, slot: Number<u32>) -> Result<()> {
        let slot_of = |number: Number<u32>| number.named_or(Class::Slot, "slot");
        self.fill_slot(py, source.map(slot_of).transpose()?, slot_of(slot)?)
    }
}

/// Has a codec of any device fill an active slot. One of this module is called directly.
pub(crate) fn fill(codec: &Bound<'_, PyAny>, source: Option<u32>, slot: u32) -> Result<()> {
    if let Ok(plan) = codec.cast::<CodecPlan>() {
        return plan.get().fill_slot(codec.py(), source, slot);
    }
    codec.call_method1(intern!(codec.py(), "fill"), (source, slot))?;
    Ok(())
}

impl CodecPlan {
    fn fill_slot(&self, py: Python<'_>, source: Option<u32>, slot: u32) -> Result<()> {
        fork::check(self.process, "codec plan")?;
        let Some(source) = source else {
            return self.mover.clear(py, slot, self.parallelism);
        };
        let pair = Pair {
            source,
            destination: slot,
        };
        self.mover.load(py, &[pair], self.parallelism)
    }

    /// How many threads may work.
    fn threads(&self, given: Option<Number<usize>>) -> Result<NonZeroUsize> {
        let Some(given) = given else {
            return Ok(self.parallelism);
        };
        NonZeroUsize::new(given.named("threads")?).ok_or_else(|| {
            Failure::Refused(Class::Misuse, "threads must be at least 1, got 0".into())
        })
    }
}

/// The tensors of two pools as given, each one or a list.
pub(crate) struct Given<'a, 'py> {
    pub(crate) place: Place,
    /// Number of the group of layers, where errors are to say it.
    pub(crate) group: Option<usize>,
    pub(crate) active: &'a Bound<'py, PyAny>,
    pub(crate) checkpoint: &'a Bound<'py, PyAny>,
    pub(crate) scale: Option<&'a Bound<'py, PyAny>>,
    /// Pairs of windows.
    pub(crate) conv: Option<&'a Bound<'py, PyAny>>,
}

/// Two pools by address, and the tensors that keep the addresses valid.
pub(crate) struct Pools {
    pub(crate) spec: Spec,
    pub(crate) held: Held,
}

impl Pools {
    /// Checks tensors against each other, layout and format; whether they overlap is left to
    /// `Plan::new`.
    pub(crate) fn read(given: Given<'_, '_>, layout: &str, format: &str) -> Result<Self> {
        let mut reader = Reader {
            place: given.place,
            group: given.group,
            held: Held::default(),
        };
        let layout = parse_layout(layout)?;
        let format = parse_format(format)?;
        let mut active = reader.layers("active", given.active)?;
        let mut checkpoint = reader.layers("checkpoint", given.checkpoint)?;
        if layout.is_none() {
            if format != Format::Native {
                let name = format.name();
                return Err(config(format!(
                    "the layout flat is kept native, got format {name:?}"
                )));
            }
            expect_alike("checkpoint", &active, &checkpoint)?;
            active = active.flat("active")?;
            checkpoint = checkpoint.flat("checkpoint")?;
        }
        // A row has no channels: one of the two serves.
        let layout = layout.unwrap_or(Layout::VLast);
        let active = Active::new(active, layout)?;
        let scale = given
            .scale
            .map(|scale| reader.layers("scale", scale))
            .transpose()?;
        let kept = active.checkpoint(format, &checkpoint, scale.as_ref())?;
        let mut windows = Vec::new();
        if let Some(conv) = given.conv {
            gather(conv, |pair| {
                let (source, target): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
                windows.push(reader.window(windows.len(), &source, &target)?);
                Ok::<_, Failure>(())
            })?;
        }
        let spec = Spec {
            state: active.state,
            layout,
            shape: active.shape,
            active: active.layers.strided("active")?,
            checkpoint: kept,
            windows,
        };
        let held = reader.held;
        Ok(Self { spec, held })
    }
}

/// The active pool and what its tensors say of the states.
struct Active {
    layers: Layers,
    state: StateType,
    shape: Shape,
}

impl Active {
    fn new(layers: Layers, layout: Layout) -> Result<Self> {
        let state = parse_state(layers.dtype())?;
        let &[_, heads, rows, columns] = layers.shape() else {
            return Err(misuse(format!(
                "active: a layer must have dimensions [slots, heads, rows, columns], its shape is {:?}",
                layers.shape()
            )));
        };
        let (d_k, d_v) = match layout {
            Layout::KLast => (columns, rows),
            Layout::VLast => (rows, columns),
        };
        Ok(Self {
            layers,
            state,
            shape: Shape { heads, d_k, d_v },
        })
    }

    /// The checkpoint pool, if its tensors have the rows that the format asks for.
    fn checkpoint(
        &self,
        format: Format,
        kept: &Layers,
        scale: Option<&Layers>,
    ) -> Result<Checkpoint> {
        let &[_, heads, rows, columns] = self.layers.shape() else {
            unreachable!("`new` refused any other number of dimensions")
        };
        let row = format.row(self.state, columns);
        kept.expect_slot_shape("checkpoint", &[heads, rows, row.elements])?;
        let scales = match (scale, format.scales(self.state, self.shape)) {
            (Some(given), Some(row)) => {
                given.expect_slot_shape("scale", &[heads, row.elements])?;
                given.expect_dtype("scale", dtype_name(row.dtype))?;
                Some(given.strided("scale")?)
            }
            (None, None) => None,
            (given, _) => {
                let given = given.is_some();
                return Err(misuse(SpecError::Scales { format, given }.to_string()));
            }
        };
        kept.expect_dtype("checkpoint", dtype_name(row.dtype))?;
        Ok(Checkpoint {
            format,
            rows: kept.strided("checkpoint")?,
            scales,
        })
    }
}

/// Reads tensors, and holds what it has read.
struct Reader {
    place: Place,
    group: Option<usize>,
    held: Held,
}

impl Reader {
    fn layers(&mut self, what: &str, tensors: &Bound<'_, PyAny>) -> Result<Layers> {
        match self.group {
            None => Layers::new(what, tensors, self.place, &mut self.held),
            Some(group) => {
                let what = format!("group {group}, {what}");
                Layers::new(&what, tensors, self.place, &mut self.held)
            }
        }
    }

    fn window(
        &mut self,
        index: usize,
        active: &Bound<'_, PyAny>,
        checkpoint: &Bound<'_, PyAny>,
    ) -> Result<Window> {
        let from = format!("conv {index}, active");
        let to = format!("conv {index}, checkpoint");
        let source = self.layers(&from, active)?;
        let target = self.layers(&to, checkpoint)?;
        expect_alike(&to, &source, &target)?;
        let (active, bytes) = source.window(&from)?;
        let (checkpoint, _) = target.window(&to)?;
        Ok(Window {
            active,
            checkpoint,
            bytes,
            // The store asks nothing of a window of another type.
            element: parse_state(source.dtype()).ok(),
        })
    }
}

/// Refuses a target that has not the slots of its source: their bytes are copied.
fn expect_alike(what: &str, source: &Layers, target: &Layers) -> Result<()> {
    target.expect_dtype(what, source.dtype())?;
    target.expect_slot_shape(what, source.shape().get(1..).unwrap_or_default())?;
    if source.inner_dimensions() == target.inner_dimensions() {
        return Ok(());
    }
    Err(misuse(format!(
        "{what}: the strides of a slot must be those of the active tensor"
    )))
}

fn config(message: String) -> Failure {
    Failure::Refused(Class::Config, message)
}

/// None is `flat`.
fn parse_layout(layout: &str) -> Result<Option<Layout>> {
    match layout {
        "k_last" => Ok(Some(Layout::KLast)),
        "v_last" => Ok(Some(Layout::VLast)),
        "flat" => Ok(None),
        _ => Err(config(format!(
            "layout must be k_last, v_last or flat, got {layout:?}"
        ))),
    }
}

fn parse_format(name: &str) -> Result<Format> {
    let format = Format::ALL.into_iter().find(|format| format.name() == name);
    format.ok_or_else(|| {
        let [first @ .., last] = Format::ALL.map(Format::name);
        config(format!(
            "format must be {} or {last}, got {name:?}",
            first.join(", ")
        ))
    })
}

fn parse_state(dtype: &str) -> Result<StateType> {
    [StateType::Bf16, StateType::Fp16, StateType::Fp32]
        .into_iter()
        .find(|&state| dtype_name(state.into()) == dtype)
        .ok_or_else(|| {
            misuse(format!(
                "active: dtype must be bfloat16, float16 or float32, it is {dtype}"
            ))
        })
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bfloat16",
        Dtype::Fp16 => "float16",
        Dtype::Fp32 => "float32",
        Dtype::Int8 => "int8",
    }
}
