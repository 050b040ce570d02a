"""`mok-hf kernel`: everything about the compiled kernel that one does from a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mok_hf import hub, kernel, kernel_build, kernel_check, kernel_files

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
# Not wrapped: paths and commands are there to be copied.
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

LOCK = Path("mok-kernel.lock")
SOURCES = kernel.REPOSITORY / "csrc"


@contextmanager
def _refusals() -> Iterator[None]:
    """A refusal is its words and exit status 1, not a traceback."""
    try:
        yield
    except RuntimeError as error:
        err.print(escape(str(error)), style="red")
        raise typer.Exit(1) from None


@app.command()
def build(
    source: Annotated[Path, typer.Option(help="the kernel's sources, csrc/ of a checkout")] = SOURCES,
    cpu: Annotated[bool, typer.Option("--cpu", help="for a torch without CUDA (the default)")] = False,
    cuda: Annotated[
        str | None,
        typer.Option(help="for a torch with CUDA: compute capabilities, e.g. 9.0a; holds the CPU kernel too"),
    ] = None,
) -> None:
    """Compile the kernel into csrc/build/<variant>, with digests."""
    with _refusals():
        if cpu and cuda:
            raise RuntimeError("--cpu and --cuda build two variants: run the command once for each.")
        for variant in kernel_build.build(source, cuda.split(",") if cuda else ()):
            out.print(f"{escape(str(variant))}  digest {kernel_files.overall_digest(variant)[:16]}")


@app.command()
def check(
    path: Annotated[
        Path | None, typer.Argument(help="repository, build/ or variant; default: the kernel that mok_hf loads")
    ] = None,
) -> None:
    """Check that a build may be published: metadata, digests, manylinux_2_28, stable ABI, GPUs, operators' fakes."""
    failed = False
    with _refusals():
        variants = kernel_files.variants(path) if path else [kernel.info().path]
        if not variants:
            raise RuntimeError(f"{path} holds no build variant (a folder with metadata.json).")
        for variant in variants:
            out.print(escape(str(variant)), style="bold")
            wrong: list[str] = []
            for name, run in kernel_check.checks(variant).items():
                if name == "operators" and wrong:
                    out.print(f"  {name}: not run, the files are not to be trusted", style="yellow")
                    continue
                found = run()
                wrong += found
                out.print(f"  {name}: {'ok' if not found else 'FAILED'}", style="red" if found else "green")
                for problem in found:
                    out.print(f"    {escape(problem)}")
            failed = failed or bool(wrong)
    if failed:
        raise typer.Exit(1)


@app.command()
def fetch(
    repo: Annotated[str, typer.Option(help="hub repository")] = hub.REPO,
    revision: Annotated[str, typer.Option(help="its branch, tag or commit")] = hub.REVISION,
    trust: Annotated[str | None, typer.Option(help="the repository again: you trust its publisher to run code")] = None,
    lock: Annotated[Path | None, typer.Option(help="fetch what this lock file names, and nothing else")] = None,
) -> None:
    """Fetch the prebuilt kernel, check it, and keep it for use without a connection."""
    with _refusals():
        locked = None
        if lock is not None:
            locked = _read_lock(lock)
            repo, revision = locked.repo, locked.revision
        trust = trust or os.environ.get("MOK_TRUST_KERNEL")
        if hub.untrusted(repo, trust) is not None and trust is None and sys.stdin.isatty():
            question = (
                f"{repo} is compiled code of the publisher {repo.split('/')[0]!r}. It will run in your processes, "
            )
            if typer.confirm(question + "with your rights. Do you trust it?"):
                trust = repo
        found = hub.fetch(repo, revision, trust=trust, locked=locked, refresh=True)
        out.print(f"{escape(found.repo)} at commit {found.commit}")
        for variant, digest in found.digests.items():
            out.print(f"  {variant}  digest {digest[:16]}")
        if (repo, revision) != (hub.REPO, hub.REVISION):
            out.print(f"To use it: export MOK_KERNEL_PATH={escape(str(found.folder))}")


def _read_lock(file: Path) -> hub.Fetched:
    try:
        return hub.Fetched.read(file)
    except OSError as error:
        raise RuntimeError(f"{file}: {error.strerror}. `mok-hf kernel lock` writes one.") from None


@app.command()
def lock(
    file: Annotated[Path, typer.Argument(help="where to write it")] = LOCK,
    repo: Annotated[str, typer.Option(help="hub repository")] = hub.REPO,
    revision: Annotated[str, typer.Option(help="its branch, tag or commit")] = hub.REVISION,
) -> None:
    """Write the commit and the digests of the fetched kernel to a file, for `fetch --lock` on other machines."""
    with _refusals():
        found = hub.fetched(repo, revision)
        if found is None:
            raise RuntimeError(f"{repo} at {revision} has not been fetched: run `mok-hf kernel fetch` first.")
        found.write(file)
        out.print(f"{escape(str(file))}: {escape(found.repo)} at commit {found.commit}")


@app.command()
def info() -> None:
    """Show which kernel mok_hf loads here."""
    with _refusals():
        found = kernel.info()
        table = Table(show_header=False, box=None, pad_edge=False)
        for name in ("source", "path", "variant", "backend", "archs", "version", "digest", "api_level"):
            value = getattr(found, name)
            table.add_row(name, escape(" ".join(value) if isinstance(value, tuple) else str(value)))
        out.print(table)


@app.command()
def wheel(
    path: Annotated[Path, typer.Argument(help="repository, build/ or variant")] = SOURCES / "build",
    directory: Annotated[Path, typer.Option("--out", help="folder for the wheel")] = Path("dist"),
) -> None:
    """Pack a build into the wheel mok_hf_kernel, which mok_hf finds once it is installed."""
    import mok_hf

    with _refusals():
        out.print(escape(str(kernel_build.wheel(path, directory, mok_hf.__version__))))
