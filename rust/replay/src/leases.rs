//! An engine with allocators of its own, which uses only the lower layer of the cache. Its device
//! demands on every read the content that belongs to the prefix.

use std::collections::VecDeque;

use radixstate::{Cache, Commit, Config, Lease, Match, Misuse, PoolKind, Published, Reservation};

use crate::device::{Device, Run, Work};
use crate::scheduler::{End, Engine, Running, Seen, Waiting};

/// What the engine keeps for a running request.
pub struct Held {
    lease: Lease,
    slot: u32,
    track: Option<u32>,
    /// The page table: cached pages up to the lease's depth, then pages of the engine.
    pages: Vec<u32>,
    /// Where the state of the depth to be stored is, once it is enqueued.
    source: u32,
}

/// Rows that the engine gave up while steps were out; free once all of those have retired.
struct Deferred {
    newest: u64,
    pages: Vec<u32>,
    slots: Vec<u32>,
}

/// Requests as leases, on pages and slots of the engine's.
pub struct Leases {
    cache: Cache,
    device: Device,
    page: usize,
    free_pages: Vec<u32>,
    free_slots: Vec<u32>,
    /// The newest step begun.
    newest: u64,
    /// Work of the steps that the device has not run; the last is being filled.
    queue: VecDeque<Vec<Work>>,
    deferred: Vec<Deferred>,
}

impl Leases {
    /// An empty cache of external pools.
    ///
    /// # Panics
    ///
    /// The configuration is refused.
    pub fn new(config: Config) -> Self {
        let (kv, active) = (config.kv.capacity, config.active.capacity);
        let page = config.page_size as usize;
        Self {
            device: Device::new(page, kv, active, config.checkpoints.capacity),
            cache: Cache::new(config).expect("a usable configuration"),
            page,
            free_pages: (1..=kv).collect(),
            free_slots: (1..=active).collect(),
            newest: 0,
            queue: VecDeque::new(),
            deferred: Vec::new(),
        }
    }

    /// Empties the cache after everything has ended, and demands every page and slot.
    ///
    /// # Panics
    ///
    /// Some are missing.
    pub fn demand_all(&mut self) {
        self.cache.evict(PoolKind::Kv, usize::MAX);
        self.collect_freed();
        self.recount();
        self.free_pages.sort_unstable();
        self.free_slots.sort_unstable();
        let (pages, slots) = (self.device.kv.len() as u32, self.device.active.len() as u32);
        assert!(
            self.free_pages.iter().copied().eq(1..pages),
            "{:?}",
            self.free_pages
        );
        assert!(
            self.free_slots.iter().copied().eq(1..slots),
            "{:?}",
            self.free_slots
        );
        let checkpoints = self.cache.usage(PoolKind::Checkpoint);
        assert_eq!(checkpoints.free, checkpoints.capacity);
    }

    fn enqueue(&mut self, work: Work) {
        self.queue
            .back_mut()
            .expect("work is enqueued while a step is filled")
            .push(work);
    }

    fn lease(&mut self, waiting: &Waiting, seen: &mut Seen) -> (Lease, Match) {
        if let Some(matched) = &waiting.looked {
            match self.cache.lease(matched) {
                Ok(lease) => return (lease, matched.clone()),
                Err(Misuse::Stale(_)) => seen.stale += 1,
                Err(other) => panic!("{other}"),
            }
        }
        let Waiting {
            namespace, tokens, ..
        } = waiting;
        let matched = self
            .cache
            .lookup(namespace, tokens, None)
            .expect("no prompt is empty");
        let lease = self
            .cache
            .lease(&matched)
            .expect("nothing happened since the lookup");
        (lease, matched)
    }

    fn collect_freed(&mut self) {
        let freed = self.cache.take_freed(PoolKind::Kv);
        self.free(freed, Vec::new());
    }

    fn defer(&mut self, pages: Vec<u32>, slots: Vec<u32>) {
        self.deferred.push(Deferred {
            newest: self.newest,
            pages,
            slots,
        });
    }

    fn free(&mut self, pages: Vec<u32>, slots: Vec<u32>) {
        pages
            .iter()
            .for_each(|&page| self.device.kv[page as usize] = None);
        slots
            .iter()
            .for_each(|&slot| self.device.active[slot as usize] = None);
        self.free_pages.extend(pages);
        self.free_slots.extend(slots);
    }
}

impl Engine for Leases {
    type Held = Held;

    fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }

    fn begin(&mut self, step: u64) {
        self.newest = step;
        self.queue.push_back(Vec::new());
    }

    fn start(
        &mut self,
        waiting: &Waiting,
        _: Option<usize>,
        seen: &mut Seen,
    ) -> Result<(Held, Match), PoolKind> {
        let slot = self.free_slots.pop().ok_or(PoolKind::Active)?;
        let (lease, matched) = self.lease(waiting, seen);
        let pages = self.cache.lease_pages(&lease).expect("it is ours");
        let state = self.cache.lease_state(&lease).expect("it is ours");
        let prefix = waiting.tokens[..matched.length].to_vec();
        self.enqueue(match state {
            Some(src) => Work::Load {
                src,
                dst: slot,
                prefix,
            },
            None => Work::Clear { slot },
        });
        self.cache.lease_loaded(&lease).expect("it is ours");
        let held = Held {
            lease,
            slot,
            track: None,
            pages,
            source: slot,
        };
        Ok((held, matched))
    }

    fn free_pages(&mut self) -> usize {
        self.free_pages.len() + self.cache.usage(PoolKind::Kv).evictable
    }

    /// Asks the cache for what is missing before it gives up.
    fn claim(&mut self, held: &mut Held, positions: usize) -> Result<(), PoolKind> {
        let n = positions
            .div_ceil(self.page)
            .saturating_sub(held.pages.len());
        if n > self.free_pages.len() {
            self.cache.evict(PoolKind::Kv, n - self.free_pages.len());
            self.collect_freed();
        }
        let rest = self.free_pages.len().checked_sub(n).ok_or(PoolKind::Kv)?;
        held.pages.extend(self.free_pages.split_off(rest));
        Ok(())
    }

    fn accept(&mut self, _: &mut Held, _: &[u32]) {}

    fn track(&mut self, held: &mut Held) -> Result<(), PoolKind> {
        if held.track.is_none() {
            held.track = Some(self.free_slots.pop().ok_or(PoolKind::Active)?);
        }
        Ok(())
    }

    fn run(&mut self, request: &mut Running<Held>, to: usize, legal: usize) -> bool {
        let Running {
            tokens,
            computed,
            held,
            ..
        } = request;
        let track = held.track.filter(|_| *computed < legal && legal < to);
        held.source = track.unwrap_or(held.slot);
        let run = Run {
            slot: held.slot,
            pages: held.pages.clone(),
            tokens: tokens[..to].to_vec(),
            from: *computed,
            track: track.map(|track| (track, legal)),
        };
        self.enqueue(Work::Run(run));
        legal == to || track.is_some()
    }

    fn checkpoint(
        &mut self,
        request: &mut Running<Held>,
        depth: usize,
        keep: bool,
        seen: &mut Seen,
    ) -> Option<Commit> {
        let Running { tokens, held, .. } = request;
        let prefix = tokens[..depth].to_vec();
        let pending = match self
            .cache
            .reserve(&held.lease, &prefix)
            .expect("a legal depth")
        {
            Reservation::Skipped(skip) => return Some(Commit::Skipped(skip)),
            Reservation::Pending(pending) => pending,
        };
        let dst = pending.slot();
        self.device.checkpoints[dst as usize] = None;
        if !keep {
            return None;
        }
        self.enqueue(Work::Encode {
            src: held.source,
            dst,
            prefix: prefix.clone(),
        });
        let leased = self.cache.lease_depth(&held.lease).expect("it is ours");
        let table = leased / self.page..depth.max(leased) / self.page;
        let given = held.pages[table.clone()].to_vec();
        let published = self.cache.publish(&held.lease, &prefix, &given, pending);
        let Published {
            outcome,
            canonical,
            duplicates,
        } = published.expect("reserved just now");
        held.pages.splice(table, canonical);
        seen.duplicates += duplicates.len() as u64;
        self.defer(duplicates, Vec::new());
        Some(outcome)
    }

    fn end(&mut self, held: Held, end: End) {
        let leased = self.cache.lease_depth(&held.lease).expect("it is ours");
        let own = held.pages[leased / self.page..].to_vec();
        self.defer(own, held.track.into_iter().chain([held.slot]).collect());
        match end {
            End::Finish | End::Abort => self.cache.release(held.lease).expect("it is ours"),
            End::Drop => drop(held.lease),
        }
    }

    fn execute(&mut self) {
        let step = self.queue.pop_front().expect("it was launched");
        step.iter().for_each(|work| self.device.execute(work));
    }

    fn retired(&mut self, oldest: Option<u64>) {
        let is_free =
            |deferred: &mut Deferred| oldest.is_none_or(|oldest| deferred.newest < oldest);
        let free: Vec<Deferred> = self.deferred.extract_if(.., is_free).collect();
        free.into_iter()
            .for_each(|Deferred { pages, slots, .. }| self.free(pages, slots));
    }

    /// No page is both free here and owned by the cache, either.
    fn recount(&mut self) {
        self.cache
            .check(Some(&self.free_pages))
            .unwrap_or_else(|report| panic!("{report}"));
    }
}
