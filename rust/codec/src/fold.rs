//! The largest absolute values of rows and of columns.

use crate::raw::Tile;
use crate::simd::{Lanes, Simd, Write};
use crate::steps::padded;

/// The bits of the largest absolute value of a row.
#[inline(always)]
pub(crate) fn fold_row<S: Simd, E: Lanes>(simd: S, row: &[u8]) -> u32 {
    let mut registers = row.chunks_exact(S::BLOCK);
    let mut top = simd.zero();
    for x in registers.by_ref() {
        top = E::max_abs(simd, top, simd.load(x));
    }
    let rest = registers.remainder();
    if !rest.is_empty() {
        top = E::max_abs(simd, top, simd.load(&padded(rest)[..S::BLOCK]));
    }
    E::reduce(simd, top)
}

/// Writes the largest absolute value of each column to `amax`. Goes down strips as wide as
/// registers can hold, row by row: four rows at a time, with the maxima in memory, were slower.
#[inline(always)]
pub(crate) fn fold_columns<S: Simd, E: Lanes>(simd: S, tile: Tile<'_>, amax: &mut [u8]) {
    let (width, mut at) = (tile.row(0).len(), 0);
    while width - at >= S::BLOCK {
        let registers = (width - at) / S::BLOCK;
        at += match registers {
            8.. => fold_strip::<S, E, 8>(simd, tile, at, amax),
            4.. => fold_strip::<S, E, 4>(simd, tile, at, amax),
            _ => fold_strip::<S, E, 1>(simd, tile, at, amax),
        };
    }
    if at < width {
        let mut top = simd.zero();
        for row in 0..tile.rows() {
            top = E::max_abs(
                simd,
                top,
                simd.load(&padded(&tile.row(row)[at..])[..S::BLOCK]),
            );
        }
        simd.store(top, &mut amax[at..][..S::BLOCK], Write::Cached);
    }
}

/// The same for `N` registers of columns from byte `at` on; returns their bytes.
#[inline(always)]
fn fold_strip<S: Simd, E: Lanes, const N: usize>(
    simd: S,
    tile: Tile<'_>,
    at: usize,
    amax: &mut [u8],
) -> usize {
    let mut top = [simd.zero(); N];
    for row in 0..tile.rows() {
        let strip = tile.row(row)[at..][..N * S::BLOCK].chunks_exact(S::BLOCK);
        for (top, x) in top.iter_mut().zip(strip) {
            *top = E::max_abs(simd, *top, simd.load(x));
        }
    }
    for (top, amax) in top.into_iter().zip(amax[at..].chunks_exact_mut(S::BLOCK)) {
        simd.store(top, amax, Write::Cached);
    }
    N * S::BLOCK
}
