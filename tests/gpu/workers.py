"""What the ranks of this folder's multi-process tests run: all on one GPU, or each on its own."""

import os
import signal
import time

import torch
import torch.distributed as dist

from tests.kernel import layers
from tests.kernel.layers import Problem, load
from tests.kernel.workers import rank_leaves, run_layer
from tests.models.compare import relative_error

TIMEOUT_S = 2.0


def own_workspace(timeout_s=60.0, group=None):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # the tests give all ranks the same where they share a GPU
    layers.use(layers.CUDA)
    return load().workspace(group or dist.group.WORLD, "cuda", timeout_s=timeout_s)


def to_cpu(results):
    return {name: value.cpu() for name, value in results.items()}


def step(tokens, settings):
    own = own_workspace()
    results = [to_cpu(run_layer(Problem(tokens), own, **settings)) for _ in range(3)]
    assert all(torch.equal(results[0][n], again[n]) for again in results[1:] for n in again)
    return results[0]


def changing_counts():
    """Rank 1 stays at 51 tokens while rank 0 goes 51 -> 3000 -> 0: the buffers grow on both, before any layer runs."""
    own = own_workspace()
    return [to_cpu(run_layer(Problem([count, 51], seed=count), own)) for count in (51, 3000, 0)]


def two_groups(tokens):
    """Two EP groups, each of half the world with a problem of its own."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    own = own_workspace(group=groups[rank // half])
    problem = Problem(tokens, seed=rank // half)
    leaves, rows = rank_leaves(problem, rank % half, half)
    args, keywords = problem.arguments(leaves, problem.ids[rows])
    out = load().moe(*args, **keywords, workspace=own)
    out.backward(problem.dout[rows])
    return to_cpu({"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()})


def dies(where):
    own, mok, rank = own_workspace(TIMEOUT_S), load(), dist.get_rank()
    problem = Problem([100] * dist.get_world_size())
    run_layer(problem, own)  # everything is up
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1 and where == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    leaves, rows = rank_leaves(problem, rank, dist.get_world_size())
    args, keywords = problem.arguments(leaves, problem.ids[rows])
    start, report = time.monotonic(), {"poisoned": 0}
    # With a bound, nothing is agreed on the host: the first to miss the dead rank is the device.
    out = mok.moe(*args, **keywords, workspace=own, max_tokens_per_rank=128)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "backward":
        start = time.monotonic()
        out.backward(problem.dout[rows])
        torch.cuda.synchronize()
        out = leaves["x"].grad
    report["nan"] = bool(out.isnan().all())
    try:
        own.check()
    except mok.MoKTimeoutError as error:
        report |= {"rank": error.rank, "phase": error.phase, "seconds": time.monotonic() - start}
    for call in (mok.check, lambda: run_layer(problem, own)):
        try:
            call()
        except mok.MoKTimeoutError:
            report["poisoned"] += 1
    time.sleep(1.0)  # the watchdog has written by now
    return report


def model(path, ep_size):
    """Trains one step of a patched model on this rank's batch; for logits and gradients the errors against fp32.

    Returns name -> (error of the patched model, error of the unpatched one in bf16), both against the unpatched one in
    fp32, which sees all ranks' batches. Of sharded parameters each rank compares its own shard.
    """
    from transformers import AutoModelForCausalLM

    import mok_hf

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [
        torch.randint(0, 150, (2, 40 + 13 * r), generator=torch.Generator().manual_seed(r)).cuda() for r in range(size)
    ]

    def run(net, batch):
        out = net(input_ids=batch, labels=batch)
        out.loss.backward()
        return out.logits.detach()

    patched = mok_hf.from_pretrained(AutoModelForCausalLM, path, ep_size=ep_size, dtype=torch.bfloat16)
    assert next(patched.parameters()).device.type == "cuda" and patched._mok_report.patched
    got = {"logits": run(patched, batches[rank])}
    for name, p in patched.named_parameters():
        if p.grad is not None:
            got[name] = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    shards = {name: shard(p) for name, p in patched.named_parameters()}

    native = {}
    for dtype in (torch.float32, torch.bfloat16):
        net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda()
        logits = [run(net, batch) for batch in batches][rank]
        native[dtype] = {n: (p.grad / size)[shards[n]] for n, p in net.named_parameters() if p.grad is not None}
        native[dtype]["logits"] = logits
    want = native[torch.float32]
    assert got.keys() == want.keys()
    return {
        n: (relative_error(got[n], want[n]), relative_error(native[torch.bfloat16][n], want[n]))
        for n in want
        if want[n].numel()
    }


def shard(parameter):
    """Which part of the whole parameter this rank holds."""
    if not hasattr(parameter, "placements"):
        return ...
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
