//! What happens to one block, and how blocks cover the rows of a head.

use crate::element::{Element, Fp32};
use crate::lanes::{MAX_BLOCK_BYTES, Simd, Write, each, padded};
use crate::tiles::{Item, Matrix, Share};

/// Transfers that write this many bytes or more bypass the cache: they would evict everything else
/// from it.
const STREAM_BYTES: usize = 4 << 20;

/// What happens to one block.
pub(crate) trait Transform<S: Simd> {
    /// Bytes of a block that is read.
    const SOURCE: usize;
    /// Bytes of a block that is written.
    const TARGET: usize;
    /// What a block needs besides its elements.
    type Needs: Copy;
    /// Whether each row needs something else.
    const BY_ROW: bool = false;

    /// What blocks at a place need.
    fn needs(&self, simd: S, place: Place) -> Self::Needs;
    fn block(
        &mut self,
        simd: S,
        needs: Self::Needs,
        source: &[u8],
        target: &mut [u8],
        write: Write,
    );
}

/// A row, and a block of it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: usize,
    pub(crate) block: usize,
}

/// The fp32 scales of a block.
pub(crate) trait Scales<S: Simd> {
    const BY_ROW: bool;

    fn at(&self, simd: S, place: Place) -> [S::F32; 4];
}

/// Columns are channels: one fp32 value each.
pub(crate) struct ByColumn<'a>(pub(crate) &'a [u8]);

impl<S: Simd> Scales<S> for ByColumn<'_> {
    const BY_ROW: bool = false;

    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bytes = S::BLOCK * Fp32::BYTES;
        simd.load_fp32(&self.0[place.block * bytes..][..bytes])
    }
}

/// Rows are channels: one fp32 value each.
pub(crate) struct ByRow<'a>(pub(crate) &'a [u8]);

impl<S: Simd> Scales<S> for ByRow<'_> {
    const BY_ROW: bool = true;

    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bits = Fp32::read(&self.0[place.row * Fp32::BYTES..][..Fp32::BYTES]);
        simd.splat(f32::from_bits(bits))
    }
}

/// Applies transforms to the rows of heads.
#[derive(Clone, Copy)]
pub(crate) struct Rows<S> {
    pub(crate) simd: S,
    write: Write,
}

impl<S: Simd> Rows<S> {
    #[inline(always)]
    pub(crate) fn new(simd: S, share: &Share<'_>) -> Self {
        let write = if share.transfer_bytes() < STREAM_BYTES {
            Write::Cached
        } else {
            Write::Streamed
        };
        Self { simd, write }
    }

    /// Transforms every block of every row, and fetches what comes after this item.
    #[inline(always)]
    pub(crate) fn map(
        &self,
        transform: &mut impl Transform<S>,
        mut item: Item<'_>,
        ahead: Option<Matrix<'_>>,
    ) {
        let rows = item.source.rows();
        let whole = rows - rows % 4;
        for row in (0..whole).step_by(4) {
            let sources = each!(i => item.source.row(row + i));
            map_group(
                self.simd,
                transform,
                row,
                sources,
                item.target.rows(row),
                self.write,
            );
            if let Some(matrix) = ahead {
                each!(i => self.simd.prefetch(matrix.row(row + i)));
            }
        }
        for row in whole..rows {
            map_group(
                self.simd,
                transform,
                row,
                [item.source.row(row)],
                item.target.rows(row),
                self.write,
            );
            if let Some(matrix) = ahead {
                self.simd.prefetch(matrix.row(row));
            }
        }
    }
}

/// Transforms every block of some rows below each other; the last is padded with zeros if it is not
/// whole. What rows share is fetched once.
#[inline(always)]
fn map_group<S: Simd, T: Transform<S>, const N: usize>(
    simd: S,
    transform: &mut T,
    row: usize,
    sources: [&[u8]; N],
    targets: [&mut [u8]; N],
    write: Write,
) {
    let whole = sources[0].len() / T::SOURCE;
    for block in 0..whole {
        let shared = transform.needs(simd, Place { row, block });
        for i in 0..N {
            let needs = if T::BY_ROW {
                transform.needs(
                    simd,
                    Place {
                        row: row + i,
                        block,
                    },
                )
            } else {
                shared
            };
            let source = &sources[i][block * T::SOURCE..][..T::SOURCE];
            transform.block(
                simd,
                needs,
                source,
                &mut targets[i][block * T::TARGET..][..T::TARGET],
                write,
            );
        }
    }
    for i in 0..N {
        let x = &sources[i][whole * T::SOURCE..];
        let y = &mut targets[i][whole * T::TARGET..];
        if !x.is_empty() {
            let needs = transform.needs(
                simd,
                Place {
                    row: row + i,
                    block: whole,
                },
            );
            let padded = padded(x);
            let mut result = [0; MAX_BLOCK_BYTES];
            transform.block(
                simd,
                needs,
                &padded[..T::SOURCE],
                &mut result[..T::TARGET],
                Write::Cached,
            );
            y.copy_from_slice(&result[..y.len()]);
        }
    }
}
