//! Requests as sequences, in a cache that owns its pages.

use radixstate::{Begin, Misuse, Namespace, OwnPages, Sequence, StartOptions, Started};
use radixstate_replay::{Depth, Op, Wrong};

use super::{Both, Front, Waiting, assert_same_match, namespace, pick, serial};
use crate::oracle::Fresh;

impl Front for OwnPages {
    fn apply(both: &mut Both<Self>, op: &Op) -> Option<()> {
        match op {
            Op::Start {
                tenant,
                tokens,
                options,
            } => both.start(&namespace(*tenant), tokens, *options),
            Op::Serve {
                tenant,
                tokens,
                ends,
            } => return both.serve(&namespace(*tenant), tokens, *ends),
            Op::Reserve {
                sequence,
                depth,
                source,
            } => return both.reserve(*sequence, *depth, *source),
            Op::Loaded(_) | Op::Grow(..) | Op::Append(..) | Op::Shrink(_) | Op::TakeSlot(_) => {
                return both.apply_running(op);
            }
            Op::GiveBackSlot { sequence, slot } => return both.give_back_slot(*sequence, *slot),
            Op::Finish(n) => {
                let (id, sequence) = both.sequences.swap_remove(pick(&both.sequences, *n)?);
                let ended = if id.is_multiple_of(2) {
                    both.real.finish(sequence)
                } else {
                    both.real.abort(sequence)
                };
                ended.unwrap();
                both.naive.finish(id);
            }
            Op::DropSequences { first, count } => return both.drop_sequences(*first, *count),
            _ => return None,
        }
        Some(())
    }

    fn commit(both: &mut Both<Self>, n: usize, owner: u64) -> Option<()> {
        let at = both.sequences.iter().position(|(id, _)| *id == owner)?;
        let Waiting {
            id,
            pending,
            proven,
        } = both.pending.swap_remove(n);
        let outcome = both.real.commit(&both.sequences[at].1, pending).unwrap();
        let (expected, _) = both.naive.publish(id, None, serial(&outcome), proven);
        both.committed(outcome, expected);
        Some(())
    }

    fn wrong(both: &mut Both<Self>, wrong: Wrong, n: usize) -> Option<()> {
        if !matches!(wrong, Wrong::OtherPending) {
            return None;
        }
        let n = pick(&both.pending, n)?;
        let owner = both.naive.reserved[&both.pending[n].id].owner;
        let (_, sequence) = both.sequences.iter().find(|(id, _)| *id != owner)?;
        let Waiting { id, pending, .. } = both.pending.swap_remove(n);
        let rejected = both.real.commit(sequence, pending).unwrap_err();
        assert_eq!(rejected.why, Misuse::NotYourPending);
        drop(rejected);
        both.naive.drop_reserved(id);
        Some(())
    }

    fn verify(both: &Both<Self>) {
        for (id, sequence) in &both.sequences {
            let (view, holder) = (both.real.view(sequence).unwrap(), &both.naive.holders[id]);
            assert_eq!(view.tokens(), holder.tokens);
            assert_eq!(
                (view.reused(), view.claimed(), view.leased()),
                (holder.reused, holder.claimed, holder.depth())
            );
            assert_eq!(view.slots().collect::<Vec<u32>>(), holder.slots());
            assert_eq!(view.pages(), both.naive.pages_of(*id));
        }
    }
}

impl Both<OwnPages> {
    fn start(&mut self, namespace: &Namespace, tokens: &[u32], options: StartOptions) {
        let id = self.id();
        let started = self.real.start(namespace, tokens, options);
        let fresh = started.as_ref().map_or_else(
            |_| Fresh::default(),
            |started| self.fresh(&started.sequence),
        );
        let found = match self.naive.start(id, namespace, tokens, options, fresh) {
            Ok(found) => found,
            Err(error) => return assert_eq!(started.unwrap_err(), error),
        };
        let Started {
            sequence,
            matched,
            begin,
        } = started.expect("the model starts it");
        assert_same_match(&matched, &found);
        let dst = self.real.view(&sequence).unwrap().slot();
        match found.state {
            Some((src, _)) => assert_eq!(begin, Begin::Load { src, dst }),
            None => assert_eq!(begin, Begin::Clear { dst }),
        }
        self.sequences.push((id, sequence));
    }

    /// A whole request, as its parts: whatever skips a part ends it.
    fn serve(&mut self, namespace: &Namespace, tokens: &[u32], ends: bool) -> Option<()> {
        let (running, waiting) = (self.sequences.len(), self.pending.len());
        self.start(namespace, tokens, StartOptions::default());
        if self.sequences.len() > running {
            self.apply(&Op::Loaded(running));
            self.reserve(running, Depth::Deepest, 0)?;
            if self.pending.len() > waiting {
                let (pending, proven) = (waiting, true);
                self.apply(&Op::Commit { pending, proven })?;
            }
            if ends {
                self.apply(&Op::Finish(running));
            }
        }
        Some(())
    }

    /// The slots that the real cache took for a sequence just started.
    fn fresh(&self, sequence: &Sequence) -> Fresh {
        let view = self.real.view(sequence).unwrap();
        let shared = if self.naive.has_kv() {
            view.leased() / self.config.page_size as usize
        } else {
            0
        };
        Fresh {
            pages: view.pages().split_off(shared),
            active: view.slots().collect(),
        }
    }

    /// Alone, or with a second state that may make the call wrong.
    fn reserve(&mut self, n: usize, depth: Depth, source: usize) -> Option<()> {
        let id = self.id();
        let (owner, sequence) = &self.sequences[pick(&self.sequences, n)?];
        let holder = &self.naive.holders[owner];
        let depth = depth.pick(self.naive.legal, holder.written());
        let source = Self::source(holder.slots(), source);
        let wrong = [(sequence, depth, source), (sequence, depth, 0)];
        let refused = self.real.reserve_checkpoints(&wrong);
        let of_none = self.naive.check_source(*owner, depth, 0).unwrap_err();
        let allowed = self.naive.check_source(*owner, depth, source);
        assert_eq!(refused.unwrap_err(), allowed.err().unwrap_or(of_none));
        let reservation = self.real.reserve_checkpoint(sequence, depth, source);
        if let Err(misuse) = self.naive.check_source(*owner, depth, source) {
            assert_eq!(reservation.unwrap_err(), misuse);
            return Some(());
        }
        let (owner, tokens) = (*owner, holder.tokens[..depth].to_vec());
        self.naive.reach(owner, depth, source);
        self.reserved(id, owner, &tokens, reservation.unwrap());
        Some(())
    }

    fn apply_running(&mut self, op: &Op) -> Option<()> {
        let (real, naive) = (&mut self.real, &mut self.naive);
        let (Op::Loaded(n) | Op::Grow(n, _) | Op::Append(n, _) | Op::Shrink(n) | Op::TakeSlot(n)) =
            op
        else {
            unreachable!("{op:?} is not of a running sequence");
        };
        let (id, sequence) = &self.sequences[pick(&self.sequences, *n)?];
        match op {
            Op::Loaded(_) => assert_eq!(real.loaded(sequence), naive.loaded(*id)),
            Op::Append(_, tokens) => {
                assert_eq!(real.append(sequence, tokens), naive.append(*id, tokens))
            }
            Op::Grow(_, by) => {
                let before = real.view(sequence).unwrap().pages().len();
                let grown = real.grow(sequence, *by);
                let fresh = real.view(sequence).unwrap().pages().split_off(before);
                assert_eq!(grown, naive.grow(*id, *by, fresh));
            }
            Op::Shrink(_) => {
                real.shrink(sequence).unwrap();
                naive.shrink(*id);
            }
            _ => {
                let taken = real.take_slot(sequence);
                assert_eq!(taken.clone().map(drop), naive.take_slot(*id, taken.ok()));
            }
        }
        Some(())
    }

    fn give_back_slot(&mut self, n: usize, slot: usize) -> Option<()> {
        let (id, sequence) = &self.sequences[pick(&self.sequences, n)?];
        let slot = Self::source(self.naive.holders[id].slots(), slot);
        let given_back = self.real.give_back_slot(sequence, slot);
        assert_eq!(given_back, self.naive.give_back_slot(*id, slot, 1));
        Some(())
    }

    fn drop_sequences(&mut self, first: usize, count: usize) -> Option<()> {
        let first = pick(&self.sequences, first)?;
        let end = (first + count).min(self.sequences.len());
        let dropped = self.sequences.drain(first..end).rev();
        let mut dropped: Vec<u64> = dropped.map(|(id, _)| id).collect();
        // Whatever the order of the drops, the cache takes back the oldest first.
        dropped.sort_unstable();
        dropped.into_iter().for_each(|id| self.naive.finish(id));
        Some(())
    }
}
