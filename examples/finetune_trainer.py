"""Fine-tune a mixture-of-experts language model with expert parallelism, with the Trainer.

    accelerate launch --multi_gpu --num_processes 8 examples/finetune_trainer.py \\
        --model path/to/checkpoint --ep_size 8 --output_dir out --max_steps 100
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/finetune_trainer.py \\
        --model path/to/checkpoint --ep_size 2 --output_dir out --max_steps 100 --use_cpu

What differs from a plain Trainer script is the one line that loads the model. Every other option is one of
`TrainingArguments`. Trainer's own checkpoints are not resumable here, so none are written unless asked for.
"""

import atexit
import os
import sys
from dataclasses import dataclass, field

import torch
import transformers
from transformers import AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed

import mok_hf


@dataclass
class Arguments:
    model: str = field(metadata={"help": "checkpoint: a folder or a name on the Hub"})
    model_class: str = field(default="AutoModelForCausalLM", metadata={"help": "class of transformers that loads it"})
    ep_size: int = field(default=1, metadata={"help": "ranks that share the experts of a layer"})
    dataset: str | None = field(default=None, metadata={"help": "a text file; default: Python's language reference"})
    tokenizer: str | None = field(default=None, metadata={"help": "default: the checkpoint's own; bytes: byte ids"})
    seq_len: int = 512


def load_sequences(args: Arguments) -> list[dict[str, torch.Tensor]]:
    if args.dataset:
        with open(args.dataset, errors="replace") as file:
            text = file.read()
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    if args.tokenizer == "bytes":
        ids = torch.tensor(list(text.encode())) + 3
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = len(ids) // args.seq_len
    return [{"input_ids": row, "labels": row} for row in ids[: rows * args.seq_len].view(rows, args.seq_len)]


def main() -> None:
    args, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model_class = getattr(transformers, args.model_class)
    model = mok_hf.from_pretrained(model_class, args.model, ep_size=args.ep_size)
    trainer = Trainer(model=model, args=training_args, train_dataset=load_sequences(args))
    trainer.train()
    trainer.save_model()


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
