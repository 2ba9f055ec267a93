"""What a model keeps per sequence, and the two pools of tensors that hold it by slot.

Row 0 of every tensor is the padding sink: it exists, and nobody ever owns it. Slots are 1..=slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Self, get_args
from weakref import WeakKeyDictionary

from radixstate.errors import ConfigError, SlotError, TensorError
from radixstate.memory import zeros

if TYPE_CHECKING:
    import torch

    from radixstate.codec import Codec

    Device = str | torch.device
    Given = torch.Tensor | Sequence[torch.Tensor]

Layout = Literal["k_last", "v_last"]
"""`k_last`: a head's matrix is (d_v, d_k), as in sglang and vLLM; `v_last`: (d_k, d_v), as transformers."""

Format = Literal["int8", "bf16", "native"]
"""How checkpoints are kept: int8 with one scale per k-channel, rounded once to bfloat16, or bit for bit."""

Pairs = Iterable[tuple[int, int]]
"""(source slot, destination slot) of each copy."""

_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
_SCALE_DTYPE = {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32"}


@dataclass(frozen=True)
class ConvSpec:
    """One convolution window of a layer, copied as it is.

    Attributes:
        shape: of one layer and slot, usually (channels, columns).
        dtype: name of a torch type.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Raises ConfigError for an empty shape or an unknown type."""
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a conv window needs at least one element, got shape {self.shape}")
        _require_dtype("conv window", self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one layer and slot."""
        return prod(self.shape) * _WIDTH[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The recurrent state of one sequence: what an active slot holds for all layers.

    Attributes:
        layers: recurrent layers; attention layers do not count.
        heads: state heads per layer (value heads, where keys have fewer).
        d_k: k-channels of a head; each gets a scale of its own in int8.
        d_v: elements of a k-channel.
        dtype: `bfloat16`, `float16` or `float32`.
        layout: order of the last two axes.
        conv: convolution windows that belong to the state.
    """

    layers: int
    heads: int
    d_k: int
    d_v: int
    dtype: str = "bfloat16"
    layout: Layout
    conv: tuple[ConvSpec, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1, an unknown type or an unknown layout."""
        for name in ("layers", "heads", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        _require_dtype("state", self.dtype)
        if self.layout not in get_args(Layout):
            raise ConfigError(f"layout must be one of {', '.join(get_args(Layout))}, got {self.layout!r}")

    @classmethod
    def from_config(cls, config: Any, *, dtype: str | None = None) -> Self:
        """The spec of a transformers model, in the shapes of transformers' own cache.

        Known are Qwen3-Next, Qwen3.5 (dense and MoE), OlmoHybrid, Kimi Linear and Mamba2. Their recurrent
        states are float32 whatever the model's type; the conv window has the model's type and as many columns
        as the kernel.

        Args:
            config: a transformers config; of a multimodal one the text part is taken.
            dtype: the model's type, when the config does not name it.

        Raises:
            ConfigError: the model is not known, has no recurrent layer, or its type is not given.
        """
        text = getattr(config, "text_config", config)
        read = _READERS.get(text.model_type)
        if read is None:
            raise ConfigError(
                f"no preset for model type {text.model_type!r}, only for {', '.join(_READERS)}: "
                "give the shapes to StateSpec itself"
            )
        named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
        if named is None:
            raise ConfigError(f"the {text.model_type} config names no dtype: pass dtype=, the model's type")
        heads = read(text)
        window = ConvSpec((heads.channels, heads.kernel), str(named).removeprefix("torch."))
        layers = list(text.layer_types).count("linear_attention")
        return cls(
            layers=layers,
            heads=heads.heads,
            d_k=heads.d_k,
            d_v=heads.d_v,
            dtype="float32",
            layout=heads.layout,
            conv=(window,),
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one head's state: (d_v, d_k) or (d_k, d_v), by layout."""
        return (self.d_v, self.d_k) if self.layout == "k_last" else (self.d_k, self.d_v)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers, at its own type."""
        return self._elements * _WIDTH[self.dtype]

    @property
    def conv_bytes(self) -> int:
        """Bytes of one sequence's convolution windows, all layers."""
        return self.layers * sum(window.nbytes for window in self.conv)

    @property
    def scale_dtype(self) -> str:
        """Type of the int8 scales: the state's own, but float32 for float16, in which small scales vanish."""
        return _SCALE_DTYPE[self.dtype]

    def slot_bytes(self, format: Format = "native") -> int:
        """Bytes of one slot of a checkpoint pool; of an active pool with `native`."""
        _require_format(format)
        if format == "int8":
            scales = self.layers * self.heads * self.d_k
            return self._elements + scales * _WIDTH[self.scale_dtype] + self.conv_bytes
        width = _WIDTH["bfloat16" if format == "bf16" else self.dtype]
        return self._elements * width + self.conv_bytes

    @property
    def _elements(self) -> int:
        return self.layers * self.heads * self.d_k * self.d_v


@dataclass(frozen=True)
class _Heads:
    heads: int
    d_k: int
    d_v: int
    layout: Layout
    channels: int
    kernel: int


def _gated_delta_net(config: Any) -> _Heads:
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * d_k, config.linear_num_value_heads * d_v
    kernel = config.linear_conv_kernel_dim
    return _Heads(config.linear_num_value_heads, d_k, d_v, "v_last", 2 * keys + values, kernel)


def _kimi_delta_attention(config: Any) -> _Heads:
    heads, d = config.linear_num_heads, config.linear_head_dim
    return _Heads(heads, d, d, "v_last", 3 * heads * d, config.linear_conv_kernel_dim)


def _mamba2(config: Any) -> _Heads:
    d_k, d_v = config.state_size, config.head_dim
    channels = config.num_heads * d_v + 2 * config.n_groups * d_k
    return _Heads(config.num_heads, d_k, d_v, "k_last", channels, config.conv_kernel)


_READERS: dict[str, Callable[[Any], _Heads]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
    "mamba2": _mamba2,
}


@dataclass(frozen=True)
class Rows:
    """Tensors by slot: one of shape (slots + 1, *shape) for each layer.

    Attributes:
        layers: the tensors, all with the same strides.
        whole: the tensor (layers, slots + 1, *shape) they are views of, if there is one.
        inference: whether one was made under `torch.inference_mode`, where alone it can be written.
    """

    layers: tuple[torch.Tensor, ...]
    whole: torch.Tensor | None
    inference: bool = False

    @classmethod
    def zeros(cls, layers: int, rows: int, shape: tuple[int, ...], dtype: str, device: Device) -> Self:
        """Allocates one zeroed tensor for all layers, that can be written in any mode."""
        import torch

        with torch.inference_mode(False):
            whole = zeros((layers, rows, *shape), getattr(torch, dtype), device)
            return cls(whole.unbind(0), whole)

    @classmethod
    def bind(cls, name: str, given: Given, layers: int, shape: tuple[int, ...], dtype: str) -> Self:
        """Takes an engine's tensors if they have `shape` behind the row axis, `dtype` and even strides."""
        whole = None if isinstance(given, Sequence) else given
        tensors = tuple(given)
        if len(tensors) != layers:
            raise TensorError(f"{name}: {len(tensors)} layers given, the spec has {layers}")
        for tensor in tensors:
            _require_tensor(name, tensor, like=tensors[0], shape=shape, dtype=dtype)
        return cls(tensors, whole, inference=any(tensor.is_inference() for tensor in tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, the padding sink's included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.layers)

    def row(self, slot: int) -> torch.Tensor:
        """A view (layers, *shape) of one slot."""
        if self.whole is None:
            raise TensorError(
                "the pool is bound to one tensor per layer: no view covers a slot of all layers"
            )
        return self.whole[:, slot]

    def fill(self, slot: int, value: float) -> None:
        """Fills one slot of all layers: by one operation where one tensor holds them."""
        for view in self._views(slot):
            self._write(view, value)

    def mark(self, slot: int) -> None:
        """Makes the first element of each layer of a slot NaN."""
        axes = self.layers[0].dim() - 1  # of a slot, which is contiguous, so that this is a view
        for view in self._views(slot):
            self._write(view.flatten(-axes)[..., 0], float("nan"))

    def _views(self, slot: int) -> list[torch.Tensor]:
        """One slot of all layers, (layers, *shape), or of each, (*shape)."""
        return [self.whole[:, slot]] if self.whole is not None else [layer[slot] for layer in self.layers]

    def _write(self, view: torch.Tensor, value: float) -> None:
        if not self.inference:
            view.fill_(value)
            return
        import torch

        with torch.inference_mode():
            view.fill_(value)


def _require_tensor(
    name: str, tensor: torch.Tensor, *, like: torch.Tensor, shape: tuple[int, ...], dtype: str
) -> None:
    """Refuses a tensor that cannot be one layer of a pool, giving the rule and what was found."""
    found = tuple(tensor.shape)
    if found[1:] != shape or found[0] < 2:
        wanted = ", ".join(map(str, shape))
        raise TensorError(f"{name}: a layer must be (slots + 1, {wanted}) with at least 1 slot, got {found}")
    if str(tensor.dtype) != f"torch.{dtype}":
        raise TensorError(f"{name}: the spec says {dtype}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device != like.device:
        raise TensorError(f"{name}: all layers must share one device, got {like.device} and {tensor.device}")
    if tensor.shape[0] != like.shape[0]:
        raise TensorError(f"{name}: all layers must have {like.shape[0]} rows, got {tensor.shape[0]}")
    if tensor.stride() != like.stride():
        raise TensorError(
            f"{name}: all layers must have the strides of the first, {like.stride()}, got {tensor.stride()}"
        )
    if tensor.requires_grad:
        raise TensorError(f"{name}: states are written in place, but a layer requires a gradient")
    if not tensor[0].is_contiguous():
        raise TensorError(
            f"{name}: a slot must be contiguous, got shape {found} with strides {tensor.stride()}"
        )


class _Pool:
    """Tensors by slot, of one spec, on one device."""

    def __init__(self, spec: StateSpec, state: Rows, conv: tuple[Rows, ...]) -> None:
        self.spec = spec
        self.slots = state.layers[0].shape[0] - 1
        self.device = state.layers[0].device
        self.state_rows = state
        self.conv_rows = conv

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding sinks included."""
        return self.state_rows.nbytes + sum(rows.nbytes for rows in self.conv_rows)

    def state(self, slot: int) -> torch.Tensor:
        """A view (layers, heads, *matrix) of the recurrent state in a slot, as it is kept here."""
        return self.state_rows.row(self.require(slot))

    def conv(self, index: int, slot: int) -> torch.Tensor:
        """A view (layers, *shape) of one convolution window of a slot."""
        return self.conv_rows[index].row(self.require(slot))

    def require(self, slot: int) -> int:
        """Returns `slot`, or raises SlotError if the pool has no such slot."""
        if not 1 <= slot <= self.slots:
            raise SlotError(f"slot {slot} is not in 1..={self.slots} (row 0 is the padding sink)")
        return slot


class ActivePool(_Pool):
    """Full-precision states of running sequences, by slot.

    Either the pool allocates its tensors, or `bind` takes an engine's:
    state (layers, slots + 1, heads, *matrix) and conv[i] (layers, slots + 1, *shape).
    """

    def __init__(self, spec: StateSpec, slots: int, *, device: Device = "cpu") -> None:
        """Allocates zeroed tensors.

        Raises:
            ConfigError: `slots` is below 1.
        """
        _require_slots("active", slots)
        state = Rows.zeros(spec.layers, slots + 1, (spec.heads, *spec.matrix), spec.dtype, device)
        super().__init__(spec, state, _conv_zeros(spec, slots, device))

    @classmethod
    def bind(cls, spec: StateSpec, *, state: Given, conv: Sequence[Given] = ()) -> Self:
        """A pool over an engine's tensors, which are used in place and must not move (`share_memory_`) any more.

        Args:
            spec: what a slot holds.
            state: (layers, slots + 1, heads, *matrix), or a list, one (slots + 1, heads, *matrix) per layer.
            conv: for each window of the spec (layers, slots + 1, *shape), or a list, one tensor per layer.

        Raises:
            TensorError: a number of tensors, shape, type, device or stride is not as the spec says.
        """
        if len(conv) != len(spec.conv):
            raise TensorError(f"{len(conv)} conv tensors given, the spec has {len(spec.conv)} windows")
        bound = Rows.bind(
            f"state ({spec.layout})", state, spec.layers, (spec.heads, *spec.matrix), spec.dtype
        )
        windows = tuple(
            Rows.bind(f"conv[{i}]", given, spec.layers, window.shape, window.dtype)
            for i, (given, window) in enumerate(zip(conv, spec.conv, strict=True))
        )
        first = bound.layers[0]
        for i, rows in enumerate(windows):
            other = rows.layers[0]
            if (other.device, other.shape[0]) != (first.device, first.shape[0]):
                raise TensorError(
                    f"conv[{i}]: {other.shape[0]} rows on {other.device}, but state has {first.shape[0]} "
                    f"on {first.device}"
                )
        pool = cls.__new__(cls)
        _Pool.__init__(pool, spec, bound, windows)
        return pool

    def clear(self, slot: int) -> None:
        """Zeroes a slot: the state before the first token."""
        self.require(slot)
        for rows in (self.state_rows, *self.conv_rows):
            rows.fill(slot, 0)

    def poison(self, slot: int) -> None:
        """Fills a slot with NaN, windows too: a checkpoint of it is refused until a kernel wrote its state."""
        self.require(slot)
        for rows in (self.state_rows, *self.conv_rows):
            rows.fill(slot, float("nan"))

    def spend(self, slot: int) -> None:
        """Makes a stored state unusable: a NaN in each layer and window, until a kernel writes the slot."""
        self.require(slot)
        for rows in (self.state_rows, *self.conv_rows):
            rows.mark(slot)


class CheckpointPool(_Pool):
    """Encoded states of cached prefixes, by slot.

    state (layers, slots + 1, heads, *matrix) in int8, bfloat16 or the state's own type; for int8 also
    scale (layers, slots + 1, heads, d_k); conv[i] (layers, slots + 1, *shape).
    """

    def __init__(
        self, spec: StateSpec, slots: int, *, format: Format = "int8", device: Device = "cpu"
    ) -> None:
        """Allocates zeroed tensors.

        Raises:
            ConfigError: `slots` is below 1, or the format is unknown.
        """
        _require_slots("checkpoint", slots)
        _require_format(format)
        dtype = {"int8": "int8", "bf16": "bfloat16", "native": spec.dtype}[format]
        state = Rows.zeros(spec.layers, slots + 1, (spec.heads, *spec.matrix), dtype, device)
        super().__init__(spec, state, _conv_zeros(spec, slots, device))
        self.format = format
        scales = (spec.layers, slots + 1, (spec.heads, spec.d_k), spec.scale_dtype, device)
        self.scale_rows = Rows.zeros(*scales) if format == "int8" else None
        self._codecs: WeakKeyDictionary[ActivePool, Codec] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding sinks included."""
        return super().nbytes + (self.scale_rows.nbytes if self.scale_rows else 0)

    def scale(self, slot: int) -> torch.Tensor:
        """A view (layers, heads, d_k) of the scales of a slot.

        Raises:
            TensorError: the format has no scales.
        """
        if self.scale_rows is None:
            raise TensorError(f"a pool of format {self.format} has no scales")
        return self.scale_rows.row(self.require(slot))

    def prepare(self, active: ActivePool) -> None:
        """Refuses now what no `store` and `load` between the two pools could do; on cuda it compiles.

        Raises:
            TensorError: the pools differ in spec or device, or their tensors share memory.
            ModuleNotFoundError: the pools are on cuda, and CuPy is missing.
        """
        self._codec(active)

    def store(self, active: ActivePool, pairs: Pairs) -> Sequence[bool]:
        """Encodes active slots into checkpoint slots, all layers and windows of all pairs at once.

        Args:
            active: where the running states are.
            pairs: (active slot, checkpoint slot) each.

        Returns:
            For each pair whether the state reloads finite; one that does not must not become a checkpoint.
            On cuda nothing has waited for the store when this returns, and the first access does. (The
            first store or load between two pools compiles, and waits for the device.)

        Raises:
            SlotError: a slot is not in its pool, or two pairs write the same one; nothing was written.
            TensorError: the pools differ in spec or device.
            MisuseError: a CUDA graph is being captured: `radixstate.cuda.build(...).batch` is for that.
        """
        return self._codec(active).store(list(pairs))

    def load(self, active: ActivePool, pairs: Pairs) -> None:
        """Decodes checkpoint slots into active slots; `pairs` are (checkpoint slot, active slot) each.

        Raises:
            SlotError: as `store`.
            TensorError: as `store`.
            MisuseError: as `store`.
        """
        self._codec(active).load(list(pairs))

    def _codec(self, active: ActivePool) -> Codec:
        codec = self._codecs.get(active)
        if codec is None:
            from radixstate.codec import build

            codec = self._codecs[active] = build(active, self)
        return codec


def _conv_zeros(spec: StateSpec, slots: int, device: Device) -> tuple[Rows, ...]:
    windows = ((window.shape, window.dtype) for window in spec.conv)
    return tuple(Rows.zeros(spec.layers, slots + 1, shape, dtype, device) for shape, dtype in windows)


def _require_dtype(what: str, dtype: str) -> None:
    if dtype not in _WIDTH:
        raise ConfigError(f"{what}: dtype must be one of {', '.join(_WIDTH)}, got {dtype!r}")


def _require_format(format: str) -> None:
    if format not in get_args(Format):
        raise ConfigError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")


def _require_slots(pool: str, slots: int) -> None:
    if slots < 1:
        raise ConfigError(f"the {pool} pool needs at least 1 slot, got {slots}")
