"""The benchmarks that need no GPU run: the CPU layer, a layer over several CPU ranks, and the example end to end."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(command: list[str], seconds: int, **environment: str) -> str:
    """What the command prints. Past its time it gets SIGTERM, on which torchrun and finetune.py end their processes."""
    command = ["timeout", "--foreground", "--kill-after=45", str(seconds), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_cpu_layer(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = dict(experts=8, hidden=128, intermediate=64, top_k=2, tokens=512, blocks=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["benchmarks/cpu_layer.py", f"--json={out}", *(f"--{name}={value}" for name, value in sizes.items())]
    run(command, 240)
    result = json.loads(out.read_text())
    assert {(r["impl"], r["pass"]) for r in result["rows"]} == {
        (i, p) for i in ("mok", "transformers_ep") for p in ("forward", "backward", "forward+backward")
    }
    assert all(r["ms_min"] <= r["ms_median"] <= r["ms_max"] for r in result["rows"])
    assert all(r["rel_error"] <= 2e-6 for r in result["rows"])
    assert set(result["peak_mib"]) == {"native", "mok", "mok, quarter ring"}
    assert 0 < result["saved_bytes"]["quarter"] < result["saved_bytes"]["default"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("routing", [["--routing=zipf"], ["--remote", "--without-shared"]], ids=["zipf", "remote"])
def test_layer_over_ranks(routing: list[str], tmp_path: Path) -> None:
    """On two CPU ranks: each implementation against fp64, DeepEP's with a stand-in, then the blocks and the rows."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["benchmarks/layer_ep.py", "--device=cpu", "--dtype=float32", "--shapes=tiny", "--tokens=50,64"]
    command += ["--comm-sms=0,2", "--rounds=1", "--block-ms=1", "--least=2", f"--out={out}", *routing]
    path = os.pathsep.join([str(ROOT / "tests/kernel/standins"), os.environ.get("PYTHONPATH", "")])
    printed = run(command, 140, PYTHONPATH=path)
    assert "without comm_sms=0" in printed  # refused on CPU: the others go on
    rows = json.loads(out.read_text())["rows"]
    local = {"mok_local", "nccl_grouped_mm_local"} if "--remote" in routing else set()  # else routes are not uniform
    impls = {"mok", "mok_comm_2", "nccl_grouped_mm", "deepep_grouped_mm", "transformers_ep", *local}
    passes = ("forward", "backward", "both")
    assert {(r["impl"], r["pass"], r["tokens"]) for r in rows} == {
        (i, p, n) for i in impls for p in passes for n in (50, 64)
    }
    for row in rows:
        assert row["rel_error"] < 1e-5 and row["ep"] == 2 and sum(row["settings"]["rows_arriving"]) == 6 * row["tokens"]
        assert ("link_bytes" in row) == (row["impl"] not in local)
        assert ("exposed" in row) == (f"{row['impl']}_local" in local)
    if "--remote" in routing:  # all rows of both ranks cross, and their results: 512 bytes each
        for impl, routes in {"mok": 3, "deepep_grouped_mm": 1}.items():
            one_way = {r["tokens"]: r["link_bytes"] for r in rows if r["impl"] == impl and r["pass"] == "forward"}
            assert one_way == {n: 2 * routes * n * 512 for n in (50, 64)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_finetune(processes: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/finetune.py", "--shape", "tiny", "--layers", "2", "--seq_len", "64"]
    command += ["--num_processes", str(processes), "--steps", "8", "--timeout", "90", "--out", str(out)]
    printed = run(command, 230, GLOO_SOCKET_IFNAME="lo").splitlines()
    assert [line.split()[0] for line in printed] == ["mok:", "native:", "mok"]
    ours, native = json.loads(out.read_text())["rows"]
    assert (ours["impl"], native["impl"]) == ("mok", "native")
    assert ours["tokens_per_s"] == pytest.approx(processes * ours["tokens_per_s_per_gpu"]) and ours["ep"] == processes
    assert ours["loss_difference"] < 1e-2 and native["s_min"] <= native["s_median"] <= native["s_max"]
    assert len(ours["losses"]) == 8 and ours["losses"] == pytest.approx(native["losses"], rel=1e-2)


def test_composite_at_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fp64, eager and as a graph, for which the function itself stands in, called by each replay."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import baselines
    import ep_problem
    import passes

    class Graph:
        def __init__(self, function):
            self.function = function
            self.saved = getattr(composite, "saved", None)  # of the forward, if it is a backward's graph
            self.filled = [t.fill_(float("nan")) for t in self.results()]  # capturing computes nothing

        def results(self):
            composite.saved = self.saved
            results = self.function()
            return [results] if isinstance(results, torch.Tensor) else results

        def replay(self):
            for into, result in zip(self.filled, self.results(), strict=True):
                into.copy_(result)

        def pool(self):
            return "memory"

    def capture(function, pool=None):
        graph = Graph(function)
        return graph, graph.filled[0] if len(graph.filled) == 1 else graph.filled

    monkeypatch.setattr(passes, "graph", capture)
    sizes = dict(ranks=1, rank=0, tokens=50, hidden=128, inter=64, topk=3, experts=4, shared=64)
    problem = ep_problem.Problem(**sizes, device="cpu", dtype=torch.float32)
    weights, expected = problem.weights(), problem.exact()
    sets = [problem.inputs(seed=seed) for seed in range(passes.INPUT_SETS)]
    composite = baselines.Composite(weights)
    passes.worst_error(passes.step(composite, sets[0], weights), expected, 1e-5)
    functions, filled = passes.graph_functions(composite, sets, weights)
    for results in filled:
        with pytest.raises(AssertionError):
            passes.worst_error(results, expected, 1e-5)
    assert len([passes.worst_error(results, expected, 1e-5) for results in passes.replays(functions, filled)]) == 2


def test_benchmarks_import_what_is_there() -> None:
    """Most of them run on a GPU only: what they and the GPU tests take from them is checked by name."""
    trees = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").glob("*.py")}
    tests = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "tests/gpu").glob("*.py")}
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
    taken = []
    for module, tree in (trees | tests).items():
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                taken += [(module, node.module, alias.name) for alias in node.names]
        whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} & trees.keys()
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
                taken.append((module, node.value.id, node.attr))
    assert len(taken) > 30
    missing = [f"{module} takes {name} from {source}" for module, source, name in taken if name not in defined[source]]
    assert not missing, missing


def test_the_glue_on_a_gpu_has_the_functions_of_the_glue_on_cpu() -> None:
    def functions(module: str, name: str) -> dict[str, str]:
        tree = ast.parse((ROOT / "benchmarks" / module).read_text())
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        return {node.name: ast.unparse(node.args) for node in found.body if isinstance(node, ast.FunctionDef)}

    assert functions("triton_glue.py", "TritonGlue") == functions("glue.py", "TorchGlue")
