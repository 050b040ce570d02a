"""Can this block be fused, and why not: the one place that patching, the documentation and `doctor` read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BlockAdapter:
    """One row of the model table: how a Transformers MoE block runs on the fused layer.

    Args:
        block: fully qualified class of the block, e.g. ``transformers.models.m.modeling_m.MMoE``.
        experts: fully qualified class of its routed experts.
        model_types: the ``config.model_type`` values whose models hold this block; documentation and `doctor` read it.
        forward: ``(block, fused, hidden_states, *args, **kwargs) -> Tensor``, the block's forward with the
            routed and shared experts replaced by one call ``fused(block, flat_hidden, top_k_index, top_k_weights)``,
            [N, D], [N, K], [N, K] -> [N, D]. It calls the block's own router as a module and returns what the native
            forward returns. ``fused`` returns routed plus shared expert in every case; the adapter adds nothing.
        shared: attribute of the block that holds the shared MLP (``gate_proj``, ``up_proj``, ``down_proj``), or None.
        shared_gate: attribute of the block that holds the Linear whose sigmoid scales the shared MLP, or None.
        swiglu_limit: attribute, of the experts and of the shared MLP alike, that holds the limit L of the clamped
            SwiGLU ``silu(gate.clamp(max=L)) * up.clamp(-L, L)`` that the experts' own ``_apply_gate`` computes; None
            for the plain SwiGLU of Transformers' default ``_apply_gate``.
    """

    block: str
    experts: str
    model_types: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    shared: str | None = None
    shared_gate: str | None = None
    swiglu_limit: str | None = None


def qualified_name(cls: type[Any]) -> str:
    """``module.QualName`` of a class, as the model table spells it."""
    return f"{cls.__module__}.{cls.__qualname__}"
