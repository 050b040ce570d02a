"""One MoE layer on CPU against Transformers' native expert parallelism: time, peak memory, activation memory.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/cpu_layer.py --json benchmarks/results/cpu-layer.json

Both run in this one process group on the same weights and tokens, in alternating blocks. Before anything is timed,
outputs and gradients are compared. Memory is the process's resident high-water mark over one forward and backward, in
a fresh process for each implementation (`--memory`), since the high-water mark never falls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mok_hf import kernel

TOLERANCE = 2e-6


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int  # a rank

    def flops(self) -> int:
        """Forward and backward of this rank's routes; performance.md's convention without a shared expert."""
        return 18 * self.tokens * self.top_k * self.hidden * self.intermediate


class Layer:
    """The weights and tokens of this rank, and one forward and backward of either implementation."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        local = shape.experts // self.size
        generator = torch.Generator().manual_seed(seed + self.rank)

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).mul_(scale)

        config = SimpleNamespace(
            num_experts=local,
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            hidden_act="silu",
            num_local_experts=local,
            _experts_implementation="grouped_mm",
        )
        self.experts = Qwen3MoeExperts(config)
        self.experts._is_expert_parallel = True
        with torch.no_grad():
            self.experts.gate_up_proj.copy_(normal(local, 2 * shape.intermediate, shape.hidden, scale=0.02))
            self.experts.down_proj.copy_(normal(local, shape.hidden, shape.intermediate, scale=0.02))
        self.x = normal(shape.tokens, shape.hidden).requires_grad_()
        logits = normal(shape.tokens, shape.experts)
        self.weights, self.ids = logits.softmax(-1).topk(shape.top_k)
        self.weights = self.weights.detach().requires_grad_()
        self.dout = normal(shape.tokens, shape.hidden)

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.weights, self.experts.gate_up_proj, self.experts.down_proj]

    def native(self) -> torch.Tensor:
        if not hasattr(self, "_native"):
            ep_mesh = init_device_mesh("cpu", (self.size, 1), mesh_dim_names=("ep", "tp"))
            self._native = AllToAllEP(self.experts, ep_mesh["ep"], ep_mesh["tp"])
        return self._native(self.x, self.ids, self.weights)

    def mok(self, **settings) -> torch.Tensor:
        module = kernel.load()
        workspace = module.workspace(dist.group.WORLD, "cpu")
        return module.moe(
            self.x,
            self.ids,
            self.weights,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            workspace=workspace,
            **settings,
        )

    def step(self, implementation: str, **settings) -> tuple[float, float, torch.Tensor]:
        """Seconds of forward and of backward, slowest rank, and the output."""
        for leaf in self.leaves():
            leaf.grad = None
        dist.barrier()
        start = time.perf_counter()
        out = self.native() if implementation == "native" else self.mok(**settings)
        middle = time.perf_counter()
        out.backward(self.dout)
        times = torch.tensor([middle - start, time.perf_counter() - middle])
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times[0].item(), times[1].item(), out.detach()


def compare(layer: Layer) -> float:
    """Largest relative error of output and gradients between the two; raises when it is too large."""
    results = {}
    for implementation in ("native", "mok"):
        out = layer.step(implementation)[2]
        results[implementation] = [out] + [leaf.grad.clone() for leaf in layer.leaves()]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(results["mok"], results["native"], strict=True)]
    worst = max(errors)
    if not worst <= TOLERANCE:
        raise SystemExit(f"mok and native disagree: relative errors {errors}, more than {TOLERANCE}")
    return worst


def memory_of(implementation: str, shape: Shape, macrobatch: int | None) -> None:
    """Prints what one forward and backward add to this process's resident high-water mark, in MiB."""
    layer = Layer(shape)
    small = Layer(Shape(shape.experts, 64, 64, shape.top_k, 64))
    small.step(implementation)  # libraries, threads and communicators are up before the measurement starts
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer.step(implementation, **({"macrobatch_size": macrobatch} if implementation == "mok" and macrobatch else {}))
    grown = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    if layer.rank == 0:
        print(f"MEMORY {grown.item():.1f}")


def saved_bytes(layer: Layer, **settings) -> int:
    """Bytes that one forward of ours keeps for its backward, weights and inputs not counted."""
    own = {t.untyped_storage().data_ptr() for t in layer.leaves()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer.mok(**settings)
    out.backward(layer.dout)
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--blocks", type=int, default=5, help="blocks native, mok, mok, native")
    parser.add_argument("--macrobatch", type=int, default=None, help="with --memory: rows of the ring")
    parser.add_argument("--memory", choices=["native", "mok"], help="only measure the memory of this implementation")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = Shape(args.experts, args.hidden, args.intermediate, args.top_k, args.tokens)
    dist.init_process_group("gloo")
    if args.memory:
        memory_of(args.memory, shape, args.macrobatch)
        dist.destroy_process_group()
        return

    layer = Layer(shape)
    error = compare(layer)
    samples: dict[str, list[tuple[float, float]]] = {"native": [], "mok": []}
    for _ in range(args.blocks):
        for implementation in ("native", "mok", "mok", "native"):
            samples[implementation].append(layer.step(implementation)[:2])
    quarter = max(128, shape.tokens * shape.top_k // 4 // 128 * 128)
    kept = {"default": saved_bytes(layer), "quarter": saved_bytes(layer, macrobatch_size=quarter)}
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report(args, shape, size, samples, error, kept, quarter)


def report(args, shape: Shape, ranks: int, samples, error: float, kept: dict[str, int], quarter: int) -> None:
    memory = {name: measured_memory(args, ranks, name, None) for name in ("native", "mok")}
    memory["mok, quarter ring"] = measured_memory(args, ranks, "mok", quarter)
    rows = []
    for implementation, times in samples.items():
        for index, name in enumerate(("forward", "backward", "forward+backward")):
            values = [sum(t) if index == 2 else t[index] for t in times]
            flops = shape.flops() * (1 / 3, 2 / 3, 1)[index]
            median = statistics.median(values)
            rows.append(
                {
                    "device": platform.processor() or platform.machine(),
                    "ep": ranks,
                    "shape": vars(shape),
                    "tokens": shape.tokens,
                    "pass": name,
                    "impl": "mok" if implementation == "mok" else "transformers_ep",
                    "ms_median": round(median * 1e3, 2),
                    "ms_min": round(min(values) * 1e3, 2),
                    "ms_max": round(max(values) * 1e3, 2),
                    "samples": len(values),
                    "gflops": round(flops / median / 1e9, 1),
                    "rel_error": error if implementation == "mok" else 0.0,
                }
            )
    total = {r["impl"]: r["ms_median"] for r in rows if r["pass"] == "forward+backward"}
    print(f"{'implementation':<18}{'pass':<18}{'median ms':>10}{'min':>9}{'max':>9}{'GFLOP/s':>9}")
    for r in rows:
        print(f"{r['impl']:<18}{r['pass']:<18}{r['ms_median']:>10}{r['ms_min']:>9}{r['ms_max']:>9}{r['gflops']:>9}")
    print(f"forward+backward, mok over native: {total['mok'] / total['transformers_ep']:.3f}")
    print("peak memory of a step, MiB: " + ", ".join(f"{k} {v:.0f}" for k, v in memory.items()))
    print("kept for the backward, MiB: " + ", ".join(f"{k} ring {v / 2**20:.0f}" for k, v in kept.items()))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        result = {
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "ratio": total["mok"] / total["transformers_ep"],
            "peak_mib": memory,
            "saved_bytes": kept,
            "quarter_ring_rows": quarter,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measured_memory(args, ranks: int, implementation: str, macrobatch: int | None) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    for name in ("experts", "hidden", "intermediate", "top_k", "tokens"):
        command.append(f"--{name}={getattr(args, name)}")
    command.append(f"--memory={implementation}")
    if macrobatch:
        command.append(f"--macrobatch={macrobatch}")
    launcher = ("TORCHELASTIC", "MASTER_", "RANK", "WORLD", "LOCAL_", "GROUP_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    out = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    return float(next(line for line in out.splitlines() if line.startswith("MEMORY")).split()[1])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Skips destructors: torch 2.13's gloo threads abort the interpreter's teardown once in some ten runs.
    os._exit(0)
