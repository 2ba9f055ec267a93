//! The state's own type, bit for bit.

use super::Encoding;
use crate::element::Element;
use crate::spec::{Layout, Row, StateType};
use crate::tiles::Item;

/// See the file.
pub(crate) struct Native;

impl Encoding for Native {
    fn row(state: StateType, columns: usize) -> Row {
        Row {
            dtype: state.into(),
            elements: columns,
        }
    }

    fn store<E: Element>(_: Layout, item: Item<'_>) -> bool {
        let source = item.source;
        copy(item);
        (0..source.rows())
            .flat_map(|row| source.row(row).chunks_exact(E::BYTES))
            .all(|x| E::is_finite(E::read(x)))
    }

    fn load<E: Element>(_: Layout, item: Item<'_>) {
        copy(item);
    }

    #[cfg(target_arch = "x86_64")]
    type Vector<S: crate::lanes::Simd, E: crate::lanes::Lanes> = vector::Heads<S, E>;
}

fn copy(mut item: Item<'_>) {
    for row in 0..item.source.rows() {
        item.target.row(row).copy_from_slice(item.source.row(row));
    }
}

#[cfg(target_arch = "x86_64")]
mod vector {
    use std::marker::PhantomData;

    use crate::amax::Largest;
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
            let mut copy = CopyBits(Largest::<S, E>::new(self.rows.simd));
            self.rows.map(&mut copy, item, ahead);
            E::is_finite(copy.0.bits(self.rows.simd))
        }

        #[inline(always)]
        fn load(&mut self, item: Item<'_>) {
            let mut copy = CopyBits(Largest::<S, E>::new(self.rows.simd));
            self.rows.map(&mut copy, item, None);
        }
    }

    /// Copies bits and remembers the largest absolute values.
    struct CopyBits<S: Simd, E>(Largest<S, E>);

    impl<S: Simd, E: Lanes> Transform<S> for CopyBits<S, E> {
        const SOURCE: usize = S::BLOCK * E::BYTES;
        const TARGET: usize = S::BLOCK * E::BYTES;

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
                self.0.take(simd, bits);
                simd.store(bits, y, write);
            }
        }
    }
}
