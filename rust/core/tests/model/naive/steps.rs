//! Giving back, steps in flight, refusals and resets.

use radixstate::{Misuse, PoolKind};

use super::{Holdings, Naive, Prefix};

impl Naive {
    pub(crate) fn begin_step(&mut self) -> u64 {
        self.newest += 1;
        self.outstanding.insert(self.newest);
        self.newest
    }

    pub(crate) fn retire_step(&mut self, step: u64, refused: &[u64]) -> Result<(), Misuse> {
        if step == 0 || step > self.newest {
            return Err(Misuse::UnknownStep { step, newest: self.newest });
        }
        if !self.outstanding.remove(&step) {
            return Ok(());
        }
        refused.iter().for_each(|&serial| self.refuse(serial));
        let unretired = self.outstanding.first().copied();
        let out = |step: u64| unretired.is_some_and(|oldest| oldest <= step);
        let written: Vec<u64> = self.writing.iter().filter(|w| !out(w.step)).map(|w| w.serial).collect();
        self.writing.retain(|writing| out(writing.step));
        self.states.values_mut().filter(|state| written.contains(&state.serial)).for_each(|state| state.ready = true);
        self.retiring.retain(|&(newest, _)| out(newest));
        self.sweep();
        Ok(())
    }

    pub(crate) fn refuse(&mut self, serial: u64) {
        let found = self.states.iter().find(|(_, state)| state.serial == serial);
        if let Some(prefix) = found.map(|(prefix, _)| prefix.clone()) {
            self.drop_state(&prefix);
            self.stats.refusals.non_finite += 1;
        }
    }

    pub(crate) fn reset(&mut self) {
        self.epoch += 1;
        self.stats.resets += 1;
        let all: Vec<Prefix> = self.states.keys().cloned().collect();
        for prefix in all {
            let freed = self.drop_state(&prefix);
            self.stats.evictions.reset += freed;
        }
    }

    pub(crate) fn take_freed(&mut self, pool: PoolKind) -> Vec<u32> {
        if pool == PoolKind::Kv { std::mem::take(&mut self.outbox) } else { Vec::new() }
    }

    pub(crate) fn finish(&mut self, holder: u64) {
        let holder = self.holders.remove(&holder).expect("the test names a live holder");
        self.give_back(holder.holdings);
    }

    pub(crate) fn drop_reserved(&mut self, reserved: u64) {
        let reserved = self.reserved.remove(&reserved).expect("the test names a live reservation");
        self.give_back(Holdings { state: Some(reserved.slot), ..Holdings::default() });
    }

    /// What an owner gives back waits while any step is out.
    pub(super) fn give_back(&mut self, holdings: Holdings) {
        if !self.outstanding.is_empty() {
            self.retiring.push_back((self.newest, holdings));
        }
        self.sweep();
    }
}
