"""MXFP4 checkpoints are read as MXFP8 weights with the same values, single and in stacks."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import MX, QTensor
from fp8kit.modules.expert_tensors import ExpertTensors
from mx_checkpoints import CT, packed
from numerics import ONE_OPERAND, activation_noise, assert_bits_equal, relative_error
from tiny_experts import tiny


def dense_directory(path: Path) -> tuple[Path, Tensor]:
    pairs, exponents, values = packed(128, 256)
    tensors = {"fc.weight_packed": pairs, "fc.weight_scale": exponents}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": CT}))
    return path, values


def test_packed_matrices_are_read_exactly_and_computed_rebased(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, values = dense_directory(tmp_path / "a")
    checkpoint = open_checkpoint(path)
    assert (checkpoint.dialect.name, checkpoint.spec.scheme.name) == ("compressed-tensors", "MXFP8")
    q = fp8kit.QTensor(checkpoint.read("fc.weight"), checkpoint.read("fc.weight_scale"), MX)
    assert_bits_equal(fp8kit.dequantize(q), values)
    model = nn.ModuleDict({"fc": nn.Linear(256, 128, False)})
    fp8kit.load(path, model)
    assert model.fc.scheme.name == "MXFP8_ROW"
    assert_bits_equal(model.fc.to_linear(torch.float32).weight.detach(), values)


@pytest.mark.parametrize("scheme", [None, "FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR"])
def test_packed_matrices_are_written_as_any_fp8(scheme: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, values = dense_directory(tmp_path / "a")
    fp8kit.convert_checkpoint(path, tmp_path / "b", scheme=scheme)
    written = open_checkpoint(tmp_path / "b")
    layer = written.layers["fc"]
    assert layer.scheme.name == (scheme or "MXFP8")
    q = fp8kit.QTensor(written.read("fc.weight"), written.read(layer.scale), layer.group)
    assert_bits_equal(fp8kit.dequantize(q), values)


def test_only_mx_weights_get_another_scheme(tmp_path: Path) -> None:
    path, _ = dense_directory(tmp_path / "a")
    fp8kit.convert_checkpoint(path, tmp_path / "b", scheme="FP8_DYNAMIC")
    with pytest.raises(fp8kit.CheckpointError, match="would be quantized again"):
        fp8kit.convert_checkpoint(tmp_path / "b", tmp_path / "c", scheme="FP8_BLOCK")
    with pytest.raises(fp8kit.CheckpointError, match="would be quantized again"):
        fp8kit.convert_checkpoint(path, tmp_path / "c", scheme="FP8")


def as_kernels_hold(tensor: Tensor) -> SimpleNamespace:
    """Wrap a tensor as GPT-OSS's kernels do: K before N, in a layout that changes nothing."""
    layout = SimpleNamespace(unswizzle_data=lambda data: data)
    return SimpleNamespace(storage=SimpleNamespace(layout=layout, data=tensor.transpose(-1, -2)))


def gpt_oss(path: Path) -> nn.Module:
    """Let Transformers write a tiny GPT-OSS with packed experts; return the model read as dense."""
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    quantizers = pytest.importorskip("transformers.quantizers.quantizer_mxfp4")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=16, dtype="float32", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model, kinds = transformers.GptOssForCausalLM(config), transformers.Mxfp4Config
    values = {}
    for i, layer in enumerate(model.model.layers):
        experts = mxfp4.Mxfp4GptOssExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            count, k, n = getattr(layer.mlp.experts, name).shape
            pairs, exponents, weight = packed(count, n, k)
            values[f"model.layers.{i}.mlp.experts.{name}"] = weight.transpose(1, 2)
            delattr(experts, name)
            setattr(experts, name, as_kernels_hold(pairs))
            held = SimpleNamespace(weight_scale=as_kernels_hold(exponents))
            setattr(experts, f"{name}_precision_config", held)
            getattr(experts, f"{name}_bias").data.normal_(std=0.1)
        layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, experts)
    model.config.quantization_config = kinds()
    model.hf_quantizer = quantizers.Mxfp4HfQuantizer(kinds(), pre_quantized=True)
    model.save_pretrained(path)
    dense = transformers.GptOssForCausalLM.from_pretrained(
        path, quantization_config=kinds(dequantize=True)
    )
    for name, weight in values.items():
        assert torch.equal(dense.get_parameter(name), weight)
    return dense.eval()


def test_experts_of_gpt_oss_give_the_logits_of_their_values(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss"
    dense, model = gpt_oss(path), fp8kit.load(path)
    tokens = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        wanted, found = dense(tokens).logits, model(tokens).logits
    least, most = activation_noise(layers=2)
    assert least < relative_error(found, wanted) < most
    for name, module in model.named_modules():
        if isinstance(module, ExpertTensors):
            assert module.scheme.name == "MXFP8_ROW"
            for stack in module.stacks.names:
                values = dense.get_parameter(f"{name}.{stack}").transpose(1, 2)
                assert torch.equal(fp8kit.dequantize(module.quantized(stack)), values)
            module.to_dense()
    for name, parameter in dense.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    with torch.no_grad():
        assert_bits_equal(model(tokens).logits, wanted)


def test_experts_of_gpt_oss_are_exact_under_16_bit_activations(tmp_path: Path) -> None:
    """The two models differ only in the order of fp32 sums, if at all."""
    dense = gpt_oss(tmp_path / "a")
    how = {"scheme": "FP8_WEIGHT_ONLY", "dialect": "compressed-tensors"}
    fp8kit.convert_checkpoint(tmp_path / "a", tmp_path / "b", **how)
    model, tokens = fp8kit.load(tmp_path / "b"), torch.randint(0, 64, (4, 16))
    schemes = {m.scheme.name for m in model.modules() if isinstance(m, ExpertTensors)}
    assert schemes == {"FP8_WEIGHT_ONLY"}
    with torch.no_grad():
        assert relative_error(model(tokens).logits, dense(tokens).logits) < 2**-20


def test_experts_of_gpt_oss_are_written_whole_or_in_high_precision(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss"
    dense = gpt_oss(path)
    with pytest.raises(fp8kit.CheckpointError, match="Something has to stay FP8"):
        fp8kit.convert_checkpoint(path, tmp_path / "b", unfit="dequantize")
    ways = (
        {"dialect": "compressed-tensors"}, {"target": "vllm"}, {"target": "sglang"}, {}
    )  # fmt: skip
    for way, scheme in itertools.product(ways, ("FP8_DYNAMIC", "FP8_BLOCK")):
        place = tmp_path / f"{scheme}{len(list(tmp_path.iterdir()))}"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fp8kit.convert_checkpoint(path, place, scheme=scheme, **way)
        said = ["stacks of codes, which fp8kit.load reads" in str(w.message) for w in told]
        assert said == ([] if "dialect" in way else [True])
        model = fp8kit.load(place)
        found = {n: m for n, m in model.named_modules() if isinstance(m, ExpertTensors)}
        assert {m.scheme.name for m in found.values()} == {scheme}
        for name, module in found.items():
            for stack in module.stacks.names:
                values = dense.get_parameter(f"{name}.{stack}").transpose(1, 2)
                assert torch.equal(fp8kit.dequantize(module.quantized(stack)), values)


@pytest.mark.parametrize("target", ["vllm", "sglang", "transformers"])
def test_saving_and_converting_gpt_oss_agree(target: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path / "a")
    model = fp8kit.load(tmp_path / "a")
    for i, write in enumerate((
        lambda place: fp8kit.save(model, place, target=target),
        lambda place: fp8kit.convert_checkpoint(tmp_path / "a", place, target=target),
    )):  # fmt: skip
        if target == "transformers":
            with pytest.raises(fp8kit.CheckpointError, match="would draw them at random"):
                write(tmp_path / f"b{i}")
            continue
        with pytest.warns(UserWarning, match="stacks of codes, which fp8kit.load reads"):
            write(tmp_path / f"b{i}")
        found = fp8kit.load(tmp_path / f"b{i}").state_dict()
        for name, tensor in model.state_dict().items():
            assert_bits_equal(found[name], tensor)


@pytest.mark.parametrize("four", ["mxfp4", "nvfp4"])
def test_packed_single_experts_become_fp8_experts(four: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny("Qwen3Moe")
    path = tmp_path / "a"
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    values = {}
    for name in [n for n in tensors if ".mlp.experts." in n]:
        pairs, exponents, values[name] = packed(*tensors.pop(name).shape)
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.weight_packed"] = pairs
        if four == "mxfp4":
            tensors[f"{layer}.weight_scale"] = exponents
            continue
        groups = 2.0 ** (exponents.float() - 117).repeat_interleave(2, -1)  # of 16 columns each
        tensors[f"{layer}.weight_scale"] = groups.to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_global_scale"] = torch.tensor([2.0**10])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    group = dict(CT["config_groups"]["group_0"]["weights"])
    if four == "nvfp4":
        group |= {"strategy": "tensor_group", "group_size": 16}
    quantization = CT | {
        "format": f"{four}-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*gate$"],
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = fp8kit.load(path)
    assert any("NVFP4 weights were quantized" in str(w.message) for w in told) == (four == "nvfp4")
    experts = {n: m for n, m in loaded.named_modules() if isinstance(m, ExpertTensors)}
    assert len(experts) == 2
    for name, module in experts.items():
        assert module.scheme.name == ("MXFP8_ROW" if four == "mxfp4" else "FP8_DYNAMIC")
        found = fp8kit.dequantize(module.quantized("down_proj"))
        wanted = torch.stack([values[f"{name}.{e}.down_proj.weight"] for e in range(len(found))])
        if four == "mxfp4":
            assert_bits_equal(found, wanted)
        else:
            assert 0 < relative_error(found, wanted) < 1.5 * ONE_OPERAND


def deepseek_v4(path: Path, scale: str) -> None:
    """Write a tiny DeepSeek V4 with its original names: FP4 experts, the rest block-wise FP8."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=64,
        moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=128,
        o_lora_rank=128, o_groups=1, qk_rope_head_dim=32, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    tensors = {}
    for own, tensor in load_file(path / "model.safetensors").items():
        name = own.removeprefix("model.").replace("embed_tokens", "embed")
        layer = name.rpartition(".")[0]
        tensors[name] = tensor
        if ".ffn.experts." in name:
            pairs, exponents, _ = packed(*tensor.shape)
            tensors[name] = pairs.view(torch.int8)
        elif V4_LAYER.search(name) and "compressor" not in name:
            q = fp8kit.quantize(tensor, fp8kit.BLOCK, scale_rounding="up", role="weight")
            tensors[name], exponents = q.data, (torch.log2(q.scale) + 127).to(torch.uint8)
        else:
            continue
        tensors[f"{layer}.{scale}"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    fp8 |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    written = json.loads((path / "config.json").read_text())
    written |= {"expert_dtype": "fp4", "quantization_config": fp8}
    (path / "config.json").write_text(json.dumps(written))


V4_LAYER = re.compile(r"\.(wq_[ab]|wkv|wo_[ab]|w[123])\.weight$")


@pytest.mark.parametrize("scale", ["scale", "weight_scale_inv"])
def test_fp4_experts_of_deepseek_v4_are_read_beside_fp8_blocks(scale: str, tmp_path: Path) -> None:
    path = tmp_path / "v4"
    deepseek_v4(path, scale)
    found = open_checkpoint(path)
    assert not found.problems
    schemes = {n: layer.scheme.name for n, layer in found.layers.items()}
    assert {s for n, s in schemes.items() if ".experts." in n} == {"MXFP8"}
    assert {s for n, s in schemes.items() if ".experts." not in n} == {"FP8_BLOCK_UE8M0"}
    transformers = pytest.importorskip("transformers")
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wo_a is no plain linear layer, and is decoded
        model = fp8kit.load(path)
    experts = {n: m for n, m in model.named_modules() if isinstance(m, ExpertTensors)}
    assert [m.scheme.name for m in experts.values()] == ["MXFP8_ROW"] * 2
    for name, module in experts.items():
        for stack in module.stacks.names:
            values = fp8kit.dequantize(module.quantized(stack), torch.bfloat16)
            assert_bits_equal(values, dense.get_parameter(f"{name}.{stack}").detach())
    for name, layer in model.named_modules():
        if isinstance(layer, fp8kit.Fp8Linear):
            assert layer.scheme.name == "FP8_BLOCK_UE8M0"
            weight = layer.to_linear(torch.bfloat16).weight
            assert_bits_equal(weight.detach(), dense.get_parameter(f"{name}.weight").detach())
    assert model(torch.arange(16).view(1, -1)).logits.isfinite().all()


def test_fp4_experts_of_mimo_are_read_beside_fp8_blocks(tmp_path: Path) -> None:
    pairs, exponents, values = packed(128, 128)
    q = fp8kit.quantize(torch.randn(128, 128), fp8kit.BLOCK, role="weight")
    tensors = {"mlp.experts.0.up_proj.weight": pairs, "o_proj.weight": q.data}
    tensors |= {"mlp.experts.0.up_proj.weight_scale": exponents, "o_proj.weight_scale_inv": q.scale}
    save_file(tensors, tmp_path / "model.safetensors")
    said = {"quant_method": "fp8", "fmt": "e4m3", "store_dtype": "mxfp4", "mxfp4_block_size": 32}
    said |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    found = open_checkpoint(tmp_path)
    schemes = {n: layer.scheme.name for n, layer in found.layers.items()}
    assert schemes == {"mlp.experts.0.up_proj": "MXFP8", "o_proj": "FP8_BLOCK"}
    names = found.layers["mlp.experts.0.up_proj"].tensors
    held = QTensor(found.read(names["weight"]), found.read(names["weight_scale"]), MX)
    assert_bits_equal(fp8kit.dequantize(held, torch.float32), values)


def test_exponents_in_the_tiles_of_lightx2v_are_refused(tmp_path: Path) -> None:
    pairs, exponents, _ = packed(128, 128)
    tensors = {"fc.weight": pairs, "fc.weight_scale": exponents.view(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(fp8kit.CheckpointError, match="LightX2V writes such scales, in tiles of"):
        open_checkpoint(tmp_path)
    tensors["fc.weight_packed"] = tensors.pop("fc.weight")  # as compressed-tensors names codes
    save_file(tensors, tmp_path / "model.safetensors")
    assert not open_checkpoint(tmp_path).problems
    tensors["fc.weight"] = tensors.pop("fc.weight_packed")
    tensors["fc.weight_scale"] = exponents
    save_file(tensors, tmp_path / "model.safetensors")
    assert not open_checkpoint(tmp_path).problems


@pytest.mark.parametrize("four", ["MXFP4", "NVFP4"])
@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (".weight_packed", ".weight_scale"), ("_packed", "_scale"), (".weight", ".weight_scale"),
        ("", "_weight_scale"), ("", "_scale_inv"),
    ],
)  # fmt: skip
def test_stacks_of_fp4_in_other_layouts_are_refused_by_name(
    codes: str, scale: str, four: str, tmp_path: Path
) -> None:
    pairs, exponents, _ = packed(4, 32, 64)
    groups = torch.rand(4, 32, 4).to(torch.float8_e4m3fn)
    tensors = {f"experts.up_proj{codes}": pairs}
    tensors[f"experts.up_proj{scale}"] = exponents if four == "MXFP4" else groups
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CT}))
    with pytest.raises(fp8kit.CheckpointError) as error:
        fp8kit.load(tmp_path, nn.ModuleDict({"experts": nn.Linear(64, 32)}))
    said = str(error.value)
    assert f"experts.up_proj{codes} is a stack [4, 32, 64] of {four} codes" in said
    assert "Stacks of FP4 are read as X_blocks [E, N, K / 32, 16] with X_scales" in said
    assert "one matrix per expert" in said


@pytest.mark.parametrize(
    ("codes", "scales", "said"),
    [
        # of NVFP4 K is before N; of MXFP4 and MXFP8 the groups run along N
        ((torch.uint8, (4, 32, 96)), (torch.float8_e4m3fn, (4, 4, 96)), "stack [4, 64, 96] of NV"),
        ((torch.uint8, (4, 32, 96)), (torch.float8_e4m3fn, (4, 2, 96)), "stack [4, 64, 96] of NV"),
        ((torch.uint8, (4, 64, 64)), (torch.uint8, (4, 64, 4)), "stack [4, 64, 128] of MX"),
        ((torch.float8_e4m3fn, (4, 64, 192)), (torch.uint8, (4, 64, 6)), "scale is torch.uint8"),
    ],
)
def test_stacks_of_modelopt_say_where_to_start(
    codes: tuple[torch.dtype, tuple[int, ...]],
    scales: tuple[torch.dtype, tuple[int, ...]],
    said: str,
    tmp_path: Path,
) -> None:
    """ModelOpt keeps the stacks of GPT-OSS, [E, K, N], whole."""
    name = "experts.gate_up_proj"
    tensors = {name: torch.zeros(codes[1]).to(codes[0])}
    tensors["experts.down_proj"] = torch.zeros(codes[1][0], codes[1][2] // 2, codes[1][1])
    tensors["experts.down_proj"] = tensors["experts.down_proj"].to(codes[0])
    tensors[f"{name}_weight_scale"] = torch.ones(scales[1]).to(scales[0])
    if codes[0] is torch.uint8:
        tensors[f"{name}_weight_scale_2"] = torch.ones(())
    word = "MXFP8" if codes[0] is torch.float8_e4m3fn else said[-2:] + "FP4"
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": word}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(fp8kit.CheckpointError) as error:
        open_checkpoint(tmp_path)
    told = str(error.value)
    assert said in told
    assert "Start from the checkpoint that it was made from" in told
    assert "one matrix per expert" in told
    assert "Correct the config" not in told
