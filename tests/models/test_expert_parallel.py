"""Parity at EP 2 and 4 in real processes, every model type, against native expert parallelism; and checkpoints.

All model types share one launch per world size: starting processes costs more than running tiny models.
"""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import KINDS
from tests.distributed import run_ranks
from tests.models.ranks import patched
from tests.models.workers import original_state, read, unequal

pytestmark = pytest.mark.timeout(600)
WORKERS = "tests.models.workers"
# Four ranks at EP 2: two groups, each expert held twice and its gradient summed over both.
TWO_GROUPS = ["deepseek_v3", "qwen3_next", "deepseek_v4"]
# Two ranks at EP 1: FSDP shards the experts too, and each rank gathers all of them.
WITHOUT_EP = ["deepseek_v3", "qwen3_next", "deepseek_v4", "kimi_linear", "glm5_next", "qwen3_omni_moe_talker"]
UNNORMALISED = [f"{kind}@unnormalised" for kind in ("qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe")]


@pytest.fixture(scope="module")
def root(checkpoints):
    """Folder of all checkpoints, built."""
    for variant in UNNORMALISED:
        checkpoints(variant.partition("@")[0], variant, norm_topk_prob=False)
    return {checkpoints(kind).parent for kind in KINDS}.pop()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder that two ranks save into."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two_ranks(root, saved):
    return run_ranks(2, f"{WORKERS}:two_ranks", root, list(KINDS), UNNORMALISED, WITHOUT_EP, saved, timeout=500)


@pytest.fixture(scope="module")
def four_ranks(root, saved, two_ranks):
    return run_ranks(4, f"{WORKERS}:four_ranks", root, list(KINDS), TWO_GROUPS, saved, timeout=580)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_match_native_expert_parallelism(kind, two_ranks):
    assert [rank["parity"][kind] for rank in two_ranks] == [{}, {}]


@pytest.mark.parametrize("variant", UNNORMALISED)
def test_unnormalised_routing_weights_on_two_ranks(variant, two_ranks):
    assert [rank["parity"][variant] for rank in two_ranks] == [{}, {}]


@pytest.mark.parametrize("kind", WITHOUT_EP)
def test_two_ranks_without_expert_parallelism_match_fsdp(kind, two_ranks):
    assert [rank["without_ep"][kind] for rank in two_ranks] == [{}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_match_native_expert_parallelism(kind, four_ranks):
    assert [rank["parity"][kind] for rank in four_ranks] == [{}, {}, {}, {}]


@pytest.mark.parametrize("kind", TWO_GROUPS)
def test_two_groups_of_two_ranks_match_native_expert_parallelism(kind, four_ranks):
    assert [rank["groups"][kind] for rank in four_ranks] == [{}, {}, {}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_two_ranks_has_the_same_tensors_and_names(kind, two_ranks):
    """After zeroing the model the same shards come back, and the files equal the original's, name by name."""
    assert [rank["saved"][kind] for rank in two_ranks] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_two_ranks_loads_in_one_process(kind, two_ranks, saved, root):
    state = dict(patched(kind, saved / kind, dtype=torch.float32).state_dict())
    assert unequal(state, original_state(kind, root)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_two_ranks_loads_on_four(kind, four_ranks):
    assert [rank["reloaded"][kind] for rank in four_ranks] == [[], [], [], []]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_one_process_has_the_same_tensors_and_names(kind, root, tmp_path):
    patched(kind, root / kind).save_pretrained(tmp_path)
    assert unequal(read(tmp_path), read(root / kind)) == []
