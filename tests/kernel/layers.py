"""Random MoE layers for the kernel tests, run on a virtual group and by the oracle."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mok_hf import kernel

# What a layer's step yields, in order; the first four for each rank's tokens, the others for its experts.
PER_TOKEN = ("out", "dx", "d_weights", "d_scale")


def load() -> ModuleType:
    """The kernel package under test."""
    return kernel.load()


@dataclass
class Problem:
    """One layer and what each rank feeds it; `tokens[r]` tokens on rank r, drawn anew for each seed."""

    tokens: list[int]
    hidden: int = 128
    intermediate: int = 192
    shared_width: int = 64  # 0: no shared expert
    gated: bool = True
    experts: int = 8
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    swiglu_limit: float | None = None
    seed: int = 0
    scale: float = 1.0  # of x and dout
    ids: Tensor | None = None  # [sum(tokens), K]
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(self.dtype)

        count, width = sum(self.tokens), self.shared_width
        if self.ids is None:
            scores = torch.rand(count, self.experts, generator=generator)
            self.ids = scores.topk(min(self.top_k, self.experts), dim=-1).indices
        self.parts = {
            "x": normal(count, self.hidden, scale=self.scale),
            "weights": torch.rand(self.ids.shape, generator=generator),
            "scale": torch.rand(count, generator=generator),
            "gate_up": normal(self.experts, 2 * self.intermediate, self.hidden, scale=self.hidden**-0.5),
            "down": normal(self.experts, self.hidden, self.intermediate, scale=self.intermediate**-0.5),
            "shared_gate": normal(width, self.hidden, scale=self.hidden**-0.5),
            "shared_up": normal(width, self.hidden, scale=self.hidden**-0.5),
            "shared_down": normal(self.hidden, width, scale=max(width, 1) ** -0.5),
        }
        self.dout = normal(count, self.hidden, scale=self.scale)

    def names(self) -> list[str]:
        """Tensors that have a gradient, x first."""
        names = ["x", "weights"]
        if self.shared_width and self.gated:
            names.append("scale")
        names += ["gate_up", "down"]
        return names + (["shared_gate", "shared_up", "shared_down"] if self.shared_width else [])

    def arguments(self, leaves: dict[str, Tensor], ids: Tensor) -> tuple[tuple, dict[str, Any]]:
        shared = tuple(leaves[n] for n in ("shared_gate", "shared_up", "shared_down")) if self.shared_width else None
        return (leaves["x"], ids, leaves["weights"], leaves["gate_up"], leaves["down"]), {
            "shared": shared,
            "shared_scale": leaves.get("scale"),
            "swiglu_limit": self.swiglu_limit,
        }

    def oracle(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Output and gradients in one process, by the reference."""
        leaves = {n: self.parts[n].to(dtype).requires_grad_() for n in self.names()}
        if dtype == torch.bfloat16:  # the router's values stay fp32, as in the models
            for n in ("weights", "scale"):
                if n in leaves:
                    leaves[n] = self.parts[n].clone().requires_grad_()
        args, keywords = self.arguments(leaves, self.ids)
        out = load().reference.moe(*args, **keywords)
        out.backward(self.dout.to(out.dtype))
        return {"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()}

    def step(self, ranks: int, frozen: tuple[str, ...] = (), **settings: Any) -> dict[str, Tensor]:
        """Output and gradients of a virtual group: the tokens of `len(self.tokens) // ranks` entries on each rank.

        Per-token results are concatenated over the ranks, experts' gradients too; the shared expert's are summed.
        """
        per_rank = self.results(ranks, frozen, **settings)
        merged = {}
        for name in per_rank[0]:
            values = [result[name] for result in per_rank]
            if name.startswith("shared"):
                merged[name] = values[0] if len(values) == 1 else sum(v.double() for v in values)
            else:
                merged[name] = torch.cat(values)
        return merged

    def results(self, ranks: int, frozen: tuple[str, ...] = (), **settings: Any) -> list[dict[str, Tensor]]:
        mok = load()
        group = mok.VirtualGroup(ranks)
        each, local = len(self.tokens) // ranks, self.experts // ranks
        ends = [sum(self.tokens[: (r + 1) * each]) for r in range(ranks)]

        def rank_step(rank: int) -> dict[str, Tensor]:
            workspace = mok.Workspace(group if ranks > 1 else None, rank=rank, timeout_s=60)
            rows = slice(ends[rank - 1] if rank else 0, ends[rank])
            owned = slice(rank * local, (rank + 1) * local)
            cut = {"x": rows, "weights": rows, "scale": rows, "gate_up": owned, "down": owned}
            leaves = {n: self.parts[n][cut.get(n, slice(None))].clone() for n in self.names()}
            for n, leaf in leaves.items():
                leaf.requires_grad_(n not in frozen)
            args, keywords = self.arguments(leaves, self.ids[rows])
            out = mok.moe(*args, **keywords, workspace=workspace, **settings)
            out.backward(self.dout[rows])
            return {"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}

        return in_ranks(ranks, rank_step)


def in_ranks(ranks: int, work: Any) -> list[Any]:
    """work(0) .. work(ranks - 1), each on a thread; the first exception is raised here."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, NaN if anything is."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()


def assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], limit: float, plain: dict[str, Tensor] | None = None
) -> None:
    """Every tensor within `limit`, and within 1.5 times what plain PyTorch in the same dtype has."""
    assert got.keys() == want.keys()
    for name in want:
        error = relative_error(got[name], want[name])
        assert error <= limit, f"{name}: relative error {error:.2e}, limit {limit:.0e}"
        if plain is not None:
            bound = 1.5 * relative_error(plain[name], want[name])
            assert error <= bound, f"{name}: relative error {error:.2e}, plain PyTorch has {bound / 1.5:.2e}"


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], names: set[str] | None = None) -> None:
    """The same bits."""
    for name in want:
        if names is None or name in names:
            assert torch.equal(got[name], want[name]), f"{name} differs: {(got[name] - want[name]).abs().max()}"


def poison() -> None:
    """Fills memory that the allocator will hand out again with NaN."""
    blocks = [torch.full((1 << shift,), float("nan")) for shift in range(6, 23) for _ in range(3)]
    del blocks
