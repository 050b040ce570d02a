"""Mixture-of-Kittens: an expert-parallel MoE layer as one fused, deterministic kernel, forward and backward."""

from . import layers, reference
from .errors import MoKTimeoutError
from .functional import moe, schedule
from .symmetric import SymmetricBuffer, VirtualGroup
from .workspace import Workspace, check, workspace

# Raised whenever a caller written for the old API would break.
API_LEVEL = 1

__all__ = [
    "API_LEVEL",
    "MoKTimeoutError",
    "SymmetricBuffer",
    "VirtualGroup",
    "Workspace",
    "check",
    "layers",
    "moe",
    "reference",
    "schedule",
    "workspace",
]
