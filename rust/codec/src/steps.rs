//! What a store or a load does to one block, and how blocks cover rows.

use std::marker::PhantomData;

use crate::element::{Bf16, Element, Fp32};
use crate::simd::{Lanes, Simd, Write};

/// Bytes of the largest block: 64 elements of four bytes.
const MAX_BLOCK_BYTES: usize = 256;

/// What happens to one block.
pub(crate) trait Step<S: Simd> {
    /// Bytes of an element that is read.
    const SOURCE_BYTES: usize;
    /// Bytes of an element that is written.
    const TARGET_BYTES: usize;
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
    row: usize,
    block: usize,
}

/// Copies bits and remembers the largest absolute values.
pub(crate) struct CopyBits<S: Simd, E> {
    top: S::Bits,
    element: PhantomData<E>,
}

impl<S: Simd, E: Lanes> CopyBits<S, E> {
    #[inline(always)]
    pub(crate) fn new(simd: S) -> Self {
        Self {
            top: simd.zero(),
            element: PhantomData,
        }
    }

    /// Bits of the largest absolute value so far.
    #[inline(always)]
    pub(crate) fn top(&self, simd: S) -> u32 {
        E::reduce(simd, self.top)
    }
}

impl<S: Simd, E: Lanes> Step<S> for CopyBits<S, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = E::BYTES;

    type Needs = ();

    #[inline(always)]
    fn needs(&self, _: S, _: Place) {}

    #[inline(always)]
    fn block(&mut self, simd: S, (): (), source: &[u8], target: &mut [u8], write: Write) {
        for (x, y) in source
            .chunks_exact(S::BLOCK)
            .zip(target.chunks_exact_mut(S::BLOCK))
        {
            let bits = simd.load(x);
            self.top = E::max_abs(simd, self.top, bits);
            simd.store(bits, y, write);
        }
    }
}

/// Rounds to bf16 and remembers the largest absolute values.
pub(crate) struct IntoBf16<S: Simd, E> {
    top: S::Bits,
    element: PhantomData<E>,
}

impl<S: Simd, E: Lanes> IntoBf16<S, E> {
    #[inline(always)]
    pub(crate) fn new(simd: S) -> Self {
        Self {
            top: simd.zero(),
            element: PhantomData,
        }
    }

    /// Bits of the largest absolute value so far.
    #[inline(always)]
    pub(crate) fn top(&self, simd: S) -> u32 {
        E::reduce(simd, self.top)
    }
}

impl<S: Simd, E: Lanes> Step<S> for IntoBf16<S, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = Bf16::BYTES;

    type Needs = ();

    #[inline(always)]
    fn needs(&self, _: S, _: Place) {}

    #[inline(always)]
    fn block(&mut self, simd: S, (): (), source: &[u8], target: &mut [u8], write: Write) {
        for x in source.chunks_exact(S::BLOCK) {
            self.top = E::max_abs(simd, self.top, simd.load(x));
        }
        Bf16::store(simd, E::load(simd, source), target, write);
    }
}

/// Rounds from bf16 to the state's type.
pub(crate) struct FromBf16<E>(pub(crate) PhantomData<E>);

impl<S: Simd, E: Lanes> Step<S> for FromBf16<E> {
    const SOURCE_BYTES: usize = Bf16::BYTES;
    const TARGET_BYTES: usize = E::BYTES;

    type Needs = ();

    #[inline(always)]
    fn needs(&self, _: S, _: Place) {}

    #[inline(always)]
    fn block(&mut self, simd: S, (): (), source: &[u8], target: &mut [u8], write: Write) {
        E::store(simd, Bf16::load(simd, source), target, write);
    }
}

/// The fp32 scales of a block.
pub(crate) trait Scales<S: Simd> {
    const BY_ROW: bool;

    fn at(&self, simd: S, place: Place) -> [S::F32; 4];
}

/// Columns are channels.
pub(crate) struct ByColumn<'a>(pub(crate) &'a [u8]);

impl<S: Simd> Scales<S> for ByColumn<'_> {
    const BY_ROW: bool = false;

    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bytes = S::BLOCK * Fp32::BYTES;
        simd.load_fp32(&self.0[place.block * bytes..][..bytes])
    }
}

/// Rows are channels.
pub(crate) struct ByRow<'a>(pub(crate) &'a [u8]);

impl<S: Simd> Scales<S> for ByRow<'_> {
    const BY_ROW: bool = true;

    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bits = Fp32::read(&self.0[place.row * Fp32::BYTES..][..Fp32::BYTES]);
        simd.splat(f32::from_bits(bits))
    }
}

/// Divides by the scales and rounds to int8.
pub(crate) struct Quantize<C, E> {
    factors: [C; 2],
    element: PhantomData<E>,
}

impl<C, E> Quantize<C, E> {
    pub(crate) fn new(factors: [C; 2]) -> Self {
        Self {
            factors,
            element: PhantomData,
        }
    }
}

impl<S: Simd, C: Scales<S>, E: Lanes> Step<S> for Quantize<C, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = 1;
    const BY_ROW: bool = C::BY_ROW;

    /// Both factors.
    type Needs = [[S::F32; 4]; 2];

    #[inline(always)]
    fn needs(&self, simd: S, place: Place) -> Self::Needs {
        let [first, second] = &self.factors;
        [first.at(simd, place), second.at(simd, place)]
    }

    #[inline(always)]
    fn block(
        &mut self,
        simd: S,
        factors: Self::Needs,
        source: &[u8],
        target: &mut [u8],
        write: Write,
    ) {
        let steps = E::Quotient::of(simd, E::load(simd, source), factors);
        simd.store(simd.to_i8(steps), target, write);
    }
}

/// `x / scale`, which rounds to the integer that the true quotient rounds to, without a division
/// for each element.
pub(crate) trait Quotient {
    /// Two values of a scale, with which [`of`](Self::of) divides by it.
    fn factors<S: Simd>(simd: S, scale: [S::F32; 4]) -> [[S::F32; 4]; 2];
    /// The quotient, from `x` and the factors of the scale.
    fn of<S: Simd>(simd: S, x: [S::F32; 4], factors: [[S::F32; 4]; 2]) -> [S::F32; 4];
}

/// For any element: a multiplication by the reciprocal, and one step of refinement.
///
/// The remainder is exact, so the refined quotient is off by less than 2^-23 of its last place
/// before it is rounded. Only near a tie between two integers could that show, and there the tests
/// go over every quotient that is so close to where rounding changes.
pub(crate) struct Refined;

impl Quotient for Refined {
    #[inline(always)]
    fn factors<S: Simd>(simd: S, scale: [S::F32; 4]) -> [[S::F32; 4]; 2] {
        [scale, simd.div(simd.splat(1.0), scale)]
    }

    #[inline(always)]
    fn of<S: Simd>(simd: S, x: [S::F32; 4], [scale, reciprocal]: [[S::F32; 4]; 2]) -> [S::F32; 4] {
        let estimate = simd.mul(x, reciprocal);
        simd.mul_add(simd.sub_mul(x, estimate, scale), reciprocal, estimate)
    }
}

/// For elements of 16 bits: a multiplication by the reciprocal as a sum of two terms, an
/// instruction less.
///
/// It is off by up to 2^-22 of its last place before it is rounded. That is too much next to some
/// ties, but no element with so few bits gets near those: the tests go over every element and every
/// largest one of its channel, but for binades in which nothing differs. Scales are small enough
/// for both terms to be normal numbers, so that it does not matter whether the process flushes
/// others to zero.
pub(crate) struct TwoTerms;

impl Quotient for TwoTerms {
    #[inline(always)]
    fn factors<S: Simd>(simd: S, scale: [S::F32; 4]) -> [[S::F32; 4]; 2] {
        let one = simd.splat(1.0);
        let high = simd.div(one, scale);
        [high, simd.mul(simd.sub_mul(one, high, scale), high)]
    }

    #[inline(always)]
    fn of<S: Simd>(simd: S, x: [S::F32; 4], [high, low]: [[S::F32; 4]; 2]) -> [S::F32; 4] {
        simd.mul_add(x, high, simd.mul(x, low))
    }
}

/// Multiplies by the scales and rounds to the state's type.
pub(crate) struct Dequantize<C, E> {
    scales: C,
    element: PhantomData<E>,
}

impl<C, E> Dequantize<C, E> {
    pub(crate) fn new(scales: C) -> Self {
        Self {
            scales,
            element: PhantomData,
        }
    }
}

impl<S: Simd, C: Scales<S>, E: Lanes> Step<S> for Dequantize<C, E> {
    const SOURCE_BYTES: usize = 1;
    const TARGET_BYTES: usize = E::BYTES;
    const BY_ROW: bool = C::BY_ROW;

    type Needs = [S::F32; 4];

    #[inline(always)]
    fn needs(&self, simd: S, place: Place) -> [S::F32; 4] {
        self.scales.at(simd, place)
    }

    #[inline(always)]
    fn block(
        &mut self,
        simd: S,
        scale: [S::F32; 4],
        source: &[u8],
        target: &mut [u8],
        write: Write,
    ) {
        let value = simd.mul(simd.load_i8(source), scale);
        E::store(simd, value, target, write);
    }
}

/// Does a step for every block of some rows below each other; the last is padded with zeros if it
/// is not whole. What rows share is fetched once.
#[inline(always)]
pub(crate) fn map_group<S: Simd, T: Step<S>, const N: usize>(
    simd: S,
    step: &mut T,
    row: usize,
    sources: [&[u8]; N],
    targets: [&mut [u8]; N],
    write: Write,
) {
    let (source_block, target_block) = (S::BLOCK * T::SOURCE_BYTES, S::BLOCK * T::TARGET_BYTES);
    let whole = sources[0].len() / source_block;
    for block in 0..whole {
        let shared = step.needs(simd, Place { row, block });
        for i in 0..N {
            let needs = if T::BY_ROW {
                step.needs(
                    simd,
                    Place {
                        row: row + i,
                        block,
                    },
                )
            } else {
                shared
            };
            let source = &sources[i][block * source_block..][..source_block];
            step.block(
                simd,
                needs,
                source,
                &mut targets[i][block * target_block..][..target_block],
                write,
            );
        }
    }
    for i in 0..N {
        let (x, y) = (
            &sources[i][whole * source_block..],
            &mut targets[i][whole * target_block..],
        );
        if !x.is_empty() {
            let needs = step.needs(
                simd,
                Place {
                    row: row + i,
                    block: whole,
                },
            );
            let (padded, mut result) = (padded(x), [0; MAX_BLOCK_BYTES]);
            step.block(
                simd,
                needs,
                &padded[..source_block],
                &mut result[..target_block],
                Write::Cached,
            );
            y.copy_from_slice(&result[..y.len()]);
        }
    }
}

/// A part of a block, and zeros.
#[inline(always)]
pub(crate) fn padded(part: &[u8]) -> [u8; MAX_BLOCK_BYTES] {
    let mut block = [0; MAX_BLOCK_BYTES];
    block[..part.len()].copy_from_slice(part);
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Fp16, quantize, scale};
    use crate::simd::Task;
    use crate::{Avx2, Avx512};

    /// Quotients x / s that are no further from the middle between a tie `k + 0.5` and a neighbour
    /// of it than the refined quotient may be off: x * 2^c = a * s + n, where a / 2^b is the
    /// middle and n is small. Both x and s have 24 bits, so that there is at most one s for
    /// each n.
    fn close_to_a_tie() -> Vec<(f32, f32)> {
        let mut found = Vec::new();
        for tie in (0..127).map(|k| k as f32 + 0.5) {
            for neighbour in [tie.next_down(), tie.next_up()] {
                let (odd, b) =
                    odd_and_exponent(f64::midpoint(f64::from(tie), f64::from(neighbour)));
                for (n, c) in (-4..=4).flat_map(|n| (20..=30).map(move |c| (n, c))) {
                    let s = inverse_of_odd(odd).wrapping_mul(0u64.wrapping_add_signed(-n))
                        & ((1 << c) - 1);
                    let x = (odd * s).wrapping_add_signed(n) >> c;
                    if [s, x].iter().all(|bits| (1 << 23..1 << 24).contains(bits)) {
                        let x = x as f32 * f32::from_bits((127 + c - b) << 23);
                        found.push((x, s as f32));
                    }
                }
            }
        }
        found
    }

    /// `value` as odd / 2^exponent.
    fn odd_and_exponent(value: f64) -> (u64, u32) {
        (0..)
            .map(|b| (value * f64::from(b).exp2(), b))
            .find(|(scaled, _)| scaled.fract() == 0.0)
            .map_or_else(
                || unreachable!("every double is a whole number over a power of two"),
                |(scaled, b)| (scaled as u64, b),
            )
    }

    /// By Newton's method, each step of which doubles the bits that are right.
    fn inverse_of_odd(odd: u64) -> u64 {
        (0..5).fold(odd, |inverse, _| {
            inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)))
        })
    }

    /// Compares quotients with true division.
    struct Compare<'a, Q>(&'a [(f32, f32)], PhantomData<Q>);

    impl<Q: Quotient> Task for Compare<'_, Q> {
        fn run<S: Simd>(self, simd: S) {
            for pairs in self.0.chunks(S::BLOCK) {
                let block = |pick: fn(&(f32, f32)) -> f32| -> Vec<u8> {
                    let padding = std::iter::repeat_n(1.0, S::BLOCK - pairs.len());
                    pairs
                        .iter()
                        .map(pick)
                        .chain(padding)
                        .flat_map(f32::to_ne_bytes)
                        .collect()
                };
                let [x, scale] = [block(|pair| pair.0), block(|pair| pair.1)]
                    .map(|bytes| simd.load_fp32(&bytes));
                let mut codes = vec![0; S::BLOCK];
                simd.store(
                    simd.to_i8(Q::of(simd, x, Q::factors(simd, scale))),
                    &mut codes,
                    Write::Cached,
                );
                for (&(x, scale), &code) in pairs.iter().zip(&codes) {
                    assert_eq!(code.cast_signed(), quantize(x, scale), "{x:e} / {scale:e}");
                }
            }
        }
    }

    fn compare<Q: Quotient>(pairs: &[(f32, f32)]) {
        if let Some(token) = Avx512::new() {
            token.run(Compare::<Q>(pairs, PhantomData));
        }
        if let Some(token) = Avx2::new() {
            token.run(Compare::<Q>(pairs, PhantomData));
        }
    }

    #[test]
    fn a_refined_quotient_rounds_as_the_true_one_does_next_to_every_tie() {
        let critical = close_to_a_tie();
        assert!(critical.len() > 100, "{} quotients", critical.len());
        let shifted = |exponent: i32| {
            let factor = f32::exp2(exponent as f32);
            critical
                .iter()
                .map(move |&(x, scale)| (x * factor, scale * factor))
        };
        // From the smallest scale to the largest, both signs.
        let pairs: Vec<_> = [0, -57, 90]
            .into_iter()
            .flat_map(shifted)
            .flat_map(|(x, s)| [(x, s), (-x, s)])
            .collect();
        compare::<Refined>(&pairs);
    }

    /// All elements of a channel whose largest has the bits `amax`, down to those that are far
    /// below half a step.
    fn compare_channel<E: Lanes>(amax: u32, binade: u32) {
        let scale = E::Scale::to_f32(scale::<E>(amax));
        let elements = (amax.saturating_sub(10 * binade)..=amax).map(E::to_f32);
        let pairs: Vec<_> = elements.flat_map(|x| [(x, scale), (-x, scale)]).collect();
        compare::<E::Quotient>(&pairs);
    }

    /// Quotients repeat from binade to binade, but for those where scales stay the same: 1e-8 is
    /// 0x322c in bf16.
    #[test]
    fn a_quotient_by_two_terms_rounds_as_the_true_one_does_for_every_element_of_16_bits() {
        for amax in (0..0x0800)
            .chain(0x3c00..0x4000)
            .chain(0x7800..Fp16::FOR_ORACLE)
        {
            compare_channel::<Fp16>(amax, 1 << 10);
        }
        for amax in (0x3200..0x3300)
            .chain(0x3f80..0x4000)
            .chain(0x6700..Bf16::FOR_ORACLE)
        {
            compare_channel::<Bf16>(amax, 1 << 7);
        }
    }

    #[test]
    fn no_factor_of_two_terms_is_subnormal() {
        for scale in (0..Bf16::FOR_ORACLE).map(|amax| Bf16::to_f32(scale::<Bf16>(amax))) {
            let high = 1.0 / scale;
            let low = (-high).mul_add(scale, 1.0) * high;
            assert!(
                [high, low]
                    .iter()
                    .all(|factor| factor.is_normal() || *factor == 0.0),
                "{scale:e}"
            );
        }
    }

    #[test]
    fn no_quotient_needs_the_clamp() {
        fn check<E: Lanes>(amaxes: impl Iterator<Item = u32>) {
            for amax in amaxes {
                let quotient = E::to_f32(amax) / E::Scale::to_f32(scale::<E>(amax));
                assert!(quotient < 127.5, "{amax:#x}: {quotient}");
            }
        }
        check::<Bf16>(0..Bf16::FOR_ORACLE);
        check::<Fp16>(0..Fp16::FOR_ORACLE);
        check::<Fp32>((0..Fp32::FOR_ORACLE).step_by(9973));
    }
}
