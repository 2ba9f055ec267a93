//! Giving back, steps in flight, refusals and resets.

use radixstate::Misuse;

use super::{Holdings, Naive, Prefix};

impl Naive {
    pub(crate) fn begin_step(&mut self) -> u64 {
        self.newest += 1;
        self.outstanding.insert(self.newest);
        self.newest
    }

    pub(crate) fn retire_step(&mut self, step: u64, refused: &[u64]) -> Result<(), Misuse> {
        if step == 0 || step > self.newest {
            return Err(Misuse::UnknownStep {
                step,
                newest: self.newest,
            });
        }
        if !self.outstanding.remove(&step) {
            return Ok(());
        }
        refused.iter().for_each(|&serial| self.invalidate(serial));
        self.land();
        Ok(())
    }

    pub(crate) fn cancel_step(&mut self, step: u64) -> Result<(), Misuse> {
        let written = self.writing.iter().filter(|it| it.step == Some(step));
        let written: Vec<u64> = written.map(|it| it.serial).collect();
        if self.outstanding.contains(&step) {
            // Nobody needs to know any more whether they are finite.
            self.proofs.retain(|_, serial| !written.contains(serial));
        }
        self.retire_step(step, &written)
    }

    pub(crate) fn complete(&mut self, ticket: u64, finite: bool) {
        if let Some(serial) = self.proofs.remove(&ticket) {
            if !finite {
                self.invalidate(serial);
            }
            self.land();
        }
    }

    /// What is written is ready, and what waited for steps is free.
    fn land(&mut self) {
        let oldest_step = self.outstanding.first().copied();
        let oldest_proof = self.proofs.keys().next().copied();
        let open = |ticket: u64| {
            let oldest = oldest_step.into_iter().chain(oldest_proof).min();
            oldest.is_some_and(|oldest| oldest <= ticket)
        };
        let written = self.writing.iter().filter(|it| !open(it.ticket));
        let written: Vec<u64> = written.map(|it| it.serial).collect();
        self.writing.retain(|writing| open(writing.ticket));
        self.states
            .values_mut()
            .filter(|state| written.contains(&state.serial))
            .for_each(|state| state.ready = true);
        let out = |step: u64| oldest_step.is_some_and(|oldest| oldest <= step);
        self.retiring.retain(|&(newest, _)| out(newest));
        self.sweep();
    }

    /// Drops a state if it is still there. The pages that its store brought are refused with it,
    /// and every state whose path they lie on.
    pub(crate) fn invalidate(&mut self, serial: u64) {
        let (prefix, brought) = self.stores[&serial].clone();
        let stored = self.states.values().any(|state| state.serial == serial);
        let mut writing = self.writing.iter();
        // Pages without a state, unless they are hidden already.
        let extended = writing
            .any(|it| it.serial == serial && serial > Self::EXTENDS && it.path.refused.is_empty());
        if !stored && !extended {
            return;
        }
        let gone: Vec<Prefix> = if brought < prefix.depth() && self.has_kv() {
            self.hide(&prefix, brought, serial);
            self.states
                .keys()
                .filter(|state| state.refused.iter().any(|&(_, by)| by == serial))
                .cloned()
                .collect()
        } else {
            self.states
                .iter()
                .filter(|(_, state)| state.serial == serial)
                .map(|(prefix, _)| prefix.clone())
                .collect()
        };
        self.stats.skipped.non_finite += gone.len() as u64;
        gone.iter().for_each(|prefix| _ = self.drop_state(prefix));
    }

    /// Marks whatever is on the path of `prefix` past `depth`, or beyond it.
    fn hide(&mut self, prefix: &Prefix, depth: usize, serial: u64) {
        let first = Prefix::new(
            prefix.resets,
            &prefix.namespace,
            &prefix.tokens[..depth + self.page],
        );
        let hide = |path: &mut Prefix| {
            if path.starts_with(&first) {
                path.refused.push((depth, serial));
                path.refused.sort_unstable();
            }
        };
        let hidden = |mut path: Prefix| {
            hide(&mut path);
            path
        };
        self.pages = std::mem::take(&mut self.pages)
            .into_iter()
            .map(|(path, page)| (hidden(path), page))
            .collect();
        self.states = std::mem::take(&mut self.states)
            .into_iter()
            .map(|(path, state)| (hidden(path), state))
            .collect();
        self.holders
            .values_mut()
            .filter_map(|holder| holder.holdings.path.as_mut())
            .for_each(hide);
        self.retiring
            .iter_mut()
            .filter_map(|(_, holdings)| holdings.path.as_mut())
            .for_each(hide);
        self.writing
            .iter_mut()
            .for_each(|writing| hide(&mut writing.path));
    }

    pub(crate) fn reset(&mut self) {
        self.resets += 1;
        self.stats.resets += 1;
        let all: Vec<Prefix> = self.states.keys().cloned().collect();
        for prefix in all {
            let freed = self.drop_state(&prefix);
            self.stats.evictions.reset += freed;
        }
    }

    pub(crate) fn take_freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.outbox)
    }

    pub(crate) fn finish(&mut self, holder: u64) {
        let holder = self
            .holders
            .remove(&holder)
            .expect("the test names a live holder");
        self.give_back(holder.holdings);
    }

    pub(crate) fn drop_reserved(&mut self, reserved: u64) {
        let reserved = self
            .reserved
            .remove(&reserved)
            .expect("the test names a live reservation");
        self.give_back(Holdings {
            state: Some(reserved.slot),
            ..Holdings::default()
        });
    }

    /// What an owner gives back waits while any step is out.
    pub(super) fn give_back(&mut self, holdings: Holdings) {
        if !self.outstanding.is_empty() {
            self.retiring.push_back((self.newest, holdings));
        }
        self.sweep();
    }
}
