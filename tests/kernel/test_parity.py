"""Output and every gradient against the reference in fp64, one process, one rank and several."""

from __future__ import annotations

import pytest
import torch

from tests.kernel.layers import Problem, assert_close, backend, load, poison, relative_error, workspace

SHAPES = {
    "plain": {"shared_width": 0},
    "shared": {"shared_width": 448, "gated": False},
    "gated": {"shared_width": 64},
    "two shared experts": {"shared_width": 384, "gated": False},
    "odd tiles": {"hidden": 192, "intermediate": 64, "shared_width": 320},
    "wide": {"hidden": 320, "intermediate": 448, "shared_width": 0, "experts": 4, "top_k": 2},
    "one route": {"top_k": 1},
    "sixteen routes": {"top_k": 16, "experts": 16},
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_fp32(name: str, ranks: int) -> None:
    problem = Problem([70, 1, 130, 99], **SHAPES[name])
    poison()
    assert_close(problem.step(ranks), problem.oracle(), 2e-6)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_bf16(name: str, ranks: int) -> None:
    problem = Problem([70, 1, 130, 99], dtype=torch.bfloat16, **SHAPES[name])
    poison()
    assert_close(problem.step(ranks), problem.oracle(), 1e-2, plain=problem.oracle(torch.bfloat16))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("macrobatch", [128, 384])
def test_ring_smaller_than_the_rows(macrobatch: int, ranks: int) -> None:
    """Every macrobatch but the first is replayed in the backward."""
    for dtype, limit in {(backend().dtype, backend().tolerance), (torch.bfloat16, 1e-2)}:
        problem = Problem([400, 300], experts=4, dtype=dtype)
        poison()
        assert_close(problem.step(ranks, macrobatch_size=macrobatch, minibatch_size=128), problem.oracle(), limit)


@pytest.mark.parametrize("limit", [0.05, 0.5, 10.0])
def test_clamped_swiglu(limit: float) -> None:
    """Case 10: activations beyond the limit, for routed and shared experts."""
    problem = Problem([200], swiglu_limit=limit)
    oracle = problem.oracle()
    unclamped = Problem([200]).oracle()
    if limit < 1:
        assert not torch.allclose(oracle["out"], unclamped["out"], rtol=1e-2)
    got = problem.step(1)
    if backend().dtype == torch.bfloat16:
        # A bf16 gate or up near the limit crosses it by rounding, in plain PyTorch as well, at other places.
        plain = problem.oracle(torch.bfloat16)
        for name, want in oracle.items():
            assert relative_error(got[name], want) < 1e-2 + 1.5 * relative_error(plain[name], want), name
    else:
        assert_close(got, oracle, 2e-6)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_scaled_inputs(scale: float) -> None:
    """Case 12: the tolerance is relative, so values of 1e-5 are held to it as well."""
    problem = Problem([150], scale=scale)
    assert_close(problem.step(1), problem.oracle(), 2e-6)


def test_route_weights_of_the_models_dtype() -> None:
    """Softmax routers hand over bf16 weights; their gradient comes back in bf16."""
    problem = Problem([64], dtype=torch.bfloat16, shared_width=0)
    p = problem.parts
    weights = p["weights"].bfloat16().requires_grad_()
    out = load().moe(p["x"], problem.ids, weights, p["gate_up"], p["down"], workspace=workspace())
    out.backward(problem.dout)
    assert weights.grad.dtype == torch.bfloat16
    assert relative_error(weights.grad, problem.oracle()["weights"]) < 1e-2


def test_nan_is_not_hidden() -> None:
    problem = Problem([64], shared_width=0)
    problem.parts["x"][3] = float("nan")
    out = problem.step(1)["out"]
    assert out[3].isnan().all() and not out[torch.arange(64) != 3].isnan().any()
