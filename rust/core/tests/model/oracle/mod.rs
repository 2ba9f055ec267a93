//! The simplest cache that obeys the rules: no compressed tree, no counters, no eviction order.
//!
//! Cached pages are keyed by their whole token prefix. What is pinned, evictable, next to go or
//! left bare is worked out from its definition each time it is asked for. Slot ids are not
//! predicted: the test passes in those that the real cache chose, and the model refuses an id that
//! is in use.

mod leases;
mod operations;
mod pools;
mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use radixstate::{Config, Freed, Namespace, Reason, Skip, Stats};
use radixstate_replay::Who;

/// A whole-page prefix in one namespace, between two resets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Prefix {
    pub(crate) resets: u64,
    pub(crate) namespace: Namespace,
    pub(crate) tokens: Vec<u32>,
    /// Past which depths it was refused, and with which store: no prompt has such a prefix.
    refused: Vec<(usize, u64)>,
}

impl Prefix {
    fn new(resets: u64, namespace: &Namespace, tokens: &[u32]) -> Self {
        Self {
            resets,
            namespace: namespace.clone(),
            tokens: tokens.to_vec(),
            refused: Vec::new(),
        }
    }

    pub(crate) fn depth(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn starts_with(&self, other: &Self) -> bool {
        let refused = self
            .refused
            .iter()
            .filter(|(depth, _)| *depth < other.depth());
        self.resets == other.resets
            && self.namespace == other.namespace
            && self.tokens.starts_with(&other.tokens)
            && refused.eq(&other.refused)
    }
}

/// A cached page.
#[derive(Debug, Clone, Copy)]
struct Page {
    id: u32,
    /// The store that brought it.
    serial: u64,
}

/// A cached state.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) slot: u32,
    pub(crate) serial: u64,
    stamp: u64,
    ready: bool,
    /// How often it was encoded since it was computed.
    encodings: u32,
}

/// A checkpoint on its way from a step into the tree. Pins the state and its path.
#[derive(Debug, Clone)]
struct Writing {
    /// It is ready when this and all tickets before it are closed.
    ticket: u64,
    step: Option<u64>,
    path: Prefix,
    serial: u64,
}

/// What one owner gives back as a whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holdings {
    path: Option<Prefix>,
    reads: Option<u64>,
    pages: Vec<u32>,
    active: Vec<u32>,
    state: Option<u32>,
}

impl Holdings {
    pub(crate) fn path(&self) -> Option<&Prefix> {
        self.path.as_ref()
    }

    fn depth(&self) -> usize {
        self.path.as_ref().map_or(0, Prefix::depth)
    }
}

/// A running request or a lease: the latter never has tokens or pages of its own.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) namespace: Namespace,
    pub(crate) resets: u64,
    pub(crate) holdings: Holdings,
    pub(crate) tokens: Vec<u32>,
    pub(crate) claimed: usize,
    pub(crate) reused: usize,
    loaded: bool,
    no_store: bool,
    /// Of the state it started from.
    encodings: u32,
    /// The depths that its slots were said to hold, all of them.
    said: Vec<(u32, usize)>,
}

impl Holder {
    pub(crate) fn slots(&self) -> &[u32] {
        &self.holdings.active
    }

    pub(crate) fn depth(&self) -> usize {
        self.holdings.depth()
    }

    pub(crate) fn written(&self) -> usize {
        self.tokens.len().min(self.claimed)
    }
}

/// A reserved checkpoint slot.
#[derive(Debug, Clone)]
pub(crate) struct Reserved {
    pub(crate) owner: u64,
    pub(crate) tokens: Vec<u32>,
    slot: u32,
}

/// What a lookup finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) length: usize,
    pub(crate) kv_length: usize,
    pub(crate) branch: Option<usize>,
    pub(crate) reason: Reason,
    pub(crate) encodings: u32,
    /// The checkpoint meant: its slot and serial.
    pub(crate) state: Option<(u32, u64)>,
    pub(crate) resets: u64,
}

/// What a commit does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Published {
    Stored {
        depth: usize,
        step: Option<u64>,
        ticket: Option<u64>,
        encodings: u32,
        replaced: Range<usize>,
    },
    Skipped(Skip),
}

/// Slots that the real cache handed out for the operation being modelled.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fresh {
    pub(crate) pages: Vec<u32>,
    pub(crate) active: Vec<u32>,
}

pub(crate) struct Naive {
    config: Config,
    who: Who,
    page: usize,
    pub(crate) legal: usize,
    pub(crate) resets: u64,
    clock: u64,
    pages: BTreeMap<Prefix, Page>,
    /// What each store published, and from which depth on its pages were new.
    stores: BTreeMap<u64, (Prefix, usize)>,
    pub(crate) states: BTreeMap<Prefix, State>,
    withdrawn: BTreeMap<u64, u32>,
    writing: Vec<Writing>,
    pub(crate) holders: BTreeMap<u64, Holder>,
    pub(crate) reserved: BTreeMap<u64, Reserved>,
    retiring: VecDeque<(u64, Holdings)>,
    pub(crate) newest: u64,
    pub(crate) outstanding: BTreeSet<u64>,
    /// Calls of `extend`, each of which names its pages.
    extends: u64,
    /// Tickets of states that are not yet known to be finite, and their serials.
    pub(crate) proofs: BTreeMap<u64, u64>,
    pub(crate) outbox: Vec<u32>,
    pub(crate) stats: Stats,
}

impl Naive {
    pub(crate) fn new(config: Config, who: Who) -> Self {
        let (page, stride) = (config.page_size as usize, config.checkpoint_stride as usize);
        let legal = (1..)
            .map(|n| n * page)
            .find(|depth| depth.is_multiple_of(stride))
            .expect("an lcm exists");
        Self {
            config,
            who,
            page,
            legal,
            resets: 0,
            clock: 0,
            pages: BTreeMap::new(),
            stores: BTreeMap::new(),
            states: BTreeMap::new(),
            withdrawn: BTreeMap::new(),
            writing: Vec::new(),
            holders: BTreeMap::new(),
            reserved: BTreeMap::new(),
            retiring: VecDeque::new(),
            newest: 0,
            outstanding: BTreeSet::new(),
            extends: 0,
            proofs: BTreeMap::new(),
            outbox: Vec::new(),
            stats: Stats::default(),
        }
    }

    pub(crate) fn legal_depth(&self, n: usize) -> usize {
        n / self.legal * self.legal
    }

    pub(crate) fn has_kv(&self) -> bool {
        self.config.kv.capacity > 0
    }

    fn pages_for(&self, tokens: usize) -> usize {
        if self.has_kv() {
            tokens.div_ceil(self.page)
        } else {
            0
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Everything that keeps a path of the tree.
    fn paths(&self) -> impl Iterator<Item = &Prefix> {
        let held = self
            .holders
            .values()
            .filter_map(|holder| holder.holdings.path.as_ref());
        let retiring = self
            .retiring
            .iter()
            .filter_map(|(_, holdings)| holdings.path.as_ref());
        held.chain(retiring)
            .chain(self.writing.iter().map(|writing| &writing.path))
    }

    fn is_pinned(&self, prefix: &Prefix) -> bool {
        self.paths().any(|path| path.starts_with(prefix))
    }

    /// Whether a page may not be shared yet: the store that brought it is not ready.
    fn is_unproven(&self, page: &Page) -> bool {
        self.writing
            .iter()
            .any(|writing| writing.serial == page.serial)
    }

    /// Whether a state is being loaded or written.
    fn is_busy(&self, serial: u64) -> bool {
        let held = self
            .holders
            .values()
            .filter_map(|holder| holder.holdings.reads);
        let retiring = self
            .retiring
            .iter()
            .filter_map(|(_, holdings)| holdings.reads);
        held.chain(retiring)
            .chain(self.writing.iter().map(|writing| writing.serial))
            .any(|busy| busy == serial)
    }

    /// Drops every page that no state and no pin needs, and every withdrawn state that nobody
    /// reads. Returns the pages.
    fn sweep(&mut self) -> usize {
        let needed = |prefix: &&Prefix| {
            self.is_pinned(prefix) || self.states.keys().any(|state| state.starts_with(prefix))
        };
        let (_, gone): (Vec<&Prefix>, Vec<&Prefix>) = self.pages.keys().partition(needed);
        let gone: Vec<Prefix> = gone.into_iter().cloned().collect();
        let idle: Vec<u64> = self
            .withdrawn
            .keys()
            .copied()
            .filter(|&serial| !self.is_busy(serial))
            .collect();
        idle.iter()
            .for_each(|serial| _ = self.withdrawn.remove(serial));
        for prefix in &gone {
            let Page { id, .. } = self.pages.remove(prefix).expect("it was listed above");
            if self.has_kv() && self.who != Who::Cache {
                self.outbox.push(id);
            }
        }
        if self.has_kv() { gone.len() } else { 0 }
    }

    /// Takes a state away, with the pages that nothing else keeps.
    fn drop_state(&mut self, prefix: &Prefix) -> Freed {
        let state = self
            .states
            .remove(prefix)
            .expect("the caller saw a state here");
        let busy = self.is_busy(state.serial);
        if busy {
            self.withdrawn.insert(state.serial, state.slot);
        }
        Freed {
            kv: self.sweep(),
            checkpoints: usize::from(!busy),
        }
    }

    /// The idle state with the lowest stamp among those that `may` go.
    fn victim(&self, may: impl Fn(&Prefix) -> bool) -> Option<Prefix> {
        let idle = self
            .states
            .iter()
            .filter(|(prefix, state)| !self.is_busy(state.serial) && may(prefix));
        idle.min_by_key(|(_, state)| state.stamp)
            .map(|(prefix, _)| prefix.clone())
    }

    fn evict_states(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.checkpoints < n {
            let Some(victim) = self.victim(|_| true) else {
                break;
            };
            freed += self.drop_state(&victim);
        }
        freed
    }

    fn evict_kv(&mut self, n: usize) -> Freed {
        let mut freed = Freed::default();
        while self.has_kv() && freed.kv < n {
            let goes_on = |prefix: &Prefix| {
                self.pages
                    .keys()
                    .any(|page| page != prefix && page.starts_with(prefix))
            };
            let Some(victim) = self.victim(|prefix| !self.is_pinned(prefix) && !goes_on(prefix))
            else {
                break;
            };
            freed += self.drop_state(&victim);
        }
        freed
    }
}
