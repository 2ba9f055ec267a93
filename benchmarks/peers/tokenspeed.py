"""tokenspeed-scheduler (C++), which has no prefix cache to be called alone: a whole scheduler admits and publishes.

Pages of 64 tokens, one group of full attention and one of states. Its prompts are lists.
"""

from __future__ import annotations

from typing import Any

import tokenspeed_scheduler as scheduler

from benchmarks.speed.workloads import Keys, Size

PAGE = 64


def _config(size: Size) -> Any:
    pages = 2 * size.tokens // PAGE + 8 * size.states + PAGE
    config = scheduler.SchedulerConfig()
    config.prefix_granularity = PAGE
    config.num_device_pages = pages
    config.num_host_pages = 0
    config.num_snapshot_pages = 1
    config.max_scheduled_tokens = 4096
    config.max_batch_size = 8
    config.decode_input_tokens = 1
    config.disable_l2_cache = True
    config.disable_prefix_cache = False
    kv = ("full", PAGE, scheduler.AttnKind.Full, scheduler.CacheTransferPolicy.FullSuffix)
    state = ("state", 0, scheduler.AttnKind.State, scheduler.CacheTransferPolicy.LatestSnapshot)
    config.cache_groups = [
        scheduler.CacheGroupConfig(
            group_id=name, block_granularity=block, total_pages=pages, attn_kind=kind, transfer_policy=policy
        )
        for name, block, kind, policy in (kv, state)
    ]
    return config


class Tokenspeed:
    """Admits a request, and publishes its prefix when it has run."""

    def __init__(self, size: Size) -> None:
        self._scheduler = scheduler.Scheduler(_config(size))
        self._requests = 0

    @staticmethod
    def prompt(key: Keys) -> list[int]:
        return key.tolist()

    def admit(self, prompt: list[int]) -> tuple[str, Any]:
        """Its id, and the plan that starts it."""
        self._requests += 1
        request = scheduler.RequestSpec()
        request.request_id = str(self._requests)
        request.tokens = prompt
        request.max_new_tokens = 1
        self._scheduler.submit_requests([request])
        return request.request_id, self._scheduler.next_execution_plan()

    @staticmethod
    def reused(admitted: tuple[str, Any]) -> int:
        operation = next(it for it in admitted[1].forward if list(it.request_ids))
        return operation.extend_prefix_lens[0]

    def publish(self, admitted: tuple[str, Any], depth: int) -> None:
        """The prefill has run: its prefix is cached up to the last page, and the request ends."""
        self._advance(scheduler.ForwardEvent.ExtendResult, admitted[0], [5])
        self._advance(scheduler.ForwardEvent.Finish, admitted[0])
        self._scheduler.next_execution_plan()

    def _advance(self, kind: Any, request: str, tokens: list[int] | None = None) -> None:
        event = kind()
        event.request_id = request
        if tokens is not None:
            event.tokens = tokens
        step = scheduler.ExecutionEvent()
        step.add_event(event)
        self._scheduler.advance(step)
