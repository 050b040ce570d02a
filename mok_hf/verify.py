"""`from_pretrained(verify=True)`: every loaded tensor against the checkpoint, in the checkpoint's own names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mok_hf.capabilities import UnsupportedError

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_SHOWN = 5


class VerificationError(RuntimeError):
    """A loaded tensor differs from the checkpoint, or has no counterpart to be compared with."""


def verify_loaded(model: Any, name: Any, info: dict[str, Any], *, variant: str | None = None, **hub: Any) -> int:
    """Compares the model's tensors with the checkpoint it was loaded from. Collective if the model is sharded.

    The loaded tensors are converted back to checkpoint names and layout, as saving does, one layer at a time, and
    compared bit for bit with the stored tensor cast to the loaded dtype. Ranks share the layers between them.

    Args:
        model: just loaded, unpatched or patched.
        name: what it was loaded from.
        info: Transformers' loading info; keys it reports as missing or unexpected are not compared.
        variant: as passed to from_pretrained.
        hub: download keywords as passed to from_pretrained.

    Returns:
        Number of checkpoint tensors compared, over all ranks.

    Raises:
        VerificationError: naming the tensors, on every rank.
        UnsupportedError: the checkpoint is not in safetensors format, or quantised.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            "verify=True compares tensors as they are stored, and this checkpoint is quantised. Pass verify=False."
        )
    stored = _Checkpoint(name, variant, hub)
    distributed = getattr(model, "_mesh_manager", None) is not None
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    excused = {*(info.get("missing_keys") or ()), *(getattr(model, "all_tied_weights_keys", None) or {})}
    compared: set[str] = set()
    wrong: list[str] = []
    for number, tensors in enumerate(_layers(model)):
        # Every rank takes part in gathering every layer; one of them compares it.
        full = {key: _full(tensor) for key, tensor in tensors.items()}
        if number % world != rank:
            continue
        kept = {key: tensor for key, tensor in full.items() if key not in excused}
        for key, tensor in revert_weight_conversion(model, kept).items():
            if key not in stored:
                wrong.append(f"{key} is not in the checkpoint")
                continue
            compared.add(key)
            expected = stored.read(key).to(tensor.dtype)
            if expected.shape != tensor.shape:
                wrong.append(f"{key} has shape {tuple(tensor.shape)}, stored is {tuple(expected.shape)}")
            elif not torch.equal(expected, tensor.cpu()):
                off = (expected.double() - tensor.cpu().double()).abs().max().item()
                wrong.append(f"{key} differs from the stored tensor by up to {off:.3g}")
    if distributed:
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, (sorted(compared), wrong))
        compared = {key for keys, _ in everyone for key in keys}
        wrong = [line for _, lines in everyone for line in lines]
    unread = stored.keys - compared - set(info.get("unexpected_keys") or ()) - excused
    wrong += [f"{key} is in the checkpoint but in no tensor of the model" for key in sorted(unread)]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise VerificationError(
            f"{len(wrong)} of {len(stored.keys)} tensors of {name} were not loaded as stored: "
            f"{'; '.join(wrong[:_SHOWN])}{more}. Load it in one process to see whether sharded loading is at "
            "fault, and report it with this message."
        )
    return len(compared)


def _layers(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The state dict, one decoder layer at a time: conversions combine tensors of one layer, never of several."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in model.state_dict().items():
        match = _LAYER.match(key)
        groups.setdefault(match.group(1) if match else key, {})[key] = tensor
    yield from groups.values()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class _Checkpoint:
    """The safetensors files of a checkpoint; tensors are read one at a time."""

    def __init__(self, name: Any, variant: str | None, hub: dict[str, Any]):
        from safetensors import safe_open
        from transformers.utils import cached_file

        middle = f".{variant}" if variant else ""
        quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
        index = cached_file(name, f"model.safetensors.index{middle}.json", **quiet)
        if index is not None:
            shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            files = [cached_file(name, shard, **hub) for shard in shards]
        else:
            files = [cached_file(name, f"model{middle}.safetensors", **quiet)]
        if files == [None]:
            raise UnsupportedError(f"verify=True reads safetensors, and {name} holds none. Pass verify=False.")
        self._opened = [safe_open(file, framework="pt") for file in files]
        self._where = {key: opened for opened in self._opened for key in opened.keys()}

    @property
    def keys(self) -> set[str]:
        return set(self._where)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def read(self, key: str) -> torch.Tensor:
        return self._where[key].get_tensor(key)
