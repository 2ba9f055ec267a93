//! Every backend, with any number of threads, leaves the bytes that the oracle leaves.

use crate::common::{Case, Values};
use proptest::prelude::*;
use radixstate_codec::{Backend, Format, Layout, Shape, StateType};

const STATES: [StateType; 3] = [StateType::Bf16, StateType::Fp16, StateType::Fp32];
const LAYOUTS: [Layout; 2] = [Layout::KLast, Layout::VLast];
const VALUES: [Values; 4] = [Values::Usual, Values::Finite, Values::Edges, Values::Any];

fn cases() -> impl Strategy<Value = Case> {
    let sizes = || {
        prop_oneof![
            Just(1_usize),
            Just(7),
            Just(63),
            Just(64),
            Just(100),
            Just(128),
            1..200_usize
        ]
    };
    let kind = (
        prop::sample::select(&STATES[..]),
        prop::sample::select(&LAYOUTS[..]),
        prop::sample::select(&Format::ALL[..]),
        prop::sample::select(&VALUES[..]),
    );
    (
        kind,
        sizes(),
        sizes(),
        1..4_usize,
        1..3_usize,
        2..4_usize,
        0..4_usize,
        any::<u64>(),
    )
        .prop_map(
            |((state, layout, format, values), d_k, d_v, heads, layers, slots, skew, seed)| {
                let shape = Shape { heads, d_k, d_v };
                Case {
                    state,
                    layout,
                    format,
                    shape,
                    layers,
                    slots,
                    skew,
                    values,
                    seed,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_backend_equals_the_oracle(case in cases()) {
        case.agree(1);
    }
}

/// Tails of every length, in both dimensions.
#[test]
fn every_row_length_equals_the_oracle() {
    for n in 1..=130 {
        for state in STATES {
            for (layout, format) in LAYOUTS
                .into_iter()
                .flat_map(|layout| Format::ALL.map(|format| (layout, format)))
            {
                let (d_k, d_v) = if layout == Layout::KLast {
                    (n, 3)
                } else {
                    (3, n)
                };
                let shape = Shape { heads: 1, d_k, d_v };
                let (values, seed) = (Values::Finite, n as u64);
                Case {
                    state,
                    layout,
                    format,
                    shape,
                    layers: 1,
                    slots: 2,
                    skew: n % 2,
                    values,
                    seed,
                }
                .agree(1);
            }
        }
    }
}

/// Small with gaps, and large enough for threads to start.
#[test]
fn a_cleared_slot_is_zero_and_nothing_else_is_written() {
    for layout in LAYOUTS {
        for (d, heads, skew, threads) in [(5, 3, 7, 1), (128, 7, 0, 1), (128, 7, 0, 1000)] {
            let case = Case {
                state: StateType::Fp32,
                layout,
                format: Format::Int8,
                shape: Shape {
                    heads,
                    d_k: d,
                    d_v: d + 1,
                },
                layers: 5,
                slots: 4,
                skew,
                values: Values::Any,
                seed: 3,
            };
            for slot in 1..4 {
                for (found, wanted) in case.clear(slot, threads) {
                    assert!(found == wanted, "slot {slot} of {case:?}");
                }
            }
        }
    }
}

/// Large enough for threads to start and for streamed writes.
#[test]
fn the_result_does_not_depend_on_threads() {
    let shape = Shape {
        heads: 7,
        d_k: 128,
        d_v: 128,
    };
    for (state, layout) in STATES
        .into_iter()
        .flat_map(|state| LAYOUTS.map(|layout| (state, layout)))
    {
        for format in Format::ALL {
            let (values, seed) = (Values::Edges, 5);
            let case = Case {
                state,
                layout,
                format,
                shape,
                layers: 5,
                slots: 9,
                skew: 0,
                values,
                seed,
            };
            let oracle = case.run(Backend::Scalar, 1);
            for (backend, threads) in Backend::available().into_iter().zip([1, 2, 1000]) {
                assert!(
                    case.run(backend, threads) == oracle,
                    "{backend:?}, {threads} threads: {case:?}"
                );
            }
            for threads in [3, 4] {
                assert!(
                    case.run(Backend::fastest(), threads) == oracle,
                    "{threads} threads: {case:?}"
                );
            }
        }
    }
}
