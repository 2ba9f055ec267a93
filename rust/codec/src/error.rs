//! What a caller can get wrong.

use std::error::Error;
use std::fmt;

use crate::spec::{Format, Shape};

/// Which memory an error speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The active pool.
    Active,
    /// The checkpoint pool.
    Checkpoint,
    /// The scales of the checkpoint pool.
    Scale,
    /// A window in the active pool.
    ActiveWindow,
    /// A window in the checkpoint pool.
    CheckpointWindow,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Active => "active pool",
            Self::Checkpoint => "checkpoint pool",
            Self::Scale => "checkpoint scales",
            Self::ActiveWindow => "active window",
            Self::CheckpointWindow => "checkpoint window",
        })
    }
}

/// A description of two pools that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecError {
    /// A dimension is zero.
    Empty(Shape),
    /// A window has no bytes.
    EmptyWindow,
    /// The format has scales and none were given, or the reverse.
    Scales {
        /// The format of the checkpoint pool.
        format: Format,
        /// Whether scales were given.
        given: bool,
    },
    /// The number of layers is zero or differs from the active pool's.
    Layers {
        /// The memory in question.
        side: Side,
        /// Its layers.
        layers: usize,
        /// The active pool's.
        wanted: usize,
    },
    /// The number of slots differs from its pool's.
    Slots {
        /// The memory in question.
        side: Side,
        /// Its slots.
        slots: usize,
        /// Its pool's.
        wanted: usize,
    },
    /// Two elements share an address.
    Overlap {
        /// The memory in question.
        side: Side,
        /// The stride that is too small, in bytes.
        stride: usize,
        /// The bytes it must span.
        span: usize,
    },
    /// Two pools, or two layers of one, may share an address.
    Shared {
        /// One of the two.
        first: Side,
        /// Its layer.
        first_layer: usize,
        /// The other.
        second: Side,
        /// Its layer.
        second_layer: usize,
    },
    /// The pool's last byte has no address.
    TooLarge {
        /// The memory in question.
        side: Side,
        /// The stride, in bytes.
        stride: usize,
        /// The size of the dimension with that stride.
        size: usize,
    },
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty(Shape { heads, d_k, d_v }) => {
                write!(
                    f,
                    "every dimension must be at least 1: {heads} heads, d_k {d_k}, d_v {d_v}"
                )
            }
            Self::EmptyWindow => {
                f.write_str("a window must have at least 1 byte per slot, this one has 0")
            }
            Self::Scales { format, given } => {
                let format = format.name();
                let found = if *given {
                    "has no scales, a tensor was given"
                } else {
                    "needs a tensor of scales, got none"
                };
                write!(f, "scale: the {format} format {found}")
            }
            Self::Layers {
                side,
                layers,
                wanted,
            } => {
                write!(
                    f,
                    "{side}: {layers} layers, the active pool has {wanted}; they must agree and be at least 1"
                )
            }
            Self::Slots {
                side,
                slots,
                wanted,
            } => {
                write!(
                    f,
                    "{side}: {slots} slots, its pool has {wanted}; they must agree"
                )
            }
            Self::Overlap { side, stride, span } => {
                write!(
                    f,
                    "{side}: a stride of {stride} bytes is less than the {span} bytes within it"
                )
            }
            Self::Shared {
                first,
                first_layer,
                second,
                second_layer,
            } => {
                write!(
                    f,
                    "layer {first_layer} of the {first} overlaps layer {second_layer} of the {second}; \
                     their bytes must be apart, or interleaved with the same stride between slots"
                )
            }
            Self::TooLarge { side, stride, size } => {
                write!(
                    f,
                    "{side}: {size} times a stride of {stride} bytes exceeds the address space"
                )
            }
        }
    }
}

impl Error for SpecError {}

/// Slot pairs that cannot be moved. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairError {
    /// More pairs than destination slots.
    TooMany {
        /// Pairs given.
        pairs: usize,
        /// Usable destination slots.
        usable: usize,
    },
    /// A slot is the padding sink or past the end of its pool.
    SlotOutOfRange {
        /// The pool in question.
        side: Side,
        /// Position in the list of pairs.
        pair: usize,
        /// The slot.
        slot: u32,
        /// Slots of the pool, the padding sink included.
        slots: usize,
    },
    /// Two pairs write the same slot.
    DuplicateDestination {
        /// The slot.
        slot: u32,
        /// Position of the first pair.
        first: usize,
        /// Position of the second pair.
        second: usize,
    },
}

impl fmt::Display for PairError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { pairs, usable } => {
                write!(
                    f,
                    "{pairs} pairs, but the destination pool has {usable} usable slots"
                )
            }
            Self::SlotOutOfRange {
                side,
                pair,
                slot: 0,
                ..
            } => {
                write!(f, "pair {pair}: slot 0 of the {side} is the padding sink")
            }
            Self::SlotOutOfRange {
                side,
                pair,
                slot,
                slots,
            } => {
                write!(
                    f,
                    "pair {pair}: slot {slot} is not in the {side}, whose last slot is {}",
                    slots.saturating_sub(1)
                )
            }
            Self::DuplicateDestination {
                slot,
                first,
                second,
            } => {
                write!(
                    f,
                    "pairs {first} and {second} both write slot {slot}; destinations must be distinct"
                )
            }
        }
    }
}

impl Error for PairError {}
