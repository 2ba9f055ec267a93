//! The largest absolute values of rows and of columns.

use std::marker::PhantomData;

use crate::lanes::{Lanes, Simd, Write, padded};
use crate::tiles::Matrix;

/// The largest absolute values so far.
pub(crate) struct Largest<S: Simd, E> {
    bits: S::Bits,
    element: PhantomData<E>,
}

impl<S: Simd, E: Lanes> Largest<S, E> {
    #[inline(always)]
    pub(crate) fn new(simd: S) -> Self {
        Self {
            bits: simd.zero(),
            element: PhantomData,
        }
    }

    /// Takes a register of elements into account.
    #[inline(always)]
    pub(crate) fn take(&mut self, simd: S, x: S::Bits) {
        self.bits = E::max_abs(simd, self.bits, x);
    }

    /// Bits of the largest of all.
    #[inline(always)]
    pub(crate) fn bits(&self, simd: S) -> u32 {
        E::reduce(simd, self.bits)
    }
}

/// The bits of the largest absolute value of a row.
#[inline(always)]
pub(crate) fn fold_row<S: Simd, E: Lanes>(simd: S, row: &[u8]) -> u32 {
    let mut registers = row.chunks_exact(S::BLOCK);
    let mut top = Largest::<S, E>::new(simd);
    for x in registers.by_ref() {
        top.take(simd, simd.load(x));
    }
    let rest = registers.remainder();
    if !rest.is_empty() {
        top.take(simd, simd.load(&padded(rest)[..S::BLOCK]));
    }
    top.bits(simd)
}

/// Writes the largest absolute value of each column to `amax`. Goes down strips as wide as
/// registers can hold, row by row: four rows at a time, with the maxima in memory, were slower.
#[inline(always)]
pub(crate) fn fold_columns<S: Simd, E: Lanes>(simd: S, matrix: Matrix<'_>, amax: &mut [u8]) {
    let width = matrix.row(0).len();
    let mut at = 0;
    while width - at >= S::BLOCK {
        let registers = (width - at) / S::BLOCK;
        at += match registers {
            8.. => fold_strip::<S, E, 8>(simd, matrix, at, amax),
            4.. => fold_strip::<S, E, 4>(simd, matrix, at, amax),
            _ => fold_strip::<S, E, 1>(simd, matrix, at, amax),
        };
    }
    if at < width {
        let mut top = simd.zero();
        for row in 0..matrix.rows() {
            top = E::max_abs(
                simd,
                top,
                simd.load(&padded(&matrix.row(row)[at..])[..S::BLOCK]),
            );
        }
        simd.store(top, &mut amax[at..][..S::BLOCK], Write::Cached);
    }
}

/// The same for `N` registers of columns from byte `at` on; returns their bytes.
#[inline(always)]
fn fold_strip<S: Simd, E: Lanes, const N: usize>(
    simd: S,
    matrix: Matrix<'_>,
    at: usize,
    amax: &mut [u8],
) -> usize {
    let mut top = [simd.zero(); N];
    for row in 0..matrix.rows() {
        let strip = matrix.row(row)[at..][..N * S::BLOCK].chunks_exact(S::BLOCK);
        for (top, x) in top.iter_mut().zip(strip) {
            *top = E::max_abs(simd, *top, simd.load(x));
        }
    }
    for (top, amax) in top.into_iter().zip(amax[at..].chunks_exact_mut(S::BLOCK)) {
        simd.store(top, amax, Write::Cached);
    }
    N * S::BLOCK
}
