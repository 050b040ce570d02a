"""Where the kernel is looked for, what is checked before it runs, and agreement between ranks."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import sys

import pytest

from mok_hf import KernelMismatchError, KernelNotFoundError, kernel, kernel_files
from tests.distributed import run_ranks

_NUMBER = itertools.count()


def package(folder, *, api_level=1, version="1.0", digest=True, body="", variant="torch-cpu"):
    """A kernel package in the hub layout whose module says where it came from."""
    build = folder / "build" / variant
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(
        f"API_LEVEL = {api_level}\n__version__ = {version!r}\nfrom . import part\n{body}"
    )
    (build / "part.py").write_text("ORIGIN = __file__\n")
    metadata = {
        "name": "mok", "id": f"_mok_test_{next(_NUMBER)}_{abs(hash(str(folder)))}", "version": 1,
        "license": "Apache-2.0", "python-depends": [], "backend": {"type": "cpu"},
    }  # fmt: skip
    if digest:
        files = {f.name: base64.b64encode(hashlib.sha256(f.read_bytes()).digest()).decode() for f in build.glob("*.py")}
        metadata["digest"] = {"algorithm": "sha256", "files": files}
    (build / "metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel loaded yet, and none to be found."""
    monkeypatch.setattr(kernel, "_loaded", None)
    monkeypatch.setattr(kernel, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(kernel, "KERNEL_PACKAGE", "mok_hf_kernel_of_this_test")
    for name in ("MOK_KERNEL_PATH", "LOCAL_KERNELS", "MOK_TRUST_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_no_kernel_lists_every_place_and_the_command(fresh):
    with pytest.raises(KernelNotFoundError) as error:
        kernel.load()
    text = str(error.value)
    places = ["MOK_KERNEL_PATH: not set", "LOCAL_KERNELS: no entry for mok-hf/mok", "csrc/build: no folder"]
    places += [
        "wheel mok_hf_kernel_of_this_test: not installed",
        "hub mok-hf/mok at v1: not fetched: mok-hf/mok holds compiled code",
    ]
    positions = [text.index(place) for place in places]
    assert positions == sorted(positions)
    assert "mok-hf kernel fetch --trust mok-hf/mok" in text and "MOK_TRUST_KERNEL=mok-hf/mok" in text
    assert "make kernel" in text and str(fresh / "repository" / "csrc" / "build") in text


def test_trusted_but_offline_says_so(fresh, monkeypatch):
    monkeypatch.setenv("MOK_TRUST_KERNEL", "mok-hf/mok")
    with pytest.raises(KernelNotFoundError, match=r"hub mok-hf/mok at v1: .*been fetched and HF_HUB_OFFLINE is set"):
        kernel.load()
    assert not list((fresh / "cache").glob("kernels--*"))


def test_resolution_order(fresh, monkeypatch):
    wheel = fresh / "site" / "mok_hf_kernel_of_this_test"
    package(wheel, version="wheel")
    (wheel / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(fresh / "site"))
    steps = [("wheel mok_hf_kernel_of_this_test", "wheel", lambda: None)]
    steps.append(("csrc/build", "editable", lambda: package(fresh / "repository" / "csrc", version="editable")))
    local = package(fresh / "local", version="local")
    steps.append(("LOCAL_KERNELS", "local", lambda: monkeypatch.setenv("LOCAL_KERNELS", f"a/b=/x:mok-hf/mok={local}")))
    explicit = package(fresh / "explicit", version="explicit")
    steps.append(("MOK_KERNEL_PATH", "explicit", lambda: monkeypatch.setenv("MOK_KERNEL_PATH", str(explicit))))
    for source, version, arrange in steps:
        arrange()
        monkeypatch.setattr(kernel, "_loaded", None)
        module = kernel.load()
        assert module.__version__ == version and kernel.load() is module
        info = kernel.info()
        assert (info.source, info.version, info.variant, info.api_level) == (source, version, "torch-cpu", 1)
        assert str(info.path) in module.part.ORIGIN


@pytest.mark.parametrize("depth", ["", "build", "build/torch-cpu"])
def test_path_may_name_the_repository_the_build_or_the_variant(fresh, monkeypatch, depth):
    monkeypatch.setenv("MOK_KERNEL_PATH", str(package(fresh / "kernel") / depth))
    assert kernel.load().API_LEVEL == 1


@pytest.mark.parametrize("variable", ["MOK_KERNEL_PATH", "LOCAL_KERNELS"])
def test_a_named_kernel_that_is_missing_is_not_replaced_by_another(fresh, monkeypatch, variable):
    package(fresh / "repository" / "csrc")
    monkeypatch.setenv(variable, "/nonexistent" if variable == "MOK_KERNEL_PATH" else "mok-hf/mok=/nonexistent")
    with pytest.raises(KernelNotFoundError, match=rf"{variable}: no folder /nonexistent.*[Cc]orrect the variable"):
        kernel.load()


def test_a_build_for_another_machine_is_named(fresh):
    package(fresh / "repository" / "csrc", variant="torch-stable-abi299-cpu-x86_64-linux")
    with pytest.raises(KernelNotFoundError, match=r"csrc/build: no build in .* serves this machine"):
        kernel.load()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda build: (build / "part.py").write_text("ORIGIN = __file__ + '?'\n"), "part.py has changed"),
        (lambda build: (build / "part.py").unlink(), "part.py is missing"),
        (lambda build: (build / "extra.so").write_bytes(b"x"), "extra.so is not part of the build"),
        (lambda build: (build / "metadata.json").write_text("{"), "metadata.json is not valid JSON"),
    ],
)
def test_changed_files_are_refused_before_anything_runs(fresh, damage, words):
    folder = package(fresh / "repository" / "csrc", body="import sys\nsys.modules['mok_test_ran'] = sys\n")
    damage(folder / "build" / "torch-cpu")
    with pytest.raises(KernelMismatchError, match=rf"{words}.*make kernel"):
        kernel.load()
    assert "mok_test_ran" not in sys.modules


def test_digest_covers_the_files_that_the_kernels_library_hashes(fresh):
    from kernels._rust import Digest, DigestAlgorithm

    folder = package(fresh / "kernel") / "build" / "torch-cpu"
    (folder / "nested").mkdir()
    (folder / "nested" / "more.py").write_text("x = 1\n")
    (folder / "metadata.json.sigstore").write_text("signature")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "part.cpython-311.pyc").write_bytes(b"bytecode")
    assert kernel_files.files(folder).keys() == Digest.hash_variant(DigestAlgorithm.SHA256, folder).files.keys()


@pytest.mark.parametrize("api_level", ["2", "int('2')"])
def test_another_api_level_is_refused(fresh, api_level):
    """Before anything runs where `__init__.py` says it as a number, after the import otherwise."""
    package(fresh / "repository" / "csrc", api_level=api_level, body="import sys\nsys.modules['mok_ran_level'] = sys\n")
    with pytest.raises(KernelMismatchError, match=r"API level 2, this mok_hf calls level 1.*same release"):
        kernel.load()
    assert (sys.modules.pop("mok_ran_level", None) is not None) == ("(" in api_level)


def test_a_cpu_kernel_is_refused_for_a_model_on_a_gpu(fresh):
    folder = package(fresh / "repository" / "csrc")
    kernel.check_device("cpu")
    assert kernel.info().backend == "cpu"
    with pytest.raises(KernelMismatchError, match=rf"{folder}.*built for the CPU and the model is on cuda.*MOK_KERNEL"):
        kernel.check_device("cuda")


def test_a_gpu_that_the_kernel_has_no_code_for_is_refused(fresh, monkeypatch):
    import torch

    info = kernel.KernelInfo("csrc/build", fresh, "torch-stable-abi211-cu130-x", "cuda", "1", "0", 1, ("9.0a",))
    monkeypatch.setattr(kernel, "info", lambda: info)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    kernel.check_device("cpu")
    with pytest.raises(KernelMismatchError, match=r"NVIDIA B200 has compute capability 10\.0; .* serves 9\.0a"):
        kernel.check_device("cuda")
    with pytest.raises(KernelMismatchError, match=r"built for cuda and the model is on xpu"):
        kernel.check_device("xpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernel.check_device("cuda")


def test_a_kernel_that_does_not_load_says_so(fresh):
    package(fresh / "repository" / "csrc", body="raise OSError('undefined symbol: torch_x')\n")
    with pytest.raises(KernelMismatchError, match=r"does not load: undefined symbol: torch_x.*make kernel"):
        kernel.load()


def test_ranks_agree_on_one_kernel_or_all_raise(tmp_path):
    first, second = (str(package(tmp_path / name, version=name)) for name in ("1.0", "1.1"))
    cases = [[first, second, first], [first, None, first], [first, first, first]]
    ranks = run_ranks(3, "tests.mok_hf.workers:agreement", cases)
    different, lacking, equal = zip(*ranks, strict=True)

    for kind, message in different:
        assert kind == "KernelMismatchError"
        assert "ranks 0, 2: version 1.0" in message and "rank 1: version 1.1" in message

    assert [kind for kind, _ in lacking] == ["KernelMismatchError", "KernelNotFoundError", "KernelMismatchError"]
    assert all("rank 1 of 3 lacks the kernel" in message for _, message in lacking)
    assert "no folder /nonexistent" in lacking[1][1] and "make kernel" in lacking[0][1]

    assert equal == (("", ""),) * 3
