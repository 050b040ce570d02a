"""The prebuilt kernel on the hub: fetched once, checked before it is installed, offline from then on.

A fetch downloads beside the cache, compares every file with the digests, and only then moves the snapshot into the
cache and writes a record: the commit and the digest of each variant. Only what has a record is ever loaded, so a
download that broke off leaves nothing that could be. The snapshot is whole and its branch is named in the cache, so
`kernels.get_kernel(REPO, revision=REVISION)` finds it offline too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mok_hf import kernel_files
from mok_hf.kernel_files import KernelMismatchError, KernelNotFoundError, one_line

REPO = "mok-hf/mok"
"""The kernel's repository on the hub, and its key in `LOCAL_KERNELS`."""

REVISION = "v1"
"""The branch that kernels of this API level are published on."""


@dataclass(frozen=True)
class Fetched:
    """A kernel repository in the cache, and the content of its record and of a lock file.

    Args:
        repo: the hub repository.
        revision: the branch, tag or commit that was asked for.
        commit: the commit it was at.
        digests: variant -> hex SHA-256 over its files.
    """

    repo: str
    revision: str
    commit: str
    digests: dict[str, str]

    @property
    def folder(self) -> Path:
        """The snapshot: holds `build/<variant>`."""
        return _home(self.repo) / "snapshots" / self.commit

    def write(self, file: Path) -> None:
        """Writes it as JSON, all or nothing."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> Fetched:
        """Reads what `write` wrote. Raises OSError, and KernelMismatchError if it is something else."""
        try:
            return cls(**json.loads(file.read_text()))
        except (TypeError, ValueError) as error:
            raise KernelMismatchError(
                f"{file} is no record of a kernel ({one_line(error)}). Delete it and run `mok-hf kernel fetch`."
            ) from error


def fetched(repo: str = REPO, revision: str = REVISION) -> Fetched | None:
    """The kernel that an earlier `fetch` installed; None if there is none. Makes no request.

    Raises:
        KernelMismatchError: its files are not those that were fetched.
    """
    try:
        found = Fetched.read(_record(repo, revision))
    except FileNotFoundError:
        return None
    if not found.folder.is_dir():
        return None  # the cache was emptied
    _compare(found, _digests(found.folder), "since it was fetched")
    return found


def untrusted(repo: str, trust: str | None) -> str | None:
    """Why the repository's publisher is not trusted, in words with the way forward; None if the user trusts it."""
    if trust == repo:
        return None
    said = f" ({trust!r} is another repository)" if trust else ""
    return (
        f"not fetched: {repo} holds compiled code of the publisher {repo.split('/')[0]!r}, which would run in this "
        f"process with your rights, and you have not said that you trust it{said}. If you do, run `mok-hf kernel fetch "
        f"--trust {repo}` once, or set MOK_TRUST_KERNEL={repo}"
    )


def fetch(
    repo: str = REPO,
    revision: str = REVISION,
    *,
    trust: str | None,
    locked: Fetched | None = None,
    refresh: bool = False,
) -> Fetched:
    """Downloads, checks and installs a kernel repository into the cache. Processes of one machine take turns.

    Args:
        repo: the hub repository.
        revision: its branch, tag or commit.
        trust: the repository whose publisher the user trusts to run code here; must be `repo`.
        locked: commit and digests that it must have, for the revision `revision`.
        refresh: ask the hub even if it has been fetched before.

    Raises:
        KernelNotFoundError: no connection, no such repository, or no variant for this machine.
        KernelMismatchError: publisher not trusted, changed files, another API level, or not the locked one. In every
            case the cache is as it was before.
    """
    refusal = untrusted(repo, trust)
    if refusal is not None:
        raise KernelMismatchError(f"Kernel {refusal}.")
    cache, home = _cache(), _home(repo)
    cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(cache / f".{home.name}.lock"):
        present = None if refresh or locked else fetched(repo, revision)
        if present is not None:
            return present
        staging = cache / f".{home.name}.fetching"
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        try:
            snapshot = _download(repo, locked.commit if locked else revision, staging)
            _check(snapshot, f"hub {repo} at {revision}")
            found = Fetched(repo, revision, snapshot.name, _digests(snapshot))
            if locked is not None:
                _compare(locked, found.digests, "from the one in the lock file")
            _install(staging / home.name, home)
            found.write(_record(repo, revision))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return found


def _download(repo: str, revision: str, staging: Path) -> Path:
    """The whole snapshot of one revision, in a cache of its own."""
    from huggingface_hub import constants, snapshot_download

    where = f"{repo} at {revision}"
    if constants.HF_HUB_OFFLINE:
        raise KernelNotFoundError(f"{where} has not been fetched and HF_HUB_OFFLINE is set: fetch it once without it.")
    try:
        return Path(snapshot_download(repo, repo_type="kernel", revision=revision, cache_dir=staging))
    except Exception as error:
        raise KernelNotFoundError(
            f"fetching {where} failed ({type(error).__name__}: {one_line(error)}). Nothing was installed. Check the "
            "connection and the name, then run `mok-hf kernel fetch` again."
        ) from None  # every retry would be one more traceback


def _check(snapshot: Path, source: str) -> None:
    """Refuses a download that may not be installed."""
    bytecode = [file for file in snapshot.rglob("*") if file.suffix == ".pyc"]
    if bytecode:
        # Digests do not cover it, and the interpreter prefers it to the source.
        raise KernelMismatchError(
            f"{source} holds bytecode ({bytecode[0].relative_to(snapshot)}), which no digest covers. Nothing was "
            "installed. Tell its publisher."
        )
    found = kernel_files.variants(snapshot / "build")
    kernel_files.check(snapshot / "build", source, digest_required=True)
    if not _serves(snapshot):
        listed = ", ".join(variant.name for variant in found) or "none"
        raise KernelNotFoundError(
            f"{source} has no build variant for this machine; it has: {listed}. Nothing was installed. Build one from "
            "source: `mok-hf kernel build` in a checkout."
        )


def _serves(snapshot: Path) -> bool:
    from kernels.resolver import resolve_local_kernel

    for backend in (None, "cpu"):  # as kernel.py: a CUDA torch may run the CPU kernel, for models on the CPU
        with contextlib.suppress(FileNotFoundError):
            resolve_local_kernel(snapshot, backend=backend)
            return True
    return False


def _install(staged: Path, home: Path) -> None:
    """Moves a checked snapshot into the cache: contents first, names last."""
    for part in ("blobs", "trees"):
        (home / part).mkdir(parents=True, exist_ok=True)
        for file in (staged / part).glob("*"):
            file.replace(home / part / file.name)
    (home / "snapshots").mkdir(exist_ok=True)
    for snapshot in (staged / "snapshots").iterdir():
        target = home / "snapshots" / snapshot.name
        if target.is_dir():  # of another program, maybe partial
            target.rename(staged / "replaced")
        snapshot.rename(target)
    for file in (staged / "refs").rglob("*"):
        if file.is_file():
            target = home / "refs" / file.relative_to(staged / "refs")
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)


def _compare(expected: Fetched, digests: dict[str, str], how: str) -> None:
    if digests != expected.digests:
        names = sorted(expected.digests.keys() | digests.keys())
        changed = [name for name in names if expected.digests.get(name) != digests.get(name)]
        raise KernelMismatchError(
            f"The kernel {expected.repo} at commit {expected.commit} differs {how}: {', '.join(changed)}. It is not "
            "used. Run `mok-hf kernel fetch` to fetch it anew, and find out who changed it."
        )


def _digests(snapshot: Path) -> dict[str, str]:
    return {variant.name: kernel_files.overall_digest(variant) for variant in kernel_files.variants(snapshot / "build")}


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def _home(repo: str) -> Path:
    """The repository's folder in the cache, named as the hub library names it."""
    return _cache() / f"kernels--{repo.replace('/', '--')}"


def _record(repo: str, revision: str) -> Path:
    return _home(repo) / "mok_hf" / f"{revision.replace('/', '--')}.json"


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
