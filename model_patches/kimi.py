"""Kimi: Kimi-Linear. Kimi-K2 and Kimi-K2.5 hold DeepSeek-V3 blocks; their row is in deepseek.py."""

from __future__ import annotations

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches.blocks import routed_by_gate

ADAPTERS = (
    BlockAdapter(
        block="transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearMoE",
        experts="transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearExperts",
        model_types=("kimi_linear",),
        forward=routed_by_gate,
        shared="shared_experts",
    ),
)
