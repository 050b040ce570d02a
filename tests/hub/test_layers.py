"""The hub kernel's layer in a module that `kernels` kernelizes, and under torch.compile."""

from __future__ import annotations

import pytest
import torch
from kernels import (
    LayerRepository,
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn

from mok_hf import kernel
from mok_hf.hub import REPO
from tests.kernel.layers import relative_error

EXPERTS, HIDDEN, WIDTH = 6, 128, 64


@use_kernel_forward_from_hub("ToyExperts")
class ToyExperts(nn.Module):
    """Experts as Transformers builds them."""

    def __init__(self, dtype=torch.float32, clamp=None, activation=nn.SiLU):
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def weight(*sizes):
            return nn.Parameter((torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5).to(dtype))

        self.gate_up_proj = weight(EXPERTS, 2 * WIDTH, HIDDEN)
        self.down_proj = weight(EXPERTS, HIDDEN, WIDTH)
        self.act_fn = activation()
        if clamp is not None:
            setattr(self, clamp, 0.5)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        limit = getattr(self, "swiglu_limit", getattr(self, "limit", None))
        weights = (self.gate_up_proj, self.down_proj)
        reference = kernel.load().reference
        return reference.moe(hidden_states, top_k_index, top_k_weights, *weights, swiglu_limit=limit)


def inputs(tokens, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(2, dim=-1)
    ids[: tokens // 4, 1] = EXPERTS  # masked, as under another expert parallelism
    return x.requires_grad_(), ids, weights.to(dtype).requires_grad_()


def step(forward, module, tokens, dtype=torch.float32):
    """Output and every gradient."""
    module.zero_grad()
    x, ids, weights = inputs(tokens, dtype)
    out = forward(x, ids, weights)
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype))
    return [out.detach(), x.grad, weights.grad, module.gate_up_proj.grad.clone(), module.down_proj.grad.clone()]


def local():
    # The variant itself: of a repository, a CUDA build of torch would not pick the CPU's.
    return LocalLayerRepository(kernel.info().path, layer_name="MoKExperts")


def kernelized(mode, repository=None, **options):
    module = ToyExperts(**options)
    with use_kernel_mapping({"ToyExperts": {"cpu": repository or local()}}):
        kernelize(module, mode=mode, device="cpu", use_fallback=False)
    assert module.forward.__func__ is kernel.load().layers.MoKExperts.forward
    return module


@pytest.mark.parametrize("clamp", [None, "limit", "swiglu_limit"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_training_matches_the_layer_it_replaces(dtype, bound, clamp):
    """Against fp64; where rounding moves a value over the clamp's edge, as close as the layer that it replaces is."""
    module, native = kernelized(Mode.TRAINING, dtype=dtype, clamp=clamp), ToyExperts(dtype, clamp)
    exact = ToyExperts(dtype, clamp).double()
    x, ids, weights = (t.detach() for t in inputs(50, dtype))
    leaves = [x.double().requires_grad_(), weights.double().requires_grad_()]
    out = exact(leaves[0], ids, leaves[1])
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype).double())
    expected = [out.detach(), leaves[0].grad, leaves[1].grad, exact.gate_up_proj.grad, exact.down_proj.grad]
    results = zip(step(module, module, 50, dtype), step(native, native, 50, dtype), expected, strict=True)
    for got, replaced, value in results:
        assert relative_error(got, value) < max(bound, 1.5 * relative_error(replaced, value))


def test_inference_matches_the_layer_it_replaces():
    module = kernelized(Mode.INFERENCE)
    x, ids, weights = inputs(33)
    with torch.no_grad():
        out = module(x, ids, weights)
        assert relative_error(out, ToyExperts()(x, ids, weights)) < 1e-5
        assert not out.requires_grad
    assert torch.equal(out, module(x, ids, weights))


def test_the_named_repository_of_the_hub(monkeypatch):
    """LayerRepository, served from a folder."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={kernel.info().path}")
    module = kernelized(Mode.TRAINING, LayerRepository(REPO, layer_name="MoKExperts", revision="v1"))
    native = ToyExperts()
    for got, expected in zip(step(module, module, 20), step(native, native, 20), strict=True):
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", [Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE])
def test_compiled_is_eager_bit_for_bit(mode, dynamic):
    """fullgraph: a graph break is an error. The workspace grows between the calls."""
    torch._dynamo.reset()
    module = kernelized(mode)
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (40, 300, 7):
        if Mode.TRAINING in mode:
            for got, expected in zip(step(compiled, module, tokens), step(module, module, tokens), strict=True):
                assert torch.equal(got, expected)
        else:
            with torch.no_grad():
                assert torch.equal(compiled(*inputs(tokens)), module(*inputs(tokens)))


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj"])
def test_a_frozen_weight_has_no_gradient(frozen):
    module = kernelized(Mode.TRAINING)
    expected = step(module, module, 20)
    module.zero_grad(set_to_none=True)
    getattr(module, frozen).requires_grad_(False)
    x, ids, weights = inputs(20)
    out = module(x, ids, weights)
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape))
    assert getattr(module, frozen).grad is None
    assert torch.equal(x.grad, expected[1])


def test_operators_are_sound():
    """Schema, fake and autograd registration of the layer's own operators."""
    layers = kernel.load().layers
    module = ToyExperts()
    x, ids, weights = inputs(30)
    arguments = (x, ids, weights, module.gate_up_proj, module.down_proj, None, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(layers._experts, arguments, test_utils=checks)
    with torch.no_grad():
        out, *rings = layers._experts(*arguments)
        backward = (torch.ones_like(out), *arguments[:5], *rings, None, 15)
        torch.library.opcheck(layers._experts_backward, backward, test_utils=checks)


def test_what_it_does_not_compute_is_refused():
    x, ids, weights = inputs(8)
    with pytest.raises(ValueError, match=r"activation is GELU; the kernel computes SwiGLU"):
        kernelized(Mode.INFERENCE, activation=nn.GELU)(x, ids, weights)
    module = kernelized(Mode.INFERENCE)
    with pytest.raises(ValueError, match=r"x has shape \(1, 8, 128\)"):
        module(x[None], ids, weights)
    module.gate_up_proj_bias = torch.zeros(EXPERTS, 2 * WIDTH)
    with pytest.raises(ValueError, match="biases or transposed weights"):
        module(x, ids, weights)
