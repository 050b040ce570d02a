"""The launcher of multi-process tests: results in rank order, the failing rank's own words, nobody left behind."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, launch_ranks, run_ranks


def gather(value):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item(), os.environ["OMP_NUM_THREADS"]


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise KeyError("rank one has no such expert")
    dist.barrier()


def hang_on_rank_zero():
    if dist.get_rank() == 0:
        signal.pause()
    return os.getpid()


def die_on_rank_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_results_come_back_in_rank_order():
    assert run_ranks(3, "tests.test_distributed:gather", 10) == [(rank, 33, "1") for rank in range(3)]


def test_the_rank_that_raised_is_shown_and_the_waiting_one_is_not_blamed():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*rank one has no such expert") as error:
        run_ranks(2, "tests.test_distributed:fail_on_rank_one")
    assert "rank 0 of 2" not in str(error.value)


def test_timeout_kills_every_rank_and_shows_where_it_hung():
    with pytest.raises(RankError, match=r"(?s)did not end within 10 s.*hang_on_rank_zero"):
        run_ranks(2, "tests.test_distributed:hang_on_rank_zero", timeout=10)


def test_survivors_report_when_a_rank_is_killed():
    outcomes = launch_ranks(2, "tests.test_distributed:die_on_rank_one")
    assert [o.returncode for o in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].result == "alive"
