"""EP > 1: the plug, the experts function, switching a loaded model, failures on one rank, DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed import run_ranks
from tests.mok_hf.workers import gradients, ids_of, inputs_of, relative

pytestmark = pytest.mark.timeout(420)  # the first test of a size runs all of that size (conftest.py)


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


def assert_losses(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [float(loss) for loss in got] == pytest.approx([float(loss) for loss in expected], rel=1e-5)


@pytest.mark.parametrize(("kind", "world"), [("qwen2_moe", 2), ("deepseek_v3", 4)])
def test_four_combinations_of_plug_and_experts_function(checkpoints, ranks, kind, world):
    losses, expected = reference(checkpoints(kind), kind, world)
    results = ranks(world, "combinations")
    for plug, function, patched in results[0]:
        found = [rank[plug, function, patched] for rank in results]
        assert_losses([one["loss"] for one in found], losses)
        assert_gradients(found[0]["gradients"], expected)
        # Two MoE layers: one kernel call each wherever anything of ours is in place, none elsewhere.
        assert {one["calls"] for one in found} == ({2} if plug or function or patched else {0})
        if patched:
            assert all("2 of 2 MoE blocks" in one["report"] for one in found)
            assert all(one["report"].count("shared expert fused") == 2 for one in found)


def test_replicas_of_sharded_experts(checkpoints, ranks):
    losses, expected = reference(checkpoints("qwen2_moe"), "qwen2_moe", 4)
    found = ranks(4, "replicas")
    assert_losses([one["loss"] for one in found], losses)
    for one in found:
        assert_gradients(one["gradients"], expected)


def test_loaded_model_is_switched_and_restored(ranks):
    for rank in ranks(2, "switch"):
        assert rank["drift"] < 2e-6
        assert "Qwen2MoeExperts (AllToAllEP) -> MoK kernel" in rank["report"]
        assert rank["plugs"] == ("mok", "all_to_all")
        assert rank["same_ids"] and rank["same_keys"]
        assert rank["same_step"], "an optimizer built before patching took another step than one built after it"
        assert rank["native_drift"] < 2e-6 and rank["native_calls"] == 0
        assert rank["classes"] == []


def test_a_block_wrapped_on_one_rank_stops_all_ranks(ranks):
    first, second = ranks(2, "wrapped on one rank")
    assert "another wrapper has set" in second["error"][1]
    assert "failed on rank 1, so no rank was patched" in first["error"][1]
    assert "another wrapper has set" in first["error"][1]
    assert all(rank["untouched"] and rank["patched_after"] == 2 for rank in (first, second))
    for rank in (first, second):  # strict=False on a model loaded with the plug: what native means there
        assert "1 of 2 MoE blocks on the MoK kernel" in rank["half"]
        assert "left native: another wrapper" in rank["half"]
        assert "routed experts run on the kernel all the same, through ep_implementation='mok'" in rank["half"]


def test_an_error_in_the_middle_restores_every_layer_on_every_rank(ranks):
    first, second = ranks(2, "error while applying")
    assert second["error"] == ("MemoryError", "no room for the second layer") and second["applied"] == 1
    assert "rank 1" in first["error"][1] and first["applied"] == 2
    assert all(rank["restored"] and rank["left"] == [] for rank in (first, second))


def test_lora_or_hook_on_the_shared_expert_runs_it_natively(ranks):
    for rank in ranks(2, "shared expert"):
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
    found = run_ranks(3, "tests.mok_hf.workers:ddp_at_one", str(path), "qwen3_moe", timeout=120)
    used = found[0]["used"]
    assert any(len(one) < 8 for one in used) and len(set().union(*used)) > min(map(len, used))
    for rank in found:
        assert_gradients(rank["gradients"], expected)


def test_token_counts_are_exchanged_once_per_model_forward(ranks):
    for rank in ranks(2, "token counts"):
        assert rank["whole"] == ["begin", "end"]
        assert rank["base"] == ["begin", "end"], "a call of the inner model counts as a forward too"
        assert rank["failed"] == ("ValueError", "after the last layer")
        assert rank["broken"] == ["begin", "end"], "a forward that raises must still end"
        assert rank["unpatched"] == []
        assert rank["equal"]


def test_a_rank_may_grow_to_5000_tokens_and_shrink_to_one(checkpoints, ranks):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("qwen2_moe"), dtype=torch.float32)
    with torch.no_grad():
        for rank, found in enumerate(ranks(2, "growing")):
            for ids, logits in zip(ids_of(rank), found, strict=True):
                assert relative(logits, model(input_ids=ids).logits) < 2e-6
