"""One MoE layer's forward at one rank: correctness first, then time against the composite and transformers baselines.

    python benchmarks/layer.py [--shapes kimi,glm] [--out results.json] [--no-shared | --shared]

Time covers hidden states + top-k ids and weights -> output. Ours runs eagerly; the composite is a CUDA graph's replay.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from baselines import Composite, Transformers
from driver import TILE, Group, Settings, make_routes, make_weights, reference, relative_error
from shapes import SHAPES
from timing import blocks, graph, preheat, ratio

INPUT_SETS = 3  # rotated; each holds 16 to 67 MB of x alone


def commit():
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except Exception:
        return os.environ.get("MOK_COMMIT", "unknown")


def routes(tokens, topk, experts, seed):
    """Distinct experts a token where there are enough, otherwise uniform draws.

    The paper's shapes at EP 64 have k > experts on a rank.
    """
    ids, weight = make_routes(tokens, topk, experts, seed=seed)
    return ids.to(torch.int64), weight


def run(name, tokens, shared, rounds):
    s = SHAPES[name]
    d, i, k, experts, width = s["hidden"], s["inter"], s["topk"], s["experts"], s["shared"] if shared else 0
    weights = make_weights(1, experts, d, i, width)
    group = Group(weights, k, tokens, Settings())
    composite, native = Composite(weights[0], k), Transformers(weights[0], k)
    sets = []
    for seed in range(INPUT_SETS):
        x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
        ids, w = routes(tokens, k, experts, seed)
        captured, result = graph(lambda: composite(x, ids, w))
        out = torch.full((tokens, d), float("nan"), device="cuda", dtype=torch.bfloat16)
        args = group.args(0, tokens, x)
        expected = reference(x, ids, w, list(zip(weights[0].gate_up, weights[0].down, strict=True)), weights[0].shared)
        ours = group.forward_single(x, ids, w, out=out, args=args)
        captured.replay()
        errors = {
            "mok": relative_error(ours, expected),
            "composite": relative_error(result, expected),
            "transformers": relative_error(native(x, ids, w), expected),
        }
        assert all(e < 1e-2 for e in errors.values()), (name, tokens, errors)
        sets.append((x, ids, w, captured, out, args))
        del expected
    header = group.header()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    functions = {
        "mok": lambda n: (lambda v: group.forward_single(v[0], v[1], v[2], out=v[4], args=v[5]))(sets[n % INPUT_SETS]),
        "composite": lambda n: sets[n % INPUT_SETS][3].replay(),
        "transformers": lambda n: native(*sets[n % INPUT_SETS][:3]),
        "dense": lambda n: a @ b,
    }
    with torch.no_grad():
        times, clocks = blocks(functions, block_ms=60, rounds=rounds)
    flops = 6.0 * tokens * d * (k * i + width)
    dense = 2 * 8192**3 / statistics.median(times["dense"]) / 1e9
    useful = tokens * k / (header["tiles"] * TILE)
    rows = []
    for impl in ("mok", "composite", "transformers"):
        t = times[impl]
        median, low, high = ratio(t, times["mok"])
        rows.append(
            dict(
                device=torch.cuda.get_device_name(),
                ep=1,
                shape=name,
                tokens=tokens,
                shared_inter=width,
                **{"pass": "forward"},
                impl=impl,
                ms_median=statistics.median(t),
                ms_min=min(t),
                ms_max=max(t),
                tflops=flops / statistics.median(t) / 1e9,
                dense_tflops=dense,
                rel_error=errors[impl],
                sm_mhz=clocks[impl],
                slower_than_mok=median,
                slower_than_mok_95=[low, high],
                settings=dict(useful_rows=useful, minibatch_tiles=header["minibatch_tiles"], graph=impl == "composite")
                if impl != "transformers"
                else {},
            )
        )
    m, c, t = rows
    print(
        f"{name:5s} {tokens:5d} S={width:4d} | mok {m['ms_median']:.3f} ms {m['tflops']:4.0f} TF "
        f"({m['tflops'] / dense * 100:3.0f} % of dense, rows {useful:.3f}) | "
        f"composite {c['ms_median']:.3f} x{c['slower_than_mok']:.3f} "
        f"[{c['slower_than_mok_95'][0]:.3f} {c['slower_than_mok_95'][1]:.3f}] | "
        f"transformers {t['ms_median']:.3f} x{t['slower_than_mok']:.2f} | dense {dense:.0f} | err {m['rel_error']:.1e}",
        flush=True,
    )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--shared", choices=("both", "with", "without"), default="both")
    parser.add_argument("--heat", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    import transformers
    import triton

    preheat(options.heat)
    rows = []
    for name in options.shapes.split(","):
        for shared in (False, True):
            if (
                (shared and not SHAPES[name]["shared"])
                or (options.shared == "with" and not shared)
                or (options.shared == "without" and shared)
            ):
                continue
            for tokens in SHAPES[name]["tokens"]:
                rows += run(name, tokens, shared, options.rounds)
                torch.cuda.empty_cache()
    if options.out:
        versions = dict(
            torch=torch.__version__,
            cuda=torch.version.cuda,
            triton=triton.__version__,
            transformers=transformers.__version__,
        )
        with open(options.out, "w") as f:
            json.dump(
                dict(commit=commit(), date=datetime.date.today().isoformat(), versions=versions, rows=rows), f, indent=1
            )


if __name__ == "__main__":
    main()
