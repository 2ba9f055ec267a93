//! The codec for a pair of pools of torch tensors on the CPU.

use std::num::NonZeroUsize;

use pyo3::prelude::*;
use radixstate_codec::{
    Checkpoint, Dtype, Format, Layout, Pair, Shape, Spec, SpecError, StateType, Window,
};

use crate::errors::{Class, Failure, Result};
use crate::fork;
use crate::number::Number;
use crate::tensor::{Layers, Mover, misuse};

/// Adds this file's classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CodecPlan>()
}

/// Slots to move between, as given.
type Pairs = Vec<(Number<u32>, Number<u32>)>;

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
///     layout: `k_last` or `v_last`.
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
    generation: u64,
}

#[pymethods]
impl CodecPlan {
    #[new]
    #[pyo3(signature = (*, active, checkpoint, layout, format, scale=None, conv=Vec::new()))]
    fn new(
        active: &Bound<'_, PyAny>,
        checkpoint: &Bound<'_, PyAny>,
        layout: &str,
        format: &str,
        scale: Option<&Bound<'_, PyAny>>,
        conv: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> Result<Self> {
        let layout = parse_layout(layout)?;
        let format = parse_format(format)?;
        let active = Active::new(Layers::new("active", active)?, layout)?;
        let checkpoint = Layers::new("checkpoint", checkpoint)?;
        let scale = scale.map(|scale| Layers::new("scale", scale)).transpose()?;
        let kept = active.checkpoint(format, &checkpoint, scale.as_ref())?;
        let mut windows = Vec::with_capacity(conv.len());
        let mut layers = Vec::from_iter(scale);
        for (index, (source, target)) in conv.iter().enumerate() {
            let (window, pair) = window(index, source, target)?;
            windows.push(window);
            layers.extend(pair);
        }
        let spec = Spec {
            state: active.state,
            layout,
            shape: active.shape,
            active: active.layers.strided("active")?,
            checkpoint: kept,
            windows,
        };
        layers.extend([active.layers, checkpoint]);
        let parallelism = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Ok(Self {
            mover: Mover::new(spec, layers)?,
            parallelism,
            generation: fork::generation(),
        })
    }

    /// Encodes (active slot, checkpoint slot) pairs; says of each whether its state reloads finite.
    ///
    /// Args:
    ///     threads: at most this many; if None, all that the process could use when the plan was
    ///         made. The result does not depend on it.
    ///
    /// Raises:
    ///     SlotError: a slot is out of range, or two pairs write the same one; nothing was written.
    #[pyo3(signature = (pairs, threads=None))]
    fn store(
        &self,
        py: Python<'_>,
        pairs: Pairs,
        threads: Option<Number<usize>>,
    ) -> Result<Vec<bool>> {
        fork::check(self.generation, "codec plan")?;
        self.mover
            .store(py, &to_pairs(pairs)?, self.threads(threads)?)
    }

    /// Decodes (checkpoint slot, active slot) pairs.
    ///
    /// Args:
    ///     threads: at most this many; if None, all that the process could use when the plan was
    ///         made. The result does not depend on it.
    ///
    /// Raises:
    ///     SlotError: a slot is out of range, or two pairs write the same one; nothing was written.
    #[pyo3(signature = (pairs, threads=None))]
    fn load(&self, py: Python<'_>, pairs: Pairs, threads: Option<Number<usize>>) -> Result<()> {
        fork::check(self.generation, "codec plan")?;
        self.mover
            .load(py, &to_pairs(pairs)?, self.threads(threads)?)
    }
}

impl CodecPlan {
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

/// A window and the tensors it lies in.
fn window(
    index: usize,
    active: &Bound<'_, PyAny>,
    checkpoint: &Bound<'_, PyAny>,
) -> Result<(Window, [Layers; 2])> {
    let from = format!("conv {index}, active");
    let to = format!("conv {index}, checkpoint");
    let source = Layers::new(&from, active)?;
    let target = Layers::new(&to, checkpoint)?;
    target.expect_dtype(&to, source.dtype())?;
    target.expect_slot_shape(&to, source.shape().get(1..).unwrap_or_default())?;
    if source.inner_dimensions() != target.inner_dimensions() {
        return Err(misuse(format!(
            "{to}: the strides of a slot must be those of the active tensor"
        )));
    }
    let (active, bytes) = source.window(&from)?;
    let (checkpoint, _) = target.window(&to)?;
    Ok((
        Window {
            active,
            checkpoint,
            bytes,
        },
        [source, target],
    ))
}

fn config(message: String) -> Failure {
    Failure::Refused(Class::Config, message)
}

fn parse_layout(layout: &str) -> Result<Layout> {
    match layout {
        "k_last" => Ok(Layout::KLast),
        "v_last" => Ok(Layout::VLast),
        _ => Err(config(format!(
            "layout must be k_last or v_last, got {layout:?}"
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

fn to_pairs(pairs: Pairs) -> Result<Vec<Pair>> {
    let slot = |number: Number<u32>| number.named_or(Class::Slot, "slot");
    let pair = |(source, destination)| {
        Ok(Pair {
            source: slot(source)?,
            destination: slot(destination)?,
        })
    };
    pairs.into_iter().map(pair).collect()
}
