"""Transformers: one class of every model type, with a head where there is one."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from zoo.architecture import Architecture

# the class of a model type is that of the first of these tasks it has
TASKS = (
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
    "TIME_SERIES_PREDICTION",
    "MASK_GENERATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "TOKEN_CLASSIFICATION",
    "PRETRAINING",
)
# sizes of fields, by the end of their names; the first row that matches counts
SIZES: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers|num_conv_(pos_embeddings|pos_embedding_groups)", 0),
    (r"(^|_)(num_experts|n_routed_experts|num_local_experts|n_experts|experts)$", 4),
    (r"(num_experts_per_tok|top_k|topk|moe_topk|moe_k|experts_top_k|num_experts_per_token)$", 2),
    (r"upsample_groups$", 128),
    (r"^(n_group|topk_group|num_expert_group|n_groups)$", 1),
    (r"^(n_shared_experts|moe_num_shared_experts|num_shared_experts)$", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)$", 64),
    (r"(qk_rope_head_dim|rope_head_dim)$", 32),
    (r"(qk_nope_head_dim|qk_head_dim|v_head_dim|head_dim|d_kv|kv_channels|d_head|head_size)$", 64),
    (r"(vocab_size|n_vocab|num_embeddings)$", 320),
    (
        r"(^|_)(num_(hidden_|encoder_|decoder_)?layers?|n_layers?|depth|encoder_layers|"
        r"decoder_layers|num_blocks|n_blocks|\w+_layers|num_hidden_groups|\w+_depth)$",
        2,
    ),
    (r"(key_value_heads|num_kv_heads|n_head_kv|kv_heads)$", 2),
    (r"(attention_heads|num_heads|n_heads?|_heads|attn_heads)$", 2),
    (
        r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|feed_forward_size|"
        r"dim_feedforward|feedforward_dim|inner_dim|intermediate_dim|mlp_dim|mlp_hidden_size|"
        r"linear_units|feedforward_size|ff_dim|ffn_size)$",
        256,
    ),
    (
        r"(^|_)(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|d_embed|"
        r"projection_dim|model_dim|emb_dim|width|embedding_dim|hidden_channels|proj_dim|"
        r"output_dim|adapter_dim|dim_model|bottleneck_size|lru_width)$",
        128,
    ),
)
_LISTS: tuple[tuple[str, int], ...] = (
    (r"depths?$|num_layers|layers?$|num_blocks", 1),
    (r"heads$", 2),
    (r"embed_dims?$|hidden_dims?$", 128),
)
# what a class derives from other fields, or takes from nobody
_DERIVED = (
    *("id2label", "label2id", "model_type", "transformers_version", "architectures"),
    *(
        "per_layer_config",
        "out_features",
        "out_indices",
        "stage_names",
        "_out_features",
        "_out_indices",
    ),
)
_ONE_HEAD_OF_TEXT = {"num_attention_heads": 1, "num_key_value_heads": 1}
_HEAD = {"head_dim": 64}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 64}
_ONE_HEAD = {"text_config.num_attention_heads": 1, "text_config.num_key_value_heads": 1}
# what the rules get wrong, by model type; a dotted name reaches into a part
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _ONE_HEAD),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _ONE_HEAD_OF_TEXT),
    "bamba": _MAMBA,
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "mistral4"), _HEAD),
    "longcat_flash": {"head_dim": 32},
    "glm4v_moe_text": {"head_dim": 128},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "kimi_linear": {"num_experts_per_token": 2, "num_experts_per_tok": 2},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 256,
        "attention_head_dim": 128,
        "mamba_expand": 2,
    },
    "step3p7": {"text_config.sliding_window": 8},
    "colqwen2": {f"vlm_config.{name}": heads for name, heads in _ONE_HEAD.items()},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 300, **_ONE_HEAD},
    "glm5_next_text": {"index_topk": 16},
    "glm5_next": {"text_config.index_topk": 16},
    "beam": {"rope_parameters": ...},
    "lilt": {"hidden_size": 120},
    "muse_spark": {"audio_config.num_hidden_layers": 4},
    "vits": {"vocab_size": 320},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "laguna": {"num_attention_heads_per_layer": [2, 2]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 256},
    "audio-spectrogram-transformer": {"max_length": 128},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "reformer": {"axial_pos_embds": False},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "intermediate_size": 256,
        "activation_sparsity_pattern": [0.0, 0.0],
        "num_kv_shared_layers": 0,
    },
    "gemma3n": {
        "text_config.intermediate_size": 256,
        "text_config.activation_sparsity_pattern": [0.0, 0.0],
        "text_config.num_kv_shared_layers": 0,
    },
    "paddleocr_vl": {"text_config.head_dim": 128},
    "glm4v_moe": {"text_config.head_dim": 128},
    "codegen": {"n_head": 4, "rotary_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mamba2": {"num_heads": 4, "head_dim": 64},
    "emu3": {"text_config.pad_token_id": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "detr": {
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "use_timm_backbone": False,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
# further ones whose code reads the weight of a layer: what is in brackets, type, class and fields
VARIANTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        " (slow but exact)",
        "bloom",
        "BloomForCausalLM",
        {"pretraining_tp": 2, "slow_but_exact": True},
    ),
    ("", "detr", "DetrForSegmentation", {}),
    ("", "mobilebert", "MobileBertForPreTraining", {}),
)
VOCABULARY = 320


def architectures() -> list[Architecture]:
    """Give one architecture per model type of the auto classes, and the variants."""
    every = [("", kind, name, {}) for kind, name in classes().items()]
    return [
        Architecture(f"transformers/{name}{word}", partial(_build, kind, name, fields), inputs_of)
        for word, kind, name, fields in (*every, *VARIANTS)
    ]


def classes() -> dict[str, str]:
    """Return the name of one class of every model type."""
    every: dict[str, str] = {}
    names = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS]
    for name in (*names, "MODEL_MAPPING_NAMES"):
        for kind, cls in getattr(modeling_auto, name, {}).items():
            every.setdefault(kind, cls if isinstance(cls, str) else cls[-1])
    unique: dict[str, str] = {}
    for kind, name in every.items():
        if name not in unique.values():
            unique[kind] = name
    return unique


def tiny_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Give the default config of a model type with small sizes, and with these fields."""
    config_class = CONFIG_MAPPING[kind]
    return config_class(**_shrunk(config_class(), OVERRIDES.get(kind, {}) | fields))


def _shrunk(config: PreTrainedConfig, overrides: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    plain = config.to_dict()
    latent = "qk_rope_head_dim" in plain  # its other head sizes follow
    for key, value in plain.items():
        if key in _DERIVED or (latent and key in ("head_dim", "qk_head_dim")):
            continue
        part = vars(config).get(key, value)
        if isinstance(part, PreTrainedConfig):
            out[key] = {"model_type": part.model_type, **_shrunk(part, overrides, f"{path}{key}.")}
        else:
            kept, small = _small(key, value)
            if kept:
                out[key] = small
    out |= {
        k[len(path) :]: v
        for k, v in overrides.items()
        if k.startswith(path) and "." not in k[len(path) :]
    }
    return {k: v for k, v in out.items() if v is not Ellipsis}


def _small(key: str, value: Any) -> tuple[bool, Any]:
    """Give a small value of a field, or say that the class shall derive it."""
    if not isinstance(key, str):
        return True, value
    if key == "vocab_size" and value is None:
        return True, VOCABULARY
    if isinstance(value, bool) or value is None:
        return value is not None, value
    if isinstance(value, int):
        if re.search(r"(token_id|token_index|_id|_token)$", key):
            return True, value if value < VOCABULARY else VOCABULARY - 1 - value % 64
        if re.search(r"image_size$|^img_size$", key):
            return True, min(value, 224)
        if re.search(r"num_(object_)?queries$|^top_k_queries$", key):
            return True, min(value, 8)
        for pattern, size in SIZES:
            if re.search(pattern, key):
                return True, min(value, size) if size else value
        return True, value
    if isinstance(value, (list, tuple)):
        if key in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
            return False, None
        if value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            if re.search(r"token_id", key):
                return True, [_small(key, v)[1] for v in value]
            if re.search(r"image_size", key):
                return True, [min(v, 224) for v in value]
            if key == "mrope_section":
                return True, [v * 32 // sum(value) for v in value]
            for pattern, size in _LISTS:
                if re.search(pattern, key):
                    return True, [min(v, size) for v in value]
        return True, value
    if isinstance(value, dict):
        small = {k: _small(k, v) for k, v in value.items()}
        return True, {k: v for k, (kept, v) in small.items() if kept}
    return True, value


def _build(kind: str, name: str, fields: dict[str, Any]) -> nn.Module:
    made = getattr(transformers, name)
    own = getattr(made.config_class, "model_type", None)  # of a part, where the class is of a part
    kind = own if own in CONFIG_MAPPING and own not in (kind, "") else kind
    model: nn.Module = made(tiny_config(kind, **fields))
    return model


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Return inputs by what the forward of a model asks for, the likeliest first."""
    config = model.config
    asked = inspect.signature(model.forward).parameters
    main = model.main_input_name
    common: dict[str, Any] = {"use_cache": False} if "use_cache" in asked else {}
    ids = {
        "input_ids": torch.randint(5, 200, (1, 16)),
        "attention_mask": torch.ones(1, 16, dtype=torch.long),
        "bbox": torch.tensor([[[1, 1, 20, 20]] * 16]),
    }
    text = {name: value for name, value in ids.items() if name in asked}
    if "decoder_input_ids" in asked:
        common["decoder_input_ids"] = torch.randint(5, 30, (1, 8))
    sees = next((n for n in ("pixel_values", "pixel_values_videos", "images") if n in asked), "")
    hears = next((n for n in ("input_features", "input_values", "audio_mel") if n in asked), "")
    found: list[dict[str, Any]] = [text] if "input_ids" in asked else []
    images = [{sees: torch.randn(shape)} for shape in _images(config, main)] if sees else []
    sounds = [{hears: sound} for sound in _sounds(config)] if hears else []
    if f"{hears}_mask" in asked:
        sounds += [{**given, f"{hears}_mask": _whole(given[hears])} for given in sounds]
    found += images + sounds
    if "input_ids" in asked:
        found += [{**text, **other} for other in images + sounds]
    if "grid_thw" in asked:
        patch = _size(config, "patch_size") or 14
        channels = _size(config, "in_channels", "num_channels") or 3
        patches = torch.randn(16, channels * (_size(config, "temporal_patch_size") or 1) * patch**2)
        grid = torch.tensor([[1, 4, 4]])
        for name in ("hidden_states", "pixel_values"):
            found += [{name: patches, "grid_thw": grid}] if name in asked else []
    if "past_values" in asked:
        length, width = (
            config.to_dict().get("context_length", 64),
            _size(config, "num_input_channels"),
        )
        found += [{"past_values": torch.randn(1, length, width)}] if width else []
        found += [{"past_values": [torch.randn(64)], "freq": [0]}]
    if "inputs_embeds" in asked:
        found += [{"inputs_embeds": torch.randn(1, 16, _size(config, "hidden_size") or 128)}]
    if "hidden_states" in asked:
        found += [{"hidden_states": torch.randn(1, 16, _size(config, "hidden_size") or 128)}]
    if main in ("pixel_values", "input_features", "input_values"):
        found.sort(key=lambda given: main not in given)
    return [{**given, **common} for given in found]


def _size(config: Any, *names: str) -> Any:
    parts = ("vision_config", "backbone_config", "audio_config", "encoder_config")
    for name in names:
        for part in (config, *(getattr(config, p, None) for p in parts)):
            value = (part if isinstance(part, dict) else vars(part)).get(name) if part else None
            if value is not None:
                return value
    return None


def _images(config: Any, main: str) -> list[tuple[int, ...]]:
    size = _size(config, "image_size", "img_size", "input_size") or 64
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    sides = (*size,) if isinstance(size, (list, tuple)) else (size, size)
    channels = _size(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _size(config, "num_frames", "frames_per_clip") or 8
    sizes = dict.fromkeys((sides[-2:], (64, 64), (224, 224)))
    shapes = [(1, channels, *side) for side in sizes] + [(1, frames, channels, *sides[-2:])]
    return shapes if main != "pixel_values_videos" else shapes[::-1]


def _whole(sound: torch.Tensor) -> torch.Tensor:
    """Give the mask of a sound without padding; time is its longer axis."""
    return torch.ones(1, max(sound.shape[1:]), dtype=torch.bool)


def _sounds(config: Any) -> list[torch.Tensor]:
    names = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim")
    bins = _size(config, *names) or 80
    length = 2 * (_size(config, "max_source_positions") or 64)
    shapes = [(1, bins, length), (1, length, bins), (1, 64, bins), (1, 4000), (1, 1, 4000)]
    return [torch.randn(*shape) for shape in shapes]
