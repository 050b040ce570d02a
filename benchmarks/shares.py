"""Where a forward's time goes, kernel by kernel; small batches; two ranks on one GPU against one rank on half of it.

    python benchmarks/shares.py [--parts shares,small,virtual] [--out results.json]

`small` is the latency of one layer as `generate` calls it, without gradients. `virtual` is what the exchange between
ranks costs beside the products, on one GPU: nothing of it is a link's.
"""

import argparse
import os
import statistics
import sys
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from baselines import Transformers
from driver import TILE, Group, Settings, make_routes, make_weights, relative_error
from layer import TOLERANCE
from passes import Mok
from shapes import SHAPES
from timing import blocks, figures, graph, preheat, ratio, save

SMALL = (1, 4, 16, 64, 256)
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


@torch.no_grad()
def small(name, rounds):
    """Ours, eager and as a CUDA graph, and Transformers' grouped_mm."""
    s, rows = SHAPES[name], []
    weights = make_weights(1, s["experts"], s["hidden"], s["inter"], s["shared"])[0]
    for tokens in SMALL:
        x = torch.randn(tokens, s["hidden"], device="cuda", dtype=torch.bfloat16)
        ids, w = make_routes(tokens, s["topk"], s["experts"], seed=0)
        inputs = SimpleNamespace(x=x, ids=ids, weight=w)
        ours, theirs = Mok(weights, None, "cuda"), Transformers(weights)
        eager, expected = ours(inputs), theirs(inputs)
        captured, filled = graph(lambda: ours(inputs))
        captured.replay()
        for out in (eager, filled):
            error = relative_error(out, expected)
            assert error < 2 * TOLERANCE, (name, tokens, error)
        functions = {
            "mok": lambda n: ours(inputs),
            "mok_graph": lambda n: captured.replay(),
            "transformers": lambda n: theirs(inputs),
        }
        times, _ = blocks(functions, block_ms=10, rounds=rounds)
        for impl, t in times.items():
            median, low, high = ratio(t, times["mok"])
            rows.append(
                dict(
                    what="small",
                    device=torch.cuda.get_device_name(),
                    ep=1,
                    shape=name,
                    tokens=tokens,
                    shared_inter=s["shared"],
                    impl=impl,
                    us_median=statistics.median(t) * 1e3,
                    us_min=min(t) * 1e3,
                    us_max=max(t) * 1e3,
                    slower_than_mok=median,
                    slower_than_mok_95=[low, high],
                )
            )
        print(
            f"{name:5s} N={tokens:3d} "
            + " | ".join(
                f"{r['impl']} {r['us_median']:.0f} us ({r['us_min']:.0f}-{r['us_max']:.0f})" for r in rows[-3:]
            ),
            flush=True,
        )
    return rows


def virtual(name, tokens, rounds):
    """Two ranks of one group in one launch, against two layers of one rank each on as many SMs.

    Those run as one launch, and as two launches on two streams. A route of a rank goes to the same expert of that rank
    and of the other by turns, so that every expert has the rows it has in the layers. Times are of the whole forward:
    prologue, barriers, schedule, megakernel and sum.
    """
    s = SHAPES[name]
    experts, k = s["experts"], s["topk"]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    # Two waves of gate+up tiles on half the device; what is automatic counts all of it where two share a launch.
    lag = 2 * -(-(sms // 2) // -(-s["inter"] // TILE))
    weights = make_weights(2, experts, s["hidden"], s["inter"])
    pair = Group(weights, k, tokens, Settings(minibatch_tiles=lag))
    singles = [Group([w], k, tokens, Settings(minibatch_tiles=lag)) for w in weights]
    halves = [Group([w], k, tokens, Settings(minibatch_tiles=lag, sm_limit=sms // 2)) for w in weights]
    xs = [torch.randn(tokens, s["hidden"], device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    ids, w = make_routes(tokens, k, experts, seed=0)
    turn = torch.arange(tokens, device="cuda")[:, None] + torch.arange(k, device="cuda")
    both = [ids + experts * ((turn + rank) % 2) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def two_ranks():
        pair.forward(xs, both, [w, w])

    def one_launch():
        args = []
        for g, x in zip(singles, xs, strict=True):
            g.prologue(0, x, ids, w)
            args.append(g.args(0, tokens))
            g.schedule(args[-1])
        singles[0].megakernel(*args)
        for g in singles:
            g.epilogue(0, tokens)

    def two_streams():
        main = torch.cuda.current_stream()
        for g, x, stream in zip(halves, xs, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                g.forward([x], [ids], [w])
        for stream in streams:
            main.wait_stream(stream)

    functions = dict(two_ranks=two_ranks, one_launch=one_launch, two_streams=two_streams)
    kernels = {label: kernel_times(f, 10)["forward_kernel"] for label, f in functions.items()}
    tiles = {pair.header(r)["tiles"] for r in range(2)} | {g.header()["tiles"] for g in singles + halves}
    assert len(tiles) == 1, tiles
    times, _ = blocks({label: (lambda n, f=f: f()) for label, f in functions.items()}, rounds=rounds)
    assert not any(g.record[0] for g in (pair, *singles, *halves)), "a wait expired"
    cost = {label: ratio(times["two_ranks"], times[label]) for label in ("one_launch", "two_streams")}
    print(
        f"{name:5s} {tokens} "
        + " | ".join(f"{n} {statistics.median(t):.3f} ms (kernel {kernels[n]:.0f} us)" for n, t in times.items())
        + "".join(f" | two ranks / {n} x{m:.3f} [{low:.3f} {high:.3f}]" for n, (m, low, high) in cost.items()),
        flush=True,
    )
    return [
        dict(
            what="virtual_ep2",
            device=torch.cuda.get_device_name(),
            shape=name,
            tokens=tokens,
            impl=label,
            **figures(t, 2 * 6.0 * tokens * k * s["hidden"] * s["inter"]),
            kernel_us=kernels[label],
            tiles_per_rank=next(iter(tiles)),
            minibatch_tiles=lag,
            two_ranks_over_this=list(cost.get(label, (1.0, 1.0, 1.0))),
        )
        for label, t in times.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="shares,small,virtual")
    parser.add_argument("--heat", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    import transformers
    import triton

    parts, rows = options.parts.split(","), []
    preheat(options.heat)
    for name in SHAPES if "shares" in parts else ():
        rows.append(shares(name, SHAPES[name]["tokens"][0]))
        torch.cuda.empty_cache()
    for name in ("kimi", "qwen", "q30b") if "small" in parts else ():
        rows += small(name, options.rounds)
        torch.cuda.empty_cache()
    for name in ("kimi", "qwen", "q30b") if "virtual" in parts else ():
        for tokens in SHAPES[name]["tokens"]:
            rows += virtual(name, tokens, options.rounds)
            torch.cuda.empty_cache()
    if options.out:
        save(options.out, rows, transformers, triton)


if __name__ == "__main__":
    main()
