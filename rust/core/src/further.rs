//! Further active slots of a sequence, and how deep the state in each of its slots has come.

use smallvec::SmallVec;

use crate::cache::Cache;
use crate::error::{Error, Misuse};
use crate::event::Event;
use crate::handle::Sequence;
use crate::ledger::{Holdings, Ledger};

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
    /// [`Shortage`](crate::Shortage); [`Misuse::PoolMode`] with an external active pool.
    pub fn take_slot(&mut self, sequence: &Sequence) -> Result<u32, Error> {
        self.running(sequence)?;
        let slot = self.attempt(|cache| cache.try_take_slot(sequence))?;
        self.ledger.emit(Event::TakeSlot {
            owner: sequence.0.serial,
            slot,
        });
        Ok(slot)
    }

    fn try_take_slot(&mut self, sequence: &Sequence) -> Result<u32, Error> {
        check_internal(&self.ledger)?;
        let holdings = &mut self.sequences[sequence.0.key].lease.holdings;
        self.ledger.feasible_slots(holdings.active.len() + 1)?;
        let slot = self.ledger.active.take()?;
        let id = slot.id();
        holdings.active.append(slot.into());
        Ok(id)
    }

    /// Gives a further active slot back: now, or when the steps in flight have retired. That of the
    /// running state goes back with its sequence alone.
    ///
    /// # Errors
    /// [`Misuse::NotYourSlot`], [`Misuse::RunningSlot`].
    pub fn give_back_slot(&mut self, sequence: &Sequence, slot: u32) -> Result<(), Misuse> {
        self.running(sequence)?;
        let running = &mut self.sequences[sequence.0.key];
        let slots = &mut running.lease.holdings.active;
        let index = slots.ids().position(|it| it == slot);
        let active = match index {
            None => return Err(Misuse::NotYourSlot { slot }),
            Some(0) => return Err(Misuse::RunningSlot { slot }),
            Some(index) => slots.take_out(index),
        };
        running.depths.forget(slot);
        self.ledger.emit(Event::GiveBackSlot {
            owner: sequence.0.serial,
            slot,
        });
        self.ledger.give_back(Holdings {
            active,
            ..Holdings::default()
        });
        Ok(())
    }

    /// How many slots a start takes from the cache's pool: none of an engine's.
    pub(crate) fn slots_to_take(&self, wanted: usize) -> Result<usize, Misuse> {
        match wanted {
            0 => Err(Misuse::Config(
                "a sequence has at least 1 active slot, got slots=0".into(),
            )),
            1 if self.ledger.active.config().external => Ok(0),
            1 => Ok(1),
            _ => check_internal(&self.ledger).map(|()| wanted),
        }
    }
}

fn check_internal(ledger: &Ledger) -> Result<(), Misuse> {
    if ledger.active.config().external {
        return Err(Misuse::PoolMode(
            "the engine allocates active slots: take one there",
        ));
    }
    Ok(())
}
