"""The layer as operators with autograd: schedule, forward, backward (paper, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .errors import timeouts
from .workspace import Workspace

TILE = 128  # rows of a row tile; minibatch and macrobatch sizes are multiples of it
WIDTH_STEP = 64
MAX_TOP_K = 16
_DTYPES = (torch.float32, torch.bfloat16)
# Row tiles that are signalled together. Fine enough that the first product starts early; on CPU nothing is gained from
# more, the signals being a cache line each.
_DEFAULT_MINIBATCH = 512
_DEFAULT_COMM_THREADS = 1


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
) -> Tensor:
    """One MoE layer: dispatch, shared and routed experts, combine, weighted sum. Differentiable; collective.

    Every rank of `workspace.group` calls it with its own tokens, as many as it has. The same inputs give the same bits
    on every run and for every `minibatch_size`, `macrobatch_size` and `*_comm_sms`; the output and the gradients of x
    and top_k_weights also for every EP size.

    Args:
        x: [N, D] float32 or bfloat16. N may be 0 and differs from rank to rank; D is a multiple of 64.
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
        fwd_comm_sms, bwd_comm_sms: communication threads.
        max_tokens_per_rank: most tokens any rank ever has; with it the ranks need not agree on counts.
        precision: None or "bf16"/"fp32", which must be x's: "mxfp8" is not built for this device.
        timeout_s: longest wait for another rank.

    Returns:
        [N, D] in x's dtype. Gradients of the experts' weights are sums over the tokens of all ranks, those of `shared`
        and `shared_scale` over this rank's. Nothing is divided.

    Raises:
        ValueError: an input the kernel can not serve; nothing was launched.
        MoKTimeoutError: a rank did not come within `timeout_s`.
    """
    _check(x, top_k_index, top_k_weights, gate_up_proj, down_proj, shared, shared_scale, precision)
    minibatch = _rows("minibatch_size", minibatch_size, _DEFAULT_MINIBATCH)
    forward_comm = _threads("fwd_comm_sms", fwd_comm_sms)
    backward_comm = _threads("bwd_comm_sms", bwd_comm_sms)
    if timeout_s is not None:
        workspace.timeout_s = timeout_s
    experts, top_k, hidden = gate_up_proj.shape[0], top_k_index.shape[1], x.shape[1]

    handle = workspace.handle(x.shape[0], top_k, hidden, x.dtype, max_tokens_per_rank)
    ring = _rows("macrobatch_size", macrobatch_size, _balanced(workspace.tokens * top_k, experts))
    masked = (top_k_index < 0) | (top_k_index >= experts * workspace.size)
    ids = top_k_index.masked_fill(masked, -1).to(torch.int32).contiguous()
    table, plan = schedule(handle, ids, workspace, experts, hidden, x.dtype)

    weights = top_k_weights.float().contiguous()
    scale = None if shared_scale is None else shared_scale.reshape(-1).float().contiguous()
    gate, up, down = shared if shared is not None else (None, None, None)
    tensors = (x, weights, gate_up_proj, down_proj, gate, up, down, scale)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    with timeouts(workspace.rank, workspace.timeout_s):
        return ops.forward(
            handle,
            table,
            plan,
            x.contiguous(),
            ids,
            weights,
            gate_up_proj.contiguous(),
            down_proj.contiguous(),
            _contiguous(gate),
            _contiguous(up),
            _contiguous(down),
            scale,
            swiglu_limit,
            ring,
            minibatch,
            forward_comm,
            backward_comm,
            save,
        )[0]


def schedule(
    handle: Tensor, ids: Tensor, workspace: Workspace, experts: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Where each route lands in the local row order (Algorithm 1); collective.

    Args:
        handle: what `Workspace.handle` returned.
        ids: int32 [N, K] global expert ids, -1 for a masked route.
        workspace: the workspace the handle is of.
        experts: L, of this rank.
        hidden: D.
        dtype: of the hidden states.

    Returns:
        table: int64, the source of each row: rank << 32 | route, or -1 for a padding row.
        plan: int64 [2L + 1 + R]: the first row tile of each expert and the number of tiles, the rows of each expert,
            the number of row tiles of each rank.
    """
    capacity = ops.table_rows(workspace.size, int(handle[2]), ids.shape[1], experts)
    with timeouts(workspace.rank, workspace.timeout_s):
        return ops.schedule(handle, ids, experts, hidden, dtype.itemsize, capacity, workspace.size)


def _balanced(routes: int, experts: int) -> int:
    """Rows of a ring that holds a balanced load, each expert's last tile included."""
    return -(-routes // TILE) * TILE + TILE * experts


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# -- autograd --------------------------------------------------------------------------------------------------------


_SAVED = 12  # handle, table, plan, x, ids, weights, gate_up, down, shared gate, up and down, scale
_WANTED = (3, 5, 6, 7, 8, 9, 10, 11)  # those of them that may have a gradient, in the order of backward's results


def _setup_context(ctx, inputs, output):
    limit, _, minibatch, _, comm, save = inputs[_SAVED:]
    if save:
        ctx.save_for_backward(*inputs[:_SAVED], *output[1:])
    ctx.limit, ctx.minibatch, ctx.comm = limit, minibatch, comm
    # Only `out` has a gradient; without this the engine would fill rings of zeros for the others.
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, *_):
    no_grads = (None,) * (_SAVED + 6)
    if dout is None:
        return no_grads
    handle, table, plan, *rest = ctx.saved_tensors
    needs = sum(1 << bit for bit, i in enumerate(_WANTED) if ctx.needs_input_grad[i])
    with timeouts(int(handle[0]), int(handle[3]) / 1e9):
        results = ops.backward(handle, table, plan, dout.contiguous(), *rest, ctx.limit, ctx.minibatch, ctx.comm, needs)
    grads = list(no_grads)
    for bit, i in enumerate(_WANTED):
        if needs >> bit & 1:
            grads[i] = results[bit]
    return tuple(grads)


torch.library.register_autograd(add_op_namespace_prefix("forward"), _backward, setup_context=_setup_context)


@torch.library.register_fake(add_op_namespace_prefix("schedule"))
def _(handle, ids, experts, hidden, element, capacity, ranks):
    return ids.new_empty(capacity, dtype=torch.int64), ids.new_empty(2 * experts + 1 + ranks, dtype=torch.int64)


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
    save,
):
    rows = ring if save else 0
    tokens, width = (x.shape[0], 2 * gate.shape[0]) if save and gate is not None else (0, 0)
    return (
        torch.empty_like(x),
        x.new_empty(rows, x.shape[1]),
        x.new_empty(rows, gate_up.shape[1]),
        x.new_empty(tokens, width),
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
    needs,
):
    like = [x, weights, gate_up, down, gate, up, shared_down, scale]
    return tuple(torch.empty_like(t) if needs >> bit & 1 else x.new_empty(0) for bit, t in enumerate(like))


# -- refusals --------------------------------------------------------------------------------------------------------


def _check(x, top_k_index, top_k_weights, gate_up, down, shared, shared_scale, precision) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [N, D]: flatten batch and sequence first.")
    tokens, hidden = x.shape
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}; the CPU kernel serves float32 and bfloat16. Cast the model to one of them.")
    if precision not in (None, {torch.float32: "fp32", torch.bfloat16: "bf16"}[x.dtype]):
        raise ValueError(f"precision={precision!r} does not fit hidden states in {x.dtype}: leave it at None.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != tokens or top_k_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"top_k_index is {top_k_index.dtype} {tuple(top_k_index.shape)}; it must be int32 or int64 [{tokens}, K]."
        )
    if not 1 <= top_k_index.shape[1] <= MAX_TOP_K:
        raise ValueError(f"K is {top_k_index.shape[1]}; a token may have 1 to {MAX_TOP_K} routes.")
    if top_k_weights.shape != top_k_index.shape or not top_k_weights.is_floating_point():
        raise ValueError(
            f"top_k_weights is {top_k_weights.dtype} {tuple(top_k_weights.shape)}; it must be floating point and of"
            f" top_k_index's shape {tuple(top_k_index.shape)}."
        )
    if gate_up.dim() != 3 or gate_up.shape[2] != hidden or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up_proj has shape {tuple(gate_up.shape)}; it must be [L, 2I, {hidden}].")
    experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    if tuple(down.shape) != (experts, hidden, width):
        raise ValueError(f"down_proj has shape {tuple(down.shape)}; it must be [{experts}, {hidden}, {width}].")
    weights = {"gate_up_proj": gate_up, "down_proj": down}
    widths = {"D": hidden, "I": width}
    if shared is not None:
        gate, up, shared_down = shared
        widths["S"] = gate.shape[0]
        if tuple(gate.shape) != (widths["S"], hidden) or up.shape != gate.shape:
            raise ValueError(
                f"the shared expert's gate and up have shapes {tuple(gate.shape)} and {tuple(up.shape)}; both must be"
                f" [S, {hidden}]."
            )
        if tuple(shared_down.shape) != (hidden, widths["S"]):
            raise ValueError(
                f"the shared expert's down has shape {tuple(shared_down.shape)}; it must be [{hidden}, S]."
            )
        weights.update(zip(("shared gate", "shared up", "shared down"), shared, strict=True))
    if shared_scale is not None and (shared is None or shared_scale.numel() != tokens):
        raise ValueError(
            f"shared_scale has {shared_scale.numel()} values for {tokens} tokens"
            + ("." if shared is not None else ", but there is no shared expert.")
        )
    for name, value in widths.items():
        if value < WIDTH_STEP or value % WIDTH_STEP:
            raise ValueError(
                f"{name} is {value}; the kernel's tiles need a multiple of {WIDTH_STEP}. Leave this layer native, or"
                " pad the width in the checkpoint."
            )
    for name, tensor in weights.items():
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and x is {x.dtype}: cast one to the other.")
    for name, tensor in {"top_k_index": top_k_index, "top_k_weights": top_k_weights, **weights}.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}: move them to one device.")


def _rows(name: str, value: int | None, default: int) -> int:
    if value is None:
        return max(default, TILE)
    if value < TILE or value % TILE:
        raise ValueError(f"{name}={value}; it must be a positive multiple of {TILE} rows.")
    return value


def _threads(name: str, value: int | None) -> int:
    if value is None:
        return _DEFAULT_COMM_THREADS
    if not 1 <= value <= 64:
        raise ValueError(f"{name}={value}; on CPU it is the number of communication threads, 1 to 64.")
    return value
