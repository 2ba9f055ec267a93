//! What every cache can do, whoever owns its pages: converts, calls the core, maps the error.

use pyo3::prelude::*;
use radixstate::{Outcome, PoolKind};

use crate::counters::{Freed, Stats, Usage};
use crate::errors::{Class, Failure, Result};
use crate::gate::{Core, Gate, each};
use crate::handles::{LeaseHandle, PendingHandle, Step, StepName};
use crate::number::Number;
use crate::page_table::PageTable;
use crate::request::{Each, Namespace, PoolName, namespace_or_default};
use crate::results::{Match, Skipped, Stored};
use crate::tokens::{Pages, Tokens};

/// What caches of every kind can do. They decide in slot numbers and move nothing.
#[pyclass(frozen, subclass, module = "radixstate._native")]
pub(crate) struct CacheBase(pub(crate) Gate);

fn stored_of(list: &Each<'_, Stored>) -> Vec<radixstate::Stored> {
    let each = list.0.iter().map(|stored| stored.get().0.clone());
    each.collect()
}

#[pymethods]
impl CacheBase {
    /// The deepest depth, at most `tokens`, at which a checkpoint may stand: a multiple of
    /// lcm(page_size, checkpoint_stride), counted from zero.
    fn legal_depth(&self, tokens: Number<usize>) -> Result<usize> {
        let tokens = tokens.named("tokens")?;
        self.0
            .ask(|core| each!(core, cache => cache.legal_depth(tokens)))
    }

    /// How much of a prompt can be reused, at most `max_length` tokens. Changes nothing that
    /// eviction looks at.
    #[pyo3(signature = (tokens, namespace=None, *, max_length=None))]
    fn lookup(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
        max_length: Option<Number<usize>>,
    ) -> Result<Match> {
        let namespace = namespace_or_default(namespace);
        let max_length = max_length
            .map(|length| length.named("max_length"))
            .transpose()?;
        self.0
            .call_with(
                py,
                &tokens,
                |core, tokens| each!(core, cache => cache.lookup(&namespace, tokens, max_length)),
            )
            .map(Match)
    }

    /// How much of `tokens` is cached, the whole of them included: for what is no prompt.
    ///
    /// Raises EmptyPromptError.
    #[pyo3(signature = (tokens, namespace=None))]
    fn lookup_whole(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
    ) -> Result<Match> {
        let namespace = namespace_or_default(namespace);
        let matched = self.0.call_with(
            py,
            &tokens,
            |core, tokens| each!(core, cache => cache.lookup_whole(&namespace, tokens)),
        )?;
        Ok(Match(matched))
    }

    /// Makes the deepest checkpoint on the path of `tokens` as recent as if a request had continued
    /// it. Returns its depth, 0 for none.
    #[pyo3(signature = (tokens, namespace=None))]
    fn touch(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
    ) -> Result<usize> {
        let namespace = namespace_or_default(namespace);
        self.0.ask_with(
            py,
            &tokens,
            |core, tokens| each!(core, cache => cache.touch(&namespace, tokens)),
        )
    }

    /// Ends a reservation whose encoded state turned out not to be finite: its slot goes back, and
    /// it is counted. An error consumes nothing.
    fn discard(&self, pending: &PendingHandle) -> Result<Skipped> {
        pending
            .publish(true, |pending| {
                self.0
                    .ask(|core| each!(core, cache => cache.discard(pending)))
            })
            .map(Skipped)
    }

    /// Pins what a lookup found: its node until the lease ends, its checkpoint until
    /// `lease_loaded`. A match without a hit gives a lease at depth 0, from which a prefix can
    /// be published.
    ///
    /// Raises StaleError when that checkpoint is gone.
    fn lease(&self, r#match: &Match) -> Result<LeaseHandle> {
        self.0
            .call(|core| each!(core, cache => cache.lease(&r#match.0)))
            .map(LeaseHandle::from)
    }

    /// Another lease of what a lease has, as deep as it is by now. It has no state to load.
    fn fork_lease(&self, lease: &LeaseHandle) -> Result<LeaseHandle> {
        let forked = lease.0.read(|lease| {
            self.0
                .call(|core| each!(core, cache => cache.fork_lease(lease)))
        })?;
        Ok(LeaseHandle::from(forked))
    }

    /// The checkpoint slot to load from, until the load is reported; None for a lease at depth 0.
    fn lease_state(&self, lease: &LeaseHandle) -> Result<Option<u32>> {
        lease.0.read(|lease| {
            self.0
                .call(|core| each!(core, cache => cache.lease_state(lease)))
        })
    }

    /// Tokens of the leased prefix. A lease moves only deeper.
    fn lease_depth(&self, lease: &LeaseHandle) -> Result<usize> {
        lease.0.read(|lease| {
            self.0
                .call(|core| each!(core, cache => cache.lease_depth(lease)))
        })
    }

    /// Page ids of the leased prefix past `depth` tokens, a multiple of the page size.
    ///
    /// Raises UnalignedError.
    #[pyo3(signature = (lease, depth=0.into()), text_signature = "($self, lease, depth=0)")]
    fn lease_pages(&self, lease: &LeaseHandle, depth: Number<usize>) -> Result<Vec<u32>> {
        let depth = depth.named("depth")?;
        lease.0.read(|lease| {
            let pages = |core: &mut Core| each!(core, cache => cache.lease_pages(lease, depth));
            self.0.call(pages)
        })
    }

    /// Writes what `lease_pages` lists, as `copy_pages` does.
    #[pyo3(
        signature = (lease, out, depth=0.into()),
        text_signature = "($self, lease, out, depth=0)",
    )]
    fn copy_lease_pages(
        &self,
        py: Python<'_>,
        lease: &LeaseHandle,
        out: PageTable,
        depth: Number<usize>,
    ) -> Result<usize> {
        out.write(py, &self.lease_pages(lease, depth)?)
    }

    /// Reports that the load from the leased checkpoint is enqueued: it may be evicted again.
    /// Repeating it changes nothing.
    fn lease_loaded(&self, lease: &LeaseHandle) -> Result<()> {
        lease.0.read(|lease| {
            self.0
                .call(|core| each!(core, cache => cache.lease_loaded(lease)))
        })
    }

    /// Ends a lease.
    fn release(&self, lease: &LeaseHandle) -> Result<()> {
        let check = |lease: &_| {
            self.0
                .call(|core| each!(core, cache => cache.lease_depth(lease).map(drop)))
        };
        lease.0.consume(check, |lease| {
            self.0
                .call(|core| each!(core, cache => cache.release(lease)))
        })
    }

    /// Evicts at least `n` units of a pool if it can, and says what it really freed, all pools.
    fn evict(&self, pool: PoolName, n: Number<usize>) -> Result<Freed> {
        let n = n.named("n")?;
        self.0
            .ask(|core| each!(core, cache => cache.evict(pool.0, n)))
            .map(Freed::from)
    }

    /// Declares a step: work that may touch what running sequences hold, until `retire_step`.
    /// Dropping the step earlier cancels it.
    fn begin_step(&self) -> Result<Step> {
        self.0
            .ask(|core| each!(core, cache => cache.begin_step()))
            .map(Step)
    }

    /// A step has ended. Steps may retire in any order; a repeated one changes nothing. `invalid`
    /// are the checkpoints whose writer found a value that is not finite. No lookup has found them
    /// yet, and they are withdrawn as by `invalidate`.
    ///
    /// Raises UnknownStepError; WrongCacheError for a handle, or a state, of another cache.
    #[pyo3(signature = (step, invalid=Each(Vec::new())), text_signature = "($self, step, invalid=())")]
    fn retire_step(&self, step: StepName, invalid: Each<'_, Stored>) -> Result<()> {
        let step = step.known()?;
        let invalid = stored_of(&invalid);
        self.0
            .call(|core| each!(core, cache => cache.retire_step(step, &invalid)))
    }

    /// A step has ended, and everything it was to write is lost: the checkpoints stored in it are
    /// withdrawn. Repeating it changes nothing.
    ///
    /// Raises UnknownStepError; WrongCacheError for a handle, or a state, of another cache.
    #[pyo3(signature = (step, invalid=Each(Vec::new())), text_signature = "($self, step, invalid=())")]
    fn cancel_step(&self, step: StepName, invalid: Each<'_, Stored>) -> Result<()> {
        let step = step.known()?;
        let invalid = stored_of(&invalid);
        self.0
            .call(|core| each!(core, cache => cache.cancel_step(step, &invalid)))
    }

    /// Reports whether a stored state is finite; `Stored.ticket` names it. Before that, neither
    /// this checkpoint can be hit nor any that was stored after it. Repeating the call changes
    /// nothing.
    ///
    /// Raises UnknownStepError.
    fn complete(&self, ticket: Number<u64>, finite: bool) -> Result<()> {
        let ticket = ticket.named_or(Class::UnknownStep, "ticket")?;
        let outcome = if finite {
            Outcome::Done
        } else {
            Outcome::Failed
        };
        self.0
            .call(|core| each!(core, cache => cache.complete(ticket, outcome)))
    }

    /// (ticket, checkpoint slot, step in flight or None) of each stored state whose ticket is still to be
    /// completed, oldest first.
    fn unproven(&self) -> Result<Vec<(u64, u32, Option<u64>)>> {
        let unproven = self.0.ask(|core| each!(core, cache => cache.unproven()))?;
        let each = unproven.iter().map(|it| (it.ticket, it.slot, it.step));
        Ok(each.collect())
    }

    /// Draws every prefix that lookups can reach: a line for each node, with the depths of its run,
    /// and the state at its end. Below 64 levels it only counts them.
    fn draw(&self) -> Result<String> {
        self.0.ask(|core| each!(core, cache => cache.draw()))
    }

    /// Withdraws a checkpoint whose content turned out not to be finite, with the pages that the
    /// tree got with it and every checkpoint whose path they lie on. Repeating it changes
    /// nothing.
    fn invalidate(&self, stored: &Stored) -> Result<()> {
        self.0
            .call(|core| each!(core, cache => cache.invalidate(&stored.0)))
    }

    /// Lookups see an empty cache at once. Live sequences keep what they hold until they end; what
    /// they would publish later is refused and counted.
    fn reset(&self) -> Result<()> {
        self.0.ask(|core| each!(core, cache => cache.reset()))
    }

    /// All counters.
    fn stats(&self) -> Result<Stats> {
        self.0
            .ask(|core| each!(core, cache => cache.stats()))
            .map(Stats::from)
    }

    /// Where the slots of a pool are, from O(1) counters.
    fn usage(&self, pool: PoolName) -> Result<Usage> {
        self.0
            .ask(|core| each!(core, cache => cache.usage(pool.0)))
            .map(Usage::from)
    }

    /// One number for every decision so far: equal on ranks that made the same calls, different
    /// once they have diverged.
    fn digest(&self) -> Result<u64> {
        self.0.ask(|core| each!(core, cache => cache.digest()))
    }

    /// Recomputes every invariant. Its cost grows with everything that is cached. `engine_free` are
    /// pages that are free in the engine: none may be owned here.
    ///
    /// Raises CheckError with all violations.
    #[pyo3(signature = (engine_free=None))]
    fn check(&self, engine_free: Option<Pages>) -> Result<()> {
        let engine_free = engine_free.map(|pages| pages.0);
        self.0
            .call(|core| each!(core, cache => cache.check(engine_free.as_deref())))
    }

    fn __repr__(&self) -> String {
        let [kv, active, checkpoint] = [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint]
            .map(|kind| self.0.ask(|core| each!(core, cache => cache.usage(kind))));
        match (kv, active, checkpoint) {
            (Ok(kv), Ok(active), Ok(checkpoint)) => {
                let [kv, active, checkpoint] = [kv, active, checkpoint]
                    .map(|usage| format!("{}/{}", usage.capacity - usage.free, usage.capacity));
                format!("Cache(kv={kv}, active={active}, checkpoints={checkpoint})")
            }
            (Err(Failure::Refused(Class::Forked, _)), ..) => "Cache(of another process)".into(),
            _ => "Cache(poisoned)".into(),
        }
    }
}
