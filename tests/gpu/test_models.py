"""Every model type on the CUDA kernel in one process: blocks in bf16, whole models, fp32 weights under autocast."""

import pytest
import torch

from mok_hf import UnsupportedError
from tests.models.compare import relative_error, step
from tests.models.ranks import native, patched, rank_batch
from tests.models.test_bf16 import (  # noqa: F401
    test_block_against_fp64,
    test_block_against_fp64_beyond_the_clamp,
    test_model_in_bf16,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_backend"), pytest.mark.timeout(60)]


def test_fp32_weights_need_autocast(checkpoints):
    """Gradients come back in fp32, as near to the fp32 model's as those of the unpatched model under autocast."""
    path = checkpoints("qwen3_moe")
    inputs = {name: value.cuda() for name, value in rank_batch("qwen3_moe", 0).items()}
    model = patched("qwen3_moe", path).cuda()
    with pytest.raises(UnsupportedError, match=r"compute in float32 on cuda.*bfloat16.*--mixed_precision bf16"):
        model(**inputs)
    exact = step(native("qwen3_moe", path).cuda(), inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, plain = step(model, inputs), step(native("qwen3_moe", path).cuda(), inputs)
    assert all(value.dtype == torch.float32 for name, value in ours.items() if name.startswith("grad "))
    for name, want in exact.items():
        assert relative_error(ours[name], want) <= 1.5 * relative_error(plain[name], want) + 2e-3, name


def test_generation_matches_the_unpatched_model(checkpoints):
    """Prompts, then one token at a time: calls of many sizes on one workspace, without a backward."""
    path = checkpoints("qwen3_moe")
    prompt = torch.randint(3, 150, (3, 17), generator=torch.Generator().manual_seed(0)).cuda()
    logits = {}
    for name, model in (
        ("ours", patched("qwen3_moe", path, dtype=torch.bfloat16)),
        ("plain", native("qwen3_moe", path, dtype=torch.bfloat16)),
        ("exact", native("qwen3_moe", path)),
    ):
        forced, cache, out = prompt, None, []
        model = model.cuda().eval()
        with torch.no_grad():
            for position in range(8):
                result = model(input_ids=forced, past_key_values=cache, use_cache=True)
                cache, forced = result.past_key_values, prompt[:, position : position + 1]
                out.append(result.logits[:, -1])
        logits[name] = torch.stack(out)
    assert relative_error(logits["ours"], logits["exact"]) <= 1.5 * relative_error(logits["plain"], logits["exact"])
