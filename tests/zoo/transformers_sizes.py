"""Small sizes for a config of Transformers: rules by field name, then exceptions by model type."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

# sizes of fields by patterns of their names; the first row that matches counts
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
# fields that a config class derives from others, or does not accept as arguments
_DERIVED = (
    *("id2label", "label2id", "model_type", "transformers_version", "architectures"),
    *("per_layer_config", "out_features", "out_indices", "stage_names", "_out_features",
        "_out_indices"),
)  # fmt: skip
_ONE_HEAD_OF_TEXT = {"num_attention_heads": 1, "num_key_value_heads": 1}
_HEAD = {"head_dim": 64}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 64}
_ONE_HEAD = {"text_config.num_attention_heads": 1, "text_config.num_key_value_heads": 1}
_ROPE = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
_MROPE = {
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8] * 4},
}
_PE = {
    "vision_config.architecture": "vit_tiny_patch16_224",
    "vision_config.global_pool": "avg",
    "vision_config.model_args": {"img_size": 64, "depth": 2},
}
_SAM2 = {
    "prompt_encoder_config.image_size": 64,
    "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
_NARROW_CODEC = {"num_filters": 4, "depths": [1] * 7}
_DETR = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_in_channels": [128, 128, 128],
}
_NARROW = {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}
_SMALL_BACKBONE = {"backbone_config.image_size": 64}
_AHEAD = {
    "prediction_length": 8,
    "context_length": 16,
    "num_time_features": 1,
    "feature_size": ...,
    "d_model": 128,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}
_PROMPTS = {
    "prompt_encoder_config.image_size": 224,
    "prompt_encoder_config.image_embedding_size": 14,
    "vision_config.output_channels": 128,
    "vision_config.num_pos_feats": 64,
}
# exceptions to the rules, by model type; a dotted name is a field of a nested config
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
    "zamba": {"num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 256, "attention_head_dim": 128, "mamba_expand": 2},
    "step3p7": {"text_config.sliding_window": 8},
    "colqwen2": {f"vlm_config.{name}": heads for name, heads in _ONE_HEAD.items()},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 300, **_ONE_HEAD},
    "glm5_next_text": {"index_topk": 16},
    "glm5_next": {"text_config.index_topk": 16},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1,
        "n_output_layers": 1},
    "hy_v4_vl_text": {"qk_rope_head_dim": 64},
    "hy_v4_vl": {"text_config.qk_rope_head_dim": 64},
    "beam": {"rope_parameters": ...},
    "lilt": {"hidden_size": 120},
    "muse_spark": {"audio_config.num_hidden_layers": 4},
    "vits": {"vocab_size": 320},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "laguna": {"num_attention_heads_per_layer": [2, 2]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 256},
    "audio-spectrogram-transformer": {"max_length": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"]},
    "reformer": {"axial_pos_embds": False},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {"intermediate_size": 256, "activation_sparsity_pattern": [0.0, 0.0],
        "num_kv_shared_layers": 0},
    "gemma3n": {"text_config.intermediate_size": 256,
        "text_config.activation_sparsity_pattern": [0.0, 0.0],
        "text_config.num_kv_shared_layers": 0},
    "paddleocr_vl": {"text_config.head_dim": 128},
    "glm4v_moe": {"text_config.head_dim": 128},
    "codegen": {"n_head": 4, "rotary_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mamba2": {"num_heads": 4, "head_dim": 64},
    "emu3": {"text_config.pad_token_id": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _AHEAD),
    "bailing_hybrid": {"num_experts_per_token": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_config.hidden_size_global": 128,
        "decoder_config.hidden_size_global": 128, "patcher_config.vocab_size": 320},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGA": 9}},
    "cohere_compass_text": _ROPE,
    "cohere_compass": {f"text_config.{k}": v for k, v in _ROPE.items()},
    "clap": {"audio_config.hidden_size": 768},
    "cvt": {"depth": [1, 2, 3]},
    **dict.fromkeys(
        (
            *("d_fine", "deimv2", "rt_detr", "rt_detr_v2"),
            *("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4")), _DETR),
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 128},
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    **dict.fromkeys(("mask2former", "maskformer"), _SMALL_BACKBONE),
    "mimo_v2_flash": {"num_attention_heads": 8},
    "mimi": {"codebook_dim": 256},
    "omdet-turbo": {"vision_features_channels": [128, 128, 128]},
    "edgetam_vision_model": {"backbone_config.architecture": "repvit_m1"},
    "efficientnet": _NARROW,
    "align": {"projection_dim": 160} | {f"vision_config.{k}": v for k, v in _NARROW.items()},
    "ernie4_5_vl_moe": {"text_config.head_dim": 128},
    "esmc": {"vocab_size": 320},
    "fastspeech2_conformer": {"vocab_size": 320},
    "fastspeech2_conformer_with_hifigan": {"model_config.vocab_size": 320},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 32},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "4/8"},
    "granite_docling_vision": {"image_size": 256, "deepstack_visual_indexes": [0, 1]},
    "hunyuan_vl_text": _MROPE,
    "hunyuan_vl": {f"text_config.{k}": v for k, v in _MROPE.items()},
    "kosmos-2": {"latent_query_num": 4},
    "lw_detr": {"backbone_config.image_size": 256, "backbone_config.num_hidden_layers": 4,
        "projector_scale_factors": [1.0], "num_feature_levels": 1},
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "num_hidden_layers": ...},
    "mistral_large4_text": {"kv_source_layers": [0, 0], "mlp_layer_types": ["dense", "sparse"]},
    "mistral_large4": {"text_config.kv_source_layers": [0, 0],
        "text_config.mlp_layer_types": ["dense", "sparse"]},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [128] * 4, "depths": [1] * 4},
    "neucodec": {"quantization_dim": 256},
    "xcodec2": {"quantization_dim": 256},
    **dict.fromkeys(("sam", "sam_hq"), _PROMPTS),
    "sam2": _SAM2,
    "edgetam": _SAM2 | {"vision_config.backbone_config.architecture": "repvit_m1"},
    "sam3_tracker": {"prompt_encoder_config.image_size": 224,
        "vision_config.backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]]},
    "pe_video_encoder": _PE,
    "pe_audio_video_encoder": {f"video_config.{k}": v for k, v in _PE.items()},
    "pe_video": {f"video_config.{k}": v for k, v in _PE.items()},
    "perception_lm": {"vision_config.architecture": "vit_tiny_patch16_224",
        "vision_config.model_args": {"img_size": 64, "embed_dim": 192, "depth": 2}},
    "sapiens2": {"num_key_value_heads_per_layer": [2, 2], "head_config.upsample_out_channels": [64],
        "head_config.upsample_kernel_sizes": [4], "head_config.conv_out_channels": [64],
        "head_config.conv_kernel_sizes": [1]},
    "seggpt": {"image_size": [128, 64]},
    "uvdoc": {"backbone_config.out_indices": [1, 2, 3, 4, 5, 6]},
    **dict.fromkeys(
        ("vibevoice_acoustic_tokenizer_encoder", "vibevoice_acoustic_tokenizer_decoder"),
        _NARROW_CODEC),
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "timm_backbone": {"backbone": "resnet10t"},
    "tvp": {"max_img_size": 64, "num_frames": 2, "visual_prompt_size": 8},
    "vision-text-dual-encoder": {"vision_config.pooler_output_size": 128},
    "xcodec": {"codebook_dim": 256},
    "zamba2": {"mamba_headdim": 128, "attention_head_dim": 128, "num_hidden_layers": 2,
        "layers_block_type": ["linear_attention", "hybrid"]},
    "blip-2": {"image_token_index": 7},
    "instructblip": {"image_token_index": 7},
    "instructblipvideo": {"video_token_index": 7},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip
VOCABULARY = 320


def tiny_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Return the default config of a model type with small sizes, and with these fields."""
    config_class = CONFIG_MAPPING[kind]
    return config_class(**_shrunk(config_class(), OVERRIDES.get(kind, {}) | fields))


def _shrunk(config: PreTrainedConfig, overrides: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    plain = config.to_dict()
    latent = "qk_rope_head_dim" in plain  # the class derives its other head sizes
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
    if path and len(plain.get("out_indices") or ()) > 1:
        out |= _stages(plain)
    out |= {
        k[len(path) :]: v
        for k, v in overrides.items()
        if k.startswith(path) and "." not in k[len(path) :]
    }
    return {k: v for k, v in out.items() if v is not Ellipsis}


def _stages(plain: dict[str, Any]) -> dict[str, Any]:
    """Return fields that keep the number of feature maps of a nested backbone."""
    indices = plain["out_indices"]
    if len(plain.get("stage_names") or ()) == plain.get("num_hidden_layers", 0) + 1:
        return {
            "num_hidden_layers": len(indices),
            "out_indices": list(range(1, len(indices) + 1)),
        }
    return {"out_indices": indices}


def _small(key: str, value: Any) -> tuple[bool, Any]:
    """Return whether to set a field, else the class derives it, and its small value."""
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
                if re.search(pattern, key) and key != "encode_proj_layers":
                    return True, [min(v, size) for v in value]
        return True, value
    if isinstance(value, dict):
        small = {k: _small(k, v) for k, v in value.items()}
        return True, {k: v for k, (kept, v) in small.items() if kept}
    return True, value
