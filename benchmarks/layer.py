"""One MoE layer at one rank, forward and backward: correctness, then time and memory against the baselines.

    python benchmarks/layer.py [--shapes kimi,glm] [--shared both|with|without] [--rings 0.5,0.25] [--out results.json]

Ours is the operator as a training step calls it, eager, with autograd. The composite's forward, backward and both are
replays of CUDA graphs; its backward counts as the lesser of its own graph and both less forward. Transformers is eager.
Time covers hidden states + top-k ids and weights -> output, and dOut -> all gradients. Before anything is timed, every
output and gradient is compared with fp64, the composite's those of replays as well.

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
from driver import TILE, make_routes, make_weights, reference
from passes import (
    INPUT_SETS,
    PASSES,
    Mok,
    compared,
    eager_functions,
    graph_functions,
    leaves,
    lesser_backward,
    replays,
    show,
    step,
    worst_error,
)
from shapes import SHAPES
from timing import blocks, preheat, save

TOLERANCE = 1e-2


class Inputs:
    def __init__(self, tokens, hidden, topk, experts, seed):
        ids, weight = make_routes(tokens, topk, experts, seed=seed)
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dout = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.ids, self.weight = ids.to(torch.int64), weight.requires_grad_()


def checkpointed_step(layer, inputs, weights):
    out = checkpoint(layer, inputs, use_reentrant=False)
    return out, *torch.autograd.grad(out, leaves(inputs, weights), inputs.dout)


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
        kept=kept_bytes(lambda: layer(inputs)),
        workspace=workspace,
    )


@torch.no_grad()
def composite_memory(composite, inputs, weights):
    """The same of the composite, which has no autograd: what it keeps lies in `saved`, here of no step before."""
    composite.saved = None
    peak = peak_bytes(lambda: step(composite, inputs, weights))
    composite.saved = None
    kept = kept_bytes(lambda: composite(inputs))
    return dict(peak=peak, kept=kept, workspace=0)


def run(name, tokens, shared, rings, rounds, block_ms):
    s = SHAPES[name]
    d, i, k, experts, width = s["hidden"], s["inter"], s["topk"], s["experts"], s["shared"] if shared else 0
    weights = make_weights(1, experts, d, i, width)[0]
    for t in (weights.gate_up, weights.down, *(weights.shared or ())):
        t.requires_grad_()
    sets = [Inputs(tokens, d, k, experts, seed) for seed in range(INPUT_SETS)]
    layers = {"mok": Mok(weights, None, "cuda")}
    for ring in rings:
        held = max(2, int(ring * tokens * k) // TILE) * TILE
        layers[f"mok_ring_{ring:g}"] = Mok(weights, None, "cuda", macrobatch_size=held)
    layers["transformers"] = Transformers(weights)
    with torch.no_grad():
        composite = Composite(weights)

    step(layers["transformers"], sets[0], weights)  # makes the libraries' workspaces, which are nobody's
    memory = {impl: memory_of(layer, sets[0], weights) for impl, layer in layers.items()}
    step(composite, sets[0], weights)
    memory["composite"] = composite_memory(composite, sets[0], weights)
    expected = exact(sets[0], weights)
    errors = {}
    for impl, layer in (layers | {"composite": composite}).items():
        errors[impl] = worst_error(step(layer, sets[0], weights), expected, TOLERANCE)
    by_pass = {impl: eager_functions(layer, sets, weights) for impl, layer in layers.items()}
    by_pass["composite"], filled = graph_functions(composite, sets, weights)
    for results in replays(by_pass["composite"], filled):
        errors["composite"] = max(errors["composite"], worst_error(results, expected, TOLERANCE))
    del expected, filled, results
    torch.cuda.empty_cache()

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    functions = {(impl, p): f for impl, passes in by_pass.items() for p, f in passes.items()}
    functions["dense", ""] = lambda n: a @ b
    times, clocks = blocks(functions, block_ms=block_ms, rounds=rounds)
    times["composite", "backward"] = lesser_backward(times, "composite")
    dense = 2 * 8192**3 / statistics.median(times["dense", ""]) / 1e9
    forward_flops = 6.0 * tokens * d * (k * i + width)
    rows = []
    for p in PASSES:
        for impl in by_pass:
            rows.append(
                dict(
                    device=torch.cuda.get_device_name(),
                    ep=1,
                    shape=name,
                    tokens=tokens,
                    shared_inter=width,
                    **compared(times, impl, p, forward_flops, dense, errors),
                    **{f"{what}_mib": num / 2**20 for what, num in memory[impl].items()},
                    sm_mhz=clocks[impl, p],
                    settings=dict(graph=impl == "composite"),
                )
            )
    show(f"{name} {tokens} S={width}", rows)
    for what in ("peak", "peak_checkpointed", "kept", "workspace"):
        mib = {impl: round(m[what] / 2**20) for impl, m in memory.items() if what in m}
        print(f"  {what} MiB", mib, flush=True)
    return rows


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
