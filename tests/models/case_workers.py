"""What the ranks of `test_cases.py` run: inputs on which people saw MoE training go wrong.

Every function is called on all ranks. Results are small: errors, flags and token lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoints import batch
from tests.models.compare import (
    FP32_LIMIT,
    gradients,
    poison_freed_memory,
    relative_error,
    relative_errors,
    step,
    whole,
    worst,
)
from tests.models.ranks import moe_blocks, native, patched, rank_batch
from tests.models.workers import announce, any_rank, beyond_limits, unequal


def run_cases(cases: dict[tuple[str, str], Path]) -> dict[tuple[str, str], Any]:
    """Runs functions of this module in one launch: (name, kind) -> checkpoint; the outcome of each."""
    outcomes = {}
    for (name, kind), path in cases.items():
        announce(f"{name} {kind}")
        outcomes[name, kind] = globals()[name](kind, path)
    return outcomes


def three_steps(kind: str, path: Path) -> tuple[list[float], list[float]]:
    """Losses of three training steps, native and patched, freed memory poisoned before each forward and backward."""
    losses = []
    for load in (native, patched):
        model = load(kind, path, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append(train(model, optimizer, [rank_batch(kind, dist.get_rank(), seed=i) for i in range(3)]))
    return losses[0], losses[1]


def train(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """One optimizer step a batch; the losses."""
    losses = []
    for inputs in batches:
        poison_freed_memory()
        loss = model(**inputs).loss
        poison_freed_memory()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of_equal_batches(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """Gradients when every rank trains on the same batch: their mean is that batch's, whatever the EP size."""
    model = patched(kind, path, dist.get_world_size())
    model(**batch(kind, [13, 7])).loss.backward()
    return gradients(model)


def everything_on_rank_zero(kind: str, path: Path) -> dict[str, Any]:
    """All routes go to experts of rank 0; what rank 1's experts get, in the gradients and through AdamW."""
    outcome: dict[str, Any] = {}
    results = {}
    for name, load in (("native", native), ("patched", patched)):
        model = load(kind, path, 2)
        route_to_first_experts(model)
        results[name] = step(model, rank_batch(kind, dist.get_rank()))
        if name == "native":
            continue
        mine: list[Any] = [p for block in moe_blocks(model) for p in block.experts.parameters()]
        outcome["none"] = [p.grad is None for p in mine]
        outcome["largest"] = [p.grad.to_local().abs().max().item() for p in mine]
        before = [p.to_local().clone() for p in mine]
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        optimizer.step()
        outcome["moved"] = [not torch.equal(p.to_local(), old) for p, old in zip(mine, before, strict=True)]
        outcome["states"] = sorted(sorted(state) for state in optimizer.state.values())
    errors = relative_errors(results["patched"], results["native"])
    # Renormalised over one expert three times, the weights are constant: rounding is all there is to their gradient.
    outcome["worst"] = worst({n: e for n, e in errors.items() if not n.endswith("gate.weight") and "hc" not in n})
    return outcome


def route_to_first_experts(model: Any) -> None:
    """Makes every router pick experts 0 to 3: by the choice bias, or by the table of token ids (expert 0 each time)."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[:4] += 100.0
            if name.endswith("tid2eid"):
                buffer.zero_()


def ragged(kind: str, path: Path) -> list[dict[str, float]]:
    """Patched against native on 5 against 51 tokens, 0 against 7 in the MoE layers, 54 against 2.

    Returns:
        Of each, the tensors outside the limits.
    """
    rank = dist.get_rank()
    models = native(kind, path, 2), patched(kind, path, 2)
    outcome = []
    for lengths, nothing in ((([5], [51]), False), (([4], [7]), True), (([51, 3], [2]), False)):
        batches = [batch(kind, one) for one in lengths]
        results = []
        for model in models:
            model.zero_grad()
            handles = send_nothing(model) if nothing and rank == 0 else []
            results.append(step(model, batches[rank]))
            for handle in handles:
                handle.remove()
        errors = relative_errors(results[1], results[0])
        limits = {name: error for name, error in errors.items() if not error <= FP32_LIMIT}
        outcome.append(limits if nothing else beyond_limits(kind, path, errors, batches))
    return outcome


def send_nothing(model: Any) -> list[Any]:
    """The MoE blocks of this rank see no token (a whole model cannot: Transformers' attention reshapes to -1)."""

    def take(block: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args[0][:, :0], *args[1:]

    def give(block: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        assert output.shape[1] == 0
        return output.sum().expand(args[0].shape[0], 4, args[0].shape[2])

    handles = []
    for block in moe_blocks(model):
        handles += [block.register_forward_pre_hook(take), block.register_forward_hook(give)]
    return handles


def checkpointed(kind: str, path: Path) -> list[bool]:
    """Whether each checkpointing mode gives, bit for bit, the gradients of the run without."""
    inputs = rank_batch(kind, dist.get_rank())
    plain = step(patched(kind, path, 2), inputs)
    equal = []
    for reentrant in (False, True):
        model = patched(kind, path, 2)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        recomputed = step(model, inputs)
        equal.append(not unequal(recomputed, plain))
    return equal


def exact_ties(kind: str, path: Path) -> dict[str, Any]:
    """bf16 routers in which experts tie exactly, with each layer recomputed in backward.

    Returns:
        "equal": whether both checkpointing modes give bit for bit the gradients of the run without; "flipped": whether
        all gradients were finite when the tie fell the other way in rank 0's recomputation only.
    """
    inputs = rank_batch(kind, dist.get_rank())
    plain = step(tied(kind, path), inputs)
    equal = []
    for reentrant in (False, True):
        model = tied(kind, path)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        recomputed = step(model, inputs)
        equal.append(all(torch.equal(recomputed[name], plain[name]) for name in plain))

    model = tied(kind, path)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: dict[Any, int] = {}

    def flip(gate: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        calls[gate] = calls.get(gate, 0) + 1
        if calls[gate] == 1 or dist.get_rank() != 0:
            return None
        logits, weights, ids = output
        return logits, weights, ids ^ 1  # the expert it tied with

    gates = [block.gate for block in moe_blocks(model)]
    for gate in gates:
        gate.register_forward_hook(flip)
    flipped = step(model, inputs)
    recomputed_once = [calls[gate] for gate in gates] == [2] * len(gates)
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in flipped.values())
    return {"equal": equal, "flipped": finite and recomputed_once and flipped.keys() == plain.keys()}


def tied(kind: str, path: Path) -> Any:
    """A patched bf16 model whose experts 2j and 2j+1 always get the same logit."""
    model = patched(kind, path, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        for block in moe_blocks(model):
            weight = block.gate.weight
            pairs = whole(weight).view(-1, 2, weight.shape[-1])
            pairs[:, 1] = pairs[:, 0]
            tied_weight = pairs.view(weight.shape)
            if hasattr(weight, "to_local"):
                rows = weight.to_local().shape[0]
                weight.to_local().copy_(tied_weight[dist.get_rank() * rows :][:rows])
            else:
                weight.copy_(tied_weight)
    return model


def aux_loss(kind: str, path: Path) -> dict[bool | None, Any]:
    """`output_router_logits=True` on padded batches, without and with both checkpointing modes, against native."""
    lengths = [[13, 4], [21, 2]][dist.get_rank()]
    outcome: dict[bool | None, Any] = {}
    for mode in (None, False, True):
        results, losses = [], []
        for load in (native, patched):
            model = load(kind, path, 2)
            if mode is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode})
            poison_freed_memory()
            output = model(**batch(kind, lengths), output_router_logits=True)
            # Times 100: an auxiliary loss that trains nothing must show in the router's gradient.
            (output.loss + 100 * output.aux_loss).backward()
            results.append({name: g for name, g in gradients(model).items() if ".mlp." in name})
            losses.append(output.aux_loss.detach())
        errors = relative_errors(results[1], results[0])
        outcome[mode] = worst(errors), relative_error(losses[1], losses[0]), losses[0].item()
    return outcome


def generate(kind: str, path: Path) -> tuple[list[int], list[int]]:
    """Greedy generation, prompt and answer of another length on each rank; native and patched tokens."""
    rank = dist.get_rank()
    prompt = batch(kind, [[4], [9]][rank])["input_ids"]
    tokens = []
    for load in (native, patched):
        model = load(kind, path, 2).eval()
        length = [7, 3][rank]
        answer = model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False, synced_gpus=True)
        tokens.append(answer[0].tolist())
    return tokens[0], tokens[1]


def mostly_padding(kind: str, path: Path) -> tuple[float, str]:
    """Three quarters of the tokens are padding, all alike, and go to the same experts."""
    lengths = [[48, 6, 4, 2, 2, 2], [30, 2, 2, 2, 2]][dist.get_rank()]
    inputs = batch(kind, lengths)
    assert inputs["attention_mask"].float().mean() <= 0.26
    expected = step(native(kind, path, 2), inputs)
    return worst(relative_errors(step(patched(kind, path, 2), inputs), expected))


def conversions(root: Path, kinds: list[str]) -> dict[str, tuple[str | None, bool, bool]]:
    """What Transformers alone loads wrong under FSDP2.

    Returns:
        Per kind: why patching a model it loaded is refused; whether its weights are wrong; whether ours are.
    """
    from transformers.distributed import DistributedConfig

    from mok_hf.conversions import conversion_problem, register_conversions
    from tests.checkpoints import auto_class
    from tests.models.workers import original_state

    def load(kind: str) -> Any:
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        return auto_class(kind).from_pretrained(root / kind, dtype=torch.float32, distributed_config=config)

    def state(model: Any) -> dict[str, torch.Tensor]:
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}

    alone = {kind: load(kind) for kind in kinds}
    problems = {kind: conversion_problem(model) for kind, model in alone.items()}
    register_conversions()
    outcome = {}
    for kind in kinds:
        right = original_state(kind, root)
        corrected = load(kind)
        assert conversion_problem(corrected) is None
        wrong = bool(unequal(state(alone[kind]), right))
        outcome[kind] = problems[kind], any_rank(wrong), any_rank(bool(unequal(state(corrected), right)))
    return outcome
