"""prepare, save_state and load_state: the loop equals one process, resumes bit for bit, and refuses misuse."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.checkpoints import build

    return build("deepseek_v3", tmp_path_factory.mktemp("checkpoints"), name="dropout", attention_dropout=0.1)


@pytest.fixture(scope="module")
def checkpoint_without_dropout(tmp_path_factory):
    from tests.checkpoints import build

    return build("deepseek_v3", tmp_path_factory.mktemp("checkpoints"))


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


@pytest.fixture(scope="module")
def alone(checkpoint_without_dropout):
    """Three steps in one process on Transformers' own code."""
    (result,) = run_ranks(1, "tests.training.workers:train", checkpoint_without_dropout, "native", 1, 3)
    assert result["losses"][-1] < result["losses"][0]
    return result


@pytest.mark.parametrize(("implementation", "ep_size"), [("mok", 2), ("native", 2), ("ddp", 1)])
def test_prepared_loop_trains_as_one_process(checkpoint_without_dropout, alone, implementation, ep_size):
    """Two ranks with half of each batch: gradients, clipping and the optimizer must do what one process does."""
    first, second = run_ranks(2, "tests.training.workers:train", checkpoint_without_dropout, implementation, ep_size, 3)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=2e-6)
    worst = {name: relative(first["parameters"][name], value) for name, value in alone["parameters"].items()}
    assert max(worst.values()) < 5e-6, worst


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_accumulation_is_bit_exact(checkpoint_without_dropout, ranks):
    worker = "tests.training.workers:accumulate"
    plain, fused = (run_ranks(ranks, worker, checkpoint_without_dropout, ranks, fuse) for fuse in (False, True))
    for want, got in zip(plain, fused, strict=True):
        assert want["added"] == 0 and got["added"] > 0
        for kind in ("gradients", "parameters"):
            assert [name for name, value in want[kind].items() if not torch.equal(value, got[kind][name])] == []


@pytest.mark.parametrize(
    ("implementation", "lora"), [("mok", False), ("mok", True), ("native", False)], ids=["mok", "mok-lora", "native"]
)
def test_resume_is_bit_exact(checkpoint, tmp_path, implementation, lora):
    results = run_ranks(2, "tests.training.workers:resume", checkpoint, tmp_path / "state", implementation, 2, lora)
    for result in results:
        assert result["progress"] == {"step": 2}
        assert result["resumed_losses"] == result["losses"]
        assert result["unequal"] == []
        assert result["trained"], "the resumed run must have moved parameters"
    if lora:
        adapters = [name for name in results[0]["trained"] if "lora_" in name]
        assert adapters == results[0]["trained"]
        for name in adapters:
            assert torch.equal(results[0]["parameters"][name], results[1]["parameters"][name]), name


def test_every_rank_gets_its_own_experts_back(checkpoint_without_dropout, tmp_path):
    """Saved at EP 2, zeroed and loaded; then loaded in one process and at EP 4."""
    path, folder = checkpoint_without_dropout, tmp_path / "state"
    saved = run_ranks(2, "tests.training.workers:save_and_restore", path, folder, "mok", 2)
    for result in saved:
        assert result["zeroed"]
        assert result["unequal"] == []
    for name, first in saved[0]["experts"].items():
        assert not torch.equal(first, saved[1]["experts"][name]), f"{name} must hold other experts on each rank"

    for world_size in (1, 4):
        loaded = run_ranks(
            world_size, "tests.training.workers:load_elsewhere", path, folder, "mok", world_size, timeout=170
        )
        for name, value in saved[0]["full"].items():
            for rank, result in enumerate(loaded):
                assert torch.equal(result[name], value), f"{name} on rank {rank} of {world_size}"


def test_adapters_start_equal_and_average_gradients(checkpoint_without_dropout):
    path = checkpoint_without_dropout
    (alone,) = run_ranks(1, "tests.training.workers:lora_gradients", path, "native", 1)
    both = run_ranks(2, "tests.training.workers:lora_gradients", path, "mok", 2)
    assert len(alone["gradients"]) > 0
    for name, reference in alone["gradients"].items():
        for result in both:
            assert torch.equal(result["initial"][name], alone["initial"][name]), name
            assert relative(result["gradients"][name], reference) < 1e-5, name
