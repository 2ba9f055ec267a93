"""Prefix caching for models with recurrent state: int8 checkpoints in a pool of their own.

    cache = PrefixCache(StateSpec.from_config(model.config), active_slots=16, kv_pages=4096)
    with cache.start(tokens) as seq:           # raises OutOfSlotsError, having changed nothing
        model.prefill(tokens[seq.reused:], slot=seq.slot, pages=seq.pages)
        seq.checkpoint()                       # optional work: says Stored or Skipped

Importing the package does not import torch.
"""

from radixstate._native import Freed, Match, Namespace, Request, Stats, Stored, Usage
from radixstate.cache import Lease, PrefixCache, Sequence
from radixstate.results import Published, Skipped
from radixstate.states import ActivePool, CheckpointPool, ConvSpec, StateSpec
from radixstate.transfer import Transfer

__all__ = [
    "ActivePool",
    "CheckpointPool",
    "ConvSpec",
    "Freed",
    "Lease",
    "Match",
    "Namespace",
    "PrefixCache",
    "Published",
    "Request",
    "Sequence",
    "Skipped",
    "StateSpec",
    "Stats",
    "Stored",
    "Transfer",
    "Usage",
]
