"""Parity at EP 2 and 4 in real processes, every model type, against native expert parallelism; and checkpoints.

All model types share one launch per world size: starting processes costs more than running tiny models.
"""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import KINDS
from tests.distributed import run_ranks
from tests.models.workers import original_state, unequal
from tests.models.ranks import patched

pytestmark = pytest.mark.timeout(600)
# Four ranks at EP 2: two groups, each expert held twice and its gradient summed over both.
TWO_GROUPS = ["deepseek_v3", "qwen3_next", "deepseek_v4"]


@pytest.fixture(scope="module")
def root(checkpoints):
    return [checkpoints(kind) for kind in KINDS][0].parent


@pytest.fixture(scope="module")
def two_ranks(root):
    return run_ranks(2, "tests.models.workers:parity", root, list(KINDS), 2, timeout=400)


@pytest.fixture(scope="module")
def four_ranks(root):
    return run_ranks(4, "tests.models.workers:parity", root, list(KINDS), 4, timeout=550)


@pytest.fixture(scope="module")
def two_groups(root):
    return run_ranks(4, "tests.models.workers:parity", root, TWO_GROUPS, 2, timeout=200)


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    """What two ranks saved, and what they found."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, "tests.models.workers:save_zero_reload", root, list(KINDS), folder, 2, timeout=400)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_match_native_expert_parallelism(kind, two_ranks):
    assert [rank[kind]["beyond"] for rank in two_ranks] == [{}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_match_native_expert_parallelism(kind, four_ranks):
    assert [rank[kind]["beyond"] for rank in four_ranks] == [{}, {}, {}, {}]


@pytest.mark.parametrize("kind", TWO_GROUPS)
def test_two_groups_of_two_ranks_match_native_expert_parallelism(kind, two_groups):
    assert [rank[kind]["beyond"] for rank in two_groups] == [{}, {}, {}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_two_ranks_has_the_same_tensors_and_names(kind, saved):
    """After zeroing the model the same shards come back, and the files equal the original's, name by name."""
    assert [rank[kind] for rank in saved[1]] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_two_ranks_loads_in_one_process(kind, saved, root):
    state = dict(patched(kind, saved[0] / kind, dtype=torch.float32).state_dict())
    assert unequal(state, original_state(kind, root)) == []


def test_saved_by_two_ranks_loads_on_four(saved, root):
    for rank in run_ranks(4, "tests.models.workers:reload", root, list(KINDS), saved[0], 4, timeout=400):
        assert rank == {kind: [] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_one_process_has_the_same_tensors_and_names(kind, root, tmp_path):
    from tests.models.workers import read

    patched(kind, root / kind).save_pretrained(tmp_path)
    assert unequal(read(tmp_path), read(root / kind)) == []
