"""ComfyUI's files with MX and NVFP4 weights: scales in tiles, and the high half of a byte first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import QTensor
from numerics import assert_bits_equal

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
WHOLE, RAGGED = (256, 256), (96, 160)


def in_tiles(scale: Tensor) -> Tensor:
    """Lay scales out as cuBLAS documents it, one by one, in the shape that ComfyUI gives them."""
    rows, cols = scale.shape
    down, across = -(-rows // 128), -(-cols // 4)
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * across + c // 4
            inside = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            flat[tile * 512 + inside] = scale.view(torch.uint8)[r, c]
    return flat.view(scale.dtype).view(down * 128, across * 4)


def written(path: Path, announced: str, form: str, **tensors: Tensor) -> Path:
    """Write the file of one layer, which says what it is in its header or in a tensor."""
    says, metadata = json.dumps({"format": form}), {}
    if announced == "header":
        metadata["_quantization_metadata"] = json.dumps({"layers": {"fc": {"format": form}}})
    else:
        tensors["comfy_quant"] = torch.tensor(list(says.encode()), dtype=torch.uint8)
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
