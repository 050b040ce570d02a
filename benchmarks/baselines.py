"""What the fused layer is measured against, at one rank.

`composite`     torch._grouped_mm with fused Triton permute, SwiGLU and weighted sum, replayed as a CUDA graph: no host
                sync, no launch gaps.
`transformers`  transformers' own grouped_mm_experts_forward, eager, as its users run it; the shared expert as a plain
                MLP.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def _permute(x, perm, out, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(perm + row) // K
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * D + c, tl.load(x + token * D + c, mask=c < D), mask=c < D)


@triton.jit
def _swiglu(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_up + row * 2 * I + c, mask=c < I).to(tl.float32)
    u = tl.load(gate_up + row * 2 * I + I + c, mask=c < I).to(tl.float32)
    tl.store(out + row * I + c, (g * tl.sigmoid(g) * u).to(tl.bfloat16), mask=c < I)


@triton.jit
def _weighted_sum(
    y, inverse, weight, shared, out, K: tl.constexpr, D: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + token * D + c, mask=mask).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k)
        total += tl.load(weight + token * K + k) * tl.load(y + row * D + c, mask=mask).to(tl.float32)
    tl.store(out + token * D + c, total.to(tl.bfloat16), mask=mask)


def _block(width):
    return min(1024, triton.next_power_of_2(width))


class Composite:
    def __init__(self, weights, topk):
        self.gate_up, self.down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)
        self.experts, self.topk, self.shared = weights.gate_up.shape[0], topk, weights.shared
        self.shared_gate_up = torch.cat(weights.shared[:2]).T if weights.shared else None

    def __call__(self, x, ids, weight):
        n, d = x.shape
        m, i = n * self.topk, self.down.shape[1]
        expert, perm = torch.sort(ids.flatten().to(torch.int16), stable=True)
        inverse = torch.empty_like(perm).scatter_(0, perm, torch.arange(m, device=x.device))
        offsets = torch.searchsorted(
            expert, torch.arange(self.experts, device=x.device, dtype=torch.int16), right=True
        ).to(torch.int32)
        rows, h, out = x.new_empty(m, d), x.new_empty(m, i), torch.empty_like(x)
        _permute[(m, triton.cdiv(d, _block(d)))](x, perm, rows, self.topk, d, _block(d))
        gate_up = torch._grouped_mm(rows, self.gate_up, offs=offsets)
        _swiglu[(m, triton.cdiv(i, _block(i)))](gate_up, h, i, _block(i))
        y = torch._grouped_mm(h, self.down, offs=offsets)
        shared = None
        if self.shared:
            s = self.shared[2].shape[1]
            hs = x.new_empty(n, s)
            _swiglu[(n, triton.cdiv(s, _block(s)))](x @ self.shared_gate_up, hs, s, _block(s))
            shared = hs @ self.shared[2].T
        _weighted_sum[(n, triton.cdiv(d, _block(d)))](
            y, inverse, weight, shared if self.shared else y, out, self.topk, d, self.shared is not None, _block(d)
        )
        return out


class Transformers:
    def __init__(self, weights, topk):
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

    def __call__(self, x, ids, weight):
        out = self.forward(self.module, x, ids, weight)
        if self.shared:
            gate, up, down = self.shared
            out = out + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return out
