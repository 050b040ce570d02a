"""What the layer raises beyond ValueError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT = re.compile(r"MoKTimeout origin=(-?\d+) waited=(-?\d+) phase=([^\n]*)")


class MoKTimeoutError(RuntimeError):
    """A bounded wait expired: a rank of the expert-parallel group stopped, or is slower than `timeout_s`.

    The workspace is unusable from then on: every later call raises.

    Attributes:
        rank: EP rank that was waited for, or None if it is not known.
        reporter: EP rank whose wait expired first.
        phase: what the reporter was doing.
        timeout_s: the bound, in seconds.
    """

    def __init__(self, rank: int | None, reporter: int, phase: str, timeout_s: float, own_rank: int) -> None:
        self.rank, self.reporter, self.phase, self.timeout_s = rank, reporter, phase, timeout_s
        if phase == "refused its input":
            text = f"EP rank {reporter} refused its input and left the layer; its own error says why."
        elif rank == reporter:
            text = f"EP rank {reporter} made no progress for {timeout_s:g} s ({phase})."
        else:
            text = (
                f"EP rank {reporter} waited more than {timeout_s:g} s for EP rank {rank} ({phase}). Rank {rank}"
                " stopped, or runs another number of MoE layers than the others, or needs a larger timeout_s."
            )
        super().__init__(f"[EP rank {own_rank}] {text} The workspace can not be used any more.")


@contextmanager
def timeouts(rank: int, timeout_s: float) -> Iterator[None]:
    """Turns the kernel's report of an expired wait into MoKTimeoutError."""
    try:
        yield
    except RuntimeError as error:
        found = _TIMEOUT.search(str(error))
        if not found:
            raise
        reporter, waited, phase = int(found[1]), int(found[2]), found[3]
        raise MoKTimeoutError(waited if waited >= 0 else None, reporter, phase, timeout_s, rank) from None
