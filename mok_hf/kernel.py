"""Finds, checks and loads the compiled kernel. Nothing here runs at import.

Where it is looked for, first match wins: `MOK_KERNEL_PATH`, then `LOCAL_KERNELS` (the variable of the `kernels`
library), then `csrc/build` of an editable install, then the `mok_hf_kernel` wheel, then the hub. There is no fallback
to plain PyTorch: without a kernel every entry point raises.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

API_LEVEL = 1
"""Level of the kernel's Python interface that this package calls; raised when either side changes it."""

HUB_REPO = "mok-hf/mok"
"""The kernel's name on the hub, and its key in `LOCAL_KERNELS`."""

KERNEL_PACKAGE = "mok_hf_kernel"

HOW_TO_FIX = "run `make kernel` in the repository, or set MOK_KERNEL_PATH to a folder that holds a build"


_REPOSITORY = Path(__file__).resolve().parent.parent  # of an editable install; site-packages otherwise


class KernelNotFoundError(RuntimeError):
    """No kernel build serves this machine; the message lists every place looked at and the command that helps."""


class KernelMismatchError(RuntimeError):
    """A kernel was found but may not be used: changed files, another API level, or ranks that differ."""


@dataclass(frozen=True)
class KernelInfo:
    """What was loaded.

    Args:
        source: which of the places it came from, e.g. ``"csrc/build"``.
        path: its folder.
        variant: name of the build variant, e.g. ``"torch-stable-abi211-cpu-x86_64-linux"``.
        backend: what it runs on, e.g. ``"cpu"`` or ``"cuda"``.
        version: version of the kernel.
        digest: hex SHA-256 over its files, the first 16 digits; equal on every rank.
        api_level: level of its Python interface.
    """

    source: str
    path: Path
    variant: str
    backend: str
    version: str
    digest: str
    api_level: int

    def __str__(self) -> str:
        return f"{self.variant} (version {self.version}, digest {self.digest}, API level {self.api_level})"


@dataclass(frozen=True)
class _Place:
    """One place to look: its name for people, the folder (None: there is none) and why there is none."""

    name: str
    folder: Path | None
    absent: str = ""
    explicit: bool = False


_loaded: tuple[ModuleType, KernelInfo] | None = None
_agreed: weakref.WeakSet[Any] = weakref.WeakSet()


def load() -> ModuleType:
    """The kernel's Python module, loaded and checked at the first call and cached for the process.

    Raises:
        KernelNotFoundError: nothing found; lists the places looked at.
        KernelMismatchError: files changed since the build, or another API level.
    """
    global _loaded
    if _loaded is None:
        _loaded = _find()
    return _loaded[0]


def info() -> KernelInfo:
    """The loaded kernel and where it came from; loads it first. Raises what `load` raises."""
    module = load()
    if _loaded is not None and _loaded[0] is module:
        return _loaded[1]
    path = Path(getattr(module, "__file__", None) or ".").resolve().parent
    return _describe(module, "in process", path)


def check_device(device_type: str) -> None:
    """Refuses a kernel that was not built for the device a model is on.

    Raises:
        KernelMismatchError: the loaded kernel is CPU-only and the device is not.
    """
    loaded = info()
    if loaded.backend == "cpu" and device_type not in ("cpu", "meta"):
        raise KernelMismatchError(
            f"The kernel in {loaded.path} ({loaded.source}) is built for the CPU and the model is on {device_type}. "
            f"Set MOK_KERNEL_PATH to a build for {device_type}, or keep the model on the CPU."
        )


def agree(group: Any | None) -> KernelInfo:
    """Loads the kernel on every rank of `group` and makes sure all have the same one. Collective unless it is None.

    Args:
        group: the process group whose ranks call this together; None for one process.

    Raises:
        KernelNotFoundError: this rank has no kernel (on every rank, with the ranks that lack it named).
        KernelMismatchError: another rank has none, or ranks have different versions, digests or API levels.
    """
    if group is None:
        return info()
    import torch.distributed as dist

    if dist.get_world_size(group) == 1 or group in _agreed:
        return info()
    error: Exception | None = None
    mine: tuple[bool, str, str, int] = (False, "", "", 0)
    try:
        loaded = info()
        mine = (True, loaded.version, loaded.digest, loaded.api_level)
    except Exception as caught:
        error = caught
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (dist.get_rank(), *mine), group=group)
    lacking = [rank for rank, ok, *_ in everyone if not ok]
    if lacking:
        message = f"{_ranks(lacking)} of {len(everyone)} {'lack' if len(lacking) > 1 else 'lacks'} the kernel"
        if error is not None:
            kind = KernelNotFoundError if isinstance(error, KernelNotFoundError) else KernelMismatchError
            raise kind(f"{message}. On rank {dist.get_rank()}: {error}") from error
        raise KernelMismatchError(f"{message}: {HOW_TO_FIX} on every machine.")
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank, _, *identity in everyone:
        kinds.setdefault(tuple(identity), []).append(rank)
    if len(kinds) > 1:
        listed = "; ".join(
            f"{_ranks(ranks)}: version {version}, digest {digest}, API level {level}"
            for (version, digest, level), ranks in kinds.items()
        )
        raise KernelMismatchError(f"Ranks loaded different kernels. {listed}. Install one build on every machine.")
    _agreed.add(group)
    return info()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _find() -> tuple[ModuleType, KernelInfo]:
    looked: list[str] = []
    for place in _places():
        if place.folder is None:
            looked.append(f"{place.name}: {place.absent}")
            continue
        if not place.folder.is_dir():
            looked.append(f"{place.name}: no folder {place.folder}")
        else:
            # Before anything of it runs: a changed file must not get as far as being imported.
            _check_digests(place.folder)
            try:
                return _import(place.name, place.folder)
            except FileNotFoundError as error:
                looked.append(f"{place.name}: no build in {place.folder} serves this machine ({_one_line(error)})")
        if place.explicit:
            # Whoever names a kernel means that one; another one would be a silent fallback.
            raise KernelNotFoundError(f"No usable kernel. {looked[-1]}. Correct the variable or unset it.")
    listed = "\n".join(f"  - {entry}" for entry in looked)
    raise KernelNotFoundError(f"No MoK kernel found. Looked for, in this order:\n{listed}\nTo fix it: {HOW_TO_FIX}.")


def _places() -> Iterator[_Place]:
    path = os.environ.get("MOK_KERNEL_PATH")
    yield _Place("MOK_KERNEL_PATH", Path(path) if path else None, "not set", explicit=bool(path))

    local = _local_kernels().get(HUB_REPO)
    yield _Place("LOCAL_KERNELS", Path(local) if local else None, f"no entry for {HUB_REPO}", explicit=bool(local))

    yield _Place("csrc/build", _REPOSITORY / "csrc" / "build")

    spec = importlib.util.find_spec(KERNEL_PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    yield _Place(f"wheel {KERNEL_PACKAGE}", folder and folder / "build", "not installed")

    yield _Place(f"hub {HUB_REPO}", None, "loading from the hub is not supported by this version")


def _local_kernels() -> dict[str, str]:
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _import(source: str, folder: Path) -> tuple[ModuleType, KernelInfo]:
    import torch
    from kernels import get_local_kernel

    try:
        try:
            module = get_local_kernel(folder)
        except FileNotFoundError:
            if torch.version.cuda is None:
                raise
            # A CUDA build of torch takes no CPU variant by itself. It serves models on the CPU; check_device refuses it
            # for the others.
            module = get_local_kernel(folder, backend="cpu")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise KernelMismatchError(
            f"The kernel in {folder} ({source}) does not load: {_one_line(error)}. Rebuild it: {HOW_TO_FIX}."
        ) from error
    loaded = _describe(module, source, Path(module.__file__ or folder).resolve().parent)
    if loaded.api_level != API_LEVEL:
        raise KernelMismatchError(
            f"The kernel in {loaded.path} ({source}) has API level {loaded.api_level}, this mok_hf calls level "
            f"{API_LEVEL}. Use a kernel and a mok_hf of the same release: {HOW_TO_FIX}."
        )
    return module, loaded


def _describe(module: ModuleType, source: str, path: Path) -> KernelInfo:
    metadata: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        metadata = json.loads((path / "metadata.json").read_text())
    version = getattr(module, "__version__", None) or metadata.get("version", "unknown")
    overall = hashlib.sha256()
    for name, file in sorted(_files(path).items()) if metadata else ():
        overall.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return KernelInfo(
        source=source,
        path=path,
        variant=path.name,
        backend=str(metadata.get("backend", {}).get("type", "unknown")),
        version=str(version),
        digest=overall.hexdigest()[:16],
        api_level=int(getattr(module, "API_LEVEL", 0)),
    )


def _check_digests(folder: Path) -> None:
    """Compares every build variant under `folder` with the digest in its metadata.json, where it has one."""
    for file in sorted(
        {*folder.glob("metadata.json"), *folder.glob("*/metadata.json"), *folder.glob("build/*/metadata.json")}
    ):
        try:
            digest = json.loads(file.read_text()).get("digest")
        except ValueError as error:
            raise KernelMismatchError(f"{file} is not valid JSON ({error}). Rebuild it: {HOW_TO_FIX}.") from error
        if not digest:
            continue
        hasher: Callable[..., Any] | None = getattr(hashlib, str(digest.get("algorithm", "")).lower(), None)
        expected: dict[str, str] = digest.get("files", {})
        present = _files(file.parent)
        wrong = [f"{name} is missing" for name in sorted(expected.keys() - present.keys())]
        wrong += [f"{name} is not part of the build" for name in sorted(present.keys() - expected.keys())]
        for name in sorted(expected.keys() & present.keys()):
            if (
                hasher is None
                or base64.b64encode(hasher(present[name].read_bytes()).digest()).decode() != expected[name]
            ):
                wrong.append(f"{name} has changed")
        if wrong:
            raise KernelMismatchError(
                f"The kernel in {file.parent} is not the one that was built: {'; '.join(wrong)}. Nothing of it was "
                f"loaded. Rebuild or reinstall it: {HOW_TO_FIX}."
            )


def _files(variant: Path) -> dict[str, Path]:
    """The files that a digest covers, as the `kernels` library counts them: no metadata, signature or bytecode."""
    found = {}
    for file in variant.rglob("*"):
        relative = file.relative_to(variant)
        if not file.is_file() or "__pycache__" in relative.parts or file.suffix in (".pyc", ".sigstore"):
            continue
        if str(relative) != "metadata.json":
            found[relative.as_posix()] = file
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
