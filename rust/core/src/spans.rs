//! Positions that their token does not tell apart: images, audio, embeddings.
//!
//! An image fills many positions with one placeholder token, so two prompts with different images
//! may have equal tokens. [`SpanKeys`] gives each digest tokens of its own, from 2^31 on, which the
//! cache then compares like any others.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::error::Misuse;

/// Positions whose content a digest tells. For [`SpanKeys::key`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span<'a> {
    /// The positions, at least one.
    pub positions: Range<usize>,
    /// Of everything that they were computed from, beside their tokens: at least 128 bits.
    pub digest: &'a [u8],
}

/// Tokens that stand for digests.
///
/// A digest has two tokens: one for the first position of a span, one for the others, so that two
/// copies of an image side by side are not one longer image. A token is never given to another
/// digest. What is given depends on the order of the calls alone, so ranks that make the same calls
/// give the same.
///
/// ```
/// use radixstate::{Span, SpanKeys};
///
/// # fn main() -> Result<(), radixstate::Misuse> {
/// let mut keys = SpanKeys::new(1000);
/// let prompt = [1, 2, 99, 99, 99, 3];
/// let [cat, dog] = [[1; 16], [2; 16]];
/// let mut key = |digest| keys.key(&prompt, &[Span { positions: 2..5, digest }]);
/// let (first, other, again) = (key(&cat)?, key(&dog)?, key(&cat)?);
/// assert_eq!((&first[..2], first[5]), (&[1, 2][..], 3));
/// assert_eq!(first, again);
/// assert!(first[2..5].iter().all(|token| !other.contains(token)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SpanKeys {
    capacity: usize,
    tokens: HashMap<Arc<[u8]>, u32>,
    /// In the order first seen.
    known: VecDeque<Arc<[u8]>>,
    /// The next digest's first token.
    next: u32,
}

impl SpanKeys {
    /// Tokens below this are the model's; those from it on stand for digests.
    pub const FIRST: u32 = 1 << 31;
    /// Bytes that a digest has at least.
    pub const LEAST: usize = 16;

    /// Remembers `capacity` digests, at least one. To forget a digest costs reuse and nothing else:
    /// when it comes again it has other tokens.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            tokens: HashMap::new(),
            known: VecDeque::new(),
            next: Self::FIRST,
        }
    }

    /// The prompt as the cache is to compare it: with the tokens of the digests in the place of
    /// those of the spans. Every prompt of the cache has to pass through here, also one without
    /// spans: else its tokens could be those of a digest.
    ///
    /// # Errors
    /// [`Misuse::Config`] for a token of 2^31 or more, a span that is empty, out of order or past
    /// the end, a digest of less than 128 bits, or when all 2^30 digests were given. Then make
    /// other keys and [reset](crate::Cache::reset) the cache.
    pub fn key(&mut self, tokens: &[u32], spans: &[Span<'_>]) -> Result<Vec<u32>, Misuse> {
        check_tokens(tokens)?;
        check_spans(tokens.len(), spans)?;
        let mut key = tokens.to_vec();
        for Span { positions, digest } in spans {
            let first = self.token(digest)?;
            key[positions.clone()].fill(first + 1);
            key[positions.start] = first;
        }
        Ok(key)
    }

    fn token(&mut self, digest: &[u8]) -> Result<u32, Misuse> {
        if let Some(&token) = self.tokens.get(digest) {
            return Ok(token);
        }
        let token = self.next;
        // Past the last one it wraps to 0, and stays there.
        if token < Self::FIRST {
            let why = "2^30 digests were given: make other SpanKeys, and reset the cache";
            return Err(Misuse::Config(why.into()));
        }
        self.next = token.wrapping_add(2);
        if self.known.len() == self.capacity {
            let oldest = self.known.pop_front();
            oldest.map(|oldest| self.tokens.remove(&oldest));
        }
        let digest: Arc<[u8]> = digest.into();
        self.known.push_back(Arc::clone(&digest));
        self.tokens.insert(digest, token);
        Ok(token)
    }
}

fn check_tokens(tokens: &[u32]) -> Result<(), Misuse> {
    let high = tokens.iter().position(|&token| token >= SpanKeys::FIRST);
    high.map_or(Ok(()), |at| {
        let token = tokens[at];
        Err(Misuse::Config(format!(
            "token {token} at position {at} is 2^31 or more: those stand for digests of spans"
        )))
    })
}

fn check_spans(len: usize, spans: &[Span<'_>]) -> Result<(), Misuse> {
    let mut free = 0;
    for Span { positions, digest } in spans {
        let Range { start, end } = *positions;
        if start < free || end <= start || end > len {
            return Err(Misuse::Config(format!(
                "span {start}..{end} is empty, out of order or past the {len} tokens: expected one within {free}..{len}"
            )));
        }
        if digest.len() < SpanKeys::LEAST {
            let bits = digest.len() * 8;
            return Err(Misuse::Config(format!(
                "span {start}..{end} has a digest of {bits} bits, at least 128 are needed"
            )));
        }
        free = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(positions: Range<usize>, digest: &[u8]) -> Span<'_> {
        Span { positions, digest }
    }

    #[test]
    fn two_copies_side_by_side_are_not_one_longer_span() {
        let mut keys = SpanKeys::new(4);
        let digest = [7; 16];
        let prompt = [9; 8];
        let one = keys.key(&prompt, &[span(0..8, &digest)]).unwrap();
        let two = keys
            .key(&prompt, &[span(0..4, &digest), span(4..8, &digest)])
            .unwrap();
        assert_eq!(one[..4], two[..4]);
        assert_ne!(one[4], two[4]);
    }

    #[test]
    fn every_bit_and_the_length_of_a_digest_count() {
        let mut keys = SpanKeys::new(1000);
        let mut seen = std::collections::BTreeSet::new();
        for bit in 0..128 {
            let digest = (1_u128 << bit).to_le_bytes();
            assert!(seen.insert(keys.key(&[1], &[span(0..1, &digest)]).unwrap()));
        }
        for len in [16, 17, 32] {
            let key = keys.key(&[1], &[span(0..1, &vec![0; len])]).unwrap();
            assert!(seen.insert(key), "{len} zeros");
        }
    }

    #[test]
    fn a_forgotten_digest_comes_back_with_tokens_that_nobody_had() {
        let mut keys = SpanKeys::new(2);
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..3 {
            for digest in [[1; 16], [2; 16], [3; 16]] {
                let key = keys.key(&[0, 0], &[span(0..2, &digest)]).unwrap();
                assert!(key.iter().all(|&token| seen.insert(token)), "round {round}");
                let again = keys.key(&[0, 0], &[span(0..2, &digest)]).unwrap();
                assert_eq!(key, again, "it is remembered at first");
            }
        }
        assert_eq!((keys.tokens.len(), keys.known.len()), (2, 2));
    }

    #[test]
    fn the_last_tokens_are_given_once() {
        let mut keys = SpanKeys::new(8);
        keys.next = u32::MAX - 1;
        let last = keys.key(&[1, 1], &[span(0..2, &[1; 16])]).unwrap();
        assert_eq!(last, [u32::MAX - 1, u32::MAX]);
        for _ in 0..2 {
            let error = keys.key(&[1], &[span(0..1, &[2; 16])]).unwrap_err();
            assert!(error.to_string().contains("reset the cache"), "{error}");
        }
        let known = keys.key(&[1, 1], &[span(0..2, &[1; 16])]).unwrap();
        assert_eq!(known, last);
    }

    #[test]
    fn what_is_no_span_is_refused_with_its_numbers() {
        let mut keys = SpanKeys::new(8);
        let digest = [0; 16];
        for (tokens, spans, words) in [
            (vec![1, 1 << 31], vec![], "token 2147483648 at position 1"),
            (vec![1; 4], vec![span(2..2, &digest)], "span 2..2 is empty"),
            (vec![1; 4], vec![span(2..5, &digest)], "past the 4 tokens"),
            (
                vec![1; 4],
                vec![span(0..3, &digest), span(2..4, &digest)],
                "expected one within 3..4",
            ),
            (
                vec![1; 4],
                vec![span(0..1, &digest[..15])],
                "a digest of 120 bits",
            ),
        ] {
            let error = keys.key(&tokens, &spans).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(keys.tokens.is_empty(), "nothing was given");
    }
}
