//! Calls that break a rule whatever the cache holds: refused by its name, and nothing has changed.

use radixstate::{Cache, EnginePages, Error, Misuse, Namespace, PoolKind, StartOptions, Started};
use radixstate_replay::{Owner, Wrong};

use super::{Both, Front};

impl<O: Front> Both<O> {
    pub(super) fn wrong(&mut self, wrong: Wrong, n: usize) -> Option<()> {
        match wrong {
            Wrong::EmptyPrompt => {
                let found = self.real.lookup(&Namespace::default(), &[], None);
                assert_eq!(found.unwrap_err(), Misuse::EmptyPrompt);
                Some(())
            }
            Wrong::OtherCache => {
                self.other_steps();
                Some(())
            }
            Wrong::OtherPending | Wrong::Pages => O::wrong(self, wrong, n),
        }
    }

    fn other_steps(&mut self) {
        let mut other = Cache::new(O::config(self.config)).expect("one of these exists");
        let step = other.begin_step();
        let retired = self.real.retire_step(&step, &[]);
        assert_eq!(retired, Err(Misuse::WrongCache));
        let cancelled = self.real.cancel_step(&step, &[]);
        assert_eq!(cancelled, Err(Misuse::WrongCache));
    }
}

/// Handles of another cache, which end there.
#[test]
fn a_sequence_of_another_cache_is_refused_by_every_call() {
    let config = super::small();
    let (mut real, mut other) = (Cache::new(config).unwrap(), Cache::new(config).unwrap());
    let namespace = Namespace::default();
    let started = real.start(&namespace, &[], StartOptions::default());
    assert_eq!(started.unwrap_err(), Error::Misuse(Misuse::EmptyPrompt));
    let started = other.start(&namespace, &[0], StartOptions::default());
    let Started { sequence, .. } = started.expect("an empty cache has room for one token");
    let wrong = || Error::Misuse(Misuse::WrongCache);
    assert_eq!(real.loaded(&sequence), Err(Misuse::WrongCache));
    assert_eq!(real.grow(&sequence, 1), Err(wrong()));
    assert_eq!(real.append(&sequence, &[0]), Err(Misuse::WrongCache));
    assert_eq!(real.shrink(&sequence), Err(Misuse::WrongCache));
    assert_eq!(real.take_slot(&sequence), Err(wrong()));
    assert_eq!(real.give_back_slot(&sequence, 1), Err(Misuse::WrongCache));
    let reserved = real.reserve_checkpoint(&sequence, 0, 1);
    assert_eq!(reserved.unwrap_err(), Misuse::WrongCache);
    let reserved = real.reserve_checkpoints(&[(&sequence, 0, 1)]);
    assert_eq!(reserved.unwrap_err(), Misuse::WrongCache);
    assert_eq!(real.finish(sequence), Err(Misuse::WrongCache));
    let held = other.usage(PoolKind::Active).held;
    assert_eq!(held, 0, "a refused handle ends in its own cache");
    real.check(None).unwrap();
}

#[test]
fn a_lease_of_another_cache_is_refused_by_every_call() {
    let config = EnginePages::config(super::small());
    let (mut real, mut other) = (Cache::new(config).unwrap(), Cache::new(config).unwrap());
    let matched = other.lookup(&Namespace::default(), &[0], None).unwrap();
    let lease = other.lease(&matched).unwrap();
    assert_eq!(real.lease(&matched).unwrap_err(), Misuse::WrongCache);
    assert_eq!(real.lease_loaded(&lease), Err(Misuse::WrongCache));
    assert_eq!(real.lease_pages(&lease, 0), Err(Misuse::WrongCache));
    assert_eq!(real.lease_depth(&lease), Err(Misuse::WrongCache));
    assert_eq!(real.lease_slots(&lease).err(), Some(Misuse::WrongCache));
    let taken = real.take_lease_slot(&lease);
    assert_eq!(taken, Err(Error::Misuse(Misuse::WrongCache)));
    let given_back = real.give_back_lease_slot(&lease, 1);
    assert_eq!(given_back, Err(Misuse::WrongCache));
    let extended = real.extend(&lease, &[], &[]);
    assert_eq!(extended.unwrap_err(), Misuse::WrongCache);
    assert_eq!(
        real.reserve(&lease, &[], &[]).unwrap_err(),
        Misuse::WrongCache
    );
    assert_eq!(real.release(lease), Err(Misuse::WrongCache));
    real.check(None).unwrap();
}
