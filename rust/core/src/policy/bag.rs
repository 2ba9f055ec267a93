//! Candidates to draw from at random, in constant time.

use super::CandidateId;
use super::history::Class;

/// What a victim is chosen by: all of it in half a cache line, as each draw is a miss.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(align(32))]
pub(super) struct Entry {
    pub(super) id: CandidateId,
    pub(super) class: Class,
    /// The request that stored it or asked for it last.
    pub(super) since: u64,
    /// Cost of the tokens that a prompt computes without it.
    pub(super) saves: f64,
    /// Bytes that evicting it frees.
    pub(super) bytes: u64,
}

const NOWHERE: u32 = u32::MAX;

#[derive(Debug, Clone, Default)]
pub(super) struct Bag {
    entries: Vec<Entry>,
    /// Place of each candidate among them, by its number.
    places: Vec<u32>,
}

impl Bag {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn get(&self, id: CandidateId) -> Option<&Entry> {
        let place = *self.places.get(id.number())?;
        self.entries.get(place as usize)
    }

    pub(super) fn insert(&mut self, entry: Entry) {
        let number = entry.id.number();
        if number >= self.places.len() {
            self.places.resize(number + 1, NOWHERE);
        }
        self.places[number] = u32::try_from(self.entries.len()).expect("ids have 32 bits");
        self.entries.push(entry);
    }

    /// Takes a candidate out, if it is there; the last one takes its place.
    pub(super) fn remove(&mut self, id: CandidateId) {
        let place = self.places.get_mut(id.number());
        let place = place.map_or(NOWHERE, |place| std::mem::replace(place, NOWHERE));
        if place == NOWHERE {
            return;
        }
        self.entries.swap_remove(place as usize);
        if let Some(moved) = self.entries.get(place as usize) {
            self.places[moved.id.number()] = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::NodeIdx;

    #[test]
    fn an_entry_is_half_a_cache_line() {
        assert_eq!(size_of::<Entry>(), 32);
    }

    #[test]
    fn what_is_taken_out_leaves_the_others_to_be_found() {
        let entry = |n| Entry {
            id: CandidateId(NodeIdx::forged(n)),
            class: Class::First,
            since: n as u64,
            saves: 0.0,
            bytes: 0,
        };
        let mut bag = Bag::default();
        (0..10).for_each(|n| bag.insert(entry(n)));
        for n in [0, 9, 4, 4, 20] {
            bag.remove(entry(n).id);
        }
        let left = [1, 2, 3, 5, 6, 7, 8];
        assert_eq!(bag.len(), left.len());
        for n in 0..30 {
            let expected = left.contains(&n).then(|| entry(n));
            assert_eq!(bag.get(entry(n).id), expected.as_ref());
        }
    }
}
