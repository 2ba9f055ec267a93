//! The int8 state codec on the CPU.
//!
//! # Contract
//!
//! A state of one layer, slot and head is a matrix `[d_v, d_k]` ([`Layout::KLast`]) or `[d_k, d_v]`
//! ([`Layout::VLast`]). In the int8 format each k-channel has one scale, reduced over d_v:
//!
//! ```text
//! amax  = max over d_v of |x|                                    NaN above Inf above every finite value
//! scale = round to the scale type of max(amax, 1e-8) / 127
//! q     = clamp(round-half-even(float(x) / float(scale)), -127, 127)
//! load  = round to the state type of float(q) * float(scale)
//! ```
//!
//! | state | scale | |
//! |---|---|---|
//! | bf16 | bf16 | |
//! | fp16 | fp32 | an fp16 scale would be zero for small channels |
//! | fp32 | fp32 | |
//!
//! - Where 127 steps of the rounded scale would reload as Inf (only when amax is the largest finite
//!   value), the scale is one step smaller.
//! - A channel with Inf or NaN gets the canonical NaN as its scale and zero for every q.
//! - [`Format::Native`] copies the state's own type bit for bit. [`Format::Bf16`] rounds once to
//!   nearest even.
//! - Whatever the format, a store says of each pair whether its state reloads finite. One that does
//!   not, because it holds Inf or NaN or because rounding it to bf16 overflows, must not become a
//!   checkpoint. Its windows belong to it, those whose element type is known.
//! - A load is total: any bits are accepted. Every NaN it computes is the canonical one.
//! - Windows are copied as bytes.
//!
//! The scalar code is the oracle; every SIMD backend equals it bit for bit on every input, with any
//! number of threads.
//!
//! # Use
//!
//! A [`Spec`] describes two pools by address. [`Plan::new`] checks it once; [`Plan::store`] and
//! [`Plan::load`] then move any number of (source slot, destination slot) pairs, all layers and
//! heads of each.

#[cfg(target_arch = "x86_64")]
mod amax;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod backend;
mod element;
mod error;
mod format;
#[cfg(target_arch = "x86_64")]
mod head;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod overlap;
mod plan;
#[cfg(target_arch = "x86_64")]
mod quotient;
mod spec;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod transforms;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use backend::Backend;
pub use error::{PairError, Side, SpecError};
pub use plan::Plan;
pub use spec::{
    Checkpoint, Dtype, Format, Layout, Pair, Row, Shape, Spec, StateType, Strided, Window,
};
