//! The body of the fuzz target `codec`: the contract, the backends and the check of specs, on what
//! bytes mean.

use arbitrary::{Result, Unstructured};
use radixstate_codec::{Checkpoint, Format, Layout, Plan, Shape, Spec, StateType, Strided, Window};

use crate::common::{Case, Values};
use crate::head::Head;

const STATES: [StateType; 3] = [StateType::Bf16, StateType::Fp16, StateType::Fp32];
const LAYOUTS: [Layout; 2] = [Layout::KLast, Layout::VLast];
const VALUES: [Values; 4] = [Values::Usual, Values::Finite, Values::Edges, Values::Any];

/// What an input was about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    Contract,
    Backends,
    SpecAccepted,
    SpecRefused,
}

/// Any bytes do: those that are missing count as zero.
pub(crate) fn replay(bytes: &[u8]) -> Result<Subject> {
    let mut bytes = Unstructured::new(bytes);
    match bytes.int_in_range(0..=2_u8)? {
        0 => {
            head(&mut bytes)?.check();
            Ok(Subject::Contract)
        }
        1 => {
            let threads = bytes.int_in_range(1..=3)?;
            case(&mut bytes)?.agree(threads);
            Ok(Subject::Backends)
        }
        _ => Ok(judge(spec(&mut bytes)?)),
    }
}

/// A state whose every bit is given.
fn head(bytes: &mut Unstructured<'_>) -> Result<Head> {
    let (state, layout) = (*bytes.choose(&STATES)?, *bytes.choose(&LAYOUTS)?);
    let (d_k, d_v) = (bytes.int_in_range(1..=40)?, bytes.int_in_range(1..=40)?);
    let element = |_| match state {
        StateType::Bf16 | StateType::Fp16 => bytes.arbitrary::<u16>().map(u32::from),
        StateType::Fp32 => bytes.arbitrary::<u32>(),
    };
    let elements = (0..d_k * d_v).map(element).collect::<Result<Vec<u32>>>()?;
    Ok(Head {
        state,
        layout,
        d_k,
        d_v,
        elements,
    })
}

/// States of any shape and format, with bits from a seed.
fn case(bytes: &mut Unstructured<'_>) -> Result<Case> {
    let (state, layout, format) = (
        *bytes.choose(&STATES)?,
        *bytes.choose(&LAYOUTS)?,
        *bytes.choose(&Format::ALL)?,
    );
    let (d_k, d_v) = (bytes.int_in_range(1..=150)?, bytes.int_in_range(1..=150)?);
    let shape = Shape {
        heads: bytes.int_in_range(1..=3)?,
        d_k,
        d_v,
    };
    Ok(Case {
        state,
        layout,
        format,
        shape,
        layers: bytes.int_in_range(1..=2)?,
        slots: bytes.int_in_range(2..=4)?,
        skew: bytes.int_in_range(0..=3)?,
        values: *bytes.choose(&VALUES)?,
        seed: bytes.arbitrary()?,
    })
}

/// Pools one after the other, mostly: few and small enough to be written out.
fn spec(bytes: &mut Unstructured<'_>) -> Result<Spec> {
    let (state, layout, format) = (
        *bytes.choose(&STATES)?,
        *bytes.choose(&LAYOUTS)?,
        *bytes.choose(&Format::ALL)?,
    );
    let mut small = || bytes.int_in_range(1..=3_usize);
    let shape = Shape {
        heads: small()?,
        d_k: small()?,
        d_v: small()?,
    };
    let (layers, active_slots, checkpoint_slots) = (small()?, small()?, small()?);
    let has_window: bool = bytes.arbitrary()?;
    let (rows, columns) = shape.matrix(layout);
    let heads = shape.heads;
    let mut places = Places {
        bytes,
        layers,
        next: 4096,
    };
    let active = places.pool([active_slots, heads, rows, columns * state.bytes()])?;
    let kept = match format {
        Format::Native => columns * state.bytes(),
        Format::Bf16 => columns * 2,
        Format::Int8 => columns,
    };
    let kept = places.pool([checkpoint_slots, heads, rows, kept])?;
    let scales = match format {
        Format::Native | Format::Bf16 => None,
        Format::Int8 => Some(shape.d_k * state.scale().bytes()),
    };
    let scales = scales.map(|bytes| places.pool([checkpoint_slots, heads, 1, bytes]));
    let checkpoint = Checkpoint {
        format,
        rows: kept,
        scales: scales.transpose()?,
    };
    let mut window = || -> Result<Window> {
        let (active, checkpoint) = (
            places.pool([active_slots, 1, 1, 5])?,
            places.pool([checkpoint_slots, 1, 1, 5])?,
        );
        Ok(Window {
            active,
            checkpoint,
            bytes: 5,
            element: None,
        })
    };
    let windows = if has_window {
        vec![window()?]
    } else {
        Vec::new()
    };
    Ok(Spec {
        state,
        layout,
        shape,
        active,
        checkpoint,
        windows,
    })
}

/// Deals out strides and addresses.
struct Places<'a, 'b> {
    bytes: &'a mut Unstructured<'b>,
    layers: usize,
    next: usize,
}

impl Places<'_, '_> {
    /// Sizes are slots, heads, rows, and bytes of a row.
    fn pool(&mut self, [slots, heads, rows, row]: [usize; 4]) -> Result<Strided> {
        let row_stride = self.near(row)?;
        let head_stride = self.near(rows * row_stride)?;
        let slot_stride = self.near(heads * head_stride)?;
        let mut layers = Vec::new();
        for _ in 0..self.layers {
            let base = self.near(self.next)?;
            self.next = base + slots * slot_stride;
            layers.push(base);
        }
        Ok(Strided {
            layers,
            slots,
            slot_stride,
            head_stride,
            row_stride,
        })
    }

    /// Mostly what leaves no gap, sometimes a byte more or less, sometimes anything.
    fn near(&mut self, exact: usize) -> Result<usize> {
        Ok(match self.bytes.int_in_range(0..=15_u8)? {
            12 => exact.saturating_sub(1),
            13 | 14 => exact + 1,
            15 => self.bytes.arbitrary::<u8>()?.into(),
            _ => exact,
        })
    }
}

/// No two elements of an accepted spec share an address, by writing out all of them.
fn judge(spec: Spec) -> Subject {
    let mut spans = spans(&spec);
    let described = format!("{spec:?}");
    if Plan::new(spec).is_err() {
        return Subject::SpecRefused;
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let [(first, length), (second, _)] = *pair else {
            unreachable!("windows of two")
        };
        assert!(
            first + length <= second,
            "{first} + {length} reaches {second} in {described}"
        );
    }
    Subject::SpecAccepted
}

/// Address and length of every row.
fn spans(spec: &Spec) -> Vec<(usize, usize)> {
    let Spec {
        state,
        layout,
        shape,
        ..
    } = *spec;
    let (rows, columns) = shape.matrix(layout);
    let size = state.bytes();
    let mut spans = rows_of(&spec.active, shape.heads, rows, columns * size);
    let Checkpoint {
        format,
        rows: kept,
        scales,
    } = &spec.checkpoint;
    let bytes = match format {
        Format::Native => columns * size,
        Format::Bf16 => columns * 2,
        Format::Int8 => columns,
    };
    spans.extend(rows_of(kept, shape.heads, rows, bytes));
    if let Some(scales) = scales {
        let bytes = shape.d_k * state.scale().bytes();
        spans.extend(rows_of(scales, shape.heads, 1, bytes));
    }
    for Window {
        active,
        checkpoint,
        bytes,
        ..
    } in &spec.windows
    {
        spans.extend(
            [active, checkpoint]
                .into_iter()
                .flat_map(|pool| rows_of(pool, 1, 1, *bytes)),
        );
    }
    spans
}

fn rows_of(pool: &Strided, heads: usize, rows: usize, bytes: usize) -> Vec<(usize, usize)> {
    let mut spans = Vec::new();
    for &layer in &pool.layers {
        for slot in 0..pool.slots {
            for head in 0..heads {
                let start = layer + slot * pool.slot_stride + head * pool.head_stride;
                spans.extend((0..rows).map(|row| (start + row * pool.row_stride, bytes)));
            }
        }
    }
    spans
}
