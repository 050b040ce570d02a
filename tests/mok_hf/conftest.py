"""Multi-process runs shared by the tests of this folder: starting ranks costs more than what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import run_ranks

# (name, function in workers.py, checkpoints whose paths it takes, further arguments)
RUNS: dict[int, list[tuple[str, str, tuple[str, ...], tuple[Any, ...]]]] = {
    2: [
        # First: it needs a process in which nothing has corrected Transformers' conversions yet.
        ("wrong order", "rows_in_the_wrong_order", ("kimi_linear",), ()),
        ("combinations", "four_combinations", ("qwen2_moe",), ("qwen2_moe", 2)),
        ("switch", "switch", ("qwen2_moe",), ("qwen2_moe",)),
        ("wrapped on one rank", "fails_on_one_rank", ("qwen2_moe",), ()),
        ("error while applying", "fails_while_applying", ("qwen2_moe",), ()),
        ("shared expert", "shared_expert_variants", ("qwen2_moe",), ("qwen2_moe",)),
        ("token counts", "token_count_marks", ("qwen2_moe",), ("qwen2_moe",)),
        ("growing", "growing_and_shrinking", ("qwen2_moe",), ("qwen2_moe",)),
        ("refusals", "refusals_at_two", ("qwen2_moe", "qwen3_moe"), ("qwen2_moe",)),
        ("load at EP 1", "load_and_verify", ("deepseek_v3",), ("deepseek_v3", 1)),
        ("verify catches", "verify_catches", ("deepseek_v3",), (2,)),
        ("missing kernel", "missing_kernel", ("qwen2_moe",), ()),
    ],
    4: [
        ("combinations", "four_combinations", ("deepseek_v3",), ("deepseek_v3", 2)),
        ("load at EP 2", "load_and_verify", ("deepseek_v3",), ("deepseek_v3", 2)),
        ("replicas", "replicated_shards", ("qwen2_moe",), ("qwen2_moe",)),
    ],
}


@pytest.fixture(scope="session")
def ranks(checkpoints) -> Callable[[int, str], list[Any]]:
    """`ranks(2, "switch")` -> what that run returned on each rank. All runs of one size share their processes."""
    done: dict[int, list[dict[str, Any]]] = {}

    def results(world: int, name: str) -> list[Any]:
        if world not in done:
            calls = [
                (name, function, (*(str(checkpoints(kind)) for kind in kinds), *arguments))
                for name, function, kinds, arguments in RUNS[world]
            ]
            done[world] = run_ranks(world, "tests.mok_hf.workers:in_turn", calls, timeout=380)
        return [rank[name] for rank in done[world]]

    return results
