"""Names of layers: what patterns match, and which names the defaults keep dense."""

from __future__ import annotations

import pytest
from torch import nn

import fp8kit
from fp8kit.conversion.patterns import DEFAULT_EXCLUDE, matches


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "model.lm_head",
        "score",
        "model.embed_tokens",
        "patch_embed.proj",
        "x_embedder",
        "_heads.human.0",
        "class_embed.0",
        "downstream_head2.proj",
        "speaker_embedder",
        "bbox_embed.0.layers.1",
        "dec_bbox_head.2.layers.0",
        "bbox_predictor.layers.0",
        "bbox_head.reg_branches.0.2",
        "box_head.dense1",
        "layers.0.cross_attn.sampling_offsets",
        "text_embedding.2",
        "context_embed",
        "cond_in",
        "pooled_text_embeddings.in_layer",
        "layers.3.mlp.gate",
        "block_sparse_moe.gate",
        "mlp.router",
        "mlp.router.linear",
        "mlp.gate.router_mlp.fc1",
        "mlp.gate.down_proj",
        "mlp.shared_expert_gate",
        "time_embed.0",
        "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.0",
        "blocks.0.adaLN_modulation.1",
        "layers.0.attn.to_ada_ln_zero",
        "layers.0.to_film",
        "transformer_blocks.0.norm1.linear",
        "norm_out.linear",
        "img_mod.modulation.lin",
        "layers.0.attn_hyper_connection.input_mix_weight_up",
        "layers.0.linear_attn.in_proj_ba",
        "layers.0.linear_attn.in_proj_a",
        "vision_tower.layers.0.q_proj",
        "visual.blocks.0.attn.qkv",
        "multi_modal_projector.linear_1",
        "proj_out",
        "final_layer.linear",
        "last.linear",
        "layers.0.q_proj.lora_A.default",
        "layers.0.attn.q_proj.lora_b",
        "lora_unet_mid_block_to_q.lora_down",
        "lora_unet_mid_block_to_q.lora_up",
    ],
)
def test_default_exclusions_cover(name: str) -> None:
    assert any(matches(pattern, name) for pattern, _ in DEFAULT_EXCLUDE)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.gate_proj",
        "layers.0.linear_attn.in_proj_qkvz",
        "layers.0.mlp.gate_up_proj",
        "layers.0.mlp_channels.gate.proj",
        "layers.0.self_attn.q_proj",
        "layers.0.mlp.experts.3.w1",
        "layers.0.mlp.shared_expert.down_proj",
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.ff.net.0.proj",
        "transformer_blocks.0.attn.to_out.0",
        "blocks.0.proj_out",
        "blocks.0.last.linear",
        "encoder.layers.0.fc1",
        "h.0.attn.c_attn",
        "roi_heads.box_head.fc6",
        "bbox_head.shared_fcs.0",
        "bbox_attention.q_proj",
        "linears.3",
        "blocks.0.attn_heads.1",
    ],
)
def test_default_exclusions_spare(name: str) -> None:
    assert not any(matches(pattern, name) for pattern, _ in DEFAULT_EXCLUDE)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("o_proj", "layers.0.o_proj", True),
        ("o_proj", "layers.0.to_o_proj", False),
        ("layers.0.*", "layers.0.o_proj", True),
        ("layers.0.*", "model.layers.0.o_proj", True),
        ("layers.0.*", "layers.10.o_proj", False),
        ("*.mlp.*", "layers.0.mlp.up", True),
        ("layers.?.o_proj", "layers.7.o_proj", True),
        ("re:layers\\.[01]\\.", "layers.1.o_proj", True),
        ("re:o_proj", "layers.1.o_proj", False),
        ("re:.*o_proj$", "layers.1.o_proj", True),
        ("O_PROJ", "layers.0.o_proj", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_a_broken_regular_expression_is_refused() -> None:
    with pytest.raises(fp8kit.ConversionError, match="not a regular expression"):
        fp8kit.plan(nn.Sequential(nn.Linear(128, 128)), exclude=["re:("])


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(TypeError, match="pattern of type int in exclude"):
        fp8kit.plan(nn.Sequential(nn.Linear(256, 256)), exclude=[0])  # type: ignore[list-item]
