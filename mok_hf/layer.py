"""The fused MoE forward that every patched block runs: routed experts, lent shared expert, autocast, one kernel call.

Read together with `expert_parallel.py` (who calls this at EP > 1) and `patching.py` (who lends the shared expert). The
router is not here: it stays the model's own module and is called by the block's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mok_hf import kernel
from mok_hf.capabilities import (
    UnsupportedError,
    base_experts,
    dtype_problem,
    experts_problem,
    shared_problem,
    swiglu_limit,
)
from mok_hf.config import MoKConfig

if TYPE_CHECKING:
    from mok_hf.report import LayerReport

STATE = "_mok_state"
SHARED = "_mok_shared"


@dataclass
class LayerState:
    """What one experts module keeps between calls; it lies in the module's `__dict__`, outside its state_dict.

    Args:
        config: settings of the model this layer belongs to.
        swiglu_limit: limit of the clamped SwiGLU, or None.
        source: module that defines the block, for the check of the shared MLP; "" while unpatched.
        report: this layer's line of the printable report; None while unpatched.
        calls: how often the kernel ran this layer.
    """

    config: MoKConfig = field(default_factory=MoKConfig)
    swiglu_limit: float | None = None
    source: str = ""
    report: LayerReport | None = None
    calls: int = 0


def state_of(experts: nn.Module) -> LayerState:
    """The experts' state; made, and the experts checked, at first use.

    Raises:
        UnsupportedError: the kernel cannot run these experts.
    """
    state = experts.__dict__.get(STATE)
    if state is None:
        problem = experts_problem(experts)
        if problem is not None:
            raise UnsupportedError(problem)
        state = experts.__dict__[STATE] = LayerState(swiglu_limit=swiglu_limit(experts))
    return state


def mok_experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts_implementation="mok"`: the experts of one rank, without exchange.

    Under another implementation's expert parallelism ids are local and those >= num_experts are skipped; routed
    experts only, since the rows that arrive there are not this rank's tokens.

    Args:
        experts: the experts module, with all E experts or the L local ones.
        hidden_states: [N, D] fp32 or bf16.
        top_k_index: [N, K] int32 or int64.
        top_k_weights: [N, K].

    Returns:
        [N, D] in the dtype of hidden_states.

    Raises:
        UnsupportedError: the kernel cannot run these experts.
        KernelNotFoundError, KernelMismatchError: no kernel.
    """
    lend = not experts._is_expert_parallel
    return run_layer(experts, hidden_states, top_k_index, top_k_weights, group=None, lend=lend)


def run_layer(
    experts: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    group: Any | None,
    lend: bool,
) -> torch.Tensor:
    """One kernel call for one layer: paper sections 3.1 to 3.4.

    Args:
        experts: the experts module; its parameters are plain local tensors here, [L, 2I, D] and [L, D, I].
        hidden_states: [N, D] this rank's tokens; N may be 0 and may differ between ranks.
        top_k_index: [N, K] global expert ids; negative or >= L*R is a masked route.
        top_k_weights: [N, K].
        group: process group the experts are spread over, or None for one rank.
        lend: add the shared expert lent at patch time, fused or, where it cannot be, as a module.

    Returns:
        [N, D] in the dtype of hidden_states.
    """
    mok = kernel.load()
    state = state_of(experts)
    if experts.__dict__.get("_is_replica"):
        raise UnsupportedError(
            f"{type(experts).__name__} runs in a replica of nn.DataParallel, which copies a model to several devices "
            "of one process; the limit is one device per process. Start one process per GPU (accelerate launch)."
        )
    device = hidden_states.device
    autocast = torch.is_autocast_enabled(device.type)
    # fp32 masters under autocast arrive as fp32: cast as autocast casts a linear layer's weight. `to` is
    # differentiable, so each gradient comes back in its parameter's dtype.
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden_states.dtype
    problem = dtype_problem(device.type, dtype)
    if problem is not None:
        raise UnsupportedError(problem)
    gate_up_proj, down_proj = _plain(experts, "gate_up_proj"), _plain(experts, "down_proj")
    if autocast:
        gate_up_proj, down_proj = gate_up_proj.to(dtype), down_proj.to(dtype)

    shared_mlp, shared_gate = experts.__dict__.get(SHARED, (None, None)) if lend else (None, None)
    native_because = None
    shared = scale = None
    if shared_mlp is not None:
        native_because = shared_problem(shared_mlp, experts, state.source, dtype, autocast)
        if state.report is not None:
            state.report.set_shared(native_because)
        # The gate is called as a module: it may be its own FSDP unit, carry hooks or LoRA.
        scale = None if shared_gate is None else torch.sigmoid(shared_gate(hidden_states))
        if native_because is None:
            weights = (shared_mlp.gate_proj.weight, shared_mlp.up_proj.weight, shared_mlp.down_proj.weight)
            shared = tuple(weight.to(dtype) for weight in weights)

    with torch.autocast(device.type, enabled=False):
        out = mok.moe(
            hidden_states.to(dtype),
            top_k_index,
            top_k_weights,
            gate_up_proj,
            down_proj,
            workspace=mok.workspace(group, device),
            shared=shared,
            shared_scale=None if shared is None else scale,
            swiglu_limit=state.swiglu_limit,
            **state.config.kernel_keywords(),
        )
    out = out.to(hidden_states.dtype)
    if shared_mlp is not None and native_because is not None:
        native = shared_mlp(hidden_states)
        out = out + (native if scale is None else scale * native).to(out.dtype)
    state.calls += 1
    return out


def _plain(experts: nn.Module, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    if hasattr(weight, "placements"):
        raise UnsupportedError(
            f"{type(experts).__name__}.{name} is a DTensor with placements {weight.placements} inside the experts' "
            "forward; the kernel takes this rank's plain tensor. Load with mok_hf.from_pretrained (tp_size=1)."
        )
    return weight


def fused(
    block: Any, flat_hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What an adapter's forward calls: the block's experts as a module, the shared expert lent.

    Args:
        block: the patched block.
        flat_hidden: [N, D].
        top_k_index: [N, K] global expert ids.
        top_k_weights: [N, K].

    Returns:
        [N, D]: routed plus shared expert.

    Raises:
        RuntimeError: something replaced the experts' forward after patching, so the kernel was not reached.
    """
    experts = base_experts(block.experts)
    state = state_of(experts)
    if experts is not block.experts and experts._is_expert_parallel:
        raise UnsupportedError(
            f"PEFT has wrapped the experts in {type(block.experts).__name__} after patching and they are spread over "
            "several ranks; LoRA on expert parameters works at ep_size=1 only. Load with ep_size=1, or leave the "
            "experts out of target_parameters."
        )
    before = state.calls
    out = block.experts(flat_hidden, top_k_index, top_k_weights)
    if state.calls == before:
        raise RuntimeError(
            f"{type(block.experts).__name__} was called but did not reach the kernel: its forward was replaced after "
            "patch_model, and the shared expert would be missing from the result. Call mok_hf.unpatch_model(model), "
            "apply the other wrapper, then mok_hf.patch_model(model)."
        )
    return out


class TokenCounts:
    """Marks the start and end of one model forward, so that ranks exchange token counts once in it.

    `begin` is a forward pre-hook and `end` a forward hook with `always_call=True`, both on the innermost
    PreTrainedModel around the patched blocks. Nested calls of that model count once.

    Args:
        experts: any patched experts module of the model; says which device the workspace is on.
        group: process group the experts are spread over, or None for one rank.
    """

    def __init__(self, experts: nn.Module, group: Any | None):
        self.experts = experts
        self.group = group
        self.depth = 0

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.depth += 1
        if self.depth == 1:
            self._workspace().begin_forward()

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.depth == 0:
            return  # called for an earlier pre-hook that raised before `begin` ran
        self.depth -= 1
        if self.depth == 0:
            self._workspace().end_forward()

    def _workspace(self) -> Any:
        return kernel.load().workspace(self.group, next(self.experts.parameters()).device)
