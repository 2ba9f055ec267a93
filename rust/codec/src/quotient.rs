//! `x / scale` in registers without a division for each element, rounded as the true quotient is.

use std::marker::PhantomData;

use crate::element::Element;
use crate::lanes::Simd;

/// A way to divide. It rounds to the integer that the true quotient rounds to, where that is at
/// most 127 in magnitude.
pub(crate) trait Quotient {
    /// From this largest value of a channel on it may not.
    const TOO_LARGE: f32;

    /// Two values of a scale, with which [`of`](Self::of) divides by it.
    fn factors<S: Simd>(simd: S, scale: [S::F32; 4]) -> [[S::F32; 4]; 2];
    /// The quotient, from `x` and the factors of the scale.
    fn of<S: Simd>(simd: S, x: [S::F32; 4], factors: [[S::F32; 4]; 2]) -> [S::F32; 4];
}

/// The way for elements of type `E`.
pub(crate) struct QuotientOf<E>(PhantomData<E>);

impl<E: Element> Quotient for QuotientOf<E> {
    const TOO_LARGE: f32 = if E::BYTES == 2 {
        TwoTerms::TOO_LARGE
    } else {
        Refined::TOO_LARGE
    };

    #[inline(always)]
    fn factors<S: Simd>(simd: S, scale: [S::F32; 4]) -> [[S::F32; 4]; 2] {
        if E::BYTES == 2 {
            TwoTerms::factors(simd, scale)
        } else {
            Refined::factors(simd, scale)
        }
    }

    #[inline(always)]
    fn of<S: Simd>(simd: S, x: [S::F32; 4], factors: [[S::F32; 4]; 2]) -> [S::F32; 4] {
        if E::BYTES == 2 {
            TwoTerms::of(simd, x, factors)
        } else {
            Refined::of(simd, x, factors)
        }
    }
}

/// For any element: a multiplication by the reciprocal, and one step of refinement.
///
/// The remainder is exact, so the refined quotient is off by less than 2^-23 of its last place
/// before it is rounded. Only near a tie between two integers could that show, and there the tests
/// go over every quotient that is so close to where rounding changes.
struct Refined;

impl Quotient for Refined {
    const TOO_LARGE: f32 = f32::INFINITY;

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
/// The error before rounding is up to 2^-22 of the last place. That could flip ties of fp32 values;
/// no 16-bit value lies so close to a tie. The tests go over every element and every amax, one
/// binade of each kind. Scales are small enough for both terms to be normal numbers, so that it
/// does not matter whether the process flushes others to zero.
struct TwoTerms;

impl Quotient for TwoTerms {
    /// 2^80: the low term of the reciprocal of a larger scale could be subnormal.
    const TOO_LARGE: f32 = f32::from_bits((127 + 80) << 23);

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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::lanes::{Task, Write};
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
                    let rounded = (x / scale).round_ties_even() as i8;
                    assert_eq!(code.cast_signed(), rounded, "{x:e} / {scale:e}");
                }
            }
        }
    }

    /// Each (x, scale), with every instruction set of this CPU.
    pub(crate) fn compare<Q: Quotient>(pairs: &[(f32, f32)]) {
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
}
