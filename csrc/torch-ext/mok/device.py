"""A workspace on CUDA devices: segments that all ranks write, the record of failures, the order of calls."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from array import array
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ._ops import ops
from .errors import MoKTimeoutError
from .symmetric import SymmetricBuffer, VirtualGroup

if TYPE_CHECKING:
    from .workspace import Workspace

logger = logging.getLogger("mok")

_CONTROL_BYTES = 4096  # barrier pad, epoch and abort word of a rank
_TOLD = 9  # told_on_host among the int32 words of Failure, csrc/cuda/ops_call.h
_POLL_S = 0.2
_EXPLAINED_WITHIN = 5  # polls
# Never freed: what is under way on the device may write its record after the workspace is gone.
_failures: list[torch.Tensor] = []


class Words(array):
    """The workspace as the operators see it, and the memory it points to.

    It is updated in place when buffers grow: the tensor over it, which a forward saves for its backward, always shows
    the present addresses, and keeps them mapped as long as it lives.
    """

    segments: list[torch.Tensor]


def has_cuda() -> bool:
    """Whether this build of the kernel has the CUDA operators."""
    return hasattr(ops, "segment_bytes")


class DeviceSide:
    """The device memory of one rank's workspace, and its failures.

    Segments that grew are kept until `close`: a captured graph may hold their addresses. Sizes double, so what is kept
    is less than what is in use.

    Args:
        group: as `Workspace` takes it.
        device: a CUDA device with its index.
        rank: of this process (or thread, in a `VirtualGroup`).
        size: number of ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | VirtualGroup | None, device: torch.device, rank: int, size: int
    ) -> None:
        self.group, self.device, self.rank, self.size = group, device, rank, size
        self.renew()
        self._kept: list[torch.Tensor] = []
        self._control: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []
        self._failure: torch.Tensor | None = None
        self._order = 0
        self._num_bytes = 0

    def renew(self) -> None:
        """New words, for calls from here on."""
        self.words = Words("q", [0] * (7 + 2 * self.size))
        with torch.inference_mode(False):
            self.view = torch.frombuffer(self.words, dtype=torch.int64)

    @property
    def opened(self) -> bool:
        return bool(self._control)

    def open(self) -> None:
        """Allocates what never grows; collective."""
        self._refuse_capture()
        self._control = self._allocate("control", _CONTROL_BYTES)
        self._data = self._control
        # The device writes it, the host polls it.
        self._failure = torch.zeros(64, dtype=torch.uint8, device="cpu").pin_memory()
        _failures.append(self._failure)
        with torch.cuda.device(self.device):  # its events are this device's
            self._order = ops.open_order()
        # A backward still to come needs it as long as the words it saved, whatever became of this object.
        self._close_order = weakref.finalize(self.words, ops.close_order, self._order)
        self._close_order.atexit = False

    def grow(self, capacity: int, widths: set[tuple[int, int, int]]) -> None:
        """Makes room for `capacity` tokens of each (K, D, bytes) on every rank; collective if there is too little."""
        num_bytes = max(ops.segment_bytes(self.size, capacity, top_k, hidden) for top_k, hidden, _ in widths)
        if num_bytes > self._num_bytes:
            self._refuse_capture()
            data = self._allocate("data", num_bytes)
            self._kept, self._data, self._num_bytes = self._kept + self._data, data, num_bytes

    def refresh(self, capacity: int, timeout_s: float) -> None:
        """Writes the present state into `words`."""
        size, failure = self.size, self._failure
        self.words[0:4] = array("q", [self.rank, size, capacity, int(timeout_s * 1e9)])
        self.words[4 : 4 + 2 * size] = array(
            "q", [segment.data_ptr() for segment in self._control + self._data] or [0] * (2 * size)
        )
        self.words[4 + 2 * size :] = array(
            "q", [failure.data_ptr() if failure is not None else 0, self._order, self._sm_limit()]
        )
        self.words.segments = [*self._kept, *self._control, *self._data]

    @property
    def sms(self) -> int:
        """SMs that a call may take."""
        return self._sm_limit() or torch.cuda.get_device_properties(self.device).multi_processor_count

    def _sm_limit(self) -> int:
        # Ranks of a virtual group share the device: the waiting one-CTA kernels of all others must leave room for the
        # clusters of the one that computes, or it would never start.
        if not isinstance(self.group, VirtualGroup):
            return 0
        return torch.cuda.get_device_properties(self.device).multi_processor_count - 2 * self.size

    def _allocate(self, name: str, num_bytes: int) -> list[torch.Tensor]:
        if isinstance(self.group, VirtualGroup):
            return self.group.buffer(name, num_bytes, self.device)
        return SymmetricBuffer(num_bytes, self.group, self.device).segments

    def _refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the workspace would have to grow while a CUDA graph is captured. Run the layer once with as many"
                " tokens before capturing, or set max_tokens_per_rank."
            )

    def check(self) -> None:
        """Raises what the operators raise once a wait on the device has expired."""
        if self._control:
            ops.check_device(self.view)

    def tell(self) -> None:
        """Makes the operators of this rank raise from now on: another rank gave up."""
        if self._failure is not None:
            self._failure.view(torch.int32)[_TOLD] = 1

    def abort(self) -> None:
        """Makes every rank that waits on its device stop waiting."""
        if self._control and self.size > 1:
            ops.abort_device(self.view, self._control[self.rank])

    def close(self) -> None:
        """Frees everything, once the device is through with it."""
        if self._control:
            torch.cuda.synchronize(self.device)
            self._close_order()
        self._control, self._data, self._kept, self._failure = [], [], [], None
        self._order = self._num_bytes = 0


# -- watchdog --------------------------------------------------------------------------------------------------------

_watched: weakref.WeakSet[Workspace] = weakref.WeakSet()
_started = False
_lock = threading.Lock()
_ending = threading.Event()


def watch(workspace: Workspace) -> None:
    """Has a thread look for failures of `workspace`: its process may be waiting elsewhere and not call in for long."""
    global _started
    with _lock:
        _watched.add(workspace)
        if not _started:
            _started = True
            thread = threading.Thread(target=_watch, name="mok-watchdog", daemon=True)
            thread.start()
            atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    # A thread that returns from an operator while Python ends would end the process with an abort.
    _ending.set()
    thread.join()


def _watch() -> None:
    rounds: weakref.WeakKeyDictionary[Workspace, int] = weakref.WeakKeyDictionary()  # with a failure nobody explained
    while not _ending.wait(_POLL_S):
        with _lock:
            present = list(_watched)
        for workspace in present:
            if _ending.is_set():
                break
            try:
                workspace.look()
            except MoKTimeoutError as error:
                rounds[workspace] = rounds.get(workspace, 0) + 1
                if error.reporter is None and rounds[workspace] < _EXPLAINED_WITHIN:
                    continue  # the rank that gave up is about to say why
                logger.error("%s", error)
                with _lock:
                    _watched.discard(workspace)
                workspace.spread(error)
            except Exception:  # closed meanwhile
                logger.debug("watchdog", exc_info=True)
        del present
