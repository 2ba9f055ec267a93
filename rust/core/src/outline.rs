//! What a policy learns of a prompt: fingerprints of its prefixes, no tokens.

use crate::namespace::Namespace;
use crate::policy::Fingerprint;
use crate::tree::Grid;

/// The prefixes of a prompt at its legal depths. Nothing unless the policy asks for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Outline {
    /// One for each multiple of the legal depth, shallowest first.
    chain: Vec<Fingerprint>,
    /// How many of them the prompt could reuse: its last token is always computed.
    reusable: usize,
}

impl Outline {
    pub(crate) fn of(grid: Grid, namespace: &Namespace, prompt: &[u32]) -> Self {
        let mut outline = Self::default();
        outline.reach(grid, namespace, prompt);
        outline.reusable = prompt.len().saturating_sub(1) / grid.legal;
        outline
    }

    /// The prefix of `tokens` at their end, a legal depth. They continue, or are a part of, those
    /// seen before; only what is new is read.
    pub(crate) fn at(&mut self, grid: Grid, namespace: &Namespace, tokens: &[u32]) -> Fingerprint {
        self.reach(grid, namespace, tokens);
        self.chain[tokens.len() / grid.legal - 1]
    }

    /// The prefixes that the prompt could reuse, shallowest first.
    pub(crate) fn reusable(&self) -> &[Fingerprint] {
        &self.chain[..self.reusable]
    }

    /// Whether a state at `depth` is as deep as the prompt could be reused.
    pub(crate) fn is_end(&self, grid: Grid, depth: usize) -> bool {
        depth / grid.legal >= self.reusable
    }

    fn reach(&mut self, grid: Grid, namespace: &Namespace, tokens: &[u32]) {
        let known = self.chain.len();
        let rest = tokens.get(known * grid.legal..).unwrap_or_default();
        let before = self.chain.last().map(|&Fingerprint(before)| before);
        let mut hash = before.unwrap_or_else(|| namespace.fingerprint());
        for chunk in rest.chunks_exact(grid.legal) {
            hash = fold(hash, chunk);
            self.chain.push(Fingerprint(hash));
        }
    }
}

/// Continues a hash, four tokens for each multiplication. No secret: ranks must agree, and prompts
/// that are chosen to collide only misplace what is kept.
fn fold(mut hash: u64, tokens: &[u32]) -> u64 {
    let pair = |two: &[u32]| {
        let second = two.get(1).copied().unwrap_or_default();
        u64::from(two[0]) << 32 | u64::from(second)
    };
    for four in tokens.chunks(4) {
        let (low, high) = four.split_at(four.len().min(2));
        let high = if high.is_empty() { 0 } else { pair(high) };
        hash = mix(hash ^ pair(low), high);
    }
    hash
}

/// Both halves of a product of 128 bits.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    const ODD: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93];
    let product = u128::from(a ^ ODD[0]) * u128::from(b ^ ODD[1]);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: Grid = Grid { page: 2, legal: 4 };

    fn chain(tokens: &[u32]) -> Vec<Fingerprint> {
        let outline = Outline::of(GRID, &Namespace::default(), tokens);
        outline.reusable().to_vec()
    }

    #[test]
    fn prompts_agree_as_far_as_their_tokens_do() {
        let one: Vec<u32> = (0..13).collect();
        let mut other = one.clone();
        other[8] = 99;
        let (one, other) = (chain(&one), chain(&other));
        assert_eq!((one.len(), other.len()), (3, 3));
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
    }

    #[test]
    fn the_last_token_of_a_prompt_is_not_reusable() {
        let lengths: Vec<usize> = [1, 4, 5, 8, 9].map(|n| chain(&vec![7; n]).len()).into();
        assert_eq!(lengths, [0, 0, 1, 1, 2]);
    }

    #[test]
    fn an_answer_continues_the_prompt_and_is_its_end() {
        let tokens: Vec<u32> = (0..20).collect();
        let mut outline = Outline::of(GRID, &Namespace::default(), &tokens[..9]);
        let whole = outline.at(GRID, &Namespace::default(), &tokens);
        assert_eq!(whole, chain(&[&tokens[..], &[1]].concat())[4]);
        assert_eq!(outline.reusable().len(), 2);
        let ends = [4, 8, 20].map(|depth| outline.is_end(GRID, depth));
        assert_eq!(ends, [false, true, true]);
    }

    #[test]
    fn namespaces_share_no_fingerprint() {
        let names = [
            Namespace::default(),
            Namespace::new(1, None, 0),
            Namespace::new(0, None, 1),
            Namespace::new(0, Some(""), 0),
            Namespace::new(0, Some("a"), 0),
            Namespace::with_salts(0, [None, Some("a")], 0),
            Namespace::with_salts(0, [Some("a"), Some("b")], 0),
            Namespace::with_salts(0, [Some("ab")], 0),
        ];
        let mut found: Vec<Fingerprint> = names
            .iter()
            .map(|name| Outline::of(GRID, name, &[0; 5]).reusable()[0])
            .collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), names.len());
    }

    /// Counted: positions and orders that a weak sum would confuse.
    #[test]
    fn short_runs_of_few_tokens_have_fingerprints_of_their_own() {
        let mut found = std::collections::BTreeSet::new();
        for code in 0..1 << 16 {
            let tokens: Vec<u32> = (0..8).map(|place| code >> (2 * place) & 3).collect();
            found.insert(fold(0, &tokens));
        }
        assert_eq!(found.len(), 1 << 16);
    }
}
