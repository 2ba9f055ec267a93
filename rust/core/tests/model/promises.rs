//! What the cache promises a policy, held against every call: each candidate is inserted once,
//! removed as it was last told, and described as it is, its anchor included.

use std::collections::BTreeMap;

use arbitrary::Unstructured;
use radixstate::policy::{Candidate, CandidateId, Creation, Fingerprint, Lru, Mark, Policy, Scope};
use radixstate::{Config, EnginePages, LogicalPages, OwnPages};
use radixstate_replay::{Who, decode};

use crate::differential::{Both, Front};
use crate::soak::draw;

/// Evicts as `Lru` does, and remembers each candidate as it was told.
#[derive(Default)]
struct Witness {
    lru: Lru,
    told: BTreeMap<CandidateId, Candidate>,
    /// When each was stored or hit last: it is known before it is inserted.
    known: BTreeMap<CandidateId, u64>,
    /// The depth of each prefix.
    depths: BTreeMap<Fingerprint, usize>,
    requests: u32,
}

impl Policy for Witness {
    fn insert(&mut self, candidate: &Candidate) {
        let before = self.told.insert(candidate.id, *candidate);
        assert_eq!(before, None, "inserted once");
        let used = self.known.get(&candidate.id);
        assert_eq!(used, Some(&candidate.used), "created or hit before");
        self.lru.insert(candidate);
    }

    fn update(&mut self, candidate: &Candidate) {
        let before = self.told.insert(candidate.id, *candidate);
        assert!(before.is_some(), "what is updated is inserted");
        self.lru.update(candidate);
    }

    fn remove(&mut self, candidate: &Candidate) {
        let told = self.told.remove(&candidate.id);
        assert_eq!(told, Some(*candidate), "removed as it was last told");
        self.lru.remove(candidate);
    }

    fn hit(&mut self, candidate: &Candidate) {
        let told = self.told.get(&candidate.id);
        assert_eq!(told, None, "its reader has pinned it");
        let used = self.known.insert(candidate.id, candidate.used);
        assert!(
            used < Some(candidate.used),
            "created before, and recent now"
        );
    }

    fn begin(&mut self, prompt: &[Fingerprint]) -> Mark {
        let known = prompt.iter().filter_map(|prefix| self.depths.get(prefix));
        assert!(known.is_sorted(), "the shallowest prefix comes first");
        self.requests += 1;
        Mark(self.requests)
    }

    fn created(&mut self, candidate: &Candidate, creation: Creation) {
        let told = self.told.get(&candidate.id);
        assert_eq!(told, None, "created before it is inserted");
        self.known.insert(candidate.id, candidate.used);
        let depth = self.depths.insert(creation.prefix, candidate.depth);
        assert_eq!(depth.unwrap_or(candidate.depth), candidate.depth);
        let Mark(request) = creation.mark;
        assert!(0 < request && request <= self.requests, "its request began");
    }

    fn victim(&mut self, scope: Scope) -> Option<CandidateId> {
        self.lru.victim(scope)
    }

    fn holds(&self, candidate: &Candidate) -> bool {
        self.told.get(&candidate.id) == Some(candidate) && self.lru.holds(candidate)
    }

    fn count(&self) -> usize {
        self.told.len()
    }

    fn wants_anchors(&self) -> bool {
        true
    }

    fn wants_prefixes(&self) -> bool {
        true
    }
}

#[test]
fn a_policy_is_told_the_truth_and_nothing_twice() {
    for seed in 2_000..2_060 {
        let drawn = decode::config(&mut Unstructured::new(&draw(seed, 0))).expect("any bytes do");
        match drawn.who {
            Who::Cache => serve::<OwnPages>(drawn.config, seed),
            Who::Engine => serve::<EnginePages>(drawn.config, seed),
            Who::Logical => serve::<LogicalPages>(drawn.config, seed),
        }
    }
}

fn serve<O: Front>(config: Config, seed: u64) {
    let mut both = Both::<O>::with_policy(config, Box::new(Witness::default()));
    for step in 1..=300 {
        let op = decode::operation(&mut Unstructured::new(&draw(seed, step)));
        both.apply(&op.expect("any bytes do"));
        both.verify();
    }
    both.wind_down(seed.is_multiple_of(2));
}
