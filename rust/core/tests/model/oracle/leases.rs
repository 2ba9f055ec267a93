//! The operations of leases.

use radixstate::{Misuse, Namespace, Skip};

use super::{Found, Holder, Holdings, Naive, Prefix, Writing};

impl Naive {
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
}
