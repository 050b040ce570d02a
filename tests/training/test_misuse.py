"""What prepare, save_state and load_state refuse, each with its words; in one process, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState

from mok_hf.capabilities import UnsupportedError
from mok_hf.training import load_state, prepare, save_state
from tests.training.workers import Loop


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    """Accelerate keeps its launch in process-wide singletons and environment variables."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_a_replaced_state_is_the_new_one(folder):
    loop = Loop(torch.nn.Linear(3, 3))
    loop.save(folder, step=1)
    loop.save(folder, step=2)
    assert json.loads((folder / "training_state.json").read_text())["progress"] == {"step": 2}
    assert [path.name for path in folder.parent.iterdir()] == ["state"]
    assert loop.load(folder) == {"step": 2}


def test_a_folder_of_something_else_is_kept(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("not a checkpoint")
    with pytest.raises(FileExistsError, match=r"was not written by mok_hf\.save_state: choose another folder"):
        Loop(torch.nn.Linear(3, 3)).save(folder)
    assert (folder / "thesis.txt").exists()


def test_an_incomplete_state_is_refused(folder):
    loop = Loop(torch.nn.Linear(3, 3))
    loop.save(folder)
    (folder / "training_state.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no complete training state \(training_state\.json is missing\)"):
        loop.load(folder)


def test_a_scheduler_on_one_side_only_is_refused(folder):
    loop = Loop(torch.nn.Linear(3, 3))
    loop.save(folder)
    with pytest.raises(ValueError, match="was saved with a scheduler and none was given"):
        load_state(loop.accelerator, folder, loop.model, loop.optimizer)
    save_state(loop.accelerator, folder, loop.model, loop.optimizer)
    with pytest.raises(ValueError, match="was saved without a scheduler and one was given"):
        loop.load(folder)


def test_another_model_is_refused(folder):
    Loop(torch.nn.Linear(3, 3)).save(folder)
    with pytest.raises(ValueError, match=r"misses 2 trained parameters \(0\.bias, \.\.\.\)"):
        Loop(torch.nn.Sequential(torch.nn.Linear(3, 3))).load(folder)
    with pytest.raises(ValueError, match=r"holds 1 tensors that the model lacks \(bias, \.\.\.\)"):
        Loop(torch.nn.Linear(3, 3, bias=False)).load(folder)


def test_accelerates_fsdp_plugin_is_refused():
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(UnsupportedError, match="accelerate's FSDP plugin shards the model a second time"):
        prepare(accelerator, torch.nn.Linear(3, 3))


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_other_sharding_plugins_are_refused(kind):
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=2)
    with pytest.raises(UnsupportedError, match=f"{kind.value} plugin, which would shard the model a second time"):
        prepare(accelerator, torch.nn.Linear(3, 3))


def test_ddp_over_different_experts_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model[0]._is_expert_parallel = True
    with pytest.raises(UnsupportedError, match=r"each rank owns different experts.*or load with ep_size=1"):
        prepare(accelerator, model)
