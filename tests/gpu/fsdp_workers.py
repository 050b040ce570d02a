"""What the ranks of test_fsdp.py and its counterpart on several GPUs run: a sharded model whose ranks drift apart."""

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
MOST_TOKENS = 200
DELAYS_PER_STEP = 2
LONGEST_MS = 50.0
CYCLES_PER_MS = 1_700_000  # of an H200; a delay need not be exact
KINDS = ("host", "compute stream", "all-gather stream")


@dataclass
class Delay:
    """One rank is late: `where` counts the layers of a forward, then those of the backward."""

    where: int
    kind: str
    ms: float


def delays(step: int, rank: int, layers: int) -> list[Delay]:
    draw = random.Random(1000 * step + rank)
    return [
        Delay(draw.randrange(2 * layers), draw.choice(KINDS), draw.uniform(0, LONGEST_MS))
        for _ in range(DELAYS_PER_STEP)
    ]


class Run:
    """Trains a sharded model for some steps; keeps what tells whether two runs did the same."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.layers = model, list(model.model.layers)
        self.start = [local(p).clone() for p in model.parameters()]
        self.planned: list[Delay] = []
        self.served = 0
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, args, index=index: self._entered(index, args[0]))

    def _entered(self, index: int, hidden: torch.Tensor) -> None:
        self._wait(index)
        hidden.register_hook(lambda _: self._wait(len(self.layers) + index))

    def _wait(self, where: int) -> None:
        for delay in self.planned:
            if delay.where == where:
                self.served += 1
                self._be_late(delay)

    def _be_late(self, delay: Delay) -> None:
        if delay.kind == "host" or self.start[0].device.type == "cpu":
            time.sleep(delay.ms / 1e3)
            return
        stream = torch.cuda.current_stream()
        if delay.kind == "all-gather stream":
            stream = self.layers[0]._get_fsdp_state()._comm_ctx.all_gather_stream
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay.ms * CYCLES_PER_MS))

    def __call__(self, steps: int, late: bool) -> dict:
        """From the first weights on. All of it on the CPU: losses, sums over every gradient's bits, weights at the end.

        Without a look at the device while it trains: the host runs as far ahead as the collectives let it.
        """
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.start, strict=True):
                local(parameter).copy_(value)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, foreach=False)
        rank, losses, sums = dist.get_rank(), [], []
        self.served, begin = 0, time.monotonic()
        for step in range(steps):
            self.planned = delays(step, rank, len(self.layers)) if late else []
            loss = self.model(input_ids=self._batch(step, rank)).logits.float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            sums.append(torch.stack([bits(local(p.grad)) for p in self.model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        results = {"losses": torch.stack(losses).cpu(), "gradients": torch.stack(sums).cpu()}
        results |= {name: local(p).detach().cpu().clone() for name, p in self.model.named_parameters()}
        return {"tensors": results, "seconds": time.monotonic() - begin, "delays": self.served}

    def _batch(self, step: int, rank: int) -> torch.Tensor:
        length = random.Random(f"{step} {rank}").choice((1, 17, 64, 130, MOST_TOKENS))
        ids = torch.randint(3, 150, (1, length), generator=torch.Generator().manual_seed(2 * step + rank))
        return ids.to(self.start[0].device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the bits, for one that is compared for equality."""
    return tensor.contiguous().view(torch.int16).sum(dtype=torch.int64)


def prefetch(model: torch.nn.Module) -> None:
    """Each layer's parameters and experts are gathered during the layer before, forwards and backwards."""
    layers = list(model.model.layers)
    for here, after in itertools.pairwise(layers):
        here.set_modules_to_forward_prefetch([after, after.mlp.experts])
        after.set_modules_to_backward_prefetch([here, here.mlp.experts])


@contextmanager
def deterministic() -> Iterator[None]:
    """What is not ours gives the same bits every time."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def drift(path: str, steps: int, backend: str) -> dict[str, dict]:
    """The same steps in step, with ranks that drift apart, and once more where the hosts agree on nothing."""
    from transformers import AutoModelForCausalLM

    import mok_hf

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(backend, device_id=device, timeout=timedelta(seconds=4 * TIMEOUT_S))
    automatic = mok_hf.MoKConfig(timeout_s=TIMEOUT_S)
    bounded = mok_hf.MoKConfig(timeout_s=TIMEOUT_S, max_tokens_per_rank=MOST_TOKENS)
    model = mok_hf.from_pretrained(
        AutoModelForCausalLM,
        path,
        ep_size=dist.get_world_size(),
        dtype=torch.bfloat16,
        attn_implementation="eager",
        mok_config=automatic,
    )
    prefetch(model)
    run, results = Run(model), {}
    with deterministic():
        results["in step"] = run(steps, late=False)
        results["apart"] = run(steps, late=True)
        mok_hf.patch_model(model, mok_config=bounded)
        results["apart, without agreement"] = run(steps, late=True)
    return results
