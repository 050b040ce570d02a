"""Expert-parallel MoE layers for Hugging Face Transformers as one fused, deterministic megakernel.

Importing this package loads no kernel, touches no GPU and makes no request.
"""

from __future__ import annotations

from typing import Any

from mok_hf.capabilities import BlockAdapter, UnsupportedError
from mok_hf.config import MoKConfig
from mok_hf.kernel import KernelMismatchError, KernelNotFoundError
from mok_hf.loading import from_pretrained
from mok_hf.patching import distributed_config, patch_model, register, unpatch_model
from mok_hf.report import LayerReport, PatchReport
from mok_hf.training import load_state, prepare, save_state

__version__ = "0.1.0"

__all__ = [
    "BlockAdapter",
    "KernelMismatchError",
    "KernelNotFoundError",
    "LayerReport",
    "MoKConfig",
    "PatchReport",
    "UnsupportedError",
    "distributed_config",
    "from_pretrained",
    "load_state",
    "patch_model",
    "prepare",
    "register",
    "save_state",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    """`MoKTimeoutError` is the kernel's; an `except` clause naming it loads the kernel once something was raised."""
    if name == "MoKTimeoutError":
        from mok_hf import kernel

        return kernel.load().MoKTimeoutError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
