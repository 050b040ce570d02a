"""bf16, block by block at fixed routes: below 1e-2 and within 1.5 times plain bf16 PyTorch, against fp64.

Routes are fixed because a near tie that bf16 breaks the other way changes the function, not its accuracy.

They run on the backend of tests/kernel/layers.py: the CPU, or a GPU where tests/gpu collects them.
"""

from __future__ import annotations

import pytest
import torch

from mok_hf.layer import fused
from tests.checkpoints import EXPERTS, HIDDEN, KINDS, ROUTES
from tests.kernel.layers import backend
from tests.models.compare import BF16_LIMIT, gradients, relative_error, relative_errors, step, worst
from tests.models.ranks import moe_blocks, native, patched, rank_batch

TOKENS = 96
CLAMPED = ["deepseek_v4", "glm5_next"]


def routed_and_shared(block, hidden, ids, weights):
    """What every block computes once routes are known, in the unpatched modules' own arithmetic."""
    out = block.experts(hidden, ids, weights)
    shared = getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)
    if shared is None:
        return out
    gate = getattr(block, "shared_expert_gate", None)
    return out + (shared(hidden) if gate is None else torch.sigmoid(gate(hidden)) * shared(hidden))


def run(compute, block, dtype):
    """Output and gradients of one block on the same bf16 inputs."""
    generator, device = torch.Generator().manual_seed(3), backend().device

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16).to(dtype)

    hidden, gradient = draw(TOKENS, HIDDEN).requires_grad_(), draw(TOKENS, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:ROUTES] for _ in range(TOKENS)]).to(device)
    weights = torch.rand(TOKENS, ROUTES, generator=generator).to(device, torch.bfloat16).to(dtype).requires_grad_()
    out = compute(block, hidden, ids, weights)
    out.backward(gradient)
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad} | gradients(block)


def errors_per_block(kind, path):
    """Of each block: our errors against fp64, and those of plain bf16 PyTorch."""
    models = native(kind, path), native(kind, path), patched(kind, path)
    exact_model, plain_model, our_model = (model.to(backend().device) for model in models)
    for exact, plain, ours in zip(*map(moe_blocks, (exact_model, plain_model, our_model)), strict=True):
        # The same bf16 values everywhere, so that only the arithmetic differs.
        exact.to(torch.bfloat16).to(torch.float64).experts.config._experts_implementation = "eager"
        reference = run(routed_and_shared, exact, torch.float64)
        plain_errors = relative_errors(run(routed_and_shared, plain.to(torch.bfloat16), torch.bfloat16), reference)
        yield relative_errors(run(fused, ours.to(torch.bfloat16), torch.bfloat16), reference), plain_errors


@pytest.mark.parametrize("kind", KINDS)
def test_block_against_fp64(kind, checkpoints):
    path = checkpoints(kind)
    if kind in CLAMPED:
        path = checkpoints(kind, f"{kind}-limit-10", swiglu_limit=10.0)
    for errors, plain_errors in errors_per_block(kind, path):
        assert worst(errors)[0] < BF16_LIMIT, worst(errors)
        assert {name: (e, plain_errors[name]) for name, e in errors.items() if not e <= 1.5 * plain_errors[name]} == {}


@pytest.mark.parametrize("kind", CLAMPED)
def test_block_against_fp64_beyond_the_clamp(kind, checkpoints):
    """Rounding moves activations across a limit that many are near, where the gradient jumps: 1e-2 is out of reach."""
    for errors, plain_errors in errors_per_block(kind, checkpoints(kind)):
        assert errors["out"] < BF16_LIMIT
        assert {name: (e, plain_errors[name]) for name, e in errors.items() if not e <= 1.5 * plain_errors[name]} == {}


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "deepseek_v4"])
def test_model_in_bf16(kind, checkpoints):
    """The whole model: logits not worse than 1.5 times the unpatched bf16 model's, against fp32."""
    path, device = checkpoints(kind), backend().device
    inputs = {name: value.to(device) for name, value in rank_batch(kind, 0).items()}
    exact = step(native(kind, path).to(device), inputs)
    plain = step(native(kind, path, dtype=torch.bfloat16).to(device), inputs)
    ours = step(patched(kind, path, dtype=torch.bfloat16).to(device), inputs)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in ours.items() if ".experts." in name)
    assert relative_error(ours["logits"], exact["logits"]) <= 1.5 * relative_error(plain["logits"], exact["logits"])
