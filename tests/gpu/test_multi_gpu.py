"""One rank a GPU, over torch symmetric memory: EP 2, 4 and 8, two groups in one world, models, FSDP2, a killed rank.

Each test is skipped where there are fewer GPUs than it has ranks. The groups are NCCL's, as a launcher's are: it also
carries what the ranks tell each other when buffers are made. Only the ranks that outlive one are on gloo, since NCCL
waits for the dead when it is torn down.
"""

import pytest
import torch

from tests.distributed import launch_ranks, run_ranks
from tests.gpu.test_fsdp import SECONDS, check_drift
from tests.gpu.workers import TIMEOUT_S
from tests.kernel.layers import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(200)]
ENV = {"ACCELERATE_USE_CPU": "false"}
NCCL = "nccl"
MIXED = "cpu:gloo,cuda:nccl"
PER_TOKEN = ("out", "x", "weights", "scale")


def need(gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, there are {torch.cuda.device_count()}")


@pytest.mark.parametrize(
    "settings",
    [{}, {"macrobatch_size": 384, "minibatch_size": 128}, {"fwd_comm_sms": 16, "bwd_comm_sms": 7}],
    ids=["default", "ring", "comm"],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bits_of_one_rank_and_of_the_virtual_group(ranks, settings):
    """Output and gradients of tokens are those of EP 1, experts' gradients those of the virtual group."""
    need(ranks)
    tokens = [300, 170, 0, 51, 1, 640, 128, 77][:ranks]
    problem = Problem(tokens)
    alone, virtual = problem.step(1), problem.results(ranks, **settings)
    got = run_ranks(ranks, "tests.gpu.workers:step", tokens, settings, timeout=150, env=ENV, backend=NCCL)
    for name in PER_TOKEN:
        assert torch.equal(torch.cat([rank[name] for rank in got]), alone[name].cpu()), name
    for rank in range(ranks):
        for name in got[rank]:
            assert torch.equal(got[rank][name], virtual[rank][name].cpu()), (rank, name)


@pytest.mark.parametrize("backend", [NCCL, MIXED])
def test_counts_that_change(backend):
    """Buffers grow between calls, and calls of a rank without tokens run among them."""
    need(2)
    got = run_ranks(2, "tests.gpu.workers:changing_counts", timeout=150, env=ENV, backend=backend)
    for i, count in enumerate((51, 3000, 0)):
        want = Problem([count, 51], seed=count).results(2)
        for rank in range(2):
            for name in got[rank][i]:
                assert torch.equal(got[rank][i][name], want[rank][name].cpu()), (count, rank, name)


@pytest.mark.parametrize("ranks", [4, 8])
def test_two_groups_in_one_world(ranks):
    need(ranks)
    tokens = [200, 31, 400, 5][: ranks // 2]
    got = run_ranks(ranks, "tests.gpu.workers:two_groups", tokens, timeout=150, env=ENV, backend=NCCL)
    for group in range(2):
        want = Problem(tokens, seed=group).results(ranks // 2)
        for rank, result in enumerate(got[group * ranks // 2 : (group + 1) * ranks // 2]):
            for name in result:
                assert torch.equal(result[name], want[rank][name].cpu()), (group, rank, name)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_patched_model_matches_the_unpatched_one(kind, ranks, checkpoints):
    need(ranks)
    path = checkpoints(kind)
    results = run_ranks(ranks, "tests.gpu.workers:model", path, ranks, timeout=180, env=ENV, backend=NCCL)
    for rank, errors in enumerate(results):
        for name, (error, plain) in errors.items():
            assert error <= 1.5 * plain + 2e-3, f"rank {rank}, {name}: {error:.1e}, unpatched in bf16 {plain:.1e}"


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_drift_apart_over_nccl(ranks, checkpoints):
    """NCCL's kernels wait on SMs beside those of our layers (test_fsdp.py)."""
    need(ranks)
    check_drift(checkpoints, ranks, "nccl", {})


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_killed_rank_is_named_by_all_others(ranks, where):
    need(ranks)
    finished = launch_ranks(ranks, "tests.gpu.workers:dies", where, timeout=150, env=ENV)
    assert finished[1].returncode == -9
    for rank in {*range(ranks)} - {1}:
        assert finished[rank].returncode == 0, finished[rank].stderr
        report = finished[rank].result
        assert report["rank"] == 1 and report["phase"].startswith(where), report
        assert report["nan"] and report["seconds"] < TIMEOUT_S + 3 and report["poisoned"] == 2, report
        assert "rank 1" in finished[rank].stderr, "the watchdog wrote it"
