//! Picks the code for this CPU, the element type and the format of a spec.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use crate::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use crate::avx512::Avx512;
use crate::element::{Bf16, Element, Fp16, Fp32};
use crate::format::{Encoding, by_format};
#[cfg(target_arch = "x86_64")]
use crate::head;
use crate::spec::StateType;
use crate::tiles::Share;

/// Code that fulfils the contract; all do so with the same bits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Backend {
    /// One element at a time, on any CPU.
    Scalar,
    /// 256-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
        })
    }
}

impl Backend {
    /// The backends that this CPU runs, fastest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let vector = [Avx512::new().map(Self::Avx512), Avx2::new().map(Self::Avx2)];
        #[cfg(not(target_arch = "x86_64"))]
        let vector: [Option<Self>; 0] = [];
        vector.into_iter().flatten().chain([Self::Scalar]).collect()
    }

    /// The first of [`available`](Self::available).
    #[must_use]
    pub fn fastest() -> Self {
        Self::available()[0]
    }

    /// Encodes a share; calls `refuse` with each pair of which a head or a window does not reload finite.
    pub(crate) fn store(self, share: Share<'_>, refuse: impl Fn(usize)) {
        match share.spec().state {
            StateType::Bf16 => self.store_as::<Bf16>(share, refuse),
            StateType::Fp16 => self.store_as::<Fp16>(share, refuse),
            StateType::Fp32 => self.store_as::<Fp32>(share, refuse),
        }
    }

    /// Decodes a share.
    pub(crate) fn load(self, share: Share<'_>) {
        match share.spec().state {
            StateType::Bf16 => self.load_as::<Bf16>(share),
            StateType::Fp16 => self.load_as::<Fp16>(share),
            StateType::Fp32 => self.load_as::<Fp32>(share),
        }
    }

    fn store_as<E: Kernel>(self, share: Share<'_>, refuse: impl Fn(usize)) {
        let spec = share.spec();
        by_format!(spec.checkpoint.format, spec.state, Encoded => match self {
            Self::Scalar => store_scalar::<Encoded, E>(share, refuse),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(token) => token.run(head::Store::<Encoded, E, _>::new(share, refuse)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(token) => token.run(head::Store::<Encoded, E, _>::new(share, refuse)),
        });
    }

    fn load_as<E: Kernel>(self, share: Share<'_>) {
        let spec = share.spec();
        by_format!(spec.checkpoint.format, spec.state, Encoded => match self {
            Self::Scalar => load_scalar::<Encoded, E>(share),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(token) => token.run(head::Load::<Encoded, E>::new(share)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(token) => token.run(head::Load::<Encoded, E>::new(share)),
        });
    }
}

/// What an element type needs for every backend of this CPU.
#[cfg(target_arch = "x86_64")]
use crate::lanes::Lanes as Kernel;
#[cfg(not(target_arch = "x86_64"))]
use Element as Kernel;

fn store_scalar<F: Encoding, E: Element>(mut share: Share<'_>, refuse: impl Fn(usize)) {
    let layout = share.spec().layout;
    while let Some(item) = share.next_head() {
        let pair = item.pair;
        if !F::store::<E>(layout, item) {
            refuse(pair);
        }
    }
    share.store_windows(refuse);
}

fn load_scalar<F: Encoding, E: Element>(mut share: Share<'_>) {
    let layout = share.spec().layout;
    while let Some(item) = share.next_head() {
        F::load::<E>(layout, item);
    }
    share.load_windows();
}
