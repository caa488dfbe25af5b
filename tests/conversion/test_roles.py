"""The roles of layers, from the class of the module around them and from names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit.checkpoint.schema.targets import is_embedding
from fp8kit.conversion.patterns import roles_by_name
from fp8kit.conversion.roles import layer_roles


def made(library: str, name: str, **config: Any) -> nn.Module:
    found = pytest.importorskip(library)
    with torch.device("meta"):
        if library == "transformers":
            kind = getattr(found, name)
            return kind(kind.config_class(**config))
        return getattr(found, name)(**config)


TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 500}
TEXT |= {"num_attention_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {**TEXT, "tie_word_embeddings": False},
    "ModernBertForMaskedLM": {**TEXT, "tie_word_embeddings": False, "pad_token_id": 1},
    "XLNetLMHeadModel": {"d_model": 128, "n_layer": 1, "n_head": 2, "d_inner": 256},
    "XLMWithLMHeadModel": {"emb_dim": 128, "n_layers": 1, "n_heads": 2, "vocab_size": 500},
    "ViTForImageClassification": {**TEXT, "num_labels": 100},
    "MgpstrForSceneTextRecognition": {"hidden_size": 128, "num_hidden_layers": 1},
    "DeiTForImageClassificationWithTeacher": {**TEXT, "num_labels": 100},
}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("BertForMaskedLM", {"cls.predictions.decoder"}),
        ("ModernBertForMaskedLM", {"decoder"}),
        ("XLNetLMHeadModel", {"lm_loss"}),
        ("XLMWithLMHeadModel", {"pred_layer.proj"}),
        ("ViTForImageClassification", {"classifier"}),
        ("MgpstrForSceneTextRecognition", {"char_head", "bpe_head", "wp_head"}),
        ("DeiTForImageClassificationWithTeacher", {"cls_classifier", "distillation_classifier"}),
    ],
)
def test_heads_of_transformers(name: str, heads: set[str]) -> None:
    assert layer_roles(made("transformers", name, **TINY[name])) == dict.fromkeys(
        heads, "output head"
    )


@pytest.mark.parametrize("name", ["joint.head", "decoder.head.linear"])
def test_heads_of_transducers_and_vocoders(name: str) -> None:
    assert roles_by_name([name, f"{name}er"]) == {name: "output head"}


def test_towers_and_what_connects_them_by_their_inputs() -> None:
    config = pytest.importorskip("transformers").CLIPConfig(
        text_config=TEXT, vision_config={**TEXT, "image_size": 32, "patch_size": 16}
    )
    with torch.device("meta"):
        clip = pytest.importorskip("transformers").CLIPModel(config)
    roles = layer_roles(clip)
    assert roles.pop("text_projection") == roles.pop("visual_projection") == "output projection"
    assert set(roles.values()) == {"vision tower"}
    assert all(name.startswith("vision_model.") for name in roles)


def test_a_vision_model_is_no_tower() -> None:
    config = {**TEXT, "image_size": 32, "patch_size": 16}
    assert layer_roles(made("transformers", "CLIPVisionModel", **config)) == {}
    projected = made("transformers", "CLIPVisionModelWithProjection", **config)
    assert set(layer_roles(projected).values()) == {"output projection"}
    names = ["visual.blocks.0.qkv", "visual.blocks.0.patch_embed"]
    assert roles_by_name(names) == {names[1]: "embedding"}
    assert roles_by_name([*names, "layers.0.q_proj"])[names[0]] == "vision tower"


def test_conditions_of_diffusers_by_class() -> None:
    heads = {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 1}
    model = made("diffusers", "DiTTransformer2DModel", **heads, sample_size=16)
    roles = layer_roles(model)
    assert roles["proj_out_1"] == roles["proj_out_2"] == "final projection"
    assert roles["transformer_blocks.0.norm1.linear"] == "modulation"
    assert not any(".attn1." in name or ".ff." in name for name in roles)
    inside = layer_roles(nn.ModuleDict({"transformer": model}))
    assert inside == {f"transformer.{name}": role for name, role in roles.items()}


def test_blocks_of_a_unet_end_in_layers_like_others() -> None:
    model = made(
        "diffusers",
        "UNet2DConditionModel",
        block_out_channels=(64,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=128,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=64,
        projection_class_embeddings_input_dim=128,
    )
    roles = layer_roles(model)
    assert set(roles.values()) == {"time embedding"}
    assert {n.split(".")[0] for n in roles if "resnets" not in n} == {
        "time_embedding",
        "add_embedding",
    }
    assert "mid_block.resnets.0.time_emb_proj" in roles
    assert "mid_block.attentions.0.proj_out" not in roles


def test_classifiers_of_timm_and_torchvision() -> None:
    vision = pytest.importorskip("zoo.of_vision")
    found = {a.name: a for a in vision.architectures()}
    if not found:
        pytest.skip("timm or torchvision is not installed")
    assert layer_roles(found["torchvision/resnet18"].build()) == {"fc": "output head"}
    assert layer_roles(found["torchvision/alexnet"].build()) == {"classifier.6": "output head"}
    assert layer_roles(found["torchvision/vit_b_32"].build()) == {"heads.head": "output head"}
    assert layer_roles(found["timm/convnext_atto"].build()) == {"head.fc": "output head"}


class Fc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)


@pytest.mark.parametrize(("library", "kept"), [("moshi.models.lm", True), ("own", False)])
def test_heads_of_language_models_of_audio(library: str, kept: bool) -> None:
    model = type("LMModel", (nn.Module,), {"__module__": library})()
    model.linears = nn.ModuleList([nn.Linear(128, 512) for _ in range(2)])
    model.text_linear = nn.Linear(128, 512)
    heads = ["linears.0", "linears.1", "text_linear"]
    assert layer_roles(model) == (dict.fromkeys(heads, "output head") if kept else {})


def test_a_model_of_ones_own_is_judged_by_name_alone() -> None:
    assert layer_roles(Fc()) == {}


@pytest.mark.parametrize(
    "name",
    [
        "scores",
        "layers.0.scores.proj",
        "classifier_in",
        "visual_feedforward",
        "layers.0.visual_feedforward.fc1",
        "remodulation",
        "blocks.0.remodulation.linear",
        "modulations",
        "supervisual.q",
        "classifier.blocks.0.attn.qkv",
        "aggregator.patch_embed.blocks.0.attn.qkv",
        "layers.0.attn.output_projection",
        "layers.0.attn.output_projection.o_proj",
        "decoder.layers.0.attn.output_layer",
        "layers.0.mlp.output_linear",
        "head.blocks.0.fc1",
        "predictor.blocks.0.fc1",
        "embed.0",
        "embeddings.layers.0.q_proj",
        "attention.output.dense",
        "blocks.0.out_layer",
        "layers.0.time_mix.key",
        "layers.0.output",
        "premodulation.lin",
    ],
)
def test_names_are_compared_by_whole_components(name: str) -> None:
    assert roles_by_name([name, "layers.0.up_proj"]) == {}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.audio_lm_head", "output head"),
        ("decoder.lm_heads.3", "output head"),
        ("backbone.cls_classifier", "output head"),
        ("mid_block.resnets.0.time_emb_proj", "time embedding"),
        ("time_step_proj.linear_1", "time embedding"),
        ("transformer_blocks.3.img_mod.1", "modulation"),
        ("norm_out.linear_1", "modulation"),
        ("proj_out_1", "final projection"),
        ("model.output", "final projection"),
        ("_orig_mod.head", "final projection"),
        ("to_logits.1", "output head"),
        ("vit.mlp_head", "output head"),
        ("patch_to_embedding.1", "embedding"),
        ("patch_embed.proj.0", "embedding"),
        ("patch_embeds.0.fc1", "embedding"),
        ("decoder.output_projection.0", "output head"),
        ("output_projection_quantiles.hidden_layer", "output head"),
        ("input_embed.proj", "embedding"),
        ("transformer.enc_out_class_embed.0", "output head"),
        ("decoder.dec_score_head.0", "output head"),
        ("bbox_head.cls_branches.0", "output head"),
        ("ctc.ctc_lo", "output head"),
        ("ctc_output.1", "output head"),
        ("decoder.left_decoder.output_layer", "output head"),
        ("joiner.output_linear", "output head"),
        ("output_layer", "output head"),
        ("head.2", "output head"),
        ("head_dist.l", "output head"),
        ("predictor", "output head"),
        ("blocks.0.emb_layers.1", "modulation"),
        ("down.0.block.0.temb_proj", "time embedding"),
        ("to_time_cond.0", "time embedding"),
        ("to_time_tokens.0", "time embedding"),
        ("to_time_hiddens.1", "time embedding"),
        ("time_fc.0", "time embedding"),
        ("time_in_proj", "time embedding"),
        ("time_mod_proj", "time embedding"),
        ("aug_in_proj", "time embedding"),
        ("sinu_pos_emb.1", "time embedding"),
        ("time_pos_embed.0", "time embedding"),
        ("tmlp.0", "time embedding"),
        ("tproj.1", "time embedding"),
        ("out_layer.out_layer", "final projection"),
        ("all_final_layer.2-1.linear", "final projection"),
        ("final_linear", "final projection"),
        ("audio_heads.3", "output head"),
        ("all_x_embedder.2-1", "embedding"),
        ("x_embedders.image", "embedding"),
        ("condition_embedder", "embedding"),
        ("fps_embedding.0", "time embedding"),
        ("diffusion_step_encoder.1", "time embedding"),
        ("layers.0.diffusion_projection", "time embedding"),
        ("fourier_to_single", "time embedding"),
        ("blocks.0.cond_embeds_mapper", "modulation"),
        ("conditioning_emb.2", "conditioning projection"),
        ("global_proj.0", "conditioning projection"),
        ("to_global_embed.0", "conditioning projection"),
        ("layers.0.expert_router", "MoE router"),
        ("moe.gate.to_gates", "MoE router"),
        ("text_projection", "output projection"),
        ("model.vision_embed_tokens", "embedding"),
        ("adaLN_modulation.1", "modulation"),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    assert roles_by_name([name, "layers.0.up_proj"]) == {name: role}


@pytest.mark.parametrize("name", ["embed", "model.embedding", "tok_embeddings", "h.wte", "wpe"])
def test_what_engines_take_for_a_table_converts_only_when_asked(name: str) -> None:
    assert is_embedding(name)
    assert roles_by_name([name, "layers.0.up_proj"]) == {name: "embedding"}


@pytest.mark.parametrize("other", ["up", "fc1", "value", "v_proj", "to_v", "wv", "qkv"])
def test_a_gate_beside_what_it_multiplies_is_no_router(other: str) -> None:
    names = ["layers.0.mlp.gate", "gate"]
    assert roles_by_name([*names, f"layers.0.mlp.{other}"]) == {"gate": "MoE router"}
    assert roles_by_name([*names, f"layers.1.mlp.{other}"]).keys() == {*names}


class AdaptiveLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_gamma = nn.Linear(128, 128)
        self.fn = nn.Sequential(nn.Linear(128, 256))  # what is normed


class Language(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 128)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(128, 512)) for _ in range(blocks)])
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(128, 256))
        self.mish = nn.Sequential(nn.Mish(), nn.Linear(128, 256), nn.Unflatten(-1, (-1, 1)))
        self.down = nn.Sequential(nn.SiLU(), nn.Linear(128, 256), nn.Dropout())  # of a feed-forward
        self.norm = AdaptiveLayerNorm()
        self.out = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512))


def test_heads_and_modulations_of_ones_own_code_by_structure() -> None:
    found = dict.fromkeys(["mlp.1", "mish.1", "norm.to_gamma"], "modulation")
    assert layer_roles(Language(2)) == {**found, "out.1": "output head"}
    with torch.device("meta"):
        assert layer_roles(Language(0)) == {**found, "out.1": "output head"}
    two = Language(0)
    two.up = nn.Linear(128, 512)  # either may be the head
    assert layer_roles(two) == found
    tied = Language(0)
    tied.get_submodule("out.1").weight = tied.words.weight
    assert layer_roles(tied) == found
    parts = {"position_embedding": nn.Embedding(256, 128), "fc1": nn.Linear(128, 256)}
    assert layer_roles(nn.ModuleDict(parts)) == {}


@pytest.mark.parametrize("name", ["AdaptiveLogSoftmaxWithLoss", "AdaptiveSoftmax"])
def test_all_parts_of_an_adaptive_softmax_are_the_head(name: str) -> None:
    kind = type(name, (nn.AdaptiveLogSoftmaxWithLoss,), {})
    model = nn.ModuleDict({"up": nn.Linear(128, 256), "out": kind(128, 500, [200])})
    assert layer_roles(model) == dict.fromkeys(
        ["out.head", "out.tail.0.0", "out.tail.0.1"], "output head"
    )


class Steps(nn.Module):
    """As SpeechBrain numbers the parts of a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"w": layer}) for layer in layers])


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_head_of_numbered_parts_is_the_last_layer_and_alone_in_its_shape(blocks: int) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(512, 128)})
    model["blocks"] = nn.ModuleList([Steps(nn.Linear(128, 256)) for _ in range(blocks)])
    model["out"] = Steps(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 512))
    assert layer_roles(model) == {"out.layers.2.w": "output head"}
    model["more"] = Steps(nn.Linear(128, 512))  # either may be the head
    assert layer_roles(model) == {}
    del model["more"]
    model["last"] = nn.Linear(128, 256)  # so the one before may be of a block
    assert layer_roles(model) == {}


class Plain(nn.Linear):
    """As libraries have their own, that initializes itself in another way."""


def test_a_modulation_may_be_a_subclass_of_a_linear_layer() -> None:
    model = nn.ModuleDict(
        {"time": nn.Sequential(nn.SiLU(), Plain(128, 256)), "up": Plain(128, 256)}
    )
    assert layer_roles(model) == {"time.1": "modulation"}


class Sines(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.frequencies = dim, torch.randn(2)


@pytest.mark.parametrize(
    ("before", "sines", "widths", "timed"),
    [
        ("diffusion_embedding", Sines(128), (128, 512, 128), True),
        ("time_embed", Sines(128), (128, 512, 256), True),
        ("time_embed", Sines(64), (128, 512, 128), False),  # reads something else beside it
        ("time_embed", Sines(128), (128, 512, 512, 128), False),  # a network of its own
        ("time_embedding", nn.Embedding(128, 128), (128, 512, 128), False),
        ("time_proj_in", nn.Linear(256, 128), (128, 512, 128), False),  # may be a block's own
        ("pos_emb", Sines(128), (128, 512, 128), False),
        ("temb_act", nn.SiLU(), (128, 512, 128), False),
    ],
)
def test_what_reads_the_sines_of_a_time_step_by_structure(
    before: str, sines: nn.Module, widths: tuple[int, ...], timed: bool
) -> None:
    steps = [s for k, n in itertools.pairwise(widths) for s in (nn.Linear(k, n), nn.Mish())][:-1]
    model = nn.Module()
    model.wave = nn.ModuleDict({before: sines, "mlp": nn.Sequential(*steps)})
    model.wave["blocks"] = nn.Sequential(nn.Linear(128, 512), nn.Mish(), nn.Linear(512, 128))
    found = {"wave.mlp.0": "time embedding", "wave.mlp.2": "time embedding"}
    assert layer_roles(model) == (found if timed else {})


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("TimestepEmbedder", "time embedding"),
        ("TimeEmbeddings", "time embedding"),
        ("CombinedTimestepSizeEmbeddings", "time embedding"),
        ("ConcatTimestepEmbedderND", "time embedding"),
        ("TimeSeriesValueEmbedding", None),
        ("TimesFmEmbedding", None),
        ("TimestepEmbedSequential", None),  # holds blocks of a U-Net
        ("AdaIN1d", "modulation"),
        ("MappingFeedForwardBlock", "modulation"),
        ("SDCascadeTimestepBlock", "modulation"),
    ],
)
def test_conditions_of_ones_own_code_by_class(kind: str, role: str | None) -> None:
    model = nn.ModuleDict({"resolution": type(kind, (Fc,), {})(), "up": nn.Linear(128, 256)})
    assert layer_roles(model).get("resolution.fc") == role
    assert "up" not in layer_roles(model)


def test_exclude_without_patterns_lifts_roles_that_classes_give() -> None:
    model = made("transformers", "BertForMaskedLM", **TINY["BertForMaskedLM"])
    head = "cls.predictions.decoder"
    names = {r.name for r in fp8kit.plan(model, exclude=[]).report.converted}
    assert head in names
    assert head not in {r.name for r in fp8kit.plan(model).report.converted}
    assert head in {r.name for r in fp8kit.plan(model, include=[head]).report.converted}
