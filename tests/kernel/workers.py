"""What the ranks of test_processes.py run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.kernel.layers import Problem, load

TIMEOUT_S = 3.0


def rank_leaves(problem: Problem, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], slice]:
    local = problem.experts // ranks
    rows = slice(sum(problem.tokens[:rank]), sum(problem.tokens[: rank + 1]))
    owned = slice(rank * local, (rank + 1) * local)
    cut = {"x": rows, "weights": rows, "scale": rows, "gate_up": owned, "down": owned}
    return {n: problem.parts[n][cut.get(n, slice(None))].clone().requires_grad_() for n in problem.names()}, rows


def run_layer(problem: Problem, workspace: Any, **settings: Any) -> dict[str, torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaves, rows = rank_leaves(problem, rank, ranks)
    args, keywords = problem.arguments(leaves, problem.ids[rows])
    out = load().moe(*args, **keywords, workspace=workspace, **settings)
    out.backward(problem.dout[rows])
    return {"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def step(tokens: list[int], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    workspace = load().workspace(dist.group.WORLD, timeout_s=60)
    return run_layer(Problem(tokens), workspace, **settings)


def two_groups(tokens: list[int]) -> dict[str, torch.Tensor]:
    """Two EP groups of two ranks in a world of four, each with the whole problem."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    problem = Problem(tokens, seed=rank // 2)
    leaves, rows = rank_leaves(problem, rank % 2, 2)
    args, keywords = problem.arguments(leaves, problem.ids[rows])
    out = load().moe(*args, **keywords, workspace=load().workspace(group, timeout_s=60))
    out.backward(problem.dout[rows])
    return {"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def changing_counts() -> list[dict[str, torch.Tensor]]:
    """Rank 1 stays at 51 tokens while rank 0 goes 51 -> 3000 -> 0: the buffers grow on both, before any layer runs."""
    workspace = load().workspace(dist.group.WORLD, timeout_s=60)
    return [run_layer(Problem([count, 51], seed=count), workspace) for count in (51, 3000, 0)]


def dies(where: str) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a layer; the others report what they raised, and after how long."""
    mok, rank = load(), dist.get_rank()
    problem = Problem([100] * dist.get_world_size(), experts=12)
    workspace = mok.workspace(dist.group.WORLD, timeout_s=TIMEOUT_S)
    run_layer(problem, workspace)  # everything is up
    if rank == 1 and where == "forward":
        # It has published its ids and built its schedule, and dies before it dispatches.
        functional = next(
            m
            for m in __import__("sys").modules.values()
            if getattr(m, "moe", None) is mok.moe and hasattr(m, "_backward")
        )
        schedule = functional.schedule

        def last_act(*args: Any) -> Any:
            schedule(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        functional.schedule = last_act
    leaves, rows = rank_leaves(problem, rank, dist.get_world_size())
    args, keywords = problem.arguments(leaves, problem.ids[rows])
    start = time.monotonic()
    report: dict[str, Any] = {}
    try:
        out = mok.moe(*args, **keywords, workspace=workspace)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        out.backward(problem.dout[rows])
    except mok.MoKTimeoutError as error:
        report = {"rank": error.rank, "phase": error.phase, "text": str(error), "seconds": time.monotonic() - start}
    # Poisoned: whatever is called next raises at once.
    start = time.monotonic()
    for call in (mok.check, lambda: run_layer(problem, workspace)):
        try:
            call()
        except mok.MoKTimeoutError:
            report["poisoned"] = report.get("poisoned", 0) + 1
    report["again"] = time.monotonic() - start
    return report


def hold_segments(how: str) -> None:
    """Opens the shared memory, checks it, then ends without any clean-up of its own."""
    mok, rank = load(), dist.get_rank()
    buffer = mok.SymmetricBuffer(1 << 20, dist.group.WORLD)
    assert len(buffer.segments) == dist.get_world_size() and all((s == 0).all() for s in buffer.segments)
    dist.barrier()
    buffer.segments[rank].fill_(rank + 1)
    dist.barrier()
    assert [int(s[0]) for s in buffer.segments] == [r + 1 for r in range(dist.get_world_size())]
    modes = {oct(os.stat(f"/proc/self/map_files/{m}").st_mode & 0o777) for m in _mapped()}
    assert modes == {"0o600"}, modes
    dist.barrier()
    # The last meeting is in the segments: a collective would notice that the other rank has ended.
    buffer.segments[rank][1] = 99
    deadline = time.monotonic() + 30
    while not all(int(s[1]) == 99 for s in buffer.segments) and time.monotonic() < deadline:
        pass
    if how == "raise":
        raise RuntimeError("as a training script would")
    os.kill(os.getpid(), {"term": signal.SIGTERM, "kill": signal.SIGKILL}[how])


def _mapped() -> list[str]:
    with open("/proc/self/maps") as f:
        return [line.split()[0] for line in f if "/dev/shm/mok-" in line]


def different_sizes() -> str:
    try:
        load().SymmetricBuffer(1024 * (1 + dist.get_rank()), dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    return ""


def pretend_two_machines() -> str:
    mok = load()
    symmetric = __import__("sys").modules[mok.SymmetricBuffer.__module__]
    symmetric.machine = lambda: (f"host{dist.get_rank()}", "boot")
    try:
        mok.SymmetricBuffer(1024, dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    return ""
