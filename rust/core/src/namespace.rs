//! Which prefixes may match at all.

use std::sync::Arc;

use crate::outline::mix;

/// Keys in different namespaces never match.
///
/// `adapter` and `weights` change on every reload of an adapter or of the weights, so that a name
/// reused for new contents is a new namespace; the salts keep one account's prefixes from
/// another's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace {
    adapter: u64,
    weights: u64,
    /// The last one is there; none at all if no salt is.
    salts: Option<Arc<[Option<Box<str>>]>>,
}

impl Namespace {
    /// A namespace; `Namespace::default()` is that of the bare model.
    pub fn new(adapter: u64, tenant: Option<&str>, weights: u64) -> Self {
        Self::with_salts(adapter, [tenant], weights)
    }

    /// A namespace of several salts, as an engine has them: of the account, of the request. Each is
    /// told from the others by its place, and one that is not there from an empty one.
    pub fn with_salts<'a>(
        adapter: u64,
        salts: impl IntoIterator<Item = Option<&'a str>>,
        weights: u64,
    ) -> Self {
        let mut salts: Vec<Option<Box<str>>> =
            salts.into_iter().map(|salt| salt.map(Box::from)).collect();
        let last = salts.iter().rposition(Option::is_some);
        salts.truncate(last.map_or(0, |last| last + 1));
        Self {
            adapter,
            weights,
            salts: (!salts.is_empty()).then(|| salts.into()),
        }
    }

    /// Identity of the adapter's loaded weights, 0 for none.
    pub fn adapter(&self) -> u64 {
        self.adapter
    }

    /// Salt of the tenant: the first one.
    pub fn tenant(&self) -> Option<&str> {
        self.salts().next().flatten()
    }

    /// All salts, up to the last that is there.
    pub fn salts(&self) -> impl Iterator<Item = Option<&str>> {
        self.salts
            .iter()
            .flat_map(|salts| salts.iter())
            .map(|salt| salt.as_deref())
    }

    /// Equal for equal namespaces, on every rank.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hash = mix(self.adapter, self.weights);
        for salt in self.salts() {
            // One more than the length, so that no salt differs from an empty one.
            hash = mix(hash, salt.map_or(0, |salt| salt.len() as u64 + 1));
            for byte in salt.unwrap_or_default().bytes() {
                hash = mix(hash, byte.into());
            }
        }
        hash
    }

    /// Version of the model's weights.
    pub fn weights(&self) -> u64 {
        self.weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_are_told_by_their_place_and_by_being_there() {
        let of = |salts: &[Option<&str>]| Namespace::with_salts(0, salts.iter().copied(), 0);
        let all = [
            of(&[]),
            of(&[Some("")]),
            of(&[Some("a")]),
            of(&[Some("b")]),
            of(&[None, Some("a")]),
            of(&[Some(""), Some("a")]),
            of(&[Some("a"), Some("b")]),
            of(&[Some("ab")]),
            of(&[Some("b"), Some("a")]),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(all.iter().skip(n + 1).all(|other| other != one), "{one:?}");
        }
        assert_eq!(
            of(&[Some("a"), None, None]),
            Namespace::new(0, Some("a"), 0)
        );
        assert_eq!(of(&[None, None]), Namespace::default());
        assert!(of(&[None, Some("a")]).salts().eq([None, Some("a")]));
    }
}
