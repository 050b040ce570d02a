"""A torch with CUDA gets the CUDA variant from the hub, and runs it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.server import Hub
from tests.hub.test_hub import REPO

pytestmark = pytest.mark.gpu
BUILD = Path(__file__).resolve().parents[2] / "csrc" / "build"

PROGRAM = """
import torch
from kernels import get_kernel

mok = get_kernel({repo!r}, revision="v1", trust_remote_code=True)
x, gate_up = torch.randn(100, 128, device="cuda").bfloat16(), torch.randn(8, 256, 128, device="cuda").bfloat16() * 0.1
down, ids = torch.randn(8, 128, 128, device="cuda").bfloat16() * 0.1, torch.randint(0, 8, (100, 2), device="cuda")
weights = torch.rand(100, 2, device="cuda")
out = mok.moe(x, ids, weights, gate_up, down, workspace=mok.workspace(device="cuda"))
want = mok.reference.moe(*(t.double() for t in (x,)), ids, weights.double(), gate_up.double(), down.double())
assert ((out - want).norm() / want.norm()) < 1e-2
print(mok.__file__)
"""


def test_the_cuda_variant_is_chosen(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    shutil.copytree(BUILD, repository / "build", ignore=shutil.ignore_patterns("__pycache__"))
    assert len(list(repository.glob("build/*"))) == 2
    with Hub({REPO: repository}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        program = PROGRAM.format(repo=REPO)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "-cu130-" in done.stdout
