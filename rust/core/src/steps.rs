//! Steps in flight: what may be touched by work that was begun and has not retired.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::Misuse;
use crate::prefixes::CheckpointPin;

/// The step clock, the checkpoints each step writes, and what waits for steps to retire.
#[derive(Debug)]
pub(crate) struct Steps<T> {
    newest: u64,
    outstanding: BTreeSet<u64>,
    writing: BTreeMap<u64, Vec<CheckpointPin>>,
    /// In the order given back; the stamps never decrease.
    retiring: VecDeque<(u64, T)>,
}

impl<T> Steps<T> {
    pub(crate) fn new() -> Self {
        Self {
            newest: 0,
            outstanding: BTreeSet::new(),
            writing: BTreeMap::new(),
            retiring: VecDeque::new(),
        }
    }

    pub(crate) fn begin(&mut self) -> u64 {
        self.newest += 1;
        self.outstanding.insert(self.newest);
        self.newest
    }

    /// Notes that a step has ended; whether that was news.
    pub(crate) fn retire(&mut self, step: u64) -> Result<bool, Misuse> {
        if step == 0 || step > self.newest {
            return Err(Misuse::UnknownStep {
                step,
                newest: self.newest,
            });
        }
        Ok(self.outstanding.remove(&step))
    }

    /// Checkpoints of a step that has retired with all steps before it. Not earlier: their pages
    /// may have been replaced by pages that an older step writes.
    pub(crate) fn next_written(&mut self) -> Option<Vec<CheckpointPin>> {
        let watermark = self.watermark();
        let oldest = self.writing.first_entry()?;
        (*oldest.key() <= watermark).then(|| oldest.remove())
    }

    /// The step that a write enqueued now belongs to.
    pub(crate) fn writer(&self) -> Option<u64> {
        self.outstanding.last().copied()
    }

    pub(crate) fn writes(&mut self, step: u64, pin: CheckpointPin) {
        self.writing.entry(step).or_default().push(pin);
    }

    /// Whether what is given back now must wait.
    pub(crate) fn any_in_flight(&self) -> bool {
        !self.outstanding.is_empty()
    }

    pub(crate) fn wait(&mut self, item: T) {
        self.retiring.push_back((self.newest, item));
    }

    /// The oldest waiting entry that no step in flight can touch any more.
    pub(crate) fn next_retired(&mut self) -> Option<T> {
        let (step, _) = self.retiring.front()?;
        if *step > self.watermark() {
            return None;
        }
        self.retiring.pop_front().map(|(_, item)| item)
    }

    pub(crate) fn retiring(&self) -> impl Iterator<Item = &T> {
        self.retiring.iter().map(|(_, item)| item)
    }

    pub(crate) fn writing(&self) -> impl Iterator<Item = (u64, CheckpointPin)> {
        self.writing
            .iter()
            .flat_map(|(&step, pins)| pins.iter().map(move |&pin| (step, pin)))
    }

    /// The newest step with none older outstanding.
    fn watermark(&self) -> u64 {
        self.outstanding
            .first()
            .map_or(self.newest, |oldest| oldest - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_wait_for_every_step_begun_before_them() {
        let mut steps = Steps::new();
        let (first, second) = (steps.begin(), steps.begin());
        steps.wait("a");
        let third = steps.begin();
        steps.wait("b");
        steps.retire(second).unwrap();
        assert_eq!(steps.next_retired(), None, "step 1 is still out");
        steps.retire(first).unwrap();
        assert_eq!(
            (steps.next_retired(), steps.next_retired()),
            (Some("a"), None)
        );
        assert!(steps.retire(third).unwrap());
        assert!(!steps.retire(third).unwrap(), "a repeated id is no news");
        assert_eq!(steps.next_retired(), Some("b"));
        assert_eq!(
            steps.retire(4),
            Err(Misuse::UnknownStep { step: 4, newest: 3 })
        );
    }
}
