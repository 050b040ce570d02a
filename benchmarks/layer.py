"""One MoE layer at one rank, forward and backward: correctness, then time and memory against the baselines.

    python benchmarks/layer.py [--shapes kimi,glm] [--shared both|with|without] [--rings 0.5,0.25] [--out results.json]

Ours is the operator as a training step calls it, eager, with autograd. The composite's forward, backward and both are
replays of CUDA graphs; its backward counts as the lesser of its own graph and both less forward. Transformers is eager.
Time covers hidden states + top-k ids and weights -> output, and dOut -> all gradients. Before anything is timed, every
output and gradient is compared with fp64.

Memory: `peak_mib` is what one forward and backward add at their peak, gradients and our workspace included, and
`peak_checkpointed_mib` the same under torch.utils.checkpoint. `workspace_mib` of it stays, once for all layers.
`kept_mib` is what a forward leaves for its backward, for each layer of a model: it has the output, which the next layer
keeps as its input, and neither weights nor workspace.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from baselines import Composite, Transformers
from driver import TILE, make_routes, make_weights, reference, relative_error
from shapes import SHAPES
from timing import blocks, graph, preheat, ratio, save

from mok_hf import kernel

INPUT_SETS = 2  # rotated; each holds 16 to 67 MB of x alone
PASSES = ("forward", "backward", "both")
TOLERANCE = 1e-2


class Mok:
    """The fused layer; `ring` is the share of all rows that its ring holds."""

    def __init__(self, weights, topk, rows, ring=1.0):
        self.mok = kernel.load()
        self.workspace = self.mok.Workspace(None, "cuda")
        self.weights, self.topk = weights, topk
        self.macrobatch = None if ring == 1.0 else max(2, int(ring * rows) // TILE) * TILE

    def __call__(self, x, ids, weight):
        w = self.weights
        return self.mok.moe(
            x,
            ids,
            weight,
            w.gate_up,
            w.down,
            shared=w.shared,
            workspace=self.workspace,
            macrobatch_size=self.macrobatch,
        )


class Inputs:
    def __init__(self, tokens, hidden, topk, experts, seed):
        ids, weight = make_routes(tokens, topk, experts, seed=seed)
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dout = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.ids, self.weight = ids.to(torch.int64), weight.requires_grad_()

    def leaves(self, weights):
        return [self.x, self.weight, weights.gate_up, weights.down, *(weights.shared or ())]


def step(layer, inputs, weights):
    """Output and gradients of x, route weights, gate_up, down and, with a shared expert, its gate, up and down."""
    out = layer(inputs.x, inputs.ids, inputs.weight)
    return out, *torch.autograd.grad(out, inputs.leaves(weights), inputs.dout)


def checkpointed_step(layer, inputs, weights):
    out = checkpoint(layer, inputs.x, inputs.ids, inputs.weight, use_reentrant=False)
    return out, *torch.autograd.grad(out, inputs.leaves(weights), inputs.dout)


def exact(inputs, weights):
    """The same in fp64."""
    leaf = lambda t: t.detach().double().requires_grad_()
    x, weight = leaf(inputs.x), leaf(inputs.weight)
    experts = [(leaf(g), leaf(d)) for g, d in zip(weights.gate_up, weights.down, strict=True)]
    shared = [leaf(t) for t in weights.shared] if weights.shared else None
    out = reference(x, inputs.ids, weight, experts, shared)
    out.backward(inputs.dout.double())
    zero = lambda t: torch.zeros_like(t) if t.grad is None else t.grad
    grads = [torch.stack([zero(e[i]) for e in experts]) for i in (0, 1)]
    return out.detach(), x.grad, weight.grad, *grads, *[t.grad for t in shared or ()]


def composite_step(composite, inputs):
    out = composite(inputs.x, inputs.ids, inputs.weight)
    g = composite.backward(inputs.dout)
    shared = [*g["d_shared_gate_up"].chunk(2), g["d_shared_down"]] if "d_shared_gate_up" in g else []
    return out, g["dx"], g["d_weight"], g["d_gate_up_proj"], g["d_down_proj"], *shared


def worst_error(results, expected):
    errors = [relative_error(r.detach(), e) for r, e in zip(results, expected, strict=True)]
    assert all(e < TOLERANCE for e in errors), errors
    return max(errors)


def allocated():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peak_bytes(function):
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def kept_bytes(forward):
    before = allocated()
    out = forward()
    kept = allocated() - before
    del out
    return kept


def memory_of(layer, inputs, weights):
    """Bytes by the names of a result's row, less `_mib`. The layer's first step: the one that makes its workspace."""
    before = allocated()
    peak = peak_bytes(lambda: step(layer, inputs, weights))
    workspace = allocated() - before
    return dict(
        peak=peak,
        peak_checkpointed=workspace + peak_bytes(lambda: checkpointed_step(layer, inputs, weights)),
        kept=kept_bytes(lambda: layer(inputs.x, inputs.ids, inputs.weight)),
        workspace=workspace,
    )


def composite_memory(composite, inputs):
    """The same of the composite, which has no autograd: what it keeps lies in `saved`, here of no step before."""
    composite.saved = None
    peak = peak_bytes(lambda: composite_step(composite, inputs))
    composite.saved = None
    kept = kept_bytes(lambda: composite(inputs.x, inputs.ids, inputs.weight))
    return dict(peak=peak, kept=kept, workspace=0)


def functions_of(layer, sets, weights):
    """pass -> function of the iteration number, for an eager layer with autograd."""
    held = [layer(s.x, s.ids, s.weight) for s in sets]

    def backward(n):
        s = sets[n % INPUT_SETS]
        torch.autograd.grad(held[n % INPUT_SETS], s.leaves(weights), s.dout, retain_graph=True)

    return {
        "forward": lambda n: (lambda s: layer(s.x, s.ids, s.weight))(sets[n % INPUT_SETS]),
        "backward": backward,
        "both": lambda n: step(layer, sets[n % INPUT_SETS], weights),
    }


@torch.no_grad()
def graphs_of(composite, sets):
    """pass -> function of the iteration number, each a graph's replay."""
    captured = {name: [] for name in PASSES}
    for s in sets:
        captured["forward"].append(graph(lambda: composite(s.x, s.ids, s.weight))[0])
        captured["forward"][-1].replay()  # capturing alone computes nothing that the backward could read
        captured["backward"].append(graph(lambda: composite.backward(s.dout))[0])
        captured["both"].append(graph(lambda: composite_step(composite, s))[0])
    return {name: (lambda n, g=g: g[n % INPUT_SETS].replay()) for name, g in captured.items()}


def run(name, tokens, shared, rings, rounds, block_ms):
    s = SHAPES[name]
    d, i, k, experts, width = s["hidden"], s["inter"], s["topk"], s["experts"], s["shared"] if shared else 0
    weights = make_weights(1, experts, d, i, width)[0]
    for t in (weights.gate_up, weights.down, *(weights.shared or ())):
        t.requires_grad_()
    sets = [Inputs(tokens, d, k, experts, seed) for seed in range(INPUT_SETS)]
    layers = {f"mok{'' if r == 1 else f'_ring_{r:g}'}": Mok(weights, k, tokens * k, r) for r in (1.0, *rings)}
    layers["transformers"] = Transformers(weights, k)
    with torch.no_grad():
        composite = Composite(weights, k)

    step(layers["transformers"], sets[0], weights)  # makes the libraries' workspaces, which are nobody's
    memory = {impl: memory_of(layer, sets[0], weights) for impl, layer in layers.items()}
    with torch.no_grad():
        composite_step(composite, sets[0])
        memory["composite"] = composite_memory(composite, sets[0])
        expected_shape = [t.shape for t in composite_step(composite, sets[0])]
    expected = exact(sets[0], weights)
    assert [t.shape for t in expected] == expected_shape
    errors = {impl: worst_error(step(layer, sets[0], weights), expected) for impl, layer in layers.items()}
    with torch.no_grad():
        errors["composite"] = worst_error(composite_step(composite, sets[0]), expected)
    del expected
    torch.cuda.empty_cache()

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    by_pass = {impl: functions_of(layer, sets, weights) for impl, layer in layers.items()}
    by_pass["composite"] = graphs_of(composite, sets)
    functions = {(impl, p): f for impl, passes in by_pass.items() for p, f in passes.items()}
    functions["dense", ""] = lambda n: a @ b
    times, clocks = blocks(functions, block_ms=block_ms, rounds=rounds)
    for impl in (*layers, "composite"):
        difference = [both - f for both, f in zip(times[impl, "both"], times[impl, "forward"], strict=True)]
        if impl == "composite" and statistics.median(difference) < statistics.median(times[impl, "backward"]):
            times[impl, "backward"] = difference
    dense = 2 * 8192**3 / statistics.median(times["dense", ""]) / 1e9
    forward_flops = 6.0 * tokens * d * (k * i + width)
    rows = []
    for p, factor in zip(PASSES, (1, 2, 3), strict=True):
        for impl in by_pass:
            t = times[impl, p]
            median, low, high = ratio(t, times["mok", p])
            rows.append(
                dict(
                    device=torch.cuda.get_device_name(),
                    ep=1,
                    shape=name,
                    tokens=tokens,
                    shared_inter=width,
                    **{"pass": p},
                    impl=impl,
                    ms_median=statistics.median(t),
                    ms_min=min(t),
                    ms_max=max(t),
                    tflops=factor * forward_flops / statistics.median(t) / 1e9,
                    dense_tflops=dense,
                    rel_error=errors[impl],
                    **{f"{what}_mib": num / 2**20 for what, num in memory[impl].items()},
                    sm_mhz=clocks[impl, p],
                    slower_than_mok=median,
                    slower_than_mok_95=[low, high],
                    settings=dict(graph=impl == "composite"),
                )
            )
    show(name, tokens, width, rows, dense)
    return rows


def show(name, tokens, width, rows, dense):
    of = {(r["impl"], r["pass"]): r for r in rows}
    print(f"{name} {tokens} S={width} dense {dense:.0f}")
    for p in PASSES:
        m = of["mok", p]
        text = f"  {p:8s} mok {m['ms_median']:.3f} ms {m['tflops']:.0f} TF {m['tflops'] / dense:.0%}"
        for (impl, q), r in of.items():
            if q == p and impl != "mok":
                low, high = r["slower_than_mok_95"]
                text += f" | {impl} {r['ms_median']:.3f} x{r['slower_than_mok']:.3f} [{low:.3f} {high:.3f}]"
        print(text)
    for what in ("peak", "peak_checkpointed", "kept", "workspace"):
        key = f"{what}_mib"
        print(f"  {what} MiB", {impl: round(r[key]) for (impl, p), r in of.items() if p == "both" and key in r})
    print(
        "  worst error",
        {impl: f"{r['rel_error']:.1e}" for (impl, p), r in of.items() if p == "both"},
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--shared", choices=("both", "with", "without"), default="both")
    parser.add_argument("--rings", default="", help="also with rings of these shares of the rows, e.g. 0.5,0.25")
    parser.add_argument("--heat", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-ms", type=float, default=40)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    import transformers
    import triton

    preheat(options.heat)
    rings = [float(r) for r in options.rings.split(",") if r]
    rows = []
    for name in options.shapes.split(","):
        for shared in (False, True):
            if (shared and not SHAPES[name]["shared"]) or options.shared == ("without" if shared else "with"):
                continue
            for tokens in SHAPES[name]["tokens"]:
                rows += run(name, tokens, shared, rings, options.rounds, options.block_ms)
                torch.cuda.empty_cache()
                if options.out:  # after each shape: a run that is cut short has what it measured
                    save(options.out, rows, transformers, triton)


if __name__ == "__main__":
    main()
