"""DeepSeek: V2, V3, V3.2, V4 (score and hash routing, clamped SwiGLU). Kimi-K2 and Kimi-K2.5 hold V3's blocks."""

from __future__ import annotations

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches.blocks import routed_by_gate, routed_by_hash_or_gate

_MODELS = "transformers.models"

ADAPTERS = (
    BlockAdapter(
        block=f"{_MODELS}.deepseek_v2.modeling_deepseek_v2.DeepseekV2Moe",
        experts=f"{_MODELS}.deepseek_v2.modeling_deepseek_v2.DeepseekV2Experts",
        model_types=("deepseek_v2",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE",
        experts=f"{_MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
        model_types=("deepseek_v3", "kimi_k2", "kimi_k25"),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.deepseek_v32.modeling_deepseek_v32.DeepseekV32MoE",
        experts=f"{_MODELS}.deepseek_v32.modeling_deepseek_v32.DeepseekV32Experts",
        model_types=("deepseek_v32",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
    BlockAdapter(
        block=f"{_MODELS}.deepseek_v4.modeling_deepseek_v4.DeepseekV4SparseMoeBlock",
        experts=f"{_MODELS}.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts",
        model_types=("deepseek_v4",),
        forward=routed_by_hash_or_gate,
        shared="shared_experts",
        swiglu_limit="limit",
    ),
)
