"""Two processes on one GPU, over CUDA IPC: the bits of the virtual group, and a model through mok_hf."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.kernel.layers import Problem, assert_close
from tests.models.compare import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(150)]
# Transformers and Accelerate pick the device by the local rank: both ranks have the same.
ONE_GPU = {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "false"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"macrobatch_size": 384, "minibatch_size": 128}, {"fwd_comm_sms": 16, "bwd_comm_sms": 7}],
    ids=["default", "ring", "comm"],
)
def test_processes_have_the_bits_of_the_virtual_group(settings):
    tokens = [300, 170]
    want = Problem(tokens).results(2, **settings)
    got = run_ranks(2, "tests.gpu.workers:step", tokens, settings, timeout=100, env=ONE_GPU)
    for rank in range(2):
        assert got[rank].keys() == want[rank].keys()
        for name in got[rank]:
            assert torch.equal(got[rank][name], want[rank][name].cpu()), (rank, name)


def test_counts_that_change():
    got = run_ranks(2, "tests.gpu.workers:changing_counts", timeout=100, env=ONE_GPU)
    for i, count in enumerate((51, 3000, 0)):
        oracle = Problem([count, 51], seed=count).oracle()
        for rank, rows in enumerate((slice(0, count), slice(count, count + 51))):
            for name in ("out", "x", "weights", "scale"):
                assert relative_error(got[rank][i][name], oracle[name][rows].cpu()) < 1e-2 or count == 0 == rank
        experts = {n: torch.cat([rank[i][n] for rank in got]).cuda() for n in ("gate_up", "down")}
        assert_close(experts, {n: oracle[n] for n in experts}, 1e-2)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_a_patched_model_matches_the_unpatched_one(kind, checkpoints):
    """Without a shared expert and with a gated one; bf16, EP 2. As close to fp32 as Transformers in bf16 is."""
    path = checkpoints(kind)
    for rank, errors in enumerate(run_ranks(2, "tests.gpu.workers:model", path, 2, timeout=140, env=ONE_GPU)):
        assert any("experts.gate_up_proj" in name for name in errors)
        for name, (error, plain) in errors.items():
            assert error <= 1.5 * plain + 2e-3, f"rank {rank}, {name}: {error:.1e}, unpatched in bf16 {plain:.1e}"
