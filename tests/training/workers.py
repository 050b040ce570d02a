"""What the ranks of the training tests run; each function is called in every process of `run_ranks`."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import mok_hf
from mok_hf.training import load_state, prepare, save_state
from tests.checkpoints import batch

KIND = "deepseek_v3"
SEQUENCES, LENGTH = 4, 24


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def load(checkpoint: Path, implementation: str, ep_size: int) -> torch.nn.Module:
    """The checkpoint sharded over all ranks, or whole in one process; `ddp`: patched, and whole on every rank."""
    if implementation == "ddp":
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        mok_hf.patch_model(model)
    elif implementation == "mok":
        model = mok_hf.from_pretrained(AutoModelForCausalLM, checkpoint, ep_size=ep_size)
    else:
        config = DistributedConfig(fsdp_size=world_size(), ep_size=ep_size)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=config)
    return model.train()


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(100 + rank())  # adapters start different on every rank, until prepare
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*attn.*proj\w*", init_lora_weights=False))


class Loop:
    """A bare Accelerate loop on fixed global batches: every world size sees the same tokens at the same step."""

    def __init__(self, model: torch.nn.Module, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW):
        self.accelerator = Accelerator(cpu=True)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer_class(self.trained, lr=1e-3 if optimizer_class is torch.optim.AdamW else 0.3)
        # Accelerate steps a scheduler once a process.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / world_size()))
        self.model, self.optimizer, self.scheduler = prepare(self.accelerator, model, optimizer, scheduler)

    def step(self, index: int) -> float:
        """One optimizer step on this rank's share of batch `index`; the loss over all ranks."""
        share = SEQUENCES // world_size()
        rows = slice(rank() * share, (rank() + 1) * share)
        inputs = {name: tensor[rows] for name, tensor in batch(KIND, [LENGTH] * SEQUENCES, seed=index).items()}
        loss = self.model(**inputs).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.accelerator.reduce(loss.detach(), "mean").item()

    def save(self, folder: Path, **progress: Any) -> None:
        save_state(self.accelerator, folder, self.model, self.optimizer, self.scheduler, progress=progress)

    def load(self, folder: Path) -> dict[str, Any]:
        return load_state(self.accelerator, folder, self.model, self.optimizer, self.scheduler)

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's own piece of every parameter."""
        return {name: _local(value).clone() for name, value in self.module.state_dict().items()}

    def full(self) -> dict[str, torch.Tensor]:
        """Every parameter and optimizer tensor, gathered to all ranks."""
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer.optimizer, options=options)
        values = get_model_state_dict(self.module, options=options) | optimizer
        return {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def module(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)


def train(checkpoint: Path, implementation: str, ep_size: int, steps: int) -> dict[str, Any]:
    """Losses of each step and, on rank 0, what the parameters became."""
    # SGD: Adam divides a gradient by its own size and so turns the rounding of near-zero ones into whole steps.
    loop = Loop(load(checkpoint, implementation, ep_size), torch.optim.SGD)
    losses = [loop.step(0) for _ in range(steps)]  # one batch, so that the loss must fall
    parameters = get_model_state_dict(loop.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"losses": losses, "parameters": parameters}


def resume(checkpoint: Path, folder: Path, implementation: str, ep_size: int, lora: bool) -> dict[str, Any]:
    """Train four steps and save after two; then load a fresh model, resume from the save and train the last two."""

    def fresh() -> Loop:
        model = load(checkpoint, implementation, ep_size)
        return Loop(with_lora(model) if lora else model)

    torch.manual_seed(rank())  # dropout differs per rank
    loop = fresh()
    [loop.step(index) for index in range(2)]
    loop.save(folder, step=2)
    losses = [loop.step(index) for index in (2, 3)]
    uninterrupted = loop.local()

    torch.manual_seed(50)
    loop = fresh()
    started_from = loop.local()
    progress = loop.load(folder)
    again = [loop.step(index) for index in range(progress["step"], 4)]
    resumed = loop.local()
    return {
        "progress": progress,
        "losses": losses,
        "resumed_losses": again,
        "unequal": [name for name in uninterrupted if not torch.equal(uninterrupted[name], resumed[name])],
        "trained": [name for name in started_from if not torch.equal(started_from[name], resumed[name])],
        "parameters": resumed,
    }


def save_and_restore(checkpoint: Path, folder: Path, implementation: str, ep_size: int) -> dict[str, Any]:
    """Train a step, save, overwrite every parameter with zeros, load: what each rank holds must be back."""
    loop = Loop(load(checkpoint, implementation, ep_size))
    loop.step(0)
    loop.save(folder)
    before = loop.local()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.zero_()
    zeroed = loop.local()
    loop.load(folder)
    after = loop.local()
    return {
        "zeroed": all(not zeroed[name].any() for name, _ in loop.module.named_parameters()),
        "unequal": [name for name in before if not torch.equal(before[name], after[name])],
        "experts": {name: value for name, value in before.items() if "experts.gate_up_proj" in name},
        "full": loop.full(),
    }


def load_elsewhere(checkpoint: Path, folder: Path, implementation: str, ep_size: int) -> dict[str, torch.Tensor]:
    """Load a training state at another number of ranks; everything it holds, gathered."""
    loop = Loop(load(checkpoint, implementation, ep_size))
    loop.load(folder)
    return loop.full()


def lora_gradients(checkpoint: Path, implementation: str, ep_size: int) -> dict[str, Any]:
    """One backward with adapters around a sharded model: initial adapters and their gradients on this rank."""
    loop = Loop(with_lora(load(checkpoint, implementation, ep_size)))
    adapters = {name: value for name, value in loop.module.named_parameters() if value.requires_grad}
    initial = {name: value.detach().clone() for name, value in adapters.items()}
    share = SEQUENCES // world_size()
    rows = slice(rank() * share, (rank() + 1) * share)
    for index in range(2):  # accumulated: the second reduction must leave the first one's average as it is
        inputs = {name: tensor[rows] for name, tensor in batch(KIND, [LENGTH] * SEQUENCES, seed=index).items()}
        loop.accelerator.backward(loop.model(**inputs).loss)
    return {"initial": initial, "gradients": {name: value.grad for name, value in adapters.items()}}


def accumulate(checkpoint: Path, ep_size: int, fuse: bool) -> dict[str, Any]:
    """Three micro-steps and an optimizer step: gradients, parameters, and how many buffers backwards added to."""
    kernel = mok_hf.kernel.load()
    module, added = sys.modules[f"{kernel.__name__}.accumulate"], []
    module.added = added.extend  # on a CPU there is nothing to wait for
    config = mok_hf.MoKConfig(fuse_wgrad_accumulation=fuse)
    model = mok_hf.from_pretrained(AutoModelForCausalLM, checkpoint, ep_size=ep_size, mok_config=config)
    loop = Loop(model.train(), torch.optim.SGD)
    share = SEQUENCES // world_size()
    rows = slice(rank() * share, (rank() + 1) * share)
    for index in range(3):
        if world_size() > 1:
            loop.model.set_requires_gradient_sync(index == 2)
        inputs = {name: tensor[rows] for name, tensor in batch(KIND, [LENGTH] * SEQUENCES, seed=index).items()}
        loop.accelerator.backward(loop.model(**inputs).loss / 3)
    gradients = {name: _local(value.grad).clone() for name, value in loop.module.named_parameters()}
    loop.optimizer.step()
    return {"gradients": gradients, "parameters": loop.local(), "added": len(added)}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def run_documentation(blocks: list[str], checkpoint: Path, folder: Path) -> str:
    """Executes code of the README, one block after the other in one namespace; the report it printed."""
    items = [{name: tensor[0] for name, tensor in batch(KIND, [LENGTH], seed=index).items()} for index in range(4)]
    namespace: dict[str, Any] = {"loader": DataLoader(items)}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            code = block.replace("path/to/checkpoint", str(checkpoint)).replace('"out"', f'"{folder}"')
            exec(code.replace("ep_size=8", f"ep_size={world_size()}"), namespace)
    return printed.getvalue()
