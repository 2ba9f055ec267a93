//! Where to cut a prefill, and where to keep a state.

use crate::cache::Cache;
use crate::error::Misuse;
use crate::handle::Sequence;

/// A part of a prompt that the engine computes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The first position to compute.
    pub begin: usize,
    /// The position after the last.
    pub end: usize,
    /// Whether to store a checkpoint at `end`.
    pub keep: bool,
}

impl Cache {
    /// Cuts what is left of a prompt into pieces of at most `chunk` tokens, so that states can be
    /// stored where they help later prompts: at the fork where another prompt is known to leave
    /// this one ([`Match::branch`](crate::Match)), and at the deepest depth at which this very
    /// prompt could be continued when it comes again.
    ///
    /// The pieces follow each other from the reused tokens to the end of those known now.
    ///
    /// ```
    /// use radixstate::{Cache, Config, Namespace, Piece, PoolConfig, StartOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pools = [1, 4].map(PoolConfig::internal);
    /// let mut cache = Cache::new(Config::linear(64, pools[0], pools[1]))?;
    /// let prompt: Vec<u32> = (0..150).collect();
    /// let started = cache.start(&Namespace::default(), &prompt, StartOptions::default())?;
    /// let pieces = cache.pieces(&started.sequence, Some(100))?;
    /// let piece = |begin, end, keep| Piece { begin, end, keep };
    /// assert_eq!(pieces, [piece(0, 100, false), piece(100, 128, true), piece(128, 150, false)]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Misuse::WrongCache`]; [`Misuse::Config`] for a chunk of 0.
    pub fn pieces(&self, sequence: &Sequence, chunk: Option<usize>) -> Result<Vec<Piece>, Misuse> {
        let view = self.view(sequence)?;
        let chunk = chunk.unwrap_or(usize::MAX);
        if chunk == 0 {
            return Err(Misuse::Config("a chunk has at least 1 token, got 0".into()));
        }
        let reused = view.reused();
        let end = view.tokens().len();
        // A hit is at most the prompt's length - 1.
        let deepest = self.legal_depth(end.saturating_sub(1));
        let mut keep: Vec<usize> = view.branch().into_iter().chain([deepest]).collect();
        keep.retain(|&depth| depth > reused && depth < end);
        keep.sort_unstable();
        let mut pieces = Vec::new();
        let mut begin = reused;
        while begin < end {
            let stop = keep.iter().copied().find(|&depth| depth > begin);
            let next = stop.unwrap_or(end).min(begin.saturating_add(chunk));
            pieces.push(Piece {
                begin,
                end: next,
                keep: stop == Some(next),
            });
            begin = next;
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Commit, Config, Namespace, PoolConfig, Reservation, StartOptions};

    fn cache() -> Cache {
        let config = Config::linear(4, PoolConfig::internal(4), PoolConfig::internal(8));
        Cache::new(config).unwrap()
    }

    fn start(cache: &mut Cache, prompt: &[u32]) -> Sequence {
        let started = cache.start(&Namespace::default(), prompt, StartOptions::default());
        let sequence = started.unwrap().sequence;
        cache.loaded(&sequence).unwrap();
        sequence
    }

    fn store(cache: &mut Cache, sequence: &Sequence, depth: usize) {
        let slot = cache.view(sequence).unwrap().slot();
        let reserved = cache.reserve_checkpoint(sequence, depth, slot).unwrap();
        let Reservation::Pending(pending) = reserved else {
            panic!("{reserved:?}")
        };
        let commit = cache.commit(sequence, pending).unwrap();
        assert!(matches!(commit, Commit::Stored(_)));
    }

    fn cut(cache: &Cache, sequence: &Sequence, chunk: Option<usize>) -> Vec<(usize, usize, bool)> {
        let pieces = cache.pieces(sequence, chunk).unwrap();
        let parts = pieces
            .iter()
            .map(|piece| (piece.begin, piece.end, piece.keep));
        parts.collect()
    }

    #[test]
    fn a_prompt_of_any_length_hits_when_it_comes_again() {
        for length in 5..40 {
            let mut cache = cache();
            let prompt: Vec<u32> = (0..length).collect();
            let sequence = start(&mut cache, &prompt);
            for (_, end, keep) in cut(&cache, &sequence, Some(7)) {
                if keep {
                    store(&mut cache, &sequence, end);
                }
            }
            let again = cache.lookup(&Namespace::default(), &prompt, None).unwrap();
            assert_eq!(again.length, (length as usize - 1) / 4 * 4);
        }
    }

    #[test]
    fn the_fork_is_a_cut() {
        let mut cache = cache();
        let sequence = start(&mut cache, &(0..17).collect::<Vec<u32>>());
        store(&mut cache, &sequence, 16);
        let fork = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 77, 77, 77];
        let other = start(&mut cache, &fork);
        let pieces = cut(&cache, &other, None);
        assert_eq!(pieces, [(0, 8, true), (8, 12, true), (12, 14, false)]);
    }

    #[test]
    fn short_prompts_keep_nothing_and_a_chunk_has_a_token() {
        let mut cache = cache();
        let sequence = start(&mut cache, &[1, 2, 3, 4]);
        assert_eq!(cut(&cache, &sequence, None), [(0, 4, false)]);
        let refused = cache.pieces(&sequence, Some(0)).unwrap_err();
        assert_eq!(refused.to_string(), "a chunk has at least 1 token, got 0");
    }
}
