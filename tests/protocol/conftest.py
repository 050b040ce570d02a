"""Compiles what these tests run: the protocol simulator and a C shim over csrc/common."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compile_cpp("x.cpp", "-O2", ...)` -> the program built from tests/protocol/x.cpp, once per set of flags."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.fail("tests/protocol needs a C++17 compiler (g++ or c++) on PATH")
    folder = tmp_path_factory.mktemp("protocol")
    built: dict[tuple[str, ...], Path] = {}

    def build(source: str, *flags: str) -> Path:
        key = (source, *flags)
        if key not in built:
            output = folder / f"{Path(source).stem}-{len(built)}"
            command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{REPOSITORY}"]
            result = subprocess.run(
                [*command, HERE / source, "-o", output, *flags], capture_output=True, text=True, timeout=280
            )
            assert result.returncode == 0, result.stderr
            built[key] = output
        return built[key]

    return build
