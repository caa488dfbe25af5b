"""MXFP4 checkpoints: read as the MXFP8 weights of the same values, dense and in stacks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import MX
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


def gpt_oss(path: Path) -> tuple[nn.Module, set[str]]:
    """Write a tiny GPT-OSS with packed experts; return its dequantized model, names on disk."""
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=16, dtype="float32", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    dense = transformers.GptOssForCausalLM(config).eval()
    state = dict(dense.state_dict())
    tensors = {}
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = state.pop(name).shape
        pairs, exponents, values = packed(experts, n, k)
        tensors[f"{name}_blocks"] = pairs.view(experts, n, k // 32, 16)
        tensors[f"{name}_scales"] = exponents
        dense.get_parameter(name).data.copy_(values.transpose(1, 2))
        theirs = mxfp4.convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], exponents, dtype=torch.float32
        )
        assert torch.equal(theirs, values.transpose(1, 2))
    tensors |= {n: t.contiguous().clone() for n, t in state.items()}
    config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written["architectures"] = ["GptOssForCausalLM"]
    written["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(written))
    save_file(tensors, path / "model.safetensors")
    return dense, set(tensors)


def test_experts_of_gpt_oss_give_the_logits_of_their_values(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss"
    dense, tensors = gpt_oss(path)
    model = fp8kit.load(path)
    for name, module in model.named_modules():
        if isinstance(module, ExpertTensors):
            assert module.scheme.name == "MXFP8_ROW"
            for stack in module.stacks.names:
                values = dense.get_parameter(f"{name}.{stack}").transpose(1, 2)
                assert torch.equal(fp8kit.dequantize(module.quantized(stack)), values)
    others = set(dict(dense.named_parameters())) & tensors
    for name in others:
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name)), name
    tokens = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        error = relative_error(model(tokens).logits, dense(tokens).logits)
    least, most = activation_noise(layers=2)
    assert least < error < most


def test_experts_of_gpt_oss_are_written_whole_or_in_high_precision(tmp_path: Path) -> None:
    path = tmp_path / "gpt-oss"
    dense, _ = gpt_oss(path)
    with pytest.raises(fp8kit.CheckpointError, match="No engine loads such experts"):
        fp8kit.convert_checkpoint(path, tmp_path / "b", scheme="FP8_DYNAMIC")
    with pytest.raises(fp8kit.CheckpointError, match="Something has to stay FP8"):
        fp8kit.convert_checkpoint(path, tmp_path / "b", unfit="dequantize")
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK"):
        place = tmp_path / scheme
        fp8kit.convert_checkpoint(path, place, dialect="compressed-tensors", scheme=scheme)
        model = fp8kit.load(place)
        found = {n: m for n, m in model.named_modules() if isinstance(m, ExpertTensors)}
        assert {m.scheme.name for m in found.values()} == {scheme}
        for name, module in found.items():
            for stack in module.stacks.names:
                values = dense.get_parameter(f"{name}.{stack}").transpose(1, 2)
                assert torch.equal(fp8kit.dequantize(module.quantized(stack)), values)


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
