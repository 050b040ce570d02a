"""`from_pretrained`: load, check that every expert really came from the checkpoint, patch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mok_hf import refusals
from mok_hf.capabilities import UnsupportedError
from mok_hf.config import MoKConfig
from mok_hf.patching import NAME, distributed_config, patch_model, register, world_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HUB_KEYWORDS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_EXPERT_KEY = re.compile(r"\.experts\.")


class ExpertsNotLoadedError(RuntimeError):
    """Experts of the model are not those of the checkpoint: Transformers would have initialised them at random."""


def from_pretrained(
    auto_class: Any,
    pretrained_model_name_or_path: Any,
    *args: Any,
    ep_size: int | None = None,
    mok_config: MoKConfig | None = None,
    verify: bool = False,
    **kwargs: Any,
) -> PreTrainedModel | tuple[PreTrainedModel, dict[str, Any]]:
    """`auto_class.from_pretrained(...)` with the experts spread over `ep_size` ranks, then `patch_model`.

    Each rank reads only its own experts. With one process nothing is sharded; with several, all parameters are sharded
    with FSDP2, and above `ep_size=1` the experts are spread over groups of `ep_size` ranks.

    Args:
        auto_class: e.g. `AutoModelForCausalLM`, or a model class.
        pretrained_model_name_or_path: as there.
        args: as there.
        ep_size: ranks that own distinct experts; None is 1. Excludes `distributed_config`.
        mok_config: settings of the fused layers.
        verify: compare every loaded tensor with the checkpoint, bit for bit after conversion to the loaded dtype.
        kwargs: reach Transformers untouched, `config` and `distributed_config` included.

    Returns:
        The patched model; with `output_loading_info=True` the pair (model, loading info), as Transformers returns it.

    Raises:
        UnsupportedError: the model or launch cannot be served.
        ExpertsNotLoadedError: an expert tensor is missing, has another shape, or (with `verify`) other values.
        KernelNotFoundError, KernelMismatchError: no kernel, or ranks with different ones.
    """
    from mok_hf.conversions import register_conversions

    register()
    refusals.check_launch()
    if kwargs.get("distributed_config") is not None and ep_size is not None:
        raise UnsupportedError(
            f"both ep_size={ep_size} and distributed_config were given, and each decides how experts are spread. Pass "
            "ep_size alone, or distributed_config=mok_hf.distributed_config(ep_size=...) alone."
        )
    refusals.check_device_map(kwargs.get("device_map"), "device_map")
    refusals.check_distributed(kwargs.get("distributed_config"))
    stored = _stored_config(pretrained_model_name_or_path, kwargs)
    _check_quantisation(stored, kwargs)
    register_conversions()
    wants_info = kwargs.pop("output_loading_info", False)
    chosen = kwargs.get("distributed_config")
    size = chosen.ep_size if chosen is not None else ep_size or 1
    if chosen is None:
        kwargs |= _distribution(size)
    _check_expert_count(stored, size)

    model, info = auto_class.from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
    _check_experts_loaded(info, stored)
    model._mok_experts_loaded = True
    if verify:
        from mok_hf.verify import verify_loaded

        hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
        verify_loaded(model, pretrained_model_name_or_path, info, variant=kwargs.get("variant"), **hub)
    patch_model(model, mok_config=mok_config)
    return (model, info) if wants_info else model


def _distribution(ep_size: int) -> dict[str, Any]:
    """The keywords that spread a model: the plug above EP 1, the experts function at EP 1, FSDP2 for several ranks."""
    config = distributed_config(ep_size)
    if ep_size > 1:
        return {"distributed_config": config}
    experts = {"experts_implementation": NAME}
    return {**experts, "distributed_config": config} if world_size() > 1 else experts


def _stored_config(name: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The configuration as stored or given, as a dict; {} if there is none to read."""
    from transformers import PreTrainedConfig

    given = kwargs.get("config")
    if isinstance(given, PreTrainedConfig):
        return given.to_dict()
    if name is None and given is None:
        return {}
    hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
    stored, _ = PreTrainedConfig.get_config_dict(given if given is not None else name, **hub)
    return stored


def _check_quantisation(stored: dict[str, Any], kwargs: dict[str, Any]) -> None:
    quantisation = stored.get("quantization_config") or {}
    method = str(getattr(quantisation, "quant_method", None) or dict(quantisation).get("quant_method", ""))
    given = kwargs.get("quantization_config")
    dequantize = given.get("dequantize") if isinstance(given, dict) else getattr(given, "dequantize", False)
    if "fp8" in method.lower() and not dequantize:
        raise UnsupportedError(
            f"the checkpoint is quantised (quant_method={method!r}): its experts would be FP8Experts; the kernel takes "
            "fp32 and bf16. Pass quantization_config=FineGrainedFP8Config(dequantize=True), or use a bf16 checkpoint."
        )


def _check_expert_count(stored: dict[str, Any], ep_size: int) -> None:
    for section in (stored, *(value for value in stored.values() if isinstance(value, dict))):
        for key in _EXPERT_COUNTS:
            count = section.get(key)
            if isinstance(count, int) and count > 0 and count % ep_size:
                raise UnsupportedError(refusals.uneven_experts(count, ep_size))


def _check_experts_loaded(info: dict[str, Any], stored: dict[str, Any]) -> None:
    for kind, what in (("missing_keys", "are not in the checkpoint"), ("mismatched_keys", "have another shape in it")):
        found = sorted(key for key in map(_key, info.get(kind) or ()) if _EXPERT_KEY.search(key))
        if found:
            raise ExpertsNotLoadedError(
                f"{len(found)} expert tensors of the model {what} (first: {', '.join(found[:3])}), so Transformers "
                f"initialised them at random; an expert must never be random. Checkpoint of model_type "
                f"{stored.get('model_type')!r}{_hint(info)}. Use a checkpoint in the per-expert format of that model, "
                "or the model class that belongs to it."
            )


def _key(entry: Any) -> str:
    return entry if isinstance(entry, str) else str(entry[0])  # mismatched keys come with both shapes


def _hint(info: dict[str, Any]) -> str:
    unexpected: Iterable[str] = info.get("unexpected_keys") or ()
    experts = sorted(key for key in unexpected if _EXPERT_KEY.search(key))
    return f"; it holds unused expert tensors such as {experts[0]}" if experts else ""
