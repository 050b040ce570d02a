"""The oracle: one MoE layer in plain PyTorch. No kernel, no schedule, no cleverness."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def swiglu(gate: Tensor, up: Tensor, swiglu_limit: float | None) -> Tensor:
    """silu(gate) * up, both clamped first when there is a limit (gate from above only)."""
    if swiglu_limit is not None:
        gate = gate.clamp(max=swiglu_limit)
        up = up.clamp(min=-swiglu_limit, max=swiglu_limit)
    return silu(gate) * up


def moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    shared_scale: Tensor | None = None,
    swiglu_limit: float | None = None,
) -> Tensor:
    """The layer with all experts present, differentiable; arguments as `mok.moe`, in any floating-point dtype.

    Args:
        x: [N, D] hidden states.
        top_k_index: [N, K] expert of each route; below 0 or from E on, the route is masked.
        top_k_weights: [N, K].
        gate_up_proj: [E, 2I, D], gate rows first.
        down_proj: [E, D, I].
        shared: gate [S, D], up [S, D] and down [D, S] of the shared expert.
        shared_scale: [N] or [N, 1] factor of the shared expert's output.
        swiglu_limit: clamp of SwiGLU.

    Returns:
        [N, D] in x's dtype.
    """
    out = torch.zeros_like(x)
    if shared is not None:
        gate, up, down = shared
        value = linear(swiglu(linear(x, gate), linear(x, up), swiglu_limit), down)
        out = out + (value if shared_scale is None else value * shared_scale.reshape(-1, 1).to(x.dtype))
    for expert in range(gate_up_proj.shape[0]):
        token, slot = torch.where(top_k_index == expert)
        gate, up = linear(x[token], gate_up_proj[expert]).chunk(2, dim=-1)
        value = linear(swiglu(gate, up, swiglu_limit), down_proj[expert])
        out = out.index_add(0, token, (value * top_k_weights[token, slot].unsqueeze(-1)).to(x.dtype))
    return out
