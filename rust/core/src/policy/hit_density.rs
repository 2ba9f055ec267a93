//! Evicts first what saves the least for the time that it is kept.

use smallvec::SmallVec;

use super::bag::{Bag, Entry};
use super::history::{Class, History};
use super::survival::Densities;
use super::{Candidate, CandidateId, Cost, Creation, Fingerprint, Mark, Policy, Scope};
use crate::outline::mix;

/// Candidates that are compared for a victim; all of them if there are no more.
const SAMPLE: usize = 64;
/// Intervals that are remembered, of 32 bytes each.
const HISTORY: u32 = 60_000;
/// Any number: what matters is that all ranks have the same.
const SEED: u64 = 28_185;

/// Evicts the checkpoint first that promises the fewest saved FLOPs for each request that it is
/// kept, of a sample of 64.
///
/// How soon a prefix is asked for again is learned from those that were stored or asked for before,
/// by their age in requests and by what they are: the end of a first, second or later turn, an end
/// that was continued, where prompts part, or what was asked for repeatedly. So a loop that is
/// longer than the pool, or a scan of prompts that come once, does not empty it. What was seen is
/// remembered after its state has gone: the newest 60,000 intervals, 3 MB.
///
/// For a slot all states are equally large; for pages it is FLOPs for each byte freed.
#[derive(Debug, Clone)]
pub struct HitDensity {
    cost: Cost,
    history: History,
    densities: Densities,
    /// The request with which to learn again.
    learn_at: u64,
    /// What is known of each checkpoint, by its number.
    known: Vec<Known>,
    states: Bag,
    leaves: Bag,
    /// Counts calls, so that each victim is sampled anew, and the same one if asked for twice.
    calls: u64,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    prefix: Fingerprint,
    class: Class,
    /// The request that stored it or asked for it last.
    since: u64,
}

impl Default for HitDensity {
    fn default() -> Self {
        Self::new(Cost::default())
    }
}

impl HitDensity {
    /// For a model whose prefill costs `cost`.
    pub fn new(cost: Cost) -> Self {
        Self {
            cost,
            history: History::new(HISTORY),
            densities: Densities::default(),
            learn_at: 0,
            known: Vec::new(),
            states: Bag::default(),
            leaves: Bag::default(),
            calls: 0,
        }
    }

    /// Seldom enough to cost a request little: 60,000 intervals are read.
    fn learn(&mut self) {
        let now = self.history.now();
        if now >= self.learn_at {
            self.densities = Densities::learn(&self.history);
            self.learn_at = now + (now / 10).clamp(100, 500);
        }
    }

    fn entry(&self, candidate: &Candidate) -> Entry {
        let Known { class, since, .. } = self.known[candidate.id.number()];
        Entry {
            id: candidate.id,
            class,
            since,
            saves: self.cost.of(candidate.depth) - self.cost.of(candidate.anchor),
            bytes: candidate.bytes,
        }
    }

    fn worth(&self, entry: &Entry, scope: Scope) -> f64 {
        let age = self.history.now() - entry.since;
        let saved = self.densities.of(entry.class, age) * entry.saves;
        match scope {
            Scope::State => saved,
            Scope::Leaf => saved / entry.bytes.max(1) as f64,
        }
    }
}

impl Policy for HitDensity {
    fn begin(&mut self, prompt: &[Fingerprint]) -> Mark {
        self.calls += 1;
        self.history.begin();
        self.learn();
        let class = |&prefix| Some((prefix, self.history.class(prefix)?));
        let mut seen = prompt.iter().enumerate().rev();
        let deepest = seen.find_map(|(at, prefix)| Some((at, class(prefix)?)));
        let Some((at, (prefix, class))) = deepest else {
            return Mark(Class::First as u32);
        };
        // A prompt that ends where an earlier one did repeats it.
        let goes_on = at + 1 < prompt.len();
        let next_turn = class.next_turn().filter(|_| goes_on);
        let class = next_turn.map_or(class.asked(), |_| Class::Superseded);
        self.history.ask(prefix, class);
        Mark(next_turn.unwrap_or(Class::First) as u32)
    }

    fn created(&mut self, candidate: &Candidate, creation: Creation) {
        let class = if creation.end {
            Class::ALL[creation.mark.0 as usize]
        } else {
            Class::Branch
        };
        let known = Known {
            prefix: creation.prefix,
            class: self.history.store(creation.prefix, class),
            since: self.history.now(),
        };
        let number = candidate.id.number();
        if number >= self.known.len() {
            self.known.resize(number + 1, known);
        }
        self.known[number] = known;
    }

    fn hit(&mut self, candidate: &Candidate) {
        let known = &mut self.known[candidate.id.number()];
        known.since = self.history.now();
        known.class = self.history.class(known.prefix).unwrap_or(known.class);
    }

    fn insert(&mut self, candidate: &Candidate) {
        self.calls += 1;
        let entry = self.entry(candidate);
        self.states.insert(entry);
        if candidate.leaf {
            self.leaves.insert(entry);
        }
    }

    fn update(&mut self, candidate: &Candidate) {
        self.remove(candidate);
        self.insert(candidate);
    }

    fn remove(&mut self, candidate: &Candidate) {
        self.calls += 1;
        self.states.remove(candidate.id);
        self.leaves.remove(candidate.id);
    }

    fn victim(&mut self, scope: Scope) -> Option<CandidateId> {
        let bag = match scope {
            Scope::State => &self.states,
            Scope::Leaf => &self.leaves,
        };
        let (entries, count) = (bag.entries(), bag.len());
        let draw = |nth: u64| {
            if count <= SAMPLE {
                return entries[nth as usize];
            }
            let random = mix(SEED ^ self.calls, nth);
            // The high half of the product: as random, and below `count`.
            let at = (u128::from(random) * count as u128) >> 64;
            entries[at as usize]
        };
        // All are read before one is rated, so that their cache misses overlap.
        let sample: SmallVec<[Entry; SAMPLE]> = (0..count.min(SAMPLE) as u64).map(draw).collect();
        let rated = sample
            .iter()
            .map(|it| (self.worth(it, scope), it.since, it.id));
        let least = rated.min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        least.map(|(_, _, id)| id)
    }

    fn holds(&self, candidate: &Candidate) -> bool {
        let known = self.known.get(candidate.id.number());
        let expected = known.map(|_| self.entry(candidate));
        let leaf = expected.filter(|_| candidate.leaf);
        expected.is_some()
            && self.states.get(candidate.id) == expected.as_ref()
            && self.leaves.get(candidate.id) == leaf.as_ref()
    }

    fn count(&self) -> usize {
        self.states.len()
    }

    fn wants_anchors(&self) -> bool {
        true
    }

    fn wants_prefixes(&self) -> bool {
        true
    }
}
