"""Lays out one variant of the hub kernel: the Python side, the extension, `_ops.py` and `metadata.json`.

The folder is written beside its final place and moved there, so that a reader sees the old variant or the new one.
"""

import argparse
import base64
import hashlib
import json
import shutil
from pathlib import Path

OPS = '''"""The operators of this build; written by package.py."""

import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    """`op_name` with the namespace of this build's operators."""
    return f"{name}::{{op_name}}"


__all__ = ["add_op_namespace_prefix", "ops", "{name}"]
'''


def digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def dotted(arch: str) -> str:
    """90a -> 9.0a: nvcc's name of a compute capability as the metadata spells it."""
    number = arch.rstrip("af")
    return f"{number[:-1]}.{number[-1]}{arch[len(number) :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="the built extension")
    parser.add_argument("--name", required=True, help="its module name, which is the operators' namespace too")
    parser.add_argument("--source", type=Path, required=True, help="torch-ext/mok")
    parser.add_argument("--out", type=Path, required=True, help="build/<variant>")
    parser.add_argument("--backend", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--archs", nargs="*", default=[], help="compute capabilities in the extension, e.g. 90a")
    parser.add_argument("--licence", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    args = parser.parse_args()

    staged = args.out.with_name(args.out.name + ".new")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(args.source, staged, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy2(args.library, staged / f"{args.name}.abi3.so")
    shutil.copy2(args.licence, staged / "LICENSE")
    (staged / "_ops.py").write_text(OPS.format(name=args.name))
    files = sorted(p for p in staged.rglob("*") if p.is_file())
    metadata = {
        "name": "mok",
        "id": args.name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": args.backend} | ({"archs": [dotted(arch) for arch in args.archs]} if args.archs else {}),
        "digest": {"algorithm": "sha256", "files": {str(p.relative_to(staged)): digest(p) for p in files}},
    }
    (staged / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    replaced = args.out.with_name(args.out.name + ".old")
    shutil.rmtree(replaced, ignore_errors=True)
    if args.out.exists():
        args.out.rename(replaced)
    staged.rename(args.out)
    shutil.rmtree(replaced, ignore_errors=True)
    print(f"{args.out}: {args.name}")


if __name__ == "__main__":
    main()
