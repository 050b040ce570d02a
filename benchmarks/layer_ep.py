"""One MoE layer over several GPUs, forward and backward: correctness, then time against the baselines.

    torchrun --nproc_per_node 8 benchmarks/layer_ep.py [--shapes kimi,glm] [--tokens 4096] [--out results.json]

Each rank has the experts of shapes.py on the paper's models, and its share of all experts on the two others. Ours is
the operator as a training step calls it, eager, with autograd; the composites (ep_baselines.py) are CUDA graphs, or
eager where they can not be captured; Transformers' own expert parallelism is eager. Before anything is timed, every
rank compares its output and gradients with fp64, the eager ones and those of replays. A block's time is its slowest
rank's.

With uniform routing, ours and the NCCL composite also run with the same routes led to the token's own rank (`*_local`):
what a layer takes beyond that is exposed communication. With other routings it would be load imbalance as well. Bytes
over the links follow from the routes, 2D for each row that crosses: for DeepEP one a token and rank.

With --device cpu it runs over gloo, at tiny sizes, to test this script.
"""

import argparse
import gc
import importlib.util
import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from ep_baselines import DeepEPComposite, NcclComposite, TransformersEP
from ep_problem import ROUTINGS, Problem
from passes import (
    INPUT_SETS,
    PASSES,
    Mok,
    compared,
    eager_functions,
    graph_functions,
    lesser_backward,
    replays,
    show,
    step,
    worst_error,
)
from shapes import SHAPES
from timing import blocks, preheat, ratio, save

from mok_hf import kernel

LOCAL = ("mok", "nccl_grouped_mm")  # also run with all routes local
SPREAD = ("q30b", "air")  # all experts of the model on the ranks together
TINY = dict(experts=2, hidden=128, inter=64, topk=3, shared=64)  # for tests of this script
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


class Ranks:
    """What the ranks tell each other beside the measured work: over gloo, so that the GPUs have no part in it."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")

    def everyone(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def slowest(self, ms):
        worst = torch.tensor(ms, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        return worst.item()

    def together(self, function):
        """What `function` returns; if it raises on a rank all raise, where the others would wait for that one."""
        result = problem = None
        try:
            result = function()
        except Exception as error:
            problem = f"rank {self.rank}: {type(error).__name__}: {error}"
        problems = [p for p in self.everyone(problem) if p]
        if problems:
            raise RuntimeError("; ".join(problems))
        return result


def functions_of(layer, sets, weights, ranks, options):
    """Functions of the passes, and what replays of graphs fill, None if eager; all ranks do the same."""
    if hasattr(layer, "backward") and options.device != "cpu" and not options.eager:
        try:
            return ranks.together(lambda: graph_functions(layer, sets, weights))
        except RuntimeError as error:
            if ranks.rank == 0:
                print(f"  {type(layer).__name__} runs eager: {error}", flush=True)
    return eager_functions(layer, sets, weights), None


def make_layers(weights, problem, ranks, options, inputs):
    """impl -> layer, those that this machine and this kernel have."""
    layers = {"mok": Mok(weights, dist.group.WORLD, problem.device)}
    for comm in options.comm_sms:
        # A workspace of its own: one whose call was refused can not be used any more.
        layer = Mok(weights, dist.group.WORLD, problem.device, fwd_comm_sms=comm, bwd_comm_sms=comm)
        try:
            layer(inputs)
            layers[f"mok_comm_{comm}"] = layer
        except ValueError as error:
            layer.workspace.close()
            if ranks.rank == 0:
                print(f"  without comm_sms={comm}: {error}", flush=True)
    layers["nccl_grouped_mm"] = NcclComposite(weights, problem)
    if importlib.util.find_spec("deep_ep") is not None:
        layers["deepep_grouped_mm"] = DeepEPComposite(weights, problem)
    layers["transformers_ep"] = TransformersEP(weights, problem)
    return layers


def inputs_of(problem, local=False):
    sets = [problem.inputs(seed=seed, local=local) for seed in range(INPUT_SETS)]
    for s in sets:
        s.x.requires_grad_(), s.weight.requires_grad_()
    return sets


def checked(results, expected, ranks):
    """The worst relative error of any rank's output and gradients; raises on all ranks where one's is too large."""
    error = ranks.together(lambda: worst_error(results, expected, TOLERANCE[results[0].dtype]))
    return max(ranks.everyone(error))


def run(name, tokens, ranks, options):
    if options.device != "cpu":
        gc.collect()  # the last shape's graphs
        torch.cuda.empty_cache()
    shape = TINY if name == "tiny" else SHAPES[name]
    experts = shape["experts"] // ranks.size if name in SPREAD else shape["experts"]
    problem = Problem(
        ranks=ranks.size,
        rank=ranks.rank,
        tokens=tokens,
        hidden=shape["hidden"],
        inter=shape["inter"],
        topk=shape["topk"],
        experts=experts,
        shared=0 if options.without_shared else shape["shared"],
        routing=options.routing,
        remote=options.remote,
        device=options.device,
        dtype=options.dtype,
    )
    weights = problem.weights()
    weights.gate_up, weights.down = nn.Parameter(weights.gate_up), nn.Parameter(weights.down)
    weights.shared = tuple(map(nn.Parameter, weights.shared)) if weights.shared else None
    variants = {"": inputs_of(problem)}
    if options.routing == "uniform":  # led to their own rank, other routes would also lose their imbalance
        variants["_local"] = inputs_of(problem, local=True)
    layers = make_layers(weights, problem, ranks, options, variants[""][0])

    by_impl, graphs, errors = {}, {}, {}
    for suffix, of in variants.items():
        expected = problem.exact(local=bool(suffix))
        for impl in LOCAL if suffix else layers:
            layer, key = layers[impl], impl + suffix
            errors[key] = checked(step(layer, of[0], weights), expected, ranks)
            by_impl[key], filled = functions_of(layer, of, weights, ranks, options)
            graphs[key] = filled is not None
            for results in replays(by_impl[key], filled) if filled else ():
                errors[key] = max(errors[key], checked(results, expected, ranks))
                del results
        del expected, filled
    if options.device != "cpu":
        torch.cuda.empty_cache()

    functions = {(impl, p): f for impl, passes in by_impl.items() for p, f in passes.items()}
    size = 64 if options.device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=options.device, dtype=problem.dtype) for _ in range(2))
    functions["dense", ""] = lambda n: a @ b
    times, clocks = blocks(functions, options.block_ms, options.rounds, options.least, ranks.slowest)
    rows = make_rows(name, problem, times, ranks.everyone(clocks), 2 * size**3, errors, graphs, options)
    for layer in layers.values():
        if isinstance(layer, Mok):
            layer.workspace.close()
    if ranks.rank == 0:
        show_rows(name, problem, rows)
    return rows


def make_rows(name, problem, times, clocks, dense_flops, errors, graphs, options):
    for impl, graphed in graphs.items():
        if graphed:
            times[impl, "backward"] = lesser_backward(times, impl)
    dense = dense_flops / statistics.median(times["dense", ""]) / 1e9
    p = problem
    flops = 6.0 * p.tokens * p.hidden * (p.topk * p.inter + p.shared)
    seeds = range(INPUT_SETS)
    link_bytes = {once: p.link_bytes(seeds, once) for once in (False, True)}
    arriving = {
        local: torch.stack([p.routes(seed, local).sum(0) for seed in seeds]).double().mean(0).tolist()
        for local in (False, True)
    }
    rows = []
    for pass_ in PASSES:
        for impl, graphed in graphs.items():
            settings = dict(graph=graphed, routing=p.routing, remote=p.remote)
            settings["rows_arriving"] = arriving[impl.endswith("_local")]  # at each rank
            if impl.startswith("mok_comm_"):
                settings["comm_sms"] = int(impl.removeprefix("mok_comm_"))
            row = dict(
                device=torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
                ep=p.ranks,
                shape=name,
                tokens=p.tokens,
                experts_per_rank=p.experts,
                shared_inter=p.shared,
                **compared(times, impl, pass_, flops, dense, errors),
                sm_mhz=[clock[impl, pass_] for clock in clocks],
                settings=settings,
            )
            if not impl.endswith("_local"):
                crossing = link_bytes[impl == "deepep_grouped_mm"] * (2 if pass_ == "both" else 1)
                row |= dict(link_bytes=crossing, link_gb_s=crossing / row["ms_median"] / 1e6)
            local = times.get((f"{impl}_local", pass_))
            if local:
                share, low, high = ratio(local, times[impl, pass_])
                row |= dict(exposed=1 - share, exposed_95=[1 - high, 1 - low])
            rows.append(row)
    return rows


def show_rows(name, problem, rows):
    def exchange(row):
        exposed = f", exposed {row['exposed']:.1%}" if "exposed" in row else ""
        return f", link {row['link_gb_s']:.0f} GB/s{exposed}"

    p = problem
    routing = f"{p.routing}{', all remote' if p.remote else ''}"
    show(f"{name} {p.tokens} EP {p.ranks} S={p.shared} {routing}", rows, exchange)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of shapes.py, or `tiny`")
    parser.add_argument("--tokens", default="2048,4096,8192", help="a rank")
    parser.add_argument("--without-shared", action="store_true")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--remote", action="store_true", help="every route to another rank than the token's")
    parser.add_argument("--comm-sms", default="", help="also ours with these communication SMs, e.g. 0,8,16")
    parser.add_argument("--eager", action="store_true", help="composites without CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: on CPU only")
    parser.add_argument("--heat", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-ms", type=float, default=40)
    parser.add_argument("--least", type=int, default=5, help="calls in a block, at least")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    options.comm_sms = [int(n) for n in options.comm_sms.split(",") if n]
    return options


def main():
    options = parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything asks for a device
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    ranks = Ranks()
    kernel.agree(dist.group.WORLD)
    import transformers

    modules = [transformers]
    if options.device == "cuda":
        import triton

        modules.append(triton)
        options.device = f"cuda:{torch.cuda.current_device()}"
        preheat(options.heat)
    rows = []
    for name in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            rows += run(name, tokens, ranks, options)
            if options.out and ranks.rank == 0:  # after each shape: a run that is cut short has what it measured
                save(options.out, rows, *modules)
    ranks.everyone(None)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Skips destructors: NCCL waits for graphs that hold its communicator, gloo's threads can abort the teardown.
    os._exit(0)
