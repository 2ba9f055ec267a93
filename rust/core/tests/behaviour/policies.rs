//! What the policies of the crate keep, and what one of the caller's is told.

use std::sync::{Arc, Mutex};

use radixstate::policy::{
    Candidate, CandidateId, Creation, Fingerprint, Lru, Mark, Policy, Scope, by_name,
};
use radixstate::{Cache, Config, Namespace, PoolConfig, PoolKind, Reservation};

use super::{assert_sound, checkpoint, fork, look_up, prompt, start, store};

/// A cache of `n` states, by the name of its policy.
fn cache_of(n: u32, policy: &str) -> Cache {
    let config = Config::linear(4, PoolConfig::internal(2), PoolConfig::internal(n));
    Cache::with_policy(config, by_name(policy).unwrap()).unwrap()
}

/// Serves prompts of 9 tokens and counts those that reused 8.
fn hits(cache: &mut Cache, families: impl IntoIterator<Item = u32>) -> usize {
    let before = cache.stats().hits;
    for family in families {
        serve(cache, family);
    }
    assert_sound(cache);
    (cache.stats().hits - before) as usize
}

fn serve(cache: &mut Cache, family: u32) {
    let sequence = start(cache, &prompt(family, 9));
    let slot = cache.view(&sequence).unwrap().slot();
    if let Reservation::Pending(pending) = cache.reserve_checkpoint(&sequence, 8, slot).unwrap() {
        cache.commit(&sequence, pending).unwrap();
    }
    cache.finish(sequence).unwrap();
}

#[test]
fn a_loop_that_is_longer_than_the_pool_is_partly_kept() {
    let rounds = || (0..2_000).map(|n| n % 100);
    assert_eq!(hits(&mut cache_of(50, "lru"), rounds()), 0);
    let learned = hits(&mut cache_of(50, "hit-density"), rounds());
    assert!(learned > 700, "{learned} of 2000, half of which could hit");
}

#[test]
fn prompts_that_come_once_do_not_push_out_what_is_asked_for() {
    let mixed = || (0..4_000).map(|n| if n % 2 == 0 { n / 2 % 40 } else { 1_000 + n });
    let (recent, learned) = (
        hits(&mut cache_of(60, "lru"), mixed()),
        hits(&mut cache_of(60, "hit-density"), mixed()),
    );
    assert_eq!(recent, 0, "80 prompts come between two of a kind");
    assert!(learned > 1_500, "{learned} of 2000 that were seen before");
}

#[test]
fn of_two_states_of_one_age_the_one_that_costs_more_stays() {
    let mut cache = cache_of(4, "hit-density");
    let sequence = start(&mut cache, &prompt(1, 41));
    for depth in [4, 8, 40] {
        checkpoint(&mut cache, &sequence, depth);
    }
    cache.finish(sequence).unwrap();
    cache.evict(PoolKind::Checkpoint, 2);
    assert_eq!(look_up(&mut cache, &prompt(1, 41)).length, 40);
    assert_sound(&mut cache);
}

#[test]
fn a_prompt_that_waits_can_be_kept_by_touching_it() {
    let mut cache = cache_of(4, "hit-density");
    for family in 0..4 {
        store(&mut cache, &prompt(family, 8));
    }
    for _ in 0..20 {
        let waiting = prompt(2, 8);
        assert_eq!(cache.touch(&Namespace::default(), &waiting), 8);
        let sequence = start(&mut cache, &[9; 3]);
        cache.finish(sequence).unwrap();
    }
    cache.touch(&Namespace::default(), &prompt(2, 8));
    cache.evict(PoolKind::Checkpoint, 3);
    assert_eq!(look_up(&mut cache, &fork(&prompt(2, 8), 1, 1)).length, 8);
}

#[test]
fn ranks_that_learn_decide_alike_though_one_is_looked_at() {
    let (mut quiet, mut watched) = (cache_of(100, "hit-density"), cache_of(100, "hit-density"));
    for n in 0..3_000_u32 {
        let family = n.wrapping_mul(2_654_435_761) >> 24;
        serve(&mut quiet, family);
        serve(&mut watched, family);
        if n % 100 == 0 {
            let next = watched.draw();
            assert_eq!(
                watched.draw(),
                next,
                "a victim that is asked for twice is the same"
            );
            watched.check(None).unwrap();
            look_up(&mut watched, &prompt(family, 9));
        }
        assert_eq!(quiet.digest(), watched.digest(), "request {n}");
    }
    assert!(quiet.stats().evictions.for_checkpoint.checkpoints > 1_000);
}

#[test]
fn pages_are_freed_where_they_cost_the_fewest_flops_for_a_byte() {
    let sizes = [20, 2, 8].map(PoolConfig::internal);
    let config = Config {
        page_size: 2,
        checkpoint_stride: 4,
        kv: sizes[0].bytes(1 << 20),
        active: sizes[1],
        checkpoints: sizes[2],
    };
    let mut cache = Cache::with_policy(config, by_name("hit-density").unwrap()).unwrap();
    store(&mut cache, &prompt(1, 24));
    store(&mut cache, &prompt(2, 4));
    assert_sound(&mut cache);
    // Of a linear cost each page saves the same; the quadratic part speaks for the long prompt.
    let freed = cache.evict(PoolKind::Kv, 1);
    assert_eq!((freed.kv, freed.checkpoints), (2, 1));
    assert_sound(&mut cache);
}

/// What a policy was told that can be compared.
#[derive(Debug, Clone, PartialEq)]
enum Told {
    Begin(Vec<Fingerprint>),
    Created(usize, Creation),
    Hit(usize),
}

/// Evicts as `Lru` does and writes down what it learns of requests.
#[derive(Default)]
struct Scribe {
    lru: Lru,
    told: Arc<Mutex<Vec<Told>>>,
}

impl Scribe {
    fn note(&self, told: Told) {
        self.told.lock().unwrap().push(told);
    }
}

impl Policy for Scribe {
    fn begin(&mut self, prompt: &[Fingerprint]) -> Mark {
        self.note(Told::Begin(prompt.to_vec()));
        Mark(7)
    }

    fn created(&mut self, candidate: &Candidate, creation: Creation) {
        self.note(Told::Created(candidate.depth, creation));
    }

    fn hit(&mut self, candidate: &Candidate) {
        self.note(Told::Hit(candidate.depth));
    }

    fn insert(&mut self, candidate: &Candidate) {
        self.lru.insert(candidate);
    }

    fn update(&mut self, candidate: &Candidate) {
        self.lru.update(candidate);
    }

    fn remove(&mut self, candidate: &Candidate) {
        self.lru.remove(candidate);
    }

    fn victim(&mut self, scope: Scope) -> Option<CandidateId> {
        self.lru.victim(scope)
    }

    fn holds(&self, candidate: &Candidate) -> bool {
        self.lru.holds(candidate)
    }

    fn count(&self) -> usize {
        self.lru.count()
    }

    fn wants_prefixes(&self) -> bool {
        true
    }
}

#[test]
fn a_policy_learns_which_prefixes_a_request_asks_for_and_which_it_stores() {
    let scribe = Scribe::default();
    let told = Arc::clone(&scribe.told);
    let config = Config::linear(4, PoolConfig::internal(2), PoolConfig::internal(4));
    let mut cache = Cache::with_policy(config, Box::new(scribe)).unwrap();

    let tokens = prompt(1, 14);
    let sequence = start(&mut cache, &tokens[..9]);
    cache.grow(&sequence, 5).unwrap();
    cache.append(&sequence, &tokens[9..]).unwrap();
    for depth in [4, 8, 12] {
        checkpoint(&mut cache, &sequence, depth);
    }
    cache.finish(sequence).unwrap();
    // It is evicted, and still what the next request is told to ask for.
    cache.evict(PoolKind::Checkpoint, 4);
    let sequence = start(&mut cache, &tokens);
    cache.finish(sequence).unwrap();
    store(&mut cache, &prompt(1, 4));
    let sequence = start(&mut cache, &tokens);
    cache.finish(sequence).unwrap();

    let told = told.lock().unwrap().clone();
    let Some(Told::Begin(asked)) = told.last().map(|_| told[4].clone()) else {
        panic!("{told:?}")
    };
    let created = |depth: usize, end| {
        let creation = Creation {
            prefix: asked[depth / 4 - 1],
            mark: Mark(7),
            end,
        };
        Told::Created(depth, creation)
    };
    assert_eq!(asked.len(), 3, "4, 8 and 12 of 14 tokens");
    let expected = [
        Told::Begin(asked[..2].to_vec()),
        created(4, false),
        created(8, true),
        created(12, true),
        Told::Begin(asked.clone()),
        Told::Begin(vec![]),
        created(4, true),
        Told::Begin(asked.clone()),
        Told::Hit(4),
    ];
    assert_eq!(told, expected);
}
