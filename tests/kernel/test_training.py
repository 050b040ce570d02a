"""Many training steps in a row, in memory full of NaN: the weights get the bits they get in memory that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernel.layers import Problem, backend, in_ranks, load, poison, workspace

STEPS = {"cpu": 16, "cuda": 200}
TRAINED = ("gate_up", "down", "shared_gate", "shared_up", "shared_down")
PER_TOKEN = ("x", "weights", "scale")
# Tokens of rank 0 and 1, then the ring's rows (None: all rows fit); one after the other, again and again.
BATCHES = [
    ((300, 170), None),
    ((1, 51), 256),
    ((0, 417), 256),
    ((640, 0), 384),
    ((0, 1), None),
    ((128, 129), 256),
    ((0, 0), None),
    ((51, 900), 512),
]
SMALL = 1 << 20  # bytes; torch's allocator serves requests up to this and above it from segments of their own
PATTERN = 0x7FC0  # NaN, as bf16 and as the upper half of an fp32


class Rank:
    """One rank's parameters, its batches and its optimizer; everything a step needs is allocated before the first."""

    def __init__(self, ranks: int, rank: int, own: Any):
        self.own, self.losses, self.bad = own, [], []
        self.token_grads: list[Tensor] = []
        layer = Problem([1])
        local = layer.experts // ranks
        owned = slice(rank * local, (rank + 1) * local)
        cut = {"gate_up": owned, "down": owned}
        self.weights = {n: layer.parts[n][cut.get(n, slice(None))].clone().requires_grad_() for n in TRAINED}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-3)
        self.batches = []
        for seed, (tokens, ring) in enumerate(BATCHES):
            problem = Problem(list(tokens), seed=seed)
            rows = slice(0, None) if ranks == 1 else (slice(0, tokens[0]), slice(tokens[0], None))[rank]
            inputs = {n: problem.parts[n][rows].clone() for n in PER_TOKEN}
            self.batches.append((problem, inputs, problem.ids[rows].clone(), problem.dout[rows].clone(), ring))

    def step(self, index: int, fill: Any) -> None:
        """Forward, backward and update. `fill` is called before the first two."""
        problem, inputs, ids, target, ring = self.batches[index % len(BATCHES)]
        leaves = {n: inputs[n].detach().requires_grad_() for n in PER_TOKEN}
        args, keywords = problem.arguments(leaves | self.weights, ids)
        fill()
        out = load().moe(*args, **keywords, workspace=self.own, macrobatch_size=ring)
        loss = (out - target).float().square().sum()
        fill()
        loss.backward()
        self.losses.append(loss.detach())
        grads = [leaf.grad for leaf in (leaves | self.weights).values()]
        self.token_grads += [leaf.grad for leaf in leaves.values()]
        self.bad.append(torch.stack([grad.isnan().any() for grad in grads]))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def results(self) -> dict[str, Any]:
        assert not torch.stack(self.bad).any(), "gradients (step, tensor): " + str(torch.stack(self.bad).nonzero())
        losses = torch.stack(self.losses)
        assert losses.isfinite().all(), f"losses of steps {losses.isfinite().logical_not().nonzero().flatten()}"
        tokens = torch.cat([grad.flatten().float() for grad in self.token_grads])
        return {"losses": losses, "token_grads": tokens} | {n: w.detach() for n, w in self.weights.items()}


def fill_free_memory() -> None:
    """NaN in all that the caching allocator has free for the current stream; on a CPU in some of what malloc has."""
    if backend().device == "cpu":
        return poison()
    stream, sizes = torch.cuda.current_stream().cuda_stream, []
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream or segment.get("segment_pool_id", (0, 0)) != (0, 0):
            continue
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "large":
            sizes += [size for size in free if size > SMALL]  # nobody can get the others
        else:
            sizes += [SMALL] * sum(size // SMALL for size in free) + [size % SMALL for size in free if size % SMALL]
    held = [torch.empty(size // 2, dtype=torch.int16, device="cuda") for size in sorted(sizes, reverse=True)]
    for block in held:
        block.fill_(PATTERN)


def train(ranks: int, steps: int, fill: Any) -> list[dict[str, Any]]:
    group = load().VirtualGroup(ranks) if ranks > 1 else None
    states = [Rank(ranks, rank, workspace(group, rank)) for rank in range(ranks)]

    def work(rank: int) -> None:
        for index in range(steps):
            states[rank].step(index, fill)

    in_ranks(ranks, work)
    return [state.results() for state in states]


@pytest.fixture(scope="module")
def loaded(on_backend: None) -> None:
    """Every kernel of torch and ours that a step runs, for every batch, has run.

    One that is loaded while a rank of a virtual group waits on the device would wait for that rank.
    """
    for ranks in (1, 2) if backend().device == "cuda" else ():
        for rank in range(ranks):
            alone = Rank(ranks, rank, workspace())
            for _, _, ids, _, _ in alone.batches:
                ids.remainder_(alone.weights["down"].shape[0])
            for index in range(2 * len(BATCHES)):
                alone.step(index, fill_free_memory)
    if backend().device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("ranks", [1, 2])
def test_poisoned_memory_changes_no_bit(ranks: int, loaded: None) -> None:
    """Counts that change from step to step, 0 and 1 among them, and rings smaller than the rows; AdamW."""
    steps = STEPS[backend().device]
    want = train(ranks, steps, lambda: None)
    got = train(ranks, steps, fill_free_memory)
    for rank in range(ranks):
        for name, value in want[rank].items():
            assert value.isfinite().all(), f"rank {rank}: {name} is not finite without poison"
            assert torch.equal(got[rank][name], value), f"rank {rank}: {name} differs"
        down = Problem([1]).parts["down"].chunk(ranks)[rank]
        assert not torch.equal(want[rank]["down"], down), f"rank {rank} has trained nothing"
