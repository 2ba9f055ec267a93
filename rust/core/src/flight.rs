//! What is not yet: steps in flight, proofs that are awaited, checkpoints written under them, and
//! what waits for them. One line of tickets orders it all.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::Misuse;
use crate::prefixes::Write;

/// Open tickets, the checkpoints that become ready with them, and what is given back after them.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    /// The newest ticket; 0 before the first.
    newest: u64,
    steps: BTreeSet<u64>,
    /// Tickets of stored states that are not yet known to be finite.
    proofs: BTreeSet<u64>,
    /// By the ticket that makes them ready.
    writing: BTreeMap<u64, Vec<Write>>,
    /// In the order given back; the stamps never decrease.
    retiring: VecDeque<(u64, T)>,
}

impl<T> Flight<T> {
    pub(crate) fn new() -> Self {
        Self {
            newest: 0,
            steps: BTreeSet::new(),
            proofs: BTreeSet::new(),
            writing: BTreeMap::new(),
            retiring: VecDeque::new(),
        }
    }

    pub(crate) fn begin_step(&mut self) -> u64 {
        self.newest += 1;
        self.steps.insert(self.newest);
        self.newest
    }

    /// A ticket for the proof that a state is finite.
    pub(crate) fn await_proof(&mut self) -> u64 {
        self.newest += 1;
        self.proofs.insert(self.newest);
        self.newest
    }

    /// Closes the ticket of a step. Returns false if it was closed before.
    pub(crate) fn end_step(&mut self, ticket: u64) -> Result<bool, Misuse> {
        self.check(ticket)?;
        Ok(self.steps.remove(&ticket))
    }

    /// Closes the ticket of a proof. Returns the state's record, or nothing if it was closed
    /// before.
    pub(crate) fn end_proof(&mut self, ticket: u64) -> Result<Option<Write>, Misuse> {
        self.check(ticket)?;
        if !self.proofs.remove(&ticket) {
            return Ok(None);
        }
        let writes = self.writing.get(&ticket).into_iter().flatten();
        let proven = writes.copied().find(|write| write.proof == Some(ticket));
        Ok(proven)
    }

    /// Whether a proof is still awaited.
    pub(crate) fn is_open(&self, proof: u64) -> bool {
        self.proofs.contains(&proof)
    }

    /// Whether a step has neither retired nor been cancelled.
    pub(crate) fn in_flight(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }

    /// The checkpoints that a step writes and that are not ready.
    pub(crate) fn written_in(&self, step: u64) -> Vec<Write> {
        let all = self.writing.values().flatten();
        all.filter(|write| write.step == Some(step))
            .copied()
            .collect()
    }

    fn check(&self, ticket: u64) -> Result<(), Misuse> {
        if (1..=self.newest).contains(&ticket) {
            return Ok(());
        }
        Err(Misuse::UnknownStep {
            step: ticket,
            newest: self.newest,
        })
    }

    /// Checkpoints whose ticket is closed, and every ticket before it: they may stand on pages that
    /// an earlier ticket writes.
    pub(crate) fn next_written(&mut self) -> Option<Vec<Write>> {
        let open = [self.steps.first(), self.proofs.first()];
        let oldest_open = open.into_iter().flatten().min().copied();
        let first = self.writing.first_entry()?;
        if oldest_open.is_some_and(|open| open <= *first.key()) {
            return None;
        }
        Some(first.remove())
    }

    /// The step that a write enqueued now belongs to.
    pub(crate) fn writer(&self) -> Option<u64> {
        self.steps.last().copied()
    }

    /// The newest ticket that is open.
    pub(crate) fn newest_open(&self) -> Option<u64> {
        self.steps.last().max(self.proofs.last()).copied()
    }

    pub(crate) fn writes(&mut self, ticket: u64, write: Write) {
        self.writing.entry(ticket).or_default().push(write);
    }

    /// Whether what is given back now must wait.
    pub(crate) fn any_step(&self) -> bool {
        !self.steps.is_empty()
    }

    /// Keeps an item until every step begun so far has retired.
    pub(crate) fn wait(&mut self, item: T) {
        self.retiring.push_back((self.newest, item));
    }

    /// The oldest waiting item that no step in flight can touch any more.
    pub(crate) fn next_retired(&mut self) -> Option<T> {
        let &(stamp, _) = self.retiring.front()?;
        if self.steps.first().is_some_and(|&oldest| oldest <= stamp) {
            return None;
        }
        self.retiring.pop_front().map(|(_, item)| item)
    }

    pub(crate) fn retiring(&self) -> impl Iterator<Item = &T> {
        self.retiring.iter().map(|(_, item)| item)
    }

    /// What is written, with the ticket that makes it ready.
    pub(crate) fn writing(&self) -> impl Iterator<Item = (u64, Write)> {
        self.writing
            .iter()
            .flat_map(|(&ticket, writes)| writes.iter().map(move |&write| (ticket, write)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{NodeId, NodeIdx};

    #[test]
    fn items_wait_for_every_step_begun_before_them() {
        let mut flight = Flight::new();
        let first = flight.begin_step();
        let second = flight.begin_step();
        flight.wait("a");
        let third = flight.begin_step();
        flight.wait("b");
        flight.end_step(second).unwrap();
        assert_eq!(flight.next_retired(), None, "step 1 is still out");
        flight.end_step(first).unwrap();
        assert_eq!(flight.next_retired(), Some("a"));
        assert_eq!(flight.next_retired(), None);
        assert!(flight.end_step(third).unwrap());
        assert!(!flight.end_step(third).unwrap(), "a repeated id is no news");
        assert_eq!(flight.next_retired(), Some("b"));
        let unknown = flight.end_step(4).unwrap_err();
        assert_eq!(unknown, Misuse::UnknownStep { step: 4, newest: 3 });
    }

    #[test]
    fn a_proof_keeps_back_what_was_written_after_it_and_no_slot() {
        let mut flight = Flight::new();
        let proof = flight.await_proof();
        let step = flight.begin_step();
        assert_eq!(flight.newest_open(), Some(step));
        let write = Write {
            node: NodeId {
                index: NodeIdx::forged(0),
                version: 0,
            },
            serial: Some(7),
            brought: 0,
            step: Some(step),
            proof: None,
        };
        flight.writes(step, write);
        flight.wait("slot");
        flight.end_step(step).unwrap();
        assert_eq!(flight.next_retired(), Some("slot"));
        assert!(
            flight.next_written().is_none(),
            "its pages may be those of the proof"
        );
        let none = flight.end_proof(proof).unwrap();
        assert!(none.is_none(), "no state was stored for it");
        assert_eq!(
            flight.next_written().map(|writes| writes[0].serial),
            Some(Some(7))
        );
    }
}
