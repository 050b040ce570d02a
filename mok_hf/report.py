"""What `patch_model` did: per layer what replaced what, the shared expert fused or not and why, the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok_hf.kernel import KernelInfo


@dataclass
class LayerReport:
    """One MoE block.

    Args:
        name: the block's name in the model, e.g. ``"model.layers.3.mlp"``.
        block: class of the block as Transformers built it.
        fused: whether the block now runs on the kernel.
        reason: why it does not; "" where it does.
        replaced: what the kernel took over, e.g. ``"DeepseekV3Experts (all_to_all)"``.
        shared: ``"none"``, ``"fused"`` or ``"native"``; what held in the latest forward.
        shared_reason: why the shared expert runs as a module beside the kernel; "" where it does not.
    """

    name: str
    block: str
    fused: bool
    reason: str = ""
    replaced: str = ""
    shared: str = "none"
    shared_reason: str = ""

    def set_shared(self, native_because: str | None) -> None:
        """Records how the shared expert ran in the call at hand."""
        self.shared = "fused" if native_because is None else "native"
        self.shared_reason = native_because or ""

    def __str__(self) -> str:
        if not self.fused:
            return f"{self.name}: {self.block} left native: {self.reason}"
        shared = {
            "none": "no shared expert",
            "fused": "shared expert fused",
            "native": f"shared expert native: {self.shared_reason}",
        }[self.shared]
        return f"{self.name}: {self.block}, {self.replaced} -> MoK kernel, {shared}"


@dataclass
class PatchReport:
    """What `patch_model` did to one model; prints as a table. Lines about shared experts follow the latest forward.

    Args:
        model: class of the model.
        kernel: the kernel that runs the layers.
        ep_size: ranks the experts are spread over.
        layers: one entry per MoE block, in model order.
    """

    model: str
    kernel: KernelInfo
    ep_size: int
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def patched(self) -> list[LayerReport]:
        """The blocks that run on the kernel."""
        return [layer for layer in self.layers if layer.fused]

    @property
    def native(self) -> list[LayerReport]:
        """The blocks left on Transformers' own code."""
        return [layer for layer in self.layers if not layer.fused]

    def __str__(self) -> str:
        count = f"{len(self.patched)} of {len(self.layers)} MoE blocks"
        head = f"{self.model}: {count} on the MoK kernel, EP {self.ep_size}"
        return "\n".join([head, f"kernel: {self.kernel}, from {self.kernel.source}", *map(str, self.layers)])
