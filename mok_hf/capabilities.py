"""Can this block be fused, and why not: the one place that patching, the documentation and `doctor` read.

Every reason names the value seen, the limit and the way forward. Reasons about one block are returned, so that
`strict=False` can leave that block native; reasons about a whole model or launch are in `refusals.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

WIDTH_MULTIPLE = 64
"""Hidden size D, expert width I and shared width S are multiples of this."""

COMPUTE_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
"""What a kernel call computes in, by kind of device; under autocast the weights are cast to it."""

LAYOUT = {
    "is_transposed": False,
    "has_bias": False,
    "is_concatenated": True,
    "has_gate": True,
    "has_post_expert_norm": False,
}
"""What Transformers' use_experts_implementation records of the experts' weights, and what the kernel takes."""

NATIVE = "or pass strict=False to leave this block on Transformers' own code"


@dataclass(frozen=True)
class BlockAdapter:
    """One row of the model table: how a Transformers MoE block runs on the fused layer.

    Args:
        block: fully qualified class of the block, e.g. ``transformers.models.m.modeling_m.MMoE``.
        experts: fully qualified class of its routed experts.
        model_types: the ``config.model_type`` values whose models hold this block; documentation and `doctor` read it.
        forward: ``(block, fused, hidden_states, *args, **kwargs) -> Tensor``, the block's forward with the
            routed and shared experts replaced by one call ``fused(block, flat_hidden, top_k_index, top_k_weights)``,
            [N, D], [N, K], [N, K] -> [N, D]. It calls the block's own router as a module and returns what the native
            forward returns. ``fused`` returns routed plus shared expert in every case; the adapter adds nothing.
        shared: attribute of the block that holds the shared MLP (``gate_proj``, ``up_proj``, ``down_proj``), or None.
        shared_gate: attribute of the block that holds the Linear whose sigmoid scales the shared MLP, or None.
        swiglu_limit: attribute, of the experts and of the shared MLP alike, that holds the limit L of the clamped
            SwiGLU ``silu(gate.clamp(max=L)) * up.clamp(-L, L)`` that the experts' own ``_apply_gate`` computes; None
            for the plain SwiGLU of Transformers' default ``_apply_gate``.
    """

    block: str
    experts: str
    model_types: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    shared: str | None = None
    shared_gate: str | None = None
    swiglu_limit: str | None = None


class UnsupportedError(ValueError):
    """This model, block or launch cannot run on the fused layer; the message says why and what to do."""


def qualified_name(cls: type[Any]) -> str:
    """``module.QualName`` of a class, as the model table spells it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def describe(function: object) -> str:
    """A function for an error message, on one line."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"


def adapter_of(block: nn.Module) -> BlockAdapter | None:
    """The row of the model table for this block, or None: its class, or a subclass that keeps the class's forward."""
    from mok_hf.model_patches import ADAPTERS

    native: Any = getattr(type(block), "_mok_original", type(block))
    for cls in native.__mro__:
        adapter = ADAPTERS.get(qualified_name(cls))
        if adapter is not None:
            return adapter if native.forward is cls.forward else None
    return None


@cache
def _known_limits() -> dict[str, str]:
    """Qualified name of each known clamped ``_apply_gate`` -> attribute of the experts that holds its limit."""
    from mok_hf.model_patches import ADAPTERS

    return {f"{a.experts}._apply_gate": a.swiglu_limit for a in ADAPTERS.values() if a.swiglu_limit}


def base_experts(experts: Any) -> Any:
    """The experts module itself, below the wrappers that PEFT puts around it for LoRA on its parameters."""
    while type(experts).__name__ == "ParamWrapper" and hasattr(experts, "base_layer"):
        experts = experts.base_layer
    return experts


def swiglu_limit(experts: nn.Module) -> float | None:
    """Limit L of the experts' clamped SwiGLU, or None for the plain one. Assumes `experts_problem` found nothing."""
    attribute = _known_limits().get(_gate_name(experts))
    return None if attribute is None else float(getattr(experts, attribute))


def _gate_name(experts: Any) -> str:
    function = getattr(experts._apply_gate, "__func__", experts._apply_gate)
    return f"{function.__module__}.{function.__qualname__}"


def experts_problem(experts: Any) -> str | None:
    """Why these routed experts cannot run on the fused layer, or None.

    Args:
        experts: the module that holds `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I]; on any device, meta
            included, and before or after sharding.
    """
    name = type(experts).__name__
    weights = dict(experts.named_parameters(recurse=False))
    eight_bit = sorted({str(p.dtype) for p in weights.values() if "float8" in str(p.dtype) or "int8" in str(p.dtype)})
    if name == "FP8Experts" or eight_bit or any(key.endswith("_scale_inv") for key in weights):
        return (
            f"{name} holds quantised weights ({', '.join(eight_bit) or 'FP8'}); the kernel takes fp32 and bf16. Load "
            "with quantization_config=FineGrainedFP8Config(dequantize=True), or use a bf16 checkpoint."
        )
    layout = {key: getattr(experts, key, None) for key in LAYOUT}
    if any(value is None for value in layout.values()):
        return (
            f"{name} is not built with Transformers' use_experts_implementation, so its weight layout is unknown; the "
            f"kernel takes gate_up_proj [E, 2I, D] and down_proj [E, D, I]. Convert it to that layout, {NATIVE}."
        )
    differing = [f"{key}={layout[key]}" for key in LAYOUT if layout[key] != LAYOUT[key]]
    if differing:
        return (
            f"{name} has {', '.join(differing)} (the layout of gpt-oss); the kernel takes gate_up_proj [E, 2I, D] with "
            f"gate rows first and down_proj [E, D, I] without bias. Use Transformers' own experts for it, {NATIVE}."
        )
    gate_problem = _gate_problem(experts)
    if gate_problem is not None:
        return gate_problem
    odd = [str(p.dtype) for p in weights.values() if str(p.dtype) not in ("torch.float32", "torch.bfloat16")]
    if odd:
        return f"{name} holds {odd[0]} weights; the kernel takes fp32 and bf16. Load with dtype=torch.bfloat16."
    hidden, width = experts.down_proj.shape[-2:]
    return _width_problem("hidden size D", hidden) or _width_problem("expert width I", width)


def _width_problem(what: str, value: int) -> str | None:
    if value % WIDTH_MULTIPLE == 0:
        return None
    return (
        f"{what} is {value}; the kernel takes multiples of {WIDTH_MULTIPLE} (the nearest are "
        f"{value // WIDTH_MULTIPLE * WIDTH_MULTIPLE} and {-(-value // WIDTH_MULTIPLE) * WIDTH_MULTIPLE}). Use "
        f"Transformers' own experts for this model, {NATIVE}."
    )


def _gate_problem(experts: Any) -> str | None:
    from transformers.integrations.moe import _default_apply_gate

    name = type(experts).__name__
    function = getattr(experts._apply_gate, "__func__", experts._apply_gate)
    attribute = _known_limits().get(_gate_name(experts))
    if function is not _default_apply_gate and attribute is None:
        return (
            f"{name} overrides _apply_gate with {_gate_name(experts)}, which this version does not know; the kernel "
            f"computes silu(gate) * up, optionally clamped. Add it to the model table if it is one of these, {NATIVE}."
        )
    if attribute is not None and not isinstance(getattr(experts, attribute, None), int | float):
        return (
            f"{name}.{attribute} is {getattr(experts, attribute, None)!r}; the clamp of its _apply_gate needs a "
            f"number. Set it in the configuration, {NATIVE}."
        )
    activation = getattr(experts, "act_fn", None)
    # The clamped gate of GLM-5-Next calls silu itself and holds no act_fn.
    if not (activation is None and attribute is not None) and not is_silu(activation):
        return f"{name} uses the activation {activation!r}; the kernel computes silu. Use a silu model, {NATIVE}."
    return None


def is_silu(activation: object) -> bool:
    """Whether an activation function or module is silu."""
    import torch
    from transformers.activations import SiLUActivation

    return isinstance(activation, torch.nn.SiLU | SiLUActivation) or activation is torch.nn.functional.silu


def block_problem(block: Any, adapter: BlockAdapter | None, ep_size: int) -> str | None:
    """Why this MoE block cannot be patched, or None.

    Args:
        block: the Transformers MoE block.
        adapter: its row of the model table, as `adapter_of` found it.
        ep_size: ranks that the experts are spread over.
    """
    if adapter is None:
        from mok_hf.model_patches import ADAPTERS

        known = ", ".join(sorted({model_type for a in ADAPTERS.values() for model_type in a.model_types}))
        return (
            f"{qualified_name(type(block))} is not in the model table. Known model types: {known}. Add a row to "
            f"model_patches/, {NATIVE}."
        )
    if "forward" in block.__dict__:
        return (
            f"another wrapper has set {type(block).__name__}.forward on the instance ("
            f"{describe(block.__dict__['forward'])}); patching would have no effect. Patch first and wrap afterwards, "
            f"{NATIVE}."
        )
    if ep_size > 1 and base_experts(block.experts) is not block.experts:
        return (
            f"PEFT has wrapped the experts in {type(block.experts).__name__} and they are spread over {ep_size} "
            "ranks; LoRA on expert parameters (target_parameters) works at ep_size=1 only. Load with ep_size=1, or put "
            f"LoRA on attention and shared experts, {NATIVE}."
        )
    problem = experts_problem(base_experts(block.experts))
    if problem is not None or adapter.shared is None:
        return problem
    shared = getattr(block, adapter.shared, None)
    down = getattr(shared, "down_proj", None)
    return None if down is None else _width_problem("shared expert width S", getattr(down, "in_features", 0))


def dtype_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot compute in this dtype on this kind of device, or None. Checked in every forward."""
    served = COMPUTE_DTYPES.get(device_type, ())
    name = str(dtype).removeprefix("torch.")
    if name in served:
        return None
    return (
        f"the experts would compute in {name} on {device_type}; the kernel takes {' and '.join(served) or 'none'} "
        "there. Load with dtype=torch.bfloat16, or keep the weights and run under autocast (accelerate launch "
        "--mixed_precision bf16)."
    )


def shared_problem(
    shared: nn.Module, experts: nn.Module, source: str, dtype: torch.dtype, autocast: bool
) -> str | None:
    """Why the shared MLP cannot be lent to the kernel in this call, or None. Checked in every forward.

    Args:
        shared: the shared MLP.
        experts: the routed experts of the same block.
        source: module that defines the block; the MLP's forward is known only if its class is from there too.
        dtype: compute dtype of the call.
        autocast: whether weights are cast to `dtype` for this call.
    """
    import torch
    from torch import nn

    name = type(shared).__name__
    if type(shared).__module__ != source:
        return f"{qualified_name(type(shared))} is not this model's own MLP class"
    for part in ("", ".gate_proj", ".up_proj", ".down_proj"):
        module = getattr(shared, part[1:], None) if part else shared
        if module is None:
            return f"{name} has no {part[1:]}"
        if "forward" in module.__dict__:
            return f"{name}{part} has a forward of its own"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"{name}{part} has hooks"
        if not part:
            continue
        if type(module) is not nn.Linear:
            return f"{name}{part} is {type(module).__name__}, not nn.Linear"
        if module.bias is not None:
            return f"{name}{part} has a bias"
        if type(module.weight) not in (nn.Parameter, torch.Tensor):
            return f"{name}{part}.weight is {type(module.weight).__name__}, not a plain tensor"
        if module.weight.dtype != dtype and not (autocast and module.weight.is_floating_point()):
            return f"{name}{part}.weight is {module.weight.dtype}, the call computes in {dtype}"
    if not is_silu(getattr(shared, "act_fn", None)):
        return f"{name} uses the activation {getattr(shared, 'act_fn', None)!r}, not silu"
    attribute = _known_limits().get(_gate_name(experts))
    if attribute is not None and getattr(shared, attribute, None) != getattr(experts, attribute):
        return (
            f"{name}.{attribute} is {getattr(shared, attribute, None)}, the experts' is {getattr(experts, attribute)}"
        )
    return None
