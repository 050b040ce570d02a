"""Ranks as real processes over gloo: results, growing buffers, a rank that dies, and what is left in /dev/shm."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.distributed import RankError, launch_ranks, run_ranks
from tests.kernel import workers
from tests.kernel.layers import Problem, assert_equal, load, relative_error

INVARIANT = {"out", "x", "weights", "scale"}


def left_behind() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("mok-")]


def merged(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {n: torch.cat([r[n] for r in results]) for n in results[0] if not n.startswith("shared")}


@pytest.mark.parametrize(
    "settings", [{}, {"macrobatch_size": 128, "minibatch_size": 128, "fwd_comm_sms": 2}], ids=["default", "ring"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_have_the_bits_of_the_virtual_group(ranks: int, settings: dict) -> None:
    tokens = [0, 51, 300, 5][4 - ranks :]
    want = Problem(tokens).results(ranks)
    for got, expected in zip(run_ranks(ranks, "tests.kernel.workers:step", tokens, settings), want, strict=True):
        assert_equal(got, expected)
    assert not left_behind()


def test_two_groups_in_one_world() -> None:
    tokens = [60, 200]
    results = run_ranks(4, "tests.kernel.workers:two_groups", tokens)
    for i in range(2):
        for got, want in zip(results[2 * i : 2 * i + 2], Problem(tokens, seed=i).results(2), strict=True):
            assert_equal(got, want)


def test_counts_that_change() -> None:
    results = run_ranks(2, "tests.kernel.workers:changing_counts")
    for i, count in enumerate((51, 3000, 0)):
        want = Problem([count, 51], seed=count).oracle()
        got = merged([r[i] for r in results])
        for name in got:
            assert relative_error(got[name], want[name]) < 2e-6, (count, name)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_rank_is_named(where: str) -> None:
    """Case 13."""
    outcomes = launch_ranks(3, "tests.kernel.workers:dies", where, timeout=100)
    assert outcomes[1].returncode == -9
    for rank in (0, 2):
        report = outcomes[rank].result
        assert report["rank"] == 1 and where in report["phase"], report
        assert "EP rank 1" in report["text"]
        assert report["seconds"] < 3 * workers.TIMEOUT_S
        assert report["poisoned"] == 2 and report["again"] < workers.TIMEOUT_S
    assert not left_behind()


@pytest.mark.parametrize("how", ["raise", "term", "kill"])
def test_no_segment_is_left(how: str) -> None:
    with pytest.raises(RankError):
        run_ranks(2, "tests.kernel.workers:hold_segments", how)
    for outcome in launch_ranks(2, "tests.kernel.workers:hold_segments", how):
        assert outcome.returncode == {"raise": 1, "term": -15, "kill": -9}[how], outcome.stderr
    assert not left_behind()


def test_ranks_with_buffers_of_different_sizes_are_refused() -> None:
    """They would write beyond each other's ends: max_tokens_per_rank that differs from rank to rank."""
    for text in run_ranks(2, "tests.kernel.workers:different_sizes"):
        assert "different sizes ([1024, 2048] bytes): max_tokens_per_rank" in text


def test_ranks_on_two_machines_are_refused() -> None:
    for rank, text in enumerate(run_ranks(2, "tests.kernel.workers:pretend_two_machines")):
        assert f"EP ranks [{1 - rank}] run on another machine" in text and "ep_size" in text


def test_symmetric_memory_is_asked_for_as_torch_takes_it() -> None:
    """Without a GPU the call gets as far as the device, past its arguments."""
    symmetric = sys.modules[load().SymmetricBuffer.__module__]
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        symmetric._allocation(1024, torch.device("cpu"))
