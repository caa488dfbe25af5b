"""Rotary embedding in one launch gives the bits of eager torch, for any strides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ahead import compiled_by
from fp8kit.fused import reference
from grids import pairwise
from numerics import assert_bits_equal

fused = pytest.importorskip("fp8kit.fused.triton")
from fp8kit.quantizers.triton_encode import INTERPRETED  # noqa: E402

# numpy, which the interpreter computes with, warns of the infinities that these tests provoke
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = (
    (2, 4, 2, 5, 64),
    (1, 32, 8, 1, 128),
    (3, 17, 1, 2, 6),
    (1, 1, 1, 1, 2),
    (2, 20, 20, 3, 80),
)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cpu" and not INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernel is compiled for it")
    return device


def heads(x: Tensor, count: int) -> Tensor:
    """Return ``[batch, heads, tokens, width]``, as a view of a GEMM's result as in a model."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("size", "dtype", "joined"),
    pairwise(SIZES, (torch.bfloat16, torch.float16, torch.float32), (True, False)),
)
def test_bits_are_those_of_torch(
    size: tuple[int, ...], dtype: torch.dtype, joined: bool, device: torch.device
) -> None:
    batch, query_heads, key_heads, tokens, width = size
    both = torch.randn(batch, tokens, (query_heads + key_heads) * width, device=device).to(dtype)
    parts = both.split([query_heads * width, key_heads * width], -1)
    q, k = parts if joined else (part.contiguous() for part in parts)
    for angles in (1, batch):
        cos, sin = torch.randn(2, angles, tokens, width, device=device).to(dtype)
        given = (heads(q, query_heads), heads(k, key_heads), cos, sin)
        for y, expected in zip(fused.rotated(*given), reference.rotated(*given), strict=True):
            assert_bits_equal(y, expected)


def test_extremes_are_those_of_torch(device: torch.device) -> None:
    big = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, big, -big, torch.inf, 1e-40, -1e-40, 1.0])
    q = values.repeat(4).view(1, 1, 2, 16).to(device, torch.bfloat16)
    cos, sin = torch.ones(2, 1, 2, 16, device=device, dtype=torch.bfloat16)
    for y, expected in zip(
        fused.rotated(q, -q, cos, sin), reference.rotated(q, -q, cos, sin), strict=True
    ):
        assert torch.equal(y.isnan(), expected.isnan())
        assert_bits_equal(y.nan_to_num(), expected.nan_to_num())


def test_the_comparison_can_fail(device: torch.device) -> None:
    q, k = torch.randn(2, 1, 2, 3, 8, device=device)
    cos, sin = torch.randn(2, 1, 3, 8, device=device)
    right, wrong = (reference.rotated(q, k, cos, s) for s in (sin, -sin))
    assert not torch.equal(fused.rotated(q, k, cos, sin)[0], wrong[0])
    interleaved = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin + q * cos
    assert not torch.equal(interleaved, right[0])


def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    found = compiled_by(Path(__file__).with_name("ahead_of_time.py"), tmp_path)
    assert len(found) == 4
    for name, counts in found.items():
        assert counts["stack"] == 0, f"{name}: {counts['stack']} bytes did not fit"
        assert counts["registers"] <= 255
        assert counts["waits"] == 1
        assert counts["tiles"] <= 99 * 1024, f"{name} does not fit on Ada and Ampere"
