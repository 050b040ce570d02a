"""Prints docs/performance.md from benchmarks/results/; `make docs` writes it, a test keeps it equal."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

HEAD = """\
# Performance

Written by `make docs` from [benchmarks/results](../benchmarks/results). One MoE layer in bf16 on one {device},
all its experts on that GPU (EP 1): hidden states and routes to output, and the output's gradient to all gradients.
Measured {date} with torch {torch}, CUDA {cuda}, transformers {transformers}, at commit {commit}. Nothing here was
measured on several GPUs.

*Transformers* is its `grouped_mm` experts implementation, as a training script runs it. *Composite* is what one can
assemble without a fused kernel: `torch._grouped_mm` with Triton kernels for permutation, SwiGLU, its backward and the
weighted sum, replayed as CUDA graphs. Ours runs eagerly with autograd. A factor above 1 means that ours is faster, with
the 95 % interval of the median over interleaved blocks. TFLOP/s count the routed and shared experts' products once;
"of dense" compares them with an 8192 x 8192 x 8192 product on the same card in the same run.

"""

SHAPES = """
| shape | experts x D x I | routes a token | shared expert |
|---|---|---|---|
| kimi | 6 x 7168 x 2048 | 8 | 2048 |
| glm | 4 x 6144 x 2048 | 8 | 2048 |
| dsv4 | 6 x 7168 x 3072 | 6 | 3072 |
| qwen | 8 x 4096 x 1024 | 10 | 1024 |
| q30b | 128 x 2048 x 768 | 8 | none |
| air | 128 x 4096 x 1408 | 8 | 1408 |

The first four are layers of large Kimi, GLM, DeepSeek and Qwen models with the experts that one of 64 GPUs holds; q30b
and air are those of Qwen3-30B-A3B and GLM-4.5-Air with all their experts.
"""

SMALL = """
## Small batches

Microseconds of a forward without gradients, with the shared expert; at commit {commit}.

"""

VIRTUAL = """
## What the exchange costs

Forward of two ranks on the one GPU, half of the rows pulled from and pushed to the other, against two layers of one
rank with the same experts and rows, side by side in one launch or on two streams. Nothing of it is a link's.

"""

STEPS = """
## Training steps

`benchmarks/finetune.py`: steps of `examples/finetune.py` under `accelerate launch`: forward, backward, clipping and
AdamW, 4,096-token sequences and random weights in the shapes of Qwen3-30B-A3B and GLM-4.5-Air (whose first layer is
dense), as many layers as the table says; at commit {commit}. The losses of the two runs are at most {apart:.0e} apart.
With so few layers the vocabulary, attention, norms and the optimizer are most of a step, the same in both. At that
commit the example's AdamW was not fused yet, which it is now.

"""

TAIL = """
The log of what was tried, expected and measured is [benchmarks/LOG.md](../benchmarks/LOG.md).
"""


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def cases(result: dict) -> dict:
    """(shape, tokens, pass) -> implementation -> row, in the order of the file."""
    grouped: dict = {}
    for row in result["rows"]:
        grouped.setdefault((row["shape"], row["tokens"], row["pass"]), {})[row["impl"]] = row
    return grouped


def factor(row: dict) -> str:
    low, high = row["slower_than_mok_95"]
    return f"{row['slower_than_mok']:.2f} ({low:.2f}-{high:.2f})"


def times(result: dict) -> str:
    out = ["| shape, tokens | pass | ms | TFLOP/s | of dense | Transformers / ours | composite / ours |\n"]
    out.append("|---|---|---|---|---|---|---|\n")
    names = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
    for (shape, tokens, passed), impls in cases(result).items():
        mok = impls["mok"]
        out.append(
            f"| {shape} {tokens} | {names[passed]} | {mok['ms_median']:.2f} | {mok['tflops']:.0f} |"
            f" {mok['tflops'] / mok['dense_tflops']:.0%} | {factor(impls['transformers'])} |"
            f" {factor(impls['composite'])} |\n"
        )
    return "".join(out)


MEMORY = """\
MiB that one forward and backward add at their peak, all gradients and our workspace included. The workspace is
allocated once and shared by all layers of a model. *Kept* is what each layer of a model leaves for its backward,
its output included, without gradients and workspace; with *checkpointing* around the layer (`torch.utils.checkpoint`)
only its input is kept, and the forward runs again in the backward.

"""


def memory(result: dict) -> str:
    every = ("mok", "transformers", "composite")
    tables = {"peak": every, "kept": every, "peak_checkpointed": every[:2]}
    names = {"mok": "ours", "transformers": "Transformers", "composite": "composite"}
    prefix = {"peak": "", "kept": "kept: ", "peak_checkpointed": "checkpointing: "}
    columns = [prefix[what] + names[impl] for what, impls in tables.items() for impl in impls]
    out = [MEMORY, f"| shape, tokens | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n"]
    for (shape, tokens, passed), impls in cases(result).items():
        if passed == "both":
            mib = [f"{impls[impl][f'{what}_mib']:,.0f}" for what, wanted in tables.items() for impl in wanted]
            out.append(f"| {shape} {tokens} | {' | '.join(mib)} |\n")
    return "".join(out)


def rings(result: dict) -> str:
    out = ["| shape, tokens | ring | forward | backward | MiB |\n|---|---|---|---|---|\n"]
    for (shape, tokens, passed), impls in cases(result).items():
        if passed != "both":
            continue
        for impl, row in impls.items():
            if impl.startswith("mok_ring_"):
                of = {p: cases(result)[shape, tokens, p][impl]["slower_than_mok"] for p in ("forward", "backward")}
                out.append(
                    f"| {shape} {tokens} | {float(impl[9:]):g} | {of['forward']:.2f} | {of['backward']:.2f} |"
                    f" {row['peak_mib']:,.0f} |\n"
                )
        out.append(f"| {shape} {tokens} | 1 | 1 | 1 | {impls['mok']['peak_mib']:,.0f} |\n")
    return "".join(out)


def small(result: dict) -> str:
    """Latencies of layers as `generate` calls them."""
    out = ["| shape | tokens | ours | ours, CUDA graph | Transformers |\n|---|---|---|---|---|\n"]
    rows = {(r["shape"], r["tokens"], r["impl"]): r["us_median"] for r in result["rows"] if r["what"] == "small"}
    for shape, tokens in dict.fromkeys(key[:2] for key in rows):
        us = [f"{rows[shape, tokens, impl]:.0f}" for impl in ("mok", "mok_graph", "transformers")]
        out.append(f"| {shape} | {tokens} | {' | '.join(us)} |\n")
    return "".join(out)


def virtual(result: dict) -> str:
    """Two ranks of one GPU against layers of one rank on half of it each."""
    rows = [r for r in result["rows"] if r["what"] == "virtual_ep2" and r["impl"] != "two_ranks"]
    names = {"one_launch": "one launch", "two_streams": "two streams"}
    out = ["| shape, tokens a rank | beside | two ranks / two layers |\n|---|---|---|\n"]
    for r in rows:
        ratio, low, high = r["two_ranks_over_this"]
        line = f"| {r['shape']} {r['tokens']} | {names[r['impl']]} | {ratio:.3f} ({low:.2f}-{high:.2f}) |\n"
        out.append(line)
    return "".join(out)


def steps(results: list[dict]) -> str:
    """Training steps of whole models."""
    out = ["| shape | layers | tokens a step | ours, tokens/s | Transformers, tokens/s | ours / Transformers |\n"]
    out.append("|---|---|---|---|---|---|\n")
    for result in results:
        ours, native = result["rows"]
        speed = [row["tokens_per_s"] for row in (ours, native)]
        out.append(
            f"| {ours['shape']} | {ours['layers']} | {ours['batch'] * ours['seq_len']:,} |"
            f" {speed[0]:,.0f} | {speed[1]:,.0f} | {speed[0] / speed[1]:.2f} |\n"
        )
    return "".join(out)


def render() -> str:
    """The page as text."""
    training, ring, other = load("layer-training"), load("layer-rings"), load("layer-small-virtual")
    trained = [load(f"finetune-{shape}") for shape in ("q30b", "air")]
    versions = training["versions"]
    head = HEAD.format(
        device=training["rows"][0]["device"], date=training["date"], commit=training["commit"][:7], **versions
    )
    return (
        head
        + times(training)
        + SHAPES
        + "\n## Memory\n\n"
        + memory(training)
        + "\n## The ring\n\n`macrobatch_size` bounds the rows whose activations are kept; the rest is computed again in"
        " the backward. Ring: share of\nall rows. Forward and backward: time against the ring that holds everything."
        f" Without shared expert; measured {ring['date']} at commit {ring['commit'][:7]}.\n\n"
        + rings(ring)
        + SMALL.format(commit=other["commit"][:7])
        + small(other)
        + VIRTUAL
        + virtual(other)
        + STEPS.format(commit=trained[0]["commit"][:7], apart=max(r["rows"][0]["loss_difference"] for r in trained))
        + steps(trained)
        + TAIL
    )


if __name__ == "__main__":
    print(render(), end="")
