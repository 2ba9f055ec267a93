//! Hashes the keys of the table of children, so that nobody can choose tokens that collide in it.

use std::hash::{BuildHasher, RandomState};

/// Random words, under which no prompt can be chosen so that its pages collide.
///
/// The hash is NH, of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999): two different keys
/// share a hash with probability 2^-32, whoever chose them. A known hash that begins at a random
/// value would not do, since what collides in it collides from every beginning.
///
/// No decision reads a hash and nothing iterates over the table of children. So ranks decide alike,
/// although the words of each tree are its own.
#[derive(Debug, Default)]
pub(super) struct Secret(Vec<[u32; 2]>);

impl Secret {
    /// Draws two words for every two tokens of a page, the parent counted as one, unless that was
    /// done. It is called when the first page exists, which takes as much memory.
    pub(super) fn draw_once(&mut self, page: usize) {
        if self.0.is_empty() {
            let random = RandomState::new();
            let word = |i| random.hash_one(i) as u32;
            let pairs = (0..=page / 2).map(|i| [word(2 * i), word(2 * i + 1)]);
            self.0.extend(pairs);
        }
    }

    /// Equal for all keys before the words are drawn.
    #[inline]
    pub(super) fn hash(&self, parent: u32, first_page: &[u32]) -> u64 {
        let ([words, later @ ..], [token, tokens @ ..]) = (&self.0[..], first_page) else {
            return 0;
        };
        let mut sum = product([parent, *token], *words);
        let (pairs, odd) = tokens.as_chunks();
        for (&pair, &words) in pairs.iter().zip(later) {
            sum = sum.wrapping_add(product(pair, words));
        }
        if let (&[token], Some(&words)) = (odd, later.last()) {
            sum = sum.wrapping_add(product([token, 0], words));
        }
        spread(sum)
    }
}

fn product(pair: [u32; 2], under: [u32; 2]) -> u64 {
    let [one, two] = [0, 1].map(|i| u64::from(pair[i].wrapping_add(under[i])));
    one * two
}

/// The table reads the lowest and the highest bits. One to one, so it adds no collision.
fn spread(sum: u64) -> u64 {
    let mixed = sum.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// First pages of 16 ordinary tokens that an unkeyed multiply-add hash (FxHasher) all maps to
    /// one number: multiples of a short vector that a lattice reduction finds in a tenth of a
    /// second.
    fn hostile_pages(n: u32) -> impl Iterator<Item = [u32; 16]> {
        const STEP: [i32; 16] = [-5, -8, -1, 0, -9, -4, 1, 5, 5, 7, -1, 3, 0, -5, 1, -9];
        (0..n).map(|i| STEP.map(|step| 50_000_u32.wrapping_add_signed(step * i as i32)))
    }

    #[test]
    fn pages_chosen_against_a_known_hash_share_none() {
        let mut secret = Secret::default();
        secret.draw_once(16);
        let hashes: BTreeSet<u64> = hostile_pages(1000)
            .map(|page| secret.hash(0, &page))
            .collect();
        assert_eq!(hashes.len(), 1000);
    }

    #[test]
    fn every_token_and_the_parent_count_in_a_hash() {
        for page in [1, 2, 5, 16] {
            let mut secret = Secret::default();
            secret.draw_once(page);
            let mut keys = vec![(1, vec![7; page]), (2, vec![7; page])];
            keys.extend((0..page).map(|changed| {
                let mut tokens = vec![7; page];
                tokens[changed] = 8;
                (1, tokens)
            }));
            let hashes: BTreeSet<u64> = keys
                .iter()
                .map(|(parent, tokens)| secret.hash(*parent, tokens))
                .collect();
            assert_eq!(hashes.len(), page + 2);
        }
    }
}
