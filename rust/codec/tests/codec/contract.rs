//! Every channel, or a sweep of them, against the contract.

use std::num::NonZeroUsize;

use crate::head::{Head, PAIR, canonical_nan, elements, largest, nearest, value};
use proptest::prelude::*;
use radixstate_codec::{
    Backend, Checkpoint, Format, Layout, Pair, Plan, Shape, Spec, StateType, Strided, Window,
};

/// Every one of `patterns` as the largest element of its channel, or as the only one that is not
/// zero.
fn sweep(state: StateType, patterns: &[u32]) {
    for layout in [Layout::KLast, Layout::VLast] {
        let d_k = patterns.len();
        let halved = |&bits: &u32| nearest(state, value(state, bits) / -3.0);
        let companions: Vec<u32> = patterns
            .iter()
            .map(|bits| {
                if value(state, *bits).is_finite() {
                    halved(bits)
                } else {
                    0
                }
            })
            .collect();
        let elements = match layout {
            Layout::KLast => [patterns, &companions].concat(),
            Layout::VLast => patterns
                .iter()
                .zip(&companions)
                .flat_map(|(&x, &y)| [x, y])
                .collect(),
        };
        Head {
            state,
            layout,
            d_k,
            d_v: 2,
            elements,
        }
        .check();
    }
}

/// In one head with Inf and NaN, and without: the two may take different paths.
fn sweep_sixteen_bits(state: StateType) {
    let all: Vec<u32> = (0..=0xffff).collect();
    let usual: Vec<u32> = all
        .iter()
        .copied()
        .filter(|&bits| value(state, bits).abs() < largest(state))
        .collect();
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
    let spread = |top: u32| {
        (0..top)
            .step_by(65_521)
            .flat_map(|bits| [bits, bits | 1 << 31])
    };
    sweep(StateType::Fp32, &spread(0x7f7f_ffff).collect::<Vec<_>>());
    sweep(
        StateType::Fp32,
        &spread(0x7fff_ffff)
            .chain([0x7f7f_ffff, 0xff7f_ffff])
            .collect::<Vec<_>>(),
    );
}

#[test]
fn a_load_takes_any_scale() {
    for (backend, state) in Backend::available().into_iter().flat_map(|backend| {
        [StateType::Bf16, StateType::Fp16, StateType::Fp32].map(|state| (backend, state))
    }) {
        let step = if state == StateType::Bf16 {
            13
        } else {
            1_048_573
        };
        let top = if state == StateType::Bf16 {
            0xffff
        } else {
            u32::MAX
        };
        let inf = if state == StateType::Bf16 {
            0x7f80
        } else {
            0x7f80_0000
        };
        let scales: Vec<u32> = (0..=top)
            .step_by(step)
            .chain([1, inf - 1, inf, inf + 1, top])
            .collect();
        let reloaded = load_each(state, backend, &scales);
        for (scale, row) in scales.iter().zip(reloaded.chunks_exact(256)) {
            for (q, &bits) in (-128_i8..=127).zip(row) {
                let product = f32::from(q) * value(state.scale(), *scale);
                let expected = if product.is_nan() {
                    canonical_nan(state)
                } else {
                    nearest(state, product)
                };
                assert_eq!(bits, expected, "{backend:?} {state:?}: {q} * {scale:#x}");
            }
        }
    }
}

/// A store of two pairs of a state of zeros, whose windows have these elements.
fn finite_windows(backend: Backend, element: Option<StateType>, windows: [&[u8]; 2]) -> Vec<bool> {
    let bytes = windows[0].len();
    let mut active = vec![0_u8; 3 * 4];
    let mut kept = vec![0_u8; 3 * 4];
    let mut window = [&vec![0xff; bytes][..], windows[0], windows[1]].concat();
    let mut window_kept = vec![0_u8; 3 * bytes];
    let pool = |memory: &mut Vec<u8>| Strided {
        layers: vec![memory.as_mut_ptr().expose_provenance()],
        slots: 3,
        slot_stride: memory.len() / 3,
        head_stride: 4,
        row_stride: 4,
    };
    let spec = Spec {
        state: StateType::Fp32,
        layout: Layout::KLast,
        shape: Shape {
            heads: 1,
            d_k: 1,
            d_v: 1,
        },
        active: pool(&mut active),
        checkpoint: Checkpoint {
            format: Format::Native,
            rows: pool(&mut kept),
            scales: None,
        },
        windows: vec![Window {
            active: pool(&mut window),
            checkpoint: pool(&mut window_kept),
            bytes,
            element,
        }],
    };
    let plan = Plan::new(spec)
        .expect("the spec is sound")
        .with_backend(backend);
    let pairs = [(1, 2), (2, 1)].map(|(source, destination)| Pair {
        source,
        destination,
    });
    // SAFETY: every pool is a buffer of its own, which nobody else uses now.
    let finite = unsafe { plan.store(&pairs, NonZeroUsize::MIN) }.expect("sound pairs");
    let whole = [&[0; 0][..], windows[1], windows[0]].concat();
    assert_eq!(
        window_kept[bytes..],
        whole,
        "windows are copied, finite or not"
    );
    finite
}

#[test]
fn one_element_of_a_window_decides_whether_its_state_is_finite() {
    for (backend, state) in Backend::available().into_iter().flat_map(|backend| {
        [StateType::Bf16, StateType::Fp16, StateType::Fp32].map(|state| (backend, state))
    }) {
        let (size, inf) = match state {
            StateType::Bf16 => (2, 0x7f80_u32),
            StateType::Fp16 => (2, 0x7c00),
            StateType::Fp32 => (4, 0x7f80_0000),
        };
        let sign = 1_u32 << (8 * size - 1);
        let edges = [
            (0, true),
            (inf - 1, true),
            (sign | (inf - 1), true),
            (inf, false),
            (sign | inf, false),
            (inf | 1, false),
            (sign - 1, false),
        ];
        // More than a block, and a rest of less than a register.
        for (elements, at) in [(1, 0), (2500, 0), (2500, 1023), (2500, 2048), (2500, 2499)] {
            let good: Vec<u8> = (inf - 1).to_ne_bytes()[..size].repeat(elements);
            for (bits, finite) in edges {
                let mut other = good.clone();
                other[at * size..][..size].copy_from_slice(&bits.to_ne_bytes()[..size]);
                let found = finite_windows(backend, Some(state), [&good, &other]);
                assert_eq!(
                    found,
                    [true, finite],
                    "{backend:?} {state:?}: {bits:#x} at {at}"
                );
                assert_eq!(finite_windows(backend, None, [&good, &other]), [true, true]);
            }
        }
    }
}

/// Rows of every q, each with its scale.
fn load_each(state: StateType, backend: Backend, scales: &[u32]) -> Vec<u32> {
    let (d_k, scale_size) = (scales.len(), state.scale().bytes());
    let head = Head {
        state,
        layout: Layout::VLast,
        d_k,
        d_v: 256,
        elements: vec![0; 256 * d_k],
    };
    let row: Vec<u8> = (-128_i8..=127).map(i8::cast_unsigned).collect();
    let mut q = row.repeat(2 * d_k);
    let mut scale: Vec<u8> = scales
        .iter()
        .chain(scales)
        .flat_map(|bits| bits.to_ne_bytes().into_iter().take(scale_size))
        .collect();
    let mut active = vec![0; 2 * 256 * d_k * state.bytes()];
    let plan = head
        .plan([&mut active, &mut q, &mut scale])
        .with_backend(backend);
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
            Head {
                state,
                layout,
                d_k,
                d_v,
                elements,
            }
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
                // Beyond half a step: roundings of the quotient and to the state's type.
                let rounding = y.abs() / if head.state == StateType::Fp32 { 4_194_304.0 } else { 256.0 };
                prop_assert!((x - y).abs() <= scale * 0.500_001 + rounding, "{x} came back as {y}, scale {scale}");
            }
        }
        head.check();
    }
}
