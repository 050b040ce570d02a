"""What the tests of this folder share: the kernel library for those that drive it without torch, the CUDA backend."""

import os

# Ranks of a virtual group wait for each other: each one's stream needs a connection of its own. CUDA reads this once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel import layers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def lib():
    import driver

    path = Path(os.environ.get("MOK_CUDA_LIB", ROOT / "build-cuda" / "libmok_cuda.so"))
    if not path.exists():
        subprocess.run([ROOT / "benchmarks" / "build.sh", path.parent], check=True)
    return driver.load(str(path))


@pytest.fixture(scope="module")
def on_backend():
    """The tests of tests/kernel run on CUDA.

    A rank that waits on the device keeps the driver from loading another rank's kernels, so all are loaded first.
    """
    layers.use(layers.CUDA)
    layers.Problem([200]).step(1)
    yield
    layers.use(layers.CPU)
