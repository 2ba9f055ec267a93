"""Prefix caching for models with recurrent state: int8 checkpoints in a pool of their own.

    cache = PrefixCache(StateSpec.from_config(model.config), active_slots=16, kv_pages=4096)
    with cache.start(tokens) as seq:                     # raises OutOfSlotsError, having changed nothing
        for begin, end, keep in seq.pieces(chunk=2048):  # cut where a saved state helps the next prompt
            model.prefill(tokens[begin:end], slot=seq.slot, pages=seq.pages)
            if keep:
                seq.checkpoint(end)                      # optional work: says Stored or Skipped

Importing the package does not import torch.

**Threads.** Every method of a cache may be called from any thread, also while others call. Each decision of the core is
whole: it is made while the thread holds the interpreter. Copies of states let other threads run, and each writes slots
that its request owns.

- A `Sequence`, a `Lease` or a `Step` is one thread's at a time. Hand it to another, drop it anywhere, but do not call
  it from two threads at once. If several end it, one does, and the others get `UseAfterFinishError`.
- A `Match` may be out of date when it is leased: `StaleError`, look again.
- A step is the whole cache's. What any thread gives back while it is open waits for it. What any thread stores is
  stored in the newest one, and goes with it when it fails.
- `digest()` follows the order of the calls. Ranks that compare it make their calls in one order, so from one thread.
- The slots of an engine, and the same slot through `Transfer` or a tensor, are the engine's to order between threads.
  On CUDA, so are torch's streams, of which each thread has a current one of its own.
- A cache is its process's: a forked child that calls its parent's gets `ForkedError`. `StartRequest` and `Namespace`
  own nothing, and are pickled to send them to another process.
- An `ActivePool` belongs to one cache at a time.
"""

from radixstate._native import (
    Freed,
    Match,
    Namespace,
    SpanKeys,
    StartRequest,
    Stats,
    Step,
    Stored,
    Usage,
)
from radixstate.cache import PrefixCache
from radixstate.engine import EngineCache
from radixstate.lease import Lease
from radixstate.results import Extended, Published, Skipped
from radixstate.sequence import Sequence
from radixstate.states import ActivePool, CheckpointPool, ConvSpec, StateSpec
from radixstate.transfer import Transfer

__all__ = [
    "ActivePool",
    "CheckpointPool",
    "ConvSpec",
    "EngineCache",
    "Extended",
    "Freed",
    "Lease",
    "Match",
    "Namespace",
    "PrefixCache",
    "Published",
    "Sequence",
    "Skipped",
    "SpanKeys",
    "StartRequest",
    "StateSpec",
    "Stats",
    "Step",
    "Stored",
    "Transfer",
    "Usage",
]
