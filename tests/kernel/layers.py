"""Random MoE layers for the kernel tests, run on a virtual group and by the oracle.

The tests of this folder hold for every backend: they run on `backend()`, the CPU, and again on a GPU where tests/gpu
collects them.
"""

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


@dataclass(frozen=True)
class Backend:
    """Where the layers of these tests run and what the kernel promises there.

    Args:
        device: kind of device.
        dtype: of a problem that names none.
        tolerance: relative error against fp64 in that dtype.
        least_ring: rows of the smallest ring.
        timeout_s: longest wait for a rank that is to come.
    """

    device: str
    dtype: torch.dtype
    tolerance: float
    least_ring: int
    timeout_s: float


CPU = Backend("cpu", torch.float32, 2e-6, 128, 60.0)
CUDA = Backend("cuda", torch.bfloat16, 1e-2, 256, 10.0)
_backend = CPU


def backend() -> Backend:
    """The backend that the tests run on now."""
    return _backend


def use(chosen: Backend) -> None:
    """Runs what follows on `chosen`."""
    global _backend
    _backend = chosen


def load() -> ModuleType:
    """The kernel package under test."""
    return kernel.load()


def workspace(group: Any = None, rank: int = 0, timeout_s: float | None = None) -> Any:
    """A workspace of its own, on the backend's device."""
    return load().Workspace(group, backend().device, rank=rank, timeout_s=timeout_s or backend().timeout_s)


def randint(low: int, high: int, size: tuple[int, ...], seed: int) -> Tensor:
    """Random ids on the backend's device, the same on every one."""
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed)).to(backend().device)


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
    dtype: torch.dtype | None = None  # the backend's
    swiglu_limit: float | None = None
    seed: int = 0
    scale: float = 1.0  # of x and dout
    ids: Tensor | None = None  # [sum(tokens), K]
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = self.dtype or backend().dtype
        generator, device = torch.Generator().manual_seed(self.seed), backend().device

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(device, self.dtype)

        count, width = sum(self.tokens), self.shared_width
        if self.ids is None:
            scores = torch.rand(count, self.experts, generator=generator)
            self.ids = scores.topk(min(self.top_k, self.experts), dim=-1).indices
        self.ids = self.ids.to(device)
        self.parts = {
            "x": normal(count, self.hidden, scale=self.scale),
            "weights": torch.rand(self.ids.shape, generator=generator).to(device),
            "scale": torch.rand(count, generator=generator).to(device),
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
        if "macrobatch_size" in settings:
            settings["macrobatch_size"] = max(settings["macrobatch_size"], backend().least_ring)
        each, local = len(self.tokens) // ranks, self.experts // ranks
        ends = [sum(self.tokens[: (r + 1) * each]) for r in range(ranks)]

        def rank_step(rank: int) -> dict[str, Tensor]:
            own = workspace(group if ranks > 1 else None, rank)
            rows = slice(ends[rank - 1] if rank else 0, ends[rank])
            owned = slice(rank * local, (rank + 1) * local)
            cut = {"x": rows, "weights": rows, "scale": rows, "gate_up": owned, "down": owned}
            leaves = {n: self.parts[n][cut.get(n, slice(None))].clone() for n in self.names()}
            for n, leaf in leaves.items():
                leaf.requires_grad_(n not in frozen)
            args, keywords = self.arguments(leaves, self.ids[rows])
            out = mok.moe(*args, **keywords, workspace=own, **settings)
            out.backward(self.dout[rows])
            return {"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}

        return in_ranks(ranks, rank_step)


def in_ranks(ranks: int, work: Any) -> list[Any]:
    """work(0) .. work(ranks - 1), each on a thread, on CUDA with a stream of its own; raises the first exception."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []
    main = torch.cuda.current_stream() if backend().device == "cuda" else None

    def run(rank: int) -> None:
        try:
            if main is None:
                results[rank] = work(rank)
            else:
                stream = torch.cuda.Stream()
                stream.wait_stream(main)
                # Autograd has one thread for a GPU: a layer computed again there would wait for a rank behind it.
                with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(rank)
                stream.synchronize()
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
    """Every tensor within `limit`, and within 1.5 times what plain PyTorch in the same dtype has.

    A limit for fp32 is the backend's own on one that computes in less.
    """
    limit = max(limit, backend().tolerance)
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
    device = backend().device
    blocks = [torch.full((1 << shift,), float("nan"), device=device) for shift in range(6, 23) for _ in range(3)]
    del blocks
