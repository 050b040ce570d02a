"""The fine-tune scripts, run as users run them: two processes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.checkpoints import build

    return build("deepseek_v3", tmp_path_factory.mktemp("checkpoints"), name="bytes", vocab_size=384)


def launch(script: str, *options: str) -> str:
    """Runs a script of examples/ in two processes; its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / script), *options],
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def finetune(checkpoint: Path, output: Path, *options: str) -> list[dict[str, float]]:
    """The log of a short run of finetune.py at EP 2."""
    common = ["--model", str(checkpoint), "--tokenizer", "bytes", "--ep_size", "2", "--seq_len", "32"]
    common += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--output_dir", str(output)]
    launch("finetune.py", *common, *options)
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def values(log: list[dict[str, float]]) -> list[tuple[float, float, float]]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in log]


def test_resumed_run_equals_the_uninterrupted_one(checkpoint, tmp_path):
    whole = finetune(checkpoint, tmp_path / "whole", "--max_steps", "4", "--checkpointing_steps", "2")
    assert [record["step"] for record in whole] == [1, 2, 3, 4]
    resumed = finetune(
        checkpoint,
        tmp_path / "resumed",
        "--max_steps",
        "4",
        "--gradient_checkpointing",
        "--resume_from_checkpoint",
        str(tmp_path / "whole/checkpoint-2"),
    )
    # Gradient checkpointing recomputes the same bits, so it may be switched on in between.
    assert values(resumed) == values(whole)[2:]
    first, second = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "resumed"))
    assert first.keys() == second.keys() == load_file(checkpoint / "model.safetensors").keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_lora_trains_and_saves_adapters_only(checkpoint, tmp_path):
    log = finetune(checkpoint, tmp_path, "--lora", "--max_steps", "3", "--dataset", str(ROOT / "LICENSE"))
    assert log[-1]["loss"] < log[0]["loss"]
    adapters = load_file(tmp_path / "model/adapter_model.safetensors")
    assert adapters and all("lora_" in name for name in adapters)
    assert any(value.abs().sum() > 0 for name, value in adapters.items() if "lora_B" in name), "B starts at zero"


def test_trainer_trains_as_the_bare_loop(checkpoint, tmp_path):
    """Same data order is not promised, so: it runs on the kernel, the loss falls, and the checkpoint is whole."""
    output = launch(
        "finetune_trainer.py",
        *("--model", str(checkpoint), "--tokenizer", "bytes", "--ep_size", "2", "--seq_len", "32"),
        *("--max_steps", "8", "--learning_rate", "1e-3", "--logging_steps", "1", "--report_to", "none"),
        *("--per_device_train_batch_size", "2", "--save_strategy", "no", "--output_dir", str(tmp_path), "--use_cpu"),
    )
    losses = [float(part.split("'")[1]) for part in output.split("'loss': ")[1:]]
    assert len(losses) == 8
    assert sum(losses[4:]) < sum(losses[:4])
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == load_file(checkpoint / "model.safetensors").keys()
