//! The read-only question: how much of a prompt can be reused. Splits nothing, allocates nothing,
//! refreshes nothing.

use crate::namespace::Namespace;
use crate::outline::Outline;
use crate::prefixes::{CheckpointId, Prefixes};

/// Why a prompt could, or could not, reuse a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// `length > 0`.
    Hit,
    /// Not one page of it is cached.
    NoPrefix,
    /// Its prefix is cached, but no state at a depth it could use.
    NoState,
    /// The cached part is shorter than the first legal depth, so it cannot have a checkpoint.
    Unaligned,
    /// The state it could use is still being written, or not yet known to be finite.
    NotReady,
}

/// How much of a prompt can be reused. A hint: the cache checks it again when it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Tokens whose KV *and* state can be reused, at most the prompt's length - 1.
    pub length: usize,
    /// Tokens whose KV is cached, in whole pages; at least `length`, and at most what the caller
    /// asked for.
    pub kv_length: usize,
    /// Deepest legal depth at which a checkpoint would have helped this prompt. Cutting the
    /// prefill there and storing one serves the next prompt that branches off here.
    pub branch: Option<usize>,
    /// Why `length` is what it is.
    pub reason: Reason,
    /// How often the reusable state has been encoded since it was computed; 0 without a hit.
    pub encodings: u32,
    /// A deeper checkpoint of this prompt is being written, or not yet known to be finite.
    pub not_ready: bool,
    pub(crate) checkpoint: Option<CheckpointId>,
    pub(crate) namespace: Namespace,
    /// What the policy learns when it is leased.
    pub(crate) outline: Outline,
    pub(crate) cache: u64,
    /// Resets of the cache before the lookup.
    pub(crate) resets: u64,
}

/// The part of a [`Match`] that the tree decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reusable {
    pub(crate) length: usize,
    pub(crate) kv_length: usize,
    pub(crate) branch: Option<usize>,
    pub(crate) reason: Reason,
    pub(crate) encodings: u32,
    pub(crate) not_ready: bool,
    pub(crate) checkpoint: Option<CheckpointId>,
}

impl Reusable {
    pub(crate) const NOTHING: Self = Self {
        length: 0,
        kv_length: 0,
        branch: None,
        reason: Reason::NoPrefix,
        encodings: 0,
        not_ready: false,
        checkpoint: None,
    };
}

impl Prefixes {
    /// The deepest ready checkpoint on the key's path that is no deeper than `limit`.
    pub(crate) fn find(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Reusable {
        let Some(root) = self.tree().root(namespace) else {
            return Reusable::NOTHING;
        };
        let mut deepest = None;
        let mut unready = false;
        let mut occupied = 0;
        let reach = self.tree().walk(root, tokens, |index, node| {
            let checkpoint = node.checkpoint.as_ref();
            let Some(checkpoint) = checkpoint.filter(|_| node.end <= limit) else {
                return;
            };
            occupied = node.end;
            if checkpoint.ready {
                deepest = Some((index, node.end, checkpoint));
            }
            // The path is walked downwards, so the deepest checkpoint has the last word.
            unready = !checkpoint.ready;
        });
        let useful = self.grid().legal_depth(reach.matched.min(limit));
        let length = deepest.map_or(0, |(_, end, _)| end);
        let reason = if length > 0 {
            Reason::Hit
        } else if unready {
            Reason::NotReady
        } else if reach.matched == 0 {
            Reason::NoPrefix
        } else if useful == 0 {
            Reason::Unaligned
        } else {
            Reason::NoState
        };
        let checkpoint = deepest.map(|(index, _, checkpoint)| CheckpointId {
            node: self.tree().id(index),
            serial: checkpoint.serial,
        });
        Reusable {
            length,
            kv_length: reach.matched,
            branch: (useful > length && useful != occupied).then_some(useful),
            reason,
            encodings: deepest.map_or(0, |(_, _, checkpoint)| checkpoint.encodings),
            not_ready: unready,
            checkpoint,
        }
    }
}
