"""The routed experts of one process as a layer for `kernels.kernelize`.

A layer of the hub has no state of its own: `forward` runs with the replaced module as `self` and takes its weights. The
expert-parallel layer needs a process group, which such a module does not have; that is what `mok_hf` is for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import checks, functional
from ._ops import add_op_namespace_prefix, ops
from .errors import timeouts
from .workspace import workspace


class MoKExperts(nn.Module):
    """Replaces the `forward` of an experts module as Transformers builds them: every expert here, SwiGLU, no bias.

    The module has `gate_up_proj` [E, 2I, D] (gate rows first) and `down_proj` [E, D, I], and may have `act_fn` (SiLU)
    and a clamp for SwiGLU, `swiglu_limit` or `limit`. What its own forward computes beyond that can not be seen from
    here: kernelize only modules that compute this.
    """

    has_backward = True
    can_torch_compile = True

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum, differentiable.

        Args:
            hidden_states: [N, D] float32 or bfloat16 (on CUDA bfloat16), the weights' dtype; D and I are multiples of
                64.
            top_k_index: [N, K] int32 or int64; below 0 or from E on, a route is masked.
            top_k_weights: [N, K] floating point.

        Returns:
            [N, D] in hidden_states' dtype.

        Raises:
            ValueError: the module computes something else, or its input can not be served.
        """
        activation = getattr(self, "act_fn", None)
        if activation is not None and type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            raise ValueError(f"the activation is {type(activation).__name__}; the kernel computes SwiGLU, with SiLU.")
        if getattr(self, "gate_up_proj_bias", None) is not None or getattr(self, "is_transposed", False):
            raise ValueError("the experts have biases or transposed weights; the kernel takes [E, 2I, D] without bias.")
        weights = (self.gate_up_proj, self.down_proj)
        inputs = (hidden_states, top_k_weights, *weights)
        save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        limit = getattr(self, "swiglu_limit", getattr(self, "limit", None))
        return _operator("experts")(hidden_states, top_k_index, top_k_weights, *weights, limit, save)[0]


# One operator from the routes to the sum: `functional.moe` reads the workspace's state in Python, which torch.compile
# can not trace. On CPU the schedule is computed again in the backward, since its size depends on that state too.


def _operator(name: str):
    return getattr(ops, name).default


@torch.library.custom_op(
    add_op_namespace_prefix("experts"),
    mutates_args=(),
    schema="(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, float? limit, bool save)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _experts(x, ids, weights, gate_up, down, limit, save):
    checks.layer(x, ids, weights, gate_up, down, None, None, limit, None)
    shared = workspace(None, x.device)
    arguments = _arguments(shared, x, ids, weights, gate_up, down)
    minibatch, comm, _ = _settings(x)
    with timeouts(shared.rank, shared.timeout_s):
        out, ring_x, ring_gate_up, _, schedule = ops.forward(
            *arguments,
            limit,
            _ring(x, ids, gate_up),
            minibatch,
            comm,
            comm,
            x.shape[0],
            _schedule_bytes(x, ids, gate_up),
            save,
        )
    return out, ring_x, ring_gate_up, schedule


@torch.library.custom_op(
    add_op_namespace_prefix("experts_backward"),
    mutates_args=(),
    schema="(Tensor dout, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor ring_x,"
    " Tensor ring_gate_up, Tensor schedule, float? limit, int needs) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _experts_backward(dout, x, ids, weights, gate_up, down, ring_x, ring_gate_up, schedule, limit, needs):
    shared = workspace(None, x.device)
    handle, table, plan, *rest = _arguments(shared, x, ids, weights, gate_up, down)
    rings = (ring_x, ring_gate_up, x.new_empty(0, 0))
    with timeouts(shared.rank, shared.timeout_s):
        dx, d_weights, d_gate_up, d_down, *_ = ops.backward(
            handle,
            schedule if table is None else table,
            plan,
            functional._ready(dout),
            *rest,
            *rings,
            limit,
            *_settings(x),
            needs,
        )
    return dx, d_weights.to(weights.dtype), d_gate_up, d_down


def _settings(x):
    """minibatch, communication and tokens, as both operators take them."""
    device = x.device.type
    return functional._DEFAULT_MINIBATCH[device], functional._DEFAULT_COMM[device], x.shape[0]


def _arguments(shared, x, ids, weights, gate_up, down):
    """What the operators take first: handle, schedule, inputs; without a shared expert."""
    experts = gate_up.shape[0]
    handle = shared.handle(x.shape[0], ids.shape[1], x.shape[1], x.dtype, None)
    routes, table, plan = functional._routes(handle, ids, shared, experts, x.shape[1], x.dtype)
    tensors = map(functional._ready, (x, routes, weights.float(), gate_up, down))
    return handle, table, plan, *tensors, None, None, None, None


def _ring(x, ids, gate_up):
    """Rows of the ring: all routes, each expert's last tile included, so that nothing is computed twice."""
    return functional._balanced(ids.shape[0] * ids.shape[1], gate_up.shape[0], x.device.type, 1)


def _schedule_bytes(x, ids, gate_up):
    return functional._schedule_bytes(x.device.type, ids.shape[0] * ids.shape[1], x, gate_up, None)


@_experts.register_fake
def _(x, ids, weights, gate_up, down, limit, save):
    rows, num_bytes = (_ring(x, ids, gate_up), _schedule_bytes(x, ids, gate_up)) if save else (0, 0)
    rings = x.new_empty(rows, x.shape[1]), x.new_empty(rows, gate_up.shape[1])
    return torch.empty_like(x), *rings, x.new_empty(num_bytes, dtype=torch.uint8)


@_experts_backward.register_fake
def _(dout, x, ids, weights, gate_up, down, ring_x, ring_gate_up, schedule, limit, needs):
    like = (x, weights, gate_up, down)
    return tuple(torch.empty_like(t) if needs >> bit & 1 else t.new_empty(0) for bit, t in enumerate(like))


def _setup_context(ctx, inputs, output):
    *tensors, limit, save = inputs
    if save:
        ctx.save_for_backward(*tensors, *output[1:])
    ctx.limit = limit
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, *_):
    wanted = (0, 2, 3, 4)  # x, weights, gate_up, down
    grads = [None] * 7
    if dout is not None:
        needs = sum(1 << bit for bit, i in enumerate(wanted) if ctx.needs_input_grad[i])
        results = _operator("experts_backward")(dout, *ctx.saved_tensors, ctx.limit, needs)
        for bit, i in enumerate(wanted):
            if needs >> bit & 1:
                grads[i] = results[bit]
    return tuple(grads)


_experts.register_autograd(_backward, setup_context=_setup_context)
