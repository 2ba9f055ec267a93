//! Least recently stored or hit first.

use std::collections::BTreeSet;

use super::{Candidate, CandidateId, Policy, Scope};

type Order = BTreeSet<(u64, CandidateId)>;

/// Evicts the checkpoint first that was stored or hit the longest ago.
#[derive(Debug, Clone, Default)]
pub struct Lru {
    states: Order,
    leaves: Order,
}

impl Policy for Lru {
    fn insert(&mut self, candidate: &Candidate) {
        let entry = (candidate.used, candidate.id);
        self.states.insert(entry);
        if candidate.leaf {
            self.leaves.insert(entry);
        }
    }

    fn update(&mut self, candidate: &Candidate) {
        let entry = (candidate.used, candidate.id);
        if candidate.leaf {
            self.leaves.insert(entry);
        } else {
            self.leaves.remove(&entry);
        }
    }

    fn remove(&mut self, candidate: &Candidate) {
        let entry = (candidate.used, candidate.id);
        self.states.remove(&entry);
        if candidate.leaf {
            self.leaves.remove(&entry);
        }
    }

    fn victim(&mut self, scope: Scope) -> Option<CandidateId> {
        let order = match scope {
            Scope::State => &self.states,
            Scope::Leaf => &self.leaves,
        };
        order.first().map(|&(_, id)| id)
    }

    fn holds(&self, candidate: &Candidate) -> bool {
        let entry = (candidate.used, candidate.id);
        self.states.contains(&entry) && self.leaves.contains(&entry) == candidate.leaf
    }

    fn count(&self) -> usize {
        self.states.len()
    }
}
