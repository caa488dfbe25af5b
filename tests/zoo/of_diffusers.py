"""The zoo's models of diffusers: transformers and UNets, from tables of sizes and inputs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import diffusers
import torch
from torch import nn

from zoo.architecture import Architecture

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}
_UNET = {
    "sample_size": 16,
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "cross_attention_dim": 128,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
# class name, or the name of a variant of a class: the arguments that the class is made with
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "UNet2DConditionModel": ("UNet2DConditionModel", _UNET),
    "UNet2DConditionModel (SDXL)": ("UNet2DConditionModel",
        {**_UNET, "addition_embed_type": "text_time", "addition_time_embed_dim": 64,
            "projection_class_embeddings_input_dim": 6 * 64 + 128, "use_linear_projection": True}),
    "UNet2DModel": ("UNet2DModel",
        {"sample_size": 16, "block_out_channels": (64, 128), "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}),
    "UNet3DConditionModel": ("UNet3DConditionModel",
        {**_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}),
    "FluxTransformer2DModel": ("FluxTransformer2DModel",
        {**_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 128,
            "pooled_projection_dim": 128, "axes_dims_rope": (16, 24, 24)}),
    "SD3Transformer2DModel": ("SD3Transformer2DModel",
        {**_HEADS, "sample_size": 16, "num_layers": 2, "joint_attention_dim": 128,
            "caption_projection_dim": 128, "pooled_projection_dim": 128}),
    "DiTTransformer2DModel": ("DiTTransformer2DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 16, "in_channels": 4}),
    "PixArtTransformer2DModel": ("PixArtTransformer2DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 128,
            "caption_channels": 128}),
    "WanTransformer3DModel": ("WanTransformer3DModel",
        {**_HEADS, "num_layers": 2, "text_dim": 128, "freq_dim": 128, "ffn_dim": 256}),
    "CogVideoXTransformer3DModel": ("CogVideoXTransformer3DModel",
        {**_HEADS, "num_layers": 2, "text_embed_dim": 128, "time_embed_dim": 128,
            "sample_width": 16, "sample_height": 16, "sample_frames": 5, "max_text_seq_length": 8}),
    "LTXVideoTransformer3DModel": ("LTXVideoTransformer3DModel",
        {**_HEADS, "num_layers": 2, "cross_attention_dim": 128, "caption_channels": 128}),
    "AuraFlowTransformer2DModel": ("AuraFlowTransformer2DModel",
        {**_HEADS, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 128,
            "caption_projection_dim": 128, "sample_size": 16}),
    "QwenImageTransformer2DModel": ("QwenImageTransformer2DModel",
        {**_HEADS, "num_layers": 2, "joint_attention_dim": 128, "axes_dims_rope": (16, 24, 24)}),
    "Transformer2DModel": ("Transformer2DModel",
        {**_HEADS, "in_channels": 64, "num_layers": 2, "cross_attention_dim": 128,
            "norm_num_groups": 32}),
    "SanaTransformer2DModel": ("SanaTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 64,
            "cross_attention_dim": 128, "caption_channels": 128, "sample_size": 16}),
    "Lumina2Transformer2DModel": ("Lumina2Transformer2DModel",
        {"hidden_size": 128, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2,
            "num_kv_heads": 2, "axes_dim_rope": (16, 24, 24), "cap_feat_dim": 128,
            "sample_size": 16}),
    "LatteTransformer3DModel": ("LatteTransformer3DModel",
        {**_HEADS, "num_layers": 2, "sample_size": 16, "caption_channels": 128, "in_channels": 4,
            "out_channels": 8, "cross_attention_dim": 128, "patch_size": 2,
            "norm_type": "ada_norm_single", "video_length": 2}),
    "MochiTransformer3DModel": ("MochiTransformer3DModel",
        {**_HEADS, "num_layers": 2, "text_embed_dim": 128, "pooled_projection_dim": 128}),
    "CogView4Transformer2DModel": ("CogView4Transformer2DModel",
        {**_HEADS, "num_layers": 2, "text_embed_dim": 128, "time_embed_dim": 128,
            "condition_dim": 64}),
    "ChromaTransformer2DModel": ("ChromaTransformer2DModel",
        {**_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 128,
            "axes_dims_rope": (16, 24, 24), "approximator_hidden_dim": 128,
            "approximator_layers": 1}),
    "HunyuanVideoTransformer3DModel": ("HunyuanVideoTransformer3DModel",
        {**_HEADS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "rope_axes_dim": (16, 24, 24), "text_embed_dim": 128, "pooled_projection_dim": 128}),
    "Flux2Transformer2DModel": ("Flux2Transformer2DModel",
        {**_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 128,
            "axes_dims_rope": (16, 16, 16, 16), "timestep_guidance_channels": 64}),
    "PriorTransformer": ("PriorTransformer",
        {**_HEADS, "num_layers": 2, "embedding_dim": 128, "num_embeddings": 8}),
}  # fmt: skip


def architectures() -> list[Architecture]:
    """Return every model of the table."""
    return [
        Architecture(f"diffusers/{name}", partial(_build, *made), inputs_of)
        for name, made in MODELS.items()
    ]


def _build(name: str, sizes: dict[str, Any]) -> nn.Module:
    return getattr(diffusers, name)(**sizes)


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Return latents as images, as videos and as rows of patches, with all conditions."""
    asked = inspect.signature(model.forward).parameters
    channels = model.config.get("in_channels") or 4
    text = torch.randn(1, 8, 128)
    others: dict[str, Any] = {
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": text,
        "pooled_projections": torch.randn(1, 128),
        "img_ids": torch.zeros(16, model_axes(model)),
        "txt_ids": torch.zeros(8, model_axes(model)),
        "guidance": torch.tensor([3.5]),
        "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "class_labels": torch.tensor([3]),
        "proj_embedding": torch.randn(1, 128),
        "img_shapes": [[(1, 4, 4)]],
        "txt_seq_lens": [8],
        "original_size": torch.tensor([[64.0, 64.0]]),
        "target_size": torch.tensor([[64.0, 64.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "added_cond_kwargs": {
            "text_embeds": torch.randn(1, 128),
            "time_ids": torch.randn(1, 6),
        },
    }
    given = {name: value for name, value in others.items() if name in asked}
    main = "sample" if "sample" in asked else "hidden_states"
    shapes = [
        *((1, channels, 16, 16), (1, channels, 2, 16, 16), (1, 2, channels, 16, 16)),
        *((1, 16, channels), (1, 128)),
    ]
    latents = [torch.randn(shape) for shape in shapes]
    full = [{main: latent, **given} for latent in latents]
    bare = ("guidance", "encoder_attention_mask", "class_labels", "txt_seq_lens")
    less = [{k: v for k, v in one.items() if k not in bare} for one in full]
    single = [{**one, "timestep": torch.tensor([0.5])} for one in full]
    sized = {"resolution": None, "aspect_ratio": None}
    plain = [{**one, "added_cond_kwargs": sized} for one in full if "added_cond_kwargs" in one]
    return [*full, *less, *single, *plain]


def model_axes(model: Any) -> int:
    """Return the number of coordinates of a position."""
    return len(model.config.get("axes_dims_rope") or (0, 0, 0))
