"""Fine-tune a mixture-of-experts language model with expert parallelism, in a bare Accelerate loop.

On 8 GPUs, and with 2 processes on a CPU:

    accelerate launch --num_processes 8 examples/finetune.py --model Qwen/Qwen3-30B-A3B --ep_size 8
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/finetune.py --model path/to/checkpoint --ep_size 2

What differs from a plain Accelerate script: `mok_hf.from_pretrained` loads the model, and `mok_hf.prepare`,
`mok_hf.save_state` and `mok_hf.load_state` replace the Accelerator's methods of those names. `--implementation native`
runs the same loop on Transformers' own expert parallelism, to compare with.
"""

import argparse
import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed, tqdm
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, get_scheduler
from transformers.distributed import DistributedConfig

import mok_hf


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint: a folder or a name on the Hub")
    parser.add_argument("--model_class", default="AutoModelForCausalLM", help="class of transformers that loads it")
    parser.add_argument("--tokenizer", help="default: the checkpoint's own; `bytes`: byte ids as ByT5 has them")
    parser.add_argument(
        "--dataset", nargs="*", type=Path, default=[], help="text files; default: Python's own language reference"
    )
    parser.add_argument("--implementation", choices=["mok", "native"], default="mok")
    parser.add_argument("--ep_size", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--dtype", default="auto", help="of the parameters: auto, float32, bfloat16")
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--lora", action="store_true", help="train rank-8 adapters on the attention projections only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("finetune-output"))
    parser.add_argument("--checkpointing_steps", type=int, help="save the training state every so many steps")
    parser.add_argument("--resume_from_checkpoint", type=Path, help="a folder that --checkpointing_steps wrote")
    return parser.parse_args()


def load_model(args: argparse.Namespace, accelerator: Accelerator) -> torch.nn.Module:
    auto_class = getattr(transformers, args.model_class)
    if args.implementation == "mok":
        model = mok_hf.from_pretrained(auto_class, args.model, ep_size=args.ep_size, dtype=args.dtype)
        accelerator.print(model._mok_report)
    else:
        config = DistributedConfig(fsdp_size=accelerator.num_processes, ep_size=args.ep_size)
        model = auto_class.from_pretrained(args.model, distributed_config=config, dtype=args.dtype)
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=8, target_modules=r".*attn.*proj\w*"))
    return model.train()


def load_sequences(args: argparse.Namespace) -> TensorDataset:
    """The texts as token ids, cut into rows of `seq_len`."""
    if args.dataset:
        text = "\n\n".join(path.read_text(errors="replace") for path in args.dataset)
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    if args.tokenizer == "bytes":
        ids = torch.tensor(list(text.encode())) + 3  # 0, 1, 2 are padding, end of sequence and unknown
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = len(ids) // args.seq_len
    return TensorDataset(ids[: rows * args.seq_len].view(rows, args.seq_len))


def endless(loader: DataLoader, accelerator: Accelerator, first_step: int) -> Iterator[torch.Tensor]:
    """Batches from `first_step` on, epoch after epoch; the same ones whether or not training was interrupted."""
    epoch, skipped = divmod(first_step, len(loader))
    while True:
        loader.set_epoch(epoch)
        for index, (input_ids,) in enumerate(loader):
            if index >= skipped:
                yield input_ids
        epoch, skipped = epoch + 1, 0


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed))
    set_seed(args.seed)

    model = load_model(args, accelerator)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, fused=True)
    loader = DataLoader(load_sequences(args), batch_size=args.per_device_train_batch_size, shuffle=True, drop_last=True)
    # The scheduler steps once a process in an Accelerate loop.
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_steps * accelerator.num_processes,
    )
    model, optimizer, loader, scheduler = mok_hf.prepare(accelerator, model, optimizer, loader, scheduler)

    first_step = 0
    if args.resume_from_checkpoint:
        progress = mok_hf.load_state(accelerator, args.resume_from_checkpoint, model, optimizer, scheduler)
        first_step = progress["step"]

    args.output_dir.mkdir(parents=True, exist_ok=True)
    log = None
    if accelerator.is_main_process:
        log = open(args.output_dir / "log.jsonl", "a" if first_step else "w", buffering=1)  # one line a write

    bar = tqdm(total=args.max_steps, initial=first_step, desc=args.implementation, unit="step")
    batches = endless(loader, accelerator, first_step)
    for step in range(first_step + 1, args.max_steps + 1):
        started = time.perf_counter()
        input_ids = next(batches)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        accelerator.backward(loss)
        grad_norm = accelerator.clip_grad_norm_(trained, args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        mean_loss = accelerator.reduce(loss.detach(), "mean").item()
        if log is not None:
            record = {"step": step, "loss": mean_loss, "grad_norm": float(grad_norm)}
            log.write(json.dumps(record | {"seconds": round(time.perf_counter() - started, 4)}) + "\n")
        bar.set_postfix(loss=f"{mean_loss:.4f}")
        bar.update()
        if args.checkpointing_steps and step % args.checkpointing_steps == 0:
            checkpoint = args.output_dir / f"checkpoint-{step}"
            mok_hf.save_state(accelerator, checkpoint, model, optimizer, scheduler, progress={"step": step})
    bar.close()

    if log is not None:
        report = getattr(model, "_mok_report", None)
        summary = {
            "implementation": args.implementation,
            "layers_patched": len(report.patched) if report else 0,
            "kernel": report.kernel.variant if report else "none",
            "backend": report.kernel.backend if report else "native",
            "last_loss": mean_loss,
        }
        (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    # Every rank calls it: rank 0 gathers the shards and writes the checkpoint in the Hugging Face per-expert format.
    accelerator.unwrap_model(model).save_pretrained(args.output_dir / "model")
    accelerator.end_training()


def leave() -> None:
    """End a process of a gloo job: gloo's threads can abort the interpreter's own teardown (torch 2.13)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    if not torch.cuda.is_available():
        leave()
