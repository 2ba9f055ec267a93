//! Where every slot is, counted from the owners.

use radixstate::{OutOfSlots, PoolConfig, PoolKind, Usage};
use radixstate_replay::Who;

use super::Naive;

impl Naive {
    pub(crate) fn usage(&self, pool: PoolKind) -> Usage {
        match pool {
            PoolKind::Kv => self.kv_usage(),
            PoolKind::Active => self.active_usage(),
            PoolKind::Checkpoint => self.checkpoint_usage(),
        }
    }

    pub(crate) fn cached_pages(&self) -> impl Iterator<Item = u32> {
        let real = self.has_kv();
        self.pages
            .values()
            .map(|page| page.id)
            .filter(move |_| real)
    }

    /// The pages of a sequence as its kernels see them: the cached ones of its path, then its own.
    pub(crate) fn pages_of(&self, holder: u64) -> Vec<u32> {
        let holdings = &self.holders[&holder].holdings;
        let mut pages = self.path_pages(holder);
        pages.extend(&holdings.pages);
        pages
    }

    pub(crate) fn path_pages(&self, holder: u64) -> Vec<u32> {
        let Some(path) = self.holders[&holder]
            .holdings
            .path
            .as_ref()
            .filter(|_| self.has_kv())
        else {
            return Vec::new();
        };
        self.pages
            .iter()
            .filter(|(prefix, _)| path.starts_with(prefix))
            .map(|(_, page)| page.id)
            .collect()
    }

    /// Panics unless `ids` are rows of the pool that nobody owns.
    pub(super) fn expect_unused(&self, pool: PoolKind, ids: &[u32]) {
        let holdings = || {
            self.holders
                .values()
                .map(|h| &h.holdings)
                .chain(self.retiring.iter().map(|(_, h)| h))
        };
        let (capacity, used): (u32, Vec<u32>) = match pool {
            PoolKind::Kv => {
                let owned = holdings().flat_map(|h| h.pages.iter().copied());
                (
                    self.config.kv.capacity,
                    owned
                        .chain(self.cached_pages())
                        .chain(self.outbox.iter().copied())
                        .collect(),
                )
            }
            PoolKind::Active => (
                self.config.active.capacity,
                holdings().flat_map(|h| h.active.clone()).collect(),
            ),
            PoolKind::Checkpoint => {
                let reserved = self.reserved.values().map(|reserved| reserved.slot);
                let cached = self
                    .states
                    .values()
                    .map(|state| state.slot)
                    .chain(self.withdrawn.values().copied());
                let retiring = self.retiring.iter().filter_map(|(_, h)| h.state);
                (
                    self.config.checkpoints.capacity,
                    reserved.chain(cached).chain(retiring).collect(),
                )
            }
        };
        for id in ids {
            assert!(
                (1..=capacity).contains(id),
                "{pool} slot {id} is outside 1..={capacity}"
            );
            assert!(!used.contains(id), "{pool} slot {id} was handed out twice");
        }
    }

    pub(super) fn shortfall(&self, pool: PoolKind, wanted: usize) -> Result<usize, OutOfSlots> {
        let Usage {
            free,
            evictable,
            retiring,
            ..
        } = self.usage(pool);
        let missing = wanted.saturating_sub(free);
        if missing > evictable {
            Err(OutOfSlots {
                pool,
                wanted,
                free,
                evictable,
                retiring,
            })
        } else {
            Ok(missing)
        }
    }

    fn kv_usage(&self) -> Usage {
        let cached: Vec<_> = self.pages.keys().filter(|_| self.has_kv()).collect();
        let pinned = cached
            .iter()
            .filter(|prefix| self.is_pinned(prefix))
            .count();
        let counted = Usage {
            held: self
                .holders
                .values()
                .map(|holder| holder.holdings.pages.len())
                .sum(),
            evictable: cached.len() - pinned,
            pinned,
            retiring: self
                .retiring
                .iter()
                .map(|(_, holdings)| holdings.pages.len())
                .sum(),
            outbox: self.outbox.len(),
            ..Usage::default()
        };
        with_free(counted, self.config.kv, self.who == Who::Engine)
    }

    fn active_usage(&self) -> Usage {
        let counted = Usage {
            held: self
                .holders
                .values()
                .map(|holder| holder.holdings.active.len())
                .sum(),
            retiring: self
                .retiring
                .iter()
                .map(|(_, holdings)| holdings.active.len())
                .sum(),
            ..Usage::default()
        };
        with_free(counted, self.config.active, false)
    }

    fn checkpoint_usage(&self) -> Usage {
        let busy = self
            .states
            .values()
            .filter(|state| self.is_busy(state.serial))
            .count();
        let counted = Usage {
            held: self.reserved.len(),
            evictable: self.states.len() - busy,
            pinned: busy + self.withdrawn.len(),
            retiring: self
                .retiring
                .iter()
                .filter(|(_, holdings)| holdings.state.is_some())
                .count(),
            ..Usage::default()
        };
        with_free(counted, self.config.checkpoints, false)
    }
}

/// Whatever has no owner is free, unless the engine keeps that list.
fn with_free(counted: Usage, config: PoolConfig, engine: bool) -> Usage {
    let Usage {
        held,
        evictable,
        pinned,
        retiring,
        outbox,
        ..
    } = counted;
    let capacity = config.capacity as usize;
    let free = if engine {
        0
    } else {
        capacity - held - evictable - pinned - retiring - outbox
    };
    Usage {
        capacity,
        free,
        ..counted
    }
}
