//! What an instruction set offers, and element types in its registers.
//!
//! A block is one register of bytes; two registers hold its elements of 16 bits, four those of 32.

use crate::element::{Bf16, Element, Fp16, Fp32};

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
        $element:ty, scale $scale:ty, $load:ident, $to:ident, $max_abs:ident, $reduce:ident
    ) => {
        impl Lanes for $element {
            type ScaleLanes = $scale;

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

lanes!(Bf16, scale Bf16, load_bf16, to_bf16, max_abs16, reduce16);
lanes!(Fp16, scale Fp32, load_fp16, to_fp16, max_abs16, reduce16);
lanes!(Fp32, scale Fp32, load_fp32, to_fp32, max_abs32, reduce32);

/// Work that an instruction set runs with all its instructions enabled.
pub(crate) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// Bytes of the largest block: 64 elements of four bytes.
pub(crate) const MAX_BLOCK_BYTES: usize = 256;

/// A part of a block, and zeros.
#[inline(always)]
pub(crate) fn padded(part: &[u8]) -> [u8; MAX_BLOCK_BYTES] {
    let mut block = [0; MAX_BLOCK_BYTES];
    block[..part.len()].copy_from_slice(part);
    block
}
