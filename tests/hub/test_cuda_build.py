"""The variant for torch with CUDA, as far as a machine without a GPU shows it: what is in it, and that it loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mok_hf import fatbin, kernel, kernel_check

ROOT = Path(__file__).resolve().parents[2]

# A torch without CUDA has no libcudart: the binary must not need it to load, and must run its CPU operators.
PROGRAM = """
import torch
from kernels import get_local_kernel
from pathlib import Path

mok = get_local_kernel(Path({variant!r}))
x = torch.randn(70, 128)
weights, ids = torch.rand(70, 8).topk(3)
gate_up, down = torch.randn(8, 384, 128) * 0.1, torch.randn(8, 128, 192) * 0.1
out = mok.moe(x, ids, weights, gate_up, down, workspace=mok.workspace())
torch.testing.assert_close(out, mok.reference.moe(x, ids, weights, gate_up, down), rtol=1e-4, atol=1e-5)
if not torch.cuda.is_available():
    try:
        mok.workspace(device="cuda")
    except ValueError as error:
        assert "sees no CUDA device" in str(error)
    else:
        raise AssertionError("a workspace on a device that is not there")
"""


@pytest.fixture(scope="module")
def variant() -> Path:
    found = sorted((ROOT / "csrc" / "build").glob("*-cu[0-9]*"))
    if not found:
        pytest.skip("no variant for CUDA in csrc/build: `make cuda` builds it, with nvcc")
    return found[-1]


def test_it_may_be_published(variant):
    assert [problem for check in kernel_check.checks(variant).values() for problem in check()] == []
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert (variant / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_archs_that_are_not_in_the_binary_are_found(variant, tmp_path):
    copy = shutil.copytree(variant, tmp_path / variant.name)
    described = json.loads((copy / "metadata.json").read_text())
    for archs, words in ((["9.0"], "9.0a, metadata.json names 9.0"), (["9.0a", "10.0a"], "names 10.0a, 9.0a")):
        described["backend"]["archs"] = archs
        (copy / "metadata.json").write_text(json.dumps(described))
        (problem,) = kernel_check.architecture_problems(copy)
        assert words in problem
    described["backend"] = {"type": "cuda"}
    (copy / "metadata.json").write_text(json.dumps(described))
    assert "names no archs" in kernel_check.architecture_problems(copy)[0]


def test_it_loads_where_there_is_no_cuda(variant):
    program = PROGRAM.format(variant=str(variant))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_architectures_are_read_as_nvcc_writes_them(tmp_path):
    source = tmp_path / "source.cu"
    source.write_text("__global__ void f(int* p) { *p = 1; }\nvoid g(int* p) { f<<<1, 1>>>(p); }\n")
    for archs in (["90"], ["90a"], ["90a", "100f", "103a"]):
        flags = [f for arch in archs for f in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
        object_file = tmp_path / "source.o"
        subprocess.run(["nvcc", *flags, "-c", source, "-o", object_file], check=True, timeout=120)
        assert fatbin.architectures(object_file) == [
            frozenset({"90": "9.0", "90a": "9.0a", "100f": "10.0f", "103a": "10.3a"}[arch] for arch in archs)
        ]
    assert fatbin.architectures(next(kernel.info().path.glob("*.so"))) == [] or kernel.info().backend == "cuda"


@pytest.mark.parametrize("code, stops", [("C7508", True), ("C7510", True), ("C7515", True), ("C7511", False)])
def test_a_kernel_that_lost_its_speed_stops_the_build(tmp_path, code, stops):
    """A compiler that says so and succeeds, as nvcc does."""
    compiler, out = tmp_path / "nvcc", tmp_path / "out.o"
    source = tmp_path / "source.c"
    source.write_text("int cudaFree(void*); int __cudaRegisterFatBinary(void*);\n"
                      "int f(void) { return cudaFree(0) + __cudaRegisterFatBinary(0); }\n")  # fmt: skip
    compiler.write_text(
        f"#!/bin/sh\necho 'ptxas info : ({code}) Potential Performance Loss'\ngcc -c {source} -o {out}\n"
    )
    compiler.chmod(0o755)
    command = ["sh", ROOT / "csrc" / "nvcc.sh", compiler, source, out, tmp_path / "out.d"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == stops == (not out.exists()), done.stderr
    if not stops:  # and only start-up code must find CUDA's runtime in the process
        symbols = subprocess.run(["nm", out], capture_output=True, text=True, check=True).stdout
        assert "w cudaFree" in symbols and "U __cudaRegisterFatBinary" in symbols


def test_which_gpus_an_arch_serves():
    assert kernel._serves("9.0a", 9, 0) and not kernel._serves("9.0a", 9, 1) and not kernel._serves("9.0a", 10, 0)
    assert kernel._serves("10.0f", 10, 3) and not kernel._serves("10.3f", 10, 0) and not kernel._serves("10.0f", 12, 0)
    assert kernel._serves("8.0", 8, 9) and not kernel._serves("8.0", 9, 0)
