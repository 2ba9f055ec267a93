//! Describes two pools by address. Reads and writes no memory.

use crate::error::{Side, SpecError};
use crate::region::{self, Extent};

/// Element type of an active state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateType {
    /// 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half.
    Fp16,
    /// IEEE single.
    Fp32,
}

impl StateType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
        }
    }

    /// Type of the int8 format's scales. fp16 states take fp32 scales, since an fp16 one underflows
    /// to zero.
    #[must_use]
    pub const fn scale(self) -> Self {
        match self {
            Self::Bf16 => Self::Bf16,
            Self::Fp16 | Self::Fp32 => Self::Fp32,
        }
    }
}

/// Which dimension of a head's state is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[heads, d_v, d_k]`.
    KLast,
    /// `[heads, d_k, d_v]`.
    VLast,
}

/// How a checkpoint pool keeps a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The state's own type, bit for bit.
    Native,
    /// Rounded once to bf16.
    Bf16,
    /// One byte per element and one scale per k-channel.
    Int8,
}

/// Size of the state of one layer and slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Heads per layer.
    pub heads: usize,
    /// Channels; each has its own scale.
    pub d_k: usize,
    /// Elements per channel.
    pub d_v: usize,
}

impl Shape {
    /// Rows of one head's matrix, and elements of one row.
    #[must_use]
    pub const fn matrix(self, layout: Layout) -> (usize, usize) {
        match layout {
            Layout::KLast => (self.d_v, self.d_k),
            Layout::VLast => (self.d_k, self.d_v),
        }
    }
}

/// Memory with one entry per layer and slot: a base address per layer and strides in bytes.
///
/// Covers one strided tensor as well as one tensor per layer. Slot 0 is the padding sink and never
/// moves. What has no heads or no rows (scales, windows) leaves that stride 0. No address needs
/// alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Address of slot 0 of each layer. The provenance of the memory must be exposed.
    pub layers: Vec<usize>,
    /// Slots, the padding sink included.
    pub slots: usize,
    /// Bytes from one slot to the next.
    pub slot_stride: usize,
    /// Bytes from one head to the next.
    pub head_stride: usize,
    /// Bytes from one row of a head's matrix to the next; a row is contiguous.
    pub row_stride: usize,
}

/// A checkpoint pool and its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checkpoint {
    /// Elements of the state's own type.
    Native(Pool),
    /// Elements of bf16.
    Bf16(Pool),
    /// Elements of int8, and d_k scales per head.
    Int8 {
        /// The quantized elements.
        q: Pool,
        /// The scales.
        scale: Pool,
    },
}

impl Checkpoint {
    /// The format of the pool.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self {
            Self::Native(_) => Format::Native,
            Self::Bf16(_) => Format::Bf16,
            Self::Int8 { .. } => Format::Int8,
        }
    }

    pub(crate) const fn pool(&self) -> &Pool {
        match self {
            Self::Native(pool) | Self::Bf16(pool) | Self::Int8 { q: pool, .. } => pool,
        }
    }

    pub(crate) const fn scale(&self) -> Option<&Pool> {
        match self {
            Self::Native(_) | Self::Bf16(_) => None,
            Self::Int8 { scale, .. } => Some(scale),
        }
    }
}

/// An extra component of a state that is copied as bytes, such as a convolution window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where running requests keep it.
    pub active: Pool,
    /// Where checkpoints keep it.
    pub checkpoint: Pool,
    /// Contiguous bytes of one layer and slot.
    pub bytes: usize,
}

/// An active pool, a checkpoint pool, and what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Element type of the active pool.
    pub state: StateType,
    /// Order of the matrix dimensions, the same in both pools.
    pub layout: Layout,
    /// Size of one layer's state.
    pub shape: Shape,
    /// States of running requests.
    pub active: Pool,
    /// States of cached prefixes.
    pub checkpoint: Checkpoint,
    /// Components that move together with the states.
    pub windows: Vec<Window>,
}

impl Spec {
    /// What the codec has to do: a bf16 state in a bf16 pool is copied, NaN bits included.
    pub(crate) const fn format(&self) -> Format {
        match (self.checkpoint.format(), self.state) {
            (Format::Bf16, StateType::Bf16) => Format::Native,
            (format, _) => format,
        }
    }

    /// Bytes of one element in the checkpoint pool.
    pub(crate) const fn checkpoint_bytes(&self) -> usize {
        match self.format() {
            Format::Native => self.state.bytes(),
            Format::Bf16 => 2,
            Format::Int8 => 1,
        }
    }

    /// Bytes of one head's scales.
    pub(crate) const fn scale_bytes(&self) -> usize {
        self.shape.d_k * self.state.scale().bytes()
    }

    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let Shape { heads, d_k, d_v } = self.shape;
        if heads == 0 || d_k == 0 || d_v == 0 {
            return Err(SpecError::Empty(self.shape));
        }
        if self.windows.iter().any(|window| window.bytes == 0) {
            return Err(SpecError::EmptyWindow);
        }
        let mut regions = Vec::new();
        for (pool, extent) in self.parts() {
            self.check_counts(pool, extent.side)?;
            regions.extend(extent.regions(pool)?);
        }
        region::check_apart(&regions)
    }

    /// Everything that the spec describes, and what one layer and slot of it occupies.
    fn parts(&self) -> Vec<(&Pool, Extent)> {
        let heads = self.shape.heads;
        let (rows, columns) = self.shape.matrix(self.layout);
        let state = |side, bytes| Extent {
            side,
            heads,
            rows,
            bytes: columns * bytes,
        };
        let mut parts = vec![
            (&self.active, state(Side::Active, self.state.bytes())),
            (
                self.checkpoint.pool(),
                state(Side::Checkpoint, self.checkpoint_bytes()),
            ),
        ];
        if let Some(scale) = self.checkpoint.scale() {
            parts.push((
                scale,
                Extent {
                    side: Side::Scale,
                    heads,
                    rows: 1,
                    bytes: self.scale_bytes(),
                },
            ));
        }
        for Window {
            active,
            checkpoint,
            bytes,
        } in &self.windows
        {
            let window = |side| Extent {
                side,
                heads: 1,
                rows: 1,
                bytes: *bytes,
            };
            parts.extend([
                (active, window(Side::ActiveWindow)),
                (checkpoint, window(Side::CheckpointWindow)),
            ]);
        }
        parts
    }

    fn check_counts(&self, pool: &Pool, side: Side) -> Result<(), SpecError> {
        let (layers, wanted) = (pool.layers.len(), self.active.layers.len());
        if layers == 0 || layers != wanted {
            return Err(SpecError::Layers {
                side,
                layers,
                wanted,
            });
        }
        let wanted = match side {
            Side::Active | Side::ActiveWindow => self.active.slots,
            Side::Checkpoint | Side::Scale | Side::CheckpointWindow => self.checkpoint.pool().slots,
        };
        if pool.slots != wanted {
            return Err(SpecError::Slots {
                side,
                slots: pool.slots,
                wanted,
            });
        }
        Ok(())
    }
}
