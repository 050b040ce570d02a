"""A rank that never comes, one that refuses its input, one whose process is killed: named, in time, never a hang."""

import logging
import time

import pytest
import torch

from tests.distributed import launch_ranks
from tests.kernel.layers import Problem, load, workspace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(90)]


def call(problem, own, **settings):
    args, keywords = problem.arguments({n: problem.parts[n] for n in problem.names()}, problem.ids)
    args = (*args[:3], *(w[:4] for w in args[3:]))  # of two ranks' experts, rank 0's
    return load().moe(*args, **keywords, workspace=own, max_tokens_per_rank=128, **settings)


def until(condition, seconds=3.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)


def test_a_rank_that_does_not_come(caplog):
    mok, group, problem = load(), load().VirtualGroup(2), Problem([100])
    own, other = workspace(group, 0, timeout_s=0.5), workspace(group, 1, timeout_s=0.5)
    for w in (own, other):
        w.handle(0, 3, problem.hidden, torch.bfloat16, 128)
    with caplog.at_level(logging.ERROR, logger="mok"):
        start = time.monotonic()
        out = call(problem, own)
        assert time.monotonic() - start < 0.3, "the call itself does not wait"
        torch.cuda.synchronize()
        assert 0.4 < time.monotonic() - start < 3
        assert torch.isnan(out).all()
        with pytest.raises(mok.MoKTimeoutError, match=r"EP rank 0 waited more than 0\.5 s for EP rank 1") as caught:
            own.check()
        assert (caught.value.rank, caught.value.reporter) == (1, 0)
        assert caught.value.phase == "forward, before dispatch"
        with pytest.raises(mok.MoKTimeoutError):  # poisoned
            call(problem, own)
        until(lambda: "waited more than 0.5 s for EP rank 1" in caplog.text)
    # The rank that was waited for learns of it when it comes at last, and names the same.
    until(lambda: raises(mok.MoKTimeoutError, other.check))
    with pytest.raises(mok.MoKTimeoutError) as caught:
        call(problem, other)
    assert (caught.value.rank, caught.value.reporter) == (1, 0)
    assert torch.isfinite(problem.step(1)["out"]).all()  # the device is usable


def raises(kind, function):
    try:
        function()
    except kind:
        return True
    return False


def test_a_rank_that_refuses_its_input_frees_the_others():
    mok, group, problem = load(), load().VirtualGroup(2), Problem([100])
    own, other = workspace(group, 0, timeout_s=60), workspace(group, 1, timeout_s=60)
    other.handle(0, 3, problem.hidden, torch.bfloat16, 128)
    start = time.monotonic()
    out = call(problem, own)
    with pytest.raises(ValueError, match="more than max_tokens_per_rank=1"):
        other.handle(2, 3, problem.hidden, torch.bfloat16, 1)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5 and torch.isnan(out).all()
    with pytest.raises(mok.MoKTimeoutError, match="EP rank 1 refused its input"):
        own.check()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_process_is_named(where):
    """Two processes share the GPU through CUDA IPC; one is killed between two layers."""
    survivor, killed = launch_ranks(2, "tests.gpu.workers:dies", where, timeout=80, env={"LOCAL_RANK": "0"})
    assert killed.returncode == -9
    assert survivor.returncode == 0, survivor.stderr
    report = survivor.result
    assert report["rank"] == 1 and report["phase"].startswith(where) and report["nan"], report
    assert report["seconds"] < 10 and report["poisoned"] == 2
    assert "rank 1" in survivor.stderr, "the watchdog wrote it"
