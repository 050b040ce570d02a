"""The demo end to end on one family, and that it fails when a loss is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(420)
def test_one_family_end_to_end(tmp_path):
    command = [sys.executable, str(ROOT / "examples/demo.py"), "--families", "deepseek_v3"]
    command += ["--max_steps", str(STEPS), "--output_dir", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All 1 agree within 1e-04" in result.stdout

    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert row["layers_patched"] == 3
    assert row["backend"] == "cpu"
    assert len(row["losses"]) == len(row["native_losses"]) == STEPS
    assert row["losses"][-1] < row["losses"][0]
    # The demo allows 1e-4 for long runs; four steps leave rounding alone.
    assert max(abs(a - b) / b for a, b in zip(row["losses"], row["native_losses"], strict=True)) < 2e-6
    for name in ("mok", "native"):
        assert (tmp_path / "deepseek_v3" / name / "model/model.safetensors").is_file()
    names = (tmp_path / "deepseek_v3/mok/model/model.safetensors").read_bytes()
    assert b"model.layers.1.mlp.experts.15.down_proj.weight" in names, "saved in the per-expert format"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"losses": [6.0, 5.0, 4.0 * (1 + 9e-5)]}, None),
        ({"losses": [6.0, 5.0, 4.0 * (1 + 2e-4)]}, "a loss differs from native by 2.0e-04"),
        ({"losses": [6.0, 5.01, 4.0]}, "a loss differs from native by 2.0e-03"),
        ({"losses": [6.0, float("nan"), 4.0]}, "a loss differs from native by nan"),
        ({"losses": [4.0, 5.0, 4.0], "native_losses": [4.0, 5.0, 4.0]}, "the loss does not fall"),
        ({"layers_patched": 0}, "no layer was patched"),
    ],
)
def test_a_wrong_loss_fails(demo, change, words):
    result = {"layers_patched": 3, "losses": [6.0, 5.0, 4.0], "native_losses": [6.0, 5.0, 4.0]} | change
    failures = demo.failures_of(result)
    if words is None:
        assert failures == []
    else:
        assert any(words in failure for failure in failures), failures


def test_exit_status_follows_the_verdict(demo, tmp_path, monkeypatch, capsys):
    row = {"family": "F", "layers_patched": 3, "kernel": "variant", "backend": "cpu", "native_losses": [6.0, 4.0]}
    for losses, status in (([6.0, 4.0], 0), ([6.0, 4.1], 1)):
        monkeypatch.setattr(demo, "compare", lambda *_, losses=losses: row | {"losses": losses})
        assert demo.main(["--families", "glm4_moe", "--output_dir", str(tmp_path)]) == status
    assert "more than 1e-04 relative" in " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(120)
def test_a_failed_run_shows_its_cause(demo, tmp_path, monkeypatch, capsys):
    """A missing kernel must end the demo with the script's own words, not with the launcher's."""
    monkeypatch.setenv("MOK_KERNEL_PATH", str(tmp_path / "nowhere"))
    assert demo.main(["--families", "glm4_moe", "--max_steps", "1", "--output_dir", str(tmp_path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "No usable kernel. MOK_KERNEL_PATH: no folder" in shown
    assert "GLM-4-MoE mok: exit status 1, 0 of 1 steps" in shown
