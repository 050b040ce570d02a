"""The command `mok-hf`."""

from __future__ import annotations

import typer

from mok_hf.cli import kernel

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Expert-parallel MoE layers, fused.")
app.add_typer(kernel.app, name="kernel", help="Build, check, fetch and lock the compiled kernel.")


@app.callback()
def _main() -> None:
    pass
