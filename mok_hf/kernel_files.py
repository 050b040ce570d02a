"""The files of a kernel build, and whether they are the ones that were built. Nothing here runs any of them."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

API_LEVEL = 1
"""Level of the kernel's Python interface that this package calls; raised when either side changes it."""

HOW_TO_FIX = (
    "run `make kernel` (for GPUs `make cuda`) in a checkout, or `mok-hf kernel fetch` for the prebuilt one, or set "
    "MOK_KERNEL_PATH to a folder that holds a build"
)


class KernelNotFoundError(RuntimeError):
    """No kernel build serves this machine; the message lists every place looked at and the command that helps."""


class KernelMismatchError(RuntimeError):
    """A kernel was found but may not be used: changed files, another API level, a publisher that nobody trusted, or
    ranks that differ."""


def variants(folder: Path) -> list[Path]:
    """The build variants under `folder`, which is a kernel repository, its `build`, or one variant."""
    found = {*folder.glob("metadata.json"), *folder.glob("*/metadata.json"), *folder.glob("build/*/metadata.json")}
    return sorted(file.parent for file in found)


def files(variant: Path) -> dict[str, Path]:
    """The files that a digest covers, as the `kernels` library counts them: no metadata, signature or bytecode."""
    found = {}
    for file in variant.rglob("*"):
        relative = file.relative_to(variant)
        if not file.is_file() or "__pycache__" in relative.parts or file.suffix in (".pyc", ".sigstore"):
            continue
        if str(relative) != "metadata.json":
            found[relative.as_posix()] = file
    return found


def metadata(variant: Path) -> dict[str, Any]:
    """What `metadata.json` says.

    Raises:
        KernelMismatchError: it is not valid JSON.
    """
    file = variant / "metadata.json"
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise KernelMismatchError(f"{file} is not valid JSON ({error}). Rebuild it: {HOW_TO_FIX}.") from error


def overall_digest(variant: Path) -> str:
    """Hex SHA-256 over a variant's files and their names."""
    overall = hashlib.sha256()
    for name, file in sorted(files(variant).items()):
        overall.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return overall.hexdigest()


def differences(variant: Path) -> list[str]:
    """How a variant's files differ from the digest in its metadata, in words; empty where they do not."""
    digest = metadata(variant).get("digest") or {}
    hasher: Callable[..., Any] | None = getattr(hashlib, str(digest.get("algorithm", "")).lower(), None)
    expected: dict[str, str] = digest.get("files", {})
    present = files(variant)
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - present.keys())]
    wrong += [f"{name} is not part of the build" for name in sorted(present.keys() - expected.keys())]
    for name in sorted(expected.keys() & present.keys()):
        if hasher is None or base64.b64encode(hasher(present[name].read_bytes()).digest()).decode() != expected[name]:
            wrong.append(f"{name} has changed")
    return wrong


def api_level(variant: Path) -> int | None:
    """The level a variant's `__init__.py` assigns to API_LEVEL, read and not run; None if it assigns no number."""
    try:
        module = ast.parse((variant / "__init__.py").read_text())
    except (OSError, SyntaxError):
        return None
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if "API_LEVEL" in names and isinstance(statement.value.value, int):
                return statement.value.value
    return None


def check(folder: Path, source: str, *, digest_required: bool = False) -> None:
    """Refuses a build whose files were changed or whose API level is another one, before any of it runs.

    Args:
        folder: as `variants` takes it.
        source: where it came from, for the message.
        digest_required: refuse a variant without a digest too.

    Raises:
        KernelMismatchError: with what is wrong and the way forward.
    """
    for variant in variants(folder):
        if metadata(variant).get("digest"):
            wrong = differences(variant)
        else:
            wrong = ["its metadata.json has no digest"] if digest_required else []
        if wrong:
            raise KernelMismatchError(
                f"The kernel in {variant} is not the one that was built: {'; '.join(wrong)}. Nothing of it was "
                f"loaded. Rebuild or reinstall it: {HOW_TO_FIX}."
            )
        level = api_level(variant)
        if level is not None:
            check_api_level(level, variant, source)


def check_api_level(level: int, variant: Path, source: str) -> None:
    """Refuses a kernel of another API level. Raises KernelMismatchError."""
    if level != API_LEVEL:
        raise KernelMismatchError(
            f"The kernel in {variant} ({source}) has API level {level}, this mok_hf calls level {API_LEVEL}. Use a "
            f"kernel and a mok_hf of the same release: {HOW_TO_FIX}."
        )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
