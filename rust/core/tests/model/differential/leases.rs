//! Requests as leases, on pages of the engine.

use std::ops::Range;

use radixstate::{EnginePages, Extended, LogicalPages, Misuse, Namespace, PoolKind, Published};
use radixstate_replay::{Depth, Op, Sharing, Who, Wrong};

use super::{Both, Front, Waiting, namespace, pick, serial};
use crate::oracle::Reserved;

macro_rules! fronts {
    ($($owner:ident),*) => {$(
        impl Front for $owner {
            fn apply(both: &mut Both<Self>, op: &Op) -> Option<()> {
                both.apply_lease(op)
            }

            fn commit(both: &mut Both<Self>, n: usize, owner: u64) -> Option<()> {
                both.share_state(n, owner)
            }

            fn wrong(both: &mut Both<Self>, wrong: Wrong, n: usize) -> Option<()> {
                match wrong {
                    Wrong::OtherPending => both.other_pending(n),
                    Wrong::Pages => both.wrong_pages(n),
                    Wrong::EmptyPrompt | Wrong::OtherCache => None,
                }
            }

            fn take_freed(both: &mut Both<Self>) {
                both.take_pages();
            }

            fn verify(both: &Both<Self>) {
                for (id, lease) in &both.leases {
                    let slots = both.real.lease_slots(lease).unwrap();
                    let expected = both.naive.holders[id].slots();
                    assert_eq!(slots.collect::<Vec<u32>>(), expected);
                }
            }
        }
    )*};
}
fronts!(EnginePages, LogicalPages);

impl<O: Front + Sharing> Both<O> {
    fn apply_lease(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Serve {
                tenant,
                tokens,
                ends,
            } => return self.serve_leased(&namespace(*tenant), tokens, *ends),
            Op::TakeSlot(n) => {
                let (id, lease) = &self.leases[pick(&self.leases, *n)?];
                let taken = self.real.take_lease_slot(lease);
                let expected = self.naive.take_slot(*id, taken.clone().ok());
                assert_eq!(taken.map(drop), expected);
            }
            Op::GiveBackSlot { sequence, slot } => {
                let (id, lease) = &self.leases[pick(&self.leases, *sequence)?];
                let slot = Self::source(self.naive.holders[id].slots(), *slot);
                let given_back = self.real.give_back_lease_slot(lease, slot);
                assert_eq!(given_back, self.naive.give_back_slot(*id, slot, 0));
            }
            Op::ReserveLeased { lease, more, depth } => {
                return self.reserve_leased(*lease, more, *depth);
            }
            Op::Extend { lease, more } => return self.extend(*lease, more),
            _ => return None,
        }
        Some(())
    }

    /// A whole request, as its parts: whatever skips a part ends it.
    fn serve_leased(&mut self, namespace: &Namespace, tokens: &[u32], ends: bool) -> Option<()> {
        self.look_up(namespace, tokens, None);
        self.lease(self.looked.len() - 1);
        let (lease, waiting) = (self.leases.len() - 1, self.pending.len());
        self.apply(&Op::LeaseLoaded(lease));
        let reused = self.naive.holders[&self.leases[lease].0].depth();
        self.reserve_leased(lease, &tokens[reused..], Depth::Deepest)?;
        if self.pending.len() > waiting {
            let (pending, proven) = (waiting, true);
            self.apply(&Op::Commit { pending, proven })?;
        }
        if ends {
            self.apply(&Op::Release(lease))?;
        }
        Some(())
    }

    /// What a lease has, and then `more`.
    fn going_on(&self, owner: u64, more: &[u32]) -> Vec<u32> {
        let path = self.naive.holders[&owner].holdings.path();
        let mut tokens = path.map_or_else(Vec::new, |path| path.tokens.clone());
        tokens.extend(more);
        tokens
    }

    fn reserve_leased(&mut self, n: usize, more: &[u32], depth: Depth) -> Option<()> {
        let id = self.id();
        let (owner, lease) = &self.leases[pick(&self.leases, n)?];
        let mut tokens = self.going_on(*owner, more);
        tokens.truncate(depth.pick(self.naive.legal, tokens.len()));
        let before = self.naive.holders[owner].depth();
        let missing = tokens.len().saturating_sub(before) / self.config.page_size as usize;
        let given = self.engine_pages(missing)?;
        let reservation = O::reserve(&mut self.real, lease, &tokens, &given);
        let legal = self.naive.legal;
        if let Err(misuse) = self.naive.check_leased(*owner, &tokens, legal) {
            assert_eq!(reservation.unwrap_err(), misuse);
            return Some(());
        }
        self.reserved(id, *owner, &tokens, reservation.unwrap());
        Some(())
    }

    fn extend(&mut self, n: usize, more: &[u32]) -> Option<()> {
        let page = self.config.page_size as usize;
        let (owner, lease) = &self.leases[pick(&self.leases, n)?];
        let owner = *owner;
        let before = self.naive.holders[&owner].depth();
        let mut tokens = self.going_on(owner, more);
        // Now and then within a page, or within what is leased.
        match more.len() % 8 {
            0 => {}
            1 => tokens.truncate(before / 2),
            _ => tokens.truncate(tokens.len() / page * page),
        }
        let given = self.engine_pages(tokens.len().saturating_sub(before) / page)?;
        let extended = O::extend(&mut self.real, lease, &tokens, &given);
        if let Err(misuse) = self.naive.check_leased(owner, &tokens, page) {
            assert_eq!(extended.unwrap_err(), misuse);
            return Some(());
        }
        let Extended { skipped, replaced } = extended.expect("the model extends it");
        let ids = self.ids(n, before, given, skipped.is_none(), replaced.len() / page);
        match self.naive.extend(owner, &tokens, &ids) {
            Ok(duplicates) => assert_eq!((skipped, duplicates), (None, self.known(&replaced))),
            Err(skip) => assert_eq!(skipped, Some(skip)),
        }
        Some(())
    }

    /// Pages that were cached already.
    fn known(&self, replaced: &Range<usize>) -> usize {
        replaced.len() / self.config.page_size as usize
    }

    /// The ids of pages handed over with a lease, which the engine gives up unless they were
    /// `known`.
    fn ids(
        &mut self,
        n: usize,
        before: usize,
        given: Vec<u32>,
        taken: bool,
        known: usize,
    ) -> Vec<u32> {
        if !taken {
            return given;
        }
        if O::WHO == Who::Engine {
            for page in &given[known..] {
                assert!(
                    self.engine_free.remove(page),
                    "page {page} was the engine's"
                );
            }
            return given;
        }
        let depth = before / self.config.page_size as usize * self.config.page_size as usize;
        let ids = self
            .real
            .lease_pages(&self.leases[n % self.leases.len()].1, depth);
        ids.unwrap()
    }

    /// Publishes a state with its pages, or attaches it to what is leased.
    fn share_state(&mut self, n: usize, owner: u64) -> Option<()> {
        let Reserved { tokens, .. } = self.naive.reserved[&self.pending[n].id].clone();
        let before = self.naive.holders[&owner].depth();
        let missing = tokens.len().saturating_sub(before) / self.config.page_size as usize;
        let Some(given) = self.engine_pages(missing) else {
            return self.drop_pending(n);
        };
        let at = self.leases.iter().position(|(id, _)| *id == owner)?;
        let Waiting {
            id,
            pending,
            proven,
        } = self.pending.swap_remove(n);
        let lease = &self.leases[at].1;
        let allowed = self.naive.check_leased(owner, &tokens, self.naive.legal);
        if id.is_multiple_of(2) {
            let attached = self.real.attach(lease, &tokens, pending);
            let (depth, end) = (tokens.len(), before);
            let past = (depth > end).then_some(Misuse::DepthPastEnd { depth, end });
            let mismatch = self.naive.check_prefix(owner, &tokens).err();
            if let Some(misuse) = mismatch.or(past) {
                assert_eq!(attached.unwrap_err().why, misuse);
                self.naive.drop_reserved(id);
                return Some(());
            }
            let outcome = attached.expect("the model attaches it");
            let (expected, _) = self.naive.publish(id, Some(&[]), serial(&outcome), proven);
            self.committed(outcome, expected);
            return Some(());
        }
        let published = O::publish(&mut self.real, lease, &tokens, &given, pending);
        if let Err(misuse) = allowed {
            assert_eq!(published.unwrap_err().why, misuse);
            self.naive.drop_reserved(id);
            return Some(());
        }
        let Published { outcome, replaced } = published.expect("the model publishes it");
        let now = self.real.lease_depth(&self.leases[at].1).unwrap();
        let known = self.known(&replaced);
        let ids = self.ids(at, before, given, now > before, known);
        let (expected, duplicates) = self.naive.publish(id, Some(&ids), serial(&outcome), proven);
        assert_eq!(known, duplicates.len());
        self.committed(outcome, expected);
        Some(())
    }

    /// Free pages of the engine; none when it has too few, no pages at all when it has no KV of its
    /// own. An engine whose pages have numbers names none.
    fn engine_pages(&self, wanted: usize) -> Option<Vec<u32>> {
        if !self.naive.has_kv() {
            return Some(Vec::new());
        }
        if O::WHO == Who::Logical {
            let free = self.naive.usage(PoolKind::Kv).free;
            return (wanted <= free).then(|| vec![0; wanted]);
        }
        let pages: Vec<u32> = self.engine_free.iter().copied().take(wanted).collect();
        (pages.len() == wanted).then_some(pages)
    }

    fn take_pages(&mut self) {
        let mut freed = self.real.take_freed();
        if O::WHO == Who::Engine {
            self.engine_free.extend(&freed);
        }
        let mut expected = self.naive.take_freed();
        freed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(freed, expected);
    }

    fn other_pending(&mut self, n: usize) -> Option<()> {
        let n = pick(&self.pending, n)?;
        let reserved = self.naive.reserved[&self.pending[n].id].clone();
        let (_, lease) = self.leases.iter().find(|(id, _)| *id != reserved.owner)?;
        let Waiting { id, pending, .. } = self.pending.swap_remove(n);
        let published = O::publish(&mut self.real, lease, &reserved.tokens, &[], pending);
        let rejected = published.unwrap_err();
        assert_eq!(rejected.why, Misuse::NotYourPending);
        let attached = self.real.attach(lease, &reserved.tokens, rejected.pending);
        assert_eq!(attached.unwrap_err().why, Misuse::NotYourPending);
        self.naive.drop_reserved(id);
        Some(())
    }

    /// Pages that the engine may not hand over, or too many of them.
    fn wrong_pages(&mut self, n: usize) -> Option<()> {
        let at = pick(&self.pending, n).filter(|_| self.naive.has_kv())?;
        let Reserved { owner, tokens, .. } = self.naive.reserved[&self.pending[at].id].clone();
        let leased = self.naive.holders.get(&owner)?.depth();
        self.naive
            .check_leased(owner, &tokens, self.naive.legal)
            .ok()?;
        let missing = tokens.len().saturating_sub(leased) / self.config.page_size as usize;
        let (pages, misuse) = if O::WHO == Who::Engine {
            let pages = self.engine_pages(missing)?;
            self.spoil(pages, n)
        } else {
            (Vec::new(), self.too_many(missing)?)
        };
        let (_, lease) = self.leases.iter().find(|(id, _)| *id == owner)?;
        let extended = O::extend(&mut self.real, lease, &tokens, &pages);
        assert_eq!(extended.unwrap_err(), misuse);
        let Waiting { id, pending, .. } = self.pending.swap_remove(at);
        let published = O::publish(&mut self.real, lease, &tokens, &pages, pending);
        let rejected = published.unwrap_err();
        assert_eq!(rejected.why, misuse);
        // What came back is as it was: the next call takes it, or its drop gives the slot back.
        drop(rejected.pending);
        self.naive.drop_reserved(id);
        Some(())
    }

    /// More pages than the engine could have.
    fn too_many(&self, wanted: usize) -> Option<Misuse> {
        let usage = self.naive.usage(PoolKind::Kv);
        let (free, outbox) = (usage.free, usage.outbox);
        (wanted > free).then_some(Misuse::TooManyPages {
            wanted,
            free,
            outbox,
        })
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
                let given = pages.len();
                let what = "pages";
                (
                    pages,
                    Misuse::LengthMismatch {
                        what,
                        given,
                        expected,
                    },
                )
            }
        }
    }
}
