"""The CUDA operators in a training program: graphs, streams, no host sync, torch.compile, opcheck, refusals."""

import sys

import pytest
import torch

from tests.kernel import layers
from tests.kernel.layers import Problem, assert_close, assert_equal, load, workspace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(60)]


def training_step(problem, own):
    """A function of no arguments that runs forward and backward on fixed tensors, and those tensors."""
    leaves = {n: problem.parts[n].clone().requires_grad_() for n in problem.names()}
    ids, dout = problem.ids.clone(), problem.dout.clone()

    def step():
        args, keywords = problem.arguments(leaves, ids)
        out = load().moe(*args, **keywords, workspace=own)
        return {"out": out.detach()} | dict(
            zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True)
        )

    return step, {**leaves, "ids": ids, "dout": dout}


def test_graph_replays_with_new_routes():
    """Eager, three replays of one captured step with new inputs, eager: the same bits."""
    problems = [Problem([700], seed=seed) for seed in range(4)]
    step, inputs = training_step(problems[0], workspace())
    first = {n: t.clone() for n, t in step().items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # what autograd and cuBLAS allocate on their first use, they allocate here
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for problem in problems[1:]:
        with torch.no_grad():
            for n in problem.names():
                inputs[n].copy_(problem.parts[n])
        inputs["ids"].copy_(problem.ids)
        inputs["dout"].copy_(problem.dout)
        for t in captured.values():
            t.fill_(float("nan"))
        graph.replay()
        assert_close(captured, problem.oracle(), 1e-2)
        assert_equal(step(), captured)
    with torch.no_grad():
        for n in problems[0].names():
            inputs[n].copy_(problems[0].parts[n])
    inputs["ids"].copy_(problems[0].ids)
    inputs["dout"].copy_(problems[0].dout)
    assert_equal(step(), first)


def test_growth_while_capturing_is_refused():
    step, _ = training_step(Problem([64]), workspace())
    with pytest.raises(ValueError, match=r"grow while a CUDA graph is captured.*max_tokens_per_rank"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    torch.cuda.synchronize()


def test_calls_on_several_streams_share_one_workspace():
    """Nothing but the workspace itself orders them: what one pushes the next must not overwrite before it is summed."""
    problems, own = [Problem([900 + 50 * i], seed=i) for i in range(4)], workspace()
    steps = [training_step(problem, own)[0] for problem in problems]
    want = [{n: t.clone() for n, t in step().items()} for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(5):
        got = []
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(step())
        torch.cuda.synchronize()
        for g, w in zip(got, want, strict=True):
            assert_equal(g, w)


def test_what_reads_the_buffers_waits_for_them():
    """The parameters' nodes are of another stream than the layer, as where DDP was made on one; their hooks, and the
    stream of backward(), read the buffers."""
    problem, own = Problem([300], shared_width=0), workspace()
    p, stream, other, results = problem.parts, torch.cuda.Stream(), torch.cuda.Stream(), []
    for fuse in (False, True):
        weights = {n: p[n].clone().requires_grad_() for n in ("gate_up", "down")}
        nodes, seen = [], {}
        for n, weight in weights.items():
            weight.grad = torch.zeros_like(weight)
            with torch.cuda.stream(other if fuse else stream):
                nodes.append(torch.autograd.graph.get_gradient_edge(weight).node)
            nodes[-1].register_hook(lambda *_, n=n, weight=weight, seen=seen: seen.update({n: weight.grad.clone()}))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            out = load().moe(
                p["x"], problem.ids, p["weights"], *weights.values(), workspace=own, fuse_wgrad_accumulation=fuse
            )
            torch.cuda._sleep(10**8)  # about 50 ms, which the backward is behind
        out.backward(problem.dout)
        results.append({n: weight.grad.clone() for n, weight in weights.items()})
        torch.cuda.synchronize()
        assert_equal(seen, results[0])
    assert results[0]["down"].any()
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("macrobatch", [None, 1024])
def test_the_last_backward_needs_less_memory(macrobatch):
    """Gradients of gate and up, and what is replayed, take the place of what the forward saved."""
    problem, own = Problem([1000], intermediate=1024, shared_width=512), workspace()
    leaves = {n: problem.parts[n].clone().requires_grad_() for n in problem.names()}
    args, keywords = problem.arguments(leaves, problem.ids)
    out = load().moe(*args, **keywords, workspace=own, macrobatch_size=macrobatch)
    requested = lambda which: torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    peaks, results = [], []
    for retain in (True, True, False):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        results.append(torch.autograd.grad(out, list(leaves.values()), problem.dout, retain_graph=retain))
        peaks.append(requested("peak") - before)
    assert all(torch.equal(a, b) for got in results[1:] for a, b in zip(got, results[0], strict=True))
    rows = macrobatch or problem.ids.numel()
    width = 2 * 1024 if macrobatch is None else 2 * 2 * 1024 + problem.hidden
    assert peaks[1] - peaks[2] >= 2 * (rows * width + 2 * 1000 * 512)


def test_no_host_sync():
    step, _ = training_step(Problem([300]), workspace())
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_that_grow_and_shrink():
    own = workspace()
    for count in (51, 3000, 0, 51):
        problem = Problem([count], seed=count)
        step, _ = training_step(problem, own)
        got = step()
        assert all(torch.isfinite(t).all() for t in got.values())
        if count:
            assert_close(got, problem.oracle(), 1e-2)


def test_ids_of_both_widths_and_unaligned_tensors():
    problem = Problem([100])
    want = problem.step(1)
    long, problem.ids = problem.ids, problem.ids.int()
    assert_equal(problem.step(1), want)
    problem.ids = long
    shifted = torch.empty(problem.parts["down"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    problem.parts["down"] = shifted.view_as(problem.parts["down"]).copy_(problem.parts["down"])
    args, keywords = problem.arguments({n: problem.parts[n] for n in problem.names()}, problem.ids)
    assert args[4].data_ptr() % 16
    assert torch.equal(load().moe(*args, **keywords, workspace=workspace()), want["out"])


class Experts(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(problem.parts["gate_up"].clone())
        self.down_proj = torch.nn.Parameter(problem.parts["down"].clone())
        self.act_fn = torch.nn.SiLU()


def test_compiled_experts():
    """The kernelize layer under torch.compile(fullgraph=True), with token counts that change."""

    class Fused(Experts):
        forward = load().layers.MoKExperts.forward

    model = Fused(Problem([1], shared_width=0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for count in (64, 130, 700):
        problem = Problem([count], shared_width=0)
        problem.parts |= {"gate_up": model.gate_up_proj.data, "down": model.down_proj.data}
        results = []
        for run in (model, compiled):
            x, weights = (problem.parts[n].clone().requires_grad_() for n in ("x", "weights"))
            model.zero_grad()
            out = run(x, problem.ids, weights)
            out.backward(problem.dout)
            grads = (x.grad, weights.grad, model.gate_up_proj.grad, model.down_proj.grad)
            results.append(dict(zip(("out", "x", "weights", "gate_up", "down"), (out.detach(), *grads), strict=True)))
        assert_equal(results[1], results[0])
        assert_close(results[0], problem.oracle(), 1e-2)


def test_opcheck():
    """Schemas, fakes and autograd registration of the operators agree with what they do."""
    ops = sys.modules[load().moe.__module__].ops
    problem, own = Problem([40], experts=4), workspace()
    handle = own.handle(40, 3, problem.hidden, torch.bfloat16, None)
    p = {n: t.clone().requires_grad_() for n, t in problem.parts.items()}
    shared = (p["shared_gate"], p["shared_up"], p["shared_down"], p["scale"])
    tensors = (p["x"], problem.ids, p["weights"], p["gate_up"], p["down"], *shared)
    arguments = (handle, None, None, *tensors, 1.5, 1024, 0, 0, 0, 40, 1 << 16, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.forward.default, arguments, test_utils=checks)
    with torch.no_grad():
        _, *rings, schedule = ops.forward(*arguments)
        backward = (handle, schedule, None, problem.dout, *tensors, *rings, 1.5, 0, 0, 40, 255)
        torch.library.opcheck(ops.backward.default, backward, test_utils=checks)
        sums = (torch.zeros_like(p["gate_up"], dtype=torch.float32), torch.zeros_like(p["down"]))
        torch.library.opcheck(ops.backward.default, (*backward, *sums), test_utils=checks)
        with pytest.raises(RuntimeError, match="a gradient's buffer is not contiguous"):
            ops.backward(*backward, sums[0].transpose(1, 2).contiguous().transpose(1, 2))
        with pytest.raises(RuntimeError, match="the schedule has 1024 bytes and needs"):
            ops.forward(*arguments[:-2], 1024, True)
        with pytest.raises(RuntimeError, match=r"the ring has 128 rows.*at least 256"):
            ops.forward(*arguments[:13], 128, *arguments[14:])
        with pytest.raises(RuntimeError, match="x has 40 tokens, the call is for 39"):
            ops.forward(*arguments[:-3], 39, 1 << 16, True)
        with pytest.raises(RuntimeError, match="down_proj has size 191 in dimension 2, not 192"):
            ops.forward(*arguments[:7], p["down"][..., 1:].contiguous(), *arguments[8:])


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(dtype=torch.float32), "x is torch.float32.*bfloat16.*autocast"),
        (dict(fwd_comm_sms=1000), r"fwd_comm_sms=1000; cuda:0 has \d+ SMs.* set 0 to \d+, or leave it at None"),
        (dict(bwd_comm_sms=-2), "bwd_comm_sms=-2; .* set 0 to"),
        (dict(macrobatch_size=128), "macrobatch_size=128.*at least 256"),
        (dict(precision="mxfp8"), "precision='mxfp8'"),
        (dict(max_tokens_per_rank=3), "rank 0 has 64 tokens, more than max_tokens_per_rank=3"),
        (dict(workspace="cpu"), "x is on cuda:0 and the workspace for cpu"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_refused(changed, words):
    problem = Problem([64], dtype=changed.pop("dtype", None))
    own = load().Workspace() if changed.pop("workspace", None) else workspace()
    args, keywords = problem.arguments({n: problem.parts[n] for n in problem.names()}, problem.ids)
    with pytest.raises(ValueError, match=words):
        load().moe(*args, **keywords, workspace=own, **changed)


def test_symmetric_memory_of_one_rank():
    """The way that ranks with a GPU each share memory, as far as one GPU shows it: allocation, handles, zeros."""
    import torch.distributed as dist

    symmetric = sys.modules[load().SymmetricBuffer.__module__]
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        segments = symmetric._symmetric_memory(1 << 20, dist.group.WORLD, torch.device("cuda", 0))
        assert len(segments) == 1 and segments[0].shape == (1 << 20,) and not segments[0].any()
    finally:
        dist.destroy_process_group()


def test_the_kernel_says_what_it_is():
    from mok_hf import kernel

    found = kernel.info()
    assert found.backend == "cuda" and found.archs == ("9.0a",)
    kernel.check_device("cuda")
    assert layers.backend() is layers.CUDA
