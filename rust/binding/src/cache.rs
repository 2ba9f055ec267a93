//! The cache: converts, calls the core, maps the error.

use pyo3::prelude::*;
use radixstate::{Config, Outcome, PoolConfig, PoolKind, policy};

use crate::counters::{Freed, Stats, Usage};
use crate::errors::{Class, Failure, Result};
use crate::gate::Gate;
use crate::handles::{LeaseHandle, PendingHandle, SequenceHandle, Step, StepName};
use crate::number::Number;
use crate::page_table::PageTable;
use crate::request::{
    Each, Namespace, PoolName, StartRequest, namespace_or_default, start_options,
};
use crate::results::{
    Committed, Match, Published, Reserved, Skipped, Started, Stored, started_or_error,
};
use crate::tokens::{Pages, Tokens};

/// A prefix cache for recurrent states. It decides in slot numbers and moves nothing.
#[pyclass(frozen, module = "radixstate._native")]
pub(crate) struct Cache(Gate);

fn stored_of(list: &Each<'_, Stored>) -> Vec<radixstate::Stored> {
    let each = list.0.iter().map(|stored| stored.get().0.clone());
    each.collect()
}

/// Says of a pending checkpoint whether its state is known to be finite.
fn with_proof(pending: radixstate::Pending, proven: bool) -> radixstate::Pending {
    if proven {
        pending.proven()
    } else {
        pending.unproven()
    }
}

#[pymethods]
impl Cache {
    /// An empty cache. Sizes are in slots (ids are 1..=size); `kv_pages=0` for a purely linear
    /// model. The engine allocates from external pools itself. The bytes of one slot are for
    /// statistics only.
    ///
    /// Raises ConfigError for a geometry in which no prefix could ever be reused.
    #[new]
    #[pyo3(
        signature = (
            *, page_size, checkpoint_stride, kv_pages, active_slots, checkpoint_slots, kv_external=false,
            active_external=false, kv_page_bytes=0.into(), active_bytes=0.into(), checkpoint_bytes=0.into(),
            policy="lru",
        ),
        text_signature = "(*, page_size, checkpoint_stride, kv_pages, active_slots, checkpoint_slots, \
            kv_external=False, active_external=False, kv_page_bytes=0, active_bytes=0, checkpoint_bytes=0, \
            policy='lru')",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        page_size: Number<u32>,
        checkpoint_stride: Number<u32>,
        kv_pages: Number<u32>,
        active_slots: Number<u32>,
        checkpoint_slots: Number<u32>,
        kv_external: bool,
        active_external: bool,
        kv_page_bytes: Number<u64>,
        active_bytes: Number<u64>,
        checkpoint_bytes: Number<u64>,
        policy: &str,
    ) -> Result<Self> {
        let size = |number: Number<u32>, name| number.named_or(Class::Config, name);
        let pool = |capacity, external, (bytes, name): (Number<u64>, _)| {
            Ok::<_, Failure>(PoolConfig {
                capacity,
                external,
                unit_bytes: bytes.named_or(Class::Config, name)?,
            })
        };
        let config = Config {
            page_size: size(page_size, "page_size")?,
            checkpoint_stride: size(checkpoint_stride, "checkpoint_stride")?,
            kv: pool(
                size(kv_pages, "kv_pages")?,
                kv_external,
                (kv_page_bytes, "kv_page_bytes"),
            )?,
            active: pool(
                size(active_slots, "active_slots")?,
                active_external,
                (active_bytes, "active_bytes"),
            )?,
            checkpoints: pool(
                size(checkpoint_slots, "checkpoint_slots")?,
                false,
                (checkpoint_bytes, "checkpoint_bytes"),
            )?,
        };
        let Some(order) = policy::by_name(policy) else {
            let known = policy::NAMES.join(", ");
            let message = format!("policy must be one of {known}, got {policy:?}");
            return Err(Failure::Refused(Class::Config, message));
        };
        let core = radixstate::Cache::with_policy(config, order)?;
        Ok(Self(Gate::new(core)))
    }

    /// The deepest depth, at most `tokens`, at which a checkpoint may stand: a multiple of
    /// lcm(page_size, checkpoint_stride), counted from zero.
    fn legal_depth(&self, tokens: Number<usize>) -> Result<usize> {
        let tokens = tokens.named("tokens")?;
        self.0.ask(|core| core.legal_depth(tokens))
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
            .call_with(py, &tokens, |core, tokens| {
                core.lookup(&namespace, tokens, max_length)
            })
            .map(Match)
    }

    /// Starts a request, all or nothing: pins what it reuses, takes `slots` active slots and pages
    /// for `reserve` tokens (default: the prompt).
    ///
    /// Raises OutOfSlotsError, NeverFitsError: nothing was evicted or refreshed. EmptyPromptError;
    /// ConfigError for 0 slots; PoolModeError for more than 1 with an external active pool.
    #[pyo3(
        signature = (tokens, namespace=None, *, reserve=None, max_length=None, no_read=false, no_store=false, slots=1.into()),
        text_signature = "($self, tokens, namespace=None, *, reserve=None, max_length=None, no_read=False, no_store=False, slots=1)",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn start(
        &self,
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
        reserve: Option<Number<usize>>,
        max_length: Option<Number<usize>>,
        no_read: bool,
        no_store: bool,
        slots: Number<usize>,
    ) -> Result<Started> {
        let namespace = namespace_or_default(namespace);
        let options = start_options(reserve, max_length, no_read, no_store, slots)?;
        let started = self.0.call_with(py, &tokens, |core, tokens| {
            core.start(&namespace, tokens, options)
        })?;
        Ok(Started::new(py, started)?)
    }

    /// A scheduler step's worth of starts, in order. Each succeeds or fails on its own: the list
    /// has a `Started` or the exception that `start` would have raised.
    fn start_many<'py>(
        &self,
        py: Python<'py>,
        requests: Each<'py, StartRequest>,
    ) -> Result<Vec<Bound<'py, PyAny>>> {
        let started = self.0.ask(|core| {
            core.start_many(requests.0.iter().map(|request| request.get().as_core()))
        })?;
        started
            .into_iter()
            .map(|started| Ok(started_or_error(py, started)?))
            .collect()
    }

    /// Reports that the load or clear of the sequence's slot is enqueued: the checkpoint it came
    /// from may be evicted again, and the slot may be the source of checkpoints. Once for each
    /// sequence.
    fn loaded(&self, sequence: &SequenceHandle) -> Result<()> {
        sequence
            .0
            .read(|sequence| self.0.call(|core| core.loaded(sequence)))
    }

    /// The slot of the running state; None with an external active pool.
    fn slot(&self, sequence: &SequenceHandle) -> Result<Option<u32>> {
        self.0.view(sequence, |view| view.slot())
    }

    /// All active slots, that of the running state first.
    fn slots(&self, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        self.0.view(sequence, |view| view.slots().collect())
    }

    /// Page ids of positions 0..claimed, shared ones first. With an external KV pool only the
    /// shared ones.
    fn pages(&self, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        self.0.view(sequence, |view| view.pages())
    }

    /// Writes what `pages` lists into a contiguous, writable buffer of int32, and returns how many
    /// ids that were.
    fn copy_pages(
        &self,
        py: Python<'_>,
        sequence: &SequenceHandle,
        out: PageTable,
    ) -> Result<usize> {
        out.write(py, &self.pages(sequence)?)
    }

    /// Tokens whose KV and state came from the cache at the start.
    fn reused(&self, sequence: &SequenceHandle) -> Result<usize> {
        self.0.view(sequence, |view| view.reused())
    }

    /// Number of tokens known so far.
    fn length(&self, sequence: &SequenceHandle) -> Result<usize> {
        self.0.view(sequence, |view| view.tokens().len())
    }

    /// Positions for which pages are held.
    fn claimed(&self, sequence: &SequenceHandle) -> Result<usize> {
        self.0.view(sequence, |view| view.claimed())
    }

    /// Depth up to which KV pages are shared with the tree.
    fn leased(&self, sequence: &SequenceHandle) -> Result<usize> {
        self.0.view(sequence, |view| view.leased())
    }

    /// Every token known so far.
    fn tokens(&self, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        self.0.view(sequence, |view| view.tokens().to_vec())
    }

    /// Claims pages for `n` further tokens that need not be known yet, evicting exactly what is
    /// missing.
    ///
    /// Raises OutOfSlotsError, NeverFitsError: nothing has changed.
    fn grow(&self, sequence: &SequenceHandle, n: Number<usize>) -> Result<()> {
        let n = n.named("n")?;
        sequence
            .0
            .read(|sequence| self.0.call(|core| core.grow(sequence, n)))
    }

    /// Fills claimed positions with tokens that are now known.
    ///
    /// Raises NotClaimedError.
    fn append(&self, py: Python<'_>, sequence: &SequenceHandle, tokens: Tokens) -> Result<()> {
        sequence.0.read(|sequence| {
            self.0
                .call_with(py, &tokens, |core, tokens| core.append(sequence, tokens))
        })
    }

    /// Gives back the claim on positions past the appended tokens, as after a verify that accepted
    /// only some.
    fn shrink(&self, sequence: &SequenceHandle) -> Result<()> {
        sequence
            .0
            .read(|sequence| self.0.call(|core| core.shrink(sequence)))
    }

    /// A further active slot, for kernels that write an intermediate state while the request goes
    /// on.
    ///
    /// Raises OutOfSlotsError, NeverFitsError; PoolModeError with an external active pool.
    fn take_slot(&self, sequence: &SequenceHandle) -> Result<u32> {
        sequence
            .0
            .read(|sequence| self.0.call(|core| core.take_slot(sequence)))
    }

    /// Gives a further active slot back: now, or when the steps in flight have retired.
    ///
    /// Raises NotYourSlotError; RunningSlotError for the slot of the running state.
    fn give_back_slot(&self, sequence: &SequenceHandle, slot: Number<u32>) -> Result<()> {
        let slot = slot.named_or(Class::NotYourSlot, "slot")?;
        sequence
            .0
            .read(|sequence| self.0.call(|core| core.give_back_slot(sequence, slot)))
    }

    /// Asks, before anything is evicted for it, whether `reserve_checkpoint` is allowed. Raises
    /// what it would raise.
    fn can_checkpoint(
        &self,
        sequence: &SequenceHandle,
        depth: Number<usize>,
        source: Number<u32>,
    ) -> Result<()> {
        let (depth, source) = (
            depth.named("depth")?,
            source.named_or(Class::NotYourSlot, "source")?,
        );
        sequence.0.read(|sequence| {
            self.0
                .call(|core| core.can_checkpoint(sequence, depth, source))
        })
    }

    /// Takes a checkpoint slot for the state in active slot `source`, which its writer says has
    /// exactly `depth` tokens. Evicts if needed.
    ///
    /// Raises UnalignedError, DepthPastEndError, NotYourSlotError, NotLoadedError; DepthPassedError
    /// for less than the sequence reused, or than was reserved from this slot before.
    fn reserve_checkpoint(
        &self,
        sequence: &SequenceHandle,
        depth: Number<usize>,
        source: Number<u32>,
    ) -> Result<Reserved> {
        let (depth, source) = (
            depth.named("depth")?,
            source.named_or(Class::NotYourSlot, "source")?,
        );
        let reservation = sequence.0.read(|sequence| {
            self.0
                .call(|core| core.reserve_checkpoint(sequence, depth, source))
        })?;
        Ok(reservation.into())
    }

    /// Publishes tokens, pages and state together, or nothing. Read the sequence's pages again when
    /// `replaced` is not None or the result is a "duplicate".
    ///
    /// Raises NotYourPendingError; PoolModeError with an external KV pool. An error consumes
    /// nothing.
    #[pyo3(signature = (sequence, pending, *, proven=true))]
    fn commit(
        &self,
        sequence: &SequenceHandle,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Committed> {
        let commit = sequence.0.read(|sequence| {
            pending.pending.publish(|pending| {
                let pending = with_proof(pending, proven);
                self.0.ask(|core| core.commit(sequence, pending))
            })
        })?;
        Ok(commit.into())
    }

    /// Ends a reservation whose encoded state turned out not to be finite: its slot goes back, and
    /// it is counted. An error consumes nothing.
    fn discard(&self, pending: &PendingHandle) -> Result<Skipped> {
        pending
            .pending
            .publish(|pending| self.0.ask(|core| core.discard(pending)))
            .map(Skipped)
    }

    /// `commit` for a sequence whose KV pages are the engine's. See `publish`.
    #[pyo3(signature = (sequence, pages, pending, *, proven=true))]
    fn commit_pages(
        &self,
        py: Python<'_>,
        sequence: &SequenceHandle,
        pages: Pages,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Published> {
        let published = sequence.0.read(|sequence| {
            pending.pending.publish(|pending| {
                let pending = with_proof(pending, proven);
                self.0
                    .ask(|core| core.commit_pages(sequence, &pages.0, pending))
            })
        })?;
        Published::new(py, published)
    }

    /// Ends a request. Gives back its slots, private pages and pins: now, or when the steps in
    /// flight have retired.
    fn finish(&self, sequence: &SequenceHandle) -> Result<()> {
        let check = |sequence: &_| self.0.call(|core| core.view(sequence).map(drop));
        sequence
            .0
            .consume(check, |sequence| self.0.call(|core| core.finish(sequence)))
    }

    /// Ends a request that did not complete. Does what `finish` does.
    fn abort(&self, sequence: &SequenceHandle) -> Result<()> {
        let check = |sequence: &_| self.0.call(|core| core.view(sequence).map(drop));
        sequence
            .0
            .consume(check, |sequence| self.0.call(|core| core.abort(sequence)))
    }

    /// Pins what a lookup found: its node until the lease ends, its checkpoint until
    /// `lease_loaded`. A match without a hit gives a lease at depth 0, from which a prefix can
    /// be published.
    ///
    /// Raises StaleError when that checkpoint is gone.
    fn lease(&self, r#match: &Match) -> Result<LeaseHandle> {
        self.0
            .call(|core| core.lease(&r#match.0))
            .map(LeaseHandle::from)
    }

    /// The checkpoint slot to load from, until the load is reported; None for a lease at depth 0.
    fn lease_state(&self, lease: &LeaseHandle) -> Result<Option<u32>> {
        lease
            .0
            .read(|lease| self.0.call(|core| core.lease_state(lease)))
    }

    /// Tokens of the leased prefix. A lease moves only deeper.
    fn lease_depth(&self, lease: &LeaseHandle) -> Result<usize> {
        lease
            .0
            .read(|lease| self.0.call(|core| core.lease_depth(lease)))
    }

    /// Page ids of the leased prefix.
    fn lease_pages(&self, lease: &LeaseHandle) -> Result<Vec<u32>> {
        lease
            .0
            .read(|lease| self.0.call(|core| core.lease_pages(lease)))
    }

    /// Writes what `lease_pages` lists, as `copy_pages` does.
    fn copy_lease_pages(
        &self,
        py: Python<'_>,
        lease: &LeaseHandle,
        out: PageTable,
    ) -> Result<usize> {
        out.write(py, &self.lease_pages(lease)?)
    }

    /// Reports that the load from the leased checkpoint is enqueued: it may be evicted again.
    /// Repeating it changes nothing.
    fn lease_loaded(&self, lease: &LeaseHandle) -> Result<()> {
        lease
            .0
            .read(|lease| self.0.call(|core| core.lease_loaded(lease)))
    }

    /// Ends a lease.
    fn release(&self, lease: &LeaseHandle) -> Result<()> {
        let check = |lease: &_| self.0.call(|core| core.lease_depth(lease).map(drop));
        lease
            .0
            .consume(check, |lease| self.0.call(|core| core.release(lease)))
    }

    /// Takes a checkpoint slot for the state after exactly `tokens`. Evicts if needed.
    ///
    /// Raises UnalignedError, PrefixMismatchError.
    fn reserve(&self, py: Python<'_>, lease: &LeaseHandle, tokens: Tokens) -> Result<Reserved> {
        let reservation = lease.0.read(|lease| {
            self.0
                .call_with(py, &tokens, |core, tokens| core.reserve(lease, tokens))
        })?;
        Ok(reservation.into())
    }

    /// Asks, before a slot is reserved and anything is evicted for it, whether `publish` will be
    /// allowed.
    ///
    /// Raises UnalignedError, PrefixMismatchError, LengthMismatchError, PageOwnershipError,
    /// PoolModeError.
    fn can_publish(
        &self,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pages: Pages,
    ) -> Result<()> {
        lease.0.read(|lease| {
            self.0.call_with(py, &tokens, |core, tokens| {
                core.can_publish(lease, tokens, &pages.0)
            })
        })
    }

    /// Publishes tokens, pages and state together, or nothing. `pages` are the engine's, for the
    /// positions from the lease's depth to the end of `tokens`; exactly those that the tree
    /// lacks are adopted.
    ///
    /// Raises LengthMismatchError, PageOwnershipError, PrefixMismatchError, NotYourPendingError;
    /// PoolModeError with an internal KV pool. An error consumes nothing.
    #[pyo3(signature = (lease, tokens, pages, pending, *, proven=true))]
    fn publish(
        &self,
        py: Python<'_>,
        lease: &LeaseHandle,
        tokens: Tokens,
        pages: Pages,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Published> {
        let published = lease.0.read(|lease| {
            pending.pending.publish(|pending| {
                let pending = with_proof(pending, proven);
                self.0.ask_with(py, &tokens, |core, tokens| {
                    core.publish(lease, tokens, &pages.0, pending)
                })
            })
        })?;
        Published::new(py, published)
    }

    /// Evicts at least `n` units of a pool if it can, and says what it really freed, all pools.
    fn evict(&self, pool: PoolName, n: Number<usize>) -> Result<Freed> {
        let n = n.named("n")?;
        self.0.ask(|core| core.evict(pool.0, n)).map(Freed::from)
    }

    /// Pages of an external KV pool that the cache has given up since the last call, each exactly
    /// once.
    fn take_freed(&self, pool: PoolName) -> Result<Vec<u32>> {
        self.0.ask(|core| core.take_freed(pool.0))
    }

    /// Declares a step: work that may touch what running sequences hold, until `retire_step`.
    /// Dropping the step earlier cancels it.
    fn begin_step(&self) -> Result<Step> {
        self.0.ask(radixstate::Cache::begin_step).map(Step)
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
        self.0.call(|core| core.retire_step(step, &invalid))
    }

    /// A step has ended, and everything it was to write is lost: the checkpoints stored in it are
    /// withdrawn. Repeating it changes nothing.
    ///
    /// Raises UnknownStepError; WrongCacheError for a handle, or a state, of another cache.
    #[pyo3(signature = (step, invalid=Each(Vec::new())), text_signature = "($self, step, invalid=())")]
    fn cancel_step(&self, step: StepName, invalid: Each<'_, Stored>) -> Result<()> {
        let step = step.known()?;
        let invalid = stored_of(&invalid);
        self.0.call(|core| core.cancel_step(step, &invalid))
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
        self.0.call(|core| core.complete(ticket, outcome))
    }

    /// (ticket, checkpoint slot, step in flight or None) of each stored state whose ticket is still to be
    /// completed, oldest first.
    fn unproven(&self) -> Result<Vec<(u64, u32, Option<u64>)>> {
        let unproven = self.0.ask(radixstate::Cache::unproven)?;
        let each = unproven.iter().map(|it| (it.ticket, it.slot, it.step));
        Ok(each.collect())
    }

    /// Cuts what is left of a prompt into pieces of at most `chunk` tokens: (begin, end, whether to
    /// store a checkpoint at the end) each. See `Cache::pieces`.
    ///
    /// Raises ConfigError for a chunk of 0.
    #[pyo3(signature = (sequence, chunk=None))]
    fn pieces(
        &self,
        sequence: &SequenceHandle,
        chunk: Option<Number<usize>>,
    ) -> Result<Vec<(usize, usize, bool)>> {
        let chunk = chunk.map(|chunk| chunk.named("chunk")).transpose()?;
        let pieces = sequence
            .0
            .read(|sequence| self.0.call(|core| core.pieces(sequence, chunk)))?;
        let each = pieces.iter().map(|it| (it.begin, it.end, it.keep));
        Ok(each.collect())
    }

    /// Draws every prefix that lookups can reach: a line for each node, with the depths of its run,
    /// and the state at its end. Below 64 levels it only counts them.
    fn draw(&self) -> Result<String> {
        self.0.ask(radixstate::Cache::draw)
    }

    /// Withdraws a checkpoint whose content turned out not to be finite, with the pages that the
    /// tree got with it and every checkpoint whose path they lie on. Repeating it changes
    /// nothing.
    fn invalidate(&self, stored: &Stored) -> Result<()> {
        self.0.call(|core| core.invalidate(&stored.0))
    }

    /// Lookups see an empty cache at once. Live sequences keep what they hold until they end; what
    /// they would publish later is refused and counted.
    fn reset(&self) -> Result<()> {
        self.0.ask(radixstate::Cache::reset)
    }

    /// All counters.
    fn stats(&self) -> Result<Stats> {
        self.0.ask(radixstate::Cache::stats).map(Stats::from)
    }

    /// Where the slots of a pool are, from O(1) counters.
    fn usage(&self, pool: PoolName) -> Result<Usage> {
        self.0.ask(|core| core.usage(pool.0)).map(Usage::from)
    }

    /// One number for every decision so far: equal on ranks that made the same calls, different
    /// once they have diverged.
    fn digest(&self) -> Result<u64> {
        self.0.ask(|core| core.digest())
    }

    /// Recomputes every invariant. Its cost grows with everything that is cached. With an external
    /// KV pool, `engine_free` are the pages that are free in the engine: none may be owned
    /// here.
    ///
    /// Raises CheckError with all violations.
    #[pyo3(signature = (engine_free=None))]
    fn check(&self, engine_free: Option<Pages>) -> Result<()> {
        let engine_free = engine_free.map(|pages| pages.0);
        self.0.call(|core| core.check(engine_free.as_deref()))
    }

    fn __repr__(&self) -> String {
        let [kv, active, checkpoint] = [PoolKind::Kv, PoolKind::Active, PoolKind::Checkpoint]
            .map(|kind| self.0.ask(|core| core.usage(kind)));
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
