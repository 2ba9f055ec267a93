//! What is refused, and that nothing is written then.

use std::num::NonZeroUsize;

use crate::common::{Case, Memory, UNWRITTEN, Values};
use radixstate_codec::{
    Format, Layout, Pair, PairError, Plan, Shape, Side, Spec, SpecError, StateType, Strided, Window,
};

const CASE: Case = Case {
    state: StateType::Bf16,
    layout: Layout::KLast,
    format: Format::Int8,
    shape: Shape {
        heads: 2,
        d_k: 4,
        d_v: 3,
    },
    layers: 2,
    slots: 4,
    skew: 0,
    values: Values::Usual,
    seed: 1,
};

fn spec() -> (Spec, [Memory; 3]) {
    let ((active, active_pool), (q, q_pool), (scale, scale_pool)) =
        (CASE.active(), CASE.checkpoint(), CASE.scale());
    (
        CASE.spec(active_pool, q_pool, scale_pool, Vec::new()),
        [active, q, scale],
    )
}

fn refused(change: impl FnOnce(&mut Spec)) -> SpecError {
    let (mut spec, _memory) = spec();
    change(&mut spec);
    Plan::new(spec).expect_err("the spec contradicts itself")
}

fn window(base: usize, bytes: usize, slots: usize) -> Strided {
    Strided {
        layers: vec![base, base + 2048],
        slots,
        slot_stride: bytes,
        head_stride: 0,
        row_stride: 0,
    }
}

#[test]
fn a_sound_spec_is_accepted() {
    Plan::new(spec().0).expect("the spec is sound");
}

#[test]
fn plans_of_other_layers_of_the_same_pools_keep_apart() {
    let (first, _first_memory) = spec();
    let (second, _second_memory) = spec();
    let plan = |spec: &Spec| Plan::new(spec.clone()).expect("the spec is sound");
    assert_eq!(plan(&first).require_apart(&plan(&second)), Ok(()));
    let shared = Spec {
        active: first.active.clone(),
        ..second
    };
    assert_eq!(
        plan(&first).require_apart(&plan(&shared)),
        Err(SpecError::Shared {
            first: Side::Active,
            first_layer: 0,
            second: Side::Active,
            second_layer: 0
        })
    );
}

#[test]
fn every_dimension_must_be_at_least_one() {
    for shape in [(0, 4, 3), (2, 0, 3), (2, 4, 0)] {
        let shape = Shape {
            heads: shape.0,
            d_k: shape.1,
            d_v: shape.2,
        };
        assert_eq!(refused(|spec| spec.shape = shape), SpecError::Empty(shape));
    }
}

#[test]
fn a_format_has_scales_or_has_none() {
    let error = refused(|spec| spec.checkpoint.scales = None);
    assert_eq!(
        error.to_string(),
        "scale: the int8 format needs a tensor of scales, got none"
    );
    for format in [Format::Native, Format::Bf16] {
        let error = refused(|spec| spec.checkpoint.format = format);
        assert_eq!(
            error,
            SpecError::Scales {
                format,
                given: true
            }
        );
    }
}

#[test]
fn layers_must_agree() {
    let error = refused(|spec| spec.active.layers.truncate(1));
    assert_eq!(
        error,
        SpecError::Layers {
            side: Side::Checkpoint,
            layers: 2,
            wanted: 1
        }
    );
    let error = refused(|spec| spec.active.layers.clear());
    assert_eq!(
        error,
        SpecError::Layers {
            side: Side::Active,
            layers: 0,
            wanted: 0
        }
    );
}

#[test]
fn windows_have_the_slots_of_their_pool_and_at_least_one_byte() {
    let with = |bytes, slots| {
        move |spec: &mut Spec| {
            spec.windows = vec![Window {
                active: window(4096, 8, 4),
                checkpoint: window(65_536, 8, slots),
                bytes,
                element: None,
            }];
        }
    };
    assert_eq!(refused(with(0, 4)), SpecError::EmptyWindow);
    let error = refused(with(8, 5));
    assert_eq!(
        error,
        SpecError::Slots {
            side: Side::CheckpointWindow,
            slots: 5,
            wanted: 4
        }
    );
    let error = refused(with(9, 4));
    assert_eq!(
        error,
        SpecError::Overlap {
            side: Side::ActiveWindow,
            stride: 8,
            span: 9
        }
    );
}

#[test]
fn strides_must_keep_elements_apart() {
    let error = refused(|spec| spec.active.row_stride = 7);
    assert_eq!(
        error,
        SpecError::Overlap {
            side: Side::Active,
            stride: 7,
            span: 8
        }
    );
    assert_eq!(
        error.to_string(),
        "active pool: a stride of 7 bytes is less than the 8 bytes within it"
    );
    let error = refused(|spec| spec.active.slot_stride = 0);
    assert_eq!(
        error,
        SpecError::Overlap {
            side: Side::Active,
            stride: 0,
            span: 8
        }
    );
    for stride in [usize::MAX, usize::MAX / 3 - 8] {
        let error = refused(|spec| spec.active.slot_stride = stride);
        assert_eq!(
            error,
            SpecError::TooLarge {
                side: Side::Active,
                stride,
                size: 4
            }
        );
    }
}

#[test]
fn dimensions_may_lie_in_any_order() {
    let (mut spec, _memory) = spec();
    // [rows, slots, heads, columns]
    spec.active.head_stride = 8;
    spec.active.slot_stride = 16;
    spec.active.row_stride = 64;
    Plan::new(spec).expect("no two elements share an address");
}

/// Windows of four slots at the given addresses; the states of the spec lie elsewhere.
fn windows_at(
    active: [usize; 2],
    checkpoint: [usize; 2],
    slot_stride: usize,
) -> Result<Plan, SpecError> {
    let (mut spec, _memory) = spec();
    let pool = |layers: [usize; 2]| Strided {
        layers: layers.to_vec(),
        slots: 4,
        slot_stride,
        head_stride: 0,
        row_stride: 0,
    };
    spec.windows = vec![Window {
        active: pool(active),
        checkpoint: pool(checkpoint),
        bytes: 16,
        element: None,
    }];
    Plan::new(spec)
}

#[test]
fn memory_may_touch_or_interleave_but_not_overlap() {
    // Four slots of 16 bytes are 64 bytes; one every 64 bytes are 208.
    windows_at([4096, 4160], [4224, 4288], 16).expect("one after the other");
    windows_at([4096, 4112], [4128, 4144], 64).expect("four quarters of each 64 bytes");
    windows_at([4096, 4112 + 64], [4128 + 128, 4144 + 64], 64)
        .expect("the same, from later slots on");
    let shared = |first, first_layer, second, second_layer| SpecError::Shared {
        first,
        first_layer,
        second,
        second_layer,
    };
    let (active, checkpoint) = (Side::ActiveWindow, Side::CheckpointWindow);
    let refused = |active, checkpoint, stride| {
        windows_at(active, checkpoint, stride).expect_err("they overlap")
    };
    assert_eq!(
        refused([4096, 4096], [4224, 4288], 16),
        shared(active, 0, active, 1)
    );
    assert_eq!(
        refused([4096, 4159], [4224, 4288], 16),
        shared(active, 0, active, 1)
    );
    assert_eq!(
        refused([4096, 4160], [4223, 4288], 16),
        shared(active, 1, checkpoint, 0)
    );
    assert_eq!(
        refused([4096, 4112], [4127, 4144], 64),
        shared(active, 1, checkpoint, 0)
    );
    assert_eq!(
        refused([4096, 4112], [4128, 4145], 64),
        shared(active, 0, checkpoint, 1)
    );
    assert_eq!(
        refused([4096, 4288], [4400, 4500], 64),
        shared(active, 0, active, 1)
    );
}

fn stored(pairs: &[(u32, u32)]) -> (Result<Vec<bool>, PairError>, bool) {
    let (spec, [mut active, q, scale]) = spec();
    CASE.fill(&mut active);
    let pairs: Vec<_> = pairs
        .iter()
        .map(|&(source, destination)| Pair {
            source,
            destination,
        })
        .collect();
    let plan = Plan::new(spec).expect("the spec is sound");
    // SAFETY: the pools lie within the three buffers, which nobody else uses now.
    let result = unsafe { plan.store(&pairs, NonZeroUsize::MIN) };
    let untouched = [q, scale]
        .iter()
        .all(|memory| memory.bytes().iter().all(|&byte| byte == UNWRITTEN));
    (result, untouched)
}

#[test]
fn a_refused_list_of_pairs_writes_nothing() {
    let cases: [(&[(u32, u32)], &str); 6] = [
        (
            &[(1, 1), (0, 2)],
            "pair 1: slot 0 of the active pool is the padding sink",
        ),
        (
            &[(1, 0)],
            "pair 0: slot 0 of the checkpoint pool is the padding sink",
        ),
        (
            &[(1, 1), (4, 2)],
            "pair 1: slot 4 is not in the active pool, whose last slot is 3",
        ),
        (
            &[(1, u32::MAX)],
            "pair 0: slot 4294967295 is not in the checkpoint pool, whose last slot is 3",
        ),
        (
            &[(1, 2), (2, 1), (3, 2)],
            "pairs 0 and 2 both write slot 2; destinations must be distinct",
        ),
        (
            &[(1, 1), (1, 2), (1, 3), (1, 1)],
            "4 pairs, but the destination pool has 3 usable slots",
        ),
    ];
    for (pairs, message) in cases {
        let (result, untouched) = stored(pairs);
        assert_eq!(
            result.expect_err("the pairs are unsound").to_string(),
            message
        );
        assert!(untouched, "{message}");
    }
}

#[test]
fn one_source_may_serve_many_destinations() {
    let (result, untouched) = stored(&[(2, 1), (2, 2), (2, 3)]);
    assert_eq!(result, Ok(vec![true; 3]));
    assert!(!untouched);
}

#[test]
fn a_slot_that_is_not_there_is_not_cleared() {
    let cases = [
        (0, "pair 0: slot 0 of the active pool is the padding sink"),
        (
            4,
            "pair 0: slot 4 is not in the active pool, whose last slot is 3",
        ),
    ];
    for (slot, message) in cases {
        let (spec, [active, ..]) = spec();
        let plan = Plan::new(spec).expect("the spec is sound");
        // SAFETY: the pools lie within the three buffers, which nobody else uses now.
        let refused = unsafe { plan.clear(slot, NonZeroUsize::MIN) };
        assert_eq!(refused.expect_err("no such slot").to_string(), message);
        assert!(active.bytes().iter().all(|&byte| byte == UNWRITTEN));
    }
}

#[test]
fn no_pairs_is_no_work() {
    assert_eq!(stored(&[]), (Ok(Vec::new()), true));
}
