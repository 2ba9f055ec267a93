//! Drives the heads of a share through a format.

use std::marker::PhantomData;

use crate::format::{Encoding, Vector};
use crate::lanes::{Lanes, Simd, Task};
use crate::tiles::Share;
use crate::transforms::Rows;

/// The vector code of a format.
type Heads<F, S, E> = <F as Encoding>::Vector<S, E>;

/// Encodes a share in format `F`.
pub(crate) struct Store<'a, F, E, R> {
    share: Share<'a>,
    refuse: R,
    types: PhantomData<(F, E)>,
}

impl<'a, F: Encoding, E: Lanes, R: Fn(usize)> Store<'a, F, E, R> {
    pub(crate) fn new(share: Share<'a>, refuse: R) -> Self {
        Self {
            share,
            refuse,
            types: PhantomData,
        }
    }
}

impl<F: Encoding, E: Lanes, R: Fn(usize)> Task for Store<'_, F, E, R> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut heads = heads::<F, S, E>(simd, &self.share);
        while let Some(item) = self.share.next_head() {
            let pair = item.pair;
            if !heads.store(item, self.share.ahead()) {
                (self.refuse)(pair);
            }
        }
        self.share.store_windows(self.refuse);
    }
}

/// Decodes a share of format `F`.
pub(crate) struct Load<'a, F, E> {
    share: Share<'a>,
    types: PhantomData<(F, E)>,
}

impl<'a, F: Encoding, E: Lanes> Load<'a, F, E> {
    pub(crate) fn new(share: Share<'a>) -> Self {
        Self {
            share,
            types: PhantomData,
        }
    }
}

impl<F: Encoding, E: Lanes> Task for Load<'_, F, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut heads = heads::<F, S, E>(simd, &self.share);
        while let Some(item) = self.share.next_head() {
            heads.load(item);
        }
        self.share.load_windows();
    }
}

#[inline(always)]
fn heads<F: Encoding, S: Simd, E: Lanes>(simd: S, share: &Share<'_>) -> Heads<F, S, E> {
    let spec = share.spec();
    Vector::new(Rows::new(simd, share), spec.layout, spec.shape)
}
