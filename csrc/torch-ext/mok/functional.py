"""The layer as operators with autograd: schedule, forward, backward (paper, section 3)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from . import accumulate, checks
from ._ops import add_op_namespace_prefix, ops
from .checks import TILE
from .errors import timeouts
from .workspace import Workspace, leaving

# Rows that are signalled together. On CPU fine enough that the first product starts early; nothing is gained from more,
# the signals being a cache line each. On CUDA 0 is what makes two waves of gate+up tiles on the device at hand.
_DEFAULT_MINIBATCH = {"cpu": 512, "cuda": 0}
# On CUDA every CTA communicates beside its products, unless some are set aside to pull first.
_DEFAULT_COMM = {"cpu": 1, "cuda": 0}
_LEAST_RING = {"cpu": TILE, "cuda": 2 * TILE}


def moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    workspace: Workspace,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    shared_scale: Tensor | None = None,
    swiglu_limit: float | None = None,
    minibatch_size: int | None = None,
    macrobatch_size: int | None = None,
    fwd_comm_sms: int | None = None,
    bwd_comm_sms: int | None = None,
    max_tokens_per_rank: int | None = None,
    precision: str | None = None,
    timeout_s: float | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> Tensor:
    """One MoE layer: dispatch, shared and routed experts, combine, weighted sum. Differentiable; collective.

    Every rank of `workspace.group` calls it with its own tokens, as many as it has. The same inputs give the same bits
    on every run and for every `minibatch_size`, `macrobatch_size` and `*_comm_sms`; the output and the gradients of x
    and top_k_weights also for every EP size.

    Args:
        x: [N, D] float32 or bfloat16, on CUDA bfloat16. N may be 0 and differs from rank to rank; D is a multiple of
            64.
        top_k_index: [N, K] int32 or int64 global expert ids, K up to 16, repeats allowed. Below 0 or from E on a route
            is masked: it adds nothing and its weight's gradient is 0.
        top_k_weights: [N, K] floating point; its gradient has its dtype.
        gate_up_proj: [L, 2I, D] of this rank's experts (global ids rank*L .. rank*L + L-1), gate rows first, x's dtype.
        down_proj: [L, D, I].
        workspace: buffers of the expert-parallel group; E = L * workspace.size.
        shared: gate [S, D], up [S, D] and down [D, S] of the shared expert, which every token of this rank passes.
        shared_scale: [N] or [N, 1] factor of the shared expert's output.
        swiglu_limit: clamps gate to at most this and up to +- this before SwiGLU.
        minibatch_size: rows (a multiple of 128) whose arrival is signalled together; paper, section 3.2.
        macrobatch_size: rows (a multiple of 128) of the ring that activations live in; paper, section 3.3. What does
            not fit is computed again in the backward. Default: all rows of a balanced load.
        fwd_comm_sms, bwd_comm_sms: on CPU, communication threads. On CUDA, SMs that only pull rows from the other ranks
            until there are none left to pull, and compute then; they come in pairs, so an odd number counts as the next
            even one, and two at least must compute from the start. Default 0: every SM pulls beside its products.
        max_tokens_per_rank: most tokens any rank ever has; with it the ranks need not agree on counts.
        precision: None or "bf16"/"fp32", which must be x's: "mxfp8" is not built for this device.
        timeout_s: longest wait for another rank.
        fuse_wgrad_accumulation: the backward adds the gradients of gate_up_proj and down_proj to the buffers that are
            there (accumulate.py) instead of returning them to be added. The bits are the same where the weights have no
            other use in the graph; a failed call leaves the buffers unusable.

    Returns:
        [N, D] in x's dtype. Gradients of the experts' weights are sums over the tokens of all ranks, those of `shared`
        and `shared_scale` over this rank's. Nothing is divided.

    Raises:
        ValueError: an input the kernel can not serve; nothing was launched.
        MoKTimeoutError: a rank did not come within `timeout_s`; on CUDA raised by a later call, or by `mok.check`, and
            logged: the failed call's results are NaN.
    """
    device = x.device.type
    try:
        checks.layer(
            x, top_k_index, top_k_weights, gate_up_proj, down_proj, shared, shared_scale, swiglu_limit, precision
        )
        if x.device != workspace.device:
            raise ValueError(f"x is on {x.device} and the workspace for {workspace.device}: make one for x's device.")
        minibatch = checks.rows("minibatch_size", minibatch_size, TILE, _DEFAULT_MINIBATCH[device])
        ring = checks.rows("macrobatch_size", macrobatch_size, _LEAST_RING[device], 0)
        forward_comm = checks.comm("fwd_comm_sms", fwd_comm_sms, workspace, _DEFAULT_COMM[device])
        backward_comm = checks.comm("bwd_comm_sms", bwd_comm_sms, workspace, _DEFAULT_COMM[device])
    except ValueError:
        workspace.leave()  # the other ranks would wait for this one
        raise
    if timeout_s is not None:
        workspace.timeout_s = timeout_s
    experts, top_k, hidden = gate_up_proj.shape[0], top_k_index.shape[1], x.shape[1]
    gate, up, down = shared if shared is not None else (None, None, None)
    tensors = (x, top_k_weights, gate_up_proj, down_proj, gate, up, down, shared_scale)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    handle = workspace.handle(x.shape[0], top_k, hidden, x.dtype, max_tokens_per_rank)
    ring = ring or _balanced(workspace.tokens * top_k, experts, device, workspace.size)
    ids, table, plan = _routes(handle, top_k_index, workspace, experts, hidden, x.dtype)
    routes = workspace.size * workspace.most_tokens * top_k
    layer = _AccumulatingLayer if fuse_wgrad_accumulation else _Layer
    run = layer.apply if save else layer.forward
    with timeouts(workspace.rank, workspace.timeout_s):
        return run(
            handle,
            table,
            plan,
            *map(_ready, (x, ids, top_k_weights.float(), gate_up_proj, down_proj, gate, up, down)),
            None if shared_scale is None else _ready(shared_scale.reshape(-1).float()),
            swiglu_limit,
            ring,
            minibatch,
            forward_comm,
            backward_comm,
            workspace.most_tokens,
            _schedule_bytes(device, routes, x, gate_up_proj, gate),
            save,
        )[0]


def _routes(
    handle: Tensor, top_k_index: Tensor, workspace: Workspace, experts: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Expert ids as `ops.forward` takes them, and the schedule: on CUDA both are the operator's own work."""
    if top_k_index.is_cuda:
        return top_k_index, None, None
    masked = (top_k_index < 0) | (top_k_index >= experts * workspace.size)
    ids = top_k_index.masked_fill(masked, -1).to(torch.int32).contiguous()
    return ids, *schedule(handle, ids, workspace, experts, hidden, dtype)


def schedule(
    handle: Tensor, ids: Tensor, workspace: Workspace, experts: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Where each route lands in the local row order (Algorithm 1), on CPU; collective.

    On CUDA the schedule is part of the forward, between the barriers that it has anyway.

    Args:
        handle: what `Workspace.handle` returned.
        ids: int32 [N, K] global expert ids, -1 for a masked route.
        workspace: the workspace the handle is of.
        experts: L, of this rank.
        hidden: D.
        dtype: of the hidden states.

    Returns:
        table: int64, the source of each row: rank << 32 | route, or -1 for a padding row.
        plan: int64 [2L + 1]: the first row tile of each expert and the number of tiles, the rows of each expert.

    Raises:
        ValueError: ids are on CUDA.
    """
    if ids.is_cuda:
        raise ValueError("on CUDA the schedule is not a call of its own: moe builds it between its barriers.")
    capacity = ops.table_rows(workspace.size, workspace.most_tokens, ids.shape[1], experts)
    with timeouts(workspace.rank, workspace.timeout_s):
        return ops.schedule(handle, ids, experts, hidden, dtype.itemsize, capacity)


def _balanced(routes: int, experts: int, device: str, ranks: int) -> int:
    """Rows of a ring that holds a balanced load, each expert's last tile included.

    One rank's holds every load, and then on CUDA an expert begins at the next 64 rows (csrc/cuda/layout.cuh).
    """
    last = TILE // 2 if device == "cuda" and ranks == 1 else TILE
    return -(-(routes + last * experts) // TILE) * TILE + _LEAST_RING[device] - TILE


def _schedule_bytes(device: str, routes: int, x: Tensor, gate_up: Tensor, gate: Tensor | None) -> int:
    """Bytes that hold a CUDA schedule (csrc/cuda/layout.cuh) of `routes` routes of all ranks, whatever the routing.

    Eight bytes for each row, and for each task: a column tile of a row tile of each of the two products. Twelve more
    for each row tile.
    """
    if device != "cuda":
        return 0
    experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, x.shape[1]
    tiles = routes // TILE + experts
    down_columns = -(-hidden // 256)
    tasks = tiles * (-(-width // 128) + down_columns)
    if gate is not None:
        tasks += -(-x.shape[0] // TILE) * (-(-gate.shape[0] // 128) + down_columns)
    return 8 * (tiles * TILE + tasks) + 12 * tiles + 16 * experts + 4096


def _ready(tensor: Tensor | None) -> Tensor | None:
    """Contiguous, and on a CUDA device at an address that its copy engine takes."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


# -- autograd --------------------------------------------------------------------------------------------------------


_SAVED = 12  # handle, table, plan, x, ids, weights, gate_up, down, shared gate, up and down, scale
_WEIGHTS = (6, 7)  # those of them that are large
_WANTED = (3, 5, 6, 7, 8, 9, 10, 11)  # those of them that may have a gradient, in the order of backward's results


def _setup_context(ctx, inputs, output):
    limit, _, minibatch, _, comm, max_tokens, _, save = inputs[_SAVED:]
    if save:
        ctx.save_for_backward(*inputs[:_SAVED], *output[1:])
    ctx.settings = (limit, minibatch, comm, max_tokens)
    # Only `out` has a gradient; without this the engine would fill rings of zeros for the others.
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, *_, traced=True, accumulates=False):
    no_grads = (None,) * (_SAVED + 8)
    if dout is None:
        return no_grads
    saved = ctx.saved_tensors
    handle, table, plan, *rest, schedule = saved
    table = schedule if table is None else table
    needs = sum(1 << bit for bit, i in enumerate(_WANTED) if ctx.needs_input_grad[i])
    buffers = accumulate.buffers(ctx, saved[:_SAVED], _WEIGHTS) if accumulates else {}
    with timeouts(int(handle[0]), int(handle[3]) / 1e9), leaving(handle):
        sums = map(buffers.get, _WEIGHTS)
        # If no other backward will read what the forward saved, this one may write over it.
        last = not traced and not torch._C._autograd._get_current_graph_task_keep_graph()
        reused = rest[-3:] if last else ()
        results = ops.backward(handle, table, plan, _ready(dout), *rest, *ctx.settings, needs, *sums, *reused)
    accumulate.added(buffers.values())
    for tensor in reused:
        increment_version(tensor)  # for a backward that comes nevertheless, after a hook that raised
    grads = list(no_grads)
    for bit, i in enumerate(_WANTED):
        if needs >> bit & 1 and i not in buffers:
            grads[i] = results[bit]
    return tuple(grads)


torch.library.register_autograd(add_op_namespace_prefix("forward"), _backward, setup_context=_setup_context)


class _Layer(torch.autograd.Function):
    """`ops.forward` with its autograd, without what the registered one does to serve tracing: 100 to 300 us a call."""

    @staticmethod
    def forward(*inputs):
        with leaving(inputs[0]):
            return ops.forward(*inputs)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(once_differentiable(partial(_backward, traced=False)))


class _AccumulatingLayer(_Layer):
    """With the experts' gradients added to their buffers, which only the nodes of a graph that autograd runs have."""

    backward = staticmethod(once_differentiable(partial(_backward, traced=False, accumulates=True)))


@torch.library.register_fake(add_op_namespace_prefix("schedule"))
def _(handle, ids, experts, hidden, element, capacity):
    return ids.new_empty(capacity, dtype=torch.int64), ids.new_empty(2 * experts + 1, dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("forward"))
def _(
    handle,
    table,
    plan,
    x,
    ids,
    weights,
    gate_up,
    down,
    gate,
    up,
    shared_down,
    scale,
    limit,
    ring,
    minibatch,
    forward_comm,
    backward_comm,
    max_tokens,
    schedule_bytes,
    save,
):
    rows = ring if save else 0
    tokens, width = (x.shape[0], 2 * gate.shape[0]) if save and gate is not None else (0, 0)
    return (
        torch.empty_like(x),
        x.new_empty(rows, x.shape[1]),
        x.new_empty(rows, gate_up.shape[1]),
        x.new_empty(tokens, width),
        x.new_empty(schedule_bytes if save and x.device.type == "cuda" else 0, dtype=torch.uint8),
    )


@torch.library.register_fake(add_op_namespace_prefix("backward"))
def _(
    handle,
    table,
    plan,
    dout,
    x,
    ids,
    weights,
    gate_up,
    down,
    gate,
    up,
    shared_down,
    scale,
    ring_x,
    ring_gate_up,
    shared_gate_up,
    limit,
    minibatch,
    comm,
    max_tokens,
    needs,
    gate_up_buffer=None,
    down_buffer=None,
    reused_x=None,
    reused_gate_up=None,
    reused_shared_gate_up=None,
):
    like = [x, weights, gate_up, down, gate, up, shared_down, scale]
    needs &= ~((gate_up_buffer is not None) << 2 | (down_buffer is not None) << 3)
    return tuple(torch.empty_like(t) if needs >> bit & 1 else x.new_empty(0) for bit, t in enumerate(like))
