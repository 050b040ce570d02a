"""A layer's passes as the benchmarks check, time and show them: forward, backward and both, eager or as CUDA graphs.

A layer takes what one rank feeds it (`x`, `ids`, `weight`, `dout`) and returns the output. The composites have a
backward of their own, which reads what the last forward left in `saved`; the others have autograd's.
"""

import statistics
from functools import partial

import torch
from driver import relative_error
from timing import figures, graph, ratio

from mok_hf import kernel

INPUT_SETS = 2  # rotated; each holds 16 to 117 MB of x alone
PASSES = {"forward": 1, "backward": 2, "both": 3}  # name -> multiple of the forward's FLOPs


class Mok:
    """The fused layer, with `settings` of the operator."""

    def __init__(self, weights, group, device, **settings):
        self.mok, self.weights, self.settings = kernel.load(), weights, settings
        self.workspace = self.mok.Workspace(group, device)

    def __call__(self, s):
        w = self.weights
        return self.mok.moe(
            s.x, s.ids, s.weight, w.gate_up, w.down, shared=w.shared, workspace=self.workspace, **self.settings
        )


def leaves(s, weights):
    return [s.x, s.weight, weights.gate_up, weights.down, *(weights.shared or ())]


def step(layer, s, weights):
    """Output and gradients of x, route weights, gate_up, down and, with a shared expert, its gate, up and down."""
    if hasattr(layer, "backward"):
        with torch.no_grad():
            return layer(s), *layer.backward(s)
    out = layer(s)
    return out, *torch.autograd.grad(out, leaves(s, weights), s.dout)


def worst_error(results, expected, limit):
    """The largest relative error; raises past `limit`, and for NaN."""
    assert len(results) == len(expected), (len(results), len(expected))
    errors = [relative_error(r.detach(), e) for r, e in zip(results, expected, strict=True)]
    assert all(e < limit for e in errors), errors
    return max(errors)


def eager_functions(layer, sets, weights):
    """pass -> function of the iteration number."""
    if hasattr(layer, "backward"):
        saved = []
        with torch.no_grad():
            for s in sets:
                layer(s)
                saved.append(layer.saved)

        @torch.no_grad()
        def forward(n):
            layer(sets[n % INPUT_SETS])

        @torch.no_grad()
        def backward(n):
            layer.saved = saved[n % INPUT_SETS]
            layer.backward(sets[n % INPUT_SETS])

    else:
        held = [layer(s) for s in sets]

        def forward(n):
            layer(sets[n % INPUT_SETS])

        def backward(n):
            s = sets[n % INPUT_SETS]
            torch.autograd.grad(held[n % INPUT_SETS], leaves(s, weights), s.dout, retain_graph=True)

    return {"forward": forward, "backward": backward, "both": lambda n: step(layer, sets[n % INPUT_SETS], weights)}


@torch.no_grad()
def graph_functions(layer, sets, weights):
    """The same as replays, and what those of the first set fill, for `replays`.

    The graphs of one set share memory. Its forward is captured first and what the backward reads of it is held, so no
    other graph writes there. Sets share none: the second forward's would lie where the first set's graphs write.
    """
    captured, filled = {name: [] for name in PASSES}, None
    for s in sets:
        forward, out = graph(partial(layer, s))
        forward.replay()  # capturing alone computes nothing that a backward could read
        saved = layer.saved
        backward, gradients = graph(partial(layer.backward, s), forward.pool())
        both, results = graph(partial(step, layer, s, weights), forward.pool())
        filled = filled or (results, (out, *gradients))
        for name, of in zip(PASSES, (forward, backward, both), strict=True):
            captured[name].append((of, saved))
    return {name: (lambda n, g=g: g[n % INPUT_SETS][0].replay()) for name, g in captured.items()}, filled


def replays(functions, filled):
    """Output and gradients of the first set as replays fill them: both passes in one graph, then one graph each."""
    for names, results in zip((("forward", "both"), ("backward",)), filled, strict=True):
        for name in names:
            for n in reversed(range(INPUT_SETS)):
                functions[name](n)
        yield results


def lesser_backward(times, impl):
    """A graph's backward: its own blocks, or both less forward, as alone it may be slower than as a part of both."""
    rest = [both - forward for both, forward in zip(times[impl, "both"], times[impl, "forward"], strict=True)]
    return min(times[impl, "backward"], rest, key=statistics.median)


def compared(times, impl, name, flops, dense, errors):
    """What a result's row says of pass `name`: figures, errors, and the time over ours. `flops` of a forward."""
    median, low, high = ratio(times[impl, name], times["mok", name])
    return dict(
        **{"pass": name},
        impl=impl,
        **figures(times[impl, name], PASSES[name] * flops),
        dense_tflops=dense,
        rel_error=errors[impl],
        slower_than_mok=median,
        slower_than_mok_95=[low, high],
    )


def show(title, rows, beside=lambda row: ""):
    """A line a pass, with what `beside` says of ours, and the errors."""
    of = {(r["impl"], r["pass"]): r for r in rows}
    dense = rows[0]["dense_tflops"]
    print(f"{title}, dense {dense:.0f}, SM MHz {rows[0]['sm_mhz']}")
    for p in PASSES:
        m = of["mok", p]
        text = f"  {p:8s} mok {m['ms_median']:.3f} ms {m['tflops']:.0f} TF {m['tflops'] / dense:.0%}{beside(m)}"
        for (impl, q), r in of.items():
            if q == p and impl != "mok":
                low, high = r["slower_than_mok_95"]
                text += f" | {impl} {r['ms_median']:.3f} x{r['slower_than_mok']:.3f} [{low:.3f} {high:.3f}]"
        print(text)
    print("  worst error", {impl: f"{r['rel_error']:.1e}" for (impl, q), r in of.items() if q == "both"}, flush=True)
