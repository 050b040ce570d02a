"""What the composites do between their products: on a GPU the fused kernels of triton_glue.py.

On CPU the same in plain torch, so that tests reach the exchange around it; nothing is measured on that.
"""

import torch
import torch.nn.functional as F


class TorchGlue:
    @staticmethod
    def permute(x, index, divisor):
        """x[index // divisor], row by row."""
        return x[index // divisor]

    @staticmethod
    def swiglu(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def weighted_sum(y, row, weight, shared):
        """shared[n] + sum over k of weight[n, k] * y[row[n, k]]; without weights 1, row -1 adds nothing."""
        factor = (row >= 0).to(y.dtype) if weight is None else weight.to(y.dtype) * (row >= 0)
        out = (y[row.clamp(min=0)] * factor.unsqueeze(-1)).sum(1)
        return out if shared is None else out + shared

    @staticmethod
    def dswiglu(dh, gate_up, weight=None, route=None):
        """Gradient of gate and up; h scaled by its row's weight; <dh, h> at the row's route in `weight`'s shape.

        weight[route[row]] is the row's weight; without weights 1, and no third result.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        s = gate.sigmoid()
        h, dots = gate * s * up, None
        d, weighted = dh, h
        if weight is not None:
            dots = torch.zeros_like(weight)
            dots.view(-1)[route] = (dh * h).sum(-1).to(weight.dtype)
            factor = weight.view(-1)[route].to(dh.dtype).unsqueeze(-1)
            d, weighted = dh * factor, h * factor
        return torch.cat([d * up * (s + gate * s * (1 - s)), d * gate * s], dim=-1), weighted, dots


def glue_of(device):
    if torch.device(device).type == "cpu":
        return TorchGlue
    from triton_glue import TritonGlue  # Triton is not there without a GPU

    return TritonGlue
