//! Ownership of one slot, and of many in order.

use std::marker::PhantomData;

use smallvec::SmallVec;

/// One slot of pool `P`. Moving it is the only way to change its owner.
///
/// A slot can't be used twice:
///
/// ```compile_fail
/// use radixstate::pool::{ActiveState, Pool, PoolConfig};
/// let mut pool = Pool::<ActiveState>::new(PoolConfig::internal(2));
/// let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
/// pool.release(one);
/// pool.release(one); // moved above
/// ```
///
/// Two slots can:
///
/// ```
/// use radixstate::pool::{ActiveState, Pool, PoolConfig};
/// let mut pool = Pool::<ActiveState>::new(PoolConfig::internal(2));
/// let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
/// pool.release(one);
/// pool.release(two);
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slot goes back to its pool or to a new owner"]
pub struct Slot<P>(u32, PhantomData<P>);

impl<P> Slot<P> {
    pub(super) fn new(id: u32) -> Self {
        Self(id, PhantomData)
    }

    /// The row of the tensors that this slot stands for, `1..=capacity`.
    pub fn id(&self) -> u32 {
        self.0
    }
}

/// Ids that follow each other, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) count: u32,
}

impl Run {
    pub(super) fn of(id: u32) -> Self {
        Self {
            first: id,
            count: 1,
        }
    }

    /// Not the id after it: past the last id of the largest pool there is none.
    pub(super) fn last(self) -> u32 {
        self.first + (self.count - 1)
    }

    pub(super) fn ids(self) -> impl DoubleEndedIterator<Item = u32> {
        self.first..=self.last()
    }
}

/// Slots of pool `P` with one owner, in the order of the positions they stand for.
///
/// Kept as runs of consecutive ids: pools hand out the lowest first, so the pages of a prompt are
/// few runs, and what happens to all of them costs the runs, not the pages.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "slots go back to their pool or to a new owner"]
pub struct Slots<P> {
    runs: SmallVec<[Run; 2]>,
    tag: PhantomData<P>,
}

impl<P> Default for Slots<P> {
    fn default() -> Self {
        Self {
            runs: SmallVec::new(),
            tag: PhantomData,
        }
    }
}

impl<P> From<Slot<P>> for Slots<P> {
    fn from(slot: Slot<P>) -> Self {
        let mut slots = Self::default();
        slots.push(Run {
            first: slot.0,
            count: 1,
        });
        slots
    }
}

impl<P> Slots<P> {
    /// How many.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.count as usize).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Their ids, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.runs.iter().flat_map(|run| run.ids())
    }

    /// Adds their ids, a run at a time: the compiler knows how to do that fast.
    pub(crate) fn write_ids(&self, ids: &mut Vec<u32>) {
        self.runs.iter().for_each(|run| ids.extend(run.ids()));
    }

    /// Adds those of `other` at the end.
    pub fn append(&mut self, other: Self) {
        other.runs.into_iter().for_each(|run| self.push(run));
    }

    /// Keeps the first `n` and returns the rest.
    pub fn split_off(&mut self, n: usize) -> Self {
        let mut left = n;
        let fits = |run: &&Run| {
            left.checked_sub(run.count as usize)
                .inspect(|&rest| left = rest)
                .is_some()
        };
        let whole = self.runs.iter().take_while(fits).count();
        let mut rest = Self {
            runs: self.runs.drain(whole..).collect(),
            tag: PhantomData,
        };
        if let Some(cut) = rest.runs.first_mut().filter(|_| left > 0) {
            // Less than the run's count, so 32 bits hold it.
            let left = left as u32;
            self.runs.push(Run {
                first: cut.first,
                count: left,
            });
            *cut = Run {
                first: cut.first + left,
                count: cut.count - left,
            };
        }
        rest
    }

    /// Takes out the one at `index`, or none past the end.
    pub(crate) fn take_out(&mut self, index: usize) -> Self {
        let mut out = self.split_off(index);
        let rest = out.split_off(1);
        self.append(rest);
        out
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub(super) fn push(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(before) if before.last() == run.first - 1 => before.count += run.count,
            _ => self.runs.push(run),
        }
    }

    /// Slots that no pool gave out, for tests of the checker.
    #[cfg(test)]
    pub(crate) fn forged(id: u32) -> Self {
        Slot::new(id).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::KvPage;

    fn slots(ids: &[u32]) -> Slots<KvPage> {
        let mut slots = Slots::default();
        ids.iter().for_each(|&id| {
            slots.push(Run {
                first: id,
                count: 1,
            })
        });
        slots
    }

    #[test]
    fn neighbours_are_one_run_and_order_is_kept() {
        let mut some = slots(&[4, 5, 6, 9, 2, 3]);
        assert_eq!((some.runs().len(), some.len()), (3, 6));
        some.append(slots(&[4, 7]));
        assert_eq!(some.runs().len(), 4, "2, 3 and 4 follow each other");
        assert_eq!(some.ids().collect::<Vec<_>>(), [4, 5, 6, 9, 2, 3, 4, 7]);
        assert_eq!(some.ids().rev().take(3).collect::<Vec<_>>(), [7, 4, 3]);
    }

    #[test]
    fn a_cut_at_every_place_keeps_all() {
        let ids = [4, 5, 6, 9, 2, 3];
        for n in 0..=ids.len() {
            let mut front = slots(&ids);
            let back = front.split_off(n);
            assert_eq!(
                (
                    front.ids().collect::<Vec<_>>(),
                    back.ids().collect::<Vec<_>>()
                ),
                (ids[..n].into(), ids[n..].into())
            );
            assert_eq!(
                (front.is_empty(), back.is_empty()),
                (n == 0, n == ids.len())
            );
        }
    }

    #[test]
    fn one_is_taken_out_at_every_place() {
        let ids = [4, 5, 6, 9, 2, 3];
        for n in 0..ids.len() {
            let mut left = slots(&ids);
            assert_eq!(left.take_out(n).ids().collect::<Vec<_>>(), [ids[n]]);
            let rest = [&ids[..n], &ids[n + 1..]].concat();
            assert_eq!(left.ids().collect::<Vec<_>>(), rest);
        }
        assert!(slots(&ids).take_out(ids.len()).is_empty());
    }

    #[test]
    fn a_cut_past_the_end_leaves_nothing() {
        let mut front = slots(&[4, 5, 6, 9]);
        assert!(front.split_off(5).is_empty());
        assert!(
            front.split_off(usize::MAX - u32::MAX as usize).is_empty(),
            "a multiple of 2^32 is not 0"
        );
        assert_eq!(front.len(), 4);
    }
}
