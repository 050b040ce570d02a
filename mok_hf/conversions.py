"""Checkpoint conversions that Transformers 5.24 gets wrong, or lacks, when parameters are sharded while they load.

A sharded load reads only this rank's rows of every checkpoint tensor, then runs the model's conversions on those rows.
That is right where a conversion keeps rows apart (experts stacked into `[E, 2I, D]`) and silently wrong where it does
not: `conv1d = cat([q, k, v])` of Kimi-Linear and GLM-5-Next becomes `cat([q_r, k_r, v_r])` on rank r, rows in another
order, and the vision tower of Kimi-K2.5 is cut across q, k and v. `register_conversions` registers corrected
conversions for the supported model types; in one process they load what the original ones load.

Some renamings also save under names that published checkpoints do not have, because they read backwards more than they
renamed: every `mlp` of Kimi-Linear becomes `block_sparse_moe`, that of its dense layer too, and every `layers` of
Kimi-K2.5 becomes `blocks`, those of the language model too. Both names load; saving gives the published ones.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

_TRANSPOSED = "_mok_experts_were_transposed"
# Types whose conversions mix rows, or compare a shard's shape with the whole parameter's (measured: every supported
# type loaded at fsdp_size=2 and compared with one process, tensor by tensor).
_MIXING_TYPES = ("kimi_linear", "glm5_next", "glm5_next_text", "kimi_k25", "qwen3_vl_moe")

# Renamings (by their source pattern) that undo more on saving than they did on loading, and narrow ones before them.
_PUBLISHED_NAMES: dict[str, dict[tuple[str, ...], list[tuple[str, str]]]] = {
    "kimi_linear": {
        (r"\.block_sparse_moe\.",): [
            (rf"\.block_sparse_moe\.{part}\.", rf"\.mlp\.{part}\.") for part in ("experts", "gate", "shared_experts")
        ]
    },
    "kimi_k25": {("blocks",): [("vision_tower.blocks", "vision_tower.layers")]},
}


def register_conversions() -> None:
    """Makes sharded loads of the supported model types right. Idempotent, process-wide; loads no weight.

    Registers, per model type, the conversions of Transformers with the faulty ones replaced; Kimi-K2's, which
    Transformers lacks (without them every expert is left at its random initialisation); and names the Linear layers
    of the Qwen3-Omni talker's code predictor one by one in its sharding plan, which FSDP otherwise refuses.
    """
    for model_type in _MIXING_TYPES:
        mapping = get_checkpoint_conversion_mapping(model_type) or []
        renames = _PUBLISHED_NAMES.get(model_type, {})
        corrected: list[Any] = []
        for transform in mapping:
            wide = tuple(transform.source_patterns)
            if type(transform) is WeightRenaming and wide in renames:
                corrected += [WeightRenaming(*narrow) for narrow in renames[wide]]
                corrected.append(_OnLoadOnly(transform.source_patterns, transform.target_patterns))
            else:
                corrected.append(_correct(transform) if _is_faulty(transform) else transform)
        if any(new is not old for new, old in zip_longest(corrected, mapping)):
            register_checkpoint_conversion_mapping(model_type, corrected, overwrite=True)
    if get_checkpoint_conversion_mapping("kimi_k2") is None:
        register_checkpoint_conversion_mapping("kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3"))
    _correct_code_predictor_plan()


def conversion_problem(model: nn.Module) -> str | None:
    """Why the weights of this loaded model are in the wrong order, or None.

    Args:
        model: a model from `from_pretrained`; Transformers keeps the conversions it used on it.
    """
    for transform in getattr(model, "_weight_conversions", None) or []:
        if not (_is_faulty(transform) and _mixes_rows(transform)):
            continue
        targets = [pattern.replace("\\", "").strip(".*") for pattern in transform.target_patterns]
        for name, parameter in model.named_parameters():
            if any(target in name for target in targets) and _is_sharded(parameter):
                return (
                    f"{name} was loaded sharded through a conversion of Transformers that puts its rows in the wrong "
                    "order. Load again after mok_hf.distributed_config(...) was called, or with mok_hf.from_pretrained."
                )
    return None


def _mixes_rows(transform: WeightConverter) -> bool:
    # Where experts are stacked first, the sharded dimension counts them and what follows works on the inner ones.
    return isinstance(transform.operations[0], Concatenate | Chunk)


def _is_faulty(transform: Any) -> bool:
    if not isinstance(transform, WeightConverter):
        return False
    first = transform.operations[0]
    return _mixes_rows(transform) or (type(first) is Transpose and first.check_dims)


def _correct(transform: WeightConverter) -> WeightConverter:
    if _mixes_rows(transform):
        operations: list[Any] = [_GatherSources(), *transform.operations, _KeepShard()]
    else:
        first: Any = transform.operations[0]
        operations = [_ToModelLayout(first.dim0, first.dim1, first.check_dims), *transform.operations[1:]]
    return transform.copy(transform.source_patterns, transform.target_patterns, operations=operations)


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        placement.is_shard() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


class _OnLoadOnly(WeightRenaming):
    """A renaming that is not undone on saving."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        return WeightRenaming("no such name", "no such name")


class _KeepShard(ConversionOps):
    """Last operation: of each whole target tensor, this rank's shard."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        from transformers.distributed.sharding_utils import DtensorShardOperation

        converted = {}
        for key, value in input_dict.items():
            name = _target_name(kwargs["full_layer_name"], input_dict, key)
            parameter = kwargs["model"].get_parameter_or_buffer(name)
            tensor = value[0] if isinstance(value, list) else value
            if isinstance(parameter, DTensor):
                tensor = DtensorShardOperation(parameter).shard_tensor(tensor, device=tensor.device, dtype=tensor.dtype)
            converted[key] = tensor
        return converted

    @property
    def reverse_op(self) -> ConversionOps:
        return _Whole()


class _GatherSources(ConversionOps):
    """First operation: the whole of each checkpoint tensor, of which the sharded load read this rank's rows."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        parameter = kwargs["model"].get_parameter_or_buffer(kwargs["full_layer_name"])
        if not isinstance(parameter, DTensor):
            return input_dict
        # Ascending keys: every rank must issue the same collectives in the same order.
        return {key: _map(input_dict[key], lambda tensor: _gather(tensor, parameter)) for key in sorted(input_dict)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _Whole()


class _Whole(ConversionOps):
    """On saving, tensors are whole already: nothing to do."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _Whole()


class _ToModelLayout(Transpose):
    """Transposes a stack of expert matrices unless it is in the model's layout; judged by the shapes of one expert.

    Published Qwen3-VL checkpoints hold `[E, D, 2I]`, those that Transformers saved `[E, 2I, D]`. Which it was is kept
    on the model, so that saving returns to the layout that was loaded.
    """

    # Transpose.convert is decorated with an untyped torch.no_grad.
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        target = self.get_target_pattern(input_dict, source_patterns, target_patterns)
        model, tensor = kwargs["model"], _only(input_dict)
        # Only the first dimension, the experts, is ever sharded here, so the others tell the layout.
        transposed = tensor.shape[1:] != model.get_parameter(kwargs["full_layer_name"]).shape[1:]
        model.__dict__[_TRANSPOSED] = transposed
        return {target: tensor.transpose(self.dim0, self.dim1).contiguous() if transposed else tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToStoredLayout(self.dim0, self.dim1, self.check_dims)


class _ToStoredLayout(Transpose):
    """On saving, undoes what `_ToModelLayout` did."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        target, tensor = self.get_target_pattern(input_dict, source_patterns, target_patterns), _only(input_dict)
        transposed = kwargs["model"].__dict__.get(_TRANSPOSED, False)
        return {target: tensor.transpose(self.dim0, self.dim1).contiguous() if transposed else tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return _ToModelLayout(self.dim0, self.dim1, self.check_dims)


def _only(input_dict: dict[str, Any]) -> torch.Tensor:
    value = next(iter(input_dict.values()))
    return value[0] if isinstance(value, list) else value


def _map(value: Any, function: Any) -> Any:
    return [function(tensor) for tensor in value] if isinstance(value, list) else function(value)


def _target_name(full_layer_name: str, input_dict: dict[str, Any], key: str) -> str:
    """Full name of the parameter `key` stands for; `full_layer_name` is that of the converter's first target."""
    if key == full_layer_name:
        return key
    prefix, pattern, suffix = next(full_layer_name.partition(k) for k in input_dict if k in full_layer_name)
    return f"{prefix}{key}{suffix}" if pattern else key


def _gather(tensor: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The whole checkpoint tensor, of which this rank read `tensor` by the placements of `parameter`."""
    placements: list[Any] = list(parameter.placements)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if not placement.is_shard() or parameter.device_mesh.size(mesh_dim) == 1:
            continue
        group = parameter.device_mesh.get_group(mesh_dim)
        rows = tensor.movedim(placement.dim, 0).contiguous()
        counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, torch.tensor([rows.shape[0]], device=rows.device), group=group)
        sizes = [int(count) for count in counts]
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        whole = torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
        tensor = whole.movedim(0, placement.dim).contiguous()
    return tensor


def _correct_code_predictor_plan() -> None:
    try:
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
    except ImportError:
        return
    predictor = modeling.Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration
    # `lm_head` is a ModuleList there, which fully_shard refuses; with the original plan no sharded load succeeds.
    if predictor._fsdp_plan == {"lm_head": "keep_full_weight"}:
        predictor._fsdp_plan = {"lm_head.*": "keep_full_weight"}
