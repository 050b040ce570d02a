"""The model table: which Transformers MoE blocks run on the fused layer, one file a family."""

from __future__ import annotations

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches import deepseek, glm, kimi, qwen

ADAPTERS: dict[str, BlockAdapter] = {
    adapter.block: adapter for family in (deepseek, qwen, glm, kimi) for adapter in family.ADAPTERS
}
