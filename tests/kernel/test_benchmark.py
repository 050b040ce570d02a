"""The benchmarks that need no GPU run: the CPU layer, and the example end to end."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_cpu_layer(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = dict(experts=8, hidden=128, intermediate=64, top_k=2, tokens=512, blocks=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["benchmarks/cpu_layer.py", f"--json={out}", *(f"--{name}={value}" for name, value in sizes.items())]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {(r["impl"], r["pass"]) for r in result["rows"]} == {
        (i, p) for i in ("mok", "transformers_ep") for p in ("forward", "backward", "forward+backward")
    }
    assert all(r["ms_min"] <= r["ms_median"] <= r["ms_max"] for r in result["rows"])
    assert all(r["rel_error"] <= 2e-6 for r in result["rows"])
    assert set(result["peak_mib"]) == {"native", "mok", "mok, quarter ring"}
    assert 0 < result["saved_bytes"]["quarter"] < result["saved_bytes"]["default"]


@pytest.mark.timeout(300)
def test_finetune(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/finetune.py", "--shape", "tiny", "--layers", "2", "--seq_len", "64"]
    done = subprocess.run([*command, "--steps", "8", "--out", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, native = json.loads(out.read_text())["rows"]
    assert (ours["impl"], native["impl"]) == ("mok", "native")
    assert ours["tokens_per_s"] > 0 and native["s_min"] <= native["s_median"] <= native["s_max"]
    assert len(ours["losses"]) == 8 and ours["losses"] == pytest.approx(native["losses"], rel=1e-2)


def test_benchmarks_import_what_is_there() -> None:
    """Most of them run on a GPU only: what they take from each other is checked by name."""
    trees = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").glob("*.py")}
    defined = {
        module: {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for part in node.targets
            for target in ast.walk(part)
            if isinstance(target, ast.Name)
        }
        | {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for module, tree in trees.items()
    }
    taken = [
        (module, node.module, alias.name)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in trees
        for alias in node.names
    ]
    assert len(taken) > 20
    missing = [f"{module} takes {name} from {source}" for module, source, name in taken if name not in defined[source]]
    assert not missing, missing
