"""Prefix caching for models with recurrent state: int8 checkpoints in a pool of their own.

    cache = PrefixCache(StateSpec.from_config(model.config), active_slots=16, kv_pages=4096)
    with cache.start(tokens) as seq:                     # raises OutOfSlotsError, having changed nothing
        for begin, end, keep in seq.pieces(chunk=2048):  # cut where a saved state helps the next prompt
            model.prefill(tokens[begin:end], slot=seq.slot, pages=seq.pages)
            if keep:
                seq.checkpoint(end)                      # optional work: says Stored or Skipped

Importing the package does not import torch.
"""

from radixstate._native import Freed, Match, Namespace, StartRequest, Stats, Step, Stored, Usage
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
    "StartRequest",
    "StateSpec",
    "Stats",
    "Step",
    "Stored",
    "Transfer",
    "Usage",
]
