//! One byte per element and one scale per k-channel.

use super::Encoding;
use crate::element::Element;
use crate::spec::{Dtype, Layout, Row, Shape, StateType};
use crate::tiles::{Item, Matrix};

/// Smallest amax that a scale is made from, so that no scale is zero.
const SMALLEST_AMAX: f32 = 1e-8;

/// Levels between zero and the largest quantized value.
const LEVELS: f32 = 127.0;

/// See the file.
pub(crate) struct Int8;

impl Encoding for Int8 {
    fn row(_: StateType, columns: usize) -> Row {
        Row {
            dtype: Dtype::Int8,
            elements: columns,
        }
    }

    fn scales(state: StateType, shape: Shape) -> Option<Row> {
        Some(Row {
            dtype: state.scale().into(),
            elements: shape.d_k,
        })
    }

    fn store<E: Element>(layout: Layout, mut item: Item<'_>) -> bool {
        let mut finite = true;
        for (channel, encoded) in item
            .target_scale
            .chunks_exact_mut(E::Scale::BYTES)
            .enumerate()
        {
            let places = || channel_places(layout, item.source, channel, E::BYTES);
            let at = |(row, column)| read_at::<E>(item.source, row, column);
            let amax = places().map(|place| E::abs(at(place))).max().unwrap_or(0);
            finite &= E::is_finite(amax);
            let bits = scale::<E>(amax);
            E::Scale::write(bits, encoded);
            for (row, column) in places() {
                let q = quantize(E::to_f32(at((row, column))), E::Scale::to_f32(bits));
                item.target.row(row)[column] = q.cast_unsigned();
            }
        }
        finite
    }

    fn load<E: Element>(layout: Layout, mut item: Item<'_>) {
        for (channel, encoded) in item.source_scale.chunks_exact(E::Scale::BYTES).enumerate() {
            let scale = E::Scale::to_f32(E::Scale::read(encoded));
            for (row, column) in channel_places(layout, item.source, channel, 1) {
                let q = item.source.row(row)[column].cast_signed();
                let target = &mut item.target.row(row)[column * E::BYTES..][..E::BYTES];
                E::write(dequantize::<E>(q, scale), target);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    type Vector<S: crate::lanes::Simd, E: crate::lanes::Lanes> = vector::Heads<S, E>;
}

/// Bits of the scale of a channel whose largest absolute value has the bits `amax`.
fn scale<E: Element>(amax: u32) -> u32 {
    if amax > E::LARGEST {
        return E::Scale::NAN;
    }
    let scale = E::Scale::round(E::to_f32(amax).max(SMALLEST_AMAX) / LEVELS);
    let reloaded = E::round(LEVELS * E::Scale::to_f32(scale));
    if reloaded > E::LARGEST {
        scale - 1
    } else {
        scale
    }
}

/// One quantized element. A NaN scale gives zero.
fn quantize(value: f32, scale: f32) -> i8 {
    if scale.is_nan() {
        return 0;
    }
    (value / scale).round_ties_even().clamp(-LEVELS, LEVELS) as i8
}

/// Bits of one reloaded element.
fn dequantize<E: Element>(q: i8, scale: f32) -> u32 {
    E::round(f32::from(q) * scale)
}

/// (row, column) of every element of a channel.
fn channel_places(
    layout: Layout,
    matrix: Matrix<'_>,
    channel: usize,
    element_bytes: usize,
) -> impl Iterator<Item = (usize, usize)> {
    let n = match layout {
        Layout::KLast => matrix.rows(),
        Layout::VLast => matrix.row(channel).len() / element_bytes,
    };
    (0..n).map(move |i| match layout {
        Layout::KLast => (i, channel),
        Layout::VLast => (channel, i),
    })
}

fn read_at<E: Element>(matrix: Matrix<'_>, row: usize, column: usize) -> u32 {
    E::read(&matrix.row(row)[column * E::BYTES..][..E::BYTES])
}

#[cfg(target_arch = "x86_64")]
mod vector {
    use std::marker::PhantomData;

    use super::{Int8, LEVELS, SMALLEST_AMAX};
    use crate::amax::{fold_columns, fold_row};
    use crate::element::{Element, Fp32};
    use crate::format::{Encoding, Vector};
    use crate::lanes::{Lanes, Simd, Write};
    use crate::quotient::{Quotient, QuotientOf};
    use crate::spec::{Layout, Shape};
    use crate::tiles::{Item, Matrix};
    use crate::transforms::{ByColumn, ByRow, Place, Rows, Scales, Transform};

    /// Heads whose amax has at least these bits go to the oracle, so that no edge rule is written
    /// twice: Inf and NaN, the largest finite value, whose scale is one step smaller, and scales
    /// by which the quotient cannot divide.
    pub(super) fn for_oracle<E: Element>() -> u32 {
        E::round(QuotientOf::<E>::TOO_LARGE).min(E::LARGEST)
    }

    /// The buffers have one entry per channel, padded to a block. Those that only a store needs are
    /// made by the first.
    pub(crate) struct Heads<S, E> {
        rows: Rows<S>,
        layout: Layout,
        channels: usize,
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

    impl<S: Simd, E: Lanes> Vector<S> for Heads<S, E> {
        #[inline(always)]
        fn new(rows: Rows<S>, layout: Layout, shape: Shape) -> Self {
            let channels = shape.d_k.next_multiple_of(S::BLOCK);
            Self {
                rows,
                layout,
                channels,
                amax: Vec::new(),
                encoded: vec![0; channels * E::Scale::BYTES],
                scale: vec![0; channels * Fp32::BYTES],
                factors: [Vec::new(), Vec::new()],
                element: PhantomData,
            }
        }

        #[inline(always)]
        fn store(&mut self, item: Item<'_>, ahead: Option<Matrix<'_>>) -> bool {
            self.amax.resize(self.channels * E::BYTES, 0);
            for factors in &mut self.factors {
                factors.resize(self.channels * Fp32::BYTES, 0);
            }
            self.find_amax(item.source);
            if fold_row::<S, E>(self.rows.simd, &self.amax) >= for_oracle::<E>() {
                return Int8::store::<E>(self.layout, item);
            }
            self.find_scales();
            item.target_scale
                .copy_from_slice(&self.encoded[..item.target_scale.len()]);
            let factors = self.factors.each_ref().map(Vec::as_slice);
            match self.layout {
                Layout::KLast => {
                    let mut quantize = Quantize::<_, E>::new(factors.map(ByColumn));
                    self.rows.map(&mut quantize, item, ahead);
                }
                Layout::VLast => {
                    let mut quantize = Quantize::<_, E>::new(factors.map(ByRow));
                    self.rows.map(&mut quantize, item, ahead);
                }
            }
            true
        }

        #[inline(always)]
        fn load(&mut self, item: Item<'_>) {
            self.encoded[..item.source_scale.len()].copy_from_slice(item.source_scale);
            self.decode_scales();
            match self.layout {
                Layout::KLast => {
                    let mut dequantize = Dequantize::<_, E>::new(ByColumn(&self.scale));
                    self.rows.map(&mut dequantize, item, None);
                }
                Layout::VLast => {
                    let mut dequantize = Dequantize::<_, E>::new(ByRow(&self.scale));
                    self.rows.map(&mut dequantize, item, None);
                }
            }
        }
    }

    impl<S: Simd, E: Lanes> Heads<S, E> {
        #[inline(always)]
        fn find_amax(&mut self, matrix: Matrix<'_>) {
            match self.layout {
                Layout::KLast => fold_columns::<S, E>(self.rows.simd, matrix, &mut self.amax),
                Layout::VLast => {
                    for (row, amax) in (0..matrix.rows()).zip(self.amax.chunks_exact_mut(E::BYTES))
                    {
                        E::write(fold_row::<S, E>(self.rows.simd, matrix.row(row)), amax);
                    }
                }
            }
        }

        /// From `amax`, all below what goes to the oracle, to `encoded`, `scale` and `factors`.
        #[inline(always)]
        fn find_scales(&mut self) {
            let simd = self.rows.simd;
            let smallest = simd.splat(SMALLEST_AMAX);
            let levels = simd.splat(LEVELS);
            let amax = self.amax.chunks_exact(S::BLOCK * E::BYTES);
            let encoded = self.encoded.chunks_exact_mut(S::BLOCK * E::Scale::BYTES);
            for (amax, encoded) in amax.zip(encoded) {
                let scale = simd.div(simd.max(E::load(simd, amax), smallest), levels);
                E::Scale::store(simd, scale, encoded, Write::Cached);
            }
            self.decode_scales();
            let block = S::BLOCK * Fp32::BYTES;
            let [first, second] = &mut self.factors;
            let factors = first
                .chunks_exact_mut(block)
                .zip(second.chunks_exact_mut(block));
            for (scale, (first, second)) in self.scale.chunks_exact(block).zip(factors) {
                let values = QuotientOf::<E>::factors(simd, simd.load_fp32(scale));
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
                    self.rows.simd,
                    E::Scale::load(self.rows.simd, encoded),
                    scale,
                    Write::Cached,
                );
            }
        }
    }

    /// Divides by the scales and rounds to int8.
    struct Quantize<C, E> {
        factors: [C; 2],
        element: PhantomData<E>,
    }

    impl<C, E> Quantize<C, E> {
        fn new(factors: [C; 2]) -> Self {
            Self {
                factors,
                element: PhantomData,
            }
        }
    }

    impl<S: Simd, C: Scales<S>, E: Lanes> Transform<S> for Quantize<C, E> {
        const SOURCE: usize = S::BLOCK * E::BYTES;
        const TARGET: usize = S::BLOCK;
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
            let levels = QuotientOf::<E>::of(simd, E::load(simd, source), factors);
            simd.store(simd.to_i8(levels), target, write);
        }
    }

    /// Multiplies by the scales and rounds to the state's type.
    struct Dequantize<C, E> {
        scales: C,
        element: PhantomData<E>,
    }

    impl<C, E> Dequantize<C, E> {
        fn new(scales: C) -> Self {
            Self {
                scales,
                element: PhantomData,
            }
        }
    }

    impl<S: Simd, C: Scales<S>, E: Lanes> Transform<S> for Dequantize<C, E> {
        const SOURCE: usize = S::BLOCK;
        const TARGET: usize = S::BLOCK * E::BYTES;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Bf16, Fp16, Fp32};

    #[test]
    fn only_the_largest_finite_amax_needs_the_smaller_scale() {
        fn smaller<E: Element>(amax: u32) -> bool {
            scale::<E>(amax) != E::Scale::round(E::to_f32(amax).max(SMALLEST_AMAX) / LEVELS)
        }
        assert!((0..Bf16::LARGEST).all(|amax| !smaller::<Bf16>(amax)));
        assert!(smaller::<Bf16>(Bf16::LARGEST));
        assert!((0..=Fp16::LARGEST).all(|amax| !smaller::<Fp16>(amax)));
        assert!((Fp32::LARGEST - 100_000..Fp32::LARGEST).all(|amax| !smaller::<Fp32>(amax)));
        assert!(smaller::<Fp32>(Fp32::LARGEST));
    }

    #[test]
    fn every_finite_channel_reloads_finite_and_within_half_a_step() {
        fn check<E: Element>(amax: u32) {
            let s = E::Scale::to_f32(scale::<E>(amax));
            let x = E::to_f32(amax);
            let back = E::to_f32(dequantize::<E>(quantize(x, s), s));
            assert!(s > 0.0 && back.is_finite(), "amax {amax:#x}");
            // Half a step, then rounding of the scale (2^-9 of 127 steps) and of the result.
            let bound = f64::from(s) * (0.5 + 127.0 / 256.0) + f64::from(x) / 256.0;
            assert!(
                (f64::from(x) - f64::from(back)).abs() <= bound,
                "amax {amax:#x}"
            );
        }
        (0..=Bf16::LARGEST).for_each(check::<Bf16>);
        (0..=Fp16::LARGEST).for_each(check::<Fp16>);
        (0..=Fp32::LARGEST).step_by(9973).for_each(check::<Fp32>);
        check::<Fp32>(Fp32::LARGEST);
    }

    #[test]
    fn storing_a_loaded_element_again_with_its_scale_is_exact() {
        fn check<E: Element>(amax: u32, x: u32) {
            let s = E::Scale::to_f32(scale::<E>(amax));
            let q = quantize(E::to_f32(x), s);
            let again = quantize(E::to_f32(dequantize::<E>(q, s)), s);
            assert_eq!(q, again, "amax {amax:#x}, x {x:#x}");
        }
        fn check_channel<E: Element>(amax: u32) {
            (0..=127)
                .for_each(|i| check::<E>(amax, E::round(E::to_f32(amax) * (i as f32 / LEVELS))));
            (amax.saturating_sub(40)..=amax).for_each(|x| check::<E>(amax, x));
        }
        (0..=Bf16::LARGEST).for_each(check_channel::<Bf16>);
        (0..=Fp16::LARGEST).for_each(check_channel::<Fp16>);
        (0..=Fp32::LARGEST)
            .step_by(99_991)
            .for_each(check_channel::<Fp32>);
        check_channel::<Fp32>(Fp32::LARGEST);
        // Every element of every channel of fp16 subnormals, whose steps are as coarse as the
        // scale's.
        (0..1024).for_each(|amax| (0..=amax).for_each(|x| check::<Fp16>(amax, x)));
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod vector_tests {
    use super::vector::for_oracle;
    use super::*;
    use crate::element::{Bf16, Fp16, Fp32};
    use crate::lanes::Lanes;
    use crate::quotient::QuotientOf;
    use crate::quotient::tests::compare;

    /// All elements of a channel whose largest has the bits `amax`, down to those that are far
    /// below half a step.
    fn compare_channel<E: Lanes>(amax: u32, binade: u32) {
        let scale = E::Scale::to_f32(scale::<E>(amax));
        let elements = (amax.saturating_sub(10 * binade)..=amax).map(E::to_f32);
        let pairs: Vec<_> = elements.flat_map(|x| [(x, scale), (-x, scale)]).collect();
        compare::<QuotientOf<E>>(&pairs);
    }

    /// Quotients repeat from binade to binade, but for those where scales stay the same: 1e-8 is
    /// 0x322c in bf16.
    #[test]
    fn a_quotient_by_two_terms_rounds_as_the_true_one_does_for_every_element_of_16_bits() {
        for amax in (0..0x0800)
            .chain(0x3c00..0x4000)
            .chain(0x7800..for_oracle::<Fp16>())
        {
            compare_channel::<Fp16>(amax, 1 << 10);
        }
        for amax in (0x3200..0x3300)
            .chain(0x3f80..0x4000)
            .chain(0x6700..for_oracle::<Bf16>())
        {
            compare_channel::<Bf16>(amax, 1 << 7);
        }
    }

    #[test]
    fn no_factor_of_two_terms_is_subnormal() {
        for scale in (0..for_oracle::<Bf16>()).map(|amax| Bf16::to_f32(scale::<Bf16>(amax))) {
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
        check::<Bf16>(0..for_oracle::<Bf16>());
        check::<Fp16>(0..for_oracle::<Fp16>());
        check::<Fp32>((0..for_oracle::<Fp32>()).step_by(9973));
    }

    #[test]
    fn heads_from_2_to_the_80_or_the_largest_value_on_go_to_the_oracle() {
        assert_eq!(for_oracle::<Bf16>(), 0x6780);
        assert_eq!(for_oracle::<Fp16>(), Fp16::LARGEST);
        assert_eq!(for_oracle::<Fp32>(), Fp32::LARGEST);
    }
}
