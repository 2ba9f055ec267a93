//! Ranks of a group: what they decide is a function of the calls, and the digest tells when it was
//! not.

use radixstate::{Lease, Pending, PoolKind, StartOptions, Step};

use crate::*;

/// A rank in the midst of its work: one request runs and holds a pending checkpoint, one prefix is
/// leased, a step is out. The request has a further slot, 2.
struct Rank {
    cache: Cache,
    sequence: Sequence,
    pending: Option<Pending>,
    lease: Option<Lease>,
    stored: Stored,
    step: Step,
}

fn rank() -> Rank {
    let mut cache = cache(32, 4, 4);
    store(&mut cache, &prompt(1, 8));
    let lease = lease(&mut cache, &prompt(1, 9));
    let step = cache.begin_step();
    let options = StartOptions {
        slots: 2,
        ..chunk(10)
    };
    let sequence = start_with(&mut cache, &prompt(2, 9), options);
    let stored = checkpoint(&mut cache, &sequence, 4);
    let pending = pending(&mut cache, &sequence, 8);
    Rank {
        cache,
        sequence,
        pending: Some(pending),
        lease: Some(lease),
        stored,
        step,
    }
}

type Call = fn(&mut Rank);

fn begin(rank: &mut Rank, tokens: &[u32], options: StartOptions) {
    drop(try_start(&mut rank.cache, tokens, options));
}

/// Calls that change something, each in another way.
const CALLS: [(&str, Call); 34] = [
    ("start", |rank| {
        begin(rank, &prompt(3, 5), StartOptions::default())
    }),
    ("start, a longer prompt", |rank| {
        begin(rank, &prompt(3, 6), StartOptions::default())
    }),
    ("start, another prompt", |rank| {
        begin(rank, &prompt(4, 5), StartOptions::default())
    }),
    ("start, fewer positions", |rank| {
        begin(rank, &prompt(3, 5), chunk(2))
    }),
    ("start, a hit", |rank| {
        begin(rank, &prompt(1, 9), StartOptions::default())
    }),
    ("start, a hit that is loaded", |rank| {
        drop(start(&mut rank.cache, &prompt(1, 9)))
    }),
    ("start, no hit", |rank| {
        begin(
            rank,
            &prompt(1, 9),
            StartOptions {
                no_read: true,
                ..Default::default()
            },
        )
    }),
    ("start, with a further slot", |rank| {
        let slots = 2;
        let options = StartOptions {
            slots,
            ..Default::default()
        };
        begin(rank, &prompt(3, 5), options)
    }),
    ("start, short of pages", |rank| {
        begin(rank, &prompt(3, 60), StartOptions::default())
    }),
    ("start, never fits", |rank| {
        begin(rank, &prompt(3, 100), StartOptions::default())
    }),
    ("grow", |rank| rank.cache.grow(&rank.sequence, 1).unwrap()),
    ("grow by more", |rank| {
        rank.cache.grow(&rank.sequence, 2).unwrap()
    }),
    ("grow by too much", |rank| {
        assert!(rank.cache.grow(&rank.sequence, 1000).is_err())
    }),
    ("append", |rank| {
        rank.cache.append(&rank.sequence, &[7]).unwrap()
    }),
    ("append another", |rank| {
        rank.cache.append(&rank.sequence, &[8]).unwrap()
    }),
    ("shrink", |rank| rank.cache.shrink(&rank.sequence).unwrap()),
    ("take_slot", |rank| {
        assert_eq!(rank.cache.take_slot(&rank.sequence), Ok(3))
    }),
    ("give_back_slot", |rank| {
        rank.cache.give_back_slot(&rank.sequence, 2).unwrap()
    }),
    ("reserve", |rank| {
        drop(reserve(&mut rank.cache, &rank.sequence, 8))
    }),
    ("reserve what is there", |rank| {
        assert!(rank.cache.reserve_checkpoint(&rank.sequence, 4, 2).is_ok())
    }),
    ("commit", |rank| {
        assert!(
            rank.cache
                .commit(&rank.sequence, rank.pending.take().unwrap())
                .is_ok()
        )
    }),
    ("drop a pending checkpoint", |rank| rank.pending = None),
    ("discard", |rank| {
        assert!(rank.cache.discard(rank.pending.take().unwrap()).is_ok())
    }),
    ("lease a hit", |rank| {
        drop(lease(&mut rank.cache, &prompt(1, 9)))
    }),
    ("lease a miss", |rank| {
        drop(lease(&mut rank.cache, &prompt(5, 9)))
    }),
    ("reset twice", |rank| {
        [(); 2].into_iter().for_each(|()| rank.cache.reset())
    }),
    ("load a lease", |rank| {
        rank.cache
            .lease_loaded(rank.lease.as_ref().unwrap())
            .unwrap()
    }),
    ("release a lease", |rank| {
        rank.cache.release(rank.lease.take().unwrap()).unwrap()
    }),
    ("evict", |rank| {
        assert_eq!(rank.cache.evict(PoolKind::Kv, 1).kv, 0)
    }),
    ("begin_step", |rank| {
        let next = rank.cache.begin_step();
        assert_eq!(next.id(), 2);
        // Its end is another decision.
        std::mem::forget(next);
    }),
    ("retire_step", |rank| {
        rank.cache.retire_step(&rank.step, &[]).unwrap()
    }),
    ("retire_step, refusing", |rank| {
        rank.cache
            .retire_step(&rank.step, std::slice::from_ref(&rank.stored))
            .unwrap()
    }),
    ("invalidate", |rank| {
        rank.cache.invalidate(&rank.stored).unwrap()
    }),
    ("reset", |rank| rank.cache.reset()),
];

/// The digest after `call`, when what it dropped has been settled.
fn after(call: Call) -> u64 {
    let mut rank = rank();
    call(&mut rank);
    rank.cache.stats();
    rank.cache.digest()
}

// NVIDIA/TensorRT-LLM #18272
#[test]
fn ranks_that_make_the_same_calls_have_the_same_digest() {
    for (name, call) in CALLS {
        assert_eq!(after(call), after(call), "{name}");
    }
}

// NVIDIA/TensorRT-LLM #18272
#[test]
fn any_one_differing_call_shows() {
    let mut digests: Vec<(u64, &str)> = CALLS
        .iter()
        .map(|&(name, call)| (after(call), name))
        .collect();
    digests.push((after(|_| ()), "nothing"));
    digests.sort_unstable();
    for pair in digests.windows(2) {
        assert_ne!(pair[0].0, pair[1].0, "{} and {}", pair[0].1, pair[1].1);
    }
}

#[test]
fn a_difference_never_goes_away() {
    let [mut one, mut two] = [rank(), rank()];
    assert_eq!(one.cache.digest(), two.cache.digest());
    one.cache.grow(&one.sequence, 1).unwrap();
    for rank in [&mut one, &mut two] {
        rank.cache.shrink(&rank.sequence).unwrap();
        rank.cache.retire_step(&rank.step, &[]).unwrap();
        rank.cache.reset();
        (0..50).for_each(|family| store(&mut rank.cache, &prompt(family, 5)));
    }
    assert_ne!(one.cache.digest(), two.cache.digest());
}

#[test]
fn finishing_and_dropping_are_the_same_and_keeping_is_not() {
    let run = |end: fn(&mut Cache, Sequence)| {
        let mut cache = cache(32, 2, 4);
        let sequence = start(&mut cache, &prompt(1, 5));
        end(&mut cache, sequence);
        store(&mut cache, &prompt(2, 4));
        cache.digest()
    };
    let (finished, dropped) = (
        run(|cache, sequence| cache.finish(sequence).unwrap()),
        run(|_, sequence| drop(sequence)),
    );
    assert_eq!(finished, dropped);
    assert_ne!(finished, run(|_, sequence| std::mem::forget(sequence)));
}

#[test]
fn a_refusal_shows_and_one_that_comes_too_late_does_not() {
    let run = |evict: bool, refuse: bool| {
        let mut cache = cache(32, 2, 4);
        let sequence = start(&mut cache, &prompt(1, 9));
        let stored = checkpoint(&mut cache, &sequence, 8);
        if evict {
            assert_eq!(cache.evict(PoolKind::Checkpoint, 1).checkpoints, 1);
        }
        if refuse {
            cache.invalidate(&stored).unwrap();
        }
        cache.digest()
    };
    assert_ne!(run(false, true), run(false, false));
    assert_eq!(run(true, true), run(true, false), "its state is gone");
}

#[test]
fn a_discarded_state_is_not_a_duplicate() {
    let run = |end: fn(&mut Cache, &Sequence, Pending)| {
        let mut cache = cache(32, 2, 4);
        let (one, two) = (
            start(&mut cache, &prompt(1, 9)),
            start(&mut cache, &prompt(1, 9)),
        );
        let late = pending(&mut cache, &two, 8);
        checkpoint(&mut cache, &one, 8);
        end(&mut cache, &two, late);
        cache.digest()
    };
    let committed =
        run(|cache, two, late| assert!(matches!(cache.commit(two, late), Ok(Commit::Skipped(_)))));
    assert_ne!(
        committed,
        run(|cache, _, late| assert!(cache.discard(late).is_ok()))
    );
}

/// Of tokens the digest sees the number and the last; the others show by what they do.
#[test]
fn prompts_that_differ_inside_show_when_they_are_stored() {
    let run = |tokens: &[u32]| {
        let mut cache = cache(32, 1, 4);
        store(&mut cache, &prompt(1, 8));
        let sequence = start_with(
            &mut cache,
            tokens,
            StartOptions {
                no_read: true,
                ..Default::default()
            },
        );
        let started = cache.digest();
        assert_eq!(checkpoint(&mut cache, &sequence, 8).depth, 8);
        (started, cache.digest())
    };
    let (one, two) = (
        run(&fork(&prompt(1, 6), 1, 3)),
        run(&fork(&prompt(2, 6), 1, 3)),
    );
    assert_eq!(one.0, two.0);
    assert_ne!(one.1, two.1, "of one of them, pages were there already");
}

#[test]
fn reading_and_misuse_leave_the_digest_alone() {
    let mut rank = rank();
    let before = rank.cache.digest();
    look_up(&mut rank.cache, &prompt(1, 9));
    rank.cache.stats();
    rank.cache.check(None).unwrap();
    rank.cache.view(&rank.sequence).unwrap().pages();
    rank.cache.loaded(&rank.sequence).unwrap_err();
    rank.cache
        .append(&rank.sequence, &prompt(9, 9))
        .unwrap_err();
    rank.cache.retire_step(99, &[]).unwrap_err();
    assert_eq!(rank.cache.digest(), before);
}

#[test]
fn the_order_in_which_handles_are_dropped_on_other_threads_does_not_matter() {
    let run = |order: [usize; 4]| {
        let mut cache = cache(32, 4, 4);
        let mut running: Vec<_> = (0..4)
            .map(|family| Some(start(&mut cache, &prompt(family, 5))))
            .collect();
        let dropped = order.map(|n| running[n].take());
        dropped
            .into_iter()
            .for_each(|sequence| std::thread::spawn(move || drop(sequence)).join().unwrap());
        store(&mut cache, &prompt(9, 8));
        (cache.digest(), slot_of_next(&mut cache))
    };
    let first = run([0, 1, 2, 3]);
    assert!(
        [[3, 2, 1, 0], [2, 0, 3, 1]]
            .into_iter()
            .all(|order| run(order) == first)
    );
}

fn slot_of_next(cache: &mut Cache) -> u32 {
    let sequence = start(cache, &prompt(50, 2));
    slot(cache, &sequence)
}

/// Ranks hold different layers, so their pools have other bytes; what they plan is the same.
// NVIDIA/TensorRT-LLM #18272
#[test]
fn a_rank_with_other_layers_plans_the_same() {
    let run = |bytes: u64| {
        let base = config(8, 2, 2);
        let pools = radixstate::Config {
            kv: base.kv.bytes(bytes),
            checkpoints: base.checkpoints.bytes(bytes),
            ..base
        };
        let mut cache = Cache::new(pools).unwrap();
        (0..20).for_each(|family| store(&mut cache, &prompt(family % 3, 9)));
        cache.digest()
    };
    assert_eq!(run(0), run(1_000_000));
}
