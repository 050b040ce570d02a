"""The same bits run to run, for every setting, and (but for weight gradients) for every EP size."""

from __future__ import annotations

import pytest
import torch

from tests.kernel.layers import Problem, assert_equal, backend, load, poison, workspace

TOKENS = [0, 1, 5, 51, 700, 3, 260, 90]
SETTINGS = [
    {"minibatch_size": minibatch, "macrobatch_size": macrobatch, "fwd_comm_sms": threads, "bwd_comm_sms": 4 - threads}
    for minibatch, macrobatch, threads in [
        (128, 128, 1),
        (128, 256, 2),
        (128, 640, 3),
        (256, 256, 3),
        (256, 768, 1),
        (256, 1 << 20, 2),
        (512, 512, 2),
        (512, 1024, 1),
        (512, 1 << 20, 3),
    ]
]
INVARIANT = {"out", "x", "weights", "scale"}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def problem(request: pytest.FixtureRequest, on_backend: None) -> Problem:
    if request.param == torch.float32 and backend().dtype != torch.float32:
        pytest.skip("this backend computes in bf16 alone")
    return Problem(TOKENS, dtype=request.param)


@pytest.fixture(scope="module")
def base(problem: Problem) -> dict:
    return {ranks: problem.step(ranks) for ranks in (1, 2, 4, 8)}


def test_runs(problem: Problem, base: dict) -> None:
    for _ in range(3):
        poison()
        assert_equal(problem.step(4), base[4])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_settings(problem: Problem, base: dict, settings: dict) -> None:
    """Weight gradients included: the rounding of an expert split by a macrobatch boundary happens once, at its end."""
    poison()
    for ranks in (1, 4):
        assert_equal(problem.step(ranks, **settings), base[ranks])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ep_sizes(base: dict, ranks: int) -> None:
    assert_equal(base[ranks], base[1], INVARIANT)


def test_threads(problem: Problem, base: dict) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert_equal(problem.step(2), base[2])
    finally:
        torch.set_num_threads(before)


def test_inference_gives_the_bits_of_training(problem: Problem, base: dict) -> None:
    mok, p = load(), problem.parts
    args, keywords = problem.arguments({n: p[n] for n in problem.names()}, problem.ids)
    with torch.no_grad():
        out = mok.moe(*args, **keywords, workspace=workspace())
    assert torch.equal(out, base[1]["out"])
