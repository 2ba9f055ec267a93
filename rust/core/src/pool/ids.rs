//! A set of ids that gives up its lowest members first.

use super::slots::Run;

/// One bit for each id, in levels of 64: a bit of a higher level says that a word of the level
/// below is not zero. So the lowest id is found in as many steps as there are levels, four for
/// sixteen million, and a run costs its words.
#[derive(Debug)]
pub(super) struct IdSet {
    levels: Vec<Vec<u64>>,
}

const BITS: usize = u64::BITS as usize;

impl IdSet {
    pub(super) fn new() -> Self {
        Self {
            levels: vec![vec![0]],
        }
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        let id = id as usize;
        self.levels[0]
            .get(id / BITS)
            .is_some_and(|word| word >> (id % BITS) & 1 == 1)
    }

    /// Adds a run. Returns whether all of it was new.
    pub(super) fn insert(&mut self, run: Run) -> bool {
        self.reach(run.last() as usize / BITS + 1);
        let mut new = true;
        for (index, mask) in words(run) {
            let word = &mut self.levels[0][index];
            new &= *word & mask == 0;
            *word |= mask;
            self.mark(index);
        }
        new
    }

    /// Takes a run out. Returns whether all of it was there.
    pub(super) fn remove(&mut self, run: Run) -> bool {
        let mut there = true;
        for (index, mask) in words(run) {
            let Some(word) = self.levels[0].get_mut(index) else {
                return false;
            };
            there &= *word & mask == mask;
            *word &= !mask;
            if *word == 0 {
                self.unmark(index);
            }
        }
        there
    }

    /// Takes out the lowest ids that follow each other: at most `most`, and none past a word.
    pub(super) fn pop(&mut self, most: usize) -> Option<Run> {
        let mut lowest = 0;
        for level in self.levels.iter().rev() {
            let word = level[lowest];
            if word == 0 {
                return None;
            }
            lowest = lowest * BITS + word.trailing_zeros() as usize;
        }
        let ones = (self.levels[0][lowest / BITS] >> (lowest % BITS)).trailing_ones();
        let run = Run {
            first: lowest as u32,
            count: ones.min(u32::try_from(most).unwrap_or(u32::MAX)),
        };
        self.remove(run);
        Some(run)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let bits = |word: u64| (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1);
        (0..)
            .zip(&self.levels[0])
            .flat_map(move |(index, &word)| bits(word).map(move |bit| index * u64::BITS + bit))
    }

    /// Makes room for that many words of ids, up to one word at the top.
    fn reach(&mut self, words: usize) {
        let mut wanted = words;
        for level in &mut self.levels {
            if level.len() < wanted {
                level.resize(wanted, 0);
            }
            wanted = level.len().div_ceil(BITS);
        }
        // A top that was one word has something in that word at most.
        while let Some(top) = self.levels.last().filter(|top| top.len() > 1) {
            let mut above = vec![0; top.len().div_ceil(BITS)];
            above[0] = u64::from(top[0] != 0);
            self.levels.push(above);
        }
    }

    /// The word is not zero any more.
    fn mark(&mut self, mut index: usize) {
        for level in &mut self.levels[1..] {
            let word = &mut level[index / BITS];
            let before = *word;
            *word |= 1 << (index % BITS);
            if before != 0 {
                break;
            }
            index /= BITS;
        }
    }

    /// The word has become zero.
    fn unmark(&mut self, mut index: usize) {
        for level in &mut self.levels[1..] {
            let word = &mut level[index / BITS];
            *word &= !(1 << (index % BITS));
            if *word != 0 {
                break;
            }
            index /= BITS;
        }
    }
}

/// The words that hold a run, each with the run's bits in it.
fn words(run: Run) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (run.first as usize, run.last() as usize + 1);
    (first / BITS..end.div_ceil(BITS)).map(move |index| {
        let (from, to) = (
            first.saturating_sub(index * BITS),
            (end - index * BITS).min(BITS),
        );
        (index, u64::MAX >> (BITS - (to - from)) << from)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lowest_ids_go_first_and_no_run_passes_a_word() {
        let mut ids = IdSet::new();
        assert_eq!(ids.pop(1), None);
        assert!(ids.insert(Run {
            first: 60,
            count: 10
        }));
        assert!(ids.insert(Run {
            first: 1_000_000,
            count: 1
        }));
        assert!(ids.insert(Run { first: 3, count: 2 }));
        assert_eq!(ids.iter().count(), 13);
        let runs: Vec<_> = std::iter::from_fn(|| ids.pop(3))
            .map(|run| (run.first, run.count))
            .collect();
        assert_eq!(
            runs,
            [(3, 2), (60, 3), (63, 1), (64, 3), (67, 3), (1_000_000, 1)]
        );
    }

    #[test]
    fn what_is_there_twice_or_not_at_all_is_told() {
        let mut ids = IdSet::new();
        assert!(ids.insert(Run {
            first: 1,
            count: 100
        }));
        assert!(
            !ids.insert(Run {
                first: 100,
                count: 2
            }),
            "100 was there"
        );
        assert!(
            !ids.remove(Run {
                first: 101,
                count: 2
            }),
            "102 was not"
        );
        assert!(!ids.remove(Run {
            first: 9999,
            count: 1
        }));
    }

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((0_u32..20_000, 1_u32..300, 0_u8..3), 1..200)) {
            let (mut ids, mut model) = (IdSet::new(), BTreeSet::new());
            for (first, count, kind) in steps {
                let (run, all) = (Run { first, count }, first..first + count);
                match kind {
                    0 => {
                        let new = all.clone().all(|id| !model.contains(&id));
                        prop_assert_eq!(ids.insert(run), new);
                        model.extend(all);
                    }
                    1 => {
                        let there = all.clone().all(|id| model.contains(&id));
                        prop_assert_eq!(ids.remove(run), there);
                        all.for_each(|id| { model.remove(&id); });
                    }
                    _ => {
                        let popped = ids.pop(count as usize);
                        prop_assert_eq!(popped.map(|run| run.first), model.first().copied());
                        popped.into_iter().flat_map(Run::ids).for_each(|id| {
                            assert!(model.remove(&id));
                        });
                    }
                }
                prop_assert!(ids.contains(first) == model.contains(&first));
            }
            prop_assert!(ids.iter().eq(model));
        }
    }
}
