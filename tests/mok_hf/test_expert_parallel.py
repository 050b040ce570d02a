"""EP > 1: the plug, the experts function, switching a loaded model, failures on one rank, DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed import run_ranks
from tests.mok_hf.workers import gradients, inputs_of, relative

WORKERS = "tests.mok_hf.workers"


def reference(path: Any, kind: str, ranks: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Each rank's loss and the mean of their gradients, from the unpatched model in this process."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    losses = [model(**inputs_of(kind, rank)).loss for rank in range(ranks)]
    (sum(losses) / ranks).backward()
    return [loss.detach() for loss in losses], gradients(model)


def assert_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(got[name], gradient) < limit or gradient.norm() < 1e-9 > got[name].norm(), name


@pytest.mark.parametrize(("kind", "world", "ep_size"), [("qwen2_moe", 2, 2), ("deepseek_v3", 4, 2)])
def test_four_combinations_of_plug_and_experts_function(checkpoints, kind, world, ep_size):
    path = checkpoints(kind)
    losses, expected = reference(path, kind, world)
    ranks = run_ranks(world, f"{WORKERS}:four_combinations", str(path), kind, ep_size, timeout=170)
    for plug, function, patched in ranks[0]:
        found = [rank[plug, function, patched] for rank in ranks]
        assert [float(one["loss"]) for one in found] == pytest.approx([float(loss) for loss in losses], rel=1e-5)
        assert_gradients(found[0]["gradients"], expected)
        # Two MoE layers: one kernel call each wherever anything of ours is in place, none elsewhere.
        assert {one["calls"] for one in found} == ({2} if plug or function or patched else {0})
        if patched:
            assert all("2 of 2 MoE blocks" in one["report"] for one in found)
            assert all(one["report"].count("shared expert fused") == 2 for one in found)


def test_loaded_model_is_switched_and_restored(checkpoints):
    ranks = run_ranks(2, f"{WORKERS}:switch", str(checkpoints("qwen2_moe")), "qwen2_moe", timeout=170)
    for rank in ranks:
        assert rank["drift"] < 2e-6
        assert "Qwen2MoeExperts (AllToAllEP) -> MoK kernel" in rank["report"]
        assert rank["plugs"] == ("mok", "all_to_all")
        assert rank["same_ids"] and rank["same_keys"]
        assert rank["same_step"], "an optimizer built before patching took another step than one built after it"
        assert rank["native_drift"] < 2e-6 and rank["native_calls"] == 0
        assert rank["classes"] == []


def test_a_block_wrapped_on_one_rank_stops_all_ranks(checkpoints):
    ranks = run_ranks(2, f"{WORKERS}:fails_on_one_rank", str(checkpoints("qwen2_moe")), "qwen2_moe", timeout=120)
    assert "another wrapper has set" in ranks[1]["error"][1]
    assert "failed on rank 1, so no rank was patched" in ranks[0]["error"][1]
    assert "another wrapper has set" in ranks[0]["error"][1]
    assert all(rank["untouched"] and rank["patched_after"] == 2 for rank in ranks)


def test_an_error_in_the_middle_restores_every_layer_on_every_rank(checkpoints):
    ranks = run_ranks(2, f"{WORKERS}:fails_while_applying", str(checkpoints("qwen2_moe")), "qwen2_moe", timeout=120)
    assert ranks[1]["error"] == ("MemoryError", "no room for the second layer") and ranks[1]["applied"] == 1
    assert "rank 1" in ranks[0]["error"][1] and ranks[0]["applied"] == 2
    assert all(rank["restored"] and rank["left"] == [] for rank in ranks)


def test_lora_or_hook_on_the_shared_expert_runs_it_natively(checkpoints):
    path = checkpoints("qwen2_moe")
    for rank in run_ranks(2, f"{WORKERS}:shared_expert_variants", str(path), "qwen2_moe", timeout=170):
        assert all(rank[variant]["drift"] < 2e-6 for variant in ("plain", "hook", "lora"))
        assert rank["plain"]["report"].count("shared expert fused") == 2
        assert "shared expert native: Qwen2MoeMLP has hooks" in rank["hook"]["report"]
        assert rank["hook"]["report"].count("shared expert fused") == 1
        assert rank["unhooked"]["report"].count("shared expert fused") == 2
        assert "shared expert native: Qwen2MoeMLP.gate_proj is Linear, not nn.Linear" in rank["lora"]["report"]


def test_ddp_at_one_expert_parallel_rank(checkpoints):
    """Unequal tokens, and an expert that one rank does not use still has a gradient there."""
    path = checkpoints("qwen3_moe")
    _, expected = reference(path, "qwen3_moe", 3)
    ranks = run_ranks(3, f"{WORKERS}:ddp_at_one", str(path), "qwen3_moe", timeout=120)
    used = ranks[0]["used"]
    assert any(len(one) < 8 for one in used) and len(set().union(*used)) > min(map(len, used))
    for rank in ranks:
        assert_gradients(rank["gradients"], expected)


def test_token_counts_are_exchanged_once_per_model_forward(checkpoints):
    for rank in run_ranks(2, f"{WORKERS}:token_count_marks", str(checkpoints("qwen2_moe")), "qwen2_moe", timeout=120):
        assert rank["whole"] == ["begin", "end"]
        assert rank["base"] == ["begin", "end"], "a call of the inner model counts as a forward too"
        assert rank["failed"] == ("ValueError", "after the last layer")
        assert rank["broken"] == ["begin", "end"], "a forward that raises must still end"
        assert rank["unpatched"] == []
        assert rank["equal"]
