"""Why a whole model or launch cannot run on the fused layer: the value seen, the limit, the way forward."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mok_hf.capabilities import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

_TRUE = ("1", "true", "yes", "on", "y", "t")


def check_launch() -> None:
    """Refuses launches under accelerate's FSDP plugin.

    Raises:
        UnsupportedError: ACCELERATE_USE_FSDP is set.
    """
    value = os.environ.get("ACCELERATE_USE_FSDP", "")
    if value.lower() in _TRUE:
        raise UnsupportedError(
            f"ACCELERATE_USE_FSDP={value}: accelerate's FSDP plugin shards the model a second time, and with "
            "RAM-efficient loading it overwrites every rank's experts with rank 0's. Launch as a plain multi-GPU job "
            "(`accelerate launch --multi_gpu`, no --use_fsdp); mok_hf.from_pretrained shards with FSDP2 itself."
        )


def check_distributed(distributed_config: Any) -> None:
    """Refuses settings of a DistributedConfig that are not served.

    Raises:
        UnsupportedError: tp_size > 1 or fsdp_cpu_offload.
    """
    if distributed_config is None or isinstance(distributed_config, dict):
        return  # a dict is what a saved config.json remembers of another run
    if distributed_config.tp_size > 1:
        raise UnsupportedError(tensor_parallel(distributed_config.tp_size))
    if distributed_config.fsdp_cpu_offload:
        raise UnsupportedError(
            "fsdp_cpu_offload=True: parameters would arrive on the CPU while the layer runs on the accelerator; "
            "this is not tested and not served. Set fsdp_cpu_offload=False; a larger fsdp_size or ep_size saves memory."
        )


def tensor_parallel(size: int) -> str:
    """The reason for refusing tensor parallelism of this size."""
    return (
        f"tp_size={size}: the ranks of a tensor-parallel group hold the same batch, so expert parallelism would count "
        f"each token {size} times; the limit is tp_size=1. Use mok_hf.distributed_config(ep_size=...), which is "
        "DistributedConfig(fsdp_size=WORLD_SIZE, ep_size=..., ep_implementation='mok')."
    )


def uneven_experts(experts: int, ep_size: int) -> str:
    """The reason for refusing a number of experts that the ranks cannot share evenly."""
    divisors = [size for size in range(1, min(experts, 1024) + 1) if experts % size == 0]
    return (
        f"{experts} experts cannot be spread evenly over ep_size={ep_size} ranks; every rank must own the same number. "
        f"Choose an ep_size that divides {experts}: {', '.join(map(str, divisors))}."
    )


def check_device_map(device_map: Any, source: str) -> None:
    """Refuses a model spread over devices or offloaded by `device_map`.

    Args:
        device_map: what from_pretrained was given or what a loaded model carries as `hf_device_map`.
        source: how the message names it.

    Raises:
        UnsupportedError: more than one device, offload, or an automatic map.
    """
    split = device_map in ("auto", "balanced", "balanced_low_0", "sequential")
    devices: list[str] = []
    if isinstance(device_map, dict):
        devices = sorted({str(device) for device in device_map.values()})
        split = len(devices) > 1 or devices == ["disk"]
    if split:
        seen = f"{source} spreads the model over {', '.join(devices)}" if devices else f"{source}={device_map!r}"
        raise UnsupportedError(
            f"{seen}: a model split by device_map moves tensors between devices in hooks around each layer; the limit "
            "is one device per process. Load without device_map; to use several GPUs, start one process per GPU and "
            "pass ep_size to mok_hf.from_pretrained."
        )


def check_model(model: nn.Module, ep_size: int) -> None:
    """Refuses models that may not be patched as a whole.

    Args:
        model: the model, or a wrapper around it.
        ep_size: ranks its experts are spread over.

    Raises:
        UnsupportedError: with the value seen, the limit and the way forward.
    """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    check_launch()
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{where} is compiled ({type(module).__name__}): a compiled graph keeps calling the code it was traced "
                "from, so patching would have no effect. Call mok_hf.patch_model on the model before torch.compile is "
                "applied; compiling a patched model is not supported by this version."
            )
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"{where} is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters. Load with "
                "mok_hf.from_pretrained, which shards with FSDP2."
            )
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and ep_size > 1:
            raise UnsupportedError(ddp_over_experts(ep_size))
        check_device_map(getattr(module, "hf_device_map", None), "device_map")
        config = getattr(module, "config", None)
        check_distributed(getattr(config, "distributed_config", None))
        _check_conversions(module, config)


def ddp_over_experts(ep_size: int) -> str:
    """The reason for refusing DDP around a model whose ranks own different experts."""
    return (
        f"DistributedDataParallel around a model whose experts are spread over {ep_size} ranks: each rank owns "
        "different experts, and DDP overwrites them with rank 0's when it is built and averages gradients that must "
        "not be averaged. Drop the DDP wrapper (FSDP2 already reduces the gradients), or load with ep_size=1."
    )


def _check_conversions(module: nn.Module, config: Any) -> None:
    """Refuses weights that Transformers put in the wrong place, or left at random, while it loaded them."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

    from mok_hf.conversions import conversion_problem

    if not isinstance(module, PreTrainedModel):
        return
    problem = conversion_problem(module)
    if problem is not None:
        raise UnsupportedError(problem)
    if getattr(config, "model_type", None) != "kimi_k2" or getattr(module, "_mok_experts_loaded", False):
        return
    # Only from_pretrained sets this; without a converter in it no per-expert tensor found its place.
    used = getattr(module, "_weight_conversions", ())
    if used != () and not any(isinstance(transform, WeightConverter) for transform in used or ()):
        raise UnsupportedError(
            "model_type='kimi_k2' was loaded without its checkpoint conversion, so from_pretrained found none of the "
            "per-expert tensors and re-initialised every expert at random. Load it with mok_hf.from_pretrained, which "
            "registers the conversion and checks that no expert is missing."
        )
