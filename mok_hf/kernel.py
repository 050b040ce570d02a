"""Finds, checks and loads the compiled kernel. Nothing here runs at import.

Where it is looked for, first match wins: `MOK_KERNEL_PATH`, then `LOCAL_KERNELS` (the variable of the `kernels`
library), then `csrc/build` of an editable install, then the `mok_hf_kernel` wheel, then the hub (`hub.py`). There is no
fallback to plain PyTorch: without a kernel every entry point raises.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mok_hf import hub, kernel_files
from mok_hf.kernel_files import HOW_TO_FIX, KernelMismatchError, KernelNotFoundError, one_line

KERNEL_PACKAGE = "mok_hf_kernel"

REPOSITORY = Path(__file__).resolve().parent.parent  # of an editable install; site-packages otherwise


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
        archs: compute capabilities of the GPUs it has code for, e.g. ``("9.0a",)``.
    """

    source: str
    path: Path
    variant: str
    backend: str
    version: str
    digest: str
    api_level: int
    archs: tuple[str, ...] = ()

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
    """Refuses a kernel that was not built for the device a model is on: on CUDA, this process's current one.

    Raises:
        KernelMismatchError: the loaded kernel is CPU-only and the device is not, or it has no code for this GPU.
    """
    loaded = info()
    if device_type in ("cpu", "meta"):
        return
    if loaded.backend == "cpu":
        raise KernelMismatchError(
            f"The kernel in {loaded.path} ({loaded.source}) is built for the CPU and the model is on {device_type}. "
            f"Run `make cuda` in a checkout, set MOK_KERNEL_PATH to a build for {device_type}, or keep the model on "
            "the CPU."
        )
    if device_type != loaded.backend:
        raise KernelMismatchError(
            f"The kernel in {loaded.path} ({loaded.source}) is built for {loaded.backend} and the model is on "
            f"{device_type}. Move the model there, or to the CPU."
        )
    import torch

    major, minor = torch.cuda.get_device_capability()
    if not any(_serves(arch, major, minor) for arch in loaded.archs):
        raise KernelMismatchError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernel in {loaded.path} "
            f"({loaded.source}) serves {', '.join(loaded.archs) or 'none'}. Run on such a GPU, or unpatched."
        )


def _serves(arch: str, major: int, minor: int) -> bool:
    """Whether code for `arch` runs on a GPU of that capability: 9.0a on 9.0 alone, 10.0f on 10.0 and later 10.x."""
    number = [int(part) for part in arch.rstrip("af").split(".")]
    return number == [major, minor] if arch.endswith("a") else number[0] == major and number[1] <= minor


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
            kernel_files.check(place.folder, place.name)
            try:
                return _import(place.name, place.folder)
            except FileNotFoundError as error:
                looked.append(f"{place.name}: no build in {place.folder} serves this machine ({one_line(error)})")
        if place.explicit:
            # Whoever names a kernel means that one; another one would be a silent fallback.
            raise KernelNotFoundError(f"No usable kernel. {looked[-1]}. Correct the variable or unset it.")
    listed = "\n".join(f"  - {entry}" for entry in looked)
    raise KernelNotFoundError(f"No MoK kernel found. Looked for, in this order:\n{listed}\nTo fix it: {HOW_TO_FIX}.")


def _places() -> Iterator[_Place]:
    path = os.environ.get("MOK_KERNEL_PATH")
    yield _Place("MOK_KERNEL_PATH", Path(path) if path else None, "not set", explicit=bool(path))

    local = _local_kernels().get(hub.REPO)
    yield _Place("LOCAL_KERNELS", Path(local) if local else None, f"no entry for {hub.REPO}", explicit=bool(local))

    yield _Place("csrc/build", REPOSITORY / "csrc" / "build")

    spec = importlib.util.find_spec(KERNEL_PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    yield _Place(f"wheel {KERNEL_PACKAGE}", folder and folder / "build", "not installed")

    yield _hub_place()


def _hub_place() -> _Place:
    """The hub's kernel if it was fetched, or is fetched now because the environment says that it is trusted."""
    name = f"hub {hub.REPO} at {hub.REVISION}"
    found = hub.fetched()
    if found is None:
        trust = os.environ.get("MOK_TRUST_KERNEL")
        refusal = hub.untrusted(hub.REPO, trust)
        if refusal is not None:
            return _Place(name, None, refusal)
        try:
            found = hub.fetch(trust=trust)
        except KernelNotFoundError as error:
            return _Place(name, None, str(error))
    return _Place(name, found.folder)


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
            f"The kernel in {folder} ({source}) does not load: {one_line(error)}. Rebuild it: {HOW_TO_FIX}."
        ) from error
    # Not resolved: in the hub's cache the files are links to blobs.
    loaded = _describe(module, source, Path(os.path.abspath(module.__file__ or folder)).parent)
    kernel_files.check_api_level(loaded.api_level, loaded.path, source)
    return module, loaded


def _describe(module: ModuleType, source: str, path: Path) -> KernelInfo:
    metadata: dict[str, Any] = kernel_files.metadata(path) if (path / "metadata.json").is_file() else {}
    version = getattr(module, "__version__", None) or metadata.get("version", "unknown")
    return KernelInfo(
        source=source,
        path=path,
        variant=path.name,
        backend=str(metadata.get("backend", {}).get("type", "unknown")),
        version=str(version),
        digest=kernel_files.overall_digest(path)[:16] if metadata else "none",
        api_level=int(getattr(module, "API_LEVEL", 0)),
        archs=tuple(metadata.get("backend", {}).get("archs", ())),
    )
