"""Settings of the fused layer. Standard library only: reading them loads neither torch nor a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

ROW_TILE = 128
"""Rows of one tile; minibatch and macrobatch sizes are multiples of it (paper, section 3.2)."""

PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class MoKConfig:
    """How one model's fused MoE layers run. Every field is ``None`` = automatic.

    None of them changes a result: the bits of outputs and gradients are the same for every minibatch, macrobatch
    and communication setting. ``fuse_wgrad_accumulation`` has two exceptions (docs/training.md): weights with
    several uses in one backward, and -0.0.

    Args:
        minibatch_size: rows dispatched per step, in routed rows, a multiple of 128 (paper, section 3.2).
        macrobatch_size: rows of the dispatch ring kept for backward, in routed rows, a multiple of 128
            (paper, section 3.3), on a GPU at least 256. Smaller saves activation memory and replays more in backward.
        fwd_comm_sms: on a GPU, SMs that only pull rows from other ranks in forward, until there are none left to pull,
            and compute then: an even number (an odd one counts as the next), at least two SMs fewer than there are. 0,
            the default, has every SM pull beside its products. On the CPU, communication threads, at least 1.
        bwd_comm_sms: the same for backward.
        max_tokens_per_rank: largest number of tokens any rank passes to one layer call. Set, it removes the exchange
            of token counts at the start of each model forward, and a larger batch raises; unset, counts are exchanged.
        precision: ``"fp32"`` or ``"bf16"`` to require that compute dtype, ``"auto"`` or ``None`` for the dtype that
            arrives.
        timeout_s: seconds a rank waits for another one before ``MoKTimeoutError``.
        fuse_wgrad_accumulation: ``True`` makes the backward add the gradients of the experts' weights to ``main_grad``
            or ``grad`` of the parameter where there is one already, instead of writing a second copy that autograd
            adds: less memory and time in all but the first micro-step of gradient accumulation. Parameters with hooks
            get their gradients as ever. Not with Megatron-LM's ``overlap_grad_reduce``.

    Raises:
        ValueError: a value the kernel could not serve, naming the value, the limit and the nearest valid choice.
    """

    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    fwd_comm_sms: int | None = None
    bwd_comm_sms: int | None = None
    max_tokens_per_rank: int | None = None
    precision: str | None = None
    timeout_s: float | None = None
    fuse_wgrad_accumulation: bool | None = None

    def __post_init__(self) -> None:
        for name in ("minibatch_size", "macrobatch_size"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < ROW_TILE or value % ROW_TILE):
                nearest = max(ROW_TILE, -(-int(value) // ROW_TILE) * ROW_TILE) if _is_int(value) else ROW_TILE
                raise ValueError(f"{name}={value!r} must be a positive multiple of {ROW_TILE} rows: use {nearest}.")
        for name in ("fwd_comm_sms", "bwd_comm_sms"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(f"{name}={value!r} must be an integer >= 0, or None for automatic.")
        tokens = self.max_tokens_per_rank
        if tokens is not None and (not _is_int(tokens) or tokens < 1):
            raise ValueError(f"max_tokens_per_rank={tokens!r} must be an integer >= 1, or None to exchange counts.")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}.")
        if self.timeout_s is not None and not 0 < self.timeout_s < 1e9:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a number of seconds > 0, or None for the default.")
        value = self.fuse_wgrad_accumulation
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"fuse_wgrad_accumulation={value!r} must be True or False, or None for False.")

    def kernel_keywords(self) -> dict[str, Any]:
        """The fields that are set, as keywords of the kernel's ``moe`` function."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, "auto")}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
