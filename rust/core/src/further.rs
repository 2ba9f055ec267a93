//! Further active slots of a sequence, and how deep the state in each of its slots has come.

use smallvec::SmallVec;

use crate::cache::Cache;
use crate::error::{Error, Misuse};
use crate::event::Event;
use crate::handle::{Lease, Sequence};
use crate::ledger::{Holdings, Ledger};
use crate::pool::EngineOwned;

/// How deep the states in a sequence's slots are at least. A slot is loaded or cleared only when its
/// sequence starts, so its state only goes deeper.
#[derive(Debug, Default)]
pub(crate) struct Depths(SmallVec<[(u32, usize); 1]>);

impl Depths {
    /// The deepest depth for which a slot was named as source; `None` before the first.
    pub(crate) fn reached(&self, slot: u32) -> Option<usize> {
        let known = self.0.iter().find(|(it, _)| *it == slot);
        known.map(|&(_, depth)| depth)
    }

    /// The state in a slot is of `depth` tokens now, which were no fewer before.
    pub(crate) fn reach(&mut self, slot: u32, depth: usize) {
        match self.0.iter_mut().find(|(it, _)| *it == slot) {
            Some((_, reached)) => *reached = depth,
            None => self.0.push((slot, depth)),
        }
    }

    fn forget(&mut self, slot: u32) {
        self.0.retain(|(it, _)| *it != slot);
    }
}

impl Cache {
    /// A further active slot, for kernels that write an intermediate state while the request goes
    /// on.
    ///
    /// # Errors
    /// [`Shortage`](crate::Shortage).
    pub fn take_slot(&mut self, sequence: &Sequence) -> Result<u32, Error> {
        self.running(sequence)?;
        let (key, owner) = (sequence.0.key, sequence.0.serial);
        self.attempt(|cache| {
            let holdings = &mut cache.sequences[key].lease.holdings;
            cache.ledger.take_slot(owner, holdings)
        })
    }

    /// Gives a further active slot back: now, or when the steps in flight have retired. That of the
    /// running state goes back with its sequence alone.
    ///
    /// # Errors
    /// [`Misuse::NotYourSlot`], [`Misuse::RunningSlot`].
    pub fn give_back_slot(&mut self, sequence: &Sequence, slot: u32) -> Result<(), Misuse> {
        if self.running(sequence)?.slot() == slot {
            return Err(Misuse::RunningSlot { slot });
        }
        let running = &mut self.sequences[sequence.0.key];
        let holdings = &mut running.lease.holdings;
        self.ledger
            .give_back_slot(sequence.0.serial, holdings, slot)?;
        running.depths.forget(slot);
        Ok(())
    }
}

/// The same for requests whose pages are the engine's and whose running states are the cache's.
impl<O: EngineOwned> Cache<O> {
    /// An active slot for the request of a lease. It goes back with the lease, or earlier.
    ///
    /// # Errors
    /// [`Shortage`](crate::Shortage), [`Misuse::WrongCache`].
    pub fn take_lease_slot(&mut self, lease: &Lease) -> Result<u32, Error> {
        self.own(&lease.0)?;
        self.collect_dropped();
        let (key, owner) = (lease.0.key, lease.0.serial);
        self.attempt(|cache| {
            let holdings = &mut cache.leases[key].holdings;
            cache.ledger.take_slot(owner, holdings)
        })
    }

    /// Gives an active slot back: now, or when the steps in flight have retired.
    ///
    /// # Errors
    /// [`Misuse::NotYourSlot`], [`Misuse::WrongCache`].
    pub fn give_back_lease_slot(&mut self, lease: &Lease, slot: u32) -> Result<(), Misuse> {
        self.own(&lease.0)?;
        self.collect_dropped();
        let holdings = &mut self.leases[lease.0.key].holdings;
        self.ledger.give_back_slot(lease.0.serial, holdings, slot)
    }

    /// The active slots that a lease has taken, the oldest first.
    ///
    /// # Errors
    /// [`Misuse::WrongCache`].
    pub fn lease_slots(&self, lease: &Lease) -> Result<impl Iterator<Item = u32>, Misuse> {
        self.own(&lease.0)?;
        Ok(self.leases[lease.0.key].holdings.active.ids())
    }
}

impl Ledger {
    fn take_slot(&mut self, owner: u64, holdings: &mut Holdings) -> Result<u32, Error> {
        self.feasible_slots(holdings.active.len() + 1)?;
        let taken = self.active.take()?;
        let slot = taken.id();
        holdings.active.append(taken.into());
        self.emit(Event::TakeSlot { owner, slot });
        Ok(slot)
    }

    fn give_back_slot(
        &mut self,
        owner: u64,
        holdings: &mut Holdings,
        slot: u32,
    ) -> Result<(), Misuse> {
        let index = holdings.active.ids().position(|it| it == slot);
        let index = index.ok_or(Misuse::NotYourSlot { slot })?;
        let active = holdings.active.take_out(index);
        self.emit(Event::GiveBackSlot { owner, slot });
        self.give_back(Holdings {
            active,
            ..Holdings::default()
        });
        Ok(())
    }
}
