"""How the benchmarks time: preheated card, interleaved blocks, medians of per-block ratios with their interval."""

import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch


def preheat(seconds):
    """Dense products until the card runs at the clock its power limit allows.

    A cold card is 20 % faster for half a second.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            a @ b
        torch.cuda.synchronize()


def sm_clock():
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetClockInfo(
            pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device()), pynvml.NVML_CLOCK_SM
        )
    except Exception:  # the clock is a diagnostic, not a result
        return None


def timed(function, calls, sample=lambda: None):
    """ms a call over `calls` calls, which get their number, and what `sample` says before the last one is through."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for i in range(calls):
            function(i)
        return (time.perf_counter() - begun) * 1e3 / calls, sample()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(calls):
        function(i)
    stop.record()
    sampled = sample()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls, sampled


def blocks(functions, block_ms=40.0, rounds=8, least=5, slowest=lambda ms: ms):
    """Runs each function's block in turn, forwards then backwards (A B B A).

    Returns name -> list of ms a call, one element a block. Each block is run twice and the second run timed: under the
    power limit the clock follows the load with a delay of some 50 ms, so a block after an idle or light one is up to
    10 % too fast.

    A function takes the iteration number, so that it can rotate over input sets. Where several ranks run this together,
    `slowest` makes of each one's time the same on all: the number of calls follows from it too.
    """
    calls = {}
    for name, f in functions.items():
        timed(f, 1)
        ms = slowest(timed(f, 1)[0])
        calls[name] = max(least, int(block_ms / max(ms, 1e-3)))
    times = {name: [] for name in functions}
    clocks = {name: [] for name in functions}
    order = list(functions)
    for round_ in range(rounds):
        for name in order if round_ % 2 == 0 else reversed(order):
            for i in range(calls[name]):
                functions[name](i)
            ms, clock = timed(functions[name], calls[name], sm_clock)
            times[name].append(slowest(ms))
            clocks[name].append(clock)
    return times, {n: statistics.median(c) if None not in c else None for n, c in clocks.items()}


def ratio(base, ours):
    """Median of base[i] / ours[i] over blocks, and a 95 % interval of it (order statistics)."""
    r = sorted(b / o for b, o in zip(base, ours, strict=True))
    n = len(r)
    # Smallest k with P(Binomial(n, 1/2) <= k) > 2.5 %.
    total, k, term = 0.0, 0, 0.5**n
    while total + term <= 0.025:
        total += term
        term = term * (n - k) / (k + 1)
        k += 1
    return statistics.median(r), r[max(0, k - 1)], r[min(n - 1, n - k)]


def figures(times, flops):
    """What a result's row says of a function's blocks, in ms a call; `flops` of a call."""
    median = statistics.median(times)
    return dict(ms_median=median, ms_min=min(times), ms_max=max(times), tflops=flops / median / 1e9)


def graph(function, pool=None):
    """A CUDA graph of the function and its result, in `pool` if given.

    Other threads may go on asking the driver meanwhile, as NCCL's watchdog does.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return captured, result


def save(path, rows, *modules):
    """Writes a result file: rows with the commit, the date and the versions of torch and of `modules`."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    # MOK_COMMIT names it where the files are a copy, whose git may be of another commit.
    commit = os.environ.get("MOK_COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown")
    versions = {module.__name__: module.__version__ for module in (torch, *modules)} | {"cuda": torch.version.cuda}
    result = dict(commit=commit, date=datetime.date.today().isoformat(), versions=versions, rows=rows)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
