//! The contract in whole registers, for any instruction set that implements [`Simd`].
//!
//! Works on blocks: one register of bytes holds the q of one block, two registers its 16-bit elements, four its
//! fp32 elements. The rest of a row is padded to a block. A head with a largest finite, Inf or NaN element goes to
//! the oracle, so that no edge rule is written twice.

use std::marker::PhantomData;

use crate::backend::copy_windows;
use crate::element::{Bf16, Element, Fp16, Fp32, SMALLEST_AMAX, STEPS};
use crate::raw::{Item, Share, Tile};
use crate::scalar;
use crate::spec::{Format, Layout, Spec};

/// Bytes of the largest block: 64 elements of four bytes.
const MAX_BLOCK_BYTES: usize = 256;

/// Transfers that write this many bytes or more bypass the cache: they would evict everything else from it.
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
    /// Rounds to nearest even and clamps to +-127. Every value is within the range of i32.
    fn to_i8(self, x: [Self::F32; 4]) -> Self::Bits;
    /// Rounds to nearest even; NaN becomes the canonical one, here and below.
    fn to_bf16(self, x: [Self::F32; 4]) -> [Self::Bits; 2];
    fn to_fp16(self, x: [Self::F32; 4]) -> [Self::Bits; 2];
    fn to_fp32(self, x: [Self::F32; 4]) -> [Self::Bits; 4];
}

/// An element type in registers.
pub(crate) trait Lanes: Element<Scale = Self::ScaleLanes> {
    type ScaleLanes: Lanes;
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
    ($element:ty, $scale:ty, $largest_in_bf16:literal, $load:ident, $to:ident, $max_abs:ident, $reduce:ident) => {
        impl Lanes for $element {
            type ScaleLanes = $scale;
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

lanes!(Bf16, Bf16, 0x7f7f, load_bf16, to_bf16, max_abs16, reduce16);
lanes!(Fp16, Fp32, 0x7bfb, load_fp16, to_fp16, max_abs16, reduce16);
lanes!(Fp32, Fp32, 0x7f7f_7fff, load_fp32, to_fp32, max_abs32, reduce32);

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
        Self { share, refuse, element: PhantomData }
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
        Self { share, element: PhantomData }
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

/// Encodes and decodes heads of one spec. The buffers have one entry per channel, padded to a block.
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
    /// One over those, when a state is stored.
    reciprocal: Vec<u8>,
    element: PhantomData<E>,
}

impl<'a, S: Simd, E: Lanes> Head<'a, S, E> {
    #[inline(always)]
    fn new(simd: S, share: &Share<'a>) -> Self {
        let spec = share.spec();
        let channels = spec.shape.d_k.next_multiple_of(S::BLOCK);
        let write = if share.transfer_bytes() < STREAM_BYTES { Write::Cached } else { Write::Streamed };
        Self {
            simd,
            spec,
            write,
            amax: vec![0; channels * E::BYTES],
            encoded: vec![0; channels * E::Scale::BYTES],
            scale: vec![0; channels * Fp32::BYTES],
            reciprocal: vec![0; channels * Fp32::BYTES],
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
        let mut step = CopyBits::<S, E> { top: self.simd.zero(), element: PhantomData };
        self.map_rows(&mut step, item, ahead);
        E::reduce(self.simd, step.top) <= E::LARGEST
    }

    #[inline(always)]
    fn load_native(&self, item: Item<'_>) {
        let mut step = CopyBits::<S, E> { top: self.simd.zero(), element: PhantomData };
        self.map_rows(&mut step, item, None);
    }

    #[inline(always)]
    fn store_bf16(&self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        let mut step = IntoBf16::<S, E> { top: self.simd.zero(), element: PhantomData };
        self.map_rows(&mut step, item, ahead);
        E::reduce(self.simd, step.top) <= E::LARGEST_IN_BF16
    }

    #[inline(always)]
    fn load_bf16(&self, item: Item<'_>) {
        self.map_rows(&mut FromBf16::<E>(PhantomData), item, None);
    }

    #[inline(always)]
    fn store_int8(&mut self, item: Item<'_>, ahead: Option<Tile<'_>>) -> bool {
        self.find_amax(item.source);
        if fold_row::<S, E>(self.simd, &self.amax) >= E::LARGEST {
            return scalar::store::<E>(self.spec, item);
        }
        self.find_scales();
        item.target_scale.copy_from_slice(&self.encoded[..item.target_scale.len()]);
        match self.spec.layout {
            Layout::KLast => self.quantize([&self.scale, &self.reciprocal].map(|each| ByColumn(each)), item, ahead),
            Layout::VLast => self.quantize([&self.scale, &self.reciprocal].map(|each| ByRow(each)), item, ahead),
        }
        true
    }

    #[inline(always)]
    fn load_int8(&mut self, item: Item<'_>) {
        self.encoded[..item.source_scale.len()].copy_from_slice(item.source_scale);
        self.decode_scales();
        match self.spec.layout {
            Layout::KLast => self.map_rows(&mut Dequantize::<_, E>::new(ByColumn(&self.scale)), item, None),
            Layout::VLast => self.map_rows(&mut Dequantize::<_, E>::new(ByRow(&self.scale)), item, None),
        }
    }

    #[inline(always)]
    fn quantize<C: Scales<S>>(&self, [scales, reciprocals]: [C; 2], item: Item<'_>, ahead: Option<Tile<'_>>) {
        let mut step = Quantize::<C, E> { scales, reciprocals, element: PhantomData };
        self.map_rows(&mut step, item, ahead);
    }

    /// Does a step for every block of every row, and fetches what comes after this item.
    #[inline(always)]
    fn map_rows(&self, step: &mut impl Step<S>, mut item: Item<'_>, ahead: Option<Tile<'_>>) {
        for row in 0..item.source.rows() {
            map_row(self.simd, step, row, item.source.row(row), item.target.row(row), self.write);
            if let Some(tile) = ahead {
                self.simd.prefetch(tile.row(row));
            }
        }
    }

    #[inline(always)]
    fn find_amax(&mut self, tile: Tile<'_>) {
        match self.spec.layout {
            Layout::KLast => {
                self.amax.fill(0);
                let last = tile.rows() - 1;
                for row in (0..=last).step_by(4) {
                    let rows = each!(i => tile.row(last.min(row + i)));
                    raise::<S, E>(self.simd, &mut self.amax, rows);
                }
            }
            Layout::VLast => {
                for (row, amax) in (0..tile.rows()).zip(self.amax.chunks_exact_mut(E::BYTES)) {
                    E::write(fold_row::<S, E>(self.simd, tile.row(row)), amax);
                }
            }
        }
    }

    /// From `amax`, all below the largest finite value, to `encoded`, `scale` and `reciprocal`.
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
        let scale = self.scale.chunks_exact(S::BLOCK * Fp32::BYTES);
        for (scale, reciprocal) in scale.zip(self.reciprocal.chunks_exact_mut(S::BLOCK * Fp32::BYTES)) {
            let value = simd.div(simd.splat(1.0), simd.load_fp32(scale));
            Fp32::store(simd, value, reciprocal, Write::Cached);
        }
    }

    /// From `encoded` to `scale`.
    #[inline(always)]
    fn decode_scales(&mut self) {
        let encoded = self.encoded.chunks_exact(S::BLOCK * E::Scale::BYTES);
        let scale = self.scale.chunks_exact_mut(S::BLOCK * Fp32::BYTES);
        for (encoded, scale) in encoded.zip(scale) {
            Fp32::store(self.simd, E::Scale::load(self.simd, encoded), scale, Write::Cached);
        }
    }
}

/// What happens to one block.
trait Step<S: Simd> {
    /// Bytes of an element that is read.
    const SOURCE_BYTES: usize;
    /// Bytes of an element that is written.
    const TARGET_BYTES: usize;

    fn block(&mut self, simd: S, place: Place, source: &[u8], target: &mut [u8], write: Write);
}

/// A row, and a block of it.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    block: usize,
}

/// Copies bits and remembers the largest absolute values.
struct CopyBits<S: Simd, E> {
    top: S::Bits,
    element: PhantomData<E>,
}

impl<S: Simd, E: Lanes> Step<S> for CopyBits<S, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = E::BYTES;

    #[inline(always)]
    fn block(&mut self, simd: S, _: Place, source: &[u8], target: &mut [u8], write: Write) {
        for (x, y) in source.chunks_exact(S::BLOCK).zip(target.chunks_exact_mut(S::BLOCK)) {
            let bits = simd.load(x);
            self.top = E::max_abs(simd, self.top, bits);
            simd.store(bits, y, write);
        }
    }
}

/// Rounds to bf16 and remembers the largest absolute values.
struct IntoBf16<S: Simd, E> {
    top: S::Bits,
    element: PhantomData<E>,
}

impl<S: Simd, E: Lanes> Step<S> for IntoBf16<S, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = Bf16::BYTES;

    #[inline(always)]
    fn block(&mut self, simd: S, _: Place, source: &[u8], target: &mut [u8], write: Write) {
        for x in source.chunks_exact(S::BLOCK) {
            self.top = E::max_abs(simd, self.top, simd.load(x));
        }
        Bf16::store(simd, E::load(simd, source), target, write);
    }
}

/// Rounds from bf16 to the state's type.
struct FromBf16<E>(PhantomData<E>);

impl<S: Simd, E: Lanes> Step<S> for FromBf16<E> {
    const SOURCE_BYTES: usize = Bf16::BYTES;
    const TARGET_BYTES: usize = E::BYTES;

    #[inline(always)]
    fn block(&mut self, simd: S, _: Place, source: &[u8], target: &mut [u8], write: Write) {
        E::store(simd, Bf16::load(simd, source), target, write);
    }
}

/// The fp32 scales of a block.
trait Scales<S: Simd> {
    fn at(&self, simd: S, place: Place) -> [S::F32; 4];
}

/// Columns are channels.
struct ByColumn<'a>(&'a [u8]);

impl<S: Simd> Scales<S> for ByColumn<'_> {
    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bytes = S::BLOCK * Fp32::BYTES;
        simd.load_fp32(&self.0[place.block * bytes..][..bytes])
    }
}

/// Rows are channels.
struct ByRow<'a>(&'a [u8]);

impl<S: Simd> Scales<S> for ByRow<'_> {
    #[inline(always)]
    fn at(&self, simd: S, place: Place) -> [S::F32; 4] {
        let bits = Fp32::read(&self.0[place.row * Fp32::BYTES..][..Fp32::BYTES]);
        simd.splat(f32::from_bits(bits))
    }
}

/// Divides by the scales and rounds to int8.
struct Quantize<C, E> {
    scales: C,
    reciprocals: C,
    element: PhantomData<E>,
}

impl<S: Simd, C: Scales<S>, E: Lanes> Step<S> for Quantize<C, E> {
    const SOURCE_BYTES: usize = E::BYTES;
    const TARGET_BYTES: usize = 1;

    #[inline(always)]
    fn block(&mut self, simd: S, place: Place, source: &[u8], target: &mut [u8], write: Write) {
        let (scale, reciprocal) = (self.scales.at(simd, place), self.reciprocals.at(simd, place));
        let steps = quotient(simd, E::load(simd, source), scale, reciprocal);
        simd.store(simd.to_i8(steps), target, write);
    }
}

/// `x / scale` by a multiplication and one step of refinement, in a third of the time of a division: that would be
/// what a store waits for.
///
/// It rounds to the integer that the true quotient rounds to. The remainder is exact, so the refined quotient
/// is off by less than 2^-23 of its last place before it is rounded. Only near a tie between two integers could that
/// show, and there the tests go over every quotient that is so close to where rounding changes.
#[inline(always)]
fn quotient<S: Simd>(simd: S, x: [S::F32; 4], scale: [S::F32; 4], reciprocal: [S::F32; 4]) -> [S::F32; 4] {
    let estimate = simd.mul(x, reciprocal);
    simd.mul_add(simd.sub_mul(x, estimate, scale), reciprocal, estimate)
}

/// Multiplies by the scales and rounds to the state's type.
struct Dequantize<C, E> {
    scales: C,
    element: PhantomData<E>,
}

impl<C, E> Dequantize<C, E> {
    fn new(scales: C) -> Self {
        Self { scales, element: PhantomData }
    }
}

impl<S: Simd, C: Scales<S>, E: Lanes> Step<S> for Dequantize<C, E> {
    const SOURCE_BYTES: usize = 1;
    const TARGET_BYTES: usize = E::BYTES;

    #[inline(always)]
    fn block(&mut self, simd: S, place: Place, source: &[u8], target: &mut [u8], write: Write) {
        let value = simd.mul(simd.load_i8(source), self.scales.at(simd, place));
        E::store(simd, value, target, write);
    }
}

/// Does a step for every block of a row; the last is padded with zeros if it is not whole.
#[inline(always)]
fn map_row<S: Simd, T: Step<S>>(simd: S, step: &mut T, row: usize, source: &[u8], target: &mut [u8], write: Write) {
    let (source_block, target_block) = (S::BLOCK * T::SOURCE_BYTES, S::BLOCK * T::TARGET_BYTES);
    let mut sources = source.chunks_exact(source_block);
    let mut targets = target.chunks_exact_mut(target_block);
    let mut place = Place { row, block: 0 };
    for (x, y) in sources.by_ref().zip(targets.by_ref()) {
        step.block(simd, place, x, y, write);
        place.block += 1;
    }
    let (x, y) = (sources.remainder(), targets.into_remainder());
    if !x.is_empty() {
        let (padded, mut result) = (padded(x), [0; MAX_BLOCK_BYTES]);
        step.block(simd, place, &padded[..source_block], &mut result[..target_block], Write::Cached);
        y.copy_from_slice(&result[..y.len()]);
    }
}

/// The bits of the largest absolute value of a row.
#[inline(always)]
fn fold_row<S: Simd, E: Lanes>(simd: S, row: &[u8]) -> u32 {
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

/// Raises `amax` to the absolute values of four rows. One row at a time would wait for the last store to `amax`.
#[inline(always)]
fn raise<S: Simd, E: Lanes>(simd: S, amax: &mut [u8], rows: [&[u8]; 4]) {
    let whole = rows[0].len() / S::BLOCK * S::BLOCK;
    for (at, top) in (0..whole).step_by(S::BLOCK).zip(amax.chunks_exact_mut(S::BLOCK)) {
        let x = each!(i => simd.load(&rows[i][at..][..S::BLOCK]));
        simd.store(max_abs4::<S, E>(simd, simd.load(top), x), top, Write::Cached);
    }
    if whole < rows[0].len() {
        let top = &mut amax[whole..][..S::BLOCK];
        let x = each!(i => simd.load(&padded(&rows[i][whole..])[..S::BLOCK]));
        simd.store(max_abs4::<S, E>(simd, simd.load(top), x), top, Write::Cached);
    }
}

#[inline(always)]
fn max_abs4<S: Simd, E: Lanes>(simd: S, top: S::Bits, [a, b, c, d]: [S::Bits; 4]) -> S::Bits {
    let top = E::max_abs(simd, E::max_abs(simd, top, a), b);
    E::max_abs(simd, E::max_abs(simd, top, c), d)
}

/// A part of a block, and zeros.
#[inline(always)]
fn padded(part: &[u8]) -> [u8; MAX_BLOCK_BYTES] {
    let mut block = [0; MAX_BLOCK_BYTES];
    block[..part.len()].copy_from_slice(part);
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::quantize;
    use crate::{Avx2, Avx512};

    /// Quotients x / s that are no further from the middle between a tie `k + 0.5` and a neighbour of it than the
    /// refined quotient may be off: x * 2^c = a * s + n, where a / 2^b is the middle and n is small. Both x and s have
    /// 24 bits, so that there is at most one s for each n.
    fn close_to_a_tie() -> Vec<(f32, f32)> {
        let mut found = Vec::new();
        for tie in (0..127).map(|k| k as f32 + 0.5) {
            for neighbour in [tie.next_down(), tie.next_up()] {
                let (odd, b) = odd_and_exponent(f64::midpoint(f64::from(tie), f64::from(neighbour)));
                for (n, c) in (-4..=4).flat_map(|n| (20..=30).map(move |c| (n, c))) {
                    let s = inverse_of_odd(odd).wrapping_mul(0u64.wrapping_add_signed(-n)) & ((1 << c) - 1);
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
        (0..).map(|b| (value * f64::from(b).exp2(), b)).find(|(scaled, _)| scaled.fract() == 0.0).map_or_else(
            || unreachable!("every double is a whole number over a power of two"),
            |(scaled, b)| (scaled as u64, b),
        )
    }

    /// By Newton's method, each step of which doubles the bits that are right.
    fn inverse_of_odd(odd: u64) -> u64 {
        (0..5).fold(odd, |inverse, _| inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse))))
    }

    /// Compares quotients with true division.
    struct Compare<'a>(&'a [(f32, f32)]);

    impl Task for Compare<'_> {
        fn run<S: Simd>(self, simd: S) {
            for pairs in self.0.chunks(S::BLOCK) {
                let block = |pick: fn(&(f32, f32)) -> f32| -> Vec<u8> {
                    let padding = std::iter::repeat(1.0).take(S::BLOCK - pairs.len());
                    pairs.iter().map(pick).chain(padding).flat_map(f32::to_ne_bytes).collect()
                };
                let [x, scale] = [block(|pair| pair.0), block(|pair| pair.1)].map(|bytes| simd.load_fp32(&bytes));
                let mut codes = vec![0; S::BLOCK];
                let reciprocal = simd.div(simd.splat(1.0), scale);
                simd.store(simd.to_i8(quotient(simd, x, scale, reciprocal)), &mut codes, Write::Cached);
                for (&(x, scale), &code) in pairs.iter().zip(&codes) {
                    assert_eq!(code.cast_signed(), quantize(x, scale), "{x:e} / {scale:e}");
                }
            }
        }
    }

    #[test]
    fn a_refined_quotient_rounds_as_the_true_one_does_next_to_every_tie() {
        let critical = close_to_a_tie();
        assert!(critical.len() > 100, "{} quotients", critical.len());
        let shifted = |exponent: i32| {
            let factor = f32::exp2(exponent as f32);
            critical.iter().map(move |&(x, scale)| (x * factor, scale * factor))
        };
        // From the smallest scale to the largest, both signs.
        let pairs: Vec<_> = [0, -57, 90].into_iter().flat_map(shifted).flat_map(|(x, s)| [(x, s), (-x, s)]).collect();
        if let Some(token) = Avx512::new() {
            token.run(Compare(&pairs));
        }
        if let Some(token) = Avx2::new() {
            token.run(Compare(&pairs));
        }
    }

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
