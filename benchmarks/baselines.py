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
        row = tl.load(inverse + token * K + k)  # below 0: no row
        value = tl.load(y + row * D + c, mask=tl.where(row >= 0, c, D) < D, other=0).to(tl.float32)
        total += tl.load(weight + token * K + k) * value
    tl.store(out + token * D + c, total.to(tl.bfloat16), mask=mask)


@triton.jit
def _dswiglu(
    dh,
    gate_up,
    weight,
    perm,
    d_gate_up,
    weighted_h,
    dot,
    I: tl.constexpr,  # noqa: E741
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < I
    g = tl.load(gate_up + row * 2 * I + c, mask=mask, other=0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * I + I + c, mask=mask, other=0).to(tl.float32)
    d = tl.load(dh + row * I + c, mask=mask, other=0).to(tl.float32)
    s = tl.sigmoid(g)
    h = g * s * u
    w = 1.0
    if HAS_WEIGHT:
        route = tl.load(perm + row)
        w = tl.load(weight + route)
        tl.store(dot + route, tl.sum(d * h))
    d = d * w
    tl.store(weighted_h + row * I + c, (w * h).to(tl.bfloat16), mask=mask)
    tl.store(d_gate_up + row * 2 * I + c, (d * u * (s + g * s * (1 - s))).to(tl.bfloat16), mask=mask)
    tl.store(d_gate_up + row * 2 * I + I + c, (d * g * s).to(tl.bfloat16), mask=mask)


def _block(width):
    return min(1024, triton.next_power_of_2(width))


class TritonGlue:
    """The kernels above as the functions of glue.TorchGlue."""

    @staticmethod
    def permute(x, index, divisor):
        m, d = index.numel(), x.shape[1]
        rows = x.new_empty(m, d)
        if m:
            _permute[(m, triton.cdiv(d, _block(d)))](x, index, rows, divisor, d, _block(d))
        return rows

    @staticmethod
    def swiglu(gate_up):
        m, i = gate_up.shape[0], gate_up.shape[1] // 2
        h = gate_up.new_empty(m, i)
        if m:
            _swiglu[(m, triton.cdiv(i, _block(i)))](gate_up, h, i, _block(i))
        return h

    @staticmethod
    def weighted_sum(y, row, weight, shared):
        (n, k), d = row.shape, y.shape[1]
        out = y.new_empty(n, d)
        if weight is None:
            weight = torch.ones(n, k, device=y.device)
        if n:
            _weighted_sum[(n, triton.cdiv(d, _block(d)))](
                y, row, weight, y if shared is None else shared, out, k, d, shared is not None, _block(d)
            )
        return out

    @staticmethod
    def dswiglu(dh, gate_up, weight=None, route=None):
        m, i = dh.shape
        d_gate_up, weighted = torch.empty_like(gate_up), torch.empty_like(dh)
        dots = None if weight is None else torch.zeros_like(weight)
        # Without weights the kernel touches none of these three.
        by_route = (dh, dh, dh) if weight is None else (weight, route, dots)
        if m:
            _dswiglu[(m,)](
                dh,
                gate_up,
                *by_route[:2],
                d_gate_up,
                weighted,
                by_route[2],
                i,
                weight is not None,
                triton.next_power_of_2(i),
                num_warps=8,
            )
        return d_gate_up, weighted, dots


class Composite:
    """Forward, and a backward written out with the same fusions; it keeps what the forward saved in `self.saved`."""

    def __init__(self, weights, topk):
        self.gate_up, self.down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)
        self.experts, self.topk, self.shared = weights.gate_up.shape[0], topk, weights.shared
        self.shared_gate_up = torch.cat(weights.shared[:2]).T if weights.shared else None
        self.ones = None

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
        shared = shared_gate_up = None
        if self.shared:
            s = self.shared[2].shape[1]
            hs = x.new_empty(n, s)
            shared_gate_up = x @ self.shared_gate_up
            _swiglu[(n, triton.cdiv(s, _block(s)))](shared_gate_up, hs, s, _block(s))
            shared = hs @ self.shared[2].T
        _weighted_sum[(n, triton.cdiv(d, _block(d)))](
            y, inverse, weight, shared if self.shared else y, out, self.topk, d, self.shared is not None, _block(d)
        )
        self.saved = x, weight, perm, inverse, offsets, rows, gate_up, shared_gate_up
        return out

    def backward(self, dout):
        """Gradients by the names of driver_backward.Backward.gradients; shared gate and up in one."""
        x, weight, perm, inverse, offsets, rows, gate_up, shared_gate_up = self.saved
        n, d = x.shape
        m, i = n * self.topk, self.down.shape[1]
        if self.ones is None:
            self.ones = torch.ones_like(weight)
        drows, weighted_h, d_gate_up = x.new_empty(m, d), x.new_empty(m, i), x.new_empty(m, 2 * i)
        d_weight, dx = torch.empty_like(weight), torch.empty_like(x)
        _permute[(m, triton.cdiv(d, _block(d)))](dout, perm, drows, self.topk, d, _block(d))
        dh = torch._grouped_mm(drows, self.down.transpose(1, 2), offs=offsets)
        _dswiglu[(m,)](
            dh, gate_up, weight, perm, d_gate_up, weighted_h, d_weight, i, True, triton.next_power_of_2(i), num_warps=8
        )
        grads = dict(
            d_weight=d_weight,
            dx=dx,
            d_down_proj=torch._grouped_mm(drows.T, weighted_h, offs=offsets),
            d_gate_up_proj=torch._grouped_mm(d_gate_up.T, rows, offs=offsets),
        )
        dx_rows = torch._grouped_mm(d_gate_up, self.gate_up.transpose(1, 2), offs=offsets)
        shared_dx = None
        if self.shared:
            s = self.shared[2].shape[1]
            hs, d_shared = x.new_empty(n, s), x.new_empty(n, 2 * s)
            _dswiglu[(n,)](
                dout @ self.shared[2],
                shared_gate_up,
                weight,
                perm,
                d_shared,
                hs,
                d_weight,
                s,
                False,
                triton.next_power_of_2(s),
                num_warps=8,
            )
            shared_dx = d_shared @ self.shared_gate_up.T
            grads |= dict(d_shared_gate_up=d_shared.T @ x, d_shared_down=dout.T @ hs)
        _weighted_sum[(n, triton.cdiv(d, _block(d)))](
            dx_rows,
            inverse,
            self.ones,
            dx_rows if shared_dx is None else shared_dx,
            dx,
            self.topk,
            d,
            shared_dx is not None,
            _block(d),
        )
        return grads


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
