//! The operations of requests and leases.

use std::collections::btree_map::Entry;

use radixstate::{
    Error, Freed, Misuse, Namespace, OutOfSlots, PoolKind, Reason, Shortage, Skip, StartOptions,
};

use super::{
    Found, Fresh, Holder, Holdings, Naive, Page, Prefix, Published, Reserved, State, Writing,
};

impl Naive {
    /// Serials from here on name calls of `extend`.
    pub(super) const EXTENDS: u64 = u64::MAX / 2;

    pub(crate) fn find(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        max_length: Option<usize>,
    ) -> Found {
        let limit = max_length.unwrap_or(usize::MAX).min(tokens.len() - 1);
        let found = self.find_within(namespace, tokens, limit);
        let most = max_length.map_or(usize::MAX, |max| max / self.page * self.page);
        Found {
            kv_length: found.kv_length.min(most),
            ..found
        }
    }

    /// What is cached of `tokens`, with a state no deeper than `limit`.
    pub(crate) fn find_within(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Found {
        let at = |depth: usize| Prefix::new(self.resets, namespace, &tokens[..depth]);
        let whole_pages = (1..=tokens.len() / self.page).map(|n| n * self.page);
        let kv_length = whole_pages
            .take_while(|&depth| self.pages.contains_key(&at(depth)))
            .last()
            .unwrap_or(0);
        let reach = kv_length.min(limit);
        let passed = || (1..=reach).filter_map(|depth| Some((depth, self.states.get(&at(depth))?)));
        let deepest = passed().rfind(|(_, state)| state.ready);
        let length = deepest.map_or(0, |(depth, _)| depth);
        let useful = self.legal_depth(reach);
        let reason = if length > 0 {
            Reason::Hit
        } else if passed().count() > 0 {
            Reason::NotReady
        } else if kv_length == 0 {
            Reason::NoPrefix
        } else if useful == 0 {
            Reason::Unaligned
        } else {
            Reason::NoState
        };
        let helps = useful > length && !self.states.contains_key(&at(useful));
        let encodings = deepest.map_or(0, |(_, state)| state.encodings);
        let state = deepest.map(|(_, state)| (state.slot, state.serial));
        Found {
            length,
            kv_length,
            branch: helps.then_some(useful),
            reason,
            encodings,
            state,
            resets: self.resets,
        }
    }

    /// `fresh` is what the real cache handed out; it counts for nothing when the model finds a
    /// shortage.
    pub(crate) fn start(
        &mut self,
        id: u64,
        namespace: &Namespace,
        tokens: &[u32],
        options: StartOptions,
        fresh: Fresh,
    ) -> Result<Found, Error> {
        let mut found = self.find(namespace, tokens, options.max_length);
        if options.no_read {
            let resets = self.resets;
            let reason = Reason::NoPrefix;
            found = Found {
                length: 0,
                kv_length: 0,
                branch: None,
                reason,
                encodings: 0,
                state: None,
                resets,
            };
        }
        if options.slots == 0 {
            let why = "a sequence has at least 1 active slot, got slots=0";
            return Err(Misuse::Config(why.into()).into());
        }
        let reserve = options.reserve.unwrap_or(tokens.len());
        let slots = options.slots;
        self.feasible(reserve.max(tokens.len()))?;
        self.feasible_slots(slots)?;
        self.shortfall(PoolKind::Active, slots)?;
        let claimed = reserve.max(found.length);
        let holder = Holder {
            namespace: namespace.clone(),
            resets: self.resets,
            holdings: self.read(namespace, tokens, &found),
            tokens: tokens.to_vec(),
            claimed,
            reused: found.length,
            loaded: false,
            no_store: options.no_store,
            encodings: found.encodings,
            said: Vec::new(),
        };
        self.holders.insert(id, holder);
        if let Err(short) = self.claim(
            id,
            self.pages_for(claimed) - self.pages_for(found.length),
            fresh.pages,
        ) {
            self.holders.remove(&id);
            return Err(short.into());
        }
        self.expect_unused(PoolKind::Active, &fresh.active);
        assert_eq!(fresh.active.len(), slots);
        self.holder_mut(id).holdings.active = fresh.active;
        self.stats.starts += 1;
        if !options.no_read {
            self.consume(&found);
        }
        Ok(found)
    }

    pub(crate) fn lease(
        &mut self,
        id: u64,
        namespace: &Namespace,
        tokens: &[u32],
        found: &Found,
    ) -> Result<(), Misuse> {
        if found.resets != self.resets {
            return Err(Misuse::Stale("the cache was reset after the lookup"));
        }
        if found
            .state
            .is_some_and(|(_, serial)| self.states.values().all(|state| state.serial != serial))
        {
            return Err(Misuse::Stale("its checkpoint was evicted after the lookup"));
        }
        let holder = Holder {
            namespace: namespace.clone(),
            resets: self.resets,
            holdings: self.read(namespace, tokens, found),
            tokens: Vec::new(),
            claimed: 0,
            reused: 0,
            loaded: false,
            no_store: false,
            encodings: found.encodings,
            said: Vec::new(),
        };
        self.holders.insert(id, holder);
        self.consume(found);
        Ok(())
    }

    /// The deepest ready state of `tokens` is as recent as if it had been used.
    pub(crate) fn touch(&mut self, namespace: &Namespace, tokens: &[u32]) -> usize {
        let found = self.find_within(namespace, tokens, tokens.len());
        if let Some((_, serial)) = found.state {
            let stamp = self.tick();
            let state = self.states.values_mut().find(|it| it.serial == serial);
            state.expect("what was found is cached").stamp = stamp;
        }
        found.length
    }

    pub(crate) fn fork_lease(&mut self, id: u64, new: u64) {
        let holder = &self.holders[&id];
        let forked = Holder {
            holdings: Holdings {
                path: holder.holdings.path.clone(),
                ..Holdings::default()
            },
            ..holder.clone()
        };
        self.holders.insert(new, forked);
    }

    /// The checkpoint slot that a lease still reads.
    pub(crate) fn lease_state(&self, id: u64) -> Option<u32> {
        let serial = self.holders[&id].holdings.reads?;
        let cached = self
            .states
            .values()
            .find(|state| state.serial == serial)
            .map(|state| state.slot);
        cached.or_else(|| self.withdrawn.get(&serial).copied())
    }

    pub(crate) fn lease_loaded(&mut self, id: u64) {
        let reads = self.holder_mut(id).holdings.reads.take();
        self.give_back(Holdings {
            reads,
            ..Holdings::default()
        });
    }

    pub(crate) fn loaded(&mut self, id: u64) -> Result<(), Misuse> {
        if std::mem::replace(&mut self.holder_mut(id).loaded, true) {
            return Err(Misuse::AlreadyLoaded);
        }
        self.lease_loaded(id);
        Ok(())
    }

    pub(crate) fn grow(&mut self, id: u64, n: usize, fresh: Vec<u32>) -> Result<(), Error> {
        let before = self.holders[&id].claimed;
        let claimed = before.saturating_add(n);
        self.feasible(claimed)?;
        self.claim(id, self.pages_for(claimed) - self.pages_for(before), fresh)?;
        self.holder_mut(id).claimed = claimed;
        Ok(())
    }

    pub(crate) fn append(&mut self, id: u64, tokens: &[u32]) -> Result<(), Misuse> {
        let holder = self.holder_mut(id);
        let (wanted, claimed) = (holder.tokens.len() + tokens.len(), holder.claimed);
        if wanted > claimed {
            return Err(Misuse::NotClaimed { wanted, claimed });
        }
        holder.tokens.extend_from_slice(tokens);
        Ok(())
    }

    pub(crate) fn shrink(&mut self, id: u64) {
        let written = self.holders[&id].written();
        let keep = self.pages_for(written) - self.pages_for(self.holders[&id].depth());
        let holder = self.holder_mut(id);
        holder.claimed = written;
        let pages = holder.holdings.pages.split_off(keep);
        self.give_back(Holdings {
            pages,
            ..Holdings::default()
        });
    }

    pub(crate) fn take_slot(&mut self, id: u64, fresh: Option<u32>) -> Result<(), Error> {
        self.feasible_slots(self.holders[&id].slots().len() + 1)?;
        self.shortfall(PoolKind::Active, 1)?;
        let slot = fresh.expect("an active slot is free");
        self.expect_unused(PoolKind::Active, &[slot]);
        self.holder_mut(id).holdings.active.push(slot);
        Ok(())
    }

    /// `first`: which of the holder's slots may go back, counted from the oldest.
    pub(crate) fn give_back_slot(
        &mut self,
        id: u64,
        slot: u32,
        first: usize,
    ) -> Result<(), Misuse> {
        let holder = self.holder_mut(id);
        match holder.slots().iter().position(|&it| it == slot) {
            None => return Err(Misuse::NotYourSlot { slot }),
            Some(at) if at < first => return Err(Misuse::RunningSlot { slot }),
            Some(_) => {}
        }
        holder.holdings.active.retain(|&it| it != slot);
        holder.said.retain(|&(it, _)| it != slot);
        self.give_back(Holdings {
            active: vec![slot],
            ..Holdings::default()
        });
        Ok(())
    }

    /// A caller says that the state in a slot is of `depth` tokens.
    pub(crate) fn reach(&mut self, id: u64, depth: usize, source: u32) {
        self.holder_mut(id).said.push((source, depth));
    }

    pub(crate) fn check_source(&self, id: u64, depth: usize, source: u32) -> Result<(), Misuse> {
        self.check_depth(depth)?;
        let holder = &self.holders[&id];
        let known = holder.slots().contains(&source);
        if depth > holder.written() {
            return Err(Misuse::DepthPastEnd {
                depth,
                end: holder.written(),
            });
        }
        if !known {
            return Err(Misuse::NotYourSlot { slot: source });
        }
        if !holder.loaded {
            return Err(Misuse::NotLoaded);
        }
        let said = holder.said.iter().filter(|(slot, _)| *slot == source);
        let deepest = said.map(|&(_, depth)| depth).max().unwrap_or(0);
        let reached = deepest.max(holder.reused);
        if depth < reached {
            return Err(Misuse::DepthPassed {
                depth,
                slot: source,
                reached,
            });
        }
        Ok(())
    }

    /// What a lease brings goes on from its prefix. One whose state is still to be loaded has
    /// nothing deeper.
    pub(crate) fn check_leased(
        &self,
        owner: u64,
        tokens: &[u32],
        legal: usize,
    ) -> Result<(), Misuse> {
        let depth = tokens.len();
        Self::on_grid(depth, legal)?;
        self.check_prefix(owner, tokens)?;
        let holder = &self.holders[&owner];
        if holder.holdings.reads.is_some() && depth > holder.depth() {
            return Err(Misuse::NotLoaded);
        }
        Ok(())
    }

    pub(crate) fn check_depth(&self, depth: usize) -> Result<(), Misuse> {
        Self::on_grid(depth, self.legal)
    }

    fn on_grid(depth: usize, legal: usize) -> Result<(), Misuse> {
        if depth.is_multiple_of(legal) {
            Ok(())
        } else {
            Err(Misuse::Unaligned { depth, legal })
        }
    }

    /// A lease may have moved down another path since `tokens` were reserved for it.
    pub(crate) fn check_prefix(&self, owner: u64, tokens: &[u32]) -> Result<(), Misuse> {
        let Some(path) = self.holders[&owner].holdings.path() else {
            return Ok(());
        };
        let agrees = path
            .tokens
            .iter()
            .zip(tokens)
            .all(|(leased, given)| leased == given);
        if agrees {
            Ok(())
        } else {
            Err(Misuse::PrefixMismatch {
                leased: path.depth(),
            })
        }
    }

    /// Reserves for a holder whose arguments were checked. `slot` is the real cache's choice,
    /// `None` if it skipped.
    pub(crate) fn reserve(
        &mut self,
        id: u64,
        owner: u64,
        tokens: &[u32],
        slot: Option<u32>,
    ) -> Result<(), Skip> {
        let holder = &self.holders[&owner];
        if holder.no_store {
            self.stats.skipped.no_store += 1;
            return Err(Skip::NoStore);
        }
        if tokens.is_empty() {
            self.stats.skipped.not_aligned += 1;
            return Err(Skip::NotAligned);
        }
        let prefix = self.current(owner, tokens)?;
        if self.states.contains_key(&prefix) {
            self.stats.duplicates += 1;
            return Err(Skip::Duplicate);
        }
        self.provable(owner, &prefix)?;
        match self.shortfall(PoolKind::Checkpoint, 1) {
            Err(short) => {
                self.stats.skipped.no_room += 1;
                return Err(Skip::NoRoom(short));
            }
            Ok(0) => {}
            Ok(missing) => {
                let freed = self.evict_states(missing);
                self.stats.evictions.for_checkpoint += freed;
            }
        }
        let slot = slot.expect("there is room");
        self.expect_unused(PoolKind::Checkpoint, &[slot]);
        self.reserved.insert(
            id,
            Reserved {
                owner,
                tokens: tokens.to_vec(),
                slot,
            },
        );
        Ok(())
    }

    /// Publishes a reservation. `given` are the engine's pages past the holder's depth, or none:
    /// then a sequence's own pages are published. `serial` is the real cache's name for the
    /// store. Also returns the duplicates that stay the engine's.
    pub(crate) fn publish(
        &mut self,
        id: u64,
        given: Option<&[u32]>,
        serial: Option<u64>,
        proven: bool,
    ) -> (Published, Vec<u32>) {
        let Reserved {
            owner,
            tokens,
            slot,
        } = self
            .reserved
            .remove(&id)
            .expect("the test names a live reservation");
        let prefix = self.current(owner, &tokens);
        let prefix = prefix.and_then(|prefix| {
            self.provable(owner, &prefix)?;
            Ok(prefix)
        });
        let prefix = match prefix {
            Ok(prefix) => prefix,
            Err(skip) => {
                self.give_back(Holdings {
                    state: Some(slot),
                    ..Holdings::default()
                });
                // An engine hears which pages were shared: of one that is still being written none.
                let skip = match skip {
                    Skip::Duplicate if given.is_some() => Skip::NotReady,
                    other => other,
                };
                return (Published::Skipped(skip), Vec::new());
            }
        };
        let leased = self.holders[&owner].depth();
        let pages = given.map_or_else(|| self.own_pages(owner, tokens.len()), <[u32]>::to_vec);
        let brought = self.pages_end(&prefix);
        let duplicates = self.place(&prefix, leased, &pages, serial);
        let replaced = if duplicates.is_empty() {
            0..0
        } else {
            leased..leased + duplicates.len() * self.page
        };
        let outcome = if self.states.contains_key(&prefix) {
            self.stats.duplicates += 1;
            self.give_back(Holdings {
                state: Some(slot),
                ..Holdings::default()
            });
            Published::Skipped(Skip::Duplicate)
        } else {
            let encodings = self.holders[&owner].encodings + 1;
            let serial = serial.expect("it was stored");
            self.stores.insert(serial, (prefix.clone(), brought));
            let ticket = self.store(&prefix, slot, serial, encodings, proven);
            Published::Stored {
                depth: tokens.len(),
                step: self.outstanding.last().copied(),
                ticket,
                encodings,
                replaced,
            }
        };
        if tokens.len() > leased {
            self.holder_mut(owner).holdings.path = Some(prefix);
        }
        if given.is_some() {
            return (outcome, duplicates);
        }
        self.give_back(Holdings {
            pages: duplicates,
            ..Holdings::default()
        });
        (outcome, Vec::new())
    }

    /// Places pages without a state; says how many of the given ones were there, or why not.
    pub(crate) fn extend(
        &mut self,
        owner: u64,
        tokens: &[u32],
        given: &[u32],
    ) -> Result<usize, Skip> {
        let holder = &self.holders[&owner];
        if !self.is_current(holder) {
            return Err(Skip::Reset);
        }
        let prefix = Prefix::new(self.resets, &holder.namespace, tokens);
        let leased = holder.depth();
        if self.has_unproven(&prefix, leased) {
            return Err(Skip::NotReady);
        }
        self.extends += 1;
        let serial = Self::EXTENDS + self.extends;
        let brought = self.pages_end(&prefix);
        let duplicates = self.place(&prefix, leased, given, Some(serial));
        let step = self.outstanding.last().copied();
        let ticket = step.max(self.proofs.keys().next_back().copied());
        if let Some(ticket) = ticket.filter(|_| self.has_kv() && brought < tokens.len()) {
            self.stores.insert(serial, (prefix.clone(), brought));
            self.writing.push(Writing {
                ticket,
                step,
                path: prefix.clone(),
                serial,
            });
        }
        if tokens.len() > leased {
            self.holder_mut(owner).holdings.path = Some(prefix);
        }
        Ok(duplicates.len())
    }

    pub(crate) fn evict(&mut self, pool: PoolKind, n: usize) -> Freed {
        let freed = match pool {
            PoolKind::Kv => self.evict_kv(n),
            PoolKind::Active => Freed::default(),
            PoolKind::Checkpoint => self.evict_states(n),
        };
        self.stats.evictions.asked += freed;
        freed
    }

    fn holder_mut(&mut self, id: u64) -> &mut Holder {
        self.holders
            .get_mut(&id)
            .expect("the test names a live holder")
    }

    /// Pins on what was found.
    fn read(&self, namespace: &Namespace, tokens: &[u32], found: &Found) -> Holdings {
        let path = (found.length > 0)
            .then(|| Prefix::new(self.resets, namespace, &tokens[..found.length]));
        Holdings {
            path,
            reads: found.state.map(|(_, serial)| serial),
            ..Holdings::default()
        }
    }

    /// Counts a use, and makes the consumed checkpoint, and no other, the most recent.
    fn consume(&mut self, found: &Found) {
        let stats = &mut self.stats;
        match found.reason {
            Reason::Hit => stats.hits += 1,
            Reason::NoPrefix => stats.misses.no_prefix += 1,
            Reason::NoState => stats.misses.no_state += 1,
            Reason::Unaligned => stats.misses.unaligned += 1,
            Reason::NotReady => stats.misses.not_ready += 1,
        }
        stats.hit_tokens += found.length as u64;
        stats.kv_matched_tokens += found.kv_length as u64;
        let stamp = self.tick();
        if let Some((_, serial)) = found.state {
            let state = self
                .states
                .values_mut()
                .find(|state| state.serial == serial);
            state.expect("what was found is cached").stamp = stamp;
        }
    }

    fn feasible(&self, tokens: usize) -> Result<(), Shortage> {
        let (wanted, capacity) = (self.pages_for(tokens), self.config.kv.capacity as usize);
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Kv,
                wanted,
                capacity,
            });
        }
        Ok(())
    }

    fn feasible_slots(&self, wanted: usize) -> Result<(), Shortage> {
        let capacity = self.config.active.capacity as usize;
        if wanted > capacity {
            return Err(Shortage::NeverFits {
                pool: PoolKind::Active,
                wanted,
                capacity,
            });
        }
        Ok(())
    }

    fn claim(&mut self, id: u64, wanted: usize, fresh: Vec<u32>) -> Result<(), OutOfSlots> {
        let missing = self.shortfall(PoolKind::Kv, wanted)?;
        if missing > 0 {
            let freed = self.evict_kv(missing);
            self.stats.evictions.for_kv += freed;
        }
        assert_eq!(fresh.len(), wanted, "exactly the pages asked for");
        self.expect_unused(PoolKind::Kv, &fresh);
        self.holder_mut(id).holdings.pages.extend(fresh);
        Ok(())
    }

    /// A holder from before a reset, or of a prefix that turned out invalid, brings nothing.
    fn is_current(&self, holder: &Holder) -> bool {
        let path = holder.holdings.path();
        holder.resets == self.resets && path.is_none_or(|path| path.refused.is_empty())
    }

    fn has_unproven(&self, prefix: &Prefix, leased: usize) -> bool {
        let mut pages = self.pages.iter().filter(|_| self.has_kv());
        pages.any(|(path, page)| {
            path.depth() > leased && prefix.starts_with(path) && self.is_unproven(page)
        })
    }

    fn current(&mut self, owner: u64, tokens: &[u32]) -> Result<Prefix, Skip> {
        let holder = &self.holders[&owner];
        if !self.is_current(holder) {
            self.stats.skipped.reset += 1;
            return Err(Skip::Reset);
        }
        Ok(Prefix::new(self.resets, &holder.namespace, tokens))
    }

    /// Refuses a store that would get pages which another request is still writing.
    fn provable(&mut self, owner: u64, prefix: &Prefix) -> Result<(), Skip> {
        let leased = self.holders[&owner].depth();
        if !self.has_unproven(prefix, leased) {
            return Ok(());
        }
        if self.states.contains_key(prefix) {
            self.stats.duplicates += 1;
            return Err(Skip::Duplicate);
        }
        self.stats.skipped.not_ready += 1;
        Err(Skip::NotReady)
    }

    /// A sequence's own pages up to `depth`, which leave it.
    fn own_pages(&mut self, owner: u64, depth: usize) -> Vec<u32> {
        let count = depth.saturating_sub(self.holders[&owner].depth()) / self.page;
        let pages = &mut self.holder_mut(owner).holdings.pages;
        pages.drain(..count.min(pages.len())).collect()
    }

    /// Up to which depth the pages of `prefix` are cached.
    fn pages_end(&self, prefix: &Prefix) -> usize {
        self.pages
            .keys()
            .filter(|page| prefix.starts_with(page))
            .map(Prefix::depth)
            .max()
            .unwrap_or(0)
    }

    /// Caches every page of `prefix`; those past `leased` come from `pages`, with the store
    /// `serial`. Returns the ones cached already.
    fn place(
        &mut self,
        prefix: &Prefix,
        leased: usize,
        pages: &[u32],
        serial: Option<u64>,
    ) -> Vec<u32> {
        let mut duplicates = Vec::new();
        for (n, depth) in (leased + self.page..=prefix.depth())
            .step_by(self.page)
            .enumerate()
        {
            let page = Prefix::new(prefix.resets, &prefix.namespace, &prefix.tokens[..depth]);
            let id = pages.get(n).copied();
            match self.pages.entry(page) {
                Entry::Occupied(_) => duplicates.extend(id),
                Entry::Vacant(vacant) => {
                    let serial = serial.expect("what brings pages is stored");
                    vacant.insert(Page {
                        id: id.unwrap_or(0),
                        serial,
                    });
                }
            }
        }
        duplicates
    }

    /// Returns the ticket of the proof, if there is one to come.
    fn store(
        &mut self,
        prefix: &Prefix,
        slot: u32,
        serial: u64,
        encodings: u32,
        proven: bool,
    ) -> Option<u64> {
        let stamp = self.tick();
        let proof = (!proven).then(|| {
            self.newest += 1;
            self.proofs.insert(self.newest, serial);
            self.newest
        });
        let step = self.outstanding.last().copied();
        let ticket = step.max(self.proofs.keys().next_back().copied());
        let state = State {
            slot,
            serial,
            stamp,
            ready: ticket.is_none(),
            encodings,
        };
        self.states.insert(prefix.clone(), state);
        if let Some(ticket) = ticket {
            self.writing.push(Writing {
                ticket,
                step,
                path: prefix.clone(),
                serial,
            });
        }
        self.stats.stored += 1;
        proof
    }
}
