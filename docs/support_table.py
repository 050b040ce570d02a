"""Prints docs/support.md from the model table in model_patches/; `make docs` writes it, a test keeps it equal."""

from __future__ import annotations

import importlib

from mok_hf.capabilities import BlockAdapter
from mok_hf.model_patches import ADAPTERS

FAMILIES = ("deepseek", "qwen", "glm", "kimi")

HEAD = """\
# Supported models

Written by `make docs` from the model table in `model_patches/`. One row per `model_type` of a Transformers config and
MoE block class. The router of every block stays the model's own module. "Fused" shared experts run inside the kernel
call; one that carries LoRA, hooks, a bias or a quantised linear runs as its own module beside the kernel, and the
report of `patch_model` says why.

| model type | block | shared expert | gated activation |
|---|---|---|---|
"""

TAIL = """
Widths D (hidden), I (expert) and S (shared expert) are multiples of 64, weights are fp32 or bf16, the number of experts
is a multiple of `ep_size`, and a token has 1 to 16 routes. On a GPU the layers compute in bf16, so fp32 weights need
autocast. What does not fit is refused with its reason: [troubleshooting](troubleshooting.md).
"""


def render() -> str:
    """The page as text."""
    rows = []
    for family in FAMILIES:
        adapters: tuple[BlockAdapter, ...] = importlib.import_module(f"mok_hf.model_patches.{family}").ADAPTERS
        rows += [_row(model_type, adapter) for adapter in adapters for model_type in adapter.model_types]
    listed = sum(len(adapter.model_types) for adapter in ADAPTERS.values())
    if listed != len(rows):
        raise ValueError(f"{listed - len(rows)} rows of the model table belong to none of the families {FAMILIES}.")
    return HEAD + "".join(rows) + TAIL


def _row(model_type: str, adapter: BlockAdapter) -> str:
    shared = "none"
    if adapter.shared is not None:
        shared = "fused" if adapter.shared_gate is None else f"fused, times sigmoid of `{adapter.shared_gate}`"
    activation = "SwiGLU" if adapter.swiglu_limit is None else "clamped SwiGLU"
    return f"| `{model_type}` | `{adapter.block.rpartition('.')[2]}` | {shared} | {activation} |\n"


if __name__ == "__main__":
    print(render(), end="")
