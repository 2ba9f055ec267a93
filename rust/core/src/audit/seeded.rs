//! Seeded bugs and damaged structures: `check()` names the rule that each of them breaks.

use crate::audit::faults::{Fault, with};
use crate::audit::{Report, Rule};
use crate::cache::{Cache, Config};
use crate::checkpoint::{Commit, Listed, Reservation, Stored};
use crate::handle::Sequence;
use crate::namespace::Namespace;
use crate::pool::{PoolConfig, PoolKind, Slots};
use crate::sequence::StartOptions;
use crate::tree::{Node, NodeIdx};

const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

/// Pages of 2 tokens, checkpoints every 2.
fn cache() -> Cache {
    let (kv, active, checkpoints) = (
        PoolConfig::internal(16),
        PoolConfig::internal(4),
        PoolConfig::internal(4),
    );
    Cache::new(Config {
        page_size: 2,
        checkpoint_stride: 2,
        kv,
        active,
        checkpoints,
    })
    .unwrap()
}

/// A running request whose slot is ready.
fn start(cache: &mut Cache, tokens: &[u32]) -> Sequence {
    let started = cache
        .start(&Namespace::default(), tokens, StartOptions::default())
        .unwrap();
    cache.loaded(&started.sequence).unwrap();
    started.sequence
}

fn checkpoint(cache: &mut Cache, sequence: &Sequence, depth: usize) -> Stored {
    let source = cache.view(sequence).unwrap().slot();
    checkpoint_from(cache, sequence, depth, source)
}

fn checkpoint_from(cache: &mut Cache, sequence: &Sequence, depth: usize, source: u32) -> Stored {
    let reservation = cache.reserve_checkpoint(sequence, depth, source).unwrap();
    let Reservation::Pending(pending) = reservation else {
        panic!("{reservation:?}")
    };
    match cache.commit(sequence, pending).unwrap() {
        Commit::Stored(stored) => stored,
        skipped => panic!("{skipped:?}"),
    }
}

/// A cache with one prefix of 8 tokens.
fn filled() -> (Cache, Stored) {
    let mut cache = cache();
    let sequence = start(&mut cache, &PROMPT);
    let stored = checkpoint(&mut cache, &sequence, 8);
    cache.finish(sequence).unwrap();
    (cache, stored)
}

/// A request that has not yet loaded the state it hit.
fn reader(cache: &mut Cache) -> Sequence {
    let started = cache
        .start(&Namespace::default(), &PROMPT, StartOptions::default())
        .unwrap();
    assert_eq!(started.matched.length, 8);
    started.sequence
}

fn root(cache: &mut Cache) -> &mut Node {
    cache
        .ledger
        .prefixes
        .damage()
        .0
        .node_mut(NodeIdx::forged(0))
}

fn node(cache: &mut Cache) -> &mut Node {
    cache
        .ledger
        .prefixes
        .damage()
        .0
        .node_mut(NodeIdx::forged(1))
}

fn report(cache: &mut Cache) -> Report {
    cache.check(None).expect_err("the damage is found")
}

/// The checker finds `rule` broken, and says something that contains `words`.
fn assert_found(cache: &mut Cache, rule: Rule, words: &str) {
    let report = report(cache);
    let found = report
        .violations
        .iter()
        .any(|violation| violation.rule == rule && violation.detail.contains(words));
    assert!(found, "{rule:?} with {words:?} is not in: {report}");
}

#[test]
fn a_lost_slot_is_found() {
    let mut cache = cache();
    let sequence = start(&mut cache, &PROMPT);
    with(Fault::LostSlot, || cache.finish(sequence)).unwrap();
    assert_found(&mut cache, Rule::OneOwner, "kv slot 1 is lost");
    assert_found(&mut cache, Rule::OneOwner, "active slot 1 is lost");
    assert_found(
        &mut cache,
        Rule::Counters,
        "does not add up to its capacity",
    );
}

#[test]
fn a_checkpoint_freed_while_it_is_read_is_found() {
    let (mut cache, stored) = filled();
    let _reader = reader(&mut cache);
    with(Fault::EarlyFree, || cache.invalidate(&stored)).unwrap();
    assert_found(
        &mut cache,
        Rule::PinnedCheckpoint,
        "pins on checkpoints that are gone",
    );
    let (mut cache, _) = filled();
    let _reader = reader(&mut cache);
    with(Fault::EarlyFree, || cache.reset());
    assert_found(
        &mut cache,
        Rule::PinnedCheckpoint,
        "pins on checkpoints that are gone",
    );
}

#[test]
fn a_pin_that_eviction_ignores_is_found() {
    let (mut cache, _) = filled();
    let _reader = with(Fault::IgnoredPin, || reader(&mut cache));
    assert_found(&mut cache, Rule::Order, "No demanded, State noted");
}

#[test]
fn pages_pinned_without_being_counted_are_found() {
    let (mut cache, _) = filled();
    let _reader = with(Fault::WrongCounter, || reader(&mut cache));
    assert_found(&mut cache, Rule::Counters, "kv pool counts");
}

#[test]
fn pins_left_on_the_upper_half_of_a_split_are_found() {
    let mut cache = cache();
    let sequence = start(&mut cache, &PROMPT);
    let _stored = checkpoint(&mut cache, &sequence, 8);
    let further = cache.take_slot(&sequence).unwrap();
    let _inner = with(Fault::PinsOnUpperHalf, || {
        checkpoint_from(&mut cache, &sequence, 4, further)
    });
    assert_found(&mut cache, Rule::Pins, "counts 0 pins, 1 are held");
}

#[test]
fn a_removed_node_left_among_the_children_is_found() {
    let (mut cache, _) = filled();
    with(Fault::StaleChild, || cache.evict(PoolKind::Checkpoint, 1));
    assert_found(
        &mut cache,
        Rule::Links,
        "the table of children has 1 entries for 0 attached nodes",
    );
}

#[test]
fn a_split_that_is_never_undone_is_found() {
    let mut cache = cache();
    let sequence = start(&mut cache, &PROMPT);
    let inner = checkpoint(&mut cache, &sequence, 4);
    let _outer = checkpoint(&mut cache, &sequence, 8);
    with(Fault::SplitForGood, || cache.evict(PoolKind::Checkpoint, 1));
    assert_found(
        &mut cache,
        Rule::Joined,
        "neither branches nor holds a state nor is leased",
    );
    assert_eq!(inner.depth, 4);
}

#[test]
fn without_a_fault_the_same_operations_are_clean() {
    let mut cache = cache();
    let sequence = start(&mut cache, &PROMPT);
    let stored = checkpoint(&mut cache, &sequence, 8);
    let reader = reader(&mut cache);
    cache.check(None).unwrap();
    cache.loaded(&reader).unwrap();
    let further = cache.take_slot(&sequence).unwrap();
    let _inner = checkpoint_from(&mut cache, &sequence, 4, further);
    cache.check(None).unwrap();
    cache.give_back_slot(&sequence, further).unwrap();
    cache.finish(sequence).unwrap();
    cache.check(None).unwrap();
    cache.invalidate(&stored).unwrap();
    cache.reset();
    cache.finish(reader).unwrap();
    cache.evict(PoolKind::Checkpoint, 1);
    cache.check(None).unwrap();
}

/// Damage to a cache whose node 1 ends at 8 tokens, is leased by a sequence and has a checkpoint.
type Damage = fn(&mut Cache);

#[test]
fn the_checker_names_the_rule_that_damage_breaks() {
    let damages: [(Rule, &str, Damage); 23] = [
        (Rule::Pages, "has 8 tokens and 3 pages of 2", |cache| {
            let _lost = node(cache).pages.split_off(3);
        }),
        (Rule::Depth, "has a checkpoint at depth 9", |cache| {
            node(cache).end = 9
        }),
        (
            Rule::Links,
            "ending at 9 is not linked as it says",
            |cache| {
                node(cache).end = 9;
            },
        ),
        (
            Rule::Links,
            "counts 1 children, 0 name it as parent",
            |cache| {
                node(cache).children = 1;
            },
        ),
        (Rule::Depth, "has a checkpoint at depth 0,", |cache| {
            let node = node(cache);
            (node.end, node.key) = (0, [].into());
        }),
        (
            Rule::Links,
            "node 0 ending at 0 is not linked as it says",
            |cache| {
                root(cache).key = [1, 2].into();
            },
        ),
        (
            Rule::Links,
            "node 0 ending at 0 is not linked as it says",
            |cache| {
                root(cache).attached = false;
            },
        ),
        (Rule::Order, "checkpoint of node 1", |cache| {
            node(cache).checkpoint.as_mut().unwrap().listed = Listed::Leaf;
        }),
        (
            Rule::Leaf,
            "is an unpinned leaf without a checkpoint",
            |cache| {
                let node = node(cache);
                (node.pins, node.checkpoint) = (0, None);
            },
        ),
        (Rule::Pins, "node 1 counts 2 pins, 1 are held", |cache| {
            node(cache).pins = 2;
        }),
        (
            Rule::Pins,
            "checkpoint of node 1 counts 1 pins, 0 are held",
            |cache| {
                node(cache).checkpoint.as_mut().unwrap().pins = 1;
            },
        ),
        (
            Rule::Order,
            "the policy has 1 candidates, 0 can be evicted",
            |cache| {
                node(cache).checkpoint = None;
            },
        ),
        (
            Rule::OneOwner,
            "slots it never gave out: [(99, Sequence(0))]",
            |cache| {
                cache.sequences[0]
                    .lease
                    .holdings
                    .pages
                    .append(Slots::forged(99));
            },
        ),
        (
            Rule::OneOwner,
            "kv slot 2 is owned twice: [Node { index: 1, pinned: true }, Sequence(0)]",
            |cache| {
                cache.sequences[0]
                    .lease
                    .holdings
                    .pages
                    .append(Slots::forged(2));
            },
        ),
        (Rule::Counters, "kv pool counts", |cache| {
            let private = cache.sequences[0].lease.holdings.pages.split_off(0);
            node(cache).pages.append(private);
        }),
        (
            Rule::PinnedCheckpoint,
            "is pinned, its node is not",
            |cache| {
                let node = node(cache);
                (node.pins, node.checkpoint.as_mut().unwrap().pins) = (0, 1);
            },
        ),
        (
            Rule::Pins,
            "withdrawn checkpoint 3 counts 0 pins, 0 are held",
            |cache| {
                let checkpoint = node(cache).checkpoint.take().unwrap();
                cache.ledger.prefixes.damage().1.insert(3, checkpoint);
            },
        ),
        (
            Rule::Lease,
            "leases depth 6, its node ends at Some(8)",
            |cache| cache.sequences[0].lease.depth = 6,
        ),
        (
            Rule::Lease,
            "claims 12 tokens with 5 pages, 6 are needed",
            |cache| cache.sequences[0].claimed = 12,
        ),
        (Rule::Lease, "do not continue its leased prefix", |cache| {
            cache.sequences[0].tokens[0] = 77
        }),
        (
            Rule::Writing,
            "node 1 is not proven, and nothing writes it",
            |cache| {
                node(cache).proven = false;
            },
        ),
        (Rule::Writing, "ready false, being written false", |cache| {
            node(cache).checkpoint.as_mut().unwrap().ready = false;
        }),
        (Rule::Order, "the policy disagrees", |cache| {
            node(cache).checkpoint.as_mut().unwrap().used = 77;
        }),
    ];
    for (rule, words, damage) in damages {
        let mut cache = cache();
        let sequence = start(&mut cache, &PROMPT);
        let _stored = checkpoint(&mut cache, &sequence, 8);
        cache.check(None).unwrap();
        damage(&mut cache);
        assert_found(&mut cache, rule, words);
    }
}

#[test]
fn a_run_that_starts_before_its_prompt_or_hangs_from_itself_is_reported_and_not_followed() {
    let damages: [Damage; 2] = [
        |cache| node(cache).end = 3,
        |cache| node(cache).parent = Some(NodeIdx::forged(1)),
    ];
    for damage in damages {
        let mut cache = cache();
        let sequence = start(&mut cache, &PROMPT);
        let _stored = checkpoint(&mut cache, &sequence, 8);
        damage(&mut cache);
        assert_found(&mut cache, Rule::Links, "is not linked as it says");
        assert_found(&mut cache, Rule::Lease, "do not continue its leased prefix");
    }
}

#[test]
fn all_violations_are_reported_at_once() {
    let (mut cache, _) = filled();
    let node = node(&mut cache);
    (node.end, node.children) = (9, 3);
    let report = report(&mut cache);
    assert!(report.violations.len() > 2);
    let text = report.to_string();
    assert!(
        text.starts_with(&format!(
            "{} invariants broken\n  ",
            report.violations.len()
        )),
        "{text}"
    );
    assert!(
        report
            .violations
            .iter()
            .all(|violation| text.contains(&violation.to_string()))
    );
}
