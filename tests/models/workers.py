"""What the ranks of the parity and checkpoint tests run. Every function is collective and called on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.models.compare import FP32_LIMIT, beyond_fp32, relative_errors, step, whole, worst
from tests.models.ranks import native, own_errors, patched, rank_batch


def two_ranks(
    root: Path, kinds: list[str], variants: list[str], without_ep: list[str], saved: Path
) -> dict[str, dict[str, Any]]:
    """Everything asked of two ranks, in one launch. A variant is named "kind@variant"."""
    return {
        "parity": parity(root, kinds + variants, 2),
        "without_ep": parity(root, without_ep, 1),
        "saved": save_zero_reload(root, kinds, saved, 2),
    }


def four_ranks(root: Path, kinds: list[str], in_groups: list[str], saved: Path) -> dict[str, dict[str, Any]]:
    """Everything asked of four ranks, in one launch; `saved` is what `two_ranks` wrote."""
    return {
        "parity": parity(root, kinds, 4),
        "groups": parity(root, in_groups, 2),
        "reloaded": reload(root, kinds, saved, 4),
    }


def parity(root: Path, kinds: list[str], ep_size: int) -> dict[str, dict[str, float]]:
    """Patched against native expert parallelism on ragged batches; per kind the tensors outside the limits."""
    results = {}
    for name in kinds:
        announce(name)
        kind, path, rank = name.partition("@")[0], root / name, dist.get_rank()
        batches = [rank_batch(kind, rank) for rank in range(dist.get_world_size())]
        expected = step(native(kind, path, ep_size), batches[rank])
        actual = step(patched(kind, path, ep_size), batches[rank])
        results[name] = beyond_limits(kind, path, relative_errors(actual, expected), batches)
    return results


def beyond_limits(
    kind: str, path: Path, errors: dict[str, float], batches: list[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """`beyond_fp32` for a step in which rank r trained on `batches[r]`. Collective."""
    late = any_rank(not worst(errors)[0] <= FP32_LIMIT)
    own = own_errors(kind, path, batches) if late else {}
    return beyond_fp32(errors, lambda: own)


def save_zero_reload(root: Path, kinds: list[str], saved: Path, ep_size: int) -> dict[str, list[str]]:
    """Saves each kind from its shards, zeroes the model, loads the saved files; per kind what is not as it was."""
    results = {}
    for kind in kinds:
        announce(kind)
        model = patched(kind, root / kind, ep_size, verify=True)
        before = {name: local(tensor).clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(saved / kind)
        dist.barrier()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                local(tensor).zero_()
        model = patched(kind, saved / kind, ep_size)
        after = {name: local(tensor) for name, tensor in model.state_dict().items()}
        results[kind] = unequal(after, before) + unequal(read(saved / kind), read(root / kind))
    return results


def reload(root: Path, kinds: list[str], saved: Path, ep_size: int, verify: bool = True) -> dict[str, list[str]]:
    """Loads what `save_zero_reload` wrote at another EP size; per kind the tensors that differ from the original."""
    results = {}
    for kind in kinds:
        announce(kind)
        model = patched(kind, saved / kind, ep_size, verify=verify)
        loaded = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        results[kind] = unequal(loaded, original_state(kind, root))
    return results


def reload_all(root: Path, loads: list[tuple[list[str], Path]], ep_size: int) -> list[dict[str, list[str]]]:
    """`reload` of several folders, whose names may be others than those we save."""
    return [reload(root, kinds, folder, ep_size, verify=False) for kinds, folder in loads]


def original_state(kind: str, root: Path) -> dict[str, torch.Tensor]:
    """State of the unpatched model as one process loads it."""
    from mok_hf.conversions import register_conversions
    from tests.checkpoints import auto_class

    register_conversions()
    model: nn.Module = auto_class(kind).from_pretrained(root / kind, dtype=torch.float32)
    return dict(model.state_dict())


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def unequal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names on one side only, and names of tensors that differ in any bit."""
    names = actual.keys() ^ expected.keys()
    common = actual.keys() & expected.keys()
    return sorted(names | {key for key in common if not torch.equal(actual[key], expected[key])})


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor; shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def any_rank(flag: bool) -> bool:
    """Whether it holds on any rank."""
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return bool(tensor)


def announce(kind: str) -> None:
    """So that a failed run says which model it was at."""
    print(f"model {kind}", file=sys.stderr)
