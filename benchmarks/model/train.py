"""Trains the tiny model that the benchmarks and the codec's quality test use.

Run from the repository's root:

    python -m benchmarks.model.train --out out/model

A byte-level Qwen3.5 hybrid of 1.93 M parameters learns the standard library of the running interpreter. The
initial weights, the order of the data and the learning rate depend on the arguments, never on the clock.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.tiny import Split, corpus

BATCH, LENGTH = 8, 768
WARMUP = 20
EVALUATE_EVERY = 50


def tiny_config() -> Qwen3_5TextConfig:
    """Three Gated DeltaNet layers of 4 heads with 64 x 64 states, then one attention layer."""
    return Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        architectures=["Qwen3_5ForCausalLM"],
    )


def new_model(seed: int) -> Qwen3_5ForCausalLM:
    """A model with fresh weights, whose heads remember for very different times.

    transformers starts every head at a time step of 1.3, at which nearly all forget within a token.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(tiny_config())
    low, high = math.log(1e-3), math.log(1e-1)
    for layer in model.model.layers[:-1]:
        bias = layer.linear_attn.dt_bias
        dt = torch.empty_like(bias).uniform_(low, high).exp()
        bias.data = dt + torch.log(-torch.expm1(-dt))  # softplus(bias) == dt
    return model


class Optimizers(NamedTuple):
    """Muon for the matrices between embedding and head, AdamW for everything else, one schedule."""

    muon: torch.optim.Muon
    adamw: torch.optim.AdamW

    @classmethod
    def of(cls, model: Qwen3_5ForCausalLM) -> Optimizers:
        matrices, rest = [], []
        for name, weight in model.named_parameters():
            inner = weight.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if inner else rest).append(weight)
        # With this adjustment an update of either optimizer has the same root mean square, hence one rate.
        muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return cls(muon, torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0))

    def step(self, lr: float) -> None:
        for optimizer in self:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up during the warm-up, flat, then linearly to zero over the second half."""
    return peak * min(1.0, (step + 1) / WARMUP, 2 * (steps - step) / steps)


def tensor_of(split: Split) -> torch.Tensor:
    return torch.frombuffer(bytearray(corpus(split)), dtype=torch.uint8)


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """``(len(starts), LENGTH + 1)`` bytes: inputs and, one further, targets."""
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def nats_per_byte(model: Qwen3_5ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: Qwen3_5ForCausalLM, text: torch.Tensor, batches: int) -> float:
    """The mean over ``batches`` batches of windows spread evenly over ``text``."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, batches * BATCH).long()
    losses = [nats_per_byte(model, windows(text, part)) for part in starts.split(BATCH)]
    return torch.stack(losses).mean().item() / math.log(2)


def save(model: Qwen3_5ForCausalLM, out: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors``, the weights rounded to bf16.

    The weights replace the older ones in one rename, so a reader never sees half a file.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.partial", metadata={"format": "pt"})
    (out / "model.partial").replace(out / "model.safetensors")
    config = tiny_config()
    config.dtype = "bfloat16"
    config.save_pretrained(out)


def training_steps(model: Qwen3_5ForCausalLM, args: argparse.Namespace) -> Iterator[int]:
    """Takes ``args.steps`` optimizer steps on ``model``, yielding how many after each."""
    text, order = tensor_of("train"), torch.Generator().manual_seed(args.seed)
    optimizers = Optimizers.of(model)
    for step in range(args.steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=order)
        nats_per_byte(model, windows(text, starts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(learning_rate(step, args.steps, args.lr))
        yield step + 1


def train(args: argparse.Namespace) -> None:
    """Trains until the steps, the minutes or the target are reached, saving at every evaluation."""
    validation, model, begin = tensor_of("validation"), new_model(args.seed), time.monotonic()
    for step in training_steps(model, args):
        minutes = (time.monotonic() - begin) / 60
        late = minutes > args.minutes
        if late or step == args.steps or step % EVALUATE_EVERY == 0:
            save(model, args.out)
            bits = bits_per_byte(model, validation, batches=2)
            print(f"step {step}: {bits:.3f} bits/byte, {minutes:.1f} minutes", flush=True)
            if late or bits <= args.target:
                break
    saved = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print(f"as saved, in bf16: {bits_per_byte(saved, validation, batches=16):.3f} bits/byte")


def parse_args() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
    add("--steps", type=int, default=750, help="optimizer steps in the schedule (default %(default)s)")
    add("--minutes", type=float, default=60, help="stop the schedule short after this (default %(default)s)")
    add(
        "--target",
        type=float,
        default=0,
        help="stop it short at this validation loss, bits/byte (default: never)",
    )
    add("--lr", type=float, default=6e-3, help="peak learning rate (default %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and of the data's order (default %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)
