"""ComfyUI's files, in which each layer describes its own format; MX and NVFP4 weights.

Scales are stored in tiles, and the first of two FP4 codes is the high half of a byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8kit
from fp8kit.checkpoint.inspection import inspect
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import CheckpointError
from fp8kit.formats import QTensor
from numerics import assert_bits_equal

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
WHOLE, RAGGED = (256, 256), (96, 160)


def in_tiles(scale: Tensor) -> Tensor:
    """Lay scales out one by one as cuBLAS documents, in the shape that ComfyUI stores."""
    rows, cols = scale.shape
    down, across = -(-rows // 128), -(-cols // 4)
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * across + c // 4
            inside = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            flat[tile * 512 + inside] = scale.view(torch.uint8)[r, c]
    return flat.view(scale.dtype).view(down * 128, across * 4)


def written(
    path: Path, announced: str, form: str, says: Mapping[str, object] = {}, **tensors: Tensor
) -> Path:
    """Write the file of one layer, whose format is announced in the header or in a tensor."""
    entry, metadata = {"format": form, **says}, {}
    if announced == "header":
        metadata["_quantization_metadata"] = json.dumps({"layers": {"fc": entry}})
    else:
        text = json.dumps(entry).encode()
        tensors["comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    file = path / "diffusion.safetensors"
    save_file({f"fc.{name}": value for name, value in tensors.items()}, file, metadata=metadata)
    return file


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [WHOLE, RAGGED])
def test_mx_scales_are_taken_out_of_their_tiles(
    shape: tuple[int, int], dtype: torch.dtype, announced: str, tmp_path: Path
) -> None:
    q = fp8kit.quantize(torch.randn(shape) * torch.rand(shape).exp2(), fp8kit.MX, role="weight")
    scale = in_tiles(q.scale).view(dtype)
    file = written(tmp_path, announced, "mxfp8", weight=q.data, weight_scale=scale)
    found = open_checkpoint(file)
    assert_bits_equal(found.read("fc.weight"), q.data)
    assert_bits_equal(found.read("fc.weight_scale"), q.scale)


@pytest.mark.parametrize("name", ["weight_scale", "scale_weight"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents_that_no_entry_describes_are_refused(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    q = fp8kit.quantize(torch.randn(WHOLE), fp8kit.MX, role="weight")
    file = tmp_path / "diffusion.safetensors"
    marker = {"scaled_fp8": torch.empty(0, dtype=q.data.dtype)}
    save_file({"fc.weight": q.data, f"fc.{name}": q.scale.view(dtype), **marker}, file)
    with pytest.raises(CheckpointError, match="scales may lie row by row or in tiles"):
        open_checkpoint(file)


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("shape", [WHOLE, RAGGED])
def test_nvfp4_is_unpacked_in_its_order(
    shape: tuple[int, int], announced: str, tmp_path: Path
) -> None:
    rows, cols = shape
    codes = torch.randint(0, 16, shape)
    scale = (torch.rand(rows, cols // 16) * 100 + 1).to(torch.float8_e4m3fn)
    file = written(
        tmp_path,
        announced,
        "nvfp4",
        weight=(codes[:, 0::2] * 16 + codes[:, 1::2]).to(torch.uint8),
        weight_scale=in_tiles(scale),
        weight_scale_2=torch.tensor(2.0**-8),
    )
    values = torch.cat((E2M1, -E2M1))[codes]
    values = values * scale.float().repeat_interleave(16, 1) * 2.0**-8
    wanted = fp8kit.quantize(values, role="weight")
    found = open_checkpoint(file)
    q = QTensor(found.read("fc.weight"), found.read("fc.weight_scale"), fp8kit.ROW)
    assert_bits_equal(q.data, wanted.data)
    assert_bits_equal(q.scale, wanted.scale)


def scaled(path: Path, announced: str = "tensor", **says: object) -> Path:
    """Write the file of one layer with a static activation scale and an announced format."""
    q = fp8kit.quantize(torch.ones(16, 16), fp8kit.TENSOR)
    tensors = {"weight": q.data, "weight_scale": q.scale, "input_scale": torch.tensor(0.01)}
    return written(path, announced, "float8_e4m3fn", **tensors, says=says)


@pytest.mark.parametrize("announced", ["header", "tensor"])
def test_a_layer_may_ask_for_16_bit_in_spite_of_its_scale(announced: str, tmp_path: Path) -> None:
    file = scaled(tmp_path, announced, full_precision_matrix_mult=True)
    (layer,) = inspect(file).layers
    assert (layer.scheme, layer.activation) == ("FP8_TENSOR_BY_16BIT", "16 bit")
    assert inspect(file).problems == []
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(16, 16, bias=False).bfloat16()})
    fp8kit.load(file, model)
    x = torch.full((1, 16), 100.0, dtype=torch.bfloat16)  # far beyond 448 * 0.01
    assert model["fc"](x)[0, 0] == 1600
    fp8kit.convert_checkpoint(file, tmp_path / "out")
    (layer,) = inspect(tmp_path / "out").layers
    assert (layer.scheme, layer.activation) == ("FP8_TENSOR_BY_16BIT", "16 bit")
    assert "fc.input_scale" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e4m3fn_rowwise", "fp8"])
def test_a_layer_with_a_scale_is_static_unless_it_asks(
    form: str, announced: str, tmp_path: Path
) -> None:
    file = scaled(tmp_path, announced, format=form, full_precision_matrix_mult=False)
    found = inspect(file)
    assert (found.scheme, found.problems) == ("FP8", [])


def loads_to(file: Path, wanted: Tensor) -> None:
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(*reversed(wanted.shape), bias=False)})
    fp8kit.load(file, model)
    assert_bits_equal(fp8kit.dequantize(model["fc"].quantized_weight()), wanted)


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("shape", [(256, 512), (64, 4096)])
def test_blocks_are_as_large_as_a_layer_says(
    shape: tuple[int, int], announced: str, tmp_path: Path
) -> None:
    q = fp8kit.quantize(torch.randn(shape), fp8kit.GroupShape(64, 64), role="weight")
    says = {"format": "float8_e4m3fn_blockwise", "group_size": 64}
    tensors = {"weight": q.data, "weight_scale": q.scale}
    loads_to(written(tmp_path, announced, "", says, **tensors), fp8kit.dequantize(q))


@pytest.mark.parametrize("announced", ["header", "tensor"])
def test_rows_are_scaled_where_blocks_do_not_fit(announced: str, tmp_path: Path) -> None:
    q = fp8kit.quantize(torch.randn(256, 64), fp8kit.ROW, role="weight")
    says = {"format": "float8_e4m3fn_blockwise", "group_size": 128}
    tensors = {"weight": q.data, "weight_scale": q.scale[:, 0].clone()}
    loads_to(written(tmp_path, announced, "", says, **tensors), fp8kit.dequantize(q))


def test_blocks_of_rows_are_known_by_their_third_axis(tmp_path: Path) -> None:
    q = fp8kit.quantize(torch.randn(96, 192), fp8kit.GroupShape(1, 64), role="weight")
    tensors = {"fc.weight": q.data, "fc.scale_weight": q.scale[..., None].clone()}
    save_file(tensors, tmp_path / "diffusion.safetensors")
    loads_to(tmp_path / "diffusion.safetensors", fp8kit.dequantize(q))
    tensors["fc.scale_weight"] = torch.ones(96, 5, 1)
    save_file(tensors, tmp_path / "diffusion.safetensors")
    assert "of shape [96, 5, 1], and no config" in "".join(inspect(tmp_path).problems)


@pytest.mark.parametrize(("elements", "scheme"), [(0, "FP8"), (2, "FP8_TENSOR_BY_16BIT")])
def test_a_marker_of_two_elements_asks_for_16_bit(
    elements: int, scheme: str, tmp_path: Path
) -> None:
    q = fp8kit.quantize(torch.ones(16, 16), fp8kit.TENSOR)
    tensors = {"a.scaled_fp8": q.data[0, :elements].clone(), "b.scaled_fp8": q.data[0, :0].clone()}
    for name in ("a.fc", "b.fc"):
        tensors[f"{name}.weight"], tensors[f"{name}.scale_weight"] = q.data.clone(), torch.ones(())
        tensors[f"{name}.scale_input"] = torch.tensor(0.5)
    file = tmp_path / "diffusion.safetensors"
    save_file(tensors, file)
    found = inspect(file)
    assert (found.dialect, found.problems) == ("comfyui", [])
    assert [layer.scheme for layer in found.layers] == [scheme, "FP8"]


@pytest.mark.parametrize("group", [fp8kit.TENSOR, fp8kit.ROW])
@pytest.mark.parametrize(
    ("kind", "beside"), [("scale_weight", "scale_input"), ("weight_scale", "input_scale")]
)
def test_an_input_scale_that_is_a_copy_is_none(
    kind: str, beside: str, group: fp8kit.GroupShape, tmp_path: Path
) -> None:
    """convert_to_quant fills the input scales of text encoders with the scales of weights."""
    q = fp8kit.quantize(torch.ones(16, 16), group, role="weight")
    tensors = {"weight": q.data, kind: q.scale, beside: q.scale.clone()}
    file = written(tmp_path, "tensor", "float8_e4m3fn", **tensors)
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(16, 16, bias=False).bfloat16()})
    with pytest.warns(UserWarning, match=r"copies of scales of weights are ignored: fc\."):
        fp8kit.load(file, model)
    x = torch.full((1, 16), 100.0, dtype=torch.bfloat16)  # far beyond 448 * scale
    assert model["fc"](x)[0, 0] == 1600


def test_odd_params_of_a_layer_are_named_by_their_place(tmp_path: Path) -> None:
    q = fp8kit.quantize(torch.ones(16, 16), fp8kit.TENSOR)
    scaled = {"weight": q.data, "weight_scale": torch.ones(())}
    file = written(tmp_path, "header", "float8_e4m3fn", {"params": [1]}, **scaled)
    with pytest.raises(CheckpointError, match=r"The file has _quantization_metadata: fc: params ="):
        open_checkpoint(file)


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("says", [{"convrot": True}, {"params": {"convrot": True}}])
def test_a_layer_whose_input_is_rotated_is_refused(
    says: Mapping[str, object], announced: str, tmp_path: Path
) -> None:
    scale = in_tiles(torch.ones(96, 10).to(torch.float8_e4m3fn))
    codes, factor = torch.zeros(96, 80, dtype=torch.uint8), torch.ones(())
    tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": factor}
    file = written(tmp_path, announced, "nvfp4", {**says, "convrot_groupsize": 32}, **tensors)
    with pytest.raises(CheckpointError, match=r"fc\S* says convrot: inputs of layers are rotated"):
        open_checkpoint(file)
    assert "config.json" not in "".join(inspect(file).problems)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_what_modelopt_writes_for_comfyui_is_refused(form: str, tmp_path: Path) -> None:
    q = fp8kit.quantize(torch.randn(128, 128), fp8kit.MX, role="weight")
    tensors = {"weight": q.data, "weight_scale": q.scale}
    if form == "nvfp4":
        tensors["weight"] = torch.zeros(128, 64, dtype=torch.uint8)
        tensors["weight_scale"] = torch.ones(128, 8).to(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = torch.ones(())
    file = written(tmp_path, "header", form, **tensors)
    text = json.dumps({"layers": {"fc": {"format": form}}})
    header = {"_quantization_metadata": text, "quantization_config": '{"quant_algo": "MXFP8"}'}
    save_file(load_file(file), file, header)
    with pytest.raises(
        CheckpointError, match=rf"fc is {form}, in .*ModelOpt writes both; its scales"
    ):
        open_checkpoint(file)


@pytest.mark.parametrize("announced", ["header", "tensor"])
@pytest.mark.parametrize("form", ["float8_e5m2", "int8_tensorwise", "nvfp4", 3])
def test_an_entry_about_other_codes_is_refused(
    form: object, announced: str, tmp_path: Path
) -> None:
    file = scaled(tmp_path, announced, format=form)
    wanted = re.escape(
        f"{file.name}: The file has fc: format = {form!r}. It must be the format of fc.w"
    )
    with pytest.raises(CheckpointError, match=wanted):
        open_checkpoint(file)
    (problem,) = inspect(file).problems
    assert re.match(wanted, problem)


@pytest.mark.parametrize(
    "data", [b'{"format": garbage', b"[3]", b"\xff", b"[" * 9999, b"1" * 2**17]
)
def test_an_entry_that_is_no_object_is_refused(data: bytes, tmp_path: Path) -> None:
    file = scaled(tmp_path)
    tensors = load_file(file)
    tensors["fc.comfy_quant"] = torch.tensor(list(data), dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"has fc\.comfy_quant = .* must be a JSON object\."):
        open_checkpoint(file)
    tensors["fc.comfy_quant"] = torch.ones(2)
    save_file(tensors, file)
    assert "fc.comfy_quant" in inspect(file).problems[0]


@pytest.mark.parametrize("text", ["", "3", '{"layers": 3}', '{"layers": {"fc": 3}}'])
def test_a_header_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    file = scaled(tmp_path, "header")
    save_file(load_file(file), file, metadata={"_quantization_metadata": text})
    (problem,) = inspect(file).problems
    assert "It must be a JSON object." in problem
    assert "config.json" not in problem
