"""Serves prompts with prefix reuse on a Hugging Face hybrid of linear and full attention.

A complete, small engine around :class:`radixstate.PrefixCache`: it restores the recurrent state, the conv
window and the KV of a cached prefix, prefills the rest, stores checkpoints, and decodes greedily.

    spec = state_spec(model)
    cache = PrefixCache(spec, active_slots=4, checkpoint_slots=64, kv_pages=4096)
    server = PrefixServer(model, cache)
    first = server.generate(prompt, 16)   # first.reused == 0
    again = server.generate(prompt, 16)   # again.reused > 0, the same tokens

Where a running request's tensors live:

* recurrent state and conv window: in its active slot. The model's cache layer is a view of the slot, so the
  model reads and writes it in place and nothing is copied.
* KV: in the model's cache layer while the request runs, and by page in :class:`KvPages` once published.

Written for transformers 5.24; the models' kernels fall back to PyTorch and need no other package.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

import radixstate
from radixstate import ActivePool, ConvSpec, Namespace, PrefixCache, Skipped, StateSpec, Stored
from radixstate.budget import Plan
from radixstate.errors import ConfigError, MisuseError


@dataclass(frozen=True)
class KvShape:
    """What one full-attention layer keeps per token: keys and values, or the two latents of MLA.

    Attributes:
        key: shape of one token's key, ``(heads, d)``.
        value: shape of one token's value, ``(heads, d)``.
        dtype: of both.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return (math.prod(self.key) + math.prod(self.value)) * self.dtype.itemsize


@dataclass(frozen=True)
class Geometry:
    """What the layers of a model keep, measured on one token instead of derived from a config.

    Attributes:
        spec: the recurrent states and conv windows of the linear layers.
        kv: the keys and values of the full-attention layers, in order.
    """

    spec: StateSpec
    kv: tuple[KvShape, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Runs ``model`` on one token and reads its cache.

        Raises:
            ConfigError: a layer is neither linear nor full attention, or the linear layers differ.
        """
        cache = DynamicCache(config=model.config)
        _forward(model, [0], cache)
        linear: list[LinearAttentionLayer] = []
        full: list[DynamicLayer] = []
        for index, layer in enumerate(cache.layers):
            if type(layer) is LinearAttentionLayer and layer.recurrent_states[0] is not None:
                linear.append(layer)
            elif type(layer) is DynamicLayer:
                full.append(layer)
            else:
                kind = type(layer).__name__
                raise ConfigError(f"layer {index} keeps a {kind}: neither recurrent nor full attention")
        specs = {_linear_spec(layer, len(linear)) for layer in linear}
        if len(specs) != 1:
            raise ConfigError(f"{len(linear)} linear layers of {len(specs)} shapes: one shape is needed")
        return cls(specs.pop(), tuple(map(_kv_shape, full)))


def state_spec(model: PreTrainedModel) -> StateSpec:
    """What a cache for ``model`` has to hold per slot: the state and conv windows of its linear layers."""
    return Geometry.of(model).spec


class KvPages:
    """Keys and values of all full-attention layers, by page id.

    One pair of tensors ``(pages + 1, page_size, heads, d)`` per layer; row 0 is never a page. The cache
    decides which page holds what; this only moves rows.
    """

    def __init__(self, shapes: Sequence[KvShape], pages: int, page_size: int, device: torch.device) -> None:
        """Allocates ``pages`` pages and the unused row 0, after comparing their bytes with the free memory.

        Raises:
            BudgetError: ``device`` has too little.
        """
        nbytes = (pages + 1) * page_size * sum(shape.nbytes for shape in shapes)
        plan = Plan(0, 0, pages, active_bytes=0, checkpoint_bytes=0, kv_bytes=nbytes)
        plan.check(device)
        self.page_size = page_size
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = [
            (
                torch.zeros(pages + 1, page_size, *shape.key, dtype=shape.dtype, device=device),
                torch.zeros(pages + 1, page_size, *shape.value, dtype=shape.dtype, device=device),
            )
            for shape in shapes
        ]

    def write(self, layers: Sequence[DynamicLayer], pages: Sequence[int], start: int, end: int) -> None:
        """Copies the KV of tokens ``[start, end)`` of one sequence from the model's layers to its pages."""
        rows = self._rows(pages, start, end)
        for layer, tensors in zip(layers, self.tensors, strict=True):
            for paged, running in zip(tensors, _kv(layer), strict=True):
                paged.flatten(0, 1)[rows] = running[0, :, start:end].transpose(0, 1)

    def read(self, pages: Sequence[int], end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each layer's keys and values of tokens ``[0, end)``, both ``(1, heads, end, d)``."""
        rows = self._rows(pages, 0, end)
        for keys, values in self.tensors:
            yield (
                keys.flatten(0, 1)[rows].transpose(0, 1).unsqueeze(0),
                values.flatten(0, 1)[rows].transpose(0, 1).unsqueeze(0),
            )

    def _rows(self, pages: Sequence[int], start: int, end: int) -> torch.Tensor:
        """The row of each token of ``[start, end)`` in a tensor whose page and offset axes are flattened."""
        device = self.tensors[0][0].device if self.tensors else None
        tokens = torch.arange(start, end, device=device)
        table = torch.tensor(pages, dtype=torch.int64, device=device)
        return table[tokens // self.page_size] * self.page_size + tokens % self.page_size


class RunningState:
    """The model's cache of one running request. Its linear layers are views of the request's active slot."""

    def __init__(self, model: PreTrainedModel, active: ActivePool, slot: int, kv: KvPages) -> None:
        """Binds to ``slot``, as if it held nothing; see :meth:`restore`."""
        self.model_cache = DynamicCache(config=model.config)
        self._linear = [layer for layer in self.model_cache.layers if isinstance(layer, LinearAttentionLayer)]
        self._full = [layer for layer in self.model_cache.layers if isinstance(layer, DynamicLayer)]
        self._kv = kv
        self._published = 0
        for layer, state, window in zip(self._linear, active.state(slot), active.conv(0, slot), strict=True):
            _bind(layer, state, window)

    def restore(self, pages: Sequence[int], depth: int) -> None:
        """Continues at ``depth`` tokens, whose state the slot and whose KV ``pages`` hold already."""
        if depth == 0:
            return
        for linear in self._linear:
            linear.has_previous_state[0] = True
        for full, (keys, values) in zip(self._full, self._kv.read(pages, depth), strict=True):
            full.update(keys, values)
        self._published = depth

    def publish(self, pages: Sequence[int], depth: int) -> None:
        """Writes the KV of all ``depth`` tokens to ``pages``; the slot holds their state anyway."""
        self._kv.write(self._full, pages, self._published, depth)
        self._published = depth


@dataclass(frozen=True)
class Result:
    """What :meth:`PrefixServer.generate` did.

    Attributes:
        tokens: generated greedily.
        logits: ``(vocabulary,)``, after the last token of the prompt.
        reused: tokens of the prompt whose KV and state came from the cache.
        reason: ``"hit"``, or why nothing was reused.
        checkpoints: what became of each checkpoint that was tried.
        prefill_s: seconds from the call to ``logits``: lookup, restore, prefill and checkpoints.
        decode_s: seconds after that.
    """

    tokens: list[int]
    logits: torch.Tensor
    reused: int
    reason: str
    checkpoints: tuple[Stored | Skipped, ...]
    prefill_s: float
    decode_s: float


class Request:
    """One prompt being served, made by :meth:`PrefixServer.start`. Its ``with`` block gives everything back.

    After an exception in a forward pass it can only end: some of its layers may have consumed the tokens.

    Attributes:
        sequence: the cache's side: slot, pages, what was reused.
        position: tokens the running state has consumed.
        tokens: generated so far. The last one is not part of the state yet.
        checkpoints: what became of each checkpoint that was tried.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PrefixCache,
        sequence: radixstate.Sequence,
        state: RunningState,
        chunk: int,
    ) -> None:
        """Takes over ``sequence``, whose slot is loaded, and restores what it reuses into ``state``."""
        self.sequence = sequence
        self.position = sequence.reused
        self.tokens: list[int] = []
        self.checkpoints: list[Stored | Skipped] = []
        self._logits: torch.Tensor | None = None
        self._broken = False
        self._model = model
        self._cache = cache
        self._state = state
        self._prompt = list(sequence.tokens)
        self._pieces = deque(sequence.pieces(chunk))
        state.restore(sequence.pages, sequence.reused)

    @property
    def logits(self) -> torch.Tensor:
        """``(vocabulary,)``, after ``position`` tokens.

        Raises:
            MisuseError: nothing of the prompt has been run.
        """
        if self._logits is None:
            raise MisuseError(f"no logits after the {self.position} tokens reused: prefill first")
        return self._logits

    def prefill(self) -> None:
        """Runs the rest of the prompt."""
        while self.prefill_piece():
            pass

    def prefill_piece(self) -> bool:
        """Runs the next piece of the prompt, storing a checkpoint if it ends where one belongs.

        Returns:
            Whether some of the prompt is left.

        Raises:
            MisuseError: a forward pass failed.
        """
        self._require_whole()
        if self._pieces:
            begin, end, keep = self._pieces[0]
            with self._advancing():
                self._run(self._prompt[begin:end])
            self._pieces.popleft()
            if keep:
                self.checkpoint()
        return bool(self._pieces)

    def decode(self, n: int, *, checkpoint: bool = False) -> list[int]:
        """Generates ``n`` more tokens greedily, claiming pages for them first.

        Args:
            n: tokens; the last one is returned without having been run.
            checkpoint: store the state at the deepest legal depth that this call reaches.

        Raises:
            OutOfSlotsError: too few pages just now; nothing was generated.
            NeverFitsError: more than all pages are needed; nothing was generated.
            MisuseError: part of the prompt has not been run, or a forward pass failed.
        """
        self._require_whole()
        if self.position < len(self._prompt):
            raise MisuseError(f"decode after {self.position} of {len(self._prompt)} tokens: prefill first")
        reached = len(self._prompt) + max(len(self.tokens) + n - 1, 0)
        self.sequence.grow(max(reached - self.sequence.claimed, 0))
        stop = self._cache.legal_depth(reached) if checkpoint else None
        for _ in range(n):
            with self._advancing():
                self._feed_last()
                self.tokens.append(int(self.logits.argmax()))
            if self.position == stop:
                self.checkpoint()
        return self.tokens[len(self.tokens) - n :]

    def checkpoint(self) -> Stored | Skipped:
        """Stores the state at ``position``, which has to be a legal depth.

        Raises:
            MisuseError: ``position`` is not legal, or a forward pass failed.
        """
        self._require_whole()
        self._state.publish(self.sequence.pages, self.position)
        outcome = self.sequence.checkpoint(self.position)
        self.checkpoints.append(outcome)
        return outcome

    def finish(self) -> None:
        """Gives slot, pages and pins back."""
        self.sequence.finish()

    def abort(self) -> None:
        """As :meth:`finish`; retract a request with it, and resume with ``start(prompt + tokens)``."""
        self.sequence.abort()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes, or aborts on an exception."""
        self.sequence.__exit__(kind, error, trace)

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        """The state moves on in here. It is of no known depth when that fails."""
        self._broken = True
        yield
        self._broken = False

    def _require_whole(self) -> None:
        if self._broken:
            raise MisuseError(f"a forward pass failed after {self.position} tokens: only abort the request")

    def _feed_last(self) -> None:
        """Runs the token generated last. Right after the prefill there is none."""
        if self.tokens:
            self.sequence.append(self.tokens[-1:])
            self._run(self.tokens[-1:])

    def _run(self, tokens: list[int]) -> None:
        self._logits = _forward(self._model, tokens, self._state.model_cache)
        self.position += len(tokens)


class PrefixServer:
    """Serves prompts on ``model``, reusing what ``cache`` holds of them.

    Owns the KV tensors of the cache's pages, so a cache has one server. Not thread-safe; requests may be
    interleaved piece by piece.
    """

    def __init__(self, model: PreTrainedModel, cache: PrefixCache, *, chunk: int = 2048) -> None:
        """Allocates KV tensors for the cache's pages.

        Args:
            model: a causal language model of linear and full attention layers, in evaluation mode.
            cache: made with :func:`state_spec` of the same model.
            chunk: most tokens of a prompt in one forward pass.

        Raises:
            ConfigError: the cache's spec is not the model's, it has no KV pages, or ``chunk`` is below 1.
            BudgetError: too little free memory for the pages.
        """
        geometry = Geometry.of(model)
        if cache.spec != geometry.spec:
            raise ConfigError(f"cache of {cache.spec}: the model keeps {geometry.spec}")
        pages = cache.usage("kv").capacity
        if geometry.kv and not pages:
            raise ConfigError(f"cache of 0 kv pages: {len(geometry.kv)} layers keep keys and values")
        if chunk < 1:
            raise ConfigError(f"chunk of {chunk} tokens: want at least 1")
        self.cache = cache
        self.kv = KvPages(geometry.kv, pages, cache.page_size, model.device)
        self._model = model
        self._chunk = chunk

    def start(
        self,
        tokens: Sequence[int],
        *,
        decode: int = 0,
        namespace: Namespace | None = None,
        no_read: bool = False,
        no_store: bool = False,
    ) -> Request:
        """Admits a prompt with room for ``decode`` generated tokens and restores what the cache holds of it.

        Raises:
            OutOfSlotsError: no active slot or too few pages now; nothing changed.
            NeverFitsError: the prompt and ``decode`` exceed the pool.
        """
        sequence = self.cache.start(
            tokens,
            reserve=len(tokens) + max(decode - 1, 0),
            namespace=namespace,
            no_read=no_read,
            no_store=no_store,
        )
        try:
            state = RunningState(self._model, self.cache.active, sequence.slot, self.kv)
            return Request(self._model, self.cache, sequence, state, self._chunk)
        except BaseException:
            sequence.abort()  # whoever keeps the exception keeps this frame
            raise

    def generate(
        self,
        tokens: Sequence[int],
        n: int = 1,
        *,
        namespace: Namespace | None = None,
        no_read: bool = False,
        no_store: bool = False,
        checkpoint_end: bool = False,
    ) -> Result:
        """Serves one prompt: reuse, prefill, ``n`` greedy tokens. For errors see :meth:`start`.

        Args:
            tokens: the prompt, at least one token.
            n: tokens to generate; may be 0.
            namespace: prompts of different namespaces share nothing.
            no_read: reuse nothing.
            no_store: store no checkpoints.
            checkpoint_end: also store the deepest legal depth reached while decoding, for a next turn.
        """
        began = time.perf_counter()
        with self.start(tokens, decode=n, namespace=namespace, no_read=no_read, no_store=no_store) as request:
            request.prefill()
            logits = request.logits
            prefilled = time.perf_counter()
            generated = request.decode(n, checkpoint=checkpoint_end)
        return Result(
            tokens=generated,
            logits=logits,
            reused=request.sequence.match.length,
            reason=request.sequence.match.reason,
            checkpoints=tuple(request.checkpoints),
            prefill_s=prefilled - began,
            decode_s=time.perf_counter() - prefilled,
        )


@torch.no_grad()
def _forward(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """Runs ``tokens`` after what ``cache`` holds and returns the last one's logits, ``(vocabulary,)``."""
    ids = torch.tensor([tokens], dtype=torch.int64, device=model.device)
    logits: torch.Tensor = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1]


def _bind(layer: LinearAttentionLayer, state: torch.Tensor, window: torch.Tensor) -> None:
    """Makes a fresh layer run in ``state`` ``(heads, d_k, d_v)`` and ``window`` ``(channels, kernel)``.

    The model writes them, and reads them only once ``has_previous_state`` is set.
    """
    layer.recurrent_states[0] = state.unsqueeze(0)
    layer.conv_states[0] = window.unsqueeze(0)
    layer.is_recurrent_states_initialized[0] = True
    layer.is_conv_states_initialized[0] = True
    layer.conv_kernel_size[0] = window.shape[-1]


def _kv(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of ``layer``, both ``(1, heads, tokens, d)``."""
    assert layer.keys is not None, "a full-attention layer that ran has keys"
    assert layer.values is not None, "a full-attention layer that ran has values"
    return layer.keys, layer.values


def _kv_shape(layer: DynamicLayer) -> KvShape:
    keys, values = _kv(layer)
    (_, k_heads, _, k_dim), (_, v_heads, _, v_dim) = keys.shape, values.shape
    return KvShape((k_heads, k_dim), (v_heads, v_dim), keys.dtype)


def _linear_spec(layer: LinearAttentionLayer, layers: int) -> StateSpec:
    """The spec of ``layers`` layers like this one."""
    state, window = layer.recurrent_states[0], layer.conv_states[0]
    assert state is not None, "a linear layer that ran has a recurrent state"
    assert window is not None, "a linear layer that ran has a conv window"
    _, heads, d_k, d_v = state.shape
    conv = ConvSpec(shape=tuple(window.shape[1:]), dtype=_name(window.dtype))
    return StateSpec(
        layers=layers, heads=heads, d_k=d_k, d_v=d_v, dtype=_name(state.dtype), layout="v_last", conv=(conv,)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
