"""prepare, save_state and load_state: the loop equals one process, resumes bit for bit, and refuses misuse."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks

IMPLEMENTATIONS = ["mok", "native"]


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prepared_loop_trains_as_one_process(checkpoint_without_dropout, implementation):
    """Two ranks with half of each batch: gradients, clipping and the optimizer must do what one process does."""
    (alone,) = run_ranks(1, "tests.training.workers:train", checkpoint_without_dropout, "native", 1, 3)
    both = run_ranks(2, "tests.training.workers:train", checkpoint_without_dropout, implementation, 2, 3)
    assert both[0]["losses"] == both[1]["losses"]
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=2e-6)
    assert alone["losses"][-1] < alone["losses"][0]
    worst = {name: relative(both[0]["parameters"][name], value) for name, value in alone["parameters"].items()}
    assert max(worst.values()) < 5e-6, worst


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_rank_gets_its_own_experts_back(checkpoint_without_dropout, tmp_path, implementation):
    """Saved at EP 2, zeroed and loaded; then loaded in one process and at EP 4."""
    folder = tmp_path / "state"
    saved = run_ranks(
        2, "tests.training.workers:save_and_restore", checkpoint_without_dropout, folder, implementation, 2
    )
    for result in saved:
        assert result["zeroed"]
        assert result["unequal"] == []
    for name, first in saved[0]["experts"].items():
        assert not torch.equal(first, saved[1]["experts"][name]), f"{name} must hold other experts on each rank"

    for world_size in (1, 4):
        loaded = run_ranks(
            world_size,
            "tests.training.workers:load_elsewhere",
            checkpoint_without_dropout,
            folder,
            implementation,
            world_size,
        )
        for name, value in saved[0]["full"].items():
            for rank, result in enumerate(loaded):
                assert torch.equal(result[name], value), f"{name} on rank {rank} of {world_size}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adapters_start_equal_and_average_gradients(checkpoint_without_dropout, implementation):
    (alone,) = run_ranks(1, "tests.training.workers:lora_gradients", checkpoint_without_dropout, "native", 1)
    both = run_ranks(2, "tests.training.workers:lora_gradients", checkpoint_without_dropout, implementation, 2)
    assert len(alone["gradients"]) > 0
    for name, reference in alone["gradients"].items():
        for result in both:
            assert torch.equal(result["initial"][name], alone["initial"][name]), name
            assert relative(result["gradients"][name], reference) < 1e-5, name
