//! Proves that no two elements of a spec share an address. Touches none of them.

use crate::error::{Side, SpecError};
use crate::spec::{HeadBytes, Shape, Spec, Strided, Window};

/// Refuses a spec that contradicts itself, or of which two elements may share an address. `head` is
/// what its format makes of a head.
pub(crate) fn check(spec: &Spec, head: HeadBytes) -> Result<(), SpecError> {
    let Shape { heads, d_k, d_v } = spec.shape;
    if heads == 0 || d_k == 0 || d_v == 0 {
        return Err(SpecError::Empty(spec.shape));
    }
    if spec.windows.iter().any(|window| window.bytes == 0) {
        return Err(SpecError::EmptyWindow);
    }
    let given = spec.checkpoint.scales.is_some();
    if given != (head.scales > 0) {
        let format = spec.checkpoint.format;
        return Err(SpecError::Scales { format, given });
    }
    for (pool, extent) in parts(spec, head) {
        check_counts(spec, pool, extent.side)?;
    }
    check_apart(&regions(spec, head)?)
}

/// Refuses two specs that are sound alone and of which two elements may share an address.
pub(crate) fn check_between(
    (first, first_head): (&Spec, HeadBytes),
    (second, second_head): (&Spec, HeadBytes),
) -> Result<(), SpecError> {
    let mut both = regions(first, first_head)?;
    both.extend(regions(second, second_head)?);
    check_apart(&both)
}

/// All memory that the spec describes.
fn regions(spec: &Spec, head: HeadBytes) -> Result<Vec<Region>, SpecError> {
    let each = parts(spec, head).into_iter();
    let regions: Result<Vec<_>, _> = each.map(|(pool, extent)| extent.regions(pool)).collect();
    Ok(regions?.concat())
}

/// Everything that the spec describes, and what one layer and slot of it occupies.
fn parts(spec: &Spec, head: HeadBytes) -> Vec<(&Strided, Extent)> {
    let heads = spec.shape.heads;
    let (rows, columns) = spec.shape.matrix(spec.layout);
    let state = |side, rows, bytes| Extent {
        side,
        heads,
        rows,
        bytes,
    };
    let active = state(Side::Active, rows, columns * spec.state.bytes());
    let kept = state(Side::Checkpoint, rows, head.row);
    let mut parts = vec![(&spec.active, active), (&spec.checkpoint.rows, kept)];
    if let Some(scales) = &spec.checkpoint.scales {
        parts.push((scales, state(Side::Scale, 1, head.scales)));
    }
    for Window {
        active,
        checkpoint,
        bytes,
        ..
    } in &spec.windows
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

/// Refuses a pool whose layers or slots are not as many as the spec's.
fn check_counts(spec: &Spec, pool: &Strided, side: Side) -> Result<(), SpecError> {
    let layers = pool.layers.len();
    let wanted = spec.active.layers.len();
    if layers == 0 || layers != wanted {
        return Err(SpecError::Layers {
            side,
            layers,
            wanted,
        });
    }
    let wanted = match side {
        Side::Active | Side::ActiveWindow => spec.active.slots,
        Side::Checkpoint | Side::Scale | Side::CheckpointWindow => spec.checkpoint.rows.slots,
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

/// What one layer and slot of a pool occupies.
#[derive(Clone, Copy)]
struct Extent {
    side: Side,
    heads: usize,
    rows: usize,
    /// Contiguous bytes of a row.
    bytes: usize,
}

/// One layer of a pool: `slots` spans of bytes, one every `stride`.
#[derive(Clone, Copy)]
struct Region {
    side: Side,
    layer: usize,
    base: usize,
    span: usize,
    stride: usize,
    slots: usize,
}

impl Extent {
    /// The layers of a pool, each of which keeps its own elements apart.
    fn regions(self, pool: &Strided) -> Result<Vec<Region>, SpecError> {
        let whole = self.span(&mut [
            (pool.row_stride, self.rows),
            (pool.head_stride, self.heads),
            (pool.slot_stride, pool.slots),
        ])?;
        let slot =
            self.span(&mut [(pool.row_stride, self.rows), (pool.head_stride, self.heads)])?;
        // Where slots are not the outermost dimension, the layer counts as one piece.
        let (span, stride, slots) = if slot <= pool.slot_stride {
            (slot, pool.slot_stride, pool.slots)
        } else {
            (whole, 0, 1)
        };
        let region = |(layer, &base): (usize, &usize)| match base.checked_add(whole) {
            Some(_) => Ok(Region {
                side: self.side,
                layer,
                base,
                span,
                stride,
                slots,
            }),
            None => Err(SpecError::TooLarge {
                side: self.side,
                stride: pool.slot_stride,
                size: pool.slots,
            }),
        };
        pool.layers.iter().enumerate().map(region).collect()
    }

    /// Bytes from the first to the last of some dimensions. Each stride must span all that lies
    /// within it.
    fn span(&self, dimensions: &mut [(usize, usize)]) -> Result<usize, SpecError> {
        dimensions.sort_unstable();
        let mut span = self.bytes;
        for &(stride, size) in dimensions.iter().filter(|&&(_, size)| size > 1) {
            if stride < span {
                return Err(SpecError::Overlap {
                    side: self.side,
                    stride,
                    span,
                });
            }
            span = (size - 1)
                .checked_mul(stride)
                .and_then(|rest| rest.checked_add(span))
                .ok_or(SpecError::TooLarge {
                    side: self.side,
                    stride,
                    size,
                })?;
        }
        Ok(span)
    }
}

impl Region {
    fn end(&self) -> usize {
        self.base + self.slots.saturating_sub(1) * self.stride + self.span
    }

    /// Whether the two certainly share no byte. `self` starts no later than `other`.
    fn is_apart(&self, other: &Self) -> bool {
        other.base >= self.end() || self.interleaves(other)
    }

    /// Engines put several states into one page per slot: the same stride, at different places
    /// within it.
    fn interleaves(&self, other: &Self) -> bool {
        let Some(place) = (other.base - self.base).checked_rem(self.stride) else {
            return false;
        };
        self.stride == other.stride && place >= self.span && place + other.span <= self.stride
    }
}

/// Refuses two regions that may share a byte.
fn check_apart(regions: &[Region]) -> Result<(), SpecError> {
    let mut regions = regions.to_vec();
    regions.sort_by_key(|region| region.base);
    for (i, first) in regions.iter().enumerate() {
        if let Some(second) = regions[i + 1..]
            .iter()
            .find(|second| !first.is_apart(second))
        {
            return Err(SpecError::Shared {
                first: first.side,
                first_layer: first.layer,
                second: second.side,
                second_layer: second.layer,
            });
        }
    }
    Ok(())
}
