"""What the fused layer is measured against, at one rank.

`composite`     torch._grouped_mm with fused Triton permute, SwiGLU and weighted sum, replayed as a CUDA graph: no host
                sync, no launch gaps.
`transformers`  transformers' own grouped_mm_experts_forward, eager, as its users run it; the shared expert as a plain
                MLP.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from glue import glue_of


class Products:
    """The products and the shared expert, on rows that lie sorted by expert."""

    def __init__(self, weights):
        self.gate_up, self.down, self.shared = weights.gate_up, weights.down, weights.shared
        self.shared_gate_up = torch.cat(weights.shared[:2]).T if weights.shared else None
        self.glue = glue_of(weights.down.device)

    def experts(self, rows, offsets):
        gate_up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=offsets)
        return gate_up, torch._grouped_mm(self.glue.swiglu(gate_up), self.down.transpose(1, 2), offs=offsets)

    def experts_dgrad(self, drows, gate_up, offsets, weight, route):
        """Gradients of the rows and of gate and up, h scaled by its row's weight, gradients of the weights."""
        dh = torch._grouped_mm(drows, self.down, offs=offsets)
        d_gate_up, weighted_h, dots = self.glue.dswiglu(dh, gate_up, weight, route)
        return torch._grouped_mm(d_gate_up, self.gate_up, offs=offsets), d_gate_up, weighted_h, dots

    def experts_wgrad(self, drows, rows, d_gate_up, weighted_h, offsets):
        return (
            torch._grouped_mm(d_gate_up.T, rows, offs=offsets),
            torch._grouped_mm(drows.T, weighted_h, offs=offsets),
        )

    def shared_forward(self, x):
        if not self.shared:
            return None, None
        gate_up = x @ self.shared_gate_up
        return gate_up, self.glue.swiglu(gate_up) @ self.shared[2].T

    def shared_backward(self, x, dout, gate_up):
        """Gradient of x and those of gate, up and down."""
        if not self.shared:
            return None, ()
        d_gate_up, h, _ = self.glue.dswiglu(dout @ self.shared[2], gate_up)
        return d_gate_up @ self.shared_gate_up.T, (*(d_gate_up.T @ x).chunk(2), dout.T @ h)


class Composite(Products):
    """All experts on this rank: nothing is exchanged. It keeps what its backward reads in `self.saved`."""

    def __init__(self, weights):
        super().__init__(weights)
        self.ones = None

    def __call__(self, s):
        experts, device = len(self.gate_up), s.x.device
        expert, perm = torch.sort(s.ids.flatten().to(torch.int16), stable=True)
        inverse = torch.empty_like(perm).scatter_(0, perm, torch.arange(len(perm), device=device)).view_as(s.ids)
        every = torch.arange(experts, device=device, dtype=torch.int16)
        offsets = torch.searchsorted(expert, every, right=True).to(torch.int32)
        rows = self.glue.permute(s.x, perm, s.ids.shape[1])
        gate_up, y = self.experts(rows, offsets)
        shared_gate_up, shared = self.shared_forward(s.x)
        self.saved = perm, inverse, offsets, rows, gate_up, shared_gate_up
        return self.glue.weighted_sum(y, inverse, s.weight, shared)

    def backward(self, s):
        """Gradients of x, route weights, gate_up, down and the shared gate, up and down."""
        perm, inverse, offsets, rows, gate_up, shared_gate_up = self.saved
        if self.ones is None:
            self.ones = torch.ones_like(s.weight)
        drows = self.glue.permute(s.dout, perm, s.ids.shape[1])
        dh = torch._grouped_mm(drows, self.down, offs=offsets)
        d_gate_up, weighted_h, d_weight = self.glue.dswiglu(dh, gate_up, s.weight, perm)
        d_down_proj = torch._grouped_mm(drows.T, weighted_h, offs=offsets)
        d_gate_up_proj = torch._grouped_mm(d_gate_up.T, rows, offs=offsets)
        dx_rows = torch._grouped_mm(d_gate_up, self.gate_up, offs=offsets)
        shared_dx, shared = self.shared_backward(s.x, s.dout, shared_gate_up)
        dx = self.glue.weighted_sum(dx_rows, inverse, self.ones, shared_dx)
        return dx, d_weight, d_gate_up_proj, d_down_proj, *shared


class Transformers:
    def __init__(self, weights):
        from transformers.integrations.moe import grouped_mm_experts_forward

        self.forward, self.shared = grouped_mm_experts_forward, weights.shared
        experts = weights.gate_up.shape[0]
        self.module = SimpleNamespace(
            gate_up_proj=weights.gate_up,
            down_proj=weights.down,
            num_experts=experts,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            is_concatenated=True,
            has_post_expert_norm=False,
            _is_expert_parallel=False,
            act_fn=F.silu,
            config=None,
            training=False,
            _apply_gate=lambda v: (lambda g, u: F.silu(g) * u)(*v.chunk(2, dim=-1)),
        )

    def __call__(self, s):
        out = self.forward(self.module, s.x, s.ids, s.weight)
        if self.shared:
            gate, up, down = self.shared
            out = out + F.linear(F.silu(F.linear(s.x, gate)) * F.linear(s.x, up), down)
        return out
