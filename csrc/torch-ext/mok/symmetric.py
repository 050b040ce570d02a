"""Memory that every rank of a group has and can address on every other rank."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_STORAGE_DEVICE = 6  # which argument of rebuild_cuda_tensor
_T = TypeVar("_T")


class SymmetricBuffer:
    """One segment of `num_bytes` on each rank, mapped by all ranks of `group`.

    On CPU the segment is POSIX shared memory: created with an unguessable name and mode 0600, and unlinked at once, so
    that nothing is left behind however the process ends. Peers open it through the creator's file descriptor. On CUDA
    it is torch symmetric memory where each rank has a GPU of its own, and memory shared through CUDA IPC where all
    ranks share one.

    Constructing it is collective. The memory is zeroed.

    Args:
        num_bytes: size of each rank's segment; equal on all ranks.
        group: a `torch.distributed` process group, or None for a group of one rank.
        device: where the memory lies; "cpu" or a CUDA device.

    Raises:
        RuntimeError: the ranks' memory can not be shared: on CPU they run on different machines, on CUDA some but not
            all share a GPU; or `num_bytes` differs, or a peer's segment can not be opened.
    """

    def __init__(
        self, num_bytes: int, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.num_bytes = num_bytes
        if group is None or dist.get_world_size(group) == 1:
            self.segments = [_zeros(num_bytes, torch.device(device))]
            return
        if torch.device(device).type == "cuda":
            self.segments = _cuda_segments(num_bytes, group, torch.device(device))
            return
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        fd = _together(lambda: _create(num_bytes), num_bytes, group)
        try:
            mine = (machine(), os.getpid(), fd, num_bytes)
            everyone: list = [None] * size
            dist.all_gather_object(everyone, mine, group=group)
            _check_sizes([num for *_, num in everyone])
            others = [r for r in range(size) if everyone[r][0] != mine[0]]
            # Every rank sees the same list, so either all raise or none does.
            if others:
                raise RuntimeError(
                    f"EP ranks {others} run on another machine than rank {rank} ({mine[0][0]}): the CPU kernel shares "
                    "memory, so all ranks of an expert-parallel group must run on one machine. Lower ep_size to the "
                    "number of processes a machine has."
                )
            self.segments = []
            failed = None
            for r, (_, pid, peer_fd, _) in enumerate(everyone):
                try:
                    self.segments.append(_map(fd if r == rank else f"/proc/{pid}/fd/{peer_fd}", num_bytes))
                except OSError as error:
                    failed = f"EP rank {rank} can not open the shared memory of rank {r} (process {pid}): {error}"
                    break
            failures: list = [None] * size
            dist.all_gather_object(failures, failed, group=group)  # also: nobody closes before all have opened
            if any(failures):
                raise RuntimeError(
                    "; ".join(f for f in failures if f)
                    + ". All ranks of a group must run as one user, in one PID namespace."
                )
        finally:
            os.close(fd)


class VirtualGroup:
    """A group of `size` ranks inside one process, for tests: each rank is a thread and has a Workspace of its own.

    Autograd has one thread for all backwards of a GPU. Where ranks wait for each other inside them, as checkpointed
    layers do, run them under `torch.autograd.set_multithreading_enabled(False)`.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._buffers: dict[tuple[str, int, str], list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def buffer(self, name: str, num_bytes: int, device: str | torch.device = "cpu") -> list[torch.Tensor]:
        """The segments of all ranks; the same ones for whichever rank asks, first or later."""
        key = (name, num_bytes, str(device))
        with self._lock:
            if key not in self._buffers:
                self._buffers[key] = [_zeros(num_bytes, torch.device(device)) for _ in range(self.size)]
            return self._buffers[key]


def _together(allocate: Callable[[], _T], num_bytes: int, group: dist.ProcessGroup) -> _T:
    """What `allocate` returns; if it fails on a rank all raise, for the others would wait for that one."""
    result = problem = None
    try:
        result = allocate()
    except (OSError, RuntimeError) as error:
        problem = f"EP rank {dist.get_rank(group)} has no memory for a buffer of {num_bytes} bytes: {error}"
    problems: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        if isinstance(result, int):
            os.close(result)
        raise RuntimeError("; ".join(p for p in problems if p))
    return result


def _check_sizes(sizes: list[int]) -> None:
    # A rank writes into its peers' segments at offsets that follow from its own sizes.
    if len(set(sizes)) > 1:
        raise RuntimeError(
            f"the ranks' buffers have different sizes ({sizes} bytes): max_tokens_per_rank, the hidden size and the"
            " routes per token must be the same on every rank."
        )


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros that whoever gets the address may use at once, on any stream."""
    segment = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return segment


def _cuda_segments(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    mine = (machine(), str(torch.cuda.get_device_properties(device).uuid), num_bytes)
    everyone: list = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    _check_sizes([num for *_, num in everyone])
    if len(set(everyone)) == size:
        return _symmetric_memory(num_bytes, group, device)
    if len(set(everyone)) == 1:
        return _shared_gpu(num_bytes, group, device)
    sharing = [r for r in range(size) if everyone.count(everyone[r]) > 1]
    raise RuntimeError(
        f"EP ranks {sharing} share GPUs and the others do not: give each rank a GPU of its own"
        " (torch.cuda.set_device(local_rank)), or let all share one."
    )


def _symmetric_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    from torch.distributed import _symmetric_memory

    # The kernel has no use for multicast objects, and a host can be short of them.
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        segment = _together(lambda: _allocation(num_bytes, device), num_bytes, group)
        shared = _symmetric_memory.rendezvous(segment, group)
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
    segment.zero_()
    torch.cuda.current_stream(device).synchronize()
    dist.all_gather_object([None] * dist.get_world_size(group), None, group=group)  # nobody writes before all are zero
    rank = dist.get_rank(group)
    # The peers stay mapped as long as `segment` lives.
    return [
        segment if r == rank else shared.get_buffer(r, segment.shape, segment.dtype)
        for r in range(dist.get_world_size(group))
    ]


def _allocation(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that a rendezvous can share, an allocation of its own, which is freed with the tensor.

    `_symmetric_memory.empty` cuts tensors out of a pool (torch 2.13). `get_buffer` knows nothing of where in it they
    lie, and over a piece that is free again on one rank and not yet on another the ranks do not rendezvous alike.
    """
    from torch.distributed._symmetric_memory import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((max(num_bytes, 1),), (1,), torch.uint8, device)


def _shared_gpu(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    segment = _together(lambda: _zeros(num_bytes, device), num_bytes, group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # torch counts the users of a segment: one share for each.
    shares = [None if r == rank else reduce_tensor(segment)[1] for r in range(size)]
    everyone: list = [None] * size
    dist.all_gather_object(everyone, shares, group=group)
    segments = []
    for r in range(size):
        if r == rank:
            segments.append(segment)
        else:
            share = list(everyone[r][rank])
            share[_STORAGE_DEVICE] = device.index  # a process may have another number for the same GPU than this one
            segments.append(rebuild_cuda_tensor(*share))
    dist.all_gather_object(everyone, None, group=group)  # nobody goes on before all have opened
    return segments


def _create(num_bytes: int) -> int:
    name = f"/dev/shm/mok-{secrets.token_hex(16)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    try:
        # Reserves the pages: running out of shared memory is an error here, not a bus error in the kernel.
        os.posix_fallocate(fd, 0, max(num_bytes, 1))
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(file: int | str, num_bytes: int) -> torch.Tensor:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC) if isinstance(file, str) else os.dup(file)
    try:
        return torch.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=torch.uint8)
    finally:
        os.close(fd)


def machine() -> tuple[str, str]:
    """What tells this machine from others."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return socket.gethostname(), f.read().strip()
