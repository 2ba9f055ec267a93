//! Every mistake a caller can make is named, and changes nothing.

use radixstate::{
    Cache, Config, Error, Lease, Misuse, Namespace, PageOwner, PoolConfig, StartOptions, Started,
};

use crate::*;

/// Runs `call`, which must refuse with `misuse`, and shows that no pool and no invariant noticed.
fn assert_refused<O: PageOwner, T, E>(
    cache: &mut Cache<O>,
    misuse: &Misuse,
    call: impl FnOnce(&mut Cache<O>) -> Result<T, E>,
) where
    T: std::fmt::Debug,
    E: Into<Error>,
{
    let before = (usage(cache), cache.stats());
    let error: Error = call(cache).expect_err("the rule is broken").into();
    assert_eq!(error, Error::Misuse(misuse.clone()));
    assert_eq!(error.to_string(), misuse.to_string());
    assert_eq!((usage(cache), cache.stats()), before, "{misuse}");
    assert_sound(cache);
}

#[test]
fn an_empty_prompt_is_refused() {
    let mut cache = cache();
    let namespace = Namespace::default();
    assert_refused(&mut cache, &Misuse::EmptyPrompt, |cache| {
        cache.lookup(&namespace, &[], None)
    });
    assert_refused(&mut cache, &Misuse::EmptyPrompt, |cache| {
        let no_read = StartOptions {
            no_read: true,
            ..StartOptions::default()
        };
        cache.start(&namespace, &[], no_read)
    });
}

#[test]
fn a_checkpoint_names_a_legal_depth_that_is_written_and_a_slot_that_is_ready() {
    let mut cache = cache();
    let chunk = StartOptions {
        reserve: Some(6),
        ..StartOptions::default()
    };
    let Started { sequence, .. } = start_with(&mut cache, &prompt(1, 9), chunk);
    let mut refuse = |depth, source, misuse| {
        assert_refused(&mut cache, &misuse, |cache| {
            cache.reserve_checkpoint(&sequence, depth, source)
        });
    };
    refuse(6, 1, Misuse::Unaligned { depth: 6, legal: 4 });
    refuse(8, 1, Misuse::DepthPastEnd { depth: 8, end: 6 });
    refuse(12, 1, Misuse::DepthPastEnd { depth: 12, end: 6 });
    refuse(4, 2, Misuse::NotYourSlot { slot: 2 });
    refuse(4, 0, Misuse::NotYourSlot { slot: 0 });
    refuse(4, 1, Misuse::NotLoaded);
    cache.loaded(&sequence).unwrap();
    assert_refused(&mut cache, &Misuse::AlreadyLoaded, |cache| {
        cache.loaded(&sequence)
    });
    checkpoint(&mut cache, &sequence, 4);
}

#[test]
fn tokens_are_appended_only_to_claimed_positions() {
    let mut cache = cache();
    let sequence = start(&mut cache, &prompt(1, 9));
    cache.grow(&sequence, 2).unwrap();
    let misuse = Misuse::NotClaimed {
        wanted: 12,
        claimed: 11,
    };
    assert_refused(&mut cache, &misuse, |cache| {
        cache.append(&sequence, &[1, 2, 3])
    });
    cache.append(&sequence, &[1, 2]).unwrap();
}

#[test]
fn a_handle_of_another_cache_is_refused_everywhere() {
    let (mut cache, mut other) = (cache(), cache());
    store(&mut other, &prompt(1, 8));
    let matched = look_up(&mut other, &prompt(1, 9));
    let sequence = start(&mut other, &prompt(1, 9));
    let lease = other.lease(&matched).unwrap();
    let mut refuse = |call: &dyn Fn(&mut Cache) -> Result<(), Error>| {
        assert_refused(&mut cache, &Misuse::WrongCache, |cache| call(cache));
    };
    refuse(&|cache| Ok(cache.loaded(&sequence)?));
    refuse(&|cache| cache.view(&sequence).map(drop).map_err(Error::from));
    refuse(&|cache| cache.grow(&sequence, 1));
    refuse(&|cache| Ok(cache.append(&sequence, &[1])?));
    refuse(&|cache| Ok(cache.shrink(&sequence)?));
    refuse(&|cache| cache.take_slot(&sequence).map(drop));
    refuse(&|cache| {
        cache
            .reserve_checkpoint(&sequence, 4, 1)
            .map(drop)
            .map_err(Error::from)
    });
    refuse(&|cache| cache.lease(&matched).map(drop).map_err(Error::from));
    refuse(&|cache| cache.lease_state(&lease).map(|_| ()).map_err(Error::from));
    refuse(&|cache| cache.lease_depth(&lease).map(|_| ()).map_err(Error::from));
    refuse(&|cache| cache.lease_pages(&lease, 0).map(drop).map_err(Error::from));
    refuse(&|cache| Ok(cache.lease_loaded(&lease)?));
    assert_sound(&mut other);
}

#[test]
fn what_another_cache_consumes_by_mistake_ends_in_its_own() {
    let (mut cache, mut other) = (cache(), cache());
    let kept = store(&mut other, &prompt(1, 8));
    let matched = look_up(&mut other, &prompt(1, 9));
    let (sequence, own) = (
        start(&mut other, &prompt(1, 9)),
        start(&mut cache, &prompt(1, 9)),
    );
    let longer = start(&mut other, &prompt(1, 13));
    let lease = other.lease(&matched).unwrap();
    let late = [(); 2].map(|()| pending(reserve(&mut other, &longer, 12)));
    let [one, two] = late;
    let wrong = &Misuse::WrongCache;
    assert_refused(&mut cache, wrong, |cache| cache.commit(&own, one));
    assert_refused(&mut cache, wrong, |cache| cache.commit(&sequence, two));
    assert_refused(&mut cache, wrong, |cache| cache.invalidate(&kept));
    let step = cache.begin_step();
    assert_refused(&mut cache, wrong, |cache| {
        cache.retire_step(&step, std::slice::from_ref(&kept))
    });
    assert_refused(&mut cache, wrong, |cache| cache.release(lease));
    assert_refused(&mut cache, wrong, |cache| cache.finish(sequence));
    assert_refused(&mut cache, wrong, |cache| cache.finish(longer));
    assert_eq!(
        usage(&mut other).map(|usage| usage.held + usage.pinned),
        [0, 0, 0]
    );
    assert_sound(&mut other);
}

fn lease_of<O: PageOwner>(cache: &mut Cache<O>, tokens: &[u32]) -> Lease {
    let matched = look_up(cache, tokens);
    cache.lease(&matched).unwrap()
}

#[test]
fn a_match_is_stale_once_its_checkpoint_is_gone() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let evicted = look_up(&mut cache, &prompt(1, 9));
    cache.evict(PoolKind::Checkpoint, 1);
    let gone = Misuse::Stale("its checkpoint was evicted after the lookup");
    assert_refused(&mut cache, &gone, |cache| cache.lease(&evicted));
    store(&mut cache, &prompt(1, 8));
    assert_refused(&mut cache, &gone, |cache| cache.lease(&evicted));
    let reset = look_up(&mut cache, &prompt(1, 9));
    let nothing = look_up(&mut cache, &prompt(7, 9));
    cache.reset();
    let stale = Misuse::Stale("the cache was reset after the lookup");
    assert_refused(&mut cache, &stale, |cache| cache.lease(&reset));
    assert_refused(&mut cache, &stale, |cache| cache.lease(&nothing));
}

#[test]
fn a_match_survives_a_split_of_its_node() {
    let mut cache = cache();
    store(&mut cache, &prompt(1, 8));
    let matched = look_up(&mut cache, &prompt(1, 9));
    store(&mut cache, &fork(&prompt(1, 4), 1, 4));
    let lease = cache.lease(&matched).unwrap();
    assert_eq!(cache.lease_depth(&lease).unwrap(), 8);
}

#[test]
fn a_pending_checkpoint_is_committed_by_its_owner_alone() {
    let mut cache = cache();
    let (one, two) = (
        start(&mut cache, &prompt(1, 9)),
        start(&mut cache, &prompt(1, 9)),
    );
    let theirs = pending(reserve(&mut cache, &one, 8));
    assert_eq!(
        cache.commit(&two, theirs).unwrap_err().why,
        Misuse::NotYourPending
    );
    assert_eq!(
        cache.usage(PoolKind::Checkpoint).free,
        4,
        "its slot went back"
    );
    assert_eq!(cached(&mut cache, &prompt(1, 8)), 0);
    assert_sound(&mut cache);
}

#[test]
fn publishing_demands_tokens_and_pages_that_fit() {
    let cases: [(&[u32], &[u32], Misuse); 6] = [
        (
            &prompt(1, 9),
            &[5, 6],
            Misuse::LengthMismatch {
                what: "tokens",
                given: 9,
                expected: 12,
            },
        ),
        (
            &fork(&prompt(1, 7), 1, 5),
            &[5, 6],
            Misuse::PrefixMismatch { leased: 8 },
        ),
        (
            &prompt(1, 12),
            &[5],
            Misuse::LengthMismatch {
                what: "pages",
                given: 1,
                expected: 2,
            },
        ),
        (
            &prompt(1, 12),
            &[5, 5],
            Misuse::PageOwnership {
                page: 5,
                why: "is given twice",
            },
        ),
        (
            &prompt(1, 12),
            &[5, 13],
            Misuse::PageOwnership {
                page: 13,
                why: "is outside 1..=capacity",
            },
        ),
        (
            &prompt(1, 12),
            &[5, 4],
            Misuse::PageOwnership {
                page: 4,
                why: "already belongs to the cache",
            },
        ),
    ];
    for (tokens, pages, misuse) in cases {
        let mut cache = engine();
        let lease = lease_of(&mut cache, &prompt(1, 13));
        let first = pending(cache.reserve(&lease, &prompt(1, 8), &[1, 2, 3, 4]).unwrap());
        cache
            .publish(&lease, &prompt(1, 8), &[1, 2, 3, 4], first)
            .unwrap();
        let before = usage(&mut cache);
        let late = pending(cache.reserve(&lease, &prompt(1, 12), &[5, 6]).unwrap());
        assert_eq!(
            cache.publish(&lease, tokens, pages, late).unwrap_err().why,
            misuse
        );
        assert_eq!(usage(&mut cache), before, "{misuse}");
        assert_sound(&mut cache);
    }
}

#[test]
fn reserving_with_a_lease_demands_its_prefix_at_a_legal_depth() {
    let mut cache = engine();
    let lease = lease_of(&mut cache, &prompt(1, 9));
    cache.extend(&lease, &prompt(1, 8), &[1, 2, 3, 4]).unwrap();
    let unaligned = Misuse::Unaligned { depth: 9, legal: 4 };
    assert_refused(&mut cache, &unaligned, |cache| {
        cache.reserve(&lease, &prompt(1, 9), &[])
    });
    let mismatch = Misuse::PrefixMismatch { leased: 8 };
    assert_refused(&mut cache, &mismatch, |cache| {
        cache.reserve(&lease, &prompt(2, 12), &[])
    });
    assert_refused(&mut cache, &mismatch, |cache| {
        cache.reserve(&lease, &prompt(2, 4), &[])
    });
}

#[test]
fn sharing_pages_demands_whole_ones_that_go_on_from_the_prefix() {
    let mut cache = engine();
    let lease = lease_of(&mut cache, &prompt(1, 9));
    let unaligned = Misuse::Unaligned { depth: 3, legal: 2 };
    assert_refused(&mut cache, &unaligned, |cache| {
        cache.extend(&lease, &prompt(1, 3), &[1])
    });
    assert_refused(&mut cache, &unaligned, |cache| cache.lease_pages(&lease, 3));
    cache.extend(&lease, &prompt(1, 4), &[1, 2]).unwrap();
    let mismatch = Misuse::PrefixMismatch { leased: 4 };
    assert_refused(&mut cache, &mismatch, |cache| {
        cache.extend(&lease, &prompt(2, 8), &[3, 4])
    });
    let owned = Misuse::PageOwnership {
        page: 2,
        why: "already belongs to the cache",
    };
    assert_refused(&mut cache, &owned, |cache| {
        cache.extend(&lease, &prompt(1, 8), &[3, 2])
    });
    assert_refused(&mut cache, &owned, |cache| {
        cache.reserve(&lease, &prompt(1, 8), &[3, 2])
    });
    let late = pending(cache.reserve(&lease, &prompt(1, 8), &[3, 4]).unwrap());
    let past = Misuse::DepthPastEnd { depth: 8, end: 4 };
    let rejected = cache.attach(&lease, &prompt(1, 8), late).unwrap_err();
    assert_eq!(rejected.why, past);
    let tokens = prompt(1, 8);
    let published = cache.publish(&lease, &tokens, &[3, 4], rejected.pending);
    assert_eq!(stored(published.unwrap().outcome).depth, 8);
    assert_sound(&mut cache);
}

#[test]
fn an_engine_has_no_more_pages_than_it_said() {
    let mut cache = logical();
    let lease = lease_of(&mut cache, &prompt(1, 30));
    cache.extend(&lease, &prompt(1, 20)).unwrap();
    let more = Misuse::TooManyPages {
        wanted: 4,
        free: 2,
        outbox: 0,
    };
    assert_refused(&mut cache, &more, |cache| {
        cache.extend(&lease, &prompt(1, 28))
    });
    cache.release(lease).unwrap();
    let lease = lease_of(&mut cache, &prompt(2, 9));
    let untaken = Misuse::TooManyPages {
        wanted: 4,
        free: 2,
        outbox: 10,
    };
    assert_refused(&mut cache, &untaken, |cache| {
        cache.extend(&lease, &prompt(2, 8))
    });
    assert_eq!(cache.take_freed().len(), 10);
    cache.extend(&lease, &prompt(2, 8)).unwrap();
    assert_sound(&mut cache);
}

#[test]
fn a_batch_with_one_wrong_state_reserves_and_evicts_nothing() {
    let mut cache = cache();
    for family in 2..6 {
        store(&mut cache, &prompt(family, 4));
    }
    let sequence = start(&mut cache, &prompt(1, 9));
    let further = cache.take_slot(&sequence).unwrap();
    let passed = Misuse::DepthPassed {
        depth: 4,
        slot: further,
        reached: 8,
    };
    for depths in [[4, 8], [8, 4]] {
        assert_refused(&mut cache, &passed, |cache| {
            cache.reserve_checkpoints(&depths.map(|depth| (&sequence, depth, further)))
        });
    }
    let past = Misuse::DepthPastEnd { depth: 12, end: 9 };
    assert_refused(&mut cache, &past, |cache| {
        cache.reserve_checkpoints(&[(&sequence, 4, further), (&sequence, 12, 1)])
    });
    let states = [(&sequence, 4, further), (&sequence, 8, 1)];
    let reserved = cache.reserve_checkpoints(&states).unwrap();
    assert!(matches!(
        reserved[..],
        [Reservation::Pending(_), Reservation::Pending(_)]
    ));
}

#[test]
fn a_step_that_was_never_begun_cannot_retire() {
    let mut cache = cache();
    let _begun = cache.begin_step();
    for step in [0, 2, u64::MAX] {
        let misuse = Misuse::UnknownStep { step, newest: 1 };
        assert_refused(&mut cache, &misuse, |cache| cache.retire_step(step, &[]));
    }
}

#[test]
fn a_configuration_in_which_nothing_could_be_reused_is_refused() {
    let cases = [
        (
            Config {
                page_size: 0,
                ..config()
            },
            "page size 0 and checkpoint stride 4 must be at least 1",
        ),
        (
            Config {
                checkpoint_stride: 0,
                ..config()
            },
            "page size 2 and checkpoint stride 0 must be at least 1",
        ),
        (
            Config {
                checkpoints: PoolConfig::internal(0),
                ..config()
            },
            "the checkpoint pool has 0 slots",
        ),
        (
            Config {
                page_size: u32::MAX,
                checkpoint_stride: u32::MAX - 1,
                ..config()
            },
            "exceeds 32 bits",
        ),
        (
            Config {
                checkpoint_stride: 26,
                ..config()
            },
            "hold 24 tokens, no more than the first legal depth 26",
        ),
        (
            Config {
                checkpoint_stride: 24,
                ..config()
            },
            "hold 24 tokens, no more than the first legal depth 24",
        ),
    ];
    for (config, words) in cases {
        let error = Cache::new(config).unwrap_err();
        assert!(
            matches!(error, Misuse::Config(_)) && error.to_string().contains(words),
            "{error}"
        );
    }
}

#[test]
fn messages_give_the_rule_and_the_numbers() {
    let messages = [
        (
            Misuse::EmptyPrompt,
            "a prompt has at least one token, got 0",
        ),
        (
            Misuse::Unaligned { depth: 6, legal: 4 },
            "checkpoint depth 6 is not a multiple of 4",
        ),
        (
            Misuse::DepthPastEnd { depth: 8, end: 6 },
            "depth 8 is past the 6 tokens",
        ),
        (
            Misuse::NotYourSlot { slot: 2 },
            "active slot 2 is not one of this request's",
        ),
        (
            Misuse::RunningSlot { slot: 1 },
            "active slot 1 holds the running state",
        ),
        (
            Misuse::DepthPassed {
                depth: 4,
                slot: 1,
                reached: 8,
            },
            "depth 4 is behind active slot 1, whose state is of 8 tokens or more",
        ),
        (
            Misuse::NotClaimed {
                wanted: 12,
                claimed: 11,
            },
            "would reach 12 tokens, only 11 are claimed",
        ),
        (
            Misuse::LengthMismatch {
                what: "pages",
                given: 1,
                expected: 2,
            },
            "1 pages given, 2 expected",
        ),
        (
            Misuse::UnknownStep { step: 4, newest: 3 },
            "step 4 was never begun, the newest is 3",
        ),
        (
            Misuse::PageOwnership {
                page: 5,
                why: "is given twice",
            },
            "kv page 5 is given twice",
        ),
        (
            Misuse::TooManyPages {
                wanted: 3,
                free: 1,
                outbox: 2,
            },
            "3 kv pages handed over, 1 numbers are free and 2 wait for take_freed()",
        ),
        (
            Misuse::PrefixMismatch { leased: 8 },
            "do not begin with the 8 tokens",
        ),
        (Misuse::Stale("why"), "stale match: why"),
        (
            Misuse::NotYourPending,
            "was reserved by another sequence or lease",
        ),
    ];
    for (misuse, words) in messages {
        assert!(misuse.to_string().contains(words), "{misuse}");
    }
}
