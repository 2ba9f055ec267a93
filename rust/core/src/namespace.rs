//! Which prefixes may match at all.

use std::sync::Arc;

/// Keys in different namespaces never match.
///
/// `adapter` and `weights` change on every reload of an adapter or of the weights, so that a name
/// reused for new contents is a new namespace; `tenant` keeps one account's prefixes from
/// another's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace {
    adapter: u64,
    weights: u64,
    tenant: Option<Arc<str>>,
}

impl Namespace {
    /// A namespace; `Namespace::default()` is that of the bare model.
    pub fn new(adapter: u64, tenant: Option<&str>, weights: u64) -> Self {
        Self {
            adapter,
            weights,
            tenant: tenant.map(Arc::from),
        }
    }

    /// Identity of the adapter's loaded weights, 0 for none.
    pub fn adapter(&self) -> u64 {
        self.adapter
    }

    /// Salt of the tenant.
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// Version of the model's weights.
    pub fn weights(&self) -> u64 {
        self.weights
    }
}
