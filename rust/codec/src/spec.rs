//! Describes two pools by address. Reads and writes no memory, and imports nothing.

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

/// Element type of a tensor of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE half.
    Fp16,
    /// IEEE single.
    Fp32,
    /// A signed byte.
    Int8,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
        }
    }
}

impl From<StateType> for Dtype {
    fn from(state: StateType) -> Self {
        match state {
            StateType::Bf16 => Self::Bf16,
            StateType::Fp16 => Self::Fp16,
            StateType::Fp32 => Self::Fp32,
        }
    }
}

/// A contiguous row of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Type of its elements.
    pub dtype: Dtype,
    /// How many it has.
    pub elements: usize,
}

impl Row {
    /// Bytes of the row.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.dtype.bytes() * self.elements
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

impl Format {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Native, Self::Bf16, Self::Int8];

    /// The name that Python uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
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
pub struct Strided {
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
pub struct Checkpoint {
    /// How it keeps a state.
    pub format: Format,
    /// The rows of every head's matrix, as [`Format::row`] describes them.
    pub rows: Strided,
    /// What a head has beside its rows, as [`Format::scales`] describes it.
    pub scales: Option<Strided>,
}

/// Bytes of one head in a checkpoint pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBytes {
    /// Of one row of the matrix.
    pub(crate) row: usize,
    /// Beside the rows; 0 in a format without scales.
    pub(crate) scales: usize,
}

/// An extra component of a state that is copied as bytes, such as a convolution window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where running requests keep it.
    pub active: Strided,
    /// Where checkpoints keep it.
    pub checkpoint: Strided,
    /// Contiguous bytes of one layer and slot.
    pub bytes: usize,
    /// Type of its elements, which a store then asks whether they are finite; of any other type
    /// nothing is asked.
    pub element: Option<StateType>,
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
    pub active: Strided,
    /// States of cached prefixes.
    pub checkpoint: Checkpoint,
    /// Components that move together with the states.
    pub windows: Vec<Window>,
}

/// Where a state comes from and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Slot of the pool that is read.
    pub source: u32,
    /// Slot of the pool that is written.
    pub destination: u32,
}
