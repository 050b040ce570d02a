"""Parity in one process, every model type: logits and every gradient against the unpatched model."""

from __future__ import annotations

import pytest
import torch

from mok_hf.capabilities import adapter_of
from mok_hf.model_patches import ADAPTERS
from tests.checkpoints import KINDS, batch
from tests.models.compare import beyond_fp32, relative_errors, step
from tests.models.ranks import moe_blocks, native, own_errors, patched

LENGTHS = [13, 7]


def expect_parity(kind, path):
    """The patched model against the unpatched one; returns the latter's results."""
    inputs = batch(kind, LENGTHS)
    expected = step(native(kind, path), inputs)
    errors = relative_errors(step(patched(kind, path), inputs), expected)
    assert not beyond_fp32(errors, lambda: own_errors(kind, path, [inputs]))
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_every_gradient_match_the_unpatched_model(kind, checkpoints):
    expect_parity(kind, checkpoints(kind))


@pytest.mark.parametrize(
    "kind", ["qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_talker", "deepseek_v3", "glm4_moe"]
)
def test_unnormalised_routing_weights(kind, checkpoints):
    """`norm_topk_prob=False`: the router's gradient is another one, and the loss alone would not show it."""
    unnormalised = expect_parity(kind, checkpoints(kind, f"{kind}-unnormalised", norm_topk_prob=False))
    normalised = step(native(kind, checkpoints(kind)), batch(kind, LENGTHS))
    assert relative_errors(normalised, unnormalised)["logits"] > 1e-3


def test_every_row_of_the_model_table_is_built_by_a_checkpoint(checkpoints):
    """No row without a test: each adapter is the one of a block of some tiny model, and names its experts' class."""
    seen = set()
    for kind in KINDS:
        for block in moe_blocks(native(kind, checkpoints(kind))):
            adapter = adapter_of(block)
            experts = type(block.experts)
            assert adapter is not None
            assert adapter.experts == f"{experts.__module__}.{experts.__qualname__}"
            seen.add(adapter.block)
    assert seen == set(ADAPTERS)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "deepseek_v4"])
def test_shared_expert_runs_inside_the_kernel(kind, checkpoints):
    model = patched(kind, checkpoints(kind))
    calls = []
    for block in moe_blocks(model):
        shared = getattr(block, "shared_experts", None) or block.shared_expert
        shared.act_fn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(**batch(kind, LENGTHS))
    assert not calls
    assert {layer.shared for layer in model._mok_report.layers} == {"fused"}
