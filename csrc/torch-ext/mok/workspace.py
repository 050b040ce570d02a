"""The symmetric buffers of one (group, device), shared by all layers of all models on it."""

from __future__ import annotations

import threading
from array import array

import torch
import torch.distributed as dist

from ._ops import ops
from .errors import timeouts
from .symmetric import SymmetricBuffer, VirtualGroup

_CONTROL_BYTES = 4096
DEFAULT_TIMEOUT_S = 600.0


class _Words(array):
    """The workspace as the operators see it, and the memory it points to.

    It is updated in place when buffers grow: the tensor over it, which a forward saves for its backward, always shows
    the present addresses, and keeps them mapped as long as it lives.
    """

    segments: list[torch.Tensor]


class Workspace:
    """Symmetric buffers of one (group, device); paper, section 3.3.

    It is allocated on first use, collectively, and grows when a forward has more tokens than any before: the ranks
    agree on the largest count first, so all grow together. Every rank of the group must run the same layers in the same
    order. One thread uses a workspace at a time.

    Args:
        group: process group whose ranks together hold all experts, a `VirtualGroup` with `rank`, or None for one rank
            that holds them all.
        device: where the layers run; "cpu".
        timeout_s: longest wait for another rank, in seconds.
        rank: this workspace's rank in a `VirtualGroup`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | VirtualGroup | None = None,
        device: str | torch.device = "cpu",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        rank: int = 0,
    ) -> None:
        self.group, self.device, self.timeout_s = group, torch.device(device), timeout_s
        if self.device.type != "cpu":
            raise ValueError(f"this kernel runs on cpu, not on {self.device}: build or fetch one for that device.")
        if isinstance(group, VirtualGroup):
            self.rank, self.size = rank, group.size
        else:
            self.rank = 0 if group is None else dist.get_rank(group)
            self.size = 1 if group is None else dist.get_world_size(group)
        if not 1 <= self.size <= 72:
            raise ValueError(f"ep_size is {self.size}; a group has 1 to 72 ranks.")
        self.tokens = 0  # of the rank that had most when the ranks last agreed
        self._control: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []
        self._words = _Words("q", [0] * (4 + 2 * self.size))
        self._view = torch.frombuffer(self._words, dtype=torch.int64)
        self._capacity = 0
        self._num_bytes = 0
        self._in_forward = False
        self._agreed = False

    # -- forward boundaries ------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A model's forward begins: its first MoE layer agrees with the other ranks on token counts, for all of it."""
        self._in_forward, self._agreed = True, False

    def end_forward(self) -> None:
        """The model's forward is over, or failed: from here each layer agrees on its own."""
        self._in_forward = self._agreed = False

    # -- buffers -----------------------------------------------------------------------------------------------------

    def handle(
        self, num_tokens: int, top_k: int, hidden: int, dtype: torch.dtype, max_tokens_per_rank: int | None
    ) -> torch.Tensor:
        """What the operators take: int64 [4 + 2R] of rank, ranks, Nmax, timeout and every rank's addresses.

        Collective where the ranks have to agree on token counts. Raises ValueError for more tokens than fit.
        """
        self._open()
        if max_tokens_per_rank is not None:
            if num_tokens > max_tokens_per_rank:
                self.leave()
                raise ValueError(
                    f"EP rank {self.rank} has {num_tokens} tokens, more than max_tokens_per_rank={max_tokens_per_rank}."
                    " Raise it (on every rank alike), or leave it at None to let the ranks agree on each forward."
                )
            self.tokens = max_tokens_per_rank
        elif self._must_agree(num_tokens):
            with timeouts(self.rank, self.timeout_s):
                self.tokens = ops.agree_tokens(self._view, num_tokens)
            self._agreed = self._in_forward
        elif num_tokens > self._capacity:
            self.leave()
            raise ValueError(
                f"EP rank {self.rank} has {num_tokens} tokens in this layer, more than the {self._capacity} that the"
                " ranks agreed on at the first MoE layer of this forward. Set max_tokens_per_rank to the most any layer"
                " has."
            )
        self._grow(top_k, hidden, dtype)
        return self._view

    def _must_agree(self, num_tokens: int) -> bool:
        if self.size == 1:
            return True
        # A layer that is recomputed inside backward has the tokens its forward had: all ranks have grown for them.
        if torch._C._current_graph_task_id() != -1 and num_tokens <= self._capacity:
            return False
        return not (self._in_forward and self._agreed)

    def _grow(self, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        if self.tokens > self._capacity:
            self._capacity = 1 << (self.tokens - 1).bit_length()
        num_bytes = ops.workspace_bytes(self._capacity, top_k, hidden, dtype.itemsize)
        if num_bytes > self._num_bytes:
            self._num_bytes = num_bytes
            # One rank shares with nobody: its pages are taken only when they are used.
            self._data = (
                [torch.empty(num_bytes, dtype=torch.uint8)] if self.size == 1 else self._allocate("data", num_bytes)
            )
        self._refresh()

    def _open(self) -> None:
        if not self._control:
            self._control = self._allocate("control", _CONTROL_BYTES)
            self._data = [torch.empty(1, dtype=torch.uint8)] * self.size
        self._refresh()

    def _allocate(self, name: str, num_bytes: int) -> list[torch.Tensor]:
        if isinstance(self.group, VirtualGroup):
            return self.group.buffer(name, num_bytes)
        return SymmetricBuffer(num_bytes, self.group).segments

    def _refresh(self) -> None:
        segments = self._control + self._data
        words = [self.rank, self.size, self._capacity, int(self.timeout_s * 1e9)]
        words += [segment.data_ptr() for segment in segments] or [0] * (2 * self.size)
        for i, word in enumerate(words):
            self._words[i] = word
        self._words.segments = segments

    # -- failure -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises MoKTimeoutError if a wait of this group has expired."""
        if self._control:
            with timeouts(self.rank, self.timeout_s):
                ops.check_group(self._view)

    def leave(self) -> None:
        """Tells the other ranks that this one does not come: they raise instead of waiting until `timeout_s`."""
        if self._control and self.size > 1:
            ops.abort_group(self._view)

    def close(self) -> None:
        """Frees the buffers. Calls whose backward is still to come need them: close when training is over."""
        self._control, self._data = [], []
        self._capacity = self._num_bytes = self.tokens = 0
        self._refresh()


_workspaces: dict[tuple[object, str], Workspace] = {}
_lock = threading.Lock()


def workspace(
    group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu", *, timeout_s: float | None = None
) -> Workspace:
    """The one Workspace of (group, device) in this process, made on first use.

    Args:
        group: process group of the expert-parallel ranks, or None for one rank that holds all experts.
        device: where the layers run.
        timeout_s: longest wait for another rank, in seconds; None keeps what it has (600 at first).
    """
    key = (group, str(torch.device(device)))
    with _lock:
        found = _workspaces.get(key)
        if found is None:
            found = _workspaces[key] = Workspace(group, device)
        if timeout_s is not None:
            found.timeout_s = timeout_s
        return found


def check() -> None:
    """Raises MoKTimeoutError if a wait of any group of this process has expired."""
    for found in list(_workspaces.values()):
        found.check()
