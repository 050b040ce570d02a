"""Weight gradients added by the backward to the buffers that autograd, or Megatron-LM, would add them to.

The buffer is the parameter's `main_grad` where it has one, else its `grad`; bf16 or fp32, of the weight's shape. The
gradient is rounded once to the weight's dtype, and then added: the bits are those of returning it. Autograd gets None
for it, so the parameter's node runs without a gradient: what sits behind that node (DistributedDataParallel, Megatron's
reduction) sees the buffer as ever. The gradient is returned as ever, to be added by autograd:

- at the first backward, while there is no `grad` yet;
- to `torch.autograd.grad`, which must not change `grad`;
- to a parameter with hooks (`register_hook`, `register_post_accumulate_grad_hook`), which are for the gradient;
- to a weight that was computed from a parameter, other than by autocast or `DTensor.to_local`;
- for a buffer that the kernel can not add to: not contiguous, unaligned, of another dtype or device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

# What hands a gradient on unchanged but for its dtype. The layer's buffers may be fp32 whatever the gradient is.
_PASSES = ("ToCopyBackward0", "_ToTorchTensorBackward")


def buffers(ctx: Any, inputs: tuple[Tensor | None, ...], places: tuple[int, ...]) -> dict[int, Tensor]:
    """The buffers that there are for weights among the inputs of the node `ctx`, whose backward is running, by place.

    Args:
        ctx: the node.
        inputs: its first inputs, tensors or None.
        places: which of them are the weights.
    """
    found = {}
    for place in places:
        edge = sum(tensor is not None for tensor in inputs[:place])  # a node has one for each tensor
        buffer = _buffer(ctx.next_functions[edge][0], inputs[place])
        if buffer is not None:
            found[place] = buffer
    return found


def added(buffers: Iterable[Tensor]) -> None:
    """To be called when the kernel that adds to `buffers` is launched."""
    for buffer in buffers:
        increment_version(buffer)
        if buffer.is_cuda:
            # Autograd has the stream of backward() wait where a gradient reaches a leaf: here none does.
            event, device = torch.cuda.current_stream(buffer.device).record_event(), buffer.device
            torch.autograd.Variable._execution_engine.queue_callback(partial(_wait_for, event, device))


def _wait_for(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)


def _buffer(node: Any, weight: Tensor) -> Tensor | None:
    while node is not None and node.name() in _PASSES:
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None)
    if parameter is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return None
    try:
        if not torch._C._will_engine_execute_node(node):
            return None
    except RuntimeError:  # torch.autograd.grad: the gradient itself is asked for
        return None
    main = getattr(parameter, "main_grad", None)
    buffer = parameter.grad if main is None else main
    if hasattr(buffer, "placements"):
        if getattr(parameter, "placements", None) != buffer.placements:
            return None
        buffer = buffer._local_tensor
    if not _serves(buffer, weight):
        return None
    if main is not None and hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True  # as Megatron-LM's own fused layers say it
    return buffer


def _serves(buffer: Tensor | None, weight: Tensor) -> bool:
    return (
        type(buffer) is Tensor
        and buffer.dtype in (weight.dtype, torch.float32)
        and buffer.device == weight.device
        and buffer.shape == weight.shape
        and not buffer.requires_grad
        and buffer.layout == torch.strided
        and buffer.is_contiguous()
        and buffer.data_ptr() % 16 == 0
    )
