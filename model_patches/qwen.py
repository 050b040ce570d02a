"""Qwen: 2-MoE, 3-MoE, 3-Next, 3.5-MoE, 3-VL-MoE, 3-Omni thinker and talker.

A shared expert, where there is one, has its own width and is scaled by `sigmoid(shared_expert_gate(x))`.
"""

from __future__ import annotations

from typing import Any

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches.blocks import routed_by_flat_gate

_MODELS = "transformers.models"
_GATED_SHARED: dict[str, Any] = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}

ADAPTERS = (
    BlockAdapter(
        block=f"{_MODELS}.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        experts=f"{_MODELS}.qwen2_moe.modeling_qwen2_moe.Qwen2MoeExperts",
        model_types=("qwen2_moe",),
        forward=routed_by_flat_gate,
        **_GATED_SHARED,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
        model_types=("qwen3_moe",),
        forward=routed_by_flat_gate,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_next.modeling_qwen3_next.Qwen3NextExperts",
        model_types=("qwen3_next",),
        forward=routed_by_flat_gate,
        **_GATED_SHARED,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeExperts",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        forward=routed_by_flat_gate,
        **_GATED_SHARED,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextExperts",
        model_types=("qwen3_vl_moe",),
        forward=routed_by_flat_gate,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextExperts",
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        forward=routed_by_flat_gate,
    ),
    BlockAdapter(
        block=f"{_MODELS}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeTalkerTextSparseMoeBlock",
        experts=f"{_MODELS}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts",
        model_types=("qwen3_omni_moe",),
        forward=routed_by_flat_gate,
        **_GATED_SHARED,
    ),
)
