"""Builds the kernel from a checkout, and packs a build into the optional wheel `mok_hf_kernel`."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mok_hf import kernel_check, kernel_files
from mok_hf.kernel_files import KernelMismatchError, KernelNotFoundError

PACKAGE = "mok_hf_kernel"
PLATFORM = "manylinux_2_28_x86_64"
ARCHS = ("9.0a",)
"""Compute capabilities that csrc/cuda has kernels for; a, since they use instructions of that one only."""


def build(source: Path, archs: Sequence[str] = ()) -> list[Path]:
    """Compiles the kernel with CMake and installs it into `source/build/<variant>`.

    Args:
        source: the kernel's source repository, `csrc/` of a checkout.
        archs: compute capabilities ("9.0a" or "90a") of a variant for torch with CUDA, which holds the CPU operators
            too; empty for the variant without.

    Returns:
        The variants that are there now.

    Raises:
        KernelNotFoundError: no sources, or no cmake, ninja or nvcc.
        RuntimeError: an architecture that the sources do not serve, or the compiler failed; its output went to the
            terminal.
    """
    if not (source / "CMakeLists.txt").is_file():
        raise KernelNotFoundError(
            f"{source} holds no kernel sources. Run this in a checkout of the repository or pass --source; "
            "`mok-hf kernel fetch` fetches a prebuilt kernel instead."
        )
    numbers = [arch.replace(".", "") for arch in archs]
    unserved = sorted(set(numbers) - {arch.replace(".", "") for arch in ARCHS})
    if unserved:
        raise RuntimeError(
            f"--cuda {','.join(archs)}: the sources in {source} have no code for {', '.join(unserved)}; they serve "
            f"{', '.join(ARCHS)}."
        )
    cmake, ninja = _tool("cmake"), _tool("ninja")
    if archs and shutil.which("nvcc") is None:
        raise KernelNotFoundError(
            "nvcc is not on PATH: install the CUDA toolkit 13 and add its bin folder, or build with --cpu."
        )
    folder = source / ("cmake-build-cuda" if archs else "cmake-build")
    setup = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython3_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
    setup.append(f"-DMOK_CUDA_ARCHS={';'.join(numbers)}")
    for step in (
        ["-S", str(source), "-B", str(folder), "-G", "Ninja", *setup],
        ["--build", str(folder)],
        ["--install", str(folder)],
    ):
        if subprocess.run([cmake, *step]).returncode != 0:
            raise RuntimeError(f"`cmake {' '.join(step)}` failed; its output is above.")
    return kernel_files.variants(source / "build")


def _tool(name: str) -> str:
    # Installed by pip, it is beside the interpreter, which need not be on PATH.
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise KernelNotFoundError(f"{name} is not installed: `pip install cmake ninja`.")
    return found


def wheel(folder: Path, out: Path, version: str) -> Path:
    """Packs the variants under `folder` into a wheel that mok_hf finds once it is installed.

    Args:
        folder: as `kernel_files.variants` takes it.
        out: folder that the wheel is written to.
        version: version of the wheel: that of the mok_hf it is for.

    Returns:
        The wheel. The same build gives the same bytes.

    Raises:
        KernelNotFoundError: no variant there.
        KernelMismatchError: a variant that would not load on the systems the wheel's name promises.
    """
    variants = kernel_files.variants(folder)
    if not variants:
        raise KernelNotFoundError(f"{folder} holds no build variant: run `mok-hf kernel build` first.")
    contents = {f"{PACKAGE}/__init__.py": b'"""The prebuilt kernel of mok_hf, in build/; mok_hf.kernel loads it."""\n'}
    for variant in variants:
        for name, check in kernel_check.checks(variant).items():
            wrong = [] if name == "operators" else check()
            if wrong:
                raise KernelMismatchError(f"{variant} can not be published: {'; '.join(wrong)}.")
        for name, file in {**kernel_files.files(variant), "metadata.json": variant / "metadata.json"}.items():
            contents[f"{PACKAGE}/build/{variant.name}/{name}"] = file.read_bytes()
    info = f"{PACKAGE}-{version}.dist-info"
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {PACKAGE}\nVersion: {version}\nSummary: Prebuilt kernel of mok_hf\n"
        "License-Expression: Apache-2.0\nRequires-Python: >=3.9\nRequires-Dist: torch>=2.11\n"
    ).encode()
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: mok_hf\nRoot-Is-Purelib: false\nTag: py3-none-{PLATFORM}\n".encode()
    )
    lines = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in sorted(contents.items())]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()

    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{PACKAGE}-{version}-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(name)  # of a fixed date
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return file


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
