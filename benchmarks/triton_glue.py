"""What the composites have between their products, in Triton: permutation, SwiGLU, its backward, weighted sum."""

import torch
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
        dots = None
        if weight is not None:  # a route without a row here keeps its 0
            dots = torch.empty_like(weight) if m == weight.numel() else torch.zeros_like(weight)
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
