"""The prebuilt kernel arrives from a hub, in a process that has the installed package and no compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mok_hf import kernel, kernel_files
from tests.hub.server import Hub

ROOT = Path(__file__).resolve().parents[2]
REPO = "mok-hf/mok"


def repository(folder: Path) -> Path:
    """The build of this checkout as a hub repository."""
    build = kernel.info().path
    shutil.copytree(build, folder / "build" / build.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def part(repo: Path, name: str) -> Path:
    return next(repo.glob(f"build/*/{name}"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installed wheel puts on the path: the package, and no csrc/ beside it."""
    folder = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mok_hf", folder / "mok_hf", ignore=ignore)
    shutil.copytree(ROOT / "model_patches", folder / "mok_hf/model_patches", ignore=ignore)
    shutil.copy(Path(__file__).with_name("child.py"), folder / "child.py")
    return folder


def run(site: Path, hub_url: str, cache: Path, *arguments: str, offline: bool = False) -> dict:
    """One function of child.py in a fresh process: no compiler, no token, its own cache."""
    return result(start(site, hub_url, cache, *arguments, offline=offline))


def start(site: Path, hub_url: str, cache: Path, *arguments: str, offline: bool = False) -> subprocess.Popen:
    empty = site / "empty"
    empty.mkdir(exist_ok=True)
    ours = ("MOK_", "HF_", "LOCAL_", "KERNELS_", "PYTHON")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment = inherited | {
        "PATH": str(empty),
        "PYTHONPATH": str(site),
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(cache / "home"),
        "KERNELS_CACHE": str(cache / "kernels"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, str(site / "child.py"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=empty, env=environment, text=True, **pipes)


def result(process: subprocess.Popen) -> Any:
    try:
        printed, errors = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


@pytest.mark.timeout(600)
def test_fetched_once_then_offline(site, tmp_path, checkpoints):
    checkpoint = str(checkpoints("qwen2_moe"))
    with Hub({REPO: repository(tmp_path / "repo")}) as hub:
        first = run(site, hub.url, tmp_path / "cache", "first_use", checkpoint)
        commit = hub.commit(REPO)
    assert Path(first["package"]).is_relative_to(site)
    for refused, said in ((first["refused"], ""), (first["other"], "'somebody/else' is another repository")):
        kind, message = refused
        assert kind == "KernelNotFoundError" and said in message
        assert "publisher 'mok-hf'" in message and "`mok-hf kernel fetch --trust mok-hf/mok`" in message
    assert first["left"] == []
    assert first["source"] == f"hub {REPO} at v1" and f"snapshots/{commit}/build/" in first["path"]
    expect_trained(first)

    gone = hub.url  # nothing listens there any more
    after = run(site, gone, tmp_path / "cache", "offline", checkpoint, offline=True)
    assert after["source"] == first["source"] and after["get_kernel"] == kernel_files.API_LEVEL
    expect_trained(after)
    kind, message = after["tampered"]
    assert kind == "KernelMismatchError" and "differs since it was fetched" in message


def expect_trained(result: dict) -> None:
    assert result["patched"] > 0 and result["gradients"] > 0 and result["gradients_nonzero"]
    assert result["drift"] < 1e-5


@pytest.mark.timeout(600)
def test_refusals_leave_nothing(site, tmp_path):
    """Every refused fetch says why; the cache is as it was."""
    names = ("good", "untrusted", "tampered", "forged", "level", "variant", "digest", "bytecode", "cut")
    repos = {f"a/{name}": repository(tmp_path / name) for name in names}
    tampered = part(repos["a/tampered"], "functional.py")
    tampered.write_text(tampered.read_text().replace("128", "256"))
    library = part(repos["a/forged"], "*.so")
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    # What a repository of another level would hold: its own digests are right.
    change(repos["a/level"], "__init__.py", "API_LEVEL = 1", "API_LEVEL = 2")
    build = next(repos["a/variant"].glob("build/*"))
    build.rename(build.with_name("torch-stable-abi211-cpu-riscv64-linux"))
    metadata = part(repos["a/digest"], "metadata.json")
    metadata.write_text(json.dumps({k: v for k, v in json.loads(metadata.read_text()).items() if k != "digest"}))
    cached = part(repos["a/bytecode"], "functional.py").parent / "__pycache__"
    cached.mkdir()
    (cached / "functional.cpython-311.pyc").write_bytes(b"\0" * 16)
    cut = part(repos["a/cut"], "*.so").relative_to(repos["a/cut"]).as_posix()

    with Hub(repos, cut={}) as hub:
        hub.cut = {f"a/cut/{cut}": 5000}
        listed = ",".join([*repos, "a/absent"])
        results = run(site, hub.url, tmp_path / "cache", "refusals_and_updates", listed, "a/good", str(repos["a/good"]))
        requests = hub.requests

    updates = results.pop("updates")
    assert results.pop("a/good")["error"] == ["", ""]
    said = {
        "untrusted": ("KernelMismatchError", "you have not said that you trust it.*--trust a/untrusted"),
        "tampered": ("KernelMismatchError", "not the one that was built: functional.py has changed"),
        "forged": ("KernelMismatchError", r"not the one that was built: .*\.so has changed"),
        "level": ("KernelMismatchError", "API level 2, this mok_hf calls level 1"),
        "variant": ("KernelNotFoundError", "no build variant for this machine; it has: .*riscv64.*mok-hf kernel build"),
        "digest": ("KernelMismatchError", "metadata.json has no digest"),
        "bytecode": ("KernelMismatchError", r"holds bytecode \(build/.*functional.cpython-311.pyc\)"),
        "cut": ("KernelNotFoundError", "received 5000 bytes.*Nothing was installed.*kernel fetch. again"),
        "absent": ("KernelNotFoundError", "fetching a/absent at v1 failed.*Check the connection and the name"),
    }
    assert results.keys() == {f"a/{name}" for name in said}
    for name, (kind, words) in said.items():
        result = results[f"a/{name}"]
        assert result["error"][0] == kind and re.search(words, result["error"][1]), result
        assert not result["fetched"]
        assert result["left"] in ([], [f".kernels--a--{name}.lock"]), result["left"]
    assert not any("a/untrusted" in request for request in requests)

    assert updates["locked"] and updates["kept"]
    assert re.search("differs from the one in the lock file", updates["differs"][1])
    assert re.search("functional.py has changed", updates["update"][1])


@pytest.mark.timeout(600)
def test_killed_while_fetching_then_fetched_by_two_at_once(site, tmp_path):
    repo, cache = repository(tmp_path / "repo"), tmp_path / "cache"
    library = part(repo, "*.so").relative_to(repo).as_posix()
    with Hub({REPO: repo}, stall=f"{REPO}/{library}") as hub:
        killed = start(site, hub.url, cache, "fetch")
        assert hub.stalled.wait(120), killed.poll()
        killed.kill()
        killed.communicate()
    staging = cache / "kernels/.kernels--mok-hf--mok.fetching"
    assert any(file.is_file() for file in staging.rglob("*")), "nothing was on its way when it was killed"
    assert not (cache / "kernels/kernels--mok-hf--mok").exists()

    with Hub({REPO: repo}) as hub:
        ranks = [start(site, hub.url, cache, "fetch") for _ in range(2)]
        assert [result(rank) for rank in ranks] == [hub.commit(REPO)] * 2
        downloads = [request for request in hub.requests if request.startswith("GET") and request.endswith(library)]
    assert len(downloads) == 1
    assert not staging.exists()


def change(repo: Path, name: str, old: str, new: str) -> None:
    """Changes a file and its digest, as a publisher would."""
    import base64
    import hashlib

    file = part(repo, name)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    described = part(repo, "metadata.json")
    metadata = json.loads(described.read_text())
    metadata["digest"]["files"][name] = base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
    described.write_text(json.dumps(metadata))
