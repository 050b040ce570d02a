"""What the layer raises beyond ValueError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT = re.compile(r"MoKTimeout origin=(-?\d+) waited=(-?\d+) phase=([^\n]*)")

# Waits on a CUDA device, by the numbers of csrc/cuda/wait.cuh and, from 16 on, of csrc/cuda/ops.cpp.
_DEVICE_PHASES = {
    "#1": "a barrier",
    "#2": "a tile, its operands",
    "#3": "a tile, its task",
    "#4": "dispatch, rows of a tile",
    "#5": "gate and up of a tile",
    "#6": "a ring slot",
    "#7": "dispatch, a copy from a peer",
    "#8": "backward, replay of a tile",
    "#9": "backward, a weight gradient's earlier part",
    "#10": "a slot holds another row",  # a debug build's check, not a wait
    "#16": "forward, before dispatch",
    "#17": "forward, after combine",
    "#18": "backward, before reverse-combine",
    "#19": "backward, after reverse-dispatch",
}


class MoKTimeoutError(RuntimeError):
    """A bounded wait expired: a rank of the expert-parallel group stopped, or is slower than `timeout_s`.

    The workspace is unusable from then on: every later call raises.

    Attributes:
        rank: EP rank that was waited for, or None if it is not known.
        reporter: EP rank whose wait expired first, or None if it is not known.
        phase: what the reporter was doing.
        device_phase: number of the phase if the wait was on a CUDA device, else None.
        timeout_s: the bound, in seconds.
    """

    def __init__(self, rank: int | None, reporter: int | None, phase: str, timeout_s: float, own_rank: int) -> None:
        self.rank, self.reporter, self.timeout_s = rank, reporter, timeout_s
        self.phase = phase = _DEVICE_PHASES.get(number := phase, phase)
        self.device_phase = int(number[1:]) if number.startswith("#") else None
        if reporter is None:
            text = "another EP rank gave up waiting and said so; its own error says for whom."
        elif phase == "refused its input":
            text = f"EP rank {reporter} refused its input or failed, and left the layer; its own error says why."
        elif phase == "out of step":
            text = (
                f"EP ranks {reporter} and {rank} are at different points: one of them failed in an earlier layer and"
                " went on, or they run other layers in another order."
            )
        elif rank == reporter:
            text = f"EP rank {reporter} made no progress for {timeout_s:g} s ({phase})."
        else:
            text = (
                f"EP rank {reporter} waited more than {timeout_s:g} s for EP rank {rank} ({phase}). Rank {rank}"
                " stopped, or runs another number of MoE layers than the others, or needs a larger timeout_s."
            )
        super().__init__(f"[EP rank {own_rank}] {text} The workspace can not be used any more.")
        self._arguments = rank, reporter, number, timeout_s, own_rank

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), self._arguments


@contextmanager
def timeouts(rank: int, timeout_s: float) -> Iterator[None]:
    """Turns the kernel's report of an expired wait into MoKTimeoutError."""
    try:
        yield
    except RuntimeError as error:
        found = _TIMEOUT.search(str(error))
        if not found:
            raise
        reporter, waited = (int(number) if int(number) >= 0 else None for number in found.groups()[:2])
        raise MoKTimeoutError(waited, reporter, found[3], timeout_s, rank) from None
