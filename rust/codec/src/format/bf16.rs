//! Every element rounded once to bf16.

use super::Encoding;
use crate::element::{self, Element};
use crate::spec::{Dtype, Layout, Row, StateType};
use crate::tiles::Item;

/// See the file.
pub(crate) struct Bf16;

impl Encoding for Bf16 {
    fn row(_: StateType, columns: usize) -> Row {
        Row {
            dtype: Dtype::Bf16,
            elements: columns,
        }
    }

    fn store<E: Element>(_: Layout, item: Item<'_>) -> bool {
        let mut finite = true;
        convert::<E, element::Bf16>(item, |bits| finite &= reloads_finite::<E>(bits));
        finite
    }

    fn load<E: Element>(_: Layout, item: Item<'_>) {
        convert::<element::Bf16, E>(item, |_| ());
    }

    #[cfg(target_arch = "x86_64")]
    type Vector<S: crate::lanes::Simd, E: crate::lanes::Lanes> = vector::Heads<S, E>;
}

/// Rounds every element and shows it to `see`.
fn convert<From: Element, To: Element>(mut item: Item<'_>, mut see: impl FnMut(u32)) {
    for row in 0..item.source.rows() {
        let source = item.source.row(row).chunks_exact(From::BYTES);
        let target = item.target.row(row).chunks_exact_mut(To::BYTES);
        for (x, y) in source.zip(target) {
            let bits = From::read(x);
            see(bits);
            To::write(To::round(From::to_f32(bits)), y);
        }
    }
}

/// Whether an element is finite when it comes back. Rounding keeps the order, so a head reloads
/// finite if its largest absolute value does.
fn reloads_finite<E: Element>(bits: u32) -> bool {
    let kept = element::Bf16::round(E::to_f32(bits));
    E::is_finite(E::round(element::Bf16::to_f32(kept)))
}

#[cfg(target_arch = "x86_64")]
mod vector {
    use std::marker::PhantomData;

    use super::reloads_finite;
    use crate::amax::Largest;
    use crate::element::{Bf16, Element};
    use crate::format::Vector;
    use crate::lanes::{Lanes, Simd, Write};
    use crate::spec::{Layout, Shape};
    use crate::tiles::{Item, Matrix};
    use crate::transforms::{Place, Rows, Transform};

    pub(crate) struct Heads<S, E> {
        rows: Rows<S>,
        element: PhantomData<E>,
    }

    impl<S: Simd, E: Lanes> Vector<S> for Heads<S, E> {
        #[inline(always)]
        fn new(rows: Rows<S>, _: Layout, _: Shape) -> Self {
            Self {
                rows,
                element: PhantomData,
            }
        }

        #[inline(always)]
        fn store(&mut self, item: Item<'_>, ahead: Option<Matrix<'_>>) -> bool {
            let mut round = IntoBf16(Largest::<S, E>::new(self.rows.simd));
            self.rows.map(&mut round, item, ahead);
            reloads_finite::<E>(round.0.bits(self.rows.simd))
        }

        #[inline(always)]
        fn load(&mut self, item: Item<'_>) {
            self.rows.map(&mut FromBf16::<E>(PhantomData), item, None);
        }
    }

    /// Rounds to bf16 and remembers the largest absolute values.
    struct IntoBf16<S: Simd, E>(Largest<S, E>);

    impl<S: Simd, E: Lanes> Transform<S> for IntoBf16<S, E> {
        const SOURCE: usize = S::BLOCK * E::BYTES;
        const TARGET: usize = S::BLOCK * Bf16::BYTES;

        type Needs = ();

        #[inline(always)]
        fn needs(&self, _: S, _: Place) {}

        #[inline(always)]
        fn block(&mut self, simd: S, (): (), source: &[u8], target: &mut [u8], write: Write) {
            for x in source.chunks_exact(S::BLOCK) {
                self.0.take(simd, simd.load(x));
            }
            Bf16::store(simd, E::load(simd, source), target, write);
        }
    }

    /// Rounds from bf16 to the state's type.
    struct FromBf16<E>(PhantomData<E>);

    impl<S: Simd, E: Lanes> Transform<S> for FromBf16<E> {
        const SOURCE: usize = S::BLOCK * Bf16::BYTES;
        const TARGET: usize = S::BLOCK * E::BYTES;

        type Needs = ();

        #[inline(always)]
        fn needs(&self, _: S, _: Place) {}

        #[inline(always)]
        fn block(&mut self, simd: S, (): (), source: &[u8], target: &mut [u8], write: Write) {
            E::store(simd, Bf16::load(simd, source), target, write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Bf16, Fp16, Fp32};

    #[test]
    fn the_largest_value_that_reloads_finite_is_known() {
        fn check<E: Element>(edge: u32) {
            assert!((edge - 100..=edge).all(reloads_finite::<E>));
            assert!((edge + 1..edge + 100).all(|bits| !reloads_finite::<E>(bits)));
        }
        check::<Bf16>(0x7f7f);
        check::<Fp16>(0x7bfb);
        check::<Fp32>(0x7f7f_7fff);
    }

    #[test]
    fn every_element_reloads_finite_if_a_larger_one_does() {
        fn check<E: Element>(magnitudes: impl Iterator<Item = u32>) {
            let finite: Vec<_> = magnitudes.map(reloads_finite::<E>).collect();
            assert!(finite.is_sorted_by(|smaller, larger| smaller >= larger));
        }
        check::<Bf16>(0..=0x7fff);
        check::<Fp16>(0..=0x7fff);
        check::<Fp32>((0..=0x7fff_ffff).step_by(9973));
    }
}
