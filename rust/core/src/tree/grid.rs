//! Depths: where pages end, and where a checkpoint may stand.

/// The two grids: pages of KV, and the depths at which a checkpoint may stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) page: usize,
    /// lcm(page size, checkpoint stride), counted from zero.
    pub(crate) legal: usize,
}

impl Grid {
    /// `None` when the least common multiple does not fit.
    pub(crate) fn new(page: u32, stride: u32) -> Option<Self> {
        let (mut a, mut b) = (page, stride);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        let legal = (page / a).checked_mul(stride)?;
        Some(Self {
            page: page as usize,
            legal: legal as usize,
        })
    }

    pub(crate) fn legal_depth(self, tokens: usize) -> usize {
        tokens - tokens % self.legal
    }

    pub(crate) fn whole_pages(self, tokens: usize) -> usize {
        tokens - tokens % self.page
    }

    /// Length of the common prefix of two runs, in whole pages, as tokens.
    pub(crate) fn common(self, a: &[u32], b: &[u32]) -> usize {
        self.whole_pages(common_prefix(a, b))
    }
}

/// A whole run mostly matches, and the library's comparison is the fastest there is; it stops where
/// runs differ, and strides that become wide loads then find the place.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const STRIDE: usize = 32;
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    if a == b {
        return n;
    }
    let same = a
        .chunks_exact(STRIDE)
        .zip(b.chunks_exact(STRIDE))
        .take_while(|(x, y)| x == y)
        .count()
        * STRIDE;
    same + a[same..]
        .iter()
        .zip(&b[same..])
        .take_while(|(x, y)| x == y)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legal_depths_are_multiples_of_the_lcm_from_zero() {
        let grid = Grid::new(8, 3).unwrap();
        assert_eq!(grid.legal, 24);
        assert_eq!(
            [0, 23, 24, 47, 48].map(|n| grid.legal_depth(n)),
            [0, 0, 24, 24, 48]
        );
        assert!(Grid::new(u32::MAX, u32::MAX - 1).is_none());
    }

    #[test]
    fn a_common_prefix_is_found_at_every_length() {
        let base: Vec<u32> = (0..100).collect();
        for n in 0..100 {
            let mut other = base.clone();
            other[n] = 1000;
            assert_eq!(common_prefix(&base, &other), n);
            assert_eq!(common_prefix(&base, &base[..n]), n);
        }
        assert_eq!(Grid::new(8, 1).unwrap().common(&base, &base[..30]), 24);
    }
}
