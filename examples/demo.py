"""Fine-tune four small mixture-of-experts checkpoints on this machine's CPU, and check them against Transformers.

For each family: write a checkpoint in the Hugging Face per-expert format, fine-tune it with `examples/finetune.py` in
two processes that share the experts, once with the fused kernel and once unpatched on Transformers' own expert
parallelism, on the same batches of real text. Fails if any step's loss differs by more than 1e-4 relative, or if the
loss does not fall.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

FINETUNE = Path(__file__).with_name("finetune.py")
RANKS = 2
# A router's near tie that rounds the other way sends a token to another expert, and two right runs part. At this rate,
# and with embeddings that stand out from one expert's output as in a trained model, relative noise of 1e-5 in every
# router moves no loss by more than 1e-5; at 5e-4 and embeddings of 0.04, rounding alone moved Qwen3.5's by 1e-3.
LEARNING_RATE = 1e-4
EMBEDDING_STD = 0.5
TOLERANCE = 1e-4  # relative difference of a step's loss between the two implementations, fp32

COMMON = {
    "vocab_size": 384,  # byte ids, as ByT5 has them
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
# The first layer is dense and one shared expert runs beside the 16 routed ones.
SIGMOID_ROUTED = {
    **COMMON,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT_ATTENTION = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
DEEPSEEK_V3 = {**SIGMOID_ROUTED, **LATENT_ATTENTION, "n_group": 4, "topk_group": 2}


@dataclass(frozen=True)
class Family:
    """A checkpoint of the demo: its name in the table, `model_type`, config keywords, the class that loads it."""

    name: str
    model_type: str
    config: dict[str, Any]
    model_class: str = "AutoModelForCausalLM"


FAMILIES = {
    "qwen3_5_moe": Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {
            **COMMON,
            "num_experts": 16,
            "shared_expert_intermediate_size": 128,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "deepseek_v3": Family("DeepSeek-V3", "deepseek_v3", DEEPSEEK_V3),
    "glm4_moe": Family("GLM-4-MoE", "glm4_moe", {**SIGMOID_ROUTED, "head_dim": 64}),
    "kimi_k25": Family(
        "Kimi K2.5",
        "kimi_k25",
        {
            "text_config": {"model_type": "deepseek_v3", **DEEPSEEK_V3, "n_group": 1, "topk_group": 1},
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 2,
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 64,
            "image_token_id": 380,
            "video_token_id": 381,
            "tie_word_embeddings": False,
        },
        "AutoModelForImageTextToText",
    ),
}


@dataclass(frozen=True)
class Run:
    """What one fine-tune wrote: the loss of each step, and its summary (`layers_patched`, `kernel`, `backend`)."""

    losses: list[float]
    summary: dict[str, Any]


class RunFailed(RuntimeError):
    """A fine-tune ended with an error; carries the end of its output."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--max_steps", type=int, default=25)
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output"))
    args = parser.parse_args(argv)

    console = Console()
    console.print(
        f"Fine-tuning {len(args.families)} checkpoints, {args.max_steps} steps each in {RANKS} processes on this CPU: "
        "first with the fused kernel, then with Transformers' own expert parallelism on the same data."
    )
    started = time.perf_counter()
    results = []
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    try:
        with Progress(*columns, console=console) as progress:
            for key in args.families:
                results.append(compare(FAMILIES[key], args.output_dir / key, args.max_steps, progress))
    except RunFailed as error:
        console.print(str(error), style="red", markup=False)
        return 1

    console.print(as_table(results))
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    failures = [f"{result['family']}: {failure}" for result in results for failure in failures_of(result)]
    for failure in failures:
        console.print(failure, style="red", markup=False)
    if not failures:
        console.print(f"All {len(results)} agree within {TOLERANCE:.0e} ({time.perf_counter() - started:.0f} s).")
    return 1 if failures else 0


def compare(family: Family, folder: Path, max_steps: int, progress: Progress) -> dict[str, Any]:
    """Write the family's checkpoint, fine-tune it both ways; a row of the table, with every step's losses."""
    shutil.rmtree(folder, ignore_errors=True)
    tasks = {
        name: progress.add_task(f"{family.name} {name}", total=max_steps, start=False, status="waiting")
        for name in ("mok", "native")
    }
    write_checkpoint(family, folder / "checkpoint")
    runs = {name: finetune(family, folder, name, max_steps, progress, task) for name, task in tasks.items()}
    mok, native = runs["mok"], runs["native"]
    return {
        "family": family.name,
        "layers_patched": mok.summary["layers_patched"],
        "kernel": mok.summary["kernel"],
        "backend": mok.summary["backend"],
        "losses": mok.losses,
        "native_losses": native.losses,
    }


def write_checkpoint(family: Family, folder: Path) -> None:
    """A randomly initialised fp32 checkpoint with one tensor per expert and projection, as published ones have."""
    import torch
    import transformers

    from mok_hf.conversions import register_conversions

    register_conversions()  # saves Kimi-K2.5 under its published names
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    model = getattr(transformers, family.model_class).from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    model.save_pretrained(folder)


def finetune(family: Family, folder: Path, name: str, max_steps: int, progress: Progress, task: TaskID) -> Run:
    """Run `examples/finetune.py` in `RANKS` processes, following its log with a progress bar.

    Raises:
        RunFailed: the script ended with an error or wrote fewer losses than steps.
    """
    output = folder / name
    output.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options = {
        "model": folder / "checkpoint",
        "model_class": family.model_class,
        "tokenizer": "bytes",
        "implementation": name,
        "ep_size": RANKS,
        "seq_len": 128,
        "learning_rate": LEARNING_RATE,
        "num_warmup_steps": 5,
        "max_steps": max_steps,
        "output_dir": output,
    }
    command.append(str(FINETUNE))
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")

    progress.start_task(task)
    progress.update(task, status="loading")
    with open(output / "output.txt", "wb") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            while True:
                try:
                    process.wait(timeout=0.3)
                except subprocess.TimeoutExpired:
                    pass
                if losses := read_losses(output / "log.jsonl"):
                    progress.update(task, completed=len(losses), status=f"loss {losses[-1]:.4f}")
                if process.returncode is not None:
                    break
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    progress.stop_task(task)
    if losses and not progress.console.is_terminal:
        progress.console.print(f"{family.name} {name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if process.returncode != 0 or len(losses) != max_steps:
        # What follows " failed (exitcode" is the launcher's own account, without the cause.
        text = (output / "output.txt").read_text(errors="replace").partition(" failed (exitcode")[0]
        raise RunFailed(
            "\n".join(text.splitlines()[-25:-1])
            + f"\n{family.name} {name}: exit status {process.returncode}, {len(losses)} of {max_steps} steps; "
            f"all output is in {output / 'output.txt'}"
        )
    return Run(losses, json.loads((output / "summary.json").read_text()))


def read_losses(log: Path) -> list[float]:
    """The losses in a log that may still be written to: a last line without its newline is left for later."""
    if not log.exists():
        return []
    return [json.loads(line)["loss"] for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def worst_difference(result: dict[str, Any]) -> float:
    """The largest relative difference of a step's loss between the two implementations; NaN if any is."""
    pairs = zip(result["losses"], result["native_losses"], strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def failures_of(result: dict[str, Any]) -> list[str]:
    """What is wrong with a family's result, in words; empty if nothing is."""
    failures = []
    difference = worst_difference(result)
    if not difference <= TOLERANCE:  # also catches NaN
        failures.append(f"a loss differs from native by {difference:.1e}, more than {TOLERANCE:.0e} relative")
    if not result["losses"][-1] < result["losses"][0]:
        failures.append(f"the loss does not fall: first {result['losses'][0]:.4f}, last {result['losses'][-1]:.4f}")
    if not result["layers_patched"]:
        failures.append("no layer was patched")
    return failures


def as_table(results: list[dict[str, Any]]) -> Table:
    kernels = sorted({result["kernel"] for result in results})
    table = Table(title=f"{RANKS}-way expert parallelism on the CPU", caption=f"kernel build: {', '.join(kernels)}")
    table.add_column("family", no_wrap=True)
    table.add_column("layers patched", justify="right")
    table.add_column("kernel")
    for heading in ("first loss", "last loss", "native last loss", "difference"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result["family"],
            str(result["layers_patched"]),
            f"MoK {result['backend']}",
            f"{result['losses'][0]:.4f}",
            f"{result['losses'][-1]:.4f}",
            f"{result['native_losses'][-1]:.4f}",
            f"{worst_difference(result):.1e}",
            style="red" if failures_of(result) else None,
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
