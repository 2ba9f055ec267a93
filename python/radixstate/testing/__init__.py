"""Fuzzing for schedulers and engines that use the cache. Needs hypothesis, numpy and torch.

`CheckedCache` wraps a `PrefixCache` and compares every call with a slow reference, `CheckedEngineCache` an
`EngineCache`. Give it to a scheduler in place of the real one, and let hypothesis decide what arrives:

    >>> from hypothesis import settings
    >>> from hypothesis.stateful import RuleBasedStateMachine, rule
    >>> from radixstate import StateSpec
    >>> from radixstate.testing import CheckedCache, Figures, prompts

    >>> class Scheduler:
    ...     '''Serves one request after another with a model whose state is the sum of the tokens.'''
    ...
    ...     def __init__(self, cache):
    ...         self.cache = cache
    ...
    ...     def serve(self, prompt):
    ...         with self.cache.start(prompt) as seq:
    ...             state = self.cache.active.state(seq.slot)
    ...             depth = max(seq.reused, self.cache.legal_depth(len(prompt)))
    ...             state += sum(prompt[seq.reused : depth])
    ...             seq.checkpoint(depth)
    ...             state += sum(prompt[depth:])
    ...             return state[0, 0, 0, 0].item()

    >>> class SchedulerFuzz(RuleBasedStateMachine):
    ...     def __init__(self):
    ...         super().__init__()
    ...         spec = StateSpec(layers=1, heads=1, d_k=1, d_v=1, dtype="float32", layout="v_last")
    ...         sizes = {"active_slots": 1, "checkpoint_slots": 2, "kv_pages": 8}
    ...         cache = CheckedCache(spec, page_size=2, checkpoint_stride=4, format="native", **sizes)
    ...         self.scheduler = Scheduler(cache)
    ...
    ...     @rule(prompt=prompts(longest=16, tokens=(3, 5)))
    ...     def serve(self, prompt):
    ...         assert self.scheduler.serve(prompt) == sum(prompt)

    >>> figures = Figures()
    >>> figures.fuzz(SchedulerFuzz, examples=20)
    >>> figures.findings
    0

A call that goes wrong raises `Disagreement`, and so does a scheduler that touches what it does not own.
`SchedulerMachine` and `EngineMachine` are the machines that fuzz this library itself; a subclass can add rules or
put other caches into `begin`. Each is an ordinary state machine of hypothesis, and so are its settings:
`Figures.fuzz` runs one for as long as asked, and counts.
"""

from radixstate.testing.base_machine import CacheMachine
from radixstate.testing.checked import CheckedCache, CheckedSequence
from radixstate.testing.checked_base import CheckedStep
from radixstate.testing.checked_engine import CheckedEngineCache, CheckedLease
from radixstate.testing.compare import Disagreement
from radixstate.testing.engine import EngineMachine
from radixstate.testing.figures import Figures
from radixstate.testing.scheduler import SchedulerMachine
from radixstate.testing.strategies import NAMESPACES, engine_sizes, namespaces, prompts, sizes, specs

__all__ = [
    "NAMESPACES",
    "CacheMachine",
    "CheckedCache",
    "CheckedEngineCache",
    "CheckedLease",
    "CheckedSequence",
    "CheckedStep",
    "Disagreement",
    "EngineMachine",
    "Figures",
    "SchedulerMachine",
    "engine_sizes",
    "namespaces",
    "prompts",
    "sizes",
    "specs",
]
