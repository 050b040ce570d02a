"""The ladder's rungs alone: grouped GEMM gate+up and down against torch._grouped_mm, then the whole layer.

python benchmarks/ladder.py [--shapes kimi,glm] [--out results.json]
"""

import argparse
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from driver import DOWN_ONLY, GATE_UP_ONLY, Group, Settings, make_routes, make_weights, relative_error
from shapes import SHAPES
from timing import blocks, figures, preheat, ratio, save


def check(group, args, weights, ids, rows):
    """Every expert's rows of the rung's output against fp64, poisoned first."""
    header, b = group.header(), group.ranks[0]
    table = b["schedule"]
    out = b["ring_gate_up"] if args.ladder == GATE_UP_ONLY else b["routed"]
    out.fill_(float("nan"))
    group.schedule(args)
    group.megakernel(args)
    torch.cuda.synchronize()
    counts = torch.bincount(ids.flatten(), minlength=group.L).tolist()
    tile, row, worst = 0, 0, 0.0
    flat = ids.flatten()
    for e, n in enumerate(counts):
        a = rows[row : row + n].double()
        if n:
            if args.ladder == GATE_UP_ONLY:
                got, want = out[row : row + n], a @ weights.gate_up[e].double().T
            else:  # row p of an expert is its p-th route
                got, want = out[(flat == e).nonzero().flatten()], a @ weights.down[e].double().T
            worst = max(worst, relative_error(got, want))
        tile, row = tile + -(-n // 128), row + -(-n // 64) * 64  # the ring holds everything
    assert tile == header["tiles"] and table.numel() > 0
    return worst


def run(name, tokens, rounds):
    s = SHAPES[name]
    d, i, k, experts = s["hidden"], s["inter"], s["topk"], s["experts"]
    weights, m = make_weights(1, experts, d, i), tokens * k
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    ids, w = make_routes(tokens, k, experts, seed=0)
    offsets = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)
    functions, errors, keep = {}, {}, []
    for rung, label, width in ((GATE_UP_ONLY, "gate_up", d), (DOWN_ONLY, "down", i)):
        group = Group(weights, k, tokens, Settings(ladder=rung))
        args, b = group.args(0, tokens, x), group.ranks[0]
        group.prologue(0, x, ids, w, alias=True)
        operand = b["ring_x"] if rung == GATE_UP_ONLY else b["ring_h"]
        operand.normal_()
        group.schedule(args)
        errors[label] = check(group, args, weights[0], ids, operand)
        assert errors[label] < 1e-2, (name, label, errors)
        tickets = b["scratch"][:256]
        functions[label] = lambda n, g=group, a=args, t=tickets: (t.zero_(), g.megakernel(a))
        rows = torch.randn(m, width, device="cuda", dtype=torch.bfloat16)
        weight = (weights[0].gate_up if rung == GATE_UP_ONLY else weights[0].down).transpose(1, 2)
        functions["torch_" + label] = lambda n, r=rows, v=weight: torch._grouped_mm(r, v, offs=offsets)
        keep.append((group, rows))
    a, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    functions["dense"] = lambda n: a @ c
    times, _ = blocks(functions, rounds=rounds)
    dense, out = 2 * 8192**3 / statistics.median(times["dense"]) / 1e9, []
    line = f"{name:5s} {tokens:5d} |"
    for label, factor in (("gate_up", 4), ("down", 2)):
        flops = factor * m * d * i
        median, low, high = ratio(times["torch_" + label], times[label])
        for impl, t in (("mok", times[label]), ("torch_grouped_mm", times["torch_" + label])):
            out.append(
                dict(
                    device=torch.cuda.get_device_name(),
                    ep=1,
                    shape=name,
                    tokens=tokens,
                    **{"pass": "forward"},
                    what=label,
                    impl=impl,
                    **figures(t, flops),
                    dense_tflops=dense,
                    rel_error=errors[label] if impl == "mok" else None,
                    torch_over_mok=[median, low, high],
                )
            )
        line += (
            f" {label} {out[-2]['tflops']:4.0f} vs {out[-1]['tflops']:4.0f} TF x{median:.3f} [{low:.3f} {high:.3f}] |"
        )
    print(line, f"dense {dense:.0f}", flush=True)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--heat", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    preheat(options.heat)
    rows = []
    for name in options.shapes.split(","):
        for tokens in SHAPES[name]["tokens"]:
            rows += run(name, tokens, options.rounds)
            torch.cuda.empty_cache()
    if options.out:
        save(options.out, rows)


if __name__ == "__main__":
    main()
