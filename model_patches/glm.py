"""GLM: 4-MoE, 4V-MoE, 4-MoE-Lite, MoE-DSA (GLM-5.x), 5-Next (clamped SwiGLU)."""

from __future__ import annotations

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches.blocks import routed_by_gate

_MODELS = "transformers.models"

ADAPTERS = (
    BlockAdapter(
        block=f"{_MODELS}.glm4_moe.modeling_glm4_moe.Glm4MoeMoE",
        experts=f"{_MODELS}.glm4_moe.modeling_glm4_moe.Glm4MoeExperts",
        model_types=("glm4_moe",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextMoE",
        experts=f"{_MODELS}.glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextExperts",
        model_types=("glm4v_moe",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.glm4_moe_lite.modeling_glm4_moe_lite.Glm4MoeLiteMoE",
        experts=f"{_MODELS}.glm4_moe_lite.modeling_glm4_moe_lite.Glm4MoeLiteExperts",
        model_types=("glm4_moe_lite",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaMoE",
        experts=f"{_MODELS}.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaExperts",
        model_types=("glm_moe_dsa",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.glm5_next.modeling_glm5_next.Glm5NextTextMoE",
        experts=f"{_MODELS}.glm5_next.modeling_glm5_next.Glm5NextTextExperts",
        model_types=("glm5_next",),
        forward=routed_by_gate,
        shared="shared_experts",
        swiglu_limit="swiglu_limit",
    ),
)
