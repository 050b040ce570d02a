"""Where a forward's time goes, kernel by kernel; small batches; two ranks on one GPU against one rank on half of it.

python benchmarks/shares.py [--out results.json]
"""

import argparse
import os
import statistics
import sys

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import Group, Settings, make_routes, make_weights
from shapes import SHAPES
from timing import blocks, graph, preheat, save

KERNELS = (
    "prologue_kernel",
    "count_kernel",
    "prefix_kernel",
    "place_kernel",
    "forward_kernel",
    "sum_kernel",
    "barrier_kernel",
)


def kernel_times(function, calls=30):
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    times = {}
    for e in p.events():
        for k in KERNELS:
            if k in e.name:
                times.setdefault(k, []).append(e.time_range.elapsed_us())
    return {k: statistics.median(v) for k, v in times.items()}


def shares(name, tokens):
    s = SHAPES[name]
    group = Group(make_weights(1, s["experts"], s["hidden"], s["inter"], s["shared"]), s["topk"], tokens, Settings())
    x = torch.randn(tokens, s["hidden"], device="cuda", dtype=torch.bfloat16)
    ids, w = make_routes(tokens, s["topk"], s["experts"], seed=0)
    args = group.args(0, tokens, x)
    t = kernel_times(lambda: group.forward_single(x, ids, w, args=args))
    total = sum(t.values())
    schedule = sum(t.get(k, 0) for k in ("count_kernel", "prefix_kernel", "place_kernel"))
    print(
        f"{name:5s} {tokens:5d} kernels {total:7.1f} us | "
        + " ".join(f"{k[:-7]} {v:.1f}" for k, v in t.items())
        + f" | schedule {schedule / total * 100:.1f} %",
        flush=True,
    )
    return dict(
        what="shares", shape=name, tokens=tokens, shared_inter=s["shared"], us=t, schedule_share=schedule / total
    )


def small(name):
    s, rows = SHAPES[name], []
    weights = make_weights(1, s["experts"], s["hidden"], s["inter"], s["shared"])
    for tokens in (1, 4, 16, 64, 256):
        group = Group(weights, s["topk"], tokens, Settings())
        x = torch.randn(tokens, s["hidden"], device="cuda", dtype=torch.bfloat16)
        ids, w = make_routes(tokens, s["topk"], s["experts"], seed=0)
        args = group.args(0, tokens, x)
        captured, _ = graph(lambda: group.forward_single(x, ids, w, args=args))
        times, _ = blocks(
            {"eager": lambda n: group.forward_single(x, ids, w, args=args), "graph": lambda n: captured.replay()},
            block_ms=10,
            rounds=4,
        )
        rows.append(
            dict(
                what="small",
                shape=name,
                tokens=tokens,
                eager_us=statistics.median(times["eager"]) * 1e3,
                graph_us=statistics.median(times["graph"]) * 1e3,
            )
        )
    print(
        f"{name:5s} "
        + " | ".join(f"N={r['tokens']} eager {r['eager_us']:.0f} graph {r['graph_us']:.0f} us" for r in rows),
        flush=True,
    )
    return rows


def virtual(name, tokens):
    """Two ranks of one group in one launch, against two independent layers in one launch.

    The layers have as many rows, on the same halves of the SMs.
    """
    s = SHAPES[name]
    weights = make_weights(2, s["experts"], s["hidden"], s["inter"])
    pair = Group(weights, s["topk"], tokens, Settings())
    singles = [Group([w], s["topk"], tokens, Settings()) for w in weights]
    xs = [torch.randn(tokens, s["hidden"], device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    both = [make_routes(tokens, s["topk"], 2 * s["experts"], seed=r) for r in range(2)]
    own = [make_routes(tokens, s["topk"], s["experts"], seed=r) for r in range(2)]

    def alone():
        args = []
        for g, x, (ids, w) in zip(singles, xs, own, strict=True):
            g.prologue(0, x, ids, w)
            args.append(g.args(0, tokens))
            g.schedule(args[-1])
        singles[0].megakernel(*args)

    a = kernel_times(lambda: pair.forward(xs, [b[0] for b in both], [b[1] for b in both]), 10)["forward_kernel"]
    b = kernel_times(alone, 10)["forward_kernel"]
    tiles = [pair.header(r)["tiles"] for r in range(2)], [g.header()["tiles"] for g in singles]
    print(
        f"{name:5s} {tokens} one group {a:.0f} us, tiles {tiles[0]}; "
        f"two layers {b:.0f} us, tiles {tiles[1]}; x{a / b:.3f}",
        flush=True,
    )
    return dict(what="virtual_ep2", shape=name, tokens=tokens, two_ranks_us=a, two_layers_us=b, tiles=tiles)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heat", type=float, default=5)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    preheat(options.heat)
    rows = []
    for name in SHAPES:
        rows.append(shares(name, SHAPES[name]["tokens"][0]))
        torch.cuda.empty_cache()
    for name in ("kimi", "q30b"):
        rows += small(name)
    for name in ("kimi", "qwen"):
        rows.append(virtual(name, 2048))
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
