"""Every refusal: the value seen, the limit, the way forward. And what `strict=False` does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import mok_hf
from mok_hf import UnsupportedError, kernel
from tests.checkpoints import batch, make
from tests.mok_hf.workers import kernel_calls

SMALL: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0,
}  # fmt: skip


def small(model_type: str, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **overrides}))


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


def gpt_oss() -> nn.Module:
    return small("gpt_oss")


def fp8() -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model = make("qwen3_moe")
    for block in blocks(model):
        block.experts = FP8Experts(model.config, block_size=(128, 128))
    return model


def fp16() -> nn.Module:
    return make("qwen3_moe").half()


def odd_expert_width() -> nn.Module:
    return make("qwen3_moe", moe_intermediate_size=200)


def odd_hidden_size() -> nn.Module:
    return make("qwen3_moe", hidden_size=160)


def odd_shared_width() -> nn.Module:
    return make("qwen2_moe", shared_expert_intermediate_size=72)


def other_activation() -> nn.Module:
    return make("qwen3_moe", hidden_act="gelu")


def unknown_gate() -> nn.Module:
    model = make("deepseek_v4")
    experts = blocks(model)[0].experts

    class Softer(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up):
            return super()._apply_gate(gate_up) * 0.5

    for block in blocks(model):
        block.experts.__class__ = Softer
    return model


def limit_without_a_number() -> nn.Module:
    model = make("deepseek_v4")
    for block in blocks(model):
        block.experts.limit = None
    return model


def unknown_class() -> nn.Module:
    return small("mixtral")


def subclass_with_its_own_forward() -> nn.Module:
    model = make("qwen3_moe")

    class Noisy(type(blocks(model)[0])):  # type: ignore[misc]
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 1.5

    for block in blocks(model):
        block.__class__ = Noisy
    return model


def wrapped_block() -> nn.Module:
    model = make("qwen3_moe")
    for block in blocks(model):
        block.forward = block.forward
    return model


def wrapped_experts() -> nn.Module:
    model = make("qwen3_moe")
    for block in blocks(model):
        block.experts.forward = block.experts.forward
    return model


def plain_experts() -> nn.Module:
    model = make("qwen3_moe")
    for block in blocks(model):
        block.experts = nn.ModuleList([nn.Linear(128, 128)])
    return model


BLOCKS = {
    gpt_oss: r"GptOssExperts has is_transposed=True, has_bias=True, is_concatenated=False \(the layout of gpt-oss\)"
    r".*gate_up_proj \[E, 2I, D\].*Use Transformers' own experts",
    fp8: r"FP8Experts holds quantised weights \(torch.float8_e4m3fn\); the kernel takes fp32 and bf16"
    r".*FineGrainedFP8Config\(dequantize=True\)",
    fp16: r"holds torch.float16 weights; the kernel takes fp32 and bf16. Load with dtype=torch.bfloat16",
    odd_expert_width: r"expert width I is 200; the kernel takes multiples of 64 \(the nearest are 192 and 256\)",
    odd_hidden_size: r"hidden size D is 160; the kernel takes multiples of 64 \(the nearest are 128 and 192\)",
    odd_shared_width: r"shared expert width S is 72; the kernel takes multiples of 64 \(the nearest are 64 and 128\)",
    other_activation: r"Qwen3MoeExperts uses the activation GELUActivation\(\); the kernel computes silu. Use a silu",
    unknown_gate: r"Softer overrides _apply_gate with .*Softer\._apply_gate, which this version does not know.*table",
    limit_without_a_number: r"DeepseekV4Experts.limit is None; the clamp .* needs a number. Set it in the config",
    unknown_class: r"MixtralSparseMoeBlock is not in the model table. Known model types: .*qwen3_moe.*Add a row",
    subclass_with_its_own_forward: r"Noisy is not in the model table",
    wrapped_block: r"another wrapper has set Qwen3MoeSparseMoeBlock.forward on the instance.*Patch first and wrap",
    wrapped_experts: r"another wrapper has set Qwen3MoeExperts.forward on the instance.*Patch first and wrap",
    plain_experts: r"ModuleList is not built with Transformers' use_experts_implementation.*Convert it",
}


@pytest.mark.parametrize("build", BLOCKS, ids=lambda build: build.__name__)
def test_blocks_that_cannot_be_fused(build):
    model = build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=BLOCKS[build]) as error:
        mok_hf.patch_model(model)
    text = str(error.value)
    assert f"{type(model).__name__} cannot be patched" in text
    assert "and 1 more" in text or "and 2 more" in text, "blocks with one reason are one line"
    assert [type(module) for module in model.modules()] == classes

    report = mok_hf.patch_model(model, strict=False)
    assert report.patched == [] and len(report.native) == len(report.layers) >= 2
    assert [type(module) for module in model.modules()] == classes
    assert str(report).count("left native: ") == len(report.layers)


def test_without_strict_the_other_blocks_are_patched():
    model, expected = make("qwen2_moe"), make("qwen2_moe")
    other = blocks(model)[1]
    other.forward = other.forward
    report = mok_hf.patch_model(model, strict=False)
    data = batch("qwen2_moe", [11])
    assert torch.allclose(model(**data).logits, expected(**data).logits, rtol=1e-4, atol=1e-5)
    assert kernel_calls(model) == 1
    assert [layer.fused for layer in report.layers] == [True, False]
    assert "model.layers.1.mlp: Qwen2MoeSparseMoeBlock left native: another wrapper" in str(report)


def test_strict_false_does_not_cover_a_missing_kernel(monkeypatch):
    model = make("qwen3_moe")
    monkeypatch.setattr(kernel, "_loaded", None)
    monkeypatch.setenv("MOK_KERNEL_PATH", "/nonexistent")
    for strict in (True, False):
        with pytest.raises(mok_hf.KernelNotFoundError, match=r"MOK_KERNEL_PATH: no folder /nonexistent"):
            mok_hf.patch_model(model, strict=strict)
    assert not any(hasattr(type(module), "_mok_original") for module in model.modules())


def test_a_model_without_experts():
    model = small("llama")
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM holds no MoE block.*strict=False"):
        mok_hf.patch_model(model)
    assert mok_hf.patch_model(model, strict=False).layers == []


def test_the_experts_function_refuses_what_patching_refuses():
    mok_hf.register()
    for build, words in ((gpt_oss, BLOCKS[gpt_oss]), (odd_expert_width, BLOCKS[odd_expert_width])):
        model = build()
        model.set_experts_implementation("mok")
        with pytest.raises(UnsupportedError, match=words):
            model(**batch("qwen3_moe", [5]))


@pytest.mark.parametrize("how", ["wrapper", "in place", "one layer"])
def test_compiled_models(how):
    model = make("qwen3_moe")
    if how == "wrapper":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    where = "module 'model.layers.1'" if how == "one layer" else "the model"
    with pytest.raises(UnsupportedError, match=rf"{where} is compiled .*before torch.compile"):
        mok_hf.patch_model(model, strict=False)


def test_models_split_by_device_map(checkpoints):
    model = make("qwen3_moe")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    with pytest.raises(UnsupportedError, match=r"spreads the model over 0, 1.*one device per process.*ep_size"):
        mok_hf.patch_model(model)
    model.hf_device_map = {"": "cpu"}
    mok_hf.patch_model(model)
    for device_map in ("auto", {"model": "cpu", "lm_head": "disk"}):
        with pytest.raises(UnsupportedError, match=r"device_map.*one device per process.*one process per GPU"):
            mok_hf.from_pretrained(AutoModelForCausalLM, checkpoints("qwen3_moe"), device_map=device_map)


def test_accelerates_fsdp_plugin(monkeypatch, checkpoints):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    words = "ACCELERATE_USE_FSDP=true.*second time.*overwrites.*rank 0's.*no --use_fsdp"
    for work in (
        lambda: mok_hf.distributed_config(1),
        lambda: mok_hf.patch_model(make("qwen3_moe")),
        lambda: mok_hf.from_pretrained(AutoModelForCausalLM, checkpoints("qwen3_moe")),
    ):
        with pytest.raises(UnsupportedError, match=words):
            work()


def test_fsdp_of_the_first_generation():
    model = make("qwen3_moe")
    wrapper = torch.distributed.fsdp.FullyShardedDataParallel.__new__(torch.distributed.fsdp.FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = model
    with pytest.raises(UnsupportedError, match=r"FSDP1.*Load with mok_hf.from_pretrained, which shards with FSDP2"):
        mok_hf.patch_model(wrapper)


def test_kimi_k2_without_its_conversion(checkpoints, monkeypatch):
    from transformers import DeepseekV3ForCausalLM, conversion_mapping

    path = checkpoints("kimi_k2")
    conversion_mapping.get_checkpoint_conversion_mapping("kimi_k2")  # builds the cache
    mappings = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    mappings.pop("kimi_k2", None)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", mappings)
    model = DeepseekV3ForCausalLM.from_pretrained(path)
    with pytest.raises(UnsupportedError, match=r"kimi_k2.*re-initialised every expert.*mok_hf.from_pretrained"):
        mok_hf.patch_model(model)


@pytest.mark.timeout(420)
def test_what_is_refused_where_ranks_own_different_experts(ranks):
    limit = r"tp_size=2: the ranks of a tensor-parallel group hold the same batch.*the limit is tp_size=1.*fsdp_size"
    ddp = "DistributedDataParallel around a model whose experts are spread over 2 ranks.*rank 0's.*Drop the DDP wrapper"
    lora = r"PEFT has wrapped the experts in ParamWrapper.*works at ep_size=1 only. Load with ep_size=1"
    offload = "fsdp_cpu_offload=True.*not served. Set fsdp_cpu_offload=False"
    plugin = "ACCELERATE_USE_FSDP=true.*no --use_fsdp"
    expected = {
        "ddp around the model, at the layer": ddp,
        "ddp around the model, at patching": ddp,
        "tp_size in the plug": limit,
        "tp_size in the helper": limit,
        "tp_size of a loaded model": limit,
        "offload in the helper": offload,
        "offload of a loaded model": offload,
        "expert LoRA before patching": lora,
        "expert LoRA after patching": lora.replace("ParamWrapper", "ParamWrapper after patching"),
        "accelerate's FSDP plugin": plugin,
        "accelerate's FSDP plugin, plug": plugin,
        "odd ep_size": r"ep_size=3 does not divide the number of processes, 2.*choose one of 1, 2",
    }
    for rank in ranks(2, "refusals"):
        assert rank.keys() == expected.keys()
        for name, words in expected.items():
            kind, message = rank[name]
            assert kind == "UnsupportedError", (name, kind, message)
            with pytest.raises(UnsupportedError, match=words):
                raise UnsupportedError(message)


@pytest.mark.timeout(420)
def test_a_kernel_missing_on_one_rank_stops_all(ranks):
    found = ranks(2, "missing kernel")
    for name in ("patching", "loading"):
        assert [rank[name][0] for rank in found] == ["KernelMismatchError", "KernelNotFoundError"]
        assert all("rank 1 of 2 lacks the kernel" in rank[name][1] for rank in found)


def test_replicas_of_data_parallel():
    model = make("qwen3_moe")
    mok_hf.patch_model(model)
    replica = blocks(model)[0]._replicate_for_data_parallel()
    replica.experts = blocks(model)[0].experts._replicate_for_data_parallel()
    with pytest.raises(UnsupportedError, match=r"replica of nn.DataParallel.*one process per GPU"):
        replica.experts(torch.zeros(1, 128), torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3))


def test_what_each_device_computes_in():
    from mok_hf.capabilities import dtype_problem

    assert dtype_problem("cpu", torch.float32) is None and dtype_problem("cuda", torch.bfloat16) is None
    assert "float32 on cuda; the kernel takes bfloat16 there. Load with" in dtype_problem("cuda", torch.float32)
    assert "float16 on cpu; the kernel takes float32 and bfloat16 there" in dtype_problem("cpu", torch.float16)
    assert "on mps; the kernel takes none there" in dtype_problem("mps", torch.float32)
