//! Calls that break a rule: refused by its name, and nothing has changed. A handle that such a call
//! consumes gives back what it held.

use radixstate::{Cache, Error, Misuse, Namespace, PoolKind, StartOptions, Started};

use super::{Both, Waiting, pick};
use radixstate_replay::Wrong;

impl Both {
    pub(super) fn wrong(&mut self, wrong: Wrong, n: usize) -> Option<()> {
        match wrong {
            Wrong::EmptyPrompt => self.empty_prompt(),
            Wrong::OtherCache => self.other_cache(),
            Wrong::OtherPending => return self.other_pending(n),
            Wrong::Pages => return self.wrong_pages(n),
        }
        Some(())
    }

    fn empty_prompt(&mut self) {
        let namespace = Namespace::default();
        assert_eq!(
            self.real.lookup(&namespace, &[], None).unwrap_err(),
            Misuse::EmptyPrompt
        );
        let started = self.real.start(&namespace, &[], StartOptions::default());
        assert_eq!(started.unwrap_err(), Error::Misuse(Misuse::EmptyPrompt));
    }

    /// Handles of another cache, which end there.
    fn other_cache(&mut self) {
        let mut other = Cache::new(self.config).expect("one of this configuration exists");
        let started = other.start(&Namespace::default(), &[0], StartOptions::default());
        let Started {
            sequence, matched, ..
        } = started.expect("an empty cache has room for one token");
        let lease = other
            .lease(&matched)
            .expect("nothing happened since the lookup");
        let wrong = || Error::Misuse(Misuse::WrongCache);
        let real = &mut self.real;
        assert_eq!(real.loaded(&sequence), Err(Misuse::WrongCache));
        assert_eq!(real.grow(&sequence, 1), Err(wrong()));
        assert_eq!(real.append(&sequence, &[0]), Err(Misuse::WrongCache));
        assert_eq!(real.shrink(&sequence), Err(Misuse::WrongCache));
        assert_eq!(real.take_slot(&sequence), Err(wrong()));
        assert_eq!(real.give_back_slot(&sequence, 1), Err(Misuse::WrongCache));
        assert_eq!(
            real.reserve_checkpoint(&sequence, 0, 1).unwrap_err(),
            Misuse::WrongCache
        );
        assert_eq!(real.lease(&matched).unwrap_err(), Misuse::WrongCache);
        assert_eq!(real.lease_loaded(&lease), Err(Misuse::WrongCache));
        assert_eq!(real.lease_pages(&lease), Err(Misuse::WrongCache));
        assert_eq!(real.reserve(&lease, &[]).unwrap_err(), Misuse::WrongCache);
        assert_eq!(real.finish(sequence), Err(Misuse::WrongCache));
        assert_eq!(real.release(lease), Err(Misuse::WrongCache));
        assert_eq!(
            other.usage(PoolKind::Active).held,
            0,
            "a refused handle ends in its own cache"
        );
    }

    /// A pending checkpoint with a sequence that did not reserve it.
    fn other_pending(&mut self, n: usize) -> Option<()> {
        let n = pick(&self.pending, n)?;
        let owner = self.naive.reserved[&self.pending[n].id].owner;
        let (_, sequence) = self.sequences.iter().find(|(id, _)| *id != owner)?;
        let Waiting { id, pending, .. } = self.pending.swap_remove(n);
        let committed = if self.engine_owns_kv() {
            self.real.commit_pages(sequence, &[], pending).map(drop)
        } else {
            self.real.commit(sequence, pending).map(drop)
        };
        assert_eq!(committed.unwrap_err().why, Misuse::NotYourPending);
        self.naive.drop_reserved(id);
        Some(())
    }

    /// Pages that the engine may not hand over, or too many of them.
    fn wrong_pages(&mut self, n: usize) -> Option<()> {
        let at = pick(&self.pending, n).filter(|_| self.engine_owns_kv())?;
        let reserved = &self.naive.reserved[&self.pending[at].id];
        let leased = self.naive.holders.get(&reserved.owner)?.depth();
        let (_, sequence) = self
            .sequences
            .iter()
            .find(|(id, _)| *id == reserved.owner)?;
        let missing = reserved.tokens.len().saturating_sub(leased) / self.config.page_size as usize;
        let (pages, misuse) = self.spoil(self.engine_pages(missing)?, n);
        let Waiting { id, pending, .. } = self.pending.swap_remove(at);
        let rejected = self.real.commit_pages(sequence, &pages, pending);
        let rejected = rejected.unwrap_err();
        assert_eq!(rejected.why, misuse);
        // What came back is as it was: the next call takes it, or its drop gives the slot back.
        drop(rejected.pending);
        self.naive.drop_reserved(id);
        Some(())
    }

    fn spoil(&self, mut pages: Vec<u32>, n: usize) -> (Vec<u32>, Misuse) {
        let outside = self.config.kv.capacity + 1;
        let cached = self.naive.cached_pages().next();
        let owned = |page, why| Misuse::PageOwnership { page, why };
        match (n % 4, pages.as_mut_slice(), cached) {
            (0, [first, ..], Some(page)) => {
                *first = page;
                (pages, owned(page, "already belongs to the cache"))
            }
            (1, [first, ..], _) => {
                *first = outside;
                (pages, owned(outside, "is outside 1..=capacity"))
            }
            (2, &mut [first, ref mut second, ..], _) => {
                *second = first;
                (pages, owned(first, "is given twice"))
            }
            _ => {
                let expected = pages.len();
                pages.push(outside);
                (
                    pages,
                    Misuse::LengthMismatch {
                        what: "pages",
                        given: expected + 1,
                        expected,
                    },
                )
            }
        }
    }
}
