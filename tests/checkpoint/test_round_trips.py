"""Checkpoints between this package and the libraries that define the dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from checkpoint_samples import SHARD
from fp8kit.checkpoint.dialects import Dialect, Spec, dialect_named, scheme_of
from fp8kit.checkpoint.exporting import on_disk
from fp8kit.checkpoint.schema.targets import check_layers, dialect_for
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, ROW, SCHEMES, TENSOR, QTensor, Scheme
from fp8kit.functional import dequantize
from fp8kit.io.translation import convert_checkpoint
from fp8kit.modules.entries import quantize_weight
from numerics import activation_noise, assert_bits_equal, relative_error

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")

# Transformers says so whenever it is asked to decode
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
IDS = (torch.arange(48) * 37 % 160).view(2, 24)
LAYERS = 2
COMMON = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
KINDS = {
    "Llama": {"intermediate_size": 256},
    # N and K that 128 does not divide, and an output head tied to the embedding
    "LlamaRagged": {
        "intermediate_size": 224,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen3Moe": {
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        # all experts: otherwise rounding flips the choice of experts, and so changes the logits
        "num_experts_per_tok": 4,
        "head_dim": 32,
    },
}


def tiny(kind: str) -> Any:
    """Build a random model in bf16 whose logits depend on every layer."""
    name = kind.removesuffix("Ragged")
    config = getattr(transformers, f"{name}Config")(**(COMMON | KINDS[kind]))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    return model


def stock(path: Path, **options: Any) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, **options
    )
    # decoded weights have no use for the scales of activations, and Transformers' experts neither
    unused = info["unexpected_keys"]
    left = {k for k in unused if not (k.endswith("input_scale") and (options or "experts" in k))}
    assert (info["missing_keys"], info["mismatched_keys"], left) == (set(), set(), set())
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def is_linear(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor on disk is a quantized linear layer: no router, no embedding."""
    left = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    return tensor.dim() == 2 and not name.endswith(left)


def write_fp8(
    folder: Path, scheme: Scheme, target: str, dialect: Dialect | None = None
) -> tuple[Path, Path]:
    """Stream a checkpoint to FP8; return it, and a checkpoint of its dequantized weights."""
    source = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    dialect = dialect or dialect_for(target or "vllm", scheme)
    written, decoded, quantized, dense = {}, {}, {}, []
    for name, tensor in source.items():
        layer = name.removesuffix(".weight")
        decoded[name] = tensor
        if not is_linear(name, tensor):
            written[name] = tensor
            dense += [layer] if tensor.dim() == 2 and "embed" not in name else []
            continue
        q = quantize_weight(tensor, scheme)
        decoded[name] = dequantize(q, tensor.dtype)
        quantized[layer] = tuple(tensor.shape)
        entries = {"weight": q.data, "weight_scale": q.scale}
        if scheme.static:
            entries["input_scale"] = torch.full((1, 1), 24 / 448)
        for kind, value in entries.items():
            written.update([on_disk(f"{layer}.{kind}", value, dialect, scheme)])
    if target:
        check_layers(target, scheme, quantized, dense, dialect=dialect)
    config = json.loads((folder / "config.json").read_text())
    announced = dialect.render(Spec(scheme, tuple(dense)))
    fp8, bf16 = folder.with_name("fp8"), folder.with_name("decoded")
    for path, state, more in (
        (fp8, written, {"quantization_config": announced}),
        (bf16, decoded, {}),
    ):
        layout = {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}
        write_checkpoint(path, layout, state.items(), config=config | more)
    return fp8, bf16


@pytest.fixture
def dense(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    tiny(request.param).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def each(*kinds: str) -> Any:
    return pytest.mark.parametrize("dense", kinds, indirect=True)


@each("Llama", "Qwen3Moe")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_very_weights(dense: Path, scheme: str) -> None:
    fp8, decoded = write_fp8(dense, SCHEMES[scheme], "transformers")
    options: dict[str, Any] = {}
    if dialect_for("transformers", SCHEMES[scheme]).name == "compressed-tensors":
        config = transformers.CompressedTensorsConfig(dequantize=True)
        options["quantization_config"] = config
    expected = logits(stock(decoded))
    assert expected.std() > 0.1
    assert_bits_equal(logits(stock(fp8, **options)), expected)
    changed = relative_error(logits(stock(dense)), expected)
    assert changed > 0.01, "the weights were not rounded to FP8"


@each("Llama", "LlamaRagged", "Qwen3Moe")
@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_TENSOR"])
def test_transformers_rounds_activations(dense: Path, scheme: str) -> None:
    fp8, decoded = write_fp8(dense, SCHEMES[scheme], "transformers")
    noise = relative_error(logits(stock(fp8)), logits(stock(decoded)))
    low, high = activation_noise(LAYERS)
    assert low <= noise <= high


@each("Llama", "LlamaRagged")
def test_this_package_reads_what_transformers_reads(dense: Path) -> None:
    fp8, decoded = write_fp8(dense, SCHEMES["FP8_DYNAMIC"], "transformers")
    model = fp8kit.load(fp8)
    assert sum(isinstance(m, fp8kit.Fp8Linear) for m in model.modules()) == 7 * LAYERS
    noise = relative_error(logits(model), logits(stock(decoded)))
    low, high = activation_noise(LAYERS)
    assert low <= noise <= high


@each("Llama")
@pytest.mark.parametrize("dialect", ["compressed-tensors", "fp8"])
def test_one_scale_per_tensor_in_both_spellings(dense: Path, dialect: str) -> None:
    fp8, decoded = write_fp8(dense, SCHEMES["FP8_TENSOR"], "transformers", dialect_named(dialect))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    options = {"quantization_config": config} if dialect == "compressed-tensors" else {}
    assert_bits_equal(logits(stock(fp8, **options)), logits(stock(decoded)))


@each("Qwen3Moe")
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8"])
def test_translations_for_transformers_load_there(dense: Path, scheme: str, tmp_path: Path) -> None:
    fp8, decoded = write_fp8(dense, SCHEMES[scheme], "vllm", dialect_named("compressed-tensors"))
    convert_checkpoint(fp8, tmp_path / "c", target="transformers")
    assert_bits_equal(logits(stock(tmp_path / "c")), logits(stock(decoded)))


@each("LlamaRagged")
def test_layers_that_do_not_fit_are_written_in_high_precision(dense: Path, tmp_path: Path) -> None:
    config, ct = SCHEMES["FP8_BLOCK"], dialect_named("compressed-tensors")
    with pytest.raises(CheckpointError, match=r"layers do not load in transformers.*ragged edges"):
        write_fp8(dense, config, "transformers", ct)
    fp8, decoded = write_fp8(dense, config, "", ct)
    with pytest.raises(CheckpointError, match=r"10 layers do not load in transformers"):
        convert_checkpoint(fp8, tmp_path / "c", target="transformers")
    convert_checkpoint(fp8, tmp_path / "c", target="transformers", unfit="dequantize")
    assert len(open_checkpoint(tmp_path / "c").layers) == 4
    assert_bits_equal(logits(stock(tmp_path / "c")), logits(stock(decoded)))


def compressed_by_the_library(folder: Path, preset: str, ratio: float = 1.0) -> dict[str, Tensor]:
    """Let compressed-tensors quantize a model and save it; return the weights that it decodes."""
    model = tiny("Llama")
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="initialized"
    )
    quantization.apply_quantization_config(model, config)
    for module in quantized_modules(model):
        q = quantize_weight(module.weight.float(), SCHEMES[preset])
        scale = torch.exp2(q.scale.float() - 127) if preset == "MXFP8" else q.scale
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        module.weight_zero_point.data.zero_()
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.5 * ratio)
            module.input_zero_point.data.zero_()
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    names = {id(m): n for n, m in model.named_modules()}
    return {names[id(m)]: m.weight.detach() for m in quantized_modules(model)}


def quantized_modules(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None)


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_what_compressed_tensors_writes_is_read(preset: str, tmp_path: Path) -> None:
    truth = compressed_by_the_library(tmp_path / "c", preset)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.dialect is not None
    assert checkpoint.dialect.name == "compressed-tensors"
    assert checkpoint.layers.keys() == truth.keys()
    for name, layer in checkpoint.layers.items():
        assert layer.scheme == SCHEMES[preset]
        q = QTensor(checkpoint.read(layer.weight), checkpoint.read(layer.scale), layer.group)
        assert_bits_equal(dequantize(q, torch.bfloat16), truth[name])
    if preset == "FP8":
        assert {checkpoint.read(x.input_scale).item() for x in checkpoint.layers.values()} == {0.5}


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_what_compressed_tensors_writes_is_translated(preset: str, tmp_path: Path) -> None:
    truth = compressed_by_the_library(tmp_path / "c", preset)
    convert_checkpoint(tmp_path / "c", tmp_path / "d", target="transformers")
    model = stock(tmp_path / "d")
    if dialect_for("transformers", SCHEMES[preset]).name != "compressed-tensors":
        for name, weight in truth.items():  # it was decoded while it was loaded
            assert_bits_equal(model.get_submodule(name).weight.detach(), weight)
    assert logits(model).isfinite().all()


@each("Llama")
def test_what_transformers_saves_is_read(dense: Path, tmp_path: Path) -> None:
    fp8, _ = write_fp8(dense, SCHEMES["FP8_DYNAMIC"], "transformers")
    stock(fp8).save_pretrained(tmp_path / "again")
    first, second = open_checkpoint(fp8), open_checkpoint(tmp_path / "again")
    assert second.layers == first.layers
    assert second.tensors.keys() == first.tensors.keys()
    for name in first.tensors:
        expected = first.read(name)
        if first.is_scale(name):  # it keeps scales in the dtype of the model
            expected = expected.bfloat16().float()
        assert_bits_equal(second.read(name), expected)


def torchao_models() -> dict[str, Any]:
    ao = pytest.importorskip("torchao.quantization")
    workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    w = torch.randn(192, 160).bfloat16()
    row, tensor = ao.PerRow(), ao.PerTensor()
    kwargs = workflows.QuantizeTensorToFloat8Kwargs
    return {
        "FP8_DYNAMIC": ao.Float8Tensor.from_hp(
            w, granularity=row, act_quant_kwargs=kwargs(granularity=row)
        ),
        "FP8_TENSOR_BY_TENSOR": ao.Float8Tensor.from_hp(
            w, granularity=tensor, act_quant_kwargs=kwargs(granularity=tensor)
        ),
        "FP8_WEIGHT_ONLY": ao.Float8Tensor.from_hp(w, granularity=row),
        "MXFP8": mx.MXTensor.to_mx(
            w,
            torch.float8_e4m3fn,
            32,
            is_swizzled_scales=True,
            act_quant_kwargs=mx.QuantizeTensorToMXKwargs(),
        ),
        "FP8_MX_BY_16BIT": mx.MXTensor.to_mx(w, torch.float8_e4m3fn, 32),
    }


def test_what_torchao_writes_is_read(tmp_path: Path) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    state = {f"{name}.weight": t for name, t in torchao_models().items()}
    bias = {"FP8_DYNAMIC.bias": torch.ones(192)}
    tensors, metadata = support.flatten_tensor_state_dict(state | bias)
    save_file(tensors, tmp_path / SHARD, metadata=metadata | {"format": "pt"})
    config = {"quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert {n: layer.scheme.name for n, layer in checkpoint.layers.items()} == {
        name: name for name in torchao_models()
    }
    for name, layer in checkpoint.layers.items():
        q = QTensor(checkpoint.read(layer.weight), checkpoint.read(layer.scale), layer.group)
        theirs = state[f"{name}.weight"].dequantize(torch.float32)
        assert_bits_equal(dequantize(q), theirs)
    assert_bits_equal(checkpoint.read("FP8_DYNAMIC.bias"), bias["FP8_DYNAMIC.bias"])


@each("Llama")
@pytest.mark.parametrize(
    "scheme",
    [scheme_of(BLOCK, GROUP128, ue8m0=True), scheme_of(TENSOR, TENSOR), scheme_of(ROW, TENSOR)],
    ids=str,
)
def test_schemes_without_a_preset_load(dense: Path, scheme: Scheme) -> None:
    fp8, decoded = write_fp8(dense, scheme, "")
    model = fp8kit.load(fp8)
    layers = [m for m in model.modules() if isinstance(m, fp8kit.Fp8Linear)]
    assert {m.scheme for m in layers} == {scheme}
    noise = relative_error(logits(model), logits(stock(decoded)))
    low, high = activation_noise(LAYERS)
    assert low <= noise <= high
