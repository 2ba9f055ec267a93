//! Requests whose pages and slots are the cache's.

use pyo3::prelude::*;
use radixstate::{PoolConfig, SequenceView};

use crate::cache::CacheBase;
use crate::config::Sizes;
use crate::errors::{Class, Result};
use crate::gate::{Core, Gate};
use crate::handles::{PendingHandle, SequenceHandle};
use crate::number::Number;
use crate::page_table::PageTable;
use crate::request::{Each, Namespace, StartRequest, namespace_or_default, start_options};
use crate::results::{Committed, Reserved, Started, started_or_error};
use crate::tokens::Tokens;

/// A prefix cache that hands out pages and active slots.
#[pyclass(frozen, extends = CacheBase, module = "radixstate._native")]
pub(crate) struct Cache;

fn gate<'a>(cache: &'a Bound<'_, Cache>) -> &'a Gate {
    &cache.as_super().get().0
}

fn view<T>(
    cache: &Bound<'_, Cache>,
    sequence: &SequenceHandle,
    read: impl FnOnce(SequenceView<'_>) -> T,
) -> Result<T> {
    sequence
        .0
        .read(|sequence| gate(cache).call(|core| core.own().view(sequence).map(read)))
}

#[pymethods]
impl Cache {
    /// An empty cache. Sizes are in slots (ids are 1..=size); `kv_pages=0` for a purely linear
    /// model. The bytes of one slot are for statistics only.
    ///
    /// Raises ConfigError for a geometry in which no prefix could ever be reused.
    #[new]
    #[pyo3(
        signature = (
            *, page_size, checkpoint_stride, kv_pages, active_slots, checkpoint_slots, kv_page_bytes=0.into(),
            active_bytes=0.into(), checkpoint_bytes=0.into(), policy="lru",
        ),
        text_signature = "(*, page_size, checkpoint_stride, kv_pages, active_slots, checkpoint_slots, \
            kv_page_bytes=0, active_bytes=0, checkpoint_bytes=0, policy='lru')",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        page_size: Number<u32>,
        checkpoint_stride: Number<u32>,
        kv_pages: Number<u32>,
        active_slots: Number<u32>,
        checkpoint_slots: Number<u32>,
        kv_page_bytes: Number<u64>,
        active_bytes: Number<u64>,
        checkpoint_bytes: Number<u64>,
        policy: &str,
    ) -> Result<PyClassInitializer<Self>> {
        let config = Sizes {
            page_size,
            checkpoint_stride,
            kv: (kv_pages, kv_page_bytes),
            active: (active_slots, active_bytes),
            checkpoints: (checkpoint_slots, checkpoint_bytes),
        };
        let core = Core::Own(config.cache(PoolConfig::internal, policy)?);
        Ok(PyClassInitializer::from(CacheBase(Gate::new(core))).add_subclass(Self))
    }

    /// Starts a request, all or nothing: pins what it reuses, takes `slots` active slots and pages
    /// for `reserve` tokens (default: the prompt).
    ///
    /// With a codec its slot is filled and reported as `loaded`; whatever `codec.fill` raises, the
    /// request is aborted. Without one both are left to the caller.
    ///
    /// Raises OutOfSlotsError, NeverFitsError: nothing was evicted or refreshed. EmptyPromptError;
    /// ConfigError for 0 slots.
    #[pyo3(
        signature = (tokens, namespace=None, reserve=None, max_length=None, no_read=false, no_store=false, slots=1.into(), codec=None),
        text_signature = "($self, tokens, namespace=None, reserve=None, max_length=None, no_read=False, no_store=False, slots=1, codec=None)",
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn start(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        tokens: Tokens,
        namespace: Option<&Namespace>,
        reserve: Option<Number<usize>>,
        max_length: Option<Number<usize>>,
        no_read: bool,
        no_store: bool,
        slots: Number<usize>,
        codec: Option<&Bound<'_, PyAny>>,
    ) -> Result<Started> {
        let namespace = namespace_or_default(namespace);
        let options = start_options(reserve, max_length, no_read, no_store, slots)?;
        let started = gate(slf).call_with(py, &tokens, |core, tokens| {
            core.own().start(&namespace, tokens, options)
        })?;
        let started = Started::new(py, started)?;
        if let Some(codec) = codec {
            let filled = started
                .fill(codec)
                .and_then(|()| Self::loaded(slf, started.sequence()));
            if let Err(error) = filled {
                Self::abort(slf, started.sequence())?;
                return Err(error);
            }
        }
        Ok(started)
    }

    /// A scheduler step's worth of starts, in order. Each succeeds or fails on its own: the list
    /// has a `Started` or the exception that `start` would have raised.
    fn start_many<'py>(
        slf: &Bound<'_, Self>,
        py: Python<'py>,
        requests: Each<'py, StartRequest>,
    ) -> Result<Vec<Bound<'py, PyAny>>> {
        let requests = requests.0.iter().map(|request| request.get().as_core());
        let started = gate(slf).ask(|core| core.own().start_many(requests))?;
        started
            .into_iter()
            .map(|started| Ok(started_or_error(py, started)?))
            .collect()
    }

    /// Reports that the load or clear of the sequence's slot is enqueued: the checkpoint it came
    /// from may be evicted again, and the slot may be the source of checkpoints. Once for each
    /// sequence.
    fn loaded(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<()> {
        sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().loaded(sequence)))
    }

    /// The slot of the running state.
    fn slot(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<u32> {
        view(slf, sequence, |view| view.slot())
    }

    /// All active slots, that of the running state first.
    fn slots(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        view(slf, sequence, |view| view.slots().collect())
    }

    /// Page ids of positions 0..claimed, shared ones first.
    fn pages(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        view(slf, sequence, |view| view.pages())
    }

    /// Writes what `pages` lists into a contiguous, writable buffer of int32, and returns how many
    /// ids that were.
    fn copy_pages(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        sequence: &SequenceHandle,
        out: PageTable,
    ) -> Result<usize> {
        out.write(py, &Self::pages(slf, sequence)?)
    }

    /// Tokens whose KV and state came from the cache at the start.
    fn reused(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<usize> {
        view(slf, sequence, |view| view.reused())
    }

    /// Number of tokens known so far.
    fn length(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<usize> {
        view(slf, sequence, |view| view.tokens().len())
    }

    /// Positions for which pages are held.
    fn claimed(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<usize> {
        view(slf, sequence, |view| view.claimed())
    }

    /// Depth up to which KV pages are shared with the tree.
    fn leased(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<usize> {
        view(slf, sequence, |view| view.leased())
    }

    /// Every token known so far.
    fn tokens(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<Vec<u32>> {
        view(slf, sequence, |view| view.tokens().to_vec())
    }

    /// Claims pages for `n` further tokens that need not be known yet, evicting exactly what is
    /// missing.
    ///
    /// Raises OutOfSlotsError, NeverFitsError: nothing has changed.
    fn grow(slf: &Bound<'_, Self>, sequence: &SequenceHandle, n: Number<usize>) -> Result<()> {
        let n = n.named("n")?;
        sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().grow(sequence, n)))
    }

    /// Fills claimed positions with tokens that are now known.
    ///
    /// Raises NotClaimedError.
    fn append(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        sequence: &SequenceHandle,
        tokens: Tokens,
    ) -> Result<()> {
        sequence.0.read(|sequence| {
            gate(slf).call_with(py, &tokens, |core, tokens| {
                core.own().append(sequence, tokens)
            })
        })
    }

    /// Gives back the claim on positions past the appended tokens, as after a verify that accepted
    /// only some.
    fn shrink(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<()> {
        sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().shrink(sequence)))
    }

    /// A further active slot, for kernels that write an intermediate state while the request goes
    /// on.
    ///
    /// Raises OutOfSlotsError, NeverFitsError.
    fn take_slot(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<u32> {
        sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().take_slot(sequence)))
    }

    /// Gives a further active slot back: now, or when the steps in flight have retired.
    ///
    /// Raises NotYourSlotError; RunningSlotError for the slot of the running state.
    fn give_back_slot(
        slf: &Bound<'_, Self>,
        sequence: &SequenceHandle,
        slot: Number<u32>,
    ) -> Result<()> {
        let slot = slot.named_or(Class::NotYourSlot, "slot")?;
        sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().give_back_slot(sequence, slot)))
    }

    /// Takes a checkpoint slot for the state in active slot `source`, which its writer says has
    /// exactly `depth` tokens. Evicts if needed.
    ///
    /// Raises UnalignedError, DepthPastEndError, NotYourSlotError, NotLoadedError; DepthPassedError
    /// for less than the sequence reused, or than was reserved from this slot before.
    fn reserve_checkpoint(
        slf: &Bound<'_, Self>,
        sequence: &SequenceHandle,
        depth: Number<usize>,
        source: Number<u32>,
    ) -> Result<Reserved> {
        let (depth, source) = (
            depth.named("depth")?,
            source.named_or(Class::NotYourSlot, "source")?,
        );
        let reservation = sequence.0.read(|sequence| {
            gate(slf).call(|core| core.own().reserve_checkpoint(sequence, depth, source))
        })?;
        Ok(reservation.into())
    }

    /// `reserve_checkpoint` for (sequence, depth, source) each. If one is refused none is reserved,
    /// and nothing is evicted.
    ///
    /// Raises what `reserve_checkpoint` does; DepthPassedError also for a slot that is named with
    /// two depths.
    fn reserve_checkpoints(
        slf: &Bound<'_, Self>,
        states: Vec<(Py<SequenceHandle>, Number<usize>, Number<u32>)>,
    ) -> Result<Vec<Reserved>> {
        let mut named = Vec::with_capacity(states.len());
        for (sequence, depth, source) in states {
            let depth = depth.named("depth")?;
            let source = source.named_or(Class::NotYourSlot, "source")?;
            named.push((sequence, depth, source));
        }
        let reserved = SequenceHandle::read_all(&named, |states| {
            gate(slf).call(|core| core.own().reserve_checkpoints(states))
        })?;
        Ok(reserved.into_iter().map(Reserved::from).collect())
    }

    /// Publishes tokens, pages and state together, or nothing. Read the sequence's pages again when
    /// `replaced` is not None or the result is a "duplicate".
    ///
    /// Raises NotYourPendingError. An error consumes
    /// nothing.
    #[pyo3(signature = (sequence, pending, *, proven=true))]
    fn commit(
        slf: &Bound<'_, Self>,
        sequence: &SequenceHandle,
        pending: &PendingHandle,
        proven: bool,
    ) -> Result<Committed> {
        let commit = sequence.0.read(|sequence| {
            pending.publish(proven, |pending| {
                gate(slf).ask(|core| core.own().commit(sequence, pending))
            })
        })?;
        Ok(commit.into())
    }

    /// Ends a request. Gives back its slots, private pages and pins: now, or when the steps in
    /// flight have retired.
    fn finish(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<()> {
        let check = |sequence: &_| gate(slf).call(|core| core.own().view(sequence).map(drop));
        sequence.0.consume(check, |sequence| {
            gate(slf).call(|core| core.own().finish(sequence))
        })
    }

    /// Ends a request that did not complete. Does what `finish` does.
    fn abort(slf: &Bound<'_, Self>, sequence: &SequenceHandle) -> Result<()> {
        let check = |sequence: &_| gate(slf).call(|core| core.own().view(sequence).map(drop));
        sequence.0.consume(check, |sequence| {
            gate(slf).call(|core| core.own().abort(sequence))
        })
    }

    /// Cuts what is left of a prompt into pieces of at most `chunk` tokens: (begin, end, whether to
    /// store a checkpoint at the end) each. See `Cache::pieces`.
    ///
    /// Raises ConfigError for a chunk of 0.
    #[pyo3(signature = (sequence, chunk=None))]
    fn pieces(
        slf: &Bound<'_, Self>,
        sequence: &SequenceHandle,
        chunk: Option<Number<usize>>,
    ) -> Result<Vec<(usize, usize, bool)>> {
        let chunk = chunk.map(|chunk| chunk.named("chunk")).transpose()?;
        let pieces = sequence
            .0
            .read(|sequence| gate(slf).call(|core| core.own().pieces(sequence, chunk)))?;
        let each = pieces.iter().map(|it| (it.begin, it.end, it.keep));
        Ok(each.collect())
    }
}
