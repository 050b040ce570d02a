"""The CPU kernel as virtual ranks under ThreadSanitizer and AddressSanitizer, its results against a naive oracle."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "csrc" / "cpu"
# All of the kernel but its torch bindings.
SOURCES = [str(KERNEL / f"{name}.cpp") for name in ("forward", "backward", "schedule", "numerics", "pool")]
FLAGS = ["-O1", "-g1", "-ffp-contract=off", "-pthread", *SOURCES]
THREAD = ["-fsanitize=thread"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZER_STATUS = 66


def run(program: Path, seed: int) -> subprocess.CompletedProcess:
    options = f"exitcode={SANITIZER_STATUS}:halt_on_error=1"
    environment = {**os.environ, "TSAN_OPTIONS": options, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": options}
    command = [str(program), str(seed)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if "unexpected memory mapping" in result.stderr:  # this kernel randomises more address bits than the runtime knows
        setarch = shutil.which("setarch")
        assert setarch is not None, f"needs util-linux's setarch or a smaller vm.mmap_rnd_bits:\n{result.stderr}"
        command = [setarch, platform.machine(), "--addr-no-randomize", *command]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS], ids=["thread", "address"])
def test_kernel_is_clean_and_right(compile_cpp, sanitizer):
    program = compile_cpp("sanitize.cpp", *sanitizer, *FLAGS)
    result = run(program, 1)
    assert result.returncode == 0, result.stderr[:6000]
    calls = int(re.fullmatch(r"(\d+) calls\n", result.stdout)[1])
    assert calls >= 300


@pytest.mark.timeout(600)
@pytest.mark.parametrize("weakened", ["RELAXED_SIGNALS", "RELAXED_BARRIER"])
def test_a_weakened_ordering_is_reported(compile_cpp, weakened):
    program = compile_cpp("sanitize.cpp", *THREAD, f"-D{weakened}", "-include", str(HERE / "relaxed.h"), *FLAGS)
    result = run(program, 1)
    assert result.returncode == SANITIZER_STATUS, result.stdout + result.stderr[:2000]
    assert "data race" in result.stderr
