"""The CUDA library, compiled if it is not there, for tests that drive it through benchmarks/driver.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def lib():
    import driver

    path = Path(os.environ.get("MOK_CUDA_LIB", ROOT / "build-cuda" / "libmok_cuda.so"))
    if not path.exists():
        subprocess.run([ROOT / "benchmarks" / "build.sh", path.parent], check=True)
    return driver.load(str(path))
