//! An engine with allocators of its own, which uses only the lower layer of the cache. Its device
//! demands on every read the content that belongs to the prefix.

use std::collections::VecDeque;
use std::ops::Range;

use radixstate::{
    Cache, Commit, Config, Extended, Lease, Match, Misuse, Pending, PoolKind, Published,
    Reservation, Skip,
};

use crate::device::{Device, Run, Work};
use crate::owner::{Sharing, Who};
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
pub struct Leases<O> {
    cache: Cache<O>,
    device: Device,
    page: usize,
    /// The engine's page under each id of the cache: another only where those are numbers.
    pages: Vec<u32>,
    free_pages: Vec<u32>,
    free_slots: Vec<u32>,
    /// The newest step begun.
    newest: u64,
    /// Work of the steps that the device has not run; the last is being filled.
    queue: VecDeque<Vec<Work>>,
    deferred: Vec<Deferred>,
    checkpoints: u64,
}

impl<O: Sharing> Leases<O> {
    /// An empty cache.
    ///
    /// # Panics
    ///
    /// The configuration is refused.
    pub fn new(config: Config) -> Self {
        let (kv, active) = (config.kv.capacity, config.active.capacity);
        let page = config.page_size as usize;
        Self {
            device: Device::new(page, kv, active, config.checkpoints.capacity),
            cache: Cache::new(O::config(config)).expect("a usable configuration"),
            page,
            pages: (0..=kv).collect(),
            free_pages: (1..=kv).collect(),
            free_slots: (1..=active).collect(),
            newest: 0,
            queue: VecDeque::new(),
            deferred: Vec::new(),
            checkpoints: 0,
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

    /// Where in the page table the pages past the lease are, up to `depth`.
    fn table(&self, held: &Held, depth: usize) -> Range<usize> {
        let leased = self.cache.lease_depth(&held.lease).expect("it is ours");
        leased / self.page..depth.max(leased) / self.page
    }

    fn mapped(&self, ids: &[u32]) -> Vec<u32> {
        ids.iter().map(|&id| self.pages[id as usize]).collect()
    }

    /// Shares what the request has computed, perhaps with its state; says why not.
    fn share(
        &mut self,
        held: &mut Held,
        prefix: &[u32],
        state: Option<(Pending, &mut Option<Commit>)>,
        seen: &mut Seen,
    ) -> Option<Skip> {
        let before = self.cache.lease_depth(&held.lease).expect("it is ours");
        let table = self.table(held, prefix.len());
        let given = held.pages[table.clone()].to_vec();
        let (cache, lease) = (&mut self.cache, &held.lease);
        let (skipped, replaced) = match state {
            None => {
                let Extended { skipped, replaced } =
                    O::extend(cache, lease, prefix, &given).expect("it is computed");
                (skipped, replaced)
            }
            Some((pending, outcome)) => {
                let Published {
                    outcome: published,
                    replaced,
                } = O::publish(cache, lease, prefix, &given, pending).expect("reserved just now");
                let skipped = match &published {
                    Commit::Stored(_) | Commit::Skipped(Skip::Duplicate) => None,
                    Commit::Skipped(skip) => Some(*skip),
                };
                *outcome = Some(published);
                (skipped, replaced)
            }
        };
        // A duplicate among unproven pages takes nothing: then the lease has not moved.
        let now = cache.lease_depth(lease).expect("it is ours");
        if skipped.is_none() && now > before {
            let ids = cache.lease_pages(lease, before).expect("whole pages");
            let known = replaced.len() / self.page;
            for (&id, &page) in ids.iter().zip(&given).skip(known) {
                self.pages[id as usize] = page;
            }
            held.pages.splice(table, self.mapped(&ids));
            seen.duplicates += known as u64;
            self.defer(given[..known].to_vec(), Vec::new());
        }
        skipped
    }

    fn collect_freed(&mut self) {
        let freed = self.cache.take_freed();
        self.free(self.mapped(&freed), Vec::new());
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

impl<O: Sharing> Engine for Leases<O> {
    type Held = Held;
    type Pages = O;

    fn cache(&mut self) -> &mut Cache<O> {
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
        let pages = self.cache.lease_pages(&lease, 0).expect("it is ours");
        let pages = self.mapped(&pages);
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
        // Every other time pages and state go separately.
        self.checkpoints += 1;
        let apart = keep && self.checkpoints.is_multiple_of(2);
        if apart && let Some(skip) = self.share(held, &prefix, None, seen) {
            return Some(Commit::Skipped(skip));
        }
        let given = held.pages[self.table(held, depth)].to_vec();
        let reserved = O::reserve(&mut self.cache, &held.lease, &prefix, &given);
        let pending = match reserved.expect("a legal depth") {
            Reservation::Skipped(Skip::Duplicate) => {
                self.share(held, &prefix, None, seen);
                return Some(Commit::Skipped(Skip::Duplicate));
            }
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
        if apart {
            let attached = self.cache.attach(&held.lease, &prefix, pending);
            return Some(attached.expect("reserved just now"));
        }
        let mut outcome = None;
        self.share(held, &prefix, Some((pending, &mut outcome)), seen);
        outcome
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
        let named = O::WHO == Who::Engine;
        let free = named.then_some(self.free_pages.as_slice());
        self.cache
            .check(free)
            .unwrap_or_else(|report| panic!("{report}"));
    }
}
