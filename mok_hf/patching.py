"""`register`, `distributed_config`, `patch_model`, `unpatch_model`.

Patching happens after load, in place: a block's class is swapped for a cached subclass whose forward is the adapter's.
No parameter is created, replaced or reordered, so an optimizer built before stays valid, and names in the state dict
stay the same. What reaches the kernel: at EP > 1 the `MokExpertParallel` behind the experts' forward, at EP 1 a cached
subclass of the experts' class. What undoing needs lies on the modules themselves, so a deep copy can be unpatched too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from mok_hf import kernel, refusals
from mok_hf.capabilities import (
    NATIVE,
    BlockAdapter,
    UnsupportedError,
    adapter_of,
    base_experts,
    block_problem,
    describe,
    experts_problem,
    shared_problem,
)
from mok_hf.config import MoKConfig
from mok_hf.layer import SHARED, STATE, LayerState, TokenCounts, fused, mok_experts_forward, run_layer, state_of
from mok_hf.report import LayerReport, PatchReport

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

NAME = "mok"
OLD_FORWARD = "_mok_old_forward"
OLD_DISTRIBUTED_CONFIG = "_mok_old_distributed_config"
REPORT = "_mok_report"

T = TypeVar("T")


def register() -> None:
    """Adds the name "mok" to Transformers' EP implementations and experts functions. Idempotent and otherwise inert.

    After it, `DistributedConfig(ep_implementation="mok")` and `experts_implementation="mok"` are accepted anywhere in
    this process. It loads no kernel and changes no model.
    """
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from mok_hf.expert_parallel import MokExpertParallel

    EPImplementationInterface.register(NAME, MokExpertParallel)
    ALL_EXPERTS_FUNCTIONS.register(NAME, mok_experts_forward)


def distributed_config(ep_size: int, **kwargs: Any) -> DistributedConfig:
    """The `DistributedConfig` for `from_pretrained`: experts over `ep_size` ranks, FSDP2 over all of them.

    Args:
        ep_size: ranks that own distinct experts; divides the number of processes.
        kwargs: further fields of `transformers.distributed.DistributedConfig`, which take precedence.

    Raises:
        UnsupportedError: ep_size does not divide the number of processes, tp_size > 1, fsdp_cpu_offload, or
            accelerate's FSDP plugin is on.
    """
    from transformers.distributed import DistributedConfig

    from mok_hf.conversions import register_conversions

    register()
    register_conversions()
    refusals.check_launch()
    world = world_size()
    if ep_size < 1 or world % ep_size:
        divisors = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
        raise UnsupportedError(
            f"ep_size={ep_size} does not divide the number of processes, {world}; every expert-parallel group has the "
            f"same size. Start a multiple of {ep_size} processes, or choose one of {divisors}."
        )
    if kwargs.get("tp_size") is not None and kwargs["tp_size"] > 1:
        raise UnsupportedError(refusals.tensor_parallel(kwargs["tp_size"]))
    defaults = {"fsdp_size": world // (kwargs.get("dp_replicate_size") or 1), "ep_implementation": NAME}
    config = DistributedConfig(**{**defaults, "ep_size": ep_size, **kwargs})
    refusals.check_distributed(config)
    return config


def world_size() -> int:
    """Number of processes of this job: the process group's, else WORLD_SIZE, else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def patch_model(model: nn.Module, mok_config: MoKConfig | None = None, strict: bool = True) -> PatchReport:
    """Puts every MoE block of a loaded model on the fused layer, in place. Collective if the model is distributed.

    The router stays the model's own module. A model loaded with another `ep_implementation` is switched over. A model
    that is patched already is unpatched first, so that this call's `mok_config` applies.

    Args:
        model: a Transformers model, or PEFT's or DDP's wrapper around one.
        mok_config: settings of its layers; None is automatic.
        strict: with False, blocks that cannot be fused stay native and the report says why. It never covers a missing
            kernel or a model that is refused as a whole.

    Returns:
        The report, also kept as `model._mok_report`; print it.

    Raises:
        UnsupportedError: the model, or with `strict` any of its blocks, cannot be served; it is left unpatched.
        KernelNotFoundError, KernelMismatchError: no kernel, or ranks with different ones; it is left unpatched.
    """
    register()
    unpatch_model(model)
    root = _root(model)
    mesh = getattr(root, "_mesh_manager", None)
    ep_size, group = _expert_group(model, mesh)
    world = torch.distributed.group.WORLD if mesh is not None else None

    plan = _together(world, lambda: _plan(model, ep_size, strict))
    loaded = kernel.agree(world)
    kernel.agree(group)  # now, so that building the plugs communicates no more: a rank that fails then strands nobody
    report = PatchReport(type(root).__name__, loaded, ep_size, [entry.report for entry in plan])
    fusible = [entry for entry in plan if entry.report.fused]

    def apply() -> None:
        for entry in fusible:
            kernel.check_device(entry.experts.down_proj.device.type)
            _apply(entry, mesh, mok_config or MoKConfig())
        _mark_forwards(model, fusible, group)

    try:
        _together(world, apply)
    except BaseException:
        unpatch_model(model)
        raise
    if any(OLD_FORWARD in entry.experts.__dict__ for entry in fusible):
        root.__dict__[OLD_DISTRIBUTED_CONFIG] = root.config.distributed_config
        root.config.distributed_config = dataclasses.replace(root.config.distributed_config, ep_implementation=NAME)
    for owner in {id(m): m for m in (model, root)}.values():
        owner.__dict__[REPORT] = report
    return report


def unpatch_model(model: nn.Module) -> None:
    """Gives every block back its class and every switched layer its former forward. No-op on an unpatched model.

    A model loaded with `ep_implementation="mok"` keeps running its routed experts on the kernel, with the native
    shared expert, as before `patch_model`.

    Raises:
        UnsupportedError: `fully_shard` was applied to a block after patching, so its class cannot be restored.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "_mok_original"):
            if "_mok_original" not in type(module).__dict__:
                raise UnsupportedError(
                    f"{name} is now a {type(module).__name__}: another wrapper changed its class after patch_model. "
                    "Undo that one first, or load the model again."
                )
            module.__class__ = type(module)._mok_original
        module.__dict__.pop(SHARED, None)
        state = module.__dict__.get(STATE)
        if state is not None:
            module.__dict__[STATE] = LayerState(swiglu_limit=state.swiglu_limit)
        if OLD_FORWARD in module.__dict__:
            module.__dict__["forward"] = module.__dict__.pop(OLD_FORWARD)
            module.__dict__.pop("_mok_plug", None)
        if OLD_DISTRIBUTED_CONFIG in module.__dict__:
            module.config.distributed_config = module.__dict__.pop(OLD_DISTRIBUTED_CONFIG)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), TokenCounts)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
        module.__dict__.pop(REPORT, None)


@dataclass
class _Entry:
    """One MoE block of the model and what is to be done with it."""

    block: Any
    adapter: BlockAdapter | None
    experts: Any
    report: LayerReport


def _root(model: nn.Module) -> Any:
    """The Transformers model inside wrappers such as PEFT's and DDP's; the module itself if there is none."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _blocks(model: nn.Module) -> Iterator[tuple[str, Any, BlockAdapter | None]]:
    """Every MoE block: those of the model table, and whatever else holds routed experts."""
    for name, module in model.named_modules():
        adapter = adapter_of(module)
        experts = getattr(module, "experts", None)
        if adapter is not None:
            yield name, module, adapter
        elif isinstance(experts, nn.ModuleList) or hasattr(experts, "gate_up_proj") or hasattr(experts, "has_gate"):
            yield name, module, None


def _expert_group(model: nn.Module, mesh: Any) -> tuple[int, Any | None]:
    """Size and process group of the ranks the experts are spread over; (1, None) where each rank holds all."""
    spread = any(
        getattr(base_experts(block.experts), "_is_expert_parallel", False)
        for _, block, _ in _blocks(model)
        if isinstance(block.experts, nn.Module)
    )
    if not spread:
        return 1, None
    if mesh is None:
        raise UnsupportedError(
            "The experts are spread over ranks, but the model has no device mesh of Transformers' "
            "(model._mesh_manager), so their process group is unknown. Load it with mok_hf.from_pretrained."
        )
    return mesh.get_mesh("ep").size(), mesh.get_mesh("ep").get_group()


def _plan(model: nn.Module, ep_size: int, strict: bool) -> list[_Entry]:
    """Looks at everything and changes nothing."""
    from mok_hf.expert_parallel import MokExpertParallel

    refusals.check_model(model, ep_size)
    entries = []
    for name, block, adapter in _blocks(model):
        experts = base_experts(block.experts)
        problem = experts_problem(experts) if adapter is None else None
        problem = problem or block_problem(block, adapter, ep_size)
        running, obstacle = _running(experts, ep_size)
        problem = problem or obstacle
        report = LayerReport(name, type(block).__name__, problem is None, problem or "")
        report.replaced = f"{type(experts).__name__} ({running})"
        if problem is not None and running == MokExpertParallel.__name__:
            report.reason += " Its routed experts run on the kernel all the same, through ep_implementation='mok'."
        entries.append(_Entry(block, adapter, experts, report))
    refused: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.report.fused:
            refused.setdefault(entry.report.reason, []).append(entry.report.name)
    if refused and strict:
        listed = "\n".join(f"  - {names[0]}{_more(names)}: {reason}" for reason, names in refused.items())
        raise UnsupportedError(f"{type(_root(model)).__name__} cannot be patched:\n{listed}")
    if not entries and strict:
        raise UnsupportedError(
            f"{type(_root(model)).__name__} holds no MoE block: no submodule has routed experts. Pass a model of the "
            "table in docs/support.md, or strict=False to accept a model with nothing to patch."
        )
    return entries


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _running(experts: nn.Module, ep_size: int) -> tuple[str, str | None]:
    """What runs these experts now, and why that cannot be taken over, or None."""
    from mok_hf.expert_parallel import implementation_of

    implementation = implementation_of(experts)
    if ep_size > 1 and implementation is None:
        return "", (
            "the experts are spread over ranks but their forward is not the one Transformers' expert parallelism sets "
            f"({describe(experts.__dict__.get('forward'))}). Remove the other wrapper, or load with "
            f"mok_hf.from_pretrained, {NATIVE}."
        )
    if ep_size == 1 and "forward" in experts.__dict__:
        return "", (
            f"another wrapper has set {type(experts).__name__}.forward on the instance "
            f"({describe(experts.__dict__['forward'])}). Patch first and wrap afterwards, {NATIVE}."
        )
    if implementation is not None:
        return type(implementation).__name__, None
    return str(getattr(getattr(experts, "config", None), "_experts_implementation", None)), None


def _apply(entry: _Entry, mesh: Any, config: MoKConfig) -> None:
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    from mok_hf.expert_parallel import MokExpertParallel, implementation_of

    block, adapter, experts = entry.block, entry.adapter, entry.experts
    kind: Any = type(experts)
    assert adapter is not None
    implementation = implementation_of(experts)
    if implementation is None:
        experts.__class__ = _experts_class(kind)
    elif not isinstance(implementation, MokExpertParallel):
        # Popped before the plug is built, which captures `experts.forward`.
        experts.__dict__[OLD_FORWARD] = experts.__dict__.pop("forward")
        EpDispatchExpertsParallel().install_forward(
            experts, mesh.get_mesh("ep"), tp_mesh=mesh.get_mesh("tp"), ep_implementation=NAME
        )
    state = state_of(experts)
    state.config, state.report, state.source = config, entry.report, adapter.block.rpartition(".")[0]
    shared = getattr(block, adapter.shared) if adapter.shared is not None else None
    if shared is not None:
        gate = getattr(block, adapter.shared_gate) if adapter.shared_gate is not None else None
        # Not a registered attribute: the names in the state dict stay, and FSDP does not see it twice.
        experts.__dict__[SHARED] = (shared, gate)
        # Between forwards FSDP holds DTensors, which say nothing about the call; a forward records what held in it.
        weight = getattr(getattr(shared, "gate_proj", None), "weight", None)
        sharded = hasattr(weight, "placements")
        entry.report.set_shared(
            None if sharded else shared_problem(shared, experts, state.source, experts.down_proj.dtype, False)
        )
    kind = type(block)
    block.__class__ = _block_class(kind, adapter)


@functools.cache
def _block_class(cls: Any, adapter: BlockAdapter) -> type[nn.Module]:
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return adapter.forward(self, fused, hidden_states, *args, **kwargs)

    return _subclass(cls, forward)


@functools.cache
def _experts_class(cls: Any) -> type[nn.Module]:
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return run_layer(self, hidden_states, top_k_index, top_k_weights, group=None, lend=True)

    return _subclass(cls, forward)


def _subclass(cls: type[Any], forward: Callable[..., torch.Tensor]) -> type[nn.Module]:
    members = {"forward": forward, "_mok_original": cls, "__module__": cls.__module__}
    return type(f"MoK{cls.__name__}", (cls,), members)


def _mark_forwards(model: nn.Module, fusible: list[_Entry], group: Any | None) -> None:
    """Hooks on the innermost PreTrainedModel around each block: PEFT's tuners call the outer one's forward directly."""
    from transformers import PreTrainedModel

    models = [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    marked: set[int] = set()
    for entry in fusible:
        around = [pair for pair in models if not pair[0] or entry.report.name.startswith(pair[0] + ".")]
        if not around:
            continue
        innermost = max(around, key=lambda pair: len(pair[0]))[1]
        if id(innermost) in marked:
            continue
        marked.add(id(innermost))
        counts = TokenCounts(entry.experts, group)
        innermost.register_forward_pre_hook(counts.begin)
        innermost.register_forward_hook(counts.end, always_call=True)


def _together(group: Any | None, work: Callable[[], T]) -> T:
    """Runs `work` and, over a group, raises on every rank if it failed on any."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    if group is not None:
        everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
        message = None if error is None else str(error)
        torch.distributed.all_gather_object(everyone, (torch.distributed.get_rank(), message), group=group)
        failed = {rank: message for rank, message in everyone if message is not None}
        if failed and error is None:
            rank = min(failed)
            raise UnsupportedError(f"Patching failed on rank {rank}, so no rank was patched: {failed[rank]}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
