"""What the kernel can not serve is refused here, before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from .workspace import Workspace

TILE = 128  # rows of a row tile; minibatch and macrobatch sizes are multiples of it
WIDTH_STEP = 64
MAX_TOP_K = 16
MAX_EXPERTS = 3071  # of one rank on CUDA; four counts of each fit the 48 KB of shared memory the schedule has
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def layer(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    shared_scale: Tensor | None,
    swiglu_limit: float | None,
    precision: str | None,
) -> None:
    """Raises ValueError for tensors that do not make a layer of the kernel; `functional.moe` says what they are."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [N, D]: flatten batch and sequence first.")
    tokens, hidden = x.shape
    if x.device.type not in _DTYPES:
        raise ValueError(f"x is on {x.device}; the kernel runs on {' and '.join(_DTYPES)}.")
    if x.dtype not in _DTYPES[x.device.type]:
        if x.is_cuda:
            raise ValueError(
                f"x is {x.dtype}; the CUDA kernel serves bfloat16. Load with dtype=torch.bfloat16, or run under"
                " torch.autocast('cuda', dtype=torch.bfloat16)."
            )
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
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit={swiglu_limit}; it must be above 0, or None for no clamp.")
    if x.is_cuda and not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"this rank has {experts} experts; the CUDA kernel serves up to {MAX_EXPERTS}: use more ranks."
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


def rows(name: str, value: int | None, least: int, default: int) -> int:
    """`value`, or the default for None. Raises ValueError if it is no multiple of a tile, or less than `least`."""
    if value is None:
        return default
    if value < least or value % TILE:
        raise ValueError(f"{name}={value}; it must be a multiple of {TILE} rows, at least {least}.")
    return value


def comm(name: str, value: int | None, workspace: Workspace, default: int) -> int:
    """CTAs or threads that communicate, `value` or the default for None. Raises ValueError if there are not as many."""
    if value is None:
        return default
    if workspace.device.type == "cuda":
        if value == 0:
            return 0
        most = workspace.sms // 2 * 2 - 2  # CTAs come in clusters of two, one of which computes
        if not 0 < value <= most:
            raise ValueError(
                f"{name}={value}; {workspace.device} has {workspace.sms} SMs for this group, and two of them at least"
                f" compute: set 0 to {most}, or leave it at None, so that every SM communicates beside its products."
            )
        return value + value % 2
    if not 1 <= value <= 64:
        raise ValueError(f"{name}={value}; on CPU it is the number of communication threads, 1 to 64.")
    return value
