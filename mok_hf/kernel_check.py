"""Whether a kernel build may be published: what a hub and other people's machines need of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mok_hf import fatbin, kernel_files

# manylinux_2_28, the oldest system with a wheel of torch that the stable ABI allows.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0)}

# torch's libraries that keep their ABI, CUDA's runtime as torch installs it, and the system's.
NEEDED = {
    "libtorch.so", "libtorch_cpu.so", "libcudart.so.13", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6",
    "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
}  # fmt: skip

# All of Python's C API that the entry of an extension without Python objects calls.
PYTHON_SYMBOLS = {"PyModule_Create2", "PyModuleDef_Init"}


def checks(variant: Path) -> dict[str, Callable[[], list[str]]]:
    """Name -> function that lists in words what is wrong with a build variant; empty: nothing.

    Args:
        variant: folder `build/<variant>`.

    Each function may raise KernelMismatchError for a file that cannot be read as what it should be, and RuntimeError
    if a tool of binutils is missing. The one for operators imports the kernel: run the others first.
    """
    return {
        "metadata": lambda: metadata_problems(variant),
        "digests": lambda: kernel_files.differences(variant),
        "manylinux_2_28": lambda: on_library(variant, manylinux_problems),
        "stable ABI": lambda: on_library(variant, abi_problems),
        "architectures": lambda: architecture_problems(variant),
        "operators": lambda: operator_problems(variant),
    }


def metadata_problems(variant: Path) -> list[str]:
    """What the `kernels` library, and mok_hf, need of `metadata.json`."""
    from kernels._rust import Metadata

    try:
        Metadata.read_from_file(variant / "metadata.json")
    except Exception as error:
        return [f"metadata.json: {kernel_files.one_line(error)}"]
    described = kernel_files.metadata(variant)
    wrong = []
    if not described.get("digest"):
        wrong.append("metadata.json has no digest")
    names = [file.name.split(".")[0] for file in variant.glob("*.so")]
    if names != [described["id"]]:
        wrong.append(f"metadata.json has the id {described['id']!r}, the extensions are {names}")
    platform = {"cuda": r"-cu\d+-"}.get(described["backend"]["type"], f"-{described['backend']['type']}-")
    if not re.search(platform, variant.name + "-"):
        wrong.append(f"metadata.json has the backend {described['backend']['type']!r}, the folder is {variant.name}")
    if kernel_files.api_level(variant) is None:
        wrong.append("__init__.py assigns no number to API_LEVEL")
    if not (variant / "LICENSE").is_file():
        wrong.append("there is no LICENSE, which Apache-2.0 asks to pass on")
    return wrong


def architecture_problems(variant: Path) -> list[str]:
    """Where the GPUs that `metadata.json` names are not those that the extension has code for."""
    named = set(kernel_files.metadata(variant)["backend"].get("archs", ()))
    if kernel_files.metadata(variant)["backend"]["type"] == "cuda" and not named:
        return ["metadata.json names no archs, so that any GPU would be taken for served"]

    def problems(library: Path) -> list[str]:
        found = fatbin.architectures(library)
        if not found and named:
            return [f"{library.name} holds no code for GPUs, metadata.json names {', '.join(sorted(named))}"]
        return [
            f"{library.name} has a CUDA source compiled for {', '.join(sorted(has)) or 'nothing'}, metadata.json names "
            f"{', '.join(sorted(named)) or 'nothing'}"
            for has in sorted(set(found) - {frozenset(named)}, key=sorted)
        ]

    return on_library(variant, problems)


def on_library(variant: Path, problems: Callable[[Path], list[str]]) -> list[str]:
    """`problems` of every extension of a variant; a variant without one has a problem too."""
    libraries = sorted(variant.glob("*.so"))
    if not libraries:
        return ["there is no extension (*.so)"]
    return [problem for library in libraries for problem in problems(library)]


def manylinux_problems(library: Path) -> list[str]:
    """What keeps an extension from loading on manylinux_2_28: newer symbols, other libraries, paths of this machine."""
    wrong = []
    versions = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\b", output("objdump", "-T", library)))
    for name, version in sorted(versions):
        if tuple(map(int, version.split("."))) > LIMITS[name]:
            limit = ".".join(map(str, LIMITS[name]))
            wrong.append(f"{library.name} needs {name}_{version}; manylinux_2_28 has {name}_{limit}")
    dynamic = output("readelf", "-d", library)
    for name in sorted(set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) - NEEDED):
        wrong.append(f"{library.name} needs {name}; allowed are torch's stable libraries, libcudart and the system's")
    for path in re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", dynamic):
        wrong.append(f"{library.name} looks for libraries in {path}, a path of the machine it was built on")
    return wrong


def abi_problems(library: Path) -> list[str]:
    """What ties an extension to one Python or one torch, or shows more of it than its module entry."""
    wrong = []
    if not library.name.endswith(".abi3.so"):
        wrong.append(f"{library.name} is not named *.abi3.so")
    undefined = [
        line.split()[-1].split("@")[0] for line in output("nm", "-D", "--undefined-only", library).splitlines()
    ]
    for name in sorted(undefined):
        if re.match(r"_?Py", name) and name not in PYTHON_SYMBOLS:
            wrong.append(f"{library.name} calls {name}; of Python it may call {' or '.join(sorted(PYTHON_SYMBOLS))}")
        elif re.match(r"_ZT?\w*?N?K?(2at|3c10|5torch)\d", name):
            wrong.append(f"{library.name} calls {name}, C++ of torch, which ties it to a torch version")
    defined = [line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()]
    entry = f"PyInit_{library.name.split('.')[0]}"
    if entry not in defined:
        wrong.append(f"{library.name} has no entry {entry}")
    for name in sorted(set(defined) - {entry}):
        wrong.append(f"{library.name} shows {name}; two builds in one process could meet")
    return wrong


def operator_problems(variant: Path) -> list[str]:
    """Operators of a variant that return tensors and have no fake, or why it does not load; imports the kernel.

    Raises:
        KernelMismatchError: its files were changed, or its API level is another one.
    """
    from kernels import get_local_kernel

    kernel_files.check(variant, str(variant), digest_required=True)
    try:
        loaded = get_local_kernel(variant)
    except Exception as error:
        return [f"it does not load on this machine: {kernel_files.one_line(error)}"]
    return operators_without_fake(loaded, kernel_files.metadata(variant)["id"])


def operators_without_fake(kernel: ModuleType, namespace: str) -> list[str]:
    """As `operator_problems`, of a loaded kernel whose operators are in `namespace`."""
    import torch
    from torch._library.simple_registry import singleton

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{namespace}::")]
    if not schemas:
        return [f"{kernel.__name__} registers no operators in {namespace}"]
    wrong = []
    for schema in sorted(schemas, key=lambda s: s.name):
        tensors = any("Tensor" in str(value.type) for value in schema.returns)
        if tensors and not has_fake(schema.name, singleton):
            wrong.append(f"{schema.name} returns tensors and has no fake (register_fake)")
    return wrong


def has_fake(name: str, registry: Any) -> bool:
    import torch

    return registry.find(name).fake_impl.kernel is not None or torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "Meta"
    )


def output(tool: str, *arguments: str | Path) -> str:
    """What a program of binutils prints. Raises RuntimeError if it is missing or fails."""
    if shutil.which(tool) is None:
        raise RuntimeError(f"{tool} is not on PATH; it is part of binutils (apt-get install binutils).")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{tool} {arguments[-1]}: {done.stderr.strip()}")
    return done.stdout
