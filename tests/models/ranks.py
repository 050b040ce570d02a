"""What runs inside the ranks of a test: load native and patched models, and the inputs each rank gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import mok_hf
from mok_hf.conversions import register_conversions
from tests.checkpoints import KINDS, auto_class, batch
from tests.models.compare import in_fp64, relative_errors, step

# Tokens of each sequence on ranks 0 to 3: never the same on two ranks, and never a multiple of anything.
LENGTHS = ([13, 7], [5], [21], [1, 2])


def rank_batch(kind: str, rank: int, seed: int = 0, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The batch of one rank; ranks differ in token count and in ids."""
    return batch(kind, LENGTHS[rank], seed=10 * seed + rank, **kwargs)


def native(
    kind: str, path: Path, ep_size: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> PreTrainedModel:
    """The unpatched model: in one process, or under FSDP2 and native expert parallelism (`all_to_all`)."""
    register_conversions()  # Transformers alone loads Kimi-Linear and GLM-5-Next wrong when it shards
    if dtype == torch.float64:
        kwargs["experts_implementation"] = "eager"  # grouped_mm takes no fp64
    if dist.is_initialized():
        kwargs["distributed_config"] = DistributedConfig(
            fsdp_size=dist.get_world_size(), ep_size=ep_size, ep_implementation="all_to_all"
        )
    return auto_class(kind).from_pretrained(path, dtype=dtype, **kwargs).train()


def own_errors(kind: str, path: Path, inputs: dict[str, torch.Tensor], ep_size: int = 1) -> dict[str, float]:
    """How far the unpatched fp32 model is from fp64, per tensor: the largest of three orders of summation."""
    exact = step(native(kind, path, ep_size, dtype=torch.float64), in_fp64(inputs))
    errors: dict[str, float] = {}
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        model = native(kind, path, ep_size, experts_implementation=implementation)
        for name, error in relative_errors(step(model, inputs), exact).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def patched(
    kind: str, path: Path, ep_size: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> PreTrainedModel:
    """The model on the fused layer; every MoE block of it, or this raises."""
    model = mok_hf.from_pretrained(auto_class(kind), path, ep_size=ep_size, dtype=dtype, **kwargs)
    assert isinstance(model, PreTrainedModel)
    return model.train()


def moe_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The MoE blocks of a model, patched or not, in order."""
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")]


def takes_ids(kind: str) -> bool:
    """Whether the model is called with `input_ids`."""
    return not KINDS[kind].embeds
