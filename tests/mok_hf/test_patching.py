"""Patching a model that one process holds: what changes, what must not, and what undoes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import mok_hf
from mok_hf import kernel
from mok_hf.layer import STATE
from tests.checkpoints import batch
from tests.mok_hf.workers import gradients, kernel_calls, relative

KINDS = ["qwen2_moe", "deepseek_v3", "qwen3_moe", "deepseek_v4"]


def load(path: Any, **kwargs: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **kwargs})


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


@pytest.fixture
def qwen(checkpoints):
    return load(checkpoints("qwen2_moe"))


@pytest.fixture
def inputs():
    return batch("qwen2_moe", [13, 7])


@pytest.fixture
def seen(monkeypatch):
    """The keywords and dtypes of every kernel call."""
    mok, calls = kernel.load(), []
    moe = mok.moe

    def spy(x, top_k_index, top_k_weights, gate_up_proj, down_proj, **keywords):
        tensors = {"x": x, "weights": top_k_weights, "gate_up": gate_up_proj, "down": down_proj}
        calls.append({**keywords, **{name: tensor.dtype for name, tensor in tensors.items()}})
        return moe(x, top_k_index, top_k_weights, gate_up_proj, down_proj, **keywords)

    monkeypatch.setattr(mok, "moe", spy)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_patched_equals_native_and_unpatching_restores_it(checkpoints, kind):
    model = load(checkpoints(kind))
    data = batch(kind, [13, 7])
    native = model(**data)
    native.loss.backward()
    expected = gradients(model)
    classes = [type(module) for module in model.modules()]
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}

    report = mok_hf.patch_model(model)
    model.zero_grad()
    patched = model(**data)
    patched.loss.backward()
    assert relative(patched.logits, native.logits) < 2e-6
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert max(relative(found[name], expected[name]) for name in found) < 1e-5
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == state
    assert kernel_calls(model) == len(report.patched) == len(blocks(model))

    mok_hf.unpatch_model(model)
    assert [type(module) for module in model.modules()] == classes
    assert not hasattr(model, "_mok_report")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(model(**data).logits, native.logits)
    mok_hf.unpatch_model(model)  # a second time changes nothing


def test_report_says_what_replaced_what(qwen, inputs):
    report = mok_hf.patch_model(qwen)
    assert qwen._mok_report is report and report.ep_size == 1
    text = str(report)
    assert text.startswith("Qwen2MoeForCausalLM: 2 of 2 MoE blocks on the MoK kernel, EP 1")
    assert f"kernel: {kernel.info().variant}" in text and kernel.info().source in text
    assert "model.layers.0.mlp: Qwen2MoeSparseMoeBlock, Qwen2MoeExperts (grouped_mm) -> MoK kernel" in text
    assert [layer.shared for layer in report.layers] == ["fused", "fused"]
    assert report.native == []


def test_registering_is_idempotent_and_inert(checkpoints):
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    mok_hf.register()
    names = list(ALL_EXPERTS_FUNCTIONS), list(EPImplementationInterface())
    mok_hf.register()
    assert (list(ALL_EXPERTS_FUNCTIONS), list(EPImplementationInterface())) == names
    assert all(listed.count("mok") == 1 for listed in names)
    model = load(checkpoints("qwen3_moe"))
    model(**batch("qwen3_moe", [5]))
    assert kernel_calls(model) == 0


def test_a_teacher_in_the_same_process_stays_native(checkpoints, inputs):
    student, teacher = load(checkpoints("qwen2_moe")), load(checkpoints("qwen2_moe"))
    teacher.config = student.config  # the class swap must not reach it through a shared configuration either
    expected = teacher(**inputs).logits
    mok_hf.patch_model(student)
    assert torch.equal(teacher(**inputs).logits, expected) and kernel_calls(teacher) == 0
    student(**inputs)
    assert kernel_calls(student) == 2


def test_deep_copy_of_a_patched_model_is_its_own(qwen, inputs):
    mok_hf.patch_model(qwen)
    twin = copy.deepcopy(qwen)
    with torch.no_grad():
        twin.model.layers[0].mlp.shared_expert.down_proj.weight.zero_()
        twin.model.layers[0].mlp.experts.down_proj.zero_()
    expected = mok_out = qwen(**inputs).logits
    calls = kernel_calls(qwen)
    mok_hf.unpatch_model(twin)
    native = twin(**inputs).logits
    assert kernel_calls(qwen) == calls and not torch.equal(native, expected)
    assert torch.equal(qwen(**inputs).logits, mok_out)
    mok_hf.patch_model(twin)
    assert relative(twin(**inputs).logits, native) < 2e-6


def test_an_optimizer_built_before_patching_takes_the_same_step(checkpoints, inputs):
    stepped = []
    for patch_first in (True, False):
        model = load(checkpoints("qwen2_moe"))
        if patch_first:
            mok_hf.patch_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = [id(p) for p in model.parameters()]
        if not patch_first:
            mok_hf.patch_model(model)
        assert ids == [id(p) for p in model.parameters()]
        model(**inputs).loss.backward()
        optimizer.step()
        stepped.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*stepped, strict=True))


def test_config_reaches_every_kernel_call(qwen, inputs, seen):
    mok_hf.patch_model(qwen, mok_hf.MoKConfig(minibatch_size=256, timeout_s=60.0))
    qwen(**inputs)
    assert [(call["minibatch_size"], call["timeout_s"]) for call in seen] == [(256, 60.0)] * 2
    assert all("macrobatch_size" not in call for call in seen)
    mok_hf.patch_model(qwen, mok_hf.MoKConfig(macrobatch_size=512))
    seen.clear()
    qwen(**inputs)
    assert [call["macrobatch_size"] for call in seen] == [512] * 2
    assert all("minibatch_size" not in call for call in seen)
    assert "mok" not in qwen.config.to_json_string().lower()


def test_autocast_casts_and_returns_gradients_in_parameter_dtype(qwen, inputs, seen):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = qwen(**inputs)
    native.loss.backward()
    expected = gradients(qwen)
    mok_hf.patch_model(qwen)
    qwen.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        patched = qwen(**inputs)
    patched.loss.backward()
    bf16 = torch.bfloat16
    assert all((call["x"], call["gate_up"], call["down"]) == (bf16, bf16, bf16) for call in seen)
    assert all(weight.dtype == bf16 for call in seen for weight in call["shared"])
    assert all(p.grad.dtype == torch.float32 for p in qwen.parameters())
    assert relative(patched.logits.float(), native.logits.float()) < 5e-2
    for name, gradient in gradients(qwen).items():
        assert relative(gradient, expected[name]) < 0.1, name
    assert [layer.shared for layer in qwen._mok_report.layers] == ["fused", "fused"]


def test_bf16_model(checkpoints, inputs, seen):
    model = load(checkpoints("qwen2_moe"), dtype=torch.bfloat16)
    exact = load(checkpoints("qwen2_moe"))(**inputs).logits
    native = relative(model(**inputs).logits.float(), exact)
    mok_hf.patch_model(model)
    assert relative(model(**inputs).logits.float(), exact) < 1.5 * native
    assert {call["x"] for call in seen} == {torch.bfloat16}


def test_experts_function_alone_runs_routed_experts(checkpoints, inputs, seen):
    path = checkpoints("qwen2_moe")
    native = load(path)(**inputs).logits
    mok_hf.register()
    model = load(path, experts_implementation="mok")
    assert relative(model(**inputs).logits, native) < 2e-6
    assert kernel_calls(model) == 2 and all(call["shared"] is None for call in seen)
    seen.clear()
    mok_hf.patch_model(model)
    assert "Qwen2MoeExperts (mok) -> MoK kernel" in str(model._mok_report)
    assert relative(model(**inputs).logits, native) < 2e-6
    assert all(call["shared"] is not None and call["shared_scale"] is not None for call in seen)


def test_ids_at_and_beyond_the_number_of_experts_are_skipped(checkpoints):
    mok_hf.register()
    model = load(checkpoints("qwen3_moe"), experts_implementation="mok")
    experts = blocks(model)[0].experts
    native = load(checkpoints("qwen3_moe"), experts_implementation="batched_mm")
    native_experts = blocks(native)[0].experts
    native_experts._is_expert_parallel = experts._is_expert_parallel = True
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 128, generator=generator)
    ids = torch.randint(0, 8, (11, 3), generator=generator)
    ids[:, 0], ids[3] = 8, 8
    weights = torch.rand(11, 3, generator=generator)
    out = experts(hidden, ids, weights)
    assert relative(out, native_experts(hidden, ids, weights)) < 2e-6
    assert torch.equal(out[3], torch.zeros(128))


@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next"])
def test_clamp_limit_reaches_the_kernel(kind, seen):
    from tests.checkpoints import make

    model = make(kind)
    mok_hf.patch_model(model)
    model(**batch(kind, [9]))
    experts = blocks(model)[-1].experts
    limit = experts.limit if kind == "deepseek_v4" else experts.swiglu_limit
    assert {call["swiglu_limit"] for call in seen} == {limit} and limit < 1
    assert all(call["shared"] is not None for call in seen)


def _hook_on_mlp(block):
    return block.shared_expert.register_forward_hook(lambda *_: None)


def _hook_on_linear(block):
    return block.shared_expert.up_proj.register_full_backward_hook(lambda *_: None)


def _own_forward(block):
    block.shared_expert.forward = block.shared_expert.forward


def _biased(block):
    block.shared_expert.gate_proj.bias = nn.Parameter(torch.full((448,), 0.1))


def _parametrised(block):
    nn.utils.parametrizations.weight_norm(block.shared_expert.down_proj)


def _other_dtype(block):
    class Upcast(nn.Module):
        """An MLP kept in fp64 beside fp32 experts."""

        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp.double()

        def forward(self, x):
            return self.mlp(x.double()).to(x.dtype)

    block.shared_expert = Upcast(block.shared_expert)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook_on_mlp, "Qwen2MoeMLP has hooks"),
        (_hook_on_linear, "Qwen2MoeMLP.up_proj has hooks"),
        (_own_forward, "Qwen2MoeMLP has a forward of its own"),
        (_biased, "Qwen2MoeMLP.gate_proj has a bias"),
        (_parametrised, "Qwen2MoeMLP.down_proj is ParametrizedLinear, not nn.Linear"),
        (_other_dtype, "is not this model's own MLP class"),
    ],
)
def test_a_changed_shared_expert_runs_natively_and_the_report_says_why(qwen, inputs, seen, change, reason):
    change(blocks(qwen)[0])
    native = qwen(**inputs)
    native.loss.backward()
    expected = gradients(qwen)
    report = mok_hf.patch_model(qwen)
    qwen.zero_grad()
    patched = qwen(**inputs)
    patched.loss.backward()
    assert relative(patched.logits, native.logits) < 2e-6
    found = gradients(qwen)
    assert found.keys() == expected.keys()
    assert max(relative(found[name], expected[name]) for name in found) < 1e-5
    assert [call["shared"] is None for call in seen] == [True, False]
    assert report.layers[0].shared == "native" and reason in report.layers[0].shared_reason
    assert report.layers[1].shared == "fused"


def test_hooks_and_lora_on_the_shared_gate_are_honoured(qwen, inputs):
    model = get_peft_model(qwen, LoraConfig(r=2, target_modules=["shared_expert_gate"], init_lora_weights=False))
    fired: list[int] = []
    gate = blocks(model)[0].shared_expert_gate
    gate.register_forward_hook(lambda *_: fired.append(1))
    native = model(**inputs)
    native.loss.backward()
    expected = gradients(model)
    fired.clear()
    report = mok_hf.patch_model(model)
    model.zero_grad()
    patched = model(**inputs)
    patched.loss.backward()
    assert fired == [1] and [layer.shared for layer in report.layers] == ["fused", "fused"]
    assert relative(patched.logits, native.logits) < 2e-6
    assert max(relative(grad, expected[name]) for name, grad in gradients(model).items()) < 1e-5


@pytest.mark.parametrize("patch_first", [True, False])
def test_expert_lora_at_one_rank(qwen, inputs, patch_first):
    lora = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    if patch_first:
        mok_hf.patch_model(qwen)
    model = get_peft_model(qwen, lora)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if patch_first:
        patched = model(**inputs)
        patched.loss.backward()
        found = gradients(model)
        mok_hf.unpatch_model(model)
        model.zero_grad()
    native = model(**inputs)
    native.loss.backward()
    expected = gradients(model)
    if not patch_first:
        mok_hf.patch_model(model)
        model.zero_grad()
        patched = model(**inputs)
        patched.loss.backward()
        found = gradients(model)
    assert relative(patched.logits, native.logits) < 2e-6
    assert found.keys() == expected.keys() and any("lora" in name for name in found)
    assert max(relative(found[name], expected[name]) for name in found) < 1e-5


def test_router_logits_and_auxiliary_loss_survive(qwen, inputs):
    native = qwen(**inputs, output_router_logits=True)
    mok_hf.patch_model(qwen)
    patched = qwen(**inputs, output_router_logits=True)
    assert relative(patched.aux_loss, native.aux_loss) < 2e-6
    assert len(patched.router_logits) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_marks_each_forward_once(qwen, inputs, reentrant):
    mok_hf.patch_model(qwen)
    qwen(**inputs).loss.backward()
    expected = gradients(qwen)
    qwen.zero_grad()
    qwen.gradient_checkpointing_enable({"use_reentrant": reentrant})
    qwen.train()
    qwen(**inputs).loss.backward()
    found = gradients(qwen)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_peft_around_a_patched_model_still_marks_forwards(qwen, inputs, monkeypatch):
    """PEFT's tuner calls `model.forward` past the outer model's hooks."""
    model = get_peft_model(qwen, LoraConfig(r=2, target_modules=["q_proj"]))
    mok_hf.patch_model(model)
    workspace, marks = kernel.load().workspace(None, torch.device("cpu")), []
    begin, end = workspace.begin_forward, workspace.end_forward
    monkeypatch.setattr(workspace, "begin_forward", lambda: (marks.append("begin"), begin())[1])
    monkeypatch.setattr(workspace, "end_forward", lambda: (marks.append("end"), end())[1])
    model(**inputs)
    assert marks == ["begin", "end"]
    assert model._mok_report is qwen._mok_report


def test_a_forward_replaced_after_patching_is_noticed(qwen, inputs):
    mok_hf.patch_model(qwen)
    experts = blocks(qwen)[1].experts
    experts.forward = lambda hidden, ids, weights: torch.zeros_like(hidden)
    with pytest.raises(RuntimeError, match=r"did not reach the kernel.*unpatch_model"):
        qwen(**inputs)


def test_fsdp_class_keeps_its_mixin():
    """A block that is itself an FSDP class stays one, patched and unpatched."""
    from tests.checkpoints import make

    model = make("qwen2_moe")
    block = blocks(model)[0]
    cls = type(block)

    class Mixin:
        pass

    block.__class__ = type("FSDP" + cls.__name__, (Mixin, cls), {})
    wrapped = type(block)
    mok_hf.patch_model(model)
    assert isinstance(block, Mixin) and type(block).__name__ == "MoKFSDPQwen2MoeSparseMoeBlock"
    mok_hf.unpatch_model(model)
    assert type(block) is wrapped
    mok_hf.patch_model(model)
    block.__class__ = type("Later", (type(block),), {})
    with pytest.raises(mok_hf.UnsupportedError, match="another wrapper changed its class after patch_model"):
        mok_hf.unpatch_model(model)


def test_patched_classes_are_shared_between_layers_and_models(checkpoints):
    first, second = load(checkpoints("qwen2_moe")), load(checkpoints("qwen2_moe"))
    mok_hf.patch_model(first)
    mok_hf.patch_model(second)
    assert len({type(block) for model in (first, second) for block in blocks(model)}) == 1
    assert len({type(block.experts) for model in (first, second) for block in blocks(model)}) == 1
    assert all(STATE not in model.state_dict() for model in (first, second))
