"""Tiny random checkpoints of every supported model type, in the Hugging Face per-expert format.

Hidden, intermediate and shared widths are multiples of 64 and all different (a transposed matrix cannot pass), there
are 8 experts and 3 routes a token, and no parameter is left at a constant: a tensor that is lost, doubled or read from
the wrong place changes the result.
"""

# Configs are written as the keywords a config class takes.
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

VOCABULARY = 160
FIRST_SPECIAL_ID = 150  # image, audio and codec ids live at and above; random text stays below
EXPERTS, ROUTES, HIDDEN, INTERMEDIATE = 8, 3, 128, 192

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    initializer_range=0.08,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_LATENT_ATTENTION: dict[str, Any] = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32
)
_INDEXER: dict[str, Any] = dict(index_n_heads=2, index_head_dim=32, index_topk=16)
# One dense layer and two MoE layers: every run has layers that share the kernel's workspace.
_SIGMOID: dict[str, Any] = dict(
    _COMMON,
    num_hidden_layers=3,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=ROUTES,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=INTERMEDIATE,
    intermediate_size=320,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
_ONE_GROUP: dict[str, Any] = dict(n_group=1, topk_group=1)
_SOFTMAX: dict[str, Any] = dict(
    _COMMON,
    num_hidden_layers=2,
    num_experts=EXPERTS,
    num_experts_per_tok=ROUTES,
    moe_intermediate_size=INTERMEDIATE,
    intermediate_size=320,
    head_dim=32,
    norm_topk_prob=True,
)
_LINEAR_ATTENTION: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
_VISION: dict[str, Any] = dict(
    depth=1,
    hidden_size=64,
    intermediate_size=96,
    num_heads=2,
    out_hidden_size=HIDDEN,
    patch_size=4,
    num_position_embeddings=16,
)
_SECTIONS: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6])
_QWEN_IDS: dict[str, Any] = dict(image_token_id=151, video_token_id=152, vision_start_token_id=153)
_AUDIO: dict[str, Any] = dict(
    encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=96, d_model=64, output_dim=HIDDEN, n_window=4,
    num_mel_bins=16, downsample_hidden_size=16, max_source_positions=64,
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How one row of the model table is built and loaded.

    Attributes:
        model_type: what the checkpoint's config.json says.
        config: keywords of the config; the values of sub-configs are dictionaries.
        auto_class: name in `transformers` of the class that loads it.
        embeds: the model takes `inputs_embeds`, not `input_ids`.
        config_path: which nested config the auto class wants, e.g. ("talker_config",).
    """

    model_type: str
    config: dict[str, Any] = field(repr=False)
    auto_class: str = "AutoModelForCausalLM"
    embeds: bool = False
    config_path: tuple[str, ...] = ()


_SHARED_64: dict[str, Any] = dict(shared_expert_intermediate_size=64)
_VISION_LM = "AutoModelForImageTextToText"
_QWEN3_VISION: dict[str, Any] = dict(_VISION, deepstack_visual_indexes=[0])
_GLM5_TEXT: dict[str, Any] = dict(
    _SIGMOID,
    **_ONE_GROUP,
    **_INDEXER,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=0,
    qk_nope_head_dim=32,
    v_head_dim=32,
    linear_head_dim=32,
    linear_num_heads=2,
    index_kpool=4,
    hc_mult=2,
    swiglu_limit=0.3,
    layer_types=["linear_attention", "indexed_attention", "linear_attention"],
    mlp_layer_types=["dense", "sparse", "sparse"],
)
_GLM5_TEXT.pop("first_k_dense_replace")

KINDS: dict[str, Kind] = {
    "deepseek_v2": Kind(
        "deepseek_v2",
        dict(_SIGMOID, **_LATENT_ATTENTION, topk_method="group_limited_greedy", n_shared_experts=2, head_dim=16),
    ),
    "deepseek_v3": Kind("deepseek_v3", dict(_SIGMOID, **_LATENT_ATTENTION)),
    "deepseek_v32": Kind("deepseek_v32", dict(_SIGMOID, **_LATENT_ATTENTION, **_INDEXER)),
    "deepseek_v4": Kind(
        "deepseek_v4",
        dict(
            _COMMON,
            **_INDEXER,
            num_hidden_layers=3,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=ROUTES,
            moe_intermediate_size=INTERMEDIATE,
            swiglu_limit=0.5,
            head_dim=32,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=32,
            sliding_window=16,
            hc_mult=2,
            mlp_layer_types=["hash_moe", "moe", "moe"],
            num_key_value_heads=1,
        ),
    ),
    "qwen2_moe": Kind("qwen2_moe", dict(_SOFTMAX, shared_expert_intermediate_size=448)),
    "qwen3_moe": Kind("qwen3_moe", dict(_SOFTMAX)),
    "qwen3_next": Kind("qwen3_next", dict(_SOFTMAX, **_LINEAR_ATTENTION, **_SHARED_64)),
    "qwen3_5_moe_text": Kind("qwen3_5_moe_text", dict(_SOFTMAX, **_LINEAR_ATTENTION, **_SHARED_64)),
    "qwen3_5_moe": Kind(
        "qwen3_5_moe",
        dict(
            text_config=dict(
                _SOFTMAX, **_LINEAR_ATTENTION, **_SHARED_64,
                rope_parameters=dict(_SECTIONS, partial_rotary_factor=0.5, mrope_section=[2, 3, 3]),
            ),
            vision_config=_VISION,
            **_QWEN_IDS,
            vision_end_token_id=154,
        ),
        _VISION_LM,
    ),
    "qwen3_vl_moe": Kind(
        "qwen3_vl_moe",
        dict(
            text_config=dict(_SOFTMAX, rope_parameters=_SECTIONS),
            vision_config=_QWEN3_VISION,
            **_QWEN_IDS,
            vision_end_token_id=154,
            tie_word_embeddings=False,
        ),
        _VISION_LM,
    ),
    "qwen3_omni_moe_thinker": Kind(
        "qwen3_omni_moe_thinker",
        dict(
            text_config=dict(_SOFTMAX, rope_parameters=_SECTIONS),
            vision_config=_QWEN3_VISION,
            audio_config=_AUDIO,
            image_token_id=151,
            video_token_id=152,
            vision_start_token_id=153,
            audio_token_id=155,
            audio_start_token_id=156,
        ),
        _VISION_LM,
    ),
    "qwen3_omni_moe_talker": Kind(
        "qwen3_omni_moe",
        dict(
            talker_config=dict(
                text_config=dict(_SOFTMAX, **_SHARED_64, rope_parameters=_SECTIONS),
                code_predictor_config=dict(
                    _COMMON, num_hidden_layers=1, intermediate_size=96, head_dim=32, num_code_groups=2
                ),
                num_code_groups=2,
                thinker_hidden_size=HIDDEN,
                spatial_merge_size=2,
                vocab_size=VOCABULARY,
            )
        ),
        "Qwen3OmniMoeTalkerForConditionalGeneration",
        embeds=True,
        config_path=("talker_config",),
    ),
    "glm4_moe": Kind("glm4_moe", dict(_SIGMOID, **_ONE_GROUP, head_dim=32)),
    "glm4v_moe": Kind(
        "glm4v_moe",
        dict(
            text_config=dict(
                _SIGMOID, **_ONE_GROUP, head_dim=32,
                rope_parameters=dict(_SECTIONS, mrope_section=[2, 3, 3], partial_rotary_factor=0.5),
            ),
            vision_config=dict(_VISION, image_size=16),
            image_token_id=151,
            video_token_id=152,
        ),
        _VISION_LM,
    ),
    "glm4_moe_lite": Kind("glm4_moe_lite", dict(_SIGMOID, **_LATENT_ATTENTION, **_ONE_GROUP)),
    "glm_moe_dsa": Kind("glm_moe_dsa", dict(_SIGMOID, **_LATENT_ATTENTION, **_ONE_GROUP, **_INDEXER)),
    "glm5_next": Kind(
        "glm5_next",
        dict(
            text_config=_GLM5_TEXT,
            vision_config=dict(_VISION, image_size=16, projection_intermediate_size=96),
            image_token_id=151,
            video_token_id=152,
        ),
        _VISION_LM,
    ),
    "kimi_linear": Kind(
        "kimi_linear",
        dict(
            _SIGMOID,
            **_LATENT_ATTENTION,
            **_ONE_GROUP,
            num_experts=EXPERTS,
            linear_head_dim=32,
            linear_num_heads=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
    ),
    "kimi_k25": Kind(
        "kimi_k25",
        dict(
            text_config=dict(_SIGMOID, **_LATENT_ATTENTION, model_type="deepseek_v3"),
            vision_config=dict(
                num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=2,
                patch_size=4, pos_emb_height=4, pos_emb_width=4,
            ),
            projection_hidden_size=64,
            image_token_id=151,
            video_token_id=152,
            tie_word_embeddings=False,
        ),
        _VISION_LM,
    ),
    "kimi_k2": Kind("kimi_k2", dict(_SIGMOID, **_LATENT_ATTENTION), "DeepseekV3ForCausalLM"),
}  # fmt: skip


def auto_class(kind: str) -> Any:
    """The transformers class that loads checkpoints of this kind."""
    return getattr(transformers, KINDS[kind].auto_class)


def build(kind: str, root: Path, name: str | None = None, **overrides: Any) -> Path:
    """Writes the checkpoint of `kind` under `root` unless it is there; returns its folder.

    Args:
        kind: a key of KINDS.
        root: parent folder.
        name: folder name for a variant; required with `overrides`.
        overrides: config keywords (of the text config where there is one) that differ from the kind's own.
    """
    path = root / (name or kind)
    if (path / "config.json").exists():
        return path
    model = make(kind, **overrides)
    model.save_pretrained(path)
    publish(kind, path)
    return path


def publish(kind: str, path: Path) -> None:
    """Rewrites what `save_pretrained` wrote where published checkpoints of the kind are named or laid out otherwise."""
    if kind == "kimi_k2":  # DeepSeek-V3 weights under their own model type
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}, indent=2))
    rewrite = {
        # The dense layer's MLP is called `mlp` there, those of the MoE layers `block_sparse_moe`.
        "kimi_linear": lambda name, tensor: (re.sub(r"block_sparse_moe(?=\.(gate|up|down)_proj)", "mlp", name), tensor),
        # Only the vision tower has `blocks`.
        "kimi_k25": lambda name, tensor: (name.replace("model.blocks", "model.layers"), tensor),
        # [E, D, 2I] and [E, I, D]
        "qwen3_vl_moe": lambda name, tensor: (name, tensor.mT.contiguous() if ".experts." in name else tensor),
    }.get(kind)
    if rewrite is not None:
        file = path / "model.safetensors"
        tensors = dict(rewrite(name, tensor) for name, tensor in load_file(file).items())
        save_file(tensors, file, metadata={"format": "pt"})


def make(kind: str, **overrides: Any) -> PreTrainedModel:
    """The model of `kind` with fp32 weights drawn from a fixed seed."""
    seed = sum(map(ord, kind))
    torch.manual_seed(seed)
    config = config_of(kind, **overrides)
    model_class = auto_class(kind)
    build_model = getattr(model_class, "from_config", None) or model_class._from_config
    model = build_model(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name.endswith("tid2eid"):
                tensor.copy_(torch.randint(0, EXPERTS, tensor.shape, generator=generator))
            elif ".experts." in tensor_name:
                # Transformers 5.24 leaves those of the Qwen3-Omni talker as the allocator returned them.
                tensor.copy_(_COMMON["initializer_range"] * torch.randn(tensor.shape, generator=generator))
            elif tensor_name.endswith("e_score_correction_bias") or (
                isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1 and tensor.min() == tensor.max()
            ):
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def config_of(kind: str, **overrides: Any) -> PreTrainedConfig:
    """The config of `kind`; `overrides` go to the text config where there is one."""
    spec = KINDS[kind]
    values = dict(spec.config)
    target = values
    for key in (*spec.config_path, "text_config"):
        if key in target:
            target[key] = dict(target[key])
            target = target[key]
    target.update(overrides)
    config = AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else spec.model_type, **values)
    for key in spec.config_path:
        config = getattr(config, key)
    return config


def batch(kind: str, lengths: list[int], seed: int = 0, padded: bool = False) -> dict[str, torch.Tensor]:
    """Random model inputs with labels.

    Args:
        kind: a key of KINDS.
        lengths: tokens of each sequence; shorter ones are padded on the right.
        seed: of the ids.
        padded: add an attention mask even if nothing is padded.

    Returns:
        `input_ids [B, T]` (or `inputs_embeds [B, T, D]`), `labels [B, T]` (-100 on padding) and, where sequences are
        padded, `attention_mask [B, T]`.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    longest = max(lengths)
    ids = torch.randint(3, FIRST_SPECIAL_ID, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    inputs = {"labels": ids.masked_fill(~mask, -100)}
    if KINDS[kind].embeds:
        table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        inputs["inputs_embeds"] = table[ids]
    else:
        inputs["input_ids"] = ids.masked_fill(~mask, 0)
    if padded or not bool(mask.all()):
        inputs["attention_mask"] = mask.long()
    return inputs
