"""Weight gradients added to the buffers that are there: the bits of returning them, and what must not be added."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.kernel.layers import Problem, assert_equal, backend, in_ranks, load, randint, workspace

WEIGHTS = ("gate_up", "down")
Leaves = dict[str, torch.Tensor]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The buffers that backwards add to, as they do so."""
    module, buffers = sys.modules[f"{load().__name__}.accumulate"], []
    original = module.added

    def record(values: Any) -> None:
        buffers.extend(values)
        original(values)

    monkeypatch.setattr(module, "added", record)
    yield buffers


@pytest.fixture
def group() -> Iterator[None]:
    """torch.distributed with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def problems(count: int = 3, dtype: torch.dtype | None = None) -> list[Problem]:
    """Micro-steps of one layer, in the second of which most experts have no tokens."""
    steps = [Problem([150, 90], seed=seed, dtype=dtype) for seed in range(count)]
    if count > 1:
        steps[1] = Problem([150, 90], seed=1, dtype=dtype, ids=randint(3, 6, (240, 3), seed=1))
    for step in steps:
        step.parts |= {n: steps[0].parts[n] for n in WEIGHTS}
    return steps


def leaves_of(problem: Problem) -> Leaves:
    return {n: problem.parts[n].clone().requires_grad_() for n in WEIGHTS}


def call(problem: Problem, leaves: Leaves, fuse: bool, own: Any = None, rank: int = 0, ranks: int = 1, **settings: Any):
    """Output of a rank's layer with weights `leaves`, and the output's gradient."""
    rows = slice(None) if ranks == 1 else (slice(0, 150), slice(150, None))[rank]
    x, weights = (problem.parts[n][rows].clone().requires_grad_() for n in ("x", "weights"))
    args = (x, problem.ids[rows], weights, *(leaves[n].to(problem.dtype) for n in WEIGHTS))
    out = load().moe(*args, workspace=own or workspace(), fuse_wgrad_accumulation=fuse, **settings)
    return out, problem.dout[rows]


def train(steps: list[Problem], kind: str, fuse: bool, ranks: int = 1, **settings: Any) -> list[Leaves]:
    """The buffers of each rank after all micro-steps.

    kind: "grad"; "cast", fp32 weights as autocast has them; "main", a main_grad in fp32; "own", in the weights' dtype.
    """
    group, local = load().VirtualGroup(ranks), steps[0].experts // ranks

    def rank_step(rank: int) -> Leaves:
        own, owned = workspace(group if ranks > 1 else None, rank), slice(rank * local, rank * local + local)
        leaves = {n: steps[0].parts[n][owned].clone() for n in WEIGHTS}
        for n, leaf in leaves.items():
            leaves[n] = leaf.to(torch.float32 if kind == "cast" else leaf.dtype).requires_grad_()
            if kind in ("main", "own"):
                start = leaf.detach().flip(0) * 7  # not zero
                leaves[n].main_grad = start.to(torch.float32 if kind == "main" else leaf.dtype)
        for problem in steps:
            out, dout = call(problem, leaves, fuse, own, rank, ranks, **settings)
            out.backward(dout)
            if kind in ("main", "own") and not fuse:
                for leaf in leaves.values():
                    leaf.main_grad.add_(leaf.grad)
                    leaf.grad = None
        assert kind in ("grad", "cast") or all(leaf.grad is None for leaf in leaves.values())
        return {n: leaf.grad if kind in ("grad", "cast") else leaf.main_grad for n, leaf in leaves.items()}

    return in_ranks(ranks, rank_step)


@pytest.mark.parametrize("kind", ["grad", "cast", "main", "own"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["native", "bf16"])
@pytest.mark.parametrize("macrobatch", [128, 1 << 20])
def test_bits_are_those_of_adding_afterwards(kind: str, dtype: Any, macrobatch: int, added: list) -> None:
    steps, size = problems(dtype=dtype), max(macrobatch, backend().least_ring)
    want = train(steps, kind, False, 2, macrobatch_size=size)
    assert not added
    got = train(steps, kind, True, 2, macrobatch_size=size)
    # Two weights on two ranks; the first backward finds no grad.
    assert len(added) == 4 * (2 if kind in ("grad", "cast") else 3)
    for rank in range(2):
        assert_equal(got[rank], want[rank])
        assert all(got[rank][n].dtype == want[rank][n].dtype for n in WEIGHTS)


def test_a_graph_that_is_kept_adds_twice(added: list) -> None:
    [problem], results = problems(1), []
    for fuse in (False, True):
        leaves = leaves_of(problem)
        out, dout = call(problem, leaves, fuse)
        for _ in range(3):
            out.backward(dout, retain_graph=True)
        results.append({n: leaf.grad for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert len(added) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, added: list) -> None:
    steps, results = problems(), []
    for fuse in (False, True):
        leaves, own = leaves_of(steps[0]), workspace()
        for problem in steps:
            x, weights = (problem.parts[n].clone().requires_grad_() for n in ("x", "weights"))

            def layer(x: torch.Tensor, weights: torch.Tensor, problem: Problem = problem) -> torch.Tensor:
                args = (x, problem.ids, weights, *leaves.values())  # noqa: B023
                return load().moe(*args, workspace=own, fuse_wgrad_accumulation=fuse)  # noqa: B023

            checkpoint(layer, x, weights, use_reentrant=reentrant).backward(problem.dout)
        results.append({n: leaf.grad for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert len(added) == 4


def with_grads(problem: Problem) -> tuple[Leaves, Leaves]:
    leaves = leaves_of(problem)
    for leaf in leaves.values():
        leaf.grad = leaf.detach().flip(0)
    return leaves, {n: leaf.grad.clone() for n, leaf in leaves.items()}


def test_what_asks_for_other_gradients_leaves_buffers_alone(added: list) -> None:
    """`torch.autograd.grad`, of the weights or of something else, and `backward(inputs=...)`."""
    [problem] = problems(1)
    leaves, before = with_grads(problem)
    want = leaves_of(problem)
    out, dout = call(problem, want, False)
    out.backward(dout)
    out, dout = call(problem, leaves, True)
    got = torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True)
    assert_equal(dict(zip(WEIGHTS, got, strict=True)), {n: leaf.grad for n, leaf in want.items()})
    out.backward(dout, inputs=[leaves["down"]], retain_graph=True)
    assert len(added) == 1 and added[0] is leaves["down"].grad
    assert torch.equal(leaves["gate_up"].grad, before["gate_up"])
    copies = {n: leaf.detach().float().requires_grad_() for n, leaf in leaves.items()}  # as autocast has them
    for leaf in copies.values():
        leaf.grad = torch.ones_like(leaf)
    out, dout = call(problem, copies, True)
    torch.autograd.grad(out, list(copies.values()), dout)
    assert len(added) == 1 and all((leaf.grad == 1).all() for leaf in copies.values())


def seen_by(register: str, leaf: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    getattr(leaf, register)(lambda t: seen.append(t.detach().clone()))
    return seen


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_gradients(register: str, added: list) -> None:
    [problem], seen, results = problems(1), [], []
    for fuse in (False, True):
        leaves, _ = with_grads(problem)
        seen.append(seen_by(register, leaves["down"]))
        out, dout = call(problem, leaves, fuse)
        out.backward(dout)
        results.append({n: leaf.grad for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert len(seen[0]) == len(seen[1]) == 1 and torch.equal(seen[0][0], seen[1][0])
    assert len(added) == 1 and added[0] is leaves["gate_up"].grad


class OtherTensor(torch.Tensor):
    pass


UNFIT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "alignment": lambda t: torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view_as(t).copy_(t),
    "shape": lambda t: t.flatten(),
    "dtype": lambda t: t.double(),
    "type": lambda t: t.clone().as_subclass(OtherTensor),
    "device": lambda t: t.to("meta"),
    "requires_grad": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_buffer_that_does_not_fit_is_left_to_autograd(why: str, added: list) -> None:
    [problem] = problems(1)
    leaves, want = leaves_of(problem), leaves_of(problem)
    for leaf in leaves.values():
        leaf.main_grad = UNFIT[why](leaf.detach())
        leaf.grad_added_to_main_grad = False
    for tensors, fuse in ((leaves, True), (want, False)):
        out, dout = call(problem, tensors, fuse)
        out.backward(dout)
    assert not added and not any(leaf.grad_added_to_main_grad for leaf in leaves.values())
    assert_equal({n: leaf.grad for n, leaf in leaves.items()}, {n: leaf.grad for n, leaf in want.items()})


def test_megatrons_flag_says_that_main_grad_has_it(added: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: not that a backward failed, or returned the gradient."""
    [problem] = problems(1)
    leaves = leaves_of(problem)
    nodes, seen = [], []
    for leaf in leaves.values():
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.zeros_like(leaf, dtype=torch.float32), False
        nodes.append(torch.autograd.graph.get_gradient_edge(leaf).node)  # they live on, as Megatron has it
        nodes[-1].register_hook(lambda *_, leaf=leaf: seen.append(leaf.grad_added_to_main_grad))

    def backward() -> None:
        out, dout = call(problem, leaves, True)
        out.backward(dout)

    def flags() -> list[bool]:
        return [leaf.grad_added_to_main_grad for leaf in leaves.values()]

    backward()
    assert len(added) == 2 and all(flags()) and seen == [True, True]
    assert all(leaf.grad is None and leaf.main_grad.any() for leaf in leaves.values())

    def fails(_: Any) -> None:
        raise RuntimeError("not launched")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not launched"):
        patch.setattr(sys.modules[f"{load().__name__}.accumulate"], "added", fails)
        backward()
    assert not any(flags())
    for leaf in leaves.values():
        leaf.register_hook(lambda gradient: None)
    backward()
    assert not any(flags()) and all(leaf.grad is not None for leaf in leaves.values())


def test_autograd_sees_that_a_buffer_changed() -> None:
    [problem] = problems(1)
    leaves, _ = with_grads(problem)
    used = (leaves["down"].grad * torch.ones_like(leaves["down"], requires_grad=True)).sum()
    out, dout = call(problem, leaves, True)
    out.backward(dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


class Doubled(torch.autograd.Function):
    """Its node has a `variable`, as the node of a parameter has."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.variable = tensor
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("compute", [lambda leaf: leaf * 1.5, Doubled.apply], ids=["product", "function"])
def test_a_weight_computed_from_a_parameter(compute: Any, added: list) -> None:
    [problem], results = problems(1), []
    for fuse in (False, True):
        leaves, _ = with_grads(problem)
        out, dout = call(problem, {n: compute(leaf) for n, leaf in leaves.items()}, fuse)
        out.backward(dout)
        results.append({n: leaf.grad for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert not added


@pytest.mark.parametrize(
    ("weight", "asked", "buffer", "adds"),
    [
        ("shard", None, "shard", True),
        ("shard", "shard", "shard", True),
        ("replicate", "partial", "replicate", False),
        ("shard", None, "replicate", False),
    ],
)
def test_placements(weight: str, asked: str | None, buffer: str, adds: bool, added: list, group: None) -> None:
    """A buffer that is placed in another way than the gradient takes a collective, which is autograd's."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    places = {"shard": [Shard(0)], "replicate": [Replicate()], "partial": [Partial()]}
    [problem], mesh, results = problems(1), init_device_mesh("cpu", (1,)), []
    for fuse in (False, True):
        plain, grads = with_grads(problem)
        leaves = {n: torch.nn.Parameter(distribute_tensor(t.detach(), mesh, places[weight])) for n, t in plain.items()}
        for n, leaf in leaves.items():
            leaf.grad = distribute_tensor(grads[n], mesh, places[buffer])
        local = {n: leaf.to_local(grad_placements=asked and places[asked]) for n, leaf in leaves.items()}
        out, dout = call(problem, local, fuse)
        out.backward(dout)
        results.append({n: leaf.grad.full_tensor() for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert len(added) == 2 * adds


def test_reductions_behind_the_parameter(added: list, group: None) -> None:
    """DDP reduces what the buffers hold after the backward; a DTensor's local buffer is the buffer."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    class Layer(torch.nn.Module):
        def __init__(self, problem: Problem) -> None:
            super().__init__()
            for n, leaf in leaves_of(problem).items():
                setattr(self, n, torch.nn.Parameter(leaf.detach()))

        def forward(self, problem: Problem, fuse: bool) -> torch.Tensor:
            return call(problem, {"gate_up": self.gate_up, "down": self.down}, fuse)[0]

    def doubled(state, bucket):  # DDP checks annotations
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    steps = problems()
    results = []
    for fuse in (False, True):
        model = torch.nn.parallel.DistributedDataParallel(Layer(steps[0]))
        model.register_comm_hook(None, doubled)
        for problem in steps[:2]:
            with model.no_sync():
                model(problem, fuse).backward(problem.dout)
        model(steps[2], fuse).backward(steps[2].dout)
        results.append({n: getattr(model.module, n).grad for n in WEIGHTS})
    assert_equal(results[1], results[0])
    assert len(added) == 4

    mesh, results = init_device_mesh("cpu", (1,)), []
    for fuse in (False, True):
        leaves = {n: distribute_tensor(t.detach(), mesh, [Shard(0)]) for n, t in leaves_of(steps[0]).items()}
        leaves = {n: torch.nn.Parameter(leaf) for n, leaf in leaves.items()}
        for problem in steps:
            out, dout = call(problem, {n: leaf.to_local() for n, leaf in leaves.items()}, fuse)
            out.backward(dout)
        results.append({n: leaf.grad.to_local() for n, leaf in leaves.items()})
    assert_equal(results[1], results[0])
    assert len(added) == 8
