"""`mok_hf.from_pretrained`: what it passes on, what it checks, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM, FineGrainedFP8Config

import mok_hf
from mok_hf.loading import ExpertsNotLoadedError
from mok_hf.verify import VerificationError, verify_loaded
from tests.checkpoints import auto_class, batch
from tests.mok_hf.workers import inputs_of, kernel_calls, relative


@pytest.fixture
def edited(checkpoints, tmp_path):
    """A copy of a checkpoint whose tensors and config pass through the given functions."""

    def edit(kind, tensors=None, config=None) -> Path:
        folder = tmp_path / kind
        shutil.copytree(checkpoints(kind), folder)
        if tensors is not None:
            file = folder / "model.safetensors"
            save_file(tensors(load_file(file)), file, metadata={"format": "pt"})
        if config is not None:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return folder

    return edit


def test_one_process_loads_patched(checkpoints):
    path = checkpoints("deepseek_v3")
    native = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    data = batch("deepseek_v3", [9])
    model = mok_hf.from_pretrained(
        AutoModelForCausalLM, path, mok_config=mok_hf.MoKConfig(minibatch_size=128), dtype=torch.float32
    )
    assert relative(model(**data).logits, native(**data).logits) < 2e-6
    assert kernel_calls(model) == 2 and "DeepseekV3Experts (mok) -> MoK kernel" in str(model._mok_report)
    assert model.config._experts_implementation == "mok"
    assert "mok" not in model.config.to_json_string().lower()


def test_every_other_keyword_reaches_transformers(checkpoints):
    path = checkpoints("qwen3_moe")
    config = AutoConfig.from_pretrained(path, num_experts_per_tok=2)
    result = mok_hf.from_pretrained(
        AutoModelForCausalLM, path, config=config, dtype=torch.bfloat16, attn_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    model, info = result
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert model.config.num_experts_per_tok == 2 and model.model.layers[0].mlp.gate.top_k == 2
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= info.keys()
    assert not isinstance(mok_hf.from_pretrained(AutoModelForCausalLM, path), tuple)
    with pytest.raises(TypeError, match="no_such_keyword"):
        mok_hf.from_pretrained(AutoModelForCausalLM, path, no_such_keyword=1)


def test_both_ways_of_spreading_experts(checkpoints):
    from transformers.distributed import DistributedConfig

    with pytest.raises(
        mok_hf.UnsupportedError, match=r"both ep_size=1 and distributed_config were given.*Pass ep_size"
    ):
        mok_hf.from_pretrained(
            AutoModelForCausalLM, checkpoints("qwen3_moe"), ep_size=1, distributed_config=DistributedConfig()
        )


@pytest.mark.parametrize("ep_size", [3, 5])
def test_experts_that_cannot_be_spread_evenly(checkpoints, monkeypatch, ep_size):
    monkeypatch.setenv("WORLD_SIZE", str(ep_size))
    words = rf"8 experts cannot be spread evenly over ep_size={ep_size}.*divides 8: 1, 2, 4, 8"
    with pytest.raises(mok_hf.UnsupportedError, match=words):
        mok_hf.from_pretrained(AutoModelForCausalLM, checkpoints("deepseek_v3"), ep_size=ep_size)


def test_kimi_k2_experts_are_the_checkpoints(checkpoints):
    """Under plain Transformers every expert of this checkpoint would be random."""
    path = checkpoints("kimi_k2")
    model = mok_hf.from_pretrained(DeepseekV3ForCausalLM, path, verify=True, dtype=torch.float32)
    stored = load_file(path / "model.safetensors")
    experts = model.model.layers[1].mlp.experts
    for number in range(8):
        prefix = f"model.layers.1.mlp.experts.{number}"
        assert torch.equal(experts.gate_up_proj[number, :192], stored[f"{prefix}.gate_proj.weight"])
        assert torch.equal(experts.gate_up_proj[number, 192:], stored[f"{prefix}.up_proj.weight"])
        assert torch.equal(experts.down_proj[number], stored[f"{prefix}.down_proj.weight"])


def _without_one_layer(tensors):
    return {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.experts" not in name}


def _renamed(tensors):
    return {name.replace(".mlp.experts.", ".mlp.routed.experts."): tensor for name, tensor in tensors.items()}


def test_missing_experts_are_an_error(edited):
    path = edited("deepseek_v3", _without_one_layer)
    words = r"2 expert tensors of the model are not in the checkpoint \(first: model.layers.2.mlp.experts.down_proj"
    with pytest.raises(ExpertsNotLoadedError, match=rf"{words}.*random.*Use a checkpoint"):
        mok_hf.from_pretrained(AutoModelForCausalLM, path)


def test_experts_under_other_names_are_an_error(edited):
    path = edited("deepseek_v3", _renamed)
    words = r"4 expert tensors.*'deepseek_v3'; it holds unused expert tensors such as model.layers.1.mlp.routed"
    with pytest.raises(ExpertsNotLoadedError, match=words):
        mok_hf.from_pretrained(AutoModelForCausalLM, path)


def test_experts_of_another_shape_are_an_error(edited):
    path = edited("deepseek_v3", config={"moe_intermediate_size": 256})
    with pytest.raises(ExpertsNotLoadedError, match=r"4 expert tensors of the model have another shape"):
        mok_hf.from_pretrained(AutoModelForCausalLM, path, ignore_mismatched_sizes=True)


def test_quantised_checkpoints_are_refused_before_they_are_read(edited):
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path = edited("deepseek_v3", config=quantised)
    (path / "model.safetensors").unlink()
    words = r"quantised \(quant_method='fp8'\).*fp32 and bf16.*FineGrainedFP8Config\(dequantize=True\)"
    with pytest.raises(mok_hf.UnsupportedError, match=words):
        mok_hf.from_pretrained(AutoModelForCausalLM, path)
    with pytest.raises(OSError, match=r"model\.safetensors"):  # dequantized, it gets as far as looking for the weights
        mok_hf.from_pretrained(AutoModelForCausalLM, path, quantization_config=FineGrainedFP8Config(dequantize=True))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_moe", "deepseek_v4", "glm5_next", "kimi_linear", "kimi_k25"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verification_passes_on_what_was_stored(checkpoints, kind, dtype):
    path = checkpoints(kind)
    model, info = mok_hf.from_pretrained(auto_class(kind), path, dtype=dtype, output_loading_info=True)
    assert verify_loaded(model, path, info) == len(load_file(path / "model.safetensors"))


def test_verification_names_what_differs(checkpoints):
    path = checkpoints("deepseek_v3")
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 200, 5] += 0.25
        model.model.norm.weight[7] = 9.0
    with pytest.raises(VerificationError) as error:
        verify_loaded(model, path, info)
    text = str(error.value)
    assert "model.layers.1.mlp.experts.3.up_proj.weight differs from the stored tensor by up to 0.25" in text
    assert "model.norm.weight differs" in text and text.startswith("2 of ")


def test_verification_notices_tensors_that_were_never_used(edited):
    path = edited("deepseek_v3", lambda tensors: tensors | {"model.extra.weight": torch.ones(3)})
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.extra.weight"}
    verify_loaded(model, path, info)  # Transformers has reported it
    with pytest.raises(VerificationError, match=r"model.extra.weight is in the checkpoint but in no tensor"):
        verify_loaded(model, path, {})


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("world", "ep_size"), [(2, 1), (4, 2)])
def test_sharded_loading_equals_one_process(checkpoints, ranks, world, ep_size):
    native = AutoModelForCausalLM.from_pretrained(checkpoints("deepseek_v3"), dtype=torch.float32)
    expected = native(**inputs_of("deepseek_v3", 0)).logits
    for rank in ranks(world, f"load at EP {ep_size}"):
        assert relative(rank["logits"], expected) < 2e-6
        assert not rank["missing"] and rank["calls"] == 2
        assert "mok" not in rank["config"].lower(), "a saved config.json would need mok_hf to be read"
        assert f"2 of 2 MoE blocks on the MoK kernel, EP {ep_size}" in rank["report"]


@pytest.mark.timeout(420)
def test_verification_catches_one_wrong_value_on_one_rank(ranks):
    for kind, message in ranks(2, "verify catches"):
        assert kind == "VerificationError"
        assert "model.layers.1.mlp.experts.4.down_proj.weight differs" in message


@pytest.mark.timeout(420)
def test_rows_loaded_in_the_wrong_order_are_refused_and_verification_sees_them(ranks):
    for rank in ranks(2, "wrong order"):
        kind, message = rank["patching"]
        assert kind == "UnsupportedError" and "conv1d.weight was loaded sharded" in message and "wrong order" in message
        kind, message = rank["verifying"]
        assert kind == "VerificationError" and "_conv1d.weight differs from the stored tensor" in message
        assert rank["right"] == ("", "")
