"""The int8 codec in torch operations, on any device: the contract in its shortest form."""

from typing import Literal

import torch


def scale_dtype(state_dtype: torch.dtype) -> torch.dtype:
    """The scale's type: the state's own, but fp32 for fp16, in which small scales vanish."""
    return torch.float32 if state_dtype == torch.float16 else state_dtype


def encode(state: torch.Tensor, *, k_axis: Literal[-1, -2]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises to int8 with one scale per k-channel, taken over the other of the last two axes.

    state: (..., d_v, d_k) with k_axis -1, (..., d_k, d_v) with k_axis -2. Returns q like state in int8, and
    scale (..., d_k). A channel with an infinity or a NaN gets scale NaN and q 0: such a state is refused.
    """
    v_axis = -3 - k_axis
    x = state.float()
    amax = x.abs().amax(dim=v_axis, keepdim=True)
    exact = amax.clamp(min=1e-8) / torch.full_like(amax, 127.0)
    scale = _keep_loads_finite(exact.to(scale_dtype(state.dtype)), state.dtype)
    scale = torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))
    q = (x / scale.float()).round().clamp(-127, 127)
    return q.nan_to_num(0.0).to(torch.int8), scale.squeeze(v_axis)


def _keep_loads_finite(scale: torch.Tensor, state_dtype: torch.dtype) -> torch.Tensor:
    """One step down where 127 scales overflow the state's type, as they do at its largest finite value."""
    overflows = (scale.float() * 127.0).to(state_dtype).isinf()
    return torch.where(overflows, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def decode(
    q: torch.Tensor, scale: torch.Tensor, *, k_axis: Literal[-1, -2], dtype: torch.dtype
) -> torch.Tensor:
    """The state in `dtype` that q (..., d_v, d_k) or (..., d_k, d_v) and scale (..., d_k) stand for."""
    return (q.float() * scale.float().unsqueeze(-3 - k_axis)).to(dtype)
