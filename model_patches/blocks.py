"""The forwards the families' MoE blocks share: each calls the block's own router, then one fused layer.

`fused(block, flat_hidden [N, D], top_k_index [N, K], top_k_weights [N, K]) -> [N, D]` is the routed experts plus the
shared one. The router is called as a module, with the argument the native forward gives it: Transformers captures
router logits for the auxiliary loss with a forward hook on it, and FSDP gathers its weight in a pre-forward hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

FusedLayer = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def routed_by_gate(block: Any, fused: FusedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """`block.gate(hidden [B, T, D]) -> (logits, weights [N, K], ids [N, K])`: every block but DeepSeek-V4's.

    Args:
        block: the Transformers block; its router flattens the tokens itself.
        fused: the fused layer.
        hidden_states: [B, T, D].

    Returns:
        [B, T, D], the one tensor the native forward returns.
    """
    _, top_k_weights, top_k_index = block.gate(hidden_states)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    return fused(block, flat, top_k_index, top_k_weights).view(hidden_states.shape)


def routed_by_flat_gate(block: Any, fused: FusedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """As `routed_by_gate` for routers that are given [N, D]: the Qwen family."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, top_k_weights, top_k_index = block.gate(flat)
    return fused(block, flat, top_k_index, top_k_weights).view(hidden_states.shape)


def routed_by_hash_or_gate(
    block: Any, fused: FusedLayer, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """DeepSeek-V4: the first layers pick experts by a table of token ids, the others by their scores.

    Args:
        block: the Transformers block; `block.is_hash` says which router it holds.
        fused: the fused layer.
        hidden_states: [B, T, D].
        input_ids: [B, T]; read by hash layers only.

    Raises:
        ValueError: a hash layer without `input_ids`, as when a model is called with `inputs_embeds`.
    """
    if not block.is_hash:
        return routed_by_gate(block, fused, hidden_states)
    if input_ids is None:
        raise ValueError(
            "This layer picks its experts from a table of token ids and got input_ids=None: call the model with "
            "input_ids in place of inputs_embeds."
        )
    _, top_k_weights, top_k_index = block.gate(hidden_states, input_ids)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    return fused(block, flat, top_k_index, top_k_weights).view(hidden_states.shape)
