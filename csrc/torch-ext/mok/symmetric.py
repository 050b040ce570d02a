"""Memory that every rank of a group has and can address on every other rank."""

from __future__ import annotations

import mmap
import os
import secrets
import socket

import torch
import torch.distributed as dist


class SymmetricBuffer:
    """One segment of `num_bytes` on each rank, mapped by all ranks of `group`.

    On CPU the segment is POSIX shared memory: created with an unguessable name and mode 0600, and unlinked at once, so
    that nothing is left behind however the process ends. Peers open it through the creator's file descriptor.

    Constructing it is collective. The memory is zeroed.

    Args:
        num_bytes: size of each rank's segment; equal on all ranks.
        group: a `torch.distributed` process group, or None for a group of one rank.

    Raises:
        RuntimeError: ranks of the group run on different machines, or a peer's segment can not be opened.
    """

    def __init__(self, num_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        self.num_bytes = num_bytes
        if group is None or dist.get_world_size(group) == 1:
            self.segments = [torch.zeros(max(num_bytes, 1), dtype=torch.uint8)]
            return
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        fd = _create(num_bytes)
        try:
            mine = (_machine(), os.getpid(), fd)
            everyone: list = [None] * size
            dist.all_gather_object(everyone, mine, group=group)
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
            for r, (_, pid, peer_fd) in enumerate(everyone):
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

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._buffers: dict[tuple[str, int], list[torch.Tensor]] = {}

    def buffer(self, name: str, num_bytes: int) -> list[torch.Tensor]:
        """The segments of all ranks; the same ones for whichever rank asks, first or later."""
        key = (name, num_bytes)
        if key not in self._buffers:
            made = [torch.zeros(max(num_bytes, 1), dtype=torch.uint8) for _ in range(self.size)]
            return self._buffers.setdefault(key, made)  # one setdefault wins when two threads come at once
        return self._buffers[key]


def _create(num_bytes: int) -> int:
    name = f"/dev/shm/mok-{secrets.token_hex(16)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    # Reserves the pages: running out of shared memory is an error here, not a bus error in the kernel.
    os.posix_fallocate(fd, 0, max(num_bytes, 1))
    return fd


def _map(file: int | str, num_bytes: int) -> torch.Tensor:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC) if isinstance(file, str) else os.dup(file)
    try:
        return torch.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=torch.uint8)
    finally:
        os.close(fd)


def _machine() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return socket.gethostname(), f.read().strip()
