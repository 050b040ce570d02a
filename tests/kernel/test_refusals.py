"""Inputs the kernel can not serve are refused before launch, with the value seen, the limit and the way forward."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from tests.kernel.layers import Problem, in_ranks, load

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "D": (
        {"x": torch.zeros(4, 100), "gate_up_proj": torch.zeros(8, 384, 100), "down_proj": torch.zeros(8, 100, 192)},
        "D is 100.*multiple of 64",
    ),
    "I": ({"gate_up_proj": torch.zeros(8, 64, 128), "down_proj": torch.zeros(8, 128, 32)}, "I is 32.*multiple of 64"),
    "S": ({"shared": (torch.zeros(96, 128), torch.zeros(96, 128), torch.zeros(128, 96))}, "S is 96.*multiple of 64"),
    "K": (
        {"top_k_index": torch.zeros(4, 17, dtype=torch.long), "top_k_weights": torch.zeros(4, 17)},
        "K is 17.*1 to 16",
    ),
    "dtype": ({"x": torch.zeros(4, 128, dtype=torch.float16)}, "float16.*float32 and bfloat16"),
    "mixed dtypes": (
        {"down_proj": torch.zeros(8, 128, 192, dtype=torch.bfloat16)},
        "down_proj is torch.bfloat16 and x is torch.float32",
    ),
    "x shape": ({"x": torch.zeros(2, 2, 128)}, r"\[N, D\].*flatten"),
    "ids dtype": ({"top_k_index": torch.zeros(4, 3)}, "int32 or int64"),
    "weights shape": ({"top_k_weights": torch.zeros(4, 2)}, "top_k_weights.*shape"),
    "down shape": ({"down_proj": torch.zeros(8, 192, 128)}, r"down_proj has shape.*\[8, 128, 192\]"),
    "gate_up shape": ({"gate_up_proj": torch.zeros(8, 384, 64)}, r"gate_up_proj has shape.*\[L, 2I, 128\]"),
    "scale without expert": ({"shared_scale": torch.ones(4)}, "no shared expert"),
    "scale length": (
        {"shared": (torch.zeros(64, 128), torch.zeros(64, 128), torch.zeros(128, 64)), "shared_scale": torch.ones(3)},
        "3 values for 4 tokens",
    ),
    "minibatch": ({"minibatch_size": 100}, "minibatch_size=100.*multiple of 128"),
    "macrobatch": ({"macrobatch_size": 0}, "macrobatch_size=0.*multiple of 128"),
    "comm": ({"fwd_comm_sms": 0}, "fwd_comm_sms=0.*1 to 64"),
    "precision": ({"precision": "mxfp8"}, "precision='mxfp8'"),
    "max tokens": ({"max_tokens_per_rank": 3}, "rank 0 has 4 tokens, more than max_tokens_per_rank=3"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    changed, words = CASES[name]
    arguments = {
        "x": torch.zeros(4, 128),
        "top_k_index": torch.zeros(4, 3, dtype=torch.long),
        "top_k_weights": torch.zeros(4, 3),
        "gate_up_proj": torch.zeros(8, 384, 128),
        "down_proj": torch.zeros(8, 128, 192),
    }
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        load().moe(**(arguments | changed), workspace=load().Workspace())


def test_one_rank_refuses_the_others_do_not_wait() -> None:
    """Too many tokens on rank 1: it says so, and rank 0 learns who left long before its timeout."""
    mok, problem = load(), Problem([10, 20], shared_width=0)
    group, p, errors = mok.VirtualGroup(2), problem.parts, {}

    def rank_step(rank: int) -> None:
        rows, owned = (slice(0, 10), slice(10, 30))[rank], slice(rank * 4, rank * 4 + 4)
        workspace = mok.Workspace(group, rank=rank, timeout_s=100)
        try:
            mok.moe(
                p["x"][rows],
                problem.ids[rows],
                p["weights"][rows],
                p["gate_up"][owned],
                p["down"][owned],
                workspace=workspace,
                max_tokens_per_rank=16,
            )
        except (ValueError, mok.MoKTimeoutError) as error:
            errors[rank] = error

    in_ranks(2, rank_step)
    assert isinstance(errors[1], ValueError) and "EP rank 1 has 20 tokens" in str(errors[1])
    assert isinstance(errors[0], mok.MoKTimeoutError) and "EP rank 1 refused its input" in str(errors[0])


def test_layer_with_more_tokens_than_agreed() -> None:
    mok, problem = load(), Problem([300, 300], shared_width=0)
    group, p, errors = mok.VirtualGroup(2), problem.parts, {}

    def rank_step(rank: int) -> None:
        owned = slice(rank * 4, rank * 4 + 4)
        workspace = mok.Workspace(group, rank=rank, timeout_s=100)

        def layer(count: int) -> None:
            mok.moe(
                p["x"][:count],
                problem.ids[:count],
                p["weights"][:count],
                p["gate_up"][owned],
                p["down"][owned],
                workspace=workspace,
            )

        workspace.begin_forward()
        layer(50)
        try:
            layer(300 if rank else 40)
        except (ValueError, mok.MoKTimeoutError) as error:
            errors[rank] = error

    in_ranks(2, rank_step)
    assert "has 300 tokens in this layer" in str(errors[1])
    assert "agreed on 50, which leaves room for 64" in str(errors[1])
    assert "EP rank 1 refused" in str(errors[0])


def test_what_another_rank_gave_up_waiting_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device knows only that a peer stopped the call; the workspace asks the host's pages what for."""
    mok, problem, own = load(), Problem([40]), load().Workspace()
    functional = sys.modules[mok.moe.__module__]
    named, unnamed = (mok.MoKTimeoutError(*who, "forward, after combine", 1.0, 0) for who in ((1, 2), (None, None)))

    def check() -> None:
        raise named

    def stopped(*_: object) -> None:
        raise RuntimeError("MoKTimeout origin=-1 waited=-1 phase=told by a peer")

    class Stopped:
        forward = staticmethod(stopped)

        def __getattr__(self, name: str) -> object:
            return getattr(ops, name)

    ops = functional.ops
    args, keywords = problem.arguments({n: problem.parts[n] for n in problem.names()}, problem.ids)
    mok.moe(*args, **keywords, workspace=own)
    monkeypatch.setattr(own, "check", check)
    monkeypatch.setattr(functional, "ops", Stopped())
    with pytest.raises(mok.MoKTimeoutError, match=r"EP rank 2 waited .* for EP rank 1"):
        mok.moe(*args, **keywords, workspace=own)
    own._error = unnamed
    with pytest.raises(mok.MoKTimeoutError, match=r"EP rank 2 waited .* for EP rank 1"):
        mok.moe(*args, **keywords, workspace=own)
