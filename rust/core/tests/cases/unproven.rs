//! A page of the tree reaches another request only once its writer's step has retired, and a refusal
//! never takes a good state with it. The oracle is what the pages hold, not what is counted.

use std::collections::BTreeMap;

use radixstate::Published;

use crate::*;

/// The engine's KV pages: which request wrote each, and for which page of its prompt.
#[derive(Default)]
struct Written(BTreeMap<u32, (char, usize)>);

impl Written {
    /// The work of a request runs. It fills the pages that the request had when it was enqueued.
    fn by(&mut self, request: char, pages: &[u32]) {
        let tags = (0..).map(|index| (request, index));
        self.0.extend(pages.iter().copied().zip(tags));
    }

    /// Each of `pages` was written for its place in the prompt, by one of `requests`.
    fn assert_read(&self, pages: &[u32], requests: &[char]) {
        for (index, page) in pages.iter().enumerate() {
            let found = self.0.get(page);
            let good = found.is_some_and(|(by, place)| requests.contains(by) && *place == index);
            assert!(
                good,
                "a request decodes on a page that was not written: {index} is page {page}, {found:?}"
            );
        }
    }
}

/// A state was stored with all it needs, or was skipped and can be stored now.
fn assert_kept(cache: &mut Cache, tokens: &[u32], sequence: &Sequence, depth: usize) {
    let found = look_up(cache, tokens).length;
    let kept = found == depth || matches!(reserve(cache, sequence, depth), Reservation::Pending(_));
    assert!(
        kept,
        "a refusal took a good state with it: {found} of {depth} tokens are found"
    );
}

fn two(cache: &mut Cache) -> (Sequence, Sequence) {
    (start(cache, &prompt(1, 9)), start(cache, &prompt(1, 9)))
}

#[test]
fn a_deeper_store_keeps_its_own_pages_while_the_writer_of_the_shallower_is_in_flight() {
    let (mut cache, mut written) = (cache(16, 2, 4), Written::default());
    let (a, b) = two(&mut cache);
    let step = cache.begin_step();
    let of_b = pages(&cache, &b);
    let refused = checkpoint(&mut cache, &a, 4);
    try_checkpoint(&mut cache, &b, 8);
    written.by('b', &of_b);
    cache.abort(a).unwrap();
    cache.retire_step(step, &[refused]).unwrap();
    written.assert_read(&pages(&cache, &b), &['b']);
}

#[test]
fn a_shallower_store_keeps_its_own_pages_while_the_writer_of_the_deeper_is_in_flight() {
    let (mut cache, mut written) = (cache(16, 2, 4), Written::default());
    let (a, b) = two(&mut cache);
    let step = cache.begin_step();
    let of_b = pages(&cache, &b);
    let refused = checkpoint(&mut cache, &a, 8);
    try_checkpoint(&mut cache, &b, 4);
    written.by('b', &of_b);
    cache.abort(a).unwrap();
    cache.retire_step(step, &[refused]).unwrap();
    written.assert_read(&pages(&cache, &b), &['b']);
}

#[test]
fn a_duplicate_keeps_its_own_pages_while_the_writer_of_the_first_is_in_flight() {
    let (mut cache, mut written) = (cache(16, 2, 4), Written::default());
    let (a, b) = two(&mut cache);
    let step = cache.begin_step();
    let of_b = pages(&cache, &b);
    let late = pending(&mut cache, &b, 8);
    let refused = checkpoint(&mut cache, &a, 8);
    cache.commit(&b, late).unwrap();
    written.by('b', &of_b);
    cache.abort(a).unwrap();
    cache.retire_step(step, &[refused]).unwrap();
    written.assert_read(&pages(&cache, &b), &['b']);
}

#[test]
fn a_branch_keeps_its_own_pages_while_the_writer_of_another_is_in_flight() {
    let (mut cache, mut written) = (cache(16, 2, 4), Written::default());
    let a = start(&mut cache, &prompt(1, 9));
    let b = start(&mut cache, &fork(&prompt(1, 4), 1, 5));
    let step = cache.begin_step();
    let of_b = pages(&cache, &b);
    let refused = checkpoint(&mut cache, &a, 8);
    try_checkpoint(&mut cache, &b, 8);
    written.by('b', &of_b);
    cache.abort(a).unwrap();
    cache.retire_step(step, &[refused]).unwrap();
    written.assert_read(&pages(&cache, &b), &['b']);
}

#[test]
fn a_request_whose_step_has_retired_holds_no_page_of_an_older_step_in_flight() {
    let (mut cache, mut written) = (cache(16, 2, 4), Written::default());
    let (a, b) = two(&mut cache);
    let _older = cache.begin_step();
    checkpoint(&mut cache, &a, 4);
    let younger = cache.begin_step();
    let of_b = pages(&cache, &b);
    try_checkpoint(&mut cache, &b, 8);
    written.by('b', &of_b);
    cache.retire_step(younger, &[]).unwrap();
    written.assert_read(&pages(&cache, &b), &['a', 'b']);
}

#[test]
fn a_state_outlives_a_shallower_one_of_its_step_that_was_refused() {
    let mut cache = cache(16, 2, 4);
    let (a, b) = two(&mut cache);
    let step = cache.begin_step();
    let refused = checkpoint(&mut cache, &a, 4);
    try_checkpoint(&mut cache, &b, 8);
    cache.abort(a).unwrap();
    cache.retire_step(step, &[refused]).unwrap();
    assert_kept(&mut cache, &prompt(1, 9), &b, 8);
}

#[test]
fn a_state_outlives_a_shallower_one_of_an_older_step_that_was_refused() {
    let mut cache = cache(16, 2, 4);
    let (a, b) = two(&mut cache);
    let older = cache.begin_step();
    let refused = checkpoint(&mut cache, &a, 4);
    let younger = cache.begin_step();
    try_checkpoint(&mut cache, &b, 8);
    cache.retire_step(younger, &[]).unwrap();
    cache.abort(a).unwrap();
    cache.retire_step(older, &[refused]).unwrap();
    assert_kept(&mut cache, &prompt(1, 9), &b, 8);
}

#[test]
fn a_state_outlives_the_late_refusal_of_a_shallower_one_that_was_in_flight_with_it() {
    let mut cache = cache(16, 2, 4);
    let (a, b) = two(&mut cache);
    let step = cache.begin_step();
    let refused = checkpoint(&mut cache, &a, 4);
    try_checkpoint(&mut cache, &b, 8);
    cache.retire_step(step, &[]).unwrap();
    cache.invalidate(&refused).unwrap();
    assert_kept(&mut cache, &prompt(1, 9), &b, 8);
}

#[test]
fn publishing_names_no_page_of_a_step_in_flight() {
    let (mut cache, mut written) = (engine(16, 4), Written::default());
    let (a, b) = (
        lease(&mut cache, &prompt(1, 9)),
        lease(&mut cache, &prompt(1, 9)),
    );
    let step = cache.begin_step();
    let refused = stored(publish(&mut cache, &a, &prompt(1, 4), &[1, 2]));
    let published = publish(&mut cache, &b, &prompt(1, 8), &[3, 4, 5, 6]);
    written.by('b', &[3, 4, 5, 6]);
    cache.retire_step(step, &[refused]).unwrap();
    let mut table = cache.lease_pages(&b, 0).unwrap();
    table.extend(&[3, 4, 5, 6][table.len()..]);
    assert_eq!(published.replaced, 0..0);
    written.assert_read(&table, &['b']);
}

#[test]
fn a_published_state_outlives_a_shallower_one_that_was_refused() {
    let mut cache = engine(16, 4);
    let (a, b) = (
        lease(&mut cache, &prompt(1, 9)),
        lease(&mut cache, &prompt(1, 9)),
    );
    let step = cache.begin_step();
    let refused = stored(publish(&mut cache, &a, &prompt(1, 4), &[1, 2]));
    let Published { outcome, .. } = publish(&mut cache, &b, &prompt(1, 8), &[3, 4, 5, 6]);
    cache.retire_step(step, &[refused]).unwrap();
    let (skipped, found) = (
        matches!(outcome, Commit::Skipped(_)),
        look_up(&mut cache, &prompt(1, 9)).length,
    );
    assert!(
        skipped || found == 8,
        "a refusal took a good state with it: {found} of 8 tokens are found"
    );
}

type Engine = Cache<EnginePages>;

fn publish(cache: &mut Engine, lease: &Lease, tokens: &[u32], pages: &[u32]) -> Published {
    match cache.reserve(lease, tokens, pages).unwrap() {
        Reservation::Pending(pending) => cache.publish(lease, tokens, pages, pending).unwrap(),
        Reservation::Skipped(skip) => Published {
            outcome: Commit::Skipped(skip),
            replaced: 0..0,
        },
    }
}

fn stored(published: Published) -> Stored {
    match published.outcome {
        Commit::Stored(stored) => stored,
        skipped @ Commit::Skipped(_) => panic!("{skipped:?}"),
    }
}

/// Stores a state, unless the cache skips it: that is as good, while its pages are another's.
fn try_checkpoint(cache: &mut Cache, sequence: &Sequence, depth: usize) {
    if let Reservation::Pending(pending) = reserve(cache, sequence, depth) {
        cache.commit(sequence, pending).unwrap();
    }
}
