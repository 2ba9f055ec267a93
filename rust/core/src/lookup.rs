//! The read-only question: how much of a prompt can be reused. Splits nothing, allocates nothing,
//! refreshes nothing.

use crate::key::Namespace;
use crate::node::NodeId;
use crate::prefixes::Prefixes;

/// Why a prompt could, or could not, reuse a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// `length > 0`.
    Hit,
    /// Not one page of it is cached.
    NoPrefix,
    /// Its prefix is cached, but no state at a depth it could use.
    NoState,
    /// What is cached of it ends before the first legal depth.
    Unaligned,
    /// The state it could use is still being written.
    NotReady,
}

/// What of a prompt can be reused. A hint: the cache checks it again when it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Tokens whose KV *and* state can be reused, at most the prompt's length - 1.
    pub length: usize,
    /// Tokens whose KV is cached, in whole pages; at least `length`.
    pub kv_length: usize,
    /// Deepest legal depth at which a checkpoint would have helped this prompt. Cutting the
    /// prefill there and storing one serves the next prompt that branches off here.
    pub branch: Option<usize>,
    /// Why `length` is what it is.
    pub reason: Reason,
    /// How often the reusable state has been encoded since it was computed; 0 without a hit.
    pub generation: u32,
    pub(crate) found: Option<Found>,
    pub(crate) namespace: Namespace,
    pub(crate) cache: u64,
    pub(crate) epoch: u64,
}

/// The checkpoint that a match means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) node: NodeId,
    pub(crate) serial: u64,
}

/// The part of a [`Match`] that the tree decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) length: usize,
    pub(crate) kv_length: usize,
    pub(crate) branch: Option<usize>,
    pub(crate) reason: Reason,
    pub(crate) generation: u32,
    pub(crate) found: Option<Found>,
}

impl Hit {
    pub(crate) const NOTHING: Self = Self {
        length: 0,
        kv_length: 0,
        branch: None,
        reason: Reason::NoPrefix,
        generation: 0,
        found: None,
    };
}

impl Prefixes {
    /// The deepest ready checkpoint on the key's path that is no deeper than `limit`.
    pub(crate) fn find(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Hit {
        let Some(root) = self.tree.root(namespace) else {
            return Hit::NOTHING;
        };
        let (mut deepest, mut unready, mut occupied) = (None, false, 0);
        let reach = self.tree.walk(root, tokens, |index, node| {
            let Some(checkpoint) = node.checkpoint.as_ref().filter(|_| node.end <= limit) else {
                return;
            };
            occupied = node.end;
            if checkpoint.ready {
                deepest = Some((index, node.end, checkpoint));
            } else {
                unready = true;
            }
        });
        let useful = self.grid.legal_depth(reach.matched.min(limit));
        let length = deepest.map_or(0, |(_, end, _)| end);
        let reason = match () {
            () if length > 0 => Reason::Hit,
            () if unready => Reason::NotReady,
            () if reach.matched == 0 => Reason::NoPrefix,
            () if useful == 0 => Reason::Unaligned,
            () => Reason::NoState,
        };
        Hit {
            length,
            kv_length: reach.matched,
            branch: (useful > length && useful != occupied).then_some(useful),
            reason,
            generation: deepest.map_or(0, |(_, _, checkpoint)| checkpoint.generation),
            found: deepest.map(|(index, _, checkpoint)| Found {
                node: self.tree.id(index),
                serial: checkpoint.serial,
            }),
        }
    }
}
