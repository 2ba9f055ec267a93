"""sglang's real scheduler and model runner on a CPU: a tiny Qwen3-Next, eight requests, one line of results.

    python tests/sglang/engine.py [radixstate | bf16 | int8]

`bf16` and `int8` are sglang's own tree. sglang's strict checks of memory and tree are on; a violation ends the run.
The kernels run in Triton's interpreter, where decoding more than one token gives NaN with any cache: so each request
asks for one or two. Compare with `bf16` and not with a run without a cache: to cut a prompt changes the rounding of
its state.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from array import array
from pathlib import Path
from typing import Any

for name in ("STRICT_MEM_CHECK_DURING_IDLE", "STRICT_MEM_CHECK_DURING_BUSY", "TREE_CACHE_SANITY_CHECK"):
    os.environ["SGLANG_ENABLE_" + name] = "1"
os.environ |= {"TRITON_INTERPRET": "1", "SGLANG_RUST_BUILD_MODE": "never"}

import torch

torch.set_num_threads(1)
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import stand_ins  # noqa: F401
from radixstate.integrations.sglang import plugin
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler, SpawnRanks
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

DOCUMENT = 66
"""Tokens of a document; the chunk of a prefill is 64."""


class Engine:
    """A scheduler with one process, driven step by step."""

    def __init__(self, backend: str) -> None:
        ours = backend == plugin.NAME
        if ours:
            plugin.register()
        args = ServerArgs(
            model_path=str(HERE / "tiny"),
            device="cpu",
            skip_tokenizer_init=True,
            disable_overlap_schedule=True,
            radix_cache_backend=backend if ours else None,
            enable_int8_mamba_checkpoint=backend == "int8",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            mamba_radix_cache_strategy="no_buffer",
            disable_cuda_graph=True,
            page_size=1,
            max_running_requests=4,
            chunked_prefill_size=64,
            max_total_tokens=1024,
            max_mamba_cache_size=8,
            dtype="bfloat16",
            grammar_backend="none",
            load_format="dummy",
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(args, PortArgs.init_new(args))
        self.requests: dict[str, Any] = {}
        self._randomise()

    def _randomise(self) -> None:
        """Weights at random, so that logits differ from prompt to prompt."""
        generator = torch.Generator().manual_seed(3)
        constant = {"norm": 1.0, "A_log": 0.0, "dt_bias": -1.0}
        for name, parameter in self.scheduler.tp_worker.model_runner.model.named_parameters():
            fixed = [value for part, value in constant.items() if part in name]
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.data.copy_(torch.full_like(noise, fixed[0]) if fixed else noise)

    def submit(self, rid: str, tokens: list[int], new_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.handle_generate_request(request)
        self.requests[rid] = self.scheduler.waiting_queue[-1]

    def step(self) -> Any:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = scheduler.cur_batch_for_debug = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler._sched_idled = True
            scheduler.on_idle()
        scheduler.last_batch = batch
        return batch

    def drain(self) -> None:
        scheduler = self.scheduler
        for _ in range(500):
            if not (self.step() or scheduler.waiting_queue or not scheduler.running_batch.is_empty()):
                break
        else:
            raise RuntimeError("requests are left after 500 steps")
        self.step()


def run(backend: str) -> dict[str, Any]:
    """Two documents and questions on them, one after another, then two at once; then a flush."""
    engine, rng = Engine(backend), random.Random(2)
    doc, other = ([rng.randrange(5, 500) for _ in range(DOCUMENT)] for _ in range(2))
    asked = [[rng.randrange(5, 500) for _ in range(6)] for _ in range(3)]
    began = time.time()
    prompts = [doc, doc + asked[0], other, doc + asked[1], doc + asked[0] + asked[2], other + asked[0]]
    for i, prompt in enumerate(prompts):
        engine.submit(f"r{i}", prompt, 1)
        engine.drain()
    for i, prompt in enumerate([doc + asked[2], other + asked[2]]):
        engine.submit(f"s{i}", prompt, 2)
    engine.drain()
    cache = engine.scheduler.tree_cache
    full = cache.total_size()
    engine.scheduler.flush_cache()
    return {
        "backend": backend,
        "tree": type(cache).__name__,
        "first": {rid: request.output_ids[0] for rid, request in engine.requests.items()},
        "cached": {rid: request.cached_tokens for rid, request in engine.requests.items()},
        "size": list(full),
        "flushed": list(cache.total_size()),
        "seconds": round(time.time() - began),
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(run(sys.argv[1] if len(sys.argv) > 1 else plugin.NAME)))
