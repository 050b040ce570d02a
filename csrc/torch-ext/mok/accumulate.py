"""Weight gradients added by the backward to the buffers that autograd, or Megatron-LM, would add them to.

The buffer is the parameter's `main_grad` where it has one, else its `grad`; bf16 or fp32, of the weight's shape. The
gradient is rounded once to the weight's dtype, and then added: the bits are those of returning it, if nothing else in
the graph uses the weight (autograd sums several gradients first) and but for -0.0 in the buffers of experts without
tokens, which stays. Autograd gets None for it, so the parameter's node runs without a gradient: what sits behind that
node (DistributedDataParallel, Megatron's reduction without overlap_grad_reduce, which asserts a gradient) sees the
buffer as ever. What sits before it sees None: prehooks of the node; hooks and retain_grad of a cast or local tensor of
the parameter. The gradient is returned as ever, to be added by autograd:

- at the first backward, while there is no `grad` yet;
- to `torch.autograd.grad`, which must not change `grad`;
- to a parameter with hooks (`register_hook`, `register_post_accumulate_grad_hook`), which are for the gradient;
- to a weight that was computed from a parameter, other than by autocast or `DTensor.to_local`, whose `grad_placements`
  must be the parameter's placements;
- for a buffer that the kernel can not add to: not contiguous, unaligned, of another dtype or device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


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
        node = ctx.next_functions[edge][0]
        while node is not None and _passes(node):
            node = node.next_functions[0][0]
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            buffer = _buffer(node, inputs[place])
            if buffer is not None:
                found[place] = buffer
    return found


def added(buffers: Iterable[Tensor]) -> None:
    """To be called when the kernel that adds to `buffers` is launched."""
    for buffer in buffers:
        increment_version(buffer)


def _passes(node: Any) -> bool:
    """Whether it hands a gradient on unchanged but for its dtype, which need not be the buffer's."""
    if node.name() != "_ToTorchTensorBackward":
        return node.name() == "ToCopyBackward0"
    try:
        return node.grad_placements is None or tuple(node.grad_placements) == node.dtensor_spec.placements
    except AttributeError:  # another torch
        return False


def _buffer(node: Any, weight: Tensor) -> Tensor | None:
    parameter = node.variable
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
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
    _before(node, parameter, buffer, main is not None and hasattr(parameter, "grad_added_to_main_grad"))
    return buffer


def _before(node: Any, parameter: Tensor, buffer: Tensor, flagged: bool) -> None:
    """Has the parameter's node do, before its hooks run, what an arriving gradient would bring about."""
    task, device = torch._C._current_graph_task_id(), buffer.device
    stream = torch.cuda.current_stream(device) if buffer.is_cuda else None

    def arrive(_: Any) -> None:
        handle.remove()
        if stream is not None:
            # The node runs on the stream that was current when it was made, long ago where DDP holds it. The engine has
            # that stream wait for gradients, not for None, and backward()'s stream wait for that one only.
            torch.cuda.current_stream(device).wait_stream(stream)
        if flagged and task == torch._C._current_graph_task_id():  # not left behind by a backward that failed
            parameter.grad_added_to_main_grad = True  # as Megatron-LM's own fused layers say it

    handle = node.register_prehook(arrive)


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
