"""Scales of MX weights are swizzled once, and again whenever their weight has changed."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch

import fp8kit
from fp8kit.formats import MX, SCHEMES
from fp8kit.matmul.problem import MatmulOperands, linear_problem
from fp8kit.matmul.swizzled_scales import swizzled_weight_scales
from fp8kit.matmul.torch_native import BACKEND

E8M0 = torch.float8_e8m0fnu


def layer() -> fp8kit.Fp8Linear:
    torch.manual_seed(0)
    return fp8kit.Fp8Linear.from_linear(torch.nn.Linear(96, 40), "MXFP8")


def test_scales_are_rearranged_once_and_follow_every_change() -> None:
    held = layer()
    scale = held.weight_scale
    first = swizzled_weight_scales(scale, 48)
    assert first.dtype == E8M0
    assert torch.equal(
        fp8kit.unswizzle_scales(first, (48, 3))[:40].view(torch.uint8), scale.detach()
    )
    assert swizzled_weight_scales(scale, 48) is first
    with torch.no_grad():
        scale.add_(1)
    changed = swizzled_weight_scales(scale, 48)
    assert changed is not first
    assert torch.equal(
        fp8kit.unswizzle_scales(changed, (48, 3))[:40].view(torch.uint8), scale.detach()
    )
    scale.data = scale.data.clone()
    assert swizzled_weight_scales(scale, 48) is not changed
    assert swizzled_weight_scales(scale, 64).numel() == first.numel()


def test_nothing_that_is_kept_is_saved_or_outlives_the_weight() -> None:
    held = layer()
    before, after = io.BytesIO(), io.BytesIO()
    torch.save(held.state_dict(), before)
    kept = weakref.ref(swizzled_weight_scales(held.weight_scale, 48))
    torch.save(held.state_dict(), after)
    assert after.getvalue() == before.getvalue()
    twin = copy.deepcopy(held)
    assert swizzled_weight_scales(twin.weight_scale, 48) is not kept()
    del held
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 16, 32), (5, 40, 96), (130, 300, 160), (7, 33, 100)], ids=str
)
def test_the_recipe_of_torch_accepts_the_layout(
    shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    """On meta tensors, torch checks shapes, strides and sizes of tiles as on a GPU."""
    m, n, k = shape
    x, w = (fp8kit.quantize(torch.randn(r, k), MX) for r in (m, n))
    bias = torch.empty(n, device="meta")
    tensors = (t.to("meta") for t in (x.data, x.scale, w.data, w.scale))
    problem = linear_problem((n, k), SCHEMES["MXFP8"], out_dtype, torch.device("meta"), True, m)
    y = BACKEND.run(MatmulOperands(*tensors, bias), problem)
    assert (y.shape, y.dtype) == ((m, n), out_dtype)
    assert y.is_contiguous()


@pytest.mark.skipif(
    torch.__version__ >= (2, 14), reason="torch 2.14 looks at no sizes of meta scales"
)
def test_the_recipe_of_torch_refuses_another_layout() -> None:
    x, w = (torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="meta") for _ in "xw")
    flat = torch.empty(1024, dtype=torch.uint8, device="meta").view(E8M0)
    recipe = torch.nn.functional.ScalingType.BlockWise1x32
    tiles = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    with pytest.raises(RuntimeError, match="must have 1024"):
        torch.nn.functional.scaled_mm(
            x, w.t(), flat, recipe, flat[:512], recipe, swizzle_a=tiles, swizzle_b=tiles,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
