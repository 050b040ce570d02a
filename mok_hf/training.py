"""Bare Accelerate loops around a model that Transformers sharded: prepare it, save its training state, resume.

`Accelerator.prepare(model)` refuses a model that mixes sharded and plain parameters, and `Accelerator.save_state` would
write rank 0's experts for everyone. The three functions here stand in for the Accelerator's methods of those names; the
rest of a loop (`backward`, `clip_grad_norm_`, data loaders, mixed precision) stays as it is.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mok_hf.capabilities import UnsupportedError
from mok_hf.refusals import check_launch, ddp_over_experts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

_STATE_FILE = "training_state.json"


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> tuple[Any, ...]:
    """As `accelerator.prepare(model, *others)`, for a model that Transformers may have sharded.

    A sharded model (loaded with `ep_size` or `fsdp_size` above 1) already places its parameters and reduces its
    gradients: it gets the accelerator's mixed precision and no second wrapper. Parameters that were added to it
    afterwards, such as LoRA adapters, are outside that sharding: rank 0's values are broadcast here and their gradients
    are averaged over all ranks during backward. A model that is not sharded is prepared as Accelerate does, which
    replicates it with DDP when there are several processes.

    Args:
        accelerator: of a plain multi-process launch, without the FSDP, DeepSpeed or Megatron-LM plugin.
        model: a model of Transformers, patched or not, or a PEFT model around one.
        others: optimizers, data loaders and schedulers, for `accelerator.prepare`.

    Returns:
        The prepared objects, in the order given.

    Raises:
        UnsupportedError: a launch plugin of Accelerate would shard the model a second time, or the ranks hold different
            experts that DDP would overwrite.
    """
    _check_launch(accelerator)
    if is_sharded(model):
        _replicate_unsharded_parameters(model)
        model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    else:
        if accelerator.num_processes > 1:
            _check_replicable(model, accelerator.num_processes)
        model = accelerator.prepare_model(model)
    if not others:
        return (model,)
    prepared = accelerator.prepare(*others)
    return (model, *(prepared if len(others) > 1 else (prepared,)))


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write what a bit-exact resume needs: parameters, optimizer, scheduler, random states, `progress`.

    Every rank calls it, with an `output_dir` that all ranks see. Sharded parameters and their optimizer state are
    written by each rank for its own shard and can be loaded at another number of ranks or another `ep_size`. Around
    frozen sharded parameters (LoRA) only the adapters are written. The checkpoint appears under its name once it is
    complete, and replaces an earlier one there.

    Args:
        output_dir: folder to create; may exist only if an earlier `save_state` wrote it.
        model, optimizer, scheduler: as `prepare` returned them.
        progress: what the loop needs to go on (step, epoch), as JSON; `load_state` returns it.

    Raises:
        FileExistsError: `output_dir` exists and is no checkpoint of this function.
        ValueError: adapters are trained together with sharded parameters.
    """
    target = Path(output_dir)
    if target.exists() and not (target / _STATE_FILE).is_file():
        raise FileExistsError(f"{target} exists and was not written by mok_hf.save_state: choose another folder.")
    partial = target.with_name(target.name + ".incomplete")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()

    module, torch_optimizer = accelerator.unwrap_model(model), _unwrap(optimizer)
    distributed = _trains_shards(module)
    if distributed:
        from transformers.distributed.checkpoint import save_optimizer_distributed

        module.save_pretrained(partial / "model", distributed_checkpoint=True)
        save_optimizer_distributed(module, torch_optimizer, str(partial / "optimizer"))
    elif accelerator.is_main_process:
        torch.save(_plain_state(module), partial / "model.pt")
        torch.save(torch_optimizer.state_dict(), partial / "optimizer.pt")
    torch.save(_random_states(), partial / f"random_states_{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        state = {
            "world_size": accelerator.num_processes,
            "distributed": distributed,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "progress": dict(progress or {}),
        }
        (partial / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    accelerator.wait_for_everyone()


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
) -> dict[str, Any]:
    """Load what `save_state` wrote into a prepared model, optimizer and scheduler; every rank calls it.

    At the number of ranks it was saved with, training goes on bit for bit. At another number the same parameters and
    optimizer state are distributed anew, and each rank keeps the random state it has.

    Returns:
        The `progress` given to `save_state`.

    Raises:
        FileNotFoundError: `input_dir` holds no complete checkpoint.
        ValueError: the checkpoint has a scheduler and none is given, or the reverse; or it misses a trained parameter.
    """
    source = Path(input_dir)
    if not (source / _STATE_FILE).is_file():
        raise FileNotFoundError(
            f"{source} holds no complete training state ({_STATE_FILE} is missing): name a folder that "
            "mok_hf.save_state finished writing."
        )
    state = json.loads((source / _STATE_FILE).read_text())
    if (state["scheduler"] is None) != (scheduler is None):
        saved, given = ("without", "one") if state["scheduler"] is None else ("with", "none")
        raise ValueError(f"{source} was saved {saved} a scheduler and {given} was given to load_state.")

    module, torch_optimizer = accelerator.unwrap_model(model), _unwrap(optimizer)
    if state["distributed"]:
        from transformers.distributed.checkpoint import _load_model_checkpoint_distributed, load_optimizer_distributed

        _load_model_checkpoint_distributed(module, source / "model")
        load_optimizer_distributed(module, torch_optimizer, str(source / "optimizer"))
    else:
        _load_plain_state(module, torch.load(source / "model.pt", map_location="cpu"), source)
        torch_optimizer.load_state_dict(torch.load(source / "optimizer.pt", map_location="cpu"))
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])

    if state["world_size"] == accelerator.num_processes:
        # Written by this function's counterpart; numpy's state is a tuple that the weights-only reader refuses.
        states = torch.load(source / f"random_states_{accelerator.process_index}.pt", weights_only=False)
        _restore_random_states(states)
    else:
        logger.warning(
            "%s was saved by %d processes and is loaded by %d: random states are not restored, so dropout differs from "
            "an uninterrupted run.",
            source,
            state["world_size"],
            accelerator.num_processes,
        )
    accelerator.wait_for_everyone()
    return state["progress"]


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor, that is, whether Transformers sharded the model at load time."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _check_launch(accelerator: Accelerator) -> None:
    check_launch()  # Accelerate's FSDP plugin, which sets its variable whichever way it was asked for
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedError(
            f"The Accelerator has the {kind} plugin, which would shard the model a second time. Launch a plain "
            "multi-GPU job (`accelerate launch --multi_gpu`) and load with mok_hf.from_pretrained(..., ep_size=...): "
            "Transformers then shards the model itself."
        )


def _check_replicable(model: nn.Module, world_size: int) -> None:
    if any(getattr(module, "_is_expert_parallel", False) for module in model.modules()):
        raise UnsupportedError(ddp_over_experts(world_size))


def _replicate_unsharded_parameters(model: nn.Module) -> None:
    """Start trained plain tensors of a sharded model from rank 0's values and average their gradients."""
    world_size = dist.get_world_size()

    def average(parameter: torch.Tensor) -> None:
        # With accumulation, what `grad` held before this backward is equal on all ranks: its average is itself.
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)

    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(average)


def _trains_shards(module: nn.Module) -> bool:
    """Whether the trained parameters are shards; False: each rank holds all of them."""
    trained = {isinstance(parameter, DTensor) for parameter in module.parameters() if parameter.requires_grad}
    if trained == {True, False}:
        raise ValueError(
            "The model trains sharded parameters and plain ones (adapters) together, which has no checkpoint format "
            "here: freeze the sharded base model, or merge the adapters and train the model."
        )
    return trained == {True}


def _plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without frozen shards, which stay in the checkpoint that the model was loaded from."""
    return {name: value for name, value in module.state_dict().items() if not isinstance(value, DTensor)}


def _load_plain_state(module: nn.Module, state: Mapping[str, torch.Tensor], source: Path) -> None:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if missing := sorted(trained - state.keys()):
        raise ValueError(
            f"{source} misses {len(missing)} trained parameters ({missing[0]}, ...): load it into the model that "
            "was saved, with the same adapters."
        )
    _, unexpected = module.load_state_dict(state, strict=False)
    if unexpected:
        raise ValueError(f"{source} holds {len(unexpected)} tensors that the model lacks ({unexpected[0]}, ...).")


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _random_states() -> dict[str, Any]:
    import numpy

    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: Mapping[str, Any]) -> None:
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
