"""diffusers' own loading and saving, with real models of random weights."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
import fresh
import numerics
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import CheckpointError, ConversionError, UnsupportedError
from fp8kit.formats import ROW
from numerics import assert_bits_equal, assert_same_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it warns about on import is not ours to fix
    diffusers = pytest.importorskip("diffusers")
    from diffusers.training_utils import EMAModel
from fp8kit.integrations.diffusers import Fp8KitConfig
from zoo import of_diffusers

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16
WEIGHTS = "diffusion_pytorch_model.safetensors"
BLOCKS = {
    "FluxTransformer2DModel": ("transformer_blocks.", "single_transformer_blocks."),
    "SD3Transformer2DModel": ("transformer_blocks.",),
    "WanTransformer3DModel": ("blocks.",),
    "QwenImageTransformer2DModel": ("transformer_blocks.",),
    "LTXVideoTransformer3DModel": ("transformer_blocks.",),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks.", "single_transformer_blocks."),
}
MODULATION = ("norm", "mod.", "modulation", "embed")


def dense(kind: str, path: Path) -> Any:
    """Return a model in bf16 that is also saved in a folder."""
    torch.manual_seed(0)
    name, sizes = of_diffusers.MODELS[kind]
    model = getattr(diffusers, name)(**sizes).to(BF16).eval()
    model.save_pretrained(path)
    return model


def inputs(model: Any) -> dict[str, Any]:
    """Return inputs that a model takes."""
    for given in of_diffusers.inputs_of(model):
        cast = {
            k: v.to(BF16) if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in given.items()
        }
        try:
            run(model, cast)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
            continue
        return cast
    raise AssertionError(f"{type(model).__name__} takes none of the inputs")


def run(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**given, return_dict=False)[0]
    return result


def fp8_layers(model: nn.Module) -> dict[str, fp8kit.Fp8Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, fp8kit.Fp8Linear)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_family_is_quantized_while_loading_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = dense(kind, tmp_path / "dense")
    load = type(model).from_pretrained
    found, info = load(
        tmp_path / "dense",
        quantization_config=Fp8KitConfig(),
        torch_dtype=BF16,
        output_loading_info=True,
    )
    assert not any(info.values())
    converted = load(tmp_path / "dense", torch_dtype=BF16)
    fp8kit.convert(converted)
    assert_same_tensors(found, converted)
    names = fp8_layers(found)
    assert all(n.startswith(BLOCKS[kind]) for n in names), "only repeated blocks convert"
    assert not any(word in n for n in names for word in MODULATION)
    blocks = {
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear)
        and n.startswith(BLOCKS[kind])
        and not any(word in n for word in MODULATION)
    }
    assert blocks == names.keys(), "every product of a block converts"
    given = inputs(model)
    y = run(found, given)
    error = numerics.relative_error(y, run(model, given))
    assert 1e-3 < error < numerics.SCHEME_ERROR["FP8_DYNAMIC"][1]
    for saved in (found, converted):
        saved.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved", torch_dtype=BF16)
        assert_same_tensors(again, found)
        assert_bits_equal(run(again, given), y)


@pytest.mark.parametrize("by", ["quantize_checkpoint", "save"])
def test_a_written_folder_builds_its_own_class(by: str, tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    fp8kit.convert(model)
    if by == "save":
        fp8kit.save(model, tmp_path / "fp8")
    else:
        fp8kit.quantize_checkpoint(tmp_path / "dense", tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=r"diffusers\.FluxTransformer2DModel.*load_config"):
        fp8kit.load(tmp_path / "fp8")
    kind = type(model)
    again = kind.from_config(kind.load_config(tmp_path / "fp8")).to(BF16)
    fp8kit.load(tmp_path / "fp8", model=again)
    assert_same_tensors(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8", "FP8_TENSOR", "FP8_WEIGHT_ONLY", "FP8"])
def test_every_scheme_is_saved_and_loaded(scheme: str, tmp_path: Path) -> None:
    kind = "SD3Transformer2DModel"
    model = dense(kind, tmp_path / "dense")
    given = inputs(model)
    if scheme == "FP8":
        fp8kit.convert(model, scheme, calibrate=lambda m: run(m, given))
    else:
        load = type(model).from_pretrained
        config = Fp8KitConfig(scheme)
        model = load(tmp_path / "dense", quantization_config=config, torch_dtype=BF16)
    assert {m.scheme.stored.name for m in fp8_layers(model).values()} == {scheme}
    model.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    assert (tmp_path / "saved" / f"{WEIGHTS}.index.json").exists()
    again = type(model).from_pretrained(tmp_path / "saved", torch_dtype=BF16)
    assert_same_tensors(again, model)
    assert_bits_equal(run(again, given), run(model, given))
    other = type(model).from_config(type(model).load_config(tmp_path / "saved")).to(BF16)
    fp8kit.load(tmp_path / "saved", other)
    assert_bits_equal(run(other, given), run(model, given))
    assert_same_tensors(other, model)
    if scheme == "MXFP8":  # rebased on a CPU, and saved so by diffusers
        dialect = "compressed-tensors"
        fp8kit.convert_checkpoint(tmp_path / "saved", tmp_path / "mx", dialect=dialect)
        found = open_checkpoint(tmp_path / "mx")
        assert found.spec is not None
        assert found.spec.scheme.name == "MXFP8"
        assert not [name for name in found.tensors if "exponents" in name]


def pipeline() -> Any:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
    )
    parts = (transformer.to(BF16), vae.to(BF16), diffusers.DDIMScheduler())
    for part in parts[:2]:
        part.eval()  # labels are dropped while training
    return diffusers.DiTPipeline(*parts)


def image(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(1)
    made = pipe([1], num_inference_steps=2, generator=seed, output_type="np").images
    return torch.from_numpy(made)


def test_quantizing_nothing_is_a_warning(tmp_path: Path) -> None:
    pipeline().transformer.save_pretrained(tmp_path)
    config = Fp8KitConfig(include=["*.norm1.linear"])
    with pytest.warns(UserWarning, match=r"^No layer becomes FP8: not in include"):
        diffusers.DiTTransformer2DModel.from_pretrained(tmp_path, quantization_config=config)


@pytest.mark.parametrize("by", ["mapping", "backend"])
def test_a_pipeline_is_quantized_saved_and_loaded(by: str, tmp_path: Path) -> None:
    pipe = pipeline()
    pipe.save_pretrained(tmp_path / "dense")
    choice = diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": Fp8KitConfig()})
    if by == "backend":
        pytest.importorskip("transformers")  # diffusers asks both libraries
        choice = diffusers.PipelineQuantizationConfig(
            quant_backend="fp8kit",
            quant_kwargs={"scheme": "FP8_DYNAMIC"},
            components_to_quantize=["transformer"],
        )
    load = diffusers.DiTPipeline.from_pretrained
    found = load(tmp_path / "dense", quantization_config=choice, torch_dtype=BF16)
    named = fp8_layers(found.transformer)
    assert {name: layer.qualified_name for name, layer in named.items()} == {n: n for n in named}
    assert not fp8_layers(found.vae)
    found.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", torch_dtype=BF16)
    assert_same_tensors(again.transformer, found.transformer)
    assert torch.equal(image(again), image(found))
    assert not torch.equal(image(found), image(pipe))


def test_without_this_package_a_saved_model_does_not_load(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    fp8kit.convert(model)
    model.save_pretrained(tmp_path / "saved")
    code = (
        "import sys, diffusers\n"
        "try:\n"
        f"    diffusers.FluxTransformer2DModel.from_pretrained({str(tmp_path / 'saved')!r})\n"
        "except ValueError as error:\n"
        "    assert 'got fp8kit' in str(error), error\n"
        "    assert 'fp8kit' not in sys.modules\n"
        "else:\n"
        "    raise AssertionError('it loaded')\n"
    )
    fresh.run(code)
    announced = json.loads((tmp_path / "saved" / "config.json").read_text())
    announced["quantization_config"]["quant_method"] = "fp9kit"  # as an unknown one here
    (tmp_path / "saved" / "config.json").write_text(json.dumps(announced))
    with pytest.raises(ValueError, match="got fp9kit"):
        type(model).from_pretrained(tmp_path / "saved")


def test_what_to_convert_is_the_users_choice(tmp_path: Path) -> None:
    dense("FluxTransformer2DModel", tmp_path)
    load = diffusers.FluxTransformer2DModel.from_pretrained
    config = Fp8KitConfig(include=["*.attn.to_q"], strict=True)
    model = load(tmp_path, quantization_config=config, torch_dtype=BF16)
    assert all(n.endswith(".attn.to_q") for n in fp8_layers(model))
    assert model.hf_quantizer.report.converted
    with pytest.raises(ConversionError, match="to_z"):
        load(tmp_path, quantization_config=Fp8KitConfig(exclude=["*.to_z"]), torch_dtype=BF16)
    with pytest.raises(ValueError, match=r"calibrate="):
        Fp8KitConfig("FP8")
    assert Fp8KitConfig(fp8kit.SCHEMES["MXFP8"]).to_dict() == Fp8KitConfig("MXFP8").to_dict()


def test_averages_are_saved_by_the_model(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path)
    fp8kit.convert(model)
    own = copy.deepcopy(model.state_dict())
    ema = EMAModel(model.parameters())
    for _ in range(2):  # the first step takes the weights as they are
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.mul_(2)
        ema.step(model.parameters())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    averaged = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path / "fp8")
    ema.restore(model.parameters())
    saved = type(model).from_pretrained(tmp_path / "fp8", torch_dtype=BF16).state_dict()
    for name, tensor in model.state_dict().items():
        assert_bits_equal(saved[name], averaged[name])
        moved = name.endswith("x_embedder.weight")
        assert not moved or not torch.equal(tensor, averaged[name])
        assert not moved or not torch.equal(averaged[name], own[name])


def test_dense_again_saves_as_dense(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    load = type(model).from_pretrained
    model = load(tmp_path / "dense", quantization_config=Fp8KitConfig(), torch_dtype=BF16)
    model.save_pretrained(tmp_path / "fp8")
    for coded in (model, copy.deepcopy(model), load(tmp_path / "fp8", torch_dtype=BF16)):
        restored = coded.dequantize()
        assert not fp8_layers(restored)
        restored.save_pretrained(tmp_path / "again")
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert "quantization_config" not in config
        load(tmp_path / "again", torch_dtype=BF16)


def test_damage_is_named(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    fp8kit.convert(model)
    model.save_pretrained(tmp_path)
    name = "transformer_blocks.0.attn.to_q"
    whole = load_file(tmp_path / WEIGHTS)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(match: str, layers: dict[str, Any] | None = None, **tensors: Any) -> None:
        changed = {n: t for n, t in (whole | tensors).items() if t is not None}
        save_file(changed, tmp_path / WEIGHTS, metadata={"format": "pt"})
        announced = config["quantization_config"]
        told = {**announced, "layers": {**announced["layers"], **(layers or {})}}
        text = json.dumps({**config, "quantization_config": told})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=match):
            type(model).from_pretrained(tmp_path, torch_dtype=BF16)

    refused(rf"{name}.* did not get codes", **{f"{name}.weight_scale": None})
    refused(r"to_q\.weight_scale has shape \[1\]", **{f"{name}.weight_scale": torch.ones(1)})
    refused(r"to_q\.weight is torch\.bfloat16", **{f"{name}.weight": torch.ones(128, 128).to(BF16)})
    refused(r"layers\.x\.y = 7.*a scheme", {"x.y": 7})
    refused(r"FP8 codes for blocks\.9.*no such layer", {"blocks.9": "FP8_DYNAMIC"})


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["transformer_blocks.0.attn.to_q.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"to_q\.weight holds NaN.*exclude this layer"):
        type(model).from_pretrained(tmp_path, quantization_config=Fp8KitConfig(), torch_dtype=BF16)


def test_quantizing_into_weights_on_disk_is_refused(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path)
    with pytest.raises(UnsupportedError, match="device_map that places layers on disk"):
        type(model).from_pretrained(
            tmp_path,
            quantization_config=Fp8KitConfig(),
            device_map={"": "disk"},
            offload_folder=str(tmp_path / "disk"),
        )


def test_casts_of_a_quantized_model_are_refused(tmp_path: Path) -> None:
    model = dense("FluxTransformer2DModel", tmp_path)
    load = type(model).from_pretrained
    model = load(tmp_path, quantization_config=Fp8KitConfig(), torch_dtype=BF16)
    with pytest.raises(ValueError, match="not supported for quantized model"):
        model.half()
    with pytest.raises(ValueError, match="Casting a quantized model"):
        model.to(torch.float16)


def test_the_config_of_transformers_serves_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = dense("FluxTransformer2DModel", tmp_path)
    config = fp8kit.Fp8KitConfig(include=["*.attn.to_q"])
    found = type(model).from_pretrained(tmp_path, quantization_config=config, torch_dtype=BF16)
    assert fp8_layers(found)
    assert all(n.endswith(".attn.to_q") for n in fp8_layers(found))


OFFLOADS: dict[str, dict[str, Any]] = {
    "leaf": {"offload_type": "leaf_level"},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "disk": {"offload_type": "leaf_level", "offload_to_disk_path": ""},
}


@pytest.mark.parametrize("how", OFFLOADS)
def test_group_offload_changes_no_bit(how: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    fp8kit.convert(model)
    given = inputs(model)
    wanted = run(model, given)
    options = dict(OFFLOADS[how])
    if how == "disk":
        options["offload_to_disk_path"] = str(tmp_path / "groups")
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, **options)
    for _ in range(2):
        assert_bits_equal(run(model, given), wanted)


@pytest.mark.parametrize("how", ["block", "disk"])
def test_what_is_offloaded_in_groups_stays_dense(how: str, tmp_path: Path) -> None:
    """A group that is offloaded to disk has no weights to quantize until it is called."""
    pytest.importorskip("accelerate")
    model = dense("FluxTransformer2DModel", tmp_path / "dense")
    given = inputs(model)
    wanted = run(model, given)
    folder = str(tmp_path / "groups") if how == "disk" else None
    cpu = torch.device("cpu")
    model.enable_group_offload(
        onload_device=cpu, offload_device=cpu, offload_to_disk_path=folder, **OFFLOADS["block"]
    )
    with pytest.warns(UserWarning, match="convert the model first and call enable_group_offload"):
        assert not fp8kit.convert(model).converted
    assert_bits_equal(run(model, given), wanted)


def caches(step: list[int]) -> dict[str, Any]:
    """Return diffusers' caches between the steps of a sampler; ``step`` holds the current step."""
    ranges = {"spatial_attention_timestep_skip_range": (-1, 950)}
    ranges["current_timestep_callback"] = lambda: 1000 - 100 * step[0]  # type: ignore[assignment]
    weight = {"attention_weight_callback": lambda _: 0.5, "is_guidance_distilled": True}
    pyramid = diffusers.PyramidAttentionBroadcastConfig
    return {
        "pyramid": pyramid(spatial_attention_block_skip_range=2, **ranges),
        "faster": diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2, **ranges, **weight
        ),
        "first block": diffusers.FirstBlockCacheConfig(threshold=0.5),
        "taylor": diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1),
        "magnitude": diffusers.MagCacheConfig(
            max_skip_steps=2, num_inference_steps=4, mag_ratios=[1.0, 0.99, 0.98, 0.97]
        ),
    }


# diffusers 0.42 cannot keep the first block of FLUX.2, dense or not
CACHED = [
    (kind, cache)
    for kind in ("FluxTransformer2DModel", "Flux2Transformer2DModel")
    for cache in caches([])
    if (kind, cache) != ("Flux2Transformer2DModel", "first block")
]


@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize(("kind", "cache"), CACHED)
def test_caches_between_steps_meet_fused_layers(kind: str, cache: str, tmp_path: Path) -> None:
    """A cache keeps and skips the same values, although fused activations are deferred."""
    model = dense(kind, tmp_path)
    given = inputs(model)
    step, results = [0], dict[str, list[Tensor]]()
    for fuse in ("all", "none"):
        converted = copy.deepcopy(model)
        fp8kit.convert(converted, fuse=fuse)
        converted.enable_cache(caches(step)[cache])
        results[fuse] = []
        for step[0] in range(4):
            changed = given | {"hidden_states": given["hidden_states"] * (1 + step[0] / 10)}
            with converted.cache_context("cond"):
                results[fuse].append(run(converted, changed))
    for fused, plain in zip(*results.values(), strict=True):
        assert_bits_equal(fused, plain)


JOINED = """
    FluxTransformer2DModel SD3Transformer2DModel WanTransformer3DModel UNet2DConditionModel
    PixArtTransformer2DModel CogVideoXTransformer3DModel
""".split()


@pytest.mark.parametrize("kind", JOINED)
def test_projections_are_joined_before_the_conversion_alone(kind: str) -> None:
    torch.manual_seed(0)
    name, sizes = of_diffusers.MODELS[kind]
    model = getattr(diffusers, name)(**sizes).eval()
    joined, twin = copy.deepcopy(model), copy.deepcopy(model)
    fp8kit.convert(model)
    given = inputs(model.to(BF16))
    before = run(model, given)
    with pytest.raises(UnsupportedError, match="or call it before the model is converted"):
        model.fuse_qkv_projections()
    assert_bits_equal(run(model, given), before)
    for each in (joined, twin):
        each.fuse_qkv_projections()
    fp8kit.convert(joined)
    assert {"to_qkv", "to_kv"} & {n.rpartition(".")[2] for n in fp8_layers(joined)}
    error = numerics.relative_error(run(joined.to(BF16), given), run(twin.to(BF16), given))
    assert 0 < error < 0.1


def test_layerwise_casting_leaves_codes_and_scales(tmp_path: Path) -> None:
    plain = dense("FluxTransformer2DModel", tmp_path)
    model = copy.deepcopy(plain)
    fp8kit.convert(model)
    given = inputs(model)
    before = run(model, given)
    held = {n: (m.codes.clone(), m.weight_scale.clone()) for n, m in fp8_layers(model).items()}
    for each in (plain, model):
        each.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=BF16)
    after = run(model, given)
    for name, layer in fp8_layers(model).items():
        assert_bits_equal(layer.codes, held[name][0])
        assert_bits_equal(layer.weight_scale, held[name][1])
    # the rest of the model is stored as FP8 without scales, here as without this package
    cast = numerics.relative_error(run(plain, given), before)
    assert numerics.relative_error(after, before) < 1.5 * cast


def test_model_offload_of_a_pipeline_changes_no_bit() -> None:
    pytest.importorskip("accelerate")
    pipe = pipeline()
    fp8kit.convert(pipe.transformer)
    wanted = image(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(image(pipe), wanted)


def original(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a FLUX.2 model under the names of Black Forest Labs."""
    blocks = {
        "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
        "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
        "img_attn.proj.weight": "attn.to_out.0.weight",
        "img_mlp.0.weight": "ff.linear_in.weight",
        "img_mlp.2.weight": "ff.linear_out.weight",
        "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
        "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
        "txt_attn.proj.weight": "attn.to_add_out.weight",
        "txt_mlp.0.weight": "ff_context.linear_in.weight",
        "txt_mlp.2.weight": "ff_context.linear_out.weight",
    }
    singles = {
        "linear1.weight": "attn.to_qkv_mlp_proj.weight",
        "linear2.weight": "attn.to_out.weight",
        "norm.query_norm.scale": "attn.norm_q.weight",
        "norm.key_norm.scale": "attn.norm_k.weight",
    }
    others = {
        "img_in.weight": "x_embedder.weight",
        "txt_in.weight": "context_embedder.weight",
        "time_in.in_layer.weight": "time_guidance_embed.timestep_embedder.linear_1.weight",
        "time_in.out_layer.weight": "time_guidance_embed.timestep_embedder.linear_2.weight",
        "guidance_in.in_layer.weight": "time_guidance_embed.guidance_embedder.linear_1.weight",
        "guidance_in.out_layer.weight": "time_guidance_embed.guidance_embedder.linear_2.weight",
        "double_stream_modulation_img.lin.weight": "double_stream_modulation_img.linear.weight",
        "double_stream_modulation_txt.lin.weight": "double_stream_modulation_txt.linear.weight",
        "single_stream_modulation.lin.weight": "single_stream_modulation.linear.weight",
        "final_layer.linear.weight": "proj_out.weight",
    }
    state = {k: v.detach() for k, v in model.state_dict().items()}
    found = {theirs: state[ours] for theirs, ours in others.items()}
    found |= {f"double_blocks.0.{a}": state[f"transformer_blocks.0.{b}"] for a, b in blocks.items()}
    found |= {
        f"single_blocks.0.{a}": state[f"single_transformer_blocks.0.{b}"]
        for a, b in singles.items()
    }
    for kind, parts in (
        ("img", ("to_q", "to_k", "to_v")),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ):
        joined = torch.cat([state[f"transformer_blocks.0.attn.{p}.weight"] for p in parts])
        found[f"double_blocks.0.{kind}_attn.qkv.weight"] = joined
    scale, shift = state["norm_out.linear.weight"].chunk(2)
    found["final_layer.adaLN_modulation.1.weight"] = torch.cat([shift, scale])
    return {name: tensor.contiguous() for name, tensor in found.items()}


def fp8r(tensors: dict[str, Tensor], within: tuple[str, ...]) -> dict[str, Tensor]:
    """Quantize like Black Forest Labs: per row, fp32 scales ``[N]``."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith(within) and name.endswith(".weight") and tensor.dim() == 2:
            scale = tensor.float().abs().amax(1) / 448
            found[name] = (tensor.float() / scale[:, None]).to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = scale
    return found


def test_a_file_of_black_forest_labs_is_read_to_the_bit(tmp_path: Path) -> None:
    model = dense("Flux2Transformer2DModel", tmp_path / "dense")
    file = tmp_path / "flux2-fp8r.safetensors"
    save_file(fp8r(original(model), ("double_blocks", "single_blocks")), file)
    found = type(model).from_single_file(
        str(file),
        config=str(tmp_path / "dense"),
        quantization_config=Fp8KitConfig(),
        torch_dtype=BF16,
    )
    wanted = fp8r(
        {k: v.detach() for k, v in model.state_dict().items()},
        ("transformer_blocks", "single_transformer_blocks"),
    )
    state = found.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        assert_bits_equal(tensor, wanted[name].view(tensor.shape))
    given = inputs(model)
    error = numerics.relative_error(run(found, given), run(model, given))
    assert 1e-3 < error < numerics.SCHEME_ERROR["FP8_DYNAMIC"][1]
    found.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", torch_dtype=BF16)
    assert_same_tensors(again, found)


def test_a_single_file_in_high_precision_is_quantized(tmp_path: Path) -> None:
    model = dense("Flux2Transformer2DModel", tmp_path / "dense")
    save_file(original(model), tmp_path / "flux2.safetensors")
    found = type(model).from_single_file(
        str(tmp_path / "flux2.safetensors"),
        config=str(tmp_path / "dense"),
        quantization_config=Fp8KitConfig(),
        torch_dtype=BF16,
    )
    fp8kit.convert(model)
    assert_same_tensors(found, model)


def test_rows_with_one_scale_each_load_into_any_module(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(BF16)
    tensors = fp8r(layers.state_dict(), ("0", "1"))
    save_file(tensors, tmp_path / "model.safetensors")
    found = fp8kit.load(tmp_path, copy.deepcopy(layers))
    for name, layer in fp8_layers(found).items():
        assert layer.scheme.weight == ROW
        assert_bits_equal(layer.codes, tensors[f"{name}.weight"])
        assert_bits_equal(layer.weight_scale.flatten(), tensors[f"{name}.weight_scale"])


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    model = dense("Flux2Transformer2DModel", tmp_path / "dense")
    tensors = fp8r(original(model), ("double_blocks",))
    name = "double_blocks.0.img_mlp.0"

    def load(**changed: Tensor) -> Any:
        save_file(tensors | changed, tmp_path / "file.safetensors")
        return type(model).from_single_file(
            str(tmp_path / "file.safetensors"),
            config=str(tmp_path / "dense"),
            quantization_config=Fp8KitConfig(),
        )

    with pytest.raises(UnsupportedError, match=rf"{name} is NVFP4"):
        load(**{f"{name}.weight_scale_2": torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"{name} .*one|{name}.*scales \[1\]"):
        load(**{f"{name}.weight_scale": torch.ones(1)})
