"""Ragged ranks, masked routes, repeated experts, experts and ranks without tokens, frozen parts, saved state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.kernel.layers import (
    Problem,
    assert_close,
    assert_equal,
    backend,
    in_ranks,
    load,
    poison,
    randint,
    relative_error,
    workspace,
)

RAGGED = [[0, 1, 5, 51], [5, 51], [0, 7], [0, 0, 0, 0], [300, 0, 0, 0]]


@pytest.mark.parametrize("tokens", RAGGED, ids=str)
def test_ragged_ranks(tokens: list[int]) -> None:
    """Case 6."""
    problem = Problem(tokens)
    poison()
    assert_close(problem.step(len(tokens)), problem.oracle(), 2e-6)


@pytest.mark.parametrize("ranks", [1, 4])
def test_masked_routes(ranks: int) -> None:
    """Case 3: -1 and ids from E on add nothing, and their weights have gradient zero, not what memory held."""
    ids = randint(-1, 9, (120, 4), seed=1)
    ids[7] = -1
    ids[:, 0][ids[:, 0] == 8] = 1 << 20
    problem = Problem([30, 30, 30, 30], ids=ids)
    poison()
    got = problem.step(ranks)
    assert_close(got, problem.oracle(), 2e-6)
    masked = (ids < 0) | (ids >= 8)
    assert masked.any() and (got["weights"][masked] == 0).all() and (got["weights"][~masked] != 0).all()


@pytest.mark.parametrize("ranks", [1, 4])
def test_repeated_experts(ranks: int) -> None:
    """A random DeepSeek-V4 sends every token to expert 0, K times."""
    for ids in (torch.zeros(200, 3, dtype=torch.long), randint(0, 2, (200, 5), seed=3)):
        problem = Problem([50, 50, 50, 50], ids=ids)
        assert_close(problem.step(ranks), problem.oracle(), 2e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_everything_on_one_rank(dtype: torch.dtype | None) -> None:
    """Case 5: experts without tokens have zero gradients, never None, never what memory held."""
    ids = randint(0, 2, (400, 3), seed=2)
    problem = Problem([100, 100, 100, 100], ids=ids, dtype=dtype)
    for settings in ({}, {"macrobatch_size": 128, "minibatch_size": 128}):
        poison()
        results = problem.results(4, **settings)
        for rank in (1, 2, 3):
            for name in ("gate_up", "down"):
                assert (results[rank][name] == 0).all()
        assert (results[0]["gate_up"] != 0).any()


def test_identical_tokens() -> None:
    """Case 16: three quarters padding, all the same, so all on the same experts."""
    problem = Problem([100, 100])
    problem.parts["x"][50:] = problem.parts["x"][50]
    problem.ids[50:] = problem.ids[50]
    assert_close(problem.step(2), problem.oracle(), 2e-6)


@pytest.mark.parametrize(
    "frozen",
    [
        ("gate_up", "down"),
        ("x",),
        ("down",),
        ("gate_up",),
        ("x", "gate_up", "down"),
        ("weights",),
        ("shared_gate", "shared_up", "shared_down"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("macrobatch", [128, 1 << 20])
def test_frozen_parts(frozen: tuple[str, ...], macrobatch: int) -> None:
    """What is wanted has the bits it has when everything is wanted; what is not has no gradient."""
    problem = Problem([150, 40], dtype=torch.bfloat16)
    everything = problem.step(2)
    poison()
    got = problem.step(2, frozen=frozen, macrobatch_size=macrobatch)
    assert set(everything) - set(got) == set(frozen)
    assert_equal(got, {n: everything[n] for n in got})


def test_one_rank_wants_dx_the_other_does_not() -> None:
    """Frozen embeddings on one rank only: the expert's rank still pushes dX to the rank that wants it."""
    mok, problem = load(), Problem([40, 60], shared_width=0)
    group, p = mok.VirtualGroup(2), problem.parts
    want = problem.oracle()["x"][:40]

    def rank_step(rank: int):
        rows, owned = (slice(0, 40), slice(40, 100))[rank], slice(rank * 4, rank * 4 + 4)
        x = p["x"][rows].clone().requires_grad_(rank == 0)
        gate_up = p["gate_up"][owned].clone().requires_grad_()
        out = mok.moe(
            x,
            problem.ids[rows],
            p["weights"][rows],
            gate_up,
            p["down"][owned],
            workspace=workspace(group, rank),
        )
        out.backward(problem.dout[rows])
        return x.grad

    got = in_ranks(2, rank_step)
    assert got[1] is None
    assert relative_error(got[0], want) <= backend().tolerance


# -- saved state -----------------------------------------------------------------------------------------------------


def ring(rows: int) -> int:
    return max(rows, backend().least_ring)


def leaves_of(problem: Problem) -> dict[str, torch.Tensor]:
    return {n: problem.parts[n].clone().requires_grad_() for n in problem.names()}


@pytest.mark.parametrize("macrobatch", [128, 1 << 20])
def test_second_backward(macrobatch: int) -> None:
    """retain_graph: what the forward saved is read until the last backward, which may write over it."""
    mok, problem = load(), Problem([300])
    leaves = leaves_of(problem)
    args, keywords = problem.arguments(leaves, problem.ids)
    out = mok.moe(*args, **keywords, workspace=workspace(), macrobatch_size=ring(macrobatch))
    first = torch.autograd.grad(out, list(leaves.values()), problem.dout, retain_graph=True)
    for retain in (True, False):
        poison()
        again = torch.autograd.grad(out, list(leaves.values()), problem.dout, retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_backward_again_after_a_hook_failed() -> None:
    """Autograd still has the saved tensors then, which the first backward may have written over: it must say so."""
    problem = Problem([300])
    leaves = leaves_of(problem)
    args, keywords = problem.arguments(leaves, problem.ids)
    out = load().moe(*args, **keywords, workspace=workspace())

    def fail(*_: object) -> None:
        raise KeyError("a user's hook")

    out.grad_fn.register_hook(fail)
    with pytest.raises(KeyError):
        out.backward(problem.dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(problem.dout)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("macrobatch", [128, 1 << 20])
def test_two_calls_in_flight(order: tuple[int, int], macrobatch: int) -> None:
    """Two micro-batches, of other shapes and dtypes, share one workspace and keep their own state."""
    mok, problems = load(), [Problem([200], seed=1), Problem([900], seed=2, hidden=256, dtype=torch.bfloat16)]
    alone = [p.step(1) for p in problems]
    shared, outs, leaves = workspace(), [], []
    for problem in problems:
        leaves.append(leaves_of(problem))
        args, keywords = problem.arguments(leaves[-1], problem.ids)
        outs.append(mok.moe(*args, **keywords, workspace=shared, macrobatch_size=ring(macrobatch)))
    poison()
    for i in order:
        outs[i].backward(problems[i].dout)
        assert_equal({n: leaf.grad for n, leaf in leaves[i].items()}, {n: alone[i][n] for n in leaves[i]})


def on_rank(problem: Problem, rank: int, own: Any, run: Any, **settings: Any) -> tuple:
    """Leaves and output of one of two ranks; run(layer, *tensors) calls the layer."""
    first = problem.tokens[0]
    rows, half = (slice(0, first), slice(first, None))[rank], problem.experts // 2
    owned = slice(rank * half, rank * half + half)
    cut = {"x": rows, "weights": rows, "scale": rows, "gate_up": owned, "down": owned}
    leaves = {n: problem.parts[n][cut.get(n, slice(None))].clone().requires_grad_() for n in problem.names()}

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        args, keywords = problem.arguments(dict(zip(leaves, tensors, strict=True)), problem.ids[rows])
        return load().moe(*args, **keywords, workspace=own, **settings)

    return leaves, run(layer, *leaves.values()), problem.dout[rows]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_forwards_of_other_sizes_before_the_backward(checkpointed: bool) -> None:
    """A wide layer on few tokens, then a narrow one on many: the buffers of the first must still be large enough.

    Checkpointed, each is computed again with the ring it had, though the ranks have agreed on other counts since.
    """
    shapes = (dict(tokens=[40, 60], hidden=512), dict(tokens=[900, 700], hidden=64), dict(tokens=[60, 40]))
    problems = [Problem(**shape, seed=seed) for seed, shape in enumerate(shapes)]
    problems.append(Problem([40, 500], seed=9, hidden=512))  # rank 0 has as many as in the first, the group has not
    alone = [p.results(2) for p in problems]
    group = load().VirtualGroup(2)

    def rank_step(rank: int):
        own, calls = workspace(group, rank), []
        run = partial(checkpoint, use_reentrant=False) if checkpointed else lambda layer, *tensors: layer(*tensors)
        for problem in problems:
            own.begin_forward()
            calls.append(on_rank(problem, rank, own, run))
            own.end_forward()
        for _, out, dout in calls:
            out.backward(dout)
        return [{n: leaf.grad for n, leaf in leaves.items()} for leaves, _, _ in calls]

    for rank, results in enumerate(in_ranks(2, rank_step)):
        for got, want in zip(results, alone, strict=True):
            assert_equal(got, {n: want[rank][n] for n in got})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("macrobatch", [128, 1 << 20])
def test_checkpointing(reentrant: bool, macrobatch: int) -> None:
    """The recomputed forward has the sizes of the first one, and its gradients have the same bits."""
    mok, problem = load(), Problem([51, 200])
    plain, group = problem.results(2), mok.VirtualGroup(2)

    def rank_step(rank: int):
        rows, owned = (slice(0, 51), slice(51, 251))[rank], slice(rank * 4, rank * 4 + 4)
        cut = {"x": rows, "weights": rows, "scale": rows, "gate_up": owned, "down": owned}
        leaves = {n: problem.parts[n][cut.get(n, slice(None))].clone().requires_grad_() for n in problem.names()}
        own = workspace(group, rank)

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            args, keywords = problem.arguments(dict(zip(leaves, tensors, strict=True)), problem.ids[rows])
            return mok.moe(*args, **keywords, workspace=own, macrobatch_size=ring(macrobatch))

        own.begin_forward()
        out = checkpoint(layer, *leaves.values(), use_reentrant=reentrant)
        own.end_forward()
        out.backward(problem.dout[rows])
        return {n: leaf.grad for n, leaf in leaves.items()}

    for got, want in zip(in_ranks(2, rank_step), plain, strict=True):
        assert_equal(got, {n: want[n] for n in got})


def test_saved_shapes_do_not_depend_on_routing() -> None:
    """Case 7: else checkpointing raises on one rank and hangs the others when a near tie falls the other way."""
    mok, shapes = load(), []
    for ids in (torch.zeros(200, 3, dtype=torch.long), torch.arange(600).reshape(200, 3) % 8, torch.full((200, 3), -1)):
        problem, saved = Problem([200], ids=ids), []
        args, keywords = problem.arguments(leaves_of(problem), problem.ids)

        def pack(tensor: torch.Tensor, saved: list = saved) -> torch.Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mok.moe(*args, **keywords, workspace=workspace())
        shapes.append(saved)
    assert shapes[0] == shapes[1] == shapes[2] and shapes[0]


def test_ring_bounds_what_is_saved() -> None:
    """With a ring of a quarter of the rows, what a call keeps shrinks to the ring."""
    mok, problem = load(), Problem([1024], shared_width=0, experts=4)

    def kept(**settings: int) -> int:
        leaves, sizes = leaves_of(problem), {}
        own = {t.untyped_storage().data_ptr() for t in leaves.values()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        args, keywords = problem.arguments(leaves, problem.ids)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mok.moe(*args, **keywords, workspace=workspace(), **settings)
        return sum(sizes.values())

    row = problem.dtype.itemsize * (problem.hidden + 2 * problem.intermediate)
    rows = 1024 * 3
    schedule = kept(macrobatch_size=rows) - row * rows
    assert 0 < schedule < 0.1 * row * rows
    assert kept(macrobatch_size=rows // 4) == row * rows // 4 + schedule


def test_ranks_with_rings_of_their_own() -> None:
    """Two layers on one workspace, rank 0 with the smallest ring: it replays what the other rank's ring holds."""
    problems = [Problem([300, 200], seed=1), Problem([300, 200], seed=2)]
    alone = [p.results(2) for p in problems]
    group = load().VirtualGroup(2)

    def rank_step(rank: int):
        own, size = workspace(group, rank), {"macrobatch_size": ring(128) if rank == 0 else 1 << 14}
        calls = [on_rank(p, rank, own, lambda layer, *tensors: layer(*tensors), **size) for p in problems]
        for _, out, dout in reversed(calls):
            out.backward(dout)
        return [{n: leaf.grad for n, leaf in leaves.items()} for leaves, _, _ in calls]

    for rank, results in enumerate(in_ranks(2, rank_step)):
        for got, want in zip(results, alone, strict=True):
            assert_equal(got, {n: want[rank][n] for n in got})


def test_training_after_inference_mode() -> None:
    """What a first evaluation made is there for the training after it."""
    problem, group = Problem([30, 20]), load().VirtualGroup(2)
    alone = problem.results(2)

    def rank_step(rank: int):
        own = workspace(group, rank)
        with torch.inference_mode():
            on_rank(problem, rank, own, lambda layer, *tensors: layer(*(t.detach() for t in tensors)))
        leaves, out, dout = on_rank(problem, rank, own, lambda layer, *tensors: layer(*tensors))
        out.backward(dout)
        return {n: leaf.grad for n, leaf in leaves.items()}

    for rank, got in enumerate(in_ranks(2, rank_step)):
        assert_equal(got, {n: alone[rank][n] for n in got})


def test_a_closed_workspace_is_refused_also_when_it_was_opened_again() -> None:
    wide, narrow, own = Problem([50], hidden=1024), Problem([50], hidden=64), workspace()
    leaves = leaves_of(wide)
    args, keywords = wide.arguments(leaves, wide.ids)
    out = load().moe(*args, **keywords, workspace=own)
    own.close()
    args, keywords = narrow.arguments(leaves_of(narrow), narrow.ids)
    load().moe(*args, **keywords, workspace=own)
    with pytest.raises(RuntimeError, match="this workspace was closed"):
        out.backward(wide.dout)


def test_out_of_memory_leaves_a_workspace_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `find_executable_batch_size` has it: too large, caught, half the batch."""
    small, large, own = Problem([40]), Problem([900]), workspace()
    alone = small.step(1)

    def step(problem: Problem):
        leaves = leaves_of(problem)
        args, keywords = problem.arguments(leaves, problem.ids)
        out = load().moe(*args, **keywords, workspace=own)
        out.backward(problem.dout)
        return {n: leaf.grad for n, leaf in leaves.items()}

    allocate = "empty" if backend().device == "cpu" else "zeros"
    original = getattr(torch, allocate)

    def fails(*args: Any, **keywords: Any) -> torch.Tensor:
        if keywords.get("dtype") is torch.uint8 and args[0] > 1 << 12:
            raise RuntimeError("out of memory")
        return original(*args, **keywords)

    monkeypatch.setattr(torch, allocate, fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(large)
    monkeypatch.undo()
    got = step(small)
    assert_equal(got, {n: alone[n] for n in got})


def test_a_rank_that_fails_and_goes_on_is_noticed() -> None:
    """Rank 1 leaves out a layer: the ranks meet at different points of the next one, and both say so."""
    problem, group = Problem([30, 20]), load().VirtualGroup(2)

    def rank_step(rank: int) -> str:
        own = workspace(group, rank)
        run = lambda layer, *tensors: layer(*tensors)  # noqa: E731
        on_rank(problem, rank, own, run)
        try:
            if rank == 1:  # has agreed on counts, as every layer begins, and goes no further
                own.handle(20, problem.top_k, problem.hidden, problem.dtype, None)
            for _ in range(2):
                on_rank(problem, rank, own, run)
        except load().MoKTimeoutError as error:
            return str(error)
        return "nothing was noticed"

    assert all("different points" in text for text in in_ranks(2, rank_step)), "both ranks raise"
