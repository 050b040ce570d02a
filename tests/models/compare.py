"""Comparing two models tensor by tensor: relative errors that a NaN, a missing or a misshapen tensor cannot pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

FP32_LIMIT = 2e-6
BF16_LIMIT = 1e-2
_EXPERTS = re.compile(r"\.(experts|shared_experts?)\.")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; infinite if anything is not finite or shapes differ.

    Where `expected` is all zero only zeros have an error of 0.
    """
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return math.inf
    difference = (actual.double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    if not math.isfinite(difference) or not math.isfinite(scale):
        return math.inf
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def relative_errors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`relative_error` per name; a name on one side only is an infinite error."""
    return {
        name: relative_error(actual[name], expected[name]) if name in actual and name in expected else math.inf
        for name in sorted(actual.keys() | expected.keys())
    }


def worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and whose it is."""
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


def beyond_fp32(errors: Mapping[str, float], own_errors: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """The tensors whose error against the unpatched fp32 model is too large; empty is right.

    The limit is FP32_LIMIT. A gradient of anything but experts may exceed it by cancellation, up to three times the
    distance of the unpatched fp32 model itself from fp64: the hyper-connections of DeepSeek-V4 and GLM-5-Next mix
    residual streams that are equal in the first layer, so that little is left of the gradients of their scales
    (unpatched fp32 is up to 8e-4 from fp64 there), the decay rates of linear attention sum over all tokens, and
    renormalised routing weights sum to a constant.

    Args:
        errors: relative errors against the unpatched fp32 model.
        own_errors: gives that model's own errors against fp64; called only if something exceeds FP32_LIMIT.
    """
    late = {name: error for name, error in errors.items() if not error <= FP32_LIMIT}
    if not late:
        return {}
    own = own_errors()
    return {
        name: error
        for name, error in late.items()
        if not name.startswith("grad ") or _EXPERTS.search(name) or not error <= 3 * own[name]
    }


def whole(tensor: Any) -> torch.Tensor:
    """The full tensor of a DTensor (a collective), or a plain tensor as it is; detached copy."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient there is, whole, under the parameter's name. A collective for sharded models."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def poison_freed_memory() -> None:
    """Leaves NaN in freed blocks of all sizes a tiny model uses, so that a read before a write shows."""
    blocks = [torch.full((2**power,), math.nan) for power in range(4, 19) for _ in range(8)]
    del blocks


def step(model: Any, inputs: Mapping[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Forward and backward of the model's own loss, freed memory poisoned before each.

    Returns:
        "logits" [B, T, vocabulary], "loss", and "grad <name>" of every parameter that got a gradient.
    """
    poison_freed_memory()
    output = model(**inputs, **kwargs)
    poison_freed_memory()
    output.loss.backward()
    results = {"logits": output.logits.detach().clone(), "loss": output.loss.detach().clone()}
    return results | {f"grad {name}": gradient for name, gradient in gradients(model).items()}


def in_fp64(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs with floating-point tensors in fp64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
