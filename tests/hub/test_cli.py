"""`mok-hf kernel`: build, check, fetch, lock, info, and the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mok_hf
from mok_hf import kernel, kernel_build, kernel_check, kernel_files
from mok_hf.cli import app
from tests.hub.server import Hub
from tests.hub.test_hub import REPO, change, repository, run, site  # noqa: F401

# Refused for each line: a symbol newer than manylinux_2_28, C++ of torch, Python beyond the module entry, and a visible
# symbol that is not the entry.
BAD = """
#include <sstream>
extern "C" void* PyUnicode_FromString(const char*);
namespace at { struct Tensor { void zero(); }; }
extern "C" __attribute__((visibility("default"))) void leaked(at::Tensor& t) {
  std::stringstream text;
  text << 1;
  t.zero();
  PyUnicode_FromString(text.str().c_str());
}
"""


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["kernel", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_build_passes_every_check():
    status, text = invoke("check", kernel.info().path)
    assert status == 0, text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [*kernel_check.checks(kernel.info().path)]
    assert text.count(": ok") == 6


def test_build_is_what_the_makefile_builds():
    status, text = invoke("build")
    assert status == 0, text
    assert str(kernel.info().path) in text
    assert kernel_files.overall_digest(kernel.info().path)[:16] in text


def test_build_without_sources_or_tools(tmp_path, monkeypatch):
    status, text = invoke("build", "--source", tmp_path)
    assert status == 1 and "holds no kernel sources" in text and "mok-hf kernel fetch" in text
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(kernel_build.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    status, text = invoke("build", "--source", tmp_path)
    assert status == 1 and "cmake is not installed: `pip install cmake ninja`" in text


def test_build_refuses_a_gpu_without_kernels():
    status, text = invoke("build", "--cuda", "9.0a,12.0")
    assert status == 1 and "no code for 120" in text and "they serve 9.0a" in text
    status, text = invoke("build", "--cpu", "--cuda", "9.0a")
    assert status == 1 and "run the command once for each" in text


def test_check_finds_what_would_fail_elsewhere(tmp_path):
    folder = repository(tmp_path / "repo")
    variant = next(folder.glob("build/*"))
    (variant / "stray.txt").write_text("?")
    described = json.loads((variant / "metadata.json").read_text())
    (variant / "metadata.json").write_text(json.dumps(described | {"id": "another"}))
    source, library = tmp_path / "bad.cpp", tmp_path / "bad.so"
    source.write_text(BAD)
    options = ["-Wl,-rpath,/home/me/lib", "-Wl,--no-as-needed", "-lresolv"]
    command = ["g++", "-shared", "-fPIC", "-std=c++17", "-o", library, source, *options]
    subprocess.run(command, check=True, timeout=60)
    shutil.copy(library, next(variant.glob("*.so")))

    status, text = invoke("check", folder)
    assert status == 1 and text.splitlines()[-1].strip().startswith("operators")
    for words in (
        "metadata.json has the id 'another'",
        "stray.txt is not part of the build",
        ".abi3.so has changed",
        "needs libresolv.so.2; allowed are",
        "looks for libraries in /home/me/lib",
        "manylinux_2_28 has GLIBCXX_3.4.24",
        "calls PyUnicode_FromString; of Python it may call PyModuleDef_Init or PyModule_Create2",
        "calls _ZN2at6Tensor4zeroEv, C++ of torch",
        "has no entry PyInit__mok",
        "shows leaked; two builds",
        "operators: not run",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_check_names_an_operator_without_a_fake():
    import torch

    with torch.library._scoped_library("mok_test_fakes", "DEF") as library:
        library.define("bare(Tensor x) -> Tensor")
        library.define("size(Tensor x) -> int")
        problems = kernel_check.operators_without_fake(kernel.load(), "mok_test_fakes")
        assert problems == ["mok_test_fakes::bare returns tensors and has no fake (register_fake)"]
        torch.library.register_fake("mok_test_fakes::bare", lambda x: x.clone(), lib=library)
        assert kernel_check.operators_without_fake(kernel.load(), "mok_test_fakes") == []
    assert "registers no operators" in kernel_check.operators_without_fake(kernel.load(), "mok_test_nothing")[0]


def test_check_of_a_build_that_does_not_load(tmp_path):
    folder = repository(tmp_path / "repo")
    change(folder, "__init__.py", "from . import layers", "import no_such_module\nfrom . import layers")
    status, text = invoke("check", folder)
    assert status == 1 and "it does not load on this machine: No module named 'no_such_module'" in text
    assert text.count(": ok") == 5


def test_check_without_a_build(tmp_path):
    status, text = invoke("check", tmp_path)
    assert status == 1 and "holds no build variant" in text


@pytest.mark.timeout(600)
def test_fetch_lock_and_info(site, tmp_path):  # noqa: F811
    repos = {REPO: repository(tmp_path / "repo"), "a/other": repository(tmp_path / "other")}
    change(repos["a/other"], "errors.py", "What the layer raises", "All that the layer raises")
    with Hub(repos) as hub:
        results = run(site, hub.url, tmp_path / "cache", "commands", str(tmp_path))
        commit = hub.commit(REPO)
        other = hub.commit("a/other")
    lock = results.pop("lock file")
    refused = {
        "nothing": "No MoK kernel found. Looked for, in this order",
        "no lock yet": "has not been fetched: run `mok-hf kernel fetch` first",
        "untrusted": "you have not said that you trust it. If you do, run `mok-hf kernel fetch --trust mok-hf/mok`",
    }
    for name, words in refused.items():
        status, text = results.pop(name)
        assert status == 1 and words in text, (name, text)
    assert all(status == 0 for status, _ in results.values()), results
    digest = kernel_files.overall_digest(kernel.info().path)
    assert lock == {"repo": REPO, "revision": "v1", "commit": commit, "digests": {kernel.info().variant: digest}}
    for name in ("fetch", "lock", "locked"):
        assert f"{REPO} at commit {commit}" in results[name][1]
    assert f"MOK_KERNEL_PATH={tmp_path}" in results["other"][1] and f"snapshots/{other}" in results["other"][1]
    assert f"hub {REPO} at v1" in results["info"][1] and digest[:16] in results["info"][1]


@pytest.mark.timeout(600)
def test_wheel_is_found_once_installed(site, tmp_path, checkpoints):  # noqa: F811
    status, text = invoke("wheel", kernel.info().path, "--out", tmp_path)
    assert status == 0, text
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"mok_hf_kernel-{mok_hf.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    content = wheel.read_bytes()
    invoke("wheel", kernel.info().path, "--out", tmp_path)
    assert wheel.read_bytes() == content

    # Installed as an index would serve it, beside the package.
    packages = tmp_path / "packages"
    shutil.copytree(site, packages)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages]
    subprocess.run([*command, wheel], check=True, timeout=120)
    result = run(packages, "http://127.0.0.1:9", tmp_path / "cache", "wheel", str(checkpoints("qwen2_moe")))
    assert result["source"] == "wheel mok_hf_kernel"
    assert Path(result["path"]).is_relative_to(packages / "mok_hf_kernel/build")
    assert result["digest"] == kernel.info().digest
    assert result["patched"] > 0 and result["gradients_nonzero"] and result["drift"] < 1e-5


def test_no_wheel_of_a_build_that_was_changed(tmp_path):
    folder = repository(tmp_path / "repo")
    part = next(folder.glob("build/*/functional.py"))
    part.write_text(part.read_text() + "\n")
    status, text = invoke("wheel", folder, "--out", tmp_path / "dist")
    assert status == 1 and "can not be published: functional.py has changed" in text
    assert not (tmp_path / "dist").exists()
    status, text = invoke("wheel", tmp_path / "dist")
    assert status == 1 and "holds no build variant" in text


def test_wheel_records_its_files(tmp_path):
    import base64
    import hashlib

    wheel = kernel_build.wheel(kernel.info().path, tmp_path, "1.0")
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read("mok_hf_kernel-1.0.dist-info/RECORD").decode().splitlines()
        for line in record[:-1]:
            name, digest, size = line.rsplit(",", 2)
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(data))
        assert sorted(archive.namelist()) == sorted(line.rsplit(",", 2)[0] for line in record)
