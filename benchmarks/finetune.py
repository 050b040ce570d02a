"""examples/finetune.py end to end on one or more GPUs: tokens a second and loss, ours against Transformers' experts.

    python benchmarks/finetune.py --shape q30b --layers 8 --steps 20 --out benchmarks/results/finetune-q30b.json
    python benchmarks/finetune.py --shape q30b --num_processes 8 --out benchmarks/results/finetune-q30b-ep8.json

Writes a checkpoint with random weights in the shape of Qwen3-30B-A3B or GLM-4.5-Air, as many layers as asked for, and
runs the example on it, once an implementation and round, alternating: under `accelerate launch`, and where there are
several processes, one a GPU and all of them one expert-parallel group, under `torchrun`, which that calls. Tokens a
second are of the median step after the first five. The losses of the two runs are in the result, step by step. The
result is written after each run: one that is cut short has what it measured.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from timing import save
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5  # steps
GRACE = 40  # seconds; torchrun gives its workers 30 of them to end
SHAPES = {
    "q30b": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        dict(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
    ),
    "air": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        dict(
            hidden_size=4096,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            partial_rotary_factor=0.5,
            vocab_size=151552,
            max_position_embeddings=131072,
        ),
    ),
    # For tests of this script.
    "tiny": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        dict(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=300,
        ),
    ),
}


def write_checkpoint(shape: str, layers: int, folder: Path) -> None:
    model_class, config_class, values = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = model_class(config_class(num_hidden_layers=layers, **values))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the runs are processes of their own on this GPU


def launch(command: list[str], environment: dict[str, str], timeout: float, log: Path) -> None:
    """Runs the command to its end; where it fails or does not end, no process of it stays and its last lines show."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
    try:
        failed = process.wait(timeout) and f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        failed = f"not through after {timeout:g} s"
    finally:
        if process.returncode is None:  # also when this process is interrupted
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed:
        lines = [line.split("\r")[-1] for line in log.read_bytes().decode(errors="replace").split("\n")]
        raise SystemExit("\n".join([*lines[-200:], f"{failed}: {' '.join(command)}"]))


def train(implementation: str, checkpoint: Path, folder: Path, options: argparse.Namespace) -> list[dict]:
    """The log of one run, a record a step."""
    output = folder / implementation
    shutil.rmtree(output, ignore_errors=True)
    on_cpu, environment = not torch.cuda.is_available(), dict(os.environ)
    if options.num_processes == 1:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        command += ["--mixed_precision", "no", "--num_machines", "1", "--dynamo_backend", "no"]
        command += ["--cpu"] if on_cpu else []
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.num_processes)]
        environment |= {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    command += [str(ROOT / "examples/finetune.py"), "--model", str(checkpoint), "--tokenizer", "bytes"]
    command += ["--ep_size", str(options.num_processes)]
    command += ["--implementation", implementation, "--dtype", "bfloat16", "--seq_len", str(options.seq_len)]
    command += ["--per_device_train_batch_size", str(options.batch), "--max_steps", str(options.steps)]
    command += ["--learning_rate", "1e-5", "--lr_scheduler_type", "constant", "--output_dir", str(output)]
    launch(command, environment, options.timeout, folder / "stderr")
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    patched = json.loads((output / "summary.json").read_text())["layers_patched"]
    assert (patched > 0) == (implementation == "mok"), f"{implementation}: {patched} layers patched"
    shutil.rmtree(output)
    return records


def row_of(implementation: str, logs: list[list[dict]], options: argparse.Namespace) -> dict:
    seconds = [record["seconds"] for log in logs for record in log[WARM_UP:]]
    tokens = options.batch * options.seq_len
    return dict(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        ep=options.num_processes,
        shape=options.shape,
        layers=options.layers,
        seq_len=options.seq_len,
        batch=options.batch,
        impl=implementation,
        tokens_per_s=tokens * options.num_processes / statistics.median(seconds),
        tokens_per_s_per_gpu=tokens / statistics.median(seconds),
        s_median=statistics.median(seconds),
        s_min=min(seconds),
        s_max=max(seconds),
        losses=[record["loss"] for record in logs[0]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="q30b")
    parser.add_argument("--num_processes", type=int, default=1, help="GPUs, which share the experts of each layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences a GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with the processes it launched

    runs: dict[str, list] = {"mok": [], "native": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(options.shape, options.layers, checkpoint)
        for round_ in range(options.rounds):
            for implementation in list(runs)[:: 1 if round_ % 2 == 0 else -1]:
                runs[implementation].append(train(implementation, checkpoint, Path(folder), options))
                rows = {impl: row_of(impl, logs, options) for impl, logs in runs.items() if logs}
                row = rows[implementation]
                speed = f"{row['tokens_per_s_per_gpu']:.0f} tokens/s a GPU"
                print(f"{implementation}: {speed}, loss {row['losses'][-1]:.4f}", flush=True)
                if len(rows) == 2:
                    ours, native = rows.values()
                    pairs = zip(ours["losses"], native["losses"], strict=True)
                    ours["loss_difference"] = max(abs(a - b) / b for a, b in pairs)
                save(options.out, list(rows.values()), transformers)
    faster = ours["tokens_per_s"] / native["tokens_per_s"]
    print(f"mok / native {faster:.3f}, losses at most {ours['loss_difference']:.1e} apart")


if __name__ == "__main__":
    main()
