//! The contract in whole registers, for any instruction set that implements [`Simd`].
//!
//! Works on blocks: one register of bytes holds the q of one block, two registers its 16-bit
//! elements, four its fp32 elements. The rest of a row is padded to a block. A head with a huge,
//! Inf or NaN element goes to the oracle, so that no edge rule is written twice.

use std::marker::PhantomData;

use crate::backend::copy_windows;
use crate::element::{Bf16, Element, Fp16, Fp32, SMALLEST_AMAX, STEPS};
use crate::fold::{fold_columns, fold_row};
use crate::raw::{Item, Share, Tile};
use crate::scalar;
use crate::spec::{Format, Layout, Spec};
use crate::steps::{
    ByColumn, ByRow, CopyBits, Dequantize, FromBf16, IntoBf16, Quantize, Quotient, Refined, Step,
    TwoTerms, map_group,
};

/// Transfers that write this many bytes or more bypass the cache: they would evict everything else
/// from it.
const STREAM_BYTES: usize = 4 << 20;

/// Whether written memory should stay in the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    Cached,
    Streamed,
}

/// An instruction set. Holding a value is the proof that the CPU has it.
///
/// A block is [`BLOCK`](Self::BLOCK) elements. Slices must have exactly the stated size.
pub(crate) trait Simd: Copy {
    /// Integer register.
    type Bits: Copy;
    /// A quarter of a block as fp32.
    type F32: Copy;
    /// Bytes of a register, and elements of a block.
    const BLOCK: usize;

    fn splat(self, value: f32) -> [Self::F32; 4];
    fn max(self, a: [Self::F32; 4], b: [Self::F32; 4]) -> [Self::F32; 4];
    fn div(self, a: [Self::F32; 4], b: [Self::F32; 4]) -> [Self::F32; 4];
    fn mul(self, a: [Self::F32; 4], b: [Self::F32; 4]) -> [Self::F32; 4];
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: [Self::F32; 4], b: [Self::F32; 4], c: [Self::F32; 4]) -> [Self::F32; 4];
    /// `c - a * b`, rounded once.
    fn sub_mul(self, c: [Self::F32; 4], a: [Self::F32; 4], b: [Self::F32; 4]) -> [Self::F32; 4];

    fn load(self, from: &[u8]) -> Self::Bits;
    /// Streams only to an aligned address.
    fn store(self, value: Self::Bits, to: &mut [u8], write: Write);
    fn prefetch(self, row: &[u8]);

    fn zero(self) -> Self::Bits;
    /// The larger of `a` and the absolute value of `x`, per 16-bit or 32-bit element.
    fn max_abs16(self, a: Self::Bits, x: Self::Bits) -> Self::Bits;
    fn max_abs32(self, a: Self::Bits, x: Self::Bits) -> Self::Bits;
    fn reduce16(self, a: Self::Bits) -> u32;
    fn reduce32(self, a: Self::Bits) -> u32;

    fn load_i8(self, from: &[u8]) -> [Self::F32; 4];
    fn load_bf16(self, from: &[u8]) -> [Self::F32; 4];
    fn load_fp16(self, from: &[u8]) -> [Self::F32; 4];
    fn load_fp32(self, from: &[u8]) -> [Self::F32; 4];
    /// Rounds to nearest even. Every value is below 127.5 in magnitude, so none needs to be clamped
    /// to +-127: a scale is off by at most 2^-8 of itself, and the largest quotient 127 * (1 +
    /// 2^-8) = 127.496.
    fn to_i8(self, x: [Self::F32; 4]) -> Self::Bits;
    /// Rounds to nearest even; NaN becomes the canonical one, here and below.
    fn to_bf16(self, x: [Self::F32; 4]) -> [Self::Bits; 2];
    fn to_fp16(self, x: [Self::F32; 4]) -> [Self::Bits; 2];
    fn to_fp32(self, x: [Self::F32; 4]) -> [Self::Bits; 4];
}

/// An element type in registers.
pub(crate) trait Lanes: Element<Scale = Self::ScaleLanes> {
    type ScaleLanes: Lanes;
    type Quotient: Quotient;
    /// Bits of the smallest largest value of a head that the oracle encodes.
    const FOR_ORACLE: u32;
    /// Bits of the largest value that comes back finite after rounding to bf16.
    const LARGEST_IN_BF16: u32;

    fn load<S: Simd>(simd: S, from: &[u8]) -> [S::F32; 4];
    fn store<S: Simd>(simd: S, x: [S::F32; 4], to: &mut [u8], write: Write);
    fn max_abs<S: Simd>(simd: S, a: S::Bits, x: S::Bits) -> S::Bits;
    fn reduce<S: Simd>(simd: S, a: S::Bits) -> u32;
}

/// `[f(0), f(1), f(2), f(3)]` without a closure: one would be compiled without the instruction set.
macro_rules! each {
    ($i:ident => $value:expr) => {
        [
            {
                let $i = 0;
                $value
            },
            {
                let $i = 1;
                $value
            },
            {
                let $i = 2;
                $value
            },
            {
                let $i = 3;
                $value
            },
        ]
    };
}
pub(crate) use each;

macro_rules! lanes {
    (
        $element:ty, scale $scale:ty, quotient $quotient:ty, for oracle $for_oracle:expr,
        in bf16 $largest_in_bf16:literal, $load:ident, $to:ident, $max_abs:ident, $reduce:ident
    ) => {
        impl Lanes for $element {
            type ScaleLanes = $scale;
            type Quotient = $quotient;
            const FOR_ORACLE: u32 = $for_oracle;
            const LARGEST_IN_BF16: u32 = $largest_in_bf16;

            #[inline(always)]
            fn load<S: Simd>(simd: S, from: &[u8]) -> [S::F32; 4] {
                simd.$load(from)
            }

            #[inline(always)]
            fn store<S: Simd>(simd: S, x: [S::F32; 4], to: &mut [u8], write: Write) {
                for (bits, to) in simd.$to(x).into_iter().zip(to.chunks_exact_mut(S::BLOCK)) {
                    simd.store(bits, to, write);
                }
            }

            #[inline(always)]
            fn max_abs<S: Simd>(simd: S, a: S::Bits, x: S::Bits) -> S::Bits {
                simd.$max_abs(a, x)
            }

            #[inline(always)]
            fn reduce<S: Simd>(simd: S, a: S::Bits) -> u32 {
                simd.$reduce(a)
            }
        }
    };
}

// For the oracle is the largest finite value, whose scale is a step smaller; of bf16 all from 2^80
// on, for with larger scales a low term might be subnormal.
lanes!(
    Bf16, scale Bf16, quotient TwoTerms, for oracle 0x6780, in bf16 0x7f7f,
    load_bf16, to_bf16, max_abs16, reduce16
);
lanes!(
    Fp16, scale Fp32, quotient TwoTerms, for oracle Fp16::LARGEST, in bf16 0x7bfb,
    load_fp16, to_fp16, max_abs16, reduce16
);
lanes!(
    Fp32, scale Fp32, quotient Refined, for oracle Fp32::LARGEST, in bf16 0x7f7f_7fff,
    load_fp32, to_fp32, max_abs32, reduce32
);

/// Work that an instruction set runs with all its instructions enabled.
pub(crate) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// Encodes a share.
pub(crate) struct Store<'a, E, R> {
    share: Share<'a>,
    refuse: R,
    element: PhantomData<E>,
}

impl<'a, E: Lanes, R: Fn(usize)> Store<'a, E, R> {
    pub(crate) fn new(share: Share<'a>, refuse: R) -> Self {
        Self {
            share,
            refuse,
            element: PhantomData,
        }
    }
}

impl<E: Lanes, R: Fn(usize)> Task for Store<'_, E, R> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut encoder = Head::<S, E>::new(simd, &self.share);
        while let Some(item) = self.share.next_head() {
            let pair = item.pair;
            if !encoder.store(item, self.share.ahead()) {
                (self.refuse)(pair);
            }
        }
        copy_windows(self.share);
    }
}

/// Decodes a share.
pub(crate) struct Load<'a, E> {
    share: Share<'a>,
    element: PhantomData<E>,
}

impl<'a, E: Lanes> Load<'a, E> {
    pub(crate) fn new(share: Share<'a>) -> Self {
        Self {
            share,
            element: PhantomData,
        }
    }
}

impl<E: Lanes> Task for Load<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut decoder = Head::<S, E>::new(simd, &self.share);
        while let Some(item) = self.share.next_head() {
            decoder.load(item);
        }
        copy_windows(self.share);
    }
}

/// Encodes and decodes heads of one spec. The buffers have one entry per channel, padded to a
/// block.
struct Head<'a, S, E> {
    simd: S,
    spec: &'a Spec,
    write: Write,
    /// Largest absolute values, as elements.
    amax: Vec<u8>,
    /// Scales as the checkpoint pool keeps them.
    encoded: Vec<u8>,
    /// Scales as fp32.
    scale: Vec<u8>,
    /// What divides a state that is stored, see [`Quotient`].
    factors: [Vec<u8>; 2],
    element: PhantomData<E>,
}

impl<'a, S: Simd, E: Lanes> Head<'a, S, E> {
    #[inline(always)]
    fn new(simd: S, share: &Share<'a>) -> Self {
        let spec = share.spec();
        let channels = spec.shape.d_k.next_multiple_of(S::BLOCK);
        let write = if share.transfer_bytes() < STREAM_BYTES {
            Write::Cached
        } else {
            Write::Streamed
        };
        Self {
            simd,
            spec,
            write,
            amax: vec![0; channels * E::BYTES],
            encoded: vec![0; channels * E::Scale::BYTES],
            scale: vec![0; channels * Fp32::BYTES],
            factors: std::array::from_fn(|_| vec![0; channels * Fp32::BYTES]),
            element: PhantomData,
        }
    }

    /// Encodes one head and fetches the next; says whether it reloads finite.
    #[inline(always)]
    fn store(&mut self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        match self.spec.format() {
            Format::Native => self.store_native(item, ahead),
            Format::Bf16 => self.store_bf16(item, ahead),
            Format::Int8 => self.store_int8(item, ahead),
        }
    }

    #[inline(always)]
    fn load(&mut self, item: Item<'_>) {
        match self.spec.format() {
            Format::Native => self.load_native(item),
            Format::Bf16 => self.load_bf16(item),
            Format::Int8 => self.load_int8(item),
        }
    }

    #[inline(always)]
    fn store_native(&self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        let mut step = CopyBits::<S, E>::new(self.simd);
        self.map_rows(&mut step, item, ahead);
        step.top(self.simd) <= E::LARGEST
    }

    #[inline(always)]
    fn load_native(&self, item: Item<'_>) {
        let mut step = CopyBits::<S, E>::new(self.simd);
        self.map_rows(&mut step, item, None);
    }

    #[inline(always)]
    fn store_bf16(&self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        let mut step = IntoBf16::<S, E>::new(self.simd);
        self.map_rows(&mut step, item, ahead);
        step.top(self.simd) <= E::LARGEST_IN_BF16
    }

    #[inline(always)]
    fn load_bf16(&self, item: Item<'_>) {
        self.map_rows(&mut FromBf16::<E>(PhantomData), item, None);
    }

    #[inline(always)]
    fn store_int8(&mut self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        self.find_amax(item.source);
        if fold_row::<S, E>(self.simd, &self.amax) >= E::FOR_ORACLE {
            return scalar::store::<E>(self.spec, item);
        }
        self.find_scales();
        item.target_scale
            .copy_from_slice(&self.encoded[..item.target_scale.len()]);
        let factors = self.factors.each_ref().map(Vec::as_slice);
        match self.spec.layout {
            Layout::KLast => self.map_rows(
                &mut Quantize::<_, E>::new(factors.map(ByColumn)),
                item,
                ahead,
            ),
            Layout::VLast => {
                self.map_rows(&mut Quantize::<_, E>::new(factors.map(ByRow)), item, ahead)
            }
        }
        true
    }

    #[inline(always)]
    fn load_int8(&mut self, item: Item<'_>) {
        self.encoded[..item.source_scale.len()].copy_from_slice(item.source_scale);
        self.decode_scales();
        match self.spec.layout {
            Layout::KLast => self.map_rows(
                &mut Dequantize::<_, E>::new(ByColumn(&self.scale)),
                item,
                None,
            ),
            Layout::VLast => {
                self.map_rows(&mut Dequantize::<_, E>::new(ByRow(&self.scale)), item, None)
            }
        }
    }

    /// Does a step for every block of every row, and fetches what comes after this item.
    #[inline(always)]
    fn map_rows(&self, step: &mut impl Step<S>, mut item: Item<'_>, ahead: Option<Tile<'_>>) {
        let rows = item.source.rows();
        let whole = rows - rows % 4;
        for row in (0..whole).step_by(4) {
            let sources = each!(i => item.source.row(row + i));
            map_group(
                self.simd,
                step,
                row,
                sources,
                item.target.rows(row),
                self.write,
            );
            if let Some(tile) = ahead {
                each!(i => self.simd.prefetch(tile.row(row + i)));
            }
        }
        for row in whole..rows {
            map_group(
                self.simd,
                step,
                row,
                [item.source.row(row)],
                item.target.rows(row),
                self.write,
            );
            if let Some(tile) = ahead {
                self.simd.prefetch(tile.row(row));
            }
        }
    }

    #[inline(always)]
    fn find_amax(&mut self, tile: Tile<'_>) {
        match self.spec.layout {
            Layout::KLast => fold_columns::<S, E>(self.simd, tile, &mut self.amax),
            Layout::VLast => {
                for (row, amax) in (0..tile.rows()).zip(self.amax.chunks_exact_mut(E::BYTES)) {
                    E::write(fold_row::<S, E>(self.simd, tile.row(row)), amax);
                }
            }
        }
    }

    /// From `amax`, all below what goes to the oracle, to `encoded`, `scale` and `factors`.
    #[inline(always)]
    fn find_scales(&mut self) {
        let simd = self.simd;
        let (smallest, steps) = (simd.splat(SMALLEST_AMAX), simd.splat(STEPS));
        let amax = self.amax.chunks_exact(S::BLOCK * E::BYTES);
        let encoded = self.encoded.chunks_exact_mut(S::BLOCK * E::Scale::BYTES);
        for (amax, encoded) in amax.zip(encoded) {
            let scale = simd.div(simd.max(E::load(simd, amax), smallest), steps);
            E::Scale::store(simd, scale, encoded, Write::Cached);
        }
        self.decode_scales();
        let block = S::BLOCK * Fp32::BYTES;
        let [first, second] = &mut self.factors;
        let factors = first
            .chunks_exact_mut(block)
            .zip(second.chunks_exact_mut(block));
        for (scale, (first, second)) in self.scale.chunks_exact(block).zip(factors) {
            let values = E::Quotient::factors(simd, simd.load_fp32(scale));
            Fp32::store(simd, values[0], first, Write::Cached);
            Fp32::store(simd, values[1], second, Write::Cached);
        }
    }

    /// From `encoded` to `scale`.
    #[inline(always)]
    fn decode_scales(&mut self) {
        let encoded = self.encoded.chunks_exact(S::BLOCK * E::Scale::BYTES);
        let scale = self.scale.chunks_exact_mut(S::BLOCK * Fp32::BYTES);
        for (encoded, scale) in encoded.zip(scale) {
            Fp32::store(
                self.simd,
                E::Scale::load(self.simd, encoded),
                scale,
                Write::Cached,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of `LARGEST_IN_BF16`.
    fn survives_bf16<E: Element>(bits: u32) -> bool {
        E::abs(E::round(Bf16::to_f32(Bf16::round(E::to_f32(bits))))) <= E::LARGEST
    }

    #[test]
    fn the_largest_value_in_bf16_is_the_last_that_survives() {
        fn check<E: Lanes>() {
            let edge = E::LARGEST_IN_BF16;
            assert!((edge - 100..=edge).all(survives_bf16::<E>));
            assert!((edge + 1..edge + 100).all(|bits| !survives_bf16::<E>(bits)));
        }
        check::<Bf16>();
        check::<Fp16>();
        check::<Fp32>();
    }
}
