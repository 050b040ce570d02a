"""The plug into Transformers' expert parallelism: `DistributedConfig(ep_implementation="mok")`.

Imported by `register()` only: it needs Transformers, which `import mok_hf` does not load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.expert_parallel import EPImplementation

from mok_hf import kernel, refusals
from mok_hf.capabilities import UnsupportedError
from mok_hf.layer import run_layer, state_of

PLUG = "_mok_plug"


class MokExpertParallel(EPImplementation):
    """Runs one experts module as one kernel call over the expert-parallel group.

    Transformers builds one per experts module while the model is on the meta device, before FSDP and before any weight
    is read, so nothing is allocated here. The experts' own forward is never called: with both
    `ep_implementation="mok"` and `experts_implementation="mok"` this wins.

    Args:
        experts: the experts module, already sharded over `ep_mesh`: `num_experts` is the local count L.
        ep_mesh: the ranks that own distinct experts.
        tp_mesh: the ranks that hold the same batch; must be of size 1.

    Raises:
        UnsupportedError: tp_size > 1, or experts the kernel cannot run.
        KernelNotFoundError, KernelMismatchError: on every rank of the group together.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise UnsupportedError(refusals.tensor_parallel(tp_mesh.size()))
        refusals.check_launch()
        kernel.agree(ep_mesh.get_group())
        kernel.check_device(ep_mesh.device_type)
        state_of(experts)
        self.experts = experts
        experts.__dict__[PLUG] = self

    @property
    def group(self) -> Any:
        """The process group the experts are spread over."""
        return self.ep_mesh.get_group()

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N, D], [N, K] global ids, [N, K] -> [N, D]; a patched block's shared expert is added.

        Gradients of the experts are the plain sum over the group's tokens; FSDP divides them.
        """
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise UnsupportedError(refusals.ddp_over_experts(self.ep_mesh.size()))
        return run_layer(self.experts, hidden_states, top_k_index, top_k_weights, group=self.group, lend=True)


def implementation_of(experts: nn.Module) -> EPImplementation | None:
    """The EPImplementation behind the forward that Transformers set on these experts; None if something else set it."""
    forward = experts.__dict__.get("forward")
    for cell in getattr(forward, "__closure__", None) or ():
        try:
            if isinstance(cell.cell_contents, EPImplementation):
                return cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return None
