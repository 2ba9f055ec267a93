//! How a checkpoint pool keeps a state: one file a format, with its oracle, its vector code and
//! their tests.

mod bf16;
mod int8;
mod native;

use crate::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::lanes::{Lanes, Simd};
use crate::spec::{Format, HeadBytes, Layout, Row, Shape, Spec, StateType};
use crate::tiles::Item;
#[cfg(target_arch = "x86_64")]
use crate::tiles::Matrix;
#[cfg(target_arch = "x86_64")]
use crate::transforms::Rows;

pub(crate) use bf16::Bf16;
pub(crate) use int8::Int8;
pub(crate) use native::Native;

/// What a format decides.
pub(crate) trait Encoding {
    /// A row of a head's matrix that has `columns` elements of type `state`, as it is kept.
    fn row(state: StateType, columns: usize) -> Row;

    /// What a head has beside its rows, if anything.
    fn scales(_state: StateType, _shape: Shape) -> Option<Row> {
        None
    }

    /// The oracle: encodes one head, one element at a time; says whether it reloads finite.
    fn store<E: Element>(layout: Layout, item: Item<'_>) -> bool;

    /// Decodes one head, one element at a time.
    fn load<E: Element>(layout: Layout, item: Item<'_>);

    /// The same in whole registers.
    #[cfg(target_arch = "x86_64")]
    type Vector<S: Simd, E: Lanes>: Vector<S>;
}

/// Encodes and decodes the heads of one share in whole registers. Equals the oracle bit for bit.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Vector<S> {
    fn new(rows: Rows<S>, layout: Layout, shape: Shape) -> Self;

    /// Encodes one head and fetches the next; says whether it reloads finite.
    fn store(&mut self, item: Item<'_>, ahead: Option<Matrix<'_>>) -> bool;

    /// Decodes one head.
    fn load(&mut self, item: Item<'_>);
}

/// `$body`, in which `$encoding` is the [`Encoding`] of a format for states of a type. The only
/// place that lists them.
macro_rules! by_format {
    ($format:expr, $state:expr, $encoding:ident => $body:expr) => {{
        use $crate::spec::{Format, StateType};
        match ($format, $state) {
            // A bf16 state in a bf16 pool is copied, NaN bits included.
            (Format::Native, _) | (Format::Bf16, StateType::Bf16) => {
                type $encoding = $crate::format::Native;
                $body
            }
            (Format::Bf16, _) => {
                type $encoding = $crate::format::Bf16;
                $body
            }
            (Format::Int8, _) => {
                type $encoding = $crate::format::Int8;
                $body
            }
        }
    }};
}
pub(crate) use by_format;

impl Format {
    /// A row of a head's matrix that has `columns` elements of type `state`, as the checkpoint
    /// pool keeps it.
    #[must_use]
    pub fn row(self, state: StateType, columns: usize) -> Row {
        by_format!(self, state, Encoded => Encoded::row(state, columns))
    }

    /// What the checkpoint pool has for each head beside its rows, if anything.
    #[must_use]
    pub fn scales(self, state: StateType, shape: Shape) -> Option<Row> {
        by_format!(self, state, Encoded => Encoded::scales(state, shape))
    }
}

/// What the format of a spec makes of a head.
pub(crate) fn head_bytes(spec: &Spec) -> HeadBytes {
    let format = spec.checkpoint.format;
    let columns = spec.shape.matrix(spec.layout).1;
    let scales = format.scales(spec.state, spec.shape);
    HeadBytes {
        row: format.row(spec.state, columns).bytes(),
        scales: scales.map_or(0, Row::bytes),
    }
}
