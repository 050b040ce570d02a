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
from tests.checkpoints import auto_class, batch
from tests.models.compare import gradients, in_fp64, relative_errors

# Tokens of each sequence on ranks 0 to 3: never the same on two ranks, and never a multiple of anything.
LENGTHS = ([13, 7], [5], [21], [1, 2])


def rank_batch(kind: str, rank: int, seed: int = 0, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The batch of one rank; ranks differ in token count and in ids."""
    return batch(kind, LENGTHS[rank], seed=10 * seed + rank, **kwargs)


def native(kind: str, path: Path, ep_size: int | None = None, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """The unpatched model: in this process alone, or with `ep_size` under FSDP2 and native expert parallelism."""
    register_conversions()  # Transformers alone loads Kimi-Linear and GLM-5-Next wrong when it shards
    if ep_size is not None:
        kwargs["distributed_config"] = DistributedConfig(
            fsdp_size=dist.get_world_size(), ep_size=ep_size, ep_implementation="all_to_all"
        )
    return auto_class(kind).from_pretrained(path, dtype=dtype, **kwargs).train()


def own_errors(kind: str, path: Path, batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """How far the unpatched fp32 model is from fp64, per gradient of the mean loss over the batches.

    In one process, the largest of three orders of summation.
    """

    def mean_step(inputs: list[dict[str, torch.Tensor]], **kwargs: Any) -> dict[str, torch.Tensor]:
        model = native(kind, path, **kwargs)
        for one in inputs:
            (model(**one).loss / len(inputs)).backward()
        return {f"grad {name}": gradient for name, gradient in gradients(model).items()}

    # grouped_mm, the default, takes no fp64.
    exact = mean_step(list(map(in_fp64, batches)), dtype=torch.float64, experts_implementation="eager")
    errors: dict[str, float] = {}
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        for name, error in relative_errors(mean_step(batches, experts_implementation=implementation), exact).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def patched(kind: str, path: Path, ep_size: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """The model on the fused layer; every MoE block of it, or this raises."""
    model = mok_hf.from_pretrained(auto_class(kind), path, ep_size=ep_size, dtype=dtype, **kwargs)
    assert isinstance(model, PreTrainedModel)
    return model.train()


def moe_blocks(model: torch.nn.Module) -> list[Any]:
    """The MoE blocks of a model, patched or not, in order."""
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")]
