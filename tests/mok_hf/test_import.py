"""`import mok_hf` loads no kernel, touches no GPU and makes no request."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import mok_hf

# Every way out of the process is closed before the import; a kernel or CUDA call would be seen too.
PROBE = """
import json, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"a socket was opened: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
import torch
def touched(*args, **kwargs):
    raise AssertionError("CUDA was touched")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
import mok_hf
print(json.dumps({
    "kernel": mok_hf.kernel._loaded is not None,
    "kernels": "kernels" in sys.modules,
    "initialised": torch.cuda.is_initialized(),
    "names": {name: getattr(mok_hf, name).__module__ for name in mok_hf.__all__},
}))
"""


@pytest.fixture(scope="module")
def found():
    """What a fresh process without a build, and cut off from every network, sees after the import."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MOK_", "HF_", "LOCAL_"))}
    environment["MOK_KERNEL_PATH"] = "/nonexistent"
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_loads_nothing(found):
    assert not found["kernel"] and not found["kernels"] and not found["initialised"]


def test_only_public_names_are_exported(found):
    assert list(mok_hf.__all__) == sorted(mok_hf.__all__)
    assert {"MoKConfig", "distributed_config", "from_pretrained", "patch_model", "register", "unpatch_model"} <= {
        *mok_hf.__all__
    }
    assert all(module.startswith("mok_hf.") for module in found["names"].values())


def test_timeout_error_is_the_kernels():
    from mok_hf import kernel

    assert mok_hf.MoKTimeoutError is kernel.load().MoKTimeoutError
    with pytest.raises(AttributeError, match="no_such_name"):
        mok_hf.no_such_name  # noqa: B018
