"""Runs one function in N real processes over gloo, from inside a test.

    results = run_ranks(2, "tests.models.workers:step", checkpoint, timeout=120)

The parent holds the rendezvous store on a port the kernel chose, so no port is guessed and none can be taken in
between. Results come back pickled, one per rank. The first rank that fails ends the run and its whole stderr is in the
error; past the timeout every rank's stacks are shown. Nothing here sleeps: the parent waits on process descriptors.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1
_KILLED = -signal.SIGKILL

# Ranks share two cores with each other: one thread each, and the same float order on every machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "true",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended: its exit status (negative: the signal), what its function returned, what it printed."""

    rank: int
    returncode: int
    result: Any
    stderr: str
    failed_at: float = 0.0
    """When it raised, on the machine's monotonic clock; 0 if it did not, or died without a word."""


class RankError(AssertionError):
    """A rank of `run_ranks` raised, was killed or did not end in time; carries that rank's stderr."""


def run_ranks(
    world_size: int,
    target: str,
    *args: Any,
    timeout: float = 120.0,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Calls `target` ("package.module:function") with `args` in `world_size` processes; returns each rank's result.

    Args:
        world_size: number of processes; each sees RANK, LOCAL_RANK, WORLD_SIZE and a rendezvous store.
        target: what to call; it reads its rank from `torch.distributed` or the environment.
        args: anything picklable, the same for every rank.
        timeout: seconds for the whole run; then every rank is killed.
        init_group: call `init_process_group(backend)` before the function and destroy the group after it.
        env: further environment variables.
        backend: of that group; with NCCL each rank has the GPU of its local rank.

    Raises:
        RankError: naming the rank that failed first, with all it wrote to stderr.
    """
    settings = dict(timeout=timeout, init_group=init_group, env=env, backend=backend)
    outcomes = launch_ranks(world_size, target, *args, **settings, stop_on_failure=True)
    # A rank that was killed because another one failed says nothing about the cause.
    failed = [o for o in outcomes if o.returncode not in (0, _KILLED)] or [o for o in outcomes if o.returncode != 0]
    if failed:
        # A rank that waited for the failing one raises too, if it is not killed first: whoever raised first is shown.
        failed = [o for o in failed if o.failed_at == min(f.failed_at for f in failed)]
        shown = [f"--- rank {o.rank} of {world_size}, exit status {o.returncode}\n{o.stderr.rstrip()}" for o in failed]
        raise RankError("\n".join([f"{target} failed", *shown]))
    return [o.result for o in outcomes]


def launch_ranks(
    world_size: int,
    target: str,
    *args: Any,
    timeout: float = 120.0,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    stop_on_failure: bool = False,
) -> list[RankOutcome]:
    """As `run_ranks`, but returns every rank's outcome: for tests in which a rank is meant to die.

    With `stop_on_failure` false the surviving ranks run to their own end. Raises RankError only past the timeout.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    (folder / "call").write_bytes(pickle.dumps((target, args, backend if init_group else None, timeout)))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with open(folder / f"stderr.{rank}", "wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.distributed", str(folder)],
                        cwd=ROOT,
                        env=os.environ | ENVIRONMENT | _rendezvous(rank, world_size, store.port) | (env or {}),
                        stdin=subprocess.DEVNULL,
                        stdout=stderr,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        in_time = _wait(processes, timeout, stop_on_failure)
        outcomes = [_outcome(folder, rank, process) for rank, process in enumerate(processes)]
        if not in_time:
            shown = "\n".join(f"--- rank {o.rank} of {world_size}\n{o.stderr.rstrip()}" for o in outcomes)
            raise RankError(f"{target} did not end within {timeout:.0f} s\n{shown}")
        return outcomes
    finally:
        for process in processes:
            _kill(process)
        shutil.rmtree(folder, ignore_errors=True)


def _rendezvous(rank: int, world_size: int, port: int) -> dict[str, str]:
    # The agent-store variables make `env://` join the parent's store in place of starting one on rank 0.
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float, stop_on_failure: bool) -> bool:
    """Waits for all to end; kills what is left past the timeout, or once one failed. False past the timeout."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return False
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    if key.data.wait() != 0 and stop_on_failure:
                        return True
            return True
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            for process in processes:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> RankOutcome:
    result = None
    if process.returncode == 0:
        result = pickle.loads((folder / f"result.{rank}").read_bytes())
    failed = folder / f"failed.{rank}"
    failed_at = float(failed.read_text()) if failed.exists() else 0.0
    stderr = (folder / f"stderr.{rank}").read_text(errors="replace")
    return RankOutcome(rank, process.returncode, result, stderr, failed_at)


def _child(folder: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted pytest leaves no rank behind
    target, args, backend, timeout = pickle.loads((folder / "call").read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.95 * timeout)

    import torch
    import torch.distributed as dist

    if backend is not None:
        device = None
        if "nccl" in backend:  # as Transformers does it: bound to its GPU before anything is exchanged
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=device)
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    (folder / f"result.{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        _child(folder)
    except BaseException:
        (folder / f"failed.{os.environ['RANK']}").write_text(repr(time.monotonic()))
        traceback.print_exc()
        sys.stderr.flush()
        # Skips destructors: gloo's wait for the other ranks, which cannot come any more.
        os._exit(1)
    # After success they abort the teardown once in some thirty processes (torch 2.13).
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
