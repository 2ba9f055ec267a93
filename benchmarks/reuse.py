"""The reuse experiment: how many distinct prefixes a cache holds before reuse collapses, and what that costs.

K distinct prefixes are sent once each (the warm round), then again with other suffixes: once in the same
order and once in random order. A prompt ends less than one checkpoint stride past its prefix, so each prefix
has exactly one legal checkpoint, at its end: one slot holds one prefix, and a probe that misses stores its
prefix again, as a server would. KV pages are ample; the slots for states run out. One request runs at a time.

Every cache serves the same requests on the same trained hybrid (three Gated DeltaNet layers, one attention
layer) with real prefills and real states; only the format and number of its checkpoint slots differ:

  native-fp32                 N slots in the states' own type
  bf16                        N slots
  int8-2n                     2N slots, as in sglang pull request 28185
  int8-bytes-of-native-fp32   the slots that the bytes of native-fp32 buy
  int8-bytes-of-bf16          the slots that the bytes of bf16 buy

Each prompt goes to all of them in turn, so that whatever else the machine does falls on all alike.

A cache that evicts by recency and is probed in the warm order keeps everything or nothing, which makes the
cliff look steeper than it is; random order shows the slope. The random round follows the same-order round,
which leaves the recency that the warm round left, so both start alike.

A cache's knee is the largest K tested at which at least half of the greatest possible reuse is left.

Writes reuse.json (rows: cache, slots, bytes, k, order, reuse, p50_ms, p90_ms, rps; and each cache's knees)
and reuse.png. Run it from the repository's root: python -m benchmarks.reuse
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from radixstate import PrefixCache, StateSpec, budget
from radixstate.integrations.transformers import PrefixServer, Result, state_spec
from radixstate.states import Format
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks import reuse_report
from benchmarks.tiny import corpus_prompts, load_tiny_model

Order = Literal["same", "random"]
ROUNDS = 3  # warm, same order, random order


@dataclass(frozen=True)
class Settings:
    """One size of the experiment; lengths in tokens.

    ``prefix`` is a multiple of ``stride`` and ``suffix`` at most ``stride``: one checkpoint per prefix.
    """

    slots: int
    prefix: int
    suffix: int
    counts: tuple[int, ...]
    seed: int = 0
    stride: int = 64
    page: int = 16

    @property
    def greatest_reuse(self) -> float:
        """The reuse of a cache that loses nothing."""
        return self.prefix / (self.prefix + self.suffix)


class Prompts(NamedTuple):
    """One prefix and its suffix in each round."""

    prefix: list[int]
    suffixes: list[list[int]]


class Contestant(NamedTuple):
    """A cache under test. ``bytes`` is what its checkpoint pool takes, the unused row 0 included."""

    name: str
    slots: int
    bytes: int
    server: PrefixServer


@dataclass(frozen=True)
class Row:
    """One cache probed with ``k`` prefixes in one order; ``reuse`` is a fraction of the tokens sent."""

    cache: str
    slots: int
    bytes: int
    k: int
    order: Order
    reuse: float
    p50_ms: float
    p90_ms: float
    rps: float


@dataclass(frozen=True)
class Knee:
    """The largest number of prefixes tested at which a cache keeps half of the greatest reuse, per order."""

    cache: str
    slots: int
    same: int
    random: int


def default_settings(slots: int, seed: int) -> Settings:
    """Values of K below, between and beyond N, 2N and what equal bytes buy: about two minutes at N = 32."""
    return Settings(slots, 256, 16, _multiples(slots, (0.5, 1, 1.5, 2, 2.5, 3)), seed)


def full_settings(slots: int, seed: int) -> Settings:
    """More values of K and longer prefixes: about half an hour at N = 64."""
    factors = (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4)
    return Settings(slots, 1024, 32, _multiples(slots, factors), seed)


def make_prompts(settings: Settings) -> list[Prompts]:
    """As many prefixes as the experiment needs, no two alike up to their first stride.

    Raises:
        ValueError: the text has too few of them.
    """
    n, prefix, suffix = max(settings.counts), settings.prefix, settings.suffix
    distinct: dict[tuple[int, ...], Prompts] = {}
    for text in corpus_prompts(2 * n, prefix + ROUNDS * suffix, settings.seed):
        starts = range(prefix, len(text), suffix)
        prompts = Prompts(text[:prefix], [text[start : start + suffix] for start in starts])
        distinct.setdefault(tuple(text[: settings.stride]), prompts)
    if len(distinct) < n:
        raise ValueError(f"wanted {n} distinct prefixes, found {len(distinct)}")
    return list(distinct.values())[:n]


def contestants(model: PreTrainedModel, settings: Settings) -> list[Contestant]:
    """The five caches, from the fewest slots to the most."""
    spec, n = state_spec(model), settings.slots
    plans = [
        ("native-fp32", "native", n),
        ("bf16", "bf16", n),
        ("int8-2n", "int8", 2 * n),
        ("int8-bytes-of-native-fp32", "int8", _int8_slots(spec, "native", n)),
        ("int8-bytes-of-bf16", "int8", _int8_slots(spec, "bf16", n)),
    ]
    made = [_contestant(model, spec, settings, *plan) for plan in plans]
    return sorted(made, key=lambda contestant: contestant.slots)


def run(
    settings: Settings,
    caches: Sequence[Contestant],
    prompts: Sequence[Prompts],
    served: Callable[[], object] = lambda: None,
) -> list[Row]:
    """The whole experiment: every number of prefixes with every cache, checked after each.

    Args:
        settings: lengths and numbers of prefixes.
        caches: from :func:`contestants`.
        prompts: from :func:`make_prompts`.
        served: called after each request.
    """
    rows = []
    for k in settings.counts:
        for order, results in _rounds(caches, prompts[:k], settings.seed, served):
            rows += [_row(cache, k, order, results[cache.name], settings) for cache in caches]
        for contestant in caches:
            contestant.server.cache.check()
            contestant.server.cache.reset()
    return rows


def requests(settings: Settings, caches: Sequence[Contestant]) -> int:
    """How many requests :func:`run` will serve."""
    return len(caches) * sum(settings.counts) * ROUNDS


def knees(rows: Sequence[Row], settings: Settings) -> list[Knee]:
    """Each cache's knee, in the order of ``rows``. Zero: not even the smallest number of prefixes fits."""
    least = settings.greatest_reuse / 2
    fits = {(row.cache, row.order, row.k) for row in rows if row.reuse >= least}

    def knee(cache: str, order: Order) -> int:
        return max((k for *where, k in fits if where == [cache, order]), default=0)

    slots = {row.cache: row.slots for row in rows}
    return [Knee(cache, n, knee(cache, "same"), knee(cache, "random")) for cache, n in slots.items()]


def _multiples(slots: int, factors: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(slots * factor) for factor in factors)


def _int8_slots(spec: StateSpec, fmt: Format, slots: int) -> int:
    """The int8 slots that the bytes of a pool of ``slots`` slots buy."""
    return budget.slots_that_fit(spec, (slots + 1) * spec.slot_bytes(fmt))


def _contestant(
    model: PreTrainedModel, spec: StateSpec, settings: Settings, name: str, fmt: str, slots: int
) -> Contestant:
    pages_each = -(-(settings.prefix + settings.suffix) // settings.page)
    cache = PrefixCache(
        spec,
        active_slots=1,
        checkpoint_slots=slots,
        kv_pages=(slots + 2) * pages_each,
        page_size=settings.page,
        checkpoint_stride=settings.stride,
        format=fmt,
    )
    return Contestant(name, slots, cache.checkpoints.nbytes, PrefixServer(model, cache))


def _rounds(
    caches: Sequence[Contestant], prompts: Sequence[Prompts], seed: int, served: Callable[[], object]
) -> Iterator[tuple[Order, dict[str, list[Result]]]]:
    """Warms the caches, then yields what each round of probes gave, by cache."""

    def send(batch: Sequence[Prompts], round_: int) -> dict[str, list[Result]]:
        results: dict[str, list[Result]] = {cache.name: [] for cache in caches}
        for prompt in batch:
            for cache in caches:
                results[cache.name].append(cache.server.generate(prompt.prefix + prompt.suffixes[round_], 1))
                served()
        return results

    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    send(prompts, 0)
    yield "same", send(prompts, 1)
    yield "random", send(shuffled, 2)


def _row(cache: Contestant, k: int, order: Order, results: Sequence[Result], settings: Settings) -> Row:
    latencies = [1e3 * (result.prefill_s + result.decode_s) for result in results]
    return Row(
        cache=cache.name,
        slots=cache.slots,
        bytes=cache.bytes,
        k=k,
        order=order,
        reuse=sum(result.reused for result in results) / (k * (settings.prefix + settings.suffix)),
        p50_ms=statistics.median(latencies),
        p90_ms=statistics.quantiles(latencies, n=10, method="inclusive")[-1],
        rps=1e3 * k / sum(latencies),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--slots", type=int, help="N (default: 32, with --full 64)")
    add("--full", action="store_true", help="longer prefixes and more values of K: about half an hour")
    add("--seed", type=int, default=0, help="of the prompts and of the random order (default: 0)")
    add("--threads", type=int, default=1, help="of torch (default: 1; this model is too small for more)")
    add("--out", type=Path, default=Path("out/demo"), help="folder of the results (default: out/demo)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    settings_of = full_settings if options.full else default_settings
    settings = settings_of(options.slots or (64 if options.full else 32), options.seed)
    caches = contestants(load_tiny_model(torch.float32), settings)
    prompts = make_prompts(settings)
    began = time.perf_counter()
    with tqdm(total=requests(settings, caches), unit="req", mininterval=0.5) as bar:
        rows = run(settings, caches, prompts, bar.update)
    found = knees(rows, settings)
    print(reuse_report.tables(rows, found, settings))
    reuse_report.write(options.out, rows, found, settings)
    for contestant in caches:
        contestant.server.cache.check()
    print(f"\ncheck() is clean on all {len(caches)} caches; {time.perf_counter() - began:.0f} s")
    print(f"wrote {options.out / 'reuse.json'} and {options.out / 'reuse.png'}")


if __name__ == "__main__":
    main()
