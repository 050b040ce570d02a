"""The built variant: its manifest, its digests, what its binary needs and shows, and its operators under opcheck."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from mok_hf import kernel
from tests.kernel.layers import Problem, load

CSRC = Path(__file__).parents[2] / "csrc"


def variant() -> Path:
    return Path(load().__file__).parent


def extension() -> Path:
    return next(variant().glob("*.abi3.so"))


def test_manifest() -> None:
    """kernel-builder reads it, and it names every source."""
    import kernels._rust

    kernels._rust.Build.open(str(CSRC))
    text = (CSRC / "build.toml").read_text()
    for section, folders in (("mok_cpu", ("common", "cpu")), ("mok_cuda", ("common", "cpu", "cuda"))):
        kernel_text = text.partition(f"[kernel.{section}]")[2].partition("\n[")[0]
        listed = re.findall(r'"((?:common|cpu|cuda)/[^"]+)"', kernel_text)
        present = {str(p.relative_to(CSRC)) for folder in folders for p in (CSRC / folder).rglob("*") if p.is_file()}
        assert len(listed) == len(set(listed)) and set(listed) == present


def test_digests() -> None:
    metadata = json.loads((variant() / "metadata.json").read_text())
    files = {
        str(p.relative_to(variant())) for p in variant().rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert set(metadata["digest"]["files"]) == files - {"metadata.json"}
    for name, digest in metadata["digest"]["files"].items():
        assert base64.b64encode(hashlib.sha256((variant() / name).read_bytes()).digest()).decode() == digest
    assert kernel.load().API_LEVEL == load().API_LEVEL


def test_binary_runs_on_older_systems() -> None:
    """manylinux_2_28: glibc 2.28 and the libstdc++ of GCC 8; torch's libraries and the system's, nothing else."""
    limits = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0)}
    symbols = subprocess.run(["objdump", "-T", extension()], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\b", symbols)
    assert found
    for library, version in found:
        assert tuple(map(int, version.split("."))) <= limits[library], f"{library}_{version}"
    dynamic = subprocess.run(["readelf", "-d", extension()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert needed <= {
        "libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6",
        "libpthread.so.0", "ld-linux-x86-64.so.2",
    }  # fmt: skip
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic


def test_binary_shows_only_its_entry() -> None:
    command = ["nm", "-D", "--defined-only", extension()]
    names = [line.split()[-1] for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]
    assert names == [f"PyInit_{extension().name.split('.')[0]}"]


def operators():
    """The operators' namespace of the loaded build."""
    return sys.modules[load().moe.__module__].ops


def test_opcheck() -> None:
    """Schemas, fakes and autograd registration of the operators agree with what they do."""
    mok, ops = load(), operators()
    problem = Problem([40], experts=4)
    workspace = mok.Workspace()
    handle = workspace.handle(40, 3, problem.hidden, torch.float32, None)
    ids = problem.ids.to(torch.int32)
    capacity = ops.table_rows(1, int(handle[2]), 3, 4)
    torch.library.opcheck(ops.schedule.default, (handle, ids, 4, problem.hidden, 4, capacity), test_utils=CHECKS)
    table, plan = ops.schedule(handle, ids, 4, problem.hidden, 4, capacity)
    p = {n: t.clone().requires_grad_() for n, t in problem.parts.items()}
    shared = (p["shared_gate"], p["shared_up"], p["shared_down"], p["scale"])
    arguments = (
        handle,
        table,
        plan,
        p["x"],
        ids,
        p["weights"],
        p["gate_up"],
        p["down"],
        *shared,
        1.5,
        512,
        128,
        1,
        1,
        40,
        0,
        True,
    )
    torch.library.opcheck(ops.forward.default, arguments, test_utils=CHECKS)
    with torch.no_grad():
        _, *rings, _ = ops.forward(*arguments)
        backward = (handle, table, plan, problem.dout, *arguments[3:12], *rings, 1.5, 128, 1, 40, 255)
        torch.library.opcheck(ops.backward.default, backward, test_utils=CHECKS)


# Rows of the ring that hold no route are never written, so comparing two runs bit by bit (test_aot_dispatch) is not for
# these operators; tests/kernel/test_bits.py does it on what is defined.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
