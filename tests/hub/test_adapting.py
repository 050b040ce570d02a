"""What docs/kernel.md and the hub's card say to people who use or adapt the kernel on their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import mok_hf
from mok_hf import hub, kernel, kernel_files
from mok_hf.model_patches import ADAPTERS
from tests.checkpoints import batch
from tests.kernel.layers import relative_error

ROOT = Path(__file__).resolve().parents[2]


def code(page: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return block


def test_one_name_everywhere():
    """Repository, branch, version and API level are the same wherever they are written."""
    manifest = (ROOT / "csrc/build.toml").read_text()
    assert f'repo-id = "{hub.REPO}"' in manifest and f'branch = "{hub.REVISION}"' in manifest
    (version,) = re.findall(r"^version = (\d+)$", manifest, flags=re.MULTILINE)
    metadata = json.loads((kernel.info().path / "metadata.json").read_text())
    assert hub.REVISION == f"v{version}" == f"v{metadata['version']}"
    assert kernel_files.api_level(ROOT / "csrc/torch-ext/mok") == kernel_files.API_LEVEL
    card = (ROOT / "csrc/CARD.md").read_text()
    assert f'get_kernel("{hub.REPO}", revision="{hub.REVISION}"' in card
    assert kernel.info().variant in card


def test_the_cards_code_runs(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{hub.REPO}={kernel.info().path}")
    names: dict = {}
    exec(code("csrc/CARD.md"), names)
    mok, gradients = names["mok"], [names[name].grad for name in ("x", "gate_up", "down")]
    assert mok is kernel.load()
    x = names["x"].detach().requires_grad_()
    out = mok.reference.moe(x, names["ids"], names["weights"], names["gate_up"].detach(), names["down"].detach())
    out.sum().backward()
    assert relative_error(names["out"], out) < 1e-5 and relative_error(gradients[0], x.grad) < 1e-5
    assert all(bool(gradient.any()) for gradient in gradients)


def test_the_card_names_the_public_api():
    listed = set(re.findall(r"`(\w+)", (ROOT / "csrc/CARD.md").read_text().split("| name |")[1]))
    assert set(kernel.load().__all__) <= listed


@use_experts_implementation
class MyExperts(nn.Module):
    forward = Qwen3MoeExperts.forward


class MyMoeBlock(nn.Module):
    """A block that is not in the table."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, top_k_weights, top_k_index = self.gate(flat)
        return self.experts(flat, top_k_index, top_k_weights).reshape(hidden_states.shape)


def model_outside_the_table(path: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ == "Qwen3MoeSparseMoeBlock":
            module.__class__, module.experts.__class__ = MyMoeBlock, MyExperts
    return model


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    out = model(**batch("qwen3_moe", [11, 5]))
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach()} | gradients


def test_a_model_outside_the_table_is_one_entry(checkpoints, monkeypatch):
    path = checkpoints("qwen3_moe")
    with pytest.raises(mok_hf.UnsupportedError):
        mok_hf.patch_model(model_outside_the_table(path))
    expected = step(model_outside_the_table(path))

    text = code("docs/kernel.md").replace("my_package.modeling", __name__)
    entries = dict(ADAPTERS)
    try:
        exec(text, {})
        added = ADAPTERS.keys() - entries.keys()
        assert added == {f"{__name__}.MyMoeBlock"}
        model = model_outside_the_table(path)
        report = mok_hf.patch_model(model)
        got = step(model)
    finally:
        ADAPTERS.clear()
        ADAPTERS.update(entries)
    assert len(report.patched) > 0 and not report.native
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(got[name], value) < 1e-4, name
