"""The symmetric buffers of one (group, device), shared by all layers of all models on it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from . import device as cuda
from ._ops import ops
from .errors import MoKTimeoutError, timeouts
from .symmetric import SymmetricBuffer, VirtualGroup, machine

_CONTROL_BYTES = 4096
DEFAULT_TIMEOUT_S = 600.0
_NAMED_WITHIN_S = 1.0  # a rank's watchdog, which says for whom it waited, looks five times a second


class Workspace:
    """Symmetric buffers of one (group, device); paper, section 3.3.

    It is allocated on first use, collectively, and grows when a forward has more tokens than any before: the ranks
    agree on the largest count first, on the host, so all grow together. Every rank of the group must run the same
    layers in the same order. One thread uses a workspace at a time. On CUDA its calls run one after the other, whatever
    streams they are made on.

    Args:
        group: process group whose ranks together hold all experts, a `VirtualGroup` with `rank`, or None for one rank
            that holds them all.
        device: where the layers run; "cpu" or a CUDA device.
        timeout_s: longest wait for another rank, in seconds.
        rank: this workspace's rank in a `VirtualGroup`.

    Raises:
        ValueError: the kernel is not built for the device, or the group has more ranks than it serves.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | VirtualGroup | None = None,
        device: str | torch.device = "cpu",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        rank: int = 0,
    ) -> None:
        self.group, self.device, self.timeout_s = group, _indexed(device), timeout_s
        if isinstance(group, VirtualGroup):
            self.rank, self.size = rank, group.size
        else:
            self.rank = 0 if group is None else dist.get_rank(group)
            self.size = 1 if group is None else dist.get_world_size(group)
        if not 1 <= self.size <= 72:
            raise ValueError(f"ep_size is {self.size}; a group has 1 to 72 ranks.")
        self._cuda: cuda.DeviceSide | None = None
        if self.device.type == "cuda":
            _check_device(self.device)
            self._cuda = cuda.DeviceSide(group, self.device, self.rank, self.size)
        self.tokens = 0  # of the rank that had most when the ranks last agreed
        # No rank has more in the present call: a later layer of a forward may have some more than its first.
        self.most_tokens = 0
        self._control: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []
        self._renew()
        self._capacity = 0
        self._num_bytes = 0
        # Whatever has run here may have a backward to come, whose buffers are laid out for the capacity of that time.
        self._widths: set[tuple[int, int, int]] = set()  # K, D, bytes of an element
        self._in_forward = False
        self._agreed = False
        self._spans_machines = False
        self._error: MoKTimeoutError | None = None  # once raised, every later call raises it

    @property
    def sms(self) -> int:
        """SMs of the device that a call may take; 0 on the CPU."""
        return self._cuda.sms if self._cuda is not None else 0

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
        """What the operators take: int64 of rank, ranks, Nmax, timeout and every rank's addresses; on CUDA some more.

        Collective where the ranks have to agree on token counts. Never waits for a device. Raises ValueError for more
        tokens than fit.
        """
        if self._error is not None:
            if self._error.reporter is None:
                self.check()
            raise self._error.with_traceback(None)
        # What inference mode makes can not be saved for a backward, and this lives longer.
        with torch.inference_mode(False):
            self._open()
        if max_tokens_per_rank is not None:
            if num_tokens > max_tokens_per_rank:
                self.leave()
                raise ValueError(
                    f"EP rank {self.rank} has {num_tokens} tokens, more than max_tokens_per_rank={max_tokens_per_rank}."
                    " Raise it (on every rank alike), or leave it at None to let the ranks agree on each forward."
                )
            self.tokens = self.most_tokens = max_tokens_per_rank
        elif self._must_agree():
            self.tokens = self._agree(num_tokens)
            self.most_tokens = self.tokens if self.size == 1 else _rounded(self.tokens)
            self._agreed = self._in_forward
        elif num_tokens > self.most_tokens:
            self.leave()
            raise ValueError(
                f"EP rank {self.rank} has {num_tokens} tokens in this layer. At the first MoE layer of this forward the"
                f" ranks agreed on {self.tokens}, which leaves room for {self.most_tokens}. Set max_tokens_per_rank to"
                " the most any layer has."
            )
        with torch.inference_mode(False):
            self._grow(top_k, hidden, dtype)
        return self._view if self._cuda is None else self._cuda.view

    def _must_agree(self) -> bool:
        # A layer that runs again inside backward agrees again: what is saved must have the sizes it had, whatever the
        # ranks have agreed on since. They all recompute, in one order.
        return self.size == 1 or not (self._in_forward and self._agreed) or torch._C._current_graph_task_id() != -1

    def _agree(self, num_tokens: int) -> int:
        if self._cuda is not None and self.size == 1:
            return num_tokens
        if self._spans_machines:
            _check_cpu_backend(self.group)
            count = torch.tensor(num_tokens, device="cpu")
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self.group)
            return int(count)
        with timeouts(self.rank, self.timeout_s):
            return ops.agree_tokens(self._view, num_tokens)

    def _grow(self, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        capacity = max(self._capacity, _rounded(self.most_tokens))
        all_widths = self._widths | {(top_k, hidden, dtype.itemsize)}
        if self._cuda is not None:
            self._cuda.grow(capacity, all_widths)
        else:
            num_bytes = max(ops.workspace_bytes(capacity, *widths) for widths in all_widths)
            if num_bytes > self._num_bytes:
                # One rank shares with nobody: its pages are taken only when they are used.
                self._data = (
                    [torch.empty(num_bytes, dtype=torch.uint8, device="cpu")]
                    if self.size == 1
                    else self._allocate("data", num_bytes)
                )
                self._num_bytes = num_bytes
        # Only now: without the memory the next call must ask for it again.
        self._capacity, self._widths = capacity, all_widths
        self._refresh()

    def _open(self) -> None:
        if self._cuda is not None:
            if not self._cuda.opened:
                self._open_cuda(self._cuda)
        elif not self._control:
            self._control = self._allocate("control", _CONTROL_BYTES)
            self._data = [torch.empty(1, dtype=torch.uint8, device="cpu")] * self.size
        self._refresh()

    def _open_cuda(self, side: cuda.DeviceSide) -> None:
        """The host's side too: control pages in which ranks of one machine agree on counts and learn of failures."""
        if self.size > 1:
            if not isinstance(self.group, VirtualGroup):
                machines: list = [None] * self.size
                dist.all_gather_object(machines, machine(), group=self.group)
                self._spans_machines = len(set(machines)) > 1
            if not self._spans_machines:
                self._control = self._allocate("host control", _CONTROL_BYTES)
                self._data = [torch.empty(1, dtype=torch.uint8, device="cpu")] * self.size
        side.open()
        cuda.watch(self)

    def _allocate(self, name: str, num_bytes: int) -> list[torch.Tensor]:
        if isinstance(self.group, VirtualGroup):
            return self.group.buffer(name, num_bytes)
        return SymmetricBuffer(num_bytes, self.group).segments

    def _renew(self) -> None:
        """New words, for calls from here on."""
        self._words = cuda.Words("q", [0] * (4 + 2 * self.size))
        with torch.inference_mode(False):
            self._view = torch.frombuffer(self._words, dtype=torch.int64)  # of the host's side
        _owners[self._view.data_ptr()] = self
        if self._cuda is not None:
            self._cuda.renew()
            _owners[self._cuda.view.data_ptr()] = self

    def _refresh(self) -> None:
        segments = self._control + self._data
        words = [self.rank, self.size, self._capacity, int(self.timeout_s * 1e9)]
        words += [segment.data_ptr() for segment in segments] or [0] * (2 * self.size)
        for i, word in enumerate(words):
            self._words[i] = word
        self._words.segments = segments
        if self._cuda is not None:
            self._cuda.refresh(self._capacity, self.timeout_s)

    # -- failure -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises MoKTimeoutError if a wait of this group has expired.

        Where this rank's device knows only that another one gave up, waits a moment for that rank to say why.
        """
        end = time.monotonic() + _NAMED_WITHIN_S
        while True:
            try:
                self.look()
                return
            except MoKTimeoutError as error:
                if error.reporter is not None or self._cuda is None or time.monotonic() > end:
                    raise
            time.sleep(0.01)

    def look(self) -> None:
        """As `check`, but never waits."""
        try:
            with timeouts(self.rank, self.timeout_s):
                if self._control:
                    ops.check_group(self._view)
                if self._cuda is not None:
                    self._cuda.check()
        except MoKTimeoutError as error:
            self._error = error
            raise

    def leave(self) -> None:
        """Tells the other ranks that this one does not come: they raise instead of waiting until `timeout_s`."""
        if self._control and self.size > 1:
            ops.abort_group(self._view)
        if self._cuda is not None:
            self._cuda.abort()

    def spread(self, error: MoKTimeoutError) -> None:
        """Tells the other ranks of a wait that expired on this rank's device, or stops this one for a peer's."""
        if self._control and error.reporter == self.rank and error.device_phase is not None:
            ops.expire_group(self._view, -1 if error.rank is None else error.rank, error.device_phase)
        if self._cuda is not None:
            self._cuda.tell()
            self._cuda.abort()

    def close(self) -> None:
        """Frees the buffers: a backward that is still to come raises. Close when training is over."""
        if self._cuda is not None:
            self._cuda.close()
        self._control, self._data = [], []
        self._capacity = self._num_bytes = self.tokens = self.most_tokens = 0
        self._widths = set()
        self._refresh()  # what was saved says that it was closed, also when this is used again
        self._renew()
        with _lock:
            for key in [key for key, found in _workspaces.items() if found is self]:
                del _workspaces[key]


def _rounded(tokens: int) -> int:
    """The next power of two: buffers grow in these steps."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def _indexed(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not cuda.has_cuda():
        served = "cpu and cuda" if cuda.has_cuda() else "cpu"
        raise ValueError(f"this kernel is built for {served}, not for {device}: build or fetch one for that device.")
    if not torch.cuda.is_available():
        raise ValueError(f"there is no {device} in this process: this torch sees no CUDA device.")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _check_device(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; this kernel"
            " serves 9.0 (H100, H200). Run on one of those, or leave the layers native."
        )


def _check_cpu_backend(group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        raise ValueError(
            "the ranks of the expert-parallel group run on several machines and the group has no backend for CPU"
            " tensors, with which they agree on token counts. Initialise with"
            " init_process_group('cpu:gloo,cuda:nccl'), or set max_tokens_per_rank."
        ) from None


_workspaces: dict[tuple[object, str], Workspace] = {}
# By the address of the handle: what a backward has of the workspace it runs in.
_owners: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@contextmanager
def leaving(handle: torch.Tensor) -> Iterator[None]:
    """Around an operator: a rank that fails in it and goes on would meet the others at another barrier than theirs.

    What another rank gave up waiting for is told with that rank's reason, if it says so in time.
    """
    try:
        yield
    except Exception as error:
        found = _owners.get(handle.data_ptr())
        if found is not None and "MoKTimeout" not in str(error):
            found.leave()
        elif found is not None and "origin=-1" in str(error):
            found.check()
        raise


def _gone(group: object) -> bool:
    """The process group was destroyed."""
    if group is None or isinstance(group, VirtualGroup):
        return False
    try:
        return dist.get_rank(group) < 0
    except (RuntimeError, ValueError):
        return True


def workspace(
    group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu", *, timeout_s: float | None = None
) -> Workspace:
    """The one Workspace of (group, device) in this process, made on first use.

    Args:
        group: process group of the expert-parallel ranks, or None for one rank that holds all experts.
        device: where the layers run.
        timeout_s: longest wait for another rank, in seconds; None keeps what it has (600 at first).
    """
    key = (group, str(_indexed(device)))
    with _lock:
        found = _workspaces.get(key)
        if found is None:
            for old in [old for old in _workspaces if _gone(old[0])]:
                del _workspaces[old]
            found = _workspaces[key] = Workspace(group, device)
        if timeout_s is not None:
            found.timeout_s = timeout_s
        return found


def check() -> None:
    """Raises MoKTimeoutError if a wait of any group of this process has expired."""
    for found in list(_workspaces.values()):
        found.check()
