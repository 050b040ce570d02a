"""MoKConfig: automatic by default, and every invalid value is named with a valid one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from mok_hf import MoKConfig


def test_defaults_are_automatic_and_reach_the_kernel_as_nothing():
    assert MoKConfig().kernel_keywords() == {}
    assert all(value is None for value in dataclasses.asdict(MoKConfig()).values())


def test_set_fields_are_the_keywords():
    config = MoKConfig(minibatch_size=256, fwd_comm_sms=0, precision="bf16", timeout_s=30)
    assert config.kernel_keywords() == {"minibatch_size": 256, "fwd_comm_sms": 0, "precision": "bf16", "timeout_s": 30}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.minibatch_size = 128


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"minibatch_size": 200}, r"minibatch_size=200 .* multiple of 128 rows: use 256"),
        ({"minibatch_size": 0}, r"minibatch_size=0 .* use 128"),
        ({"macrobatch_size": True}, r"macrobatch_size=True .* multiple of 128"),
        ({"macrobatch_size": 1.5}, r"macrobatch_size=1\.5 .* multiple of 128"),
        ({"fwd_comm_sms": -1}, r"fwd_comm_sms=-1 must be an integer >= 0"),
        ({"bwd_comm_sms": "2"}, r"bwd_comm_sms='2' must be an integer >= 0"),
        ({"max_tokens_per_rank": 0}, r"max_tokens_per_rank=0 must be an integer >= 1"),
        ({"precision": "fp16"}, r"precision='fp16' is not one of auto, fp32, bf16"),
        ({"timeout_s": 0}, r"timeout_s=0 must be a number of seconds > 0"),
        ({"fuse_wgrad_accumulation": "grad"}, r"fuse_wgrad_accumulation='grad' must be True or False"),
        ({"fuse_wgrad_accumulation": 1}, r"fuse_wgrad_accumulation=1 must be True or False"),
    ],
)
def test_invalid_values_are_named(values, words):
    with pytest.raises(ValueError, match=words):
        MoKConfig(**values)


def test_config_needs_only_the_standard_library():
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('c', sys.argv[1]);"
        "c = importlib.util.module_from_spec(spec); sys.modules['c'] = c; spec.loader.exec_module(c); c.MoKConfig();"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    file = sys.modules[MoKConfig.__module__].__file__
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)
