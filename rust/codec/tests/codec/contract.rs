//! The contract, written a second time and swept over every channel.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use radixstate_codec::{Backend, Checkpoint, Layout, Pair, Plan, Pool, Shape, Spec, StateType};

const PAIR: [Pair; 1] = [Pair { source: 1, destination: 1 }];

/// One slot of one layer and head: the elements as bits, row by row.
#[derive(Debug)]
struct Head {
    state: StateType,
    layout: Layout,
    d_k: usize,
    d_v: usize,
    elements: Vec<u32>,
}

/// A stored and reloaded head: scales and elements as bits.
struct Stored {
    finite: bool,
    scale: Vec<u32>,
    q: Vec<i8>,
    reloaded: Vec<u32>,
}

impl Head {
    fn bytes(&self) -> Vec<u8> {
        let size = self.state.bytes();
        self.elements.iter().flat_map(|bits| bits.to_ne_bytes().into_iter().take(size)).collect()
    }

    /// Stores with a backend and loads with it.
    fn store(&self, backend: Backend) -> Stored {
        let bytes = self.bytes();
        let scale_size = self.state.scale().bytes();
        // Slot 0 is the padding sink: it stays as it is, filled with ones.
        let mut active = [vec![0xff; bytes.len()], bytes.clone()].concat();
        let mut q = vec![0xff; 2 * self.elements.len()];
        let mut scale = vec![0xff; 2 * self.d_k * scale_size];
        let plan = self.plan([&mut active, &mut q, &mut scale]).with_backend(backend);
        // SAFETY: the pools are the three buffers, which nobody else uses now.
        let finite = unsafe { plan.store(&PAIR, NonZeroUsize::MIN) }.expect("slot 1 is in range")[0];
        let mut reloaded = vec![0xff; 2 * bytes.len()];
        let plan = self.plan([&mut reloaded, &mut q, &mut scale]).with_backend(backend);
        // SAFETY: as above.
        unsafe { plan.load(&PAIR, NonZeroUsize::MIN) }.expect("slot 1 is in range");
        assert_eq!(active[bytes.len()..], bytes, "the source is as it was");
        for buffer in [&active, &q, &scale, &reloaded] {
            assert!(buffer[..buffer.len() / 2].iter().all(|&byte| byte == 0xff), "the padding sink is as it was");
        }
        Stored {
            finite,
            scale: elements(&scale[self.d_k * scale_size..], scale_size),
            q: q[self.elements.len()..].iter().map(|byte| byte.cast_signed()).collect(),
            reloaded: elements(&reloaded[bytes.len()..], self.state.bytes()),
        }
    }

    fn plan(&self, [active, q, scale]: [&mut Vec<u8>; 3]) -> Plan {
        let columns = if self.layout == Layout::KLast { self.d_k } else { self.d_v };
        let pool = |buffer: &mut Vec<u8>, row_stride| Pool {
            layers: vec![buffer.as_mut_ptr().expose_provenance()],
            slots: 2,
            slot_stride: buffer.len() / 2,
            head_stride: buffer.len() / 2,
            row_stride,
        };
        let spec = Spec {
            state: self.state,
            layout: self.layout,
            shape: Shape { heads: 1, d_k: self.d_k, d_v: self.d_v },
            active: pool(active, columns * self.state.bytes()),
            checkpoint: Checkpoint::Int8 { q: pool(q, columns), scale: pool(scale, 0) },
            windows: Vec::new(),
        };
        Plan::new(spec).expect("the spec is sound")
    }

    /// Indices of the elements of a channel.
    fn channel(&self, k: usize) -> Vec<usize> {
        match self.layout {
            Layout::KLast => (0..self.d_v).map(|v| v * self.d_k + k).collect(),
            Layout::VLast => (0..self.d_v).map(|v| k * self.d_v + v).collect(),
        }
    }

    /// Compares what every backend stores with the formula.
    fn check(&self) {
        for backend in Backend::available() {
            let stored = self.store(backend);
            let finite = (0..self.d_k).filter(|&k| !self.check_channel(k, &stored)).count() == 0;
            assert_eq!(stored.finite, finite, "{backend:?}");
        }
    }

    /// Compares one channel with the formula; says whether it is finite.
    fn check_channel(&self, k: usize, stored: &Stored) -> bool {
        let places = self.channel(k);
        let values: Vec<f32> = places.iter().map(|&i| value(self.state, self.elements[i])).collect();
        if values.iter().any(|x| !x.is_finite()) {
            assert_eq!(stored.scale[k], canonical_nan(self.state.scale()));
            for i in places {
                assert_eq!((stored.q[i], stored.reloaded[i]), (0, canonical_nan(self.state)));
            }
            return false;
        }
        let amax = values.iter().fold(0.0_f32, |amax, x| amax.max(x.abs()));
        let mut bits = nearest(self.state.scale(), amax.max(1e-8) / 127.0);
        if amax == largest(self.state) && self.state != StateType::Fp16 {
            bits -= 1;
        }
        assert_eq!(stored.scale[k], bits, "amax {amax:e}");
        let scale = value(self.state.scale(), bits);
        for (i, x) in places.into_iter().zip(values) {
            let q = (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
            assert_eq!(stored.q[i], q, "{x:e} / {scale:e}");
            assert_eq!(stored.reloaded[i], nearest(self.state, f32::from(q) * scale), "{q} * {scale:e}");
            assert!(value(self.state, stored.reloaded[i]).is_finite());
        }
        true
    }
}

fn elements(bytes: &[u8], size: usize) -> Vec<u32> {
    let widen = |element: &[u8]| {
        let mut wide = [0; 4];
        wide[..size].copy_from_slice(element);
        u32::from_le_bytes(wide)
    };
    bytes.chunks_exact(size).map(widen).collect()
}

fn canonical_nan(state: StateType) -> u32 {
    match state {
        StateType::Bf16 => 0x7fc0,
        StateType::Fp16 => 0x7e00,
        StateType::Fp32 => 0x7fc0_0000,
    }
}

fn largest(state: StateType) -> f32 {
    value(
        state,
        match state {
            StateType::Bf16 => 0x7f7f,
            StateType::Fp16 => 0x7bff,
            StateType::Fp32 => 0x7f7f_ffff,
        },
    )
}

/// The number with these bits, from the definition of the format.
fn value(state: StateType, bits: u32) -> f32 {
    let fraction_bits = match state {
        StateType::Bf16 => 7,
        StateType::Fp16 => 10,
        StateType::Fp32 => return f32::from_bits(bits),
    };
    let (bias, top) = if state == StateType::Fp16 { (15, 31) } else { (127, 255) };
    let exponent = (bits & 0x7fff) >> fraction_bits;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    let magnitude = match exponent {
        0 => fraction * 2_f64.powi(1 - bias),
        e if e == top && fraction == 0.0 => f64::INFINITY,
        e if e == top => f64::NAN,
        e => (1.0 + fraction) * 2_f64.powi(e as i32 - bias),
    };
    (if bits & 0x8000 == 0 { magnitude } else { -magnitude }) as f32
}

/// The nearest bits, the even of two: by bisection over all that the format has.
fn nearest(state: StateType, x: f32) -> u32 {
    if state == StateType::Fp32 {
        return x.to_bits();
    }
    if x.is_infinite() {
        return if state == StateType::Bf16 { 0x7f80 } else { 0x7c00 } | if x < 0.0 { 0x8000 } else { 0 };
    }
    let magnitude = f64::from(x.abs());
    let (mut low, mut high) = (0, 0x7fff);
    while high - low > 1 {
        let middle = u32::midpoint(low, high);
        // NaN compares as false and so counts as too large.
        if f64::from(value(state, middle)) <= magnitude { low = middle } else { high = middle }
    }
    let below = f64::from(value(state, low));
    // Where the format ends, Inf stands for the next step.
    let above = match f64::from(value(state, low + 1)) {
        next if next.is_finite() => next,
        _ => 2.0 * below - f64::from(value(state, low - 1)),
    };
    let up = above - magnitude < magnitude - below || (above - magnitude == magnitude - below && low & 1 == 1);
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    sign | if up { low + 1 } else { low }
}

/// Every one of `patterns` as the largest element of its channel, or as the only one that is not zero.
fn sweep(state: StateType, patterns: &[u32]) {
    for layout in [Layout::KLast, Layout::VLast] {
        let d_k = patterns.len();
        let halved = |&bits: &u32| nearest(state, value(state, bits) / -3.0);
        let companions: Vec<u32> =
            patterns.iter().map(|bits| if value(state, *bits).is_finite() { halved(bits) } else { 0 }).collect();
        let elements = match layout {
            Layout::KLast => [patterns, &companions].concat(),
            Layout::VLast => patterns.iter().zip(&companions).flat_map(|(&x, &y)| [x, y]).collect(),
        };
        Head { state, layout, d_k, d_v: 2, elements }.check();
    }
}

/// In one head with Inf and NaN, and without: the two may take different paths.
fn sweep_sixteen_bits(state: StateType) {
    let all: Vec<u32> = (0..=0xffff).collect();
    let usual: Vec<u32> = all.iter().copied().filter(|&bits| value(state, bits).abs() < largest(state)).collect();
    sweep(state, &all);
    sweep(state, &usual);
}

#[test]
fn every_bf16_channel_follows_the_formula() {
    sweep_sixteen_bits(StateType::Bf16);
}

#[test]
fn every_fp16_channel_follows_the_formula() {
    sweep_sixteen_bits(StateType::Fp16);
}

#[test]
fn fp32_channels_follow_the_formula() {
    let spread = |top: u32| (0..top).step_by(65_521).flat_map(|bits| [bits, bits | 1 << 31]);
    sweep(StateType::Fp32, &spread(0x7f7f_ffff).collect::<Vec<_>>());
    sweep(StateType::Fp32, &spread(0x7fff_ffff).chain([0x7f7f_ffff, 0xff7f_ffff]).collect::<Vec<_>>());
}

#[test]
fn a_load_takes_any_scale() {
    for (backend, state) in Backend::available()
        .into_iter()
        .flat_map(|backend| [StateType::Bf16, StateType::Fp16, StateType::Fp32].map(|state| (backend, state)))
    {
        let step = if state == StateType::Bf16 { 13 } else { 1_048_573 };
        let top = if state == StateType::Bf16 { 0xffff } else { u32::MAX };
        let inf = if state == StateType::Bf16 { 0x7f80 } else { 0x7f80_0000 };
        let scales: Vec<u32> = (0..=top).step_by(step).chain([1, inf - 1, inf, inf + 1, top]).collect();
        let reloaded = load_each(state, backend, &scales);
        for (scale, row) in scales.iter().zip(reloaded.chunks_exact(256)) {
            for (q, &bits) in (-128_i8..=127).zip(row) {
                let product = f32::from(q) * value(state.scale(), *scale);
                let expected = if product.is_nan() { canonical_nan(state) } else { nearest(state, product) };
                assert_eq!(bits, expected, "{backend:?} {state:?}: {q} * {scale:#x}");
            }
        }
    }
}

/// Rows of every q, each with its scale.
fn load_each(state: StateType, backend: Backend, scales: &[u32]) -> Vec<u32> {
    let (d_k, scale_size) = (scales.len(), state.scale().bytes());
    let head = Head { state, layout: Layout::VLast, d_k, d_v: 256, elements: vec![0; 256 * d_k] };
    let row: Vec<u8> = (-128_i8..=127).map(i8::cast_unsigned).collect();
    let mut q = row.repeat(2 * d_k);
    let mut scale: Vec<u8> =
        scales.iter().chain(scales).flat_map(|bits| bits.to_ne_bytes().into_iter().take(scale_size)).collect();
    let mut active = vec![0; 2 * 256 * d_k * state.bytes()];
    let plan = head.plan([&mut active, &mut q, &mut scale]).with_backend(backend);
    // SAFETY: the pools are the three buffers, which nobody else uses now.
    unsafe { plan.load(&PAIR, NonZeroUsize::MIN) }.expect("slot 1 is in range");
    elements(&active[active.len() / 2..], state.bytes())
}

fn finite_heads() -> impl Strategy<Value = Head> {
    let kind = (
        prop::sample::select(&[StateType::Bf16, StateType::Fp16, StateType::Fp32][..]),
        prop::sample::select(&[Layout::KLast, Layout::VLast][..]),
        1..70_usize,
        1..70_usize,
    );
    kind.prop_flat_map(|(state, layout, d_k, d_v)| {
        prop::collection::vec(-100.0_f32..100.0, d_k * d_v).prop_map(move |values| {
            let elements = values.into_iter().map(|x| nearest(state, x)).collect();
            Head { state, layout, d_k, d_v, elements }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_round_trip_stays_within_half_a_step(head in finite_heads()) {
        let stored = head.store(Backend::fastest());
        for k in 0..head.d_k {
            let scale = value(head.state.scale(), stored.scale[k]);
            for i in head.channel(k) {
                let (x, y) = (value(head.state, head.elements[i]), value(head.state, stored.reloaded[i]));
                // Beyond half a step: one rounding to the state's type.
                let rounding = if head.state == StateType::Fp32 { 1e-6 } else { y.abs() / 256.0 };
                prop_assert!((x - y).abs() <= scale * 0.500_001 + rounding, "{x} came back as {y}, scale {scale}");
            }
        }
        head.check();
    }
}
