"""Fused weights with one scale per part, and the two encodings of e4m3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit.errors import InvalidValue
from fp8kit.modules.weight_parts import UNSET_SCALE, native_scheme

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
WIDTHS = (32, 8, 0, 8)


def parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes of separately quantized parts, their scales, and the dequantized values."""
    generator = torch.Generator().manual_seed(3)
    found = [
        fp8kit.quantize(torch.randn(n, 64, generator=generator) * 10**i, fp8kit.TENSOR)
        if n
        else None
        for i, n in enumerate(WIDTHS)
    ]
    codes = torch.cat([q.data.view(torch.uint8) for q in found if q]).view(FN)
    scales = torch.stack([q.scale[0, 0] if q else torch.tensor(1e-3) for q in found])
    return codes, scales, torch.cat([fp8kit.dequantize(q) for q in found if q])


def test_joined_scales_change_no_value() -> None:
    codes, scales, values = parts()
    q = fp8kit.join_scales(codes, scales, WIDTHS)
    assert q.data is codes
    assert q.group == fp8kit.ROW
    assert torch.equal(fp8kit.dequantize(q), values)


def test_requantized_parts_are_those_of_a_division_by_the_largest_scale() -> None:
    codes, scales, values = parts()
    before = codes.clone()
    q = fp8kit.requantize(codes, scales, WIDTHS)
    largest = scales[3]
    assert q.scale.tolist() == [[largest.item()]]
    assert torch.equal(q.data.float(), (values / largest).clamp(-448, 448).to(FN).float())
    assert torch.equal(q.data[40:].view(torch.uint8), before[40:].view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), before.view(torch.uint8))
    assert not torch.equal(q.data[:32].float(), codes[:32].float())


def test_the_scale_of_an_empty_part_does_not_count() -> None:
    codes, scales, _ = parts()
    scales[2] = 1e6
    assert fp8kit.requantize(codes, scales, WIDTHS).scale.item() == scales[3].item()


@pytest.mark.parametrize("scales", [[0.25], [0.25, UNSET_SCALE, UNSET_SCALE, UNSET_SCALE]])
def test_a_weight_fused_before_it_was_quantized_is_left_alone(scales: list[float]) -> None:
    codes, _, _ = parts()
    q = fp8kit.requantize(codes, torch.tensor(scales), WIDTHS)
    assert q.data is codes
    assert q.scale.tolist() == [[0.25]]
    assert (fp8kit.join_scales(codes, torch.tensor(scales), WIDTHS).scale == 0.25).all()


@pytest.mark.parametrize(
    ("scales", "widths", "error", "said"),
    [
        ([1.0, 1.0], (40, 9), ValueError, "widths"),
        ([1.0, 1.0], (49, -1), ValueError, "widths"),
        ([1.0, 1.0], (True, 47), ValueError, "widths"),
        ([1.0, 1.0, 1.0], (40, 8), ValueError, "3 scales for 2 parts"),
        ([1.0, 0.0], (40, 8), ValueError, "positive"),
        ([1.0, float("nan")], (40, 8), ValueError, "positive"),
        ([1.0, 2.0, UNSET_SCALE], (40, 4, 4), ValueError, "2 of 3 scales"),
        ([UNSET_SCALE, UNSET_SCALE], (40, 8), ValueError, "0 of 2 scales"),
    ],
)
@pytest.mark.parametrize("function", [fp8kit.join_scales, fp8kit.requantize])
def test_what_does_not_fit_is_refused(function, scales, widths, error, said) -> None:
    codes, _, _ = parts()
    with pytest.raises(error, match=said):
        function(codes, torch.tensor(scales), widths)
    with pytest.raises(TypeError, match="codes of type NoneType"):
        function(None, torch.ones(2), (1, 1))
    with pytest.raises(TypeError, match="widths of NoneType"):
        function(codes, torch.ones(2), None)
    with pytest.raises(TypeError, match="float32"):
        function(codes, torch.ones(2, dtype=torch.bfloat16), (40, 8))
    with pytest.raises(TypeError, match="FP8"):
        function(codes.float(), torch.ones(2), (40, 8))


def every_code(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(4, 64).view(dtype)


@pytest.mark.parametrize("function", [fp8kit.join_scales, fp8kit.requantize])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scales_without_values_are_refused(function, device: str) -> None:
    codes = torch.zeros(6, 4, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(InvalidValue, match="on the meta device"):
        function(codes, torch.empty(2, device="meta"), (4, 2))


@pytest.mark.parametrize("group", [fp8kit.ROW, fp8kit.TENSOR, fp8kit.MX], ids=str)
def test_every_code_keeps_its_value_in_the_other_encoding(group: fp8kit.GroupShape) -> None:
    shape = fp8kit.scale_shape((4, 64), group)
    scale = torch.full(shape, 0.375)
    if group == fp8kit.MX:
        scale = torch.full(shape, 120, dtype=torch.uint8)
    q = fp8kit.QTensor(every_code(FN), scale, group)
    other = fp8kit.recode(q, FNUZ)
    wanted = fp8kit.dequantize(q)
    assert other.data.dtype == FNUZ
    assert torch.equal(fp8kit.dequantize(other).nan_to_num(-1), wanted.nan_to_num(-1))
    back = fp8kit.recode(other, FN)
    assert torch.equal(fp8kit.dequantize(back).nan_to_num(-1), wanted.nan_to_num(-1))
    assert torch.equal(back.scale, q.scale)
    assert fp8kit.recode(q, FN) is q


def test_the_largest_fnuz_code_is_cast_instead() -> None:
    q = fp8kit.QTensor(every_code(FNUZ), torch.ones(4, 1), fp8kit.ROW)
    found, wanted = fp8kit.dequantize(fp8kit.recode(q, FN)), fp8kit.dequantize(q)
    normal = wanted.abs() >= 2**-6
    assert torch.equal(found[normal], wanted[normal])
    assert found.nan_to_num().abs().amax() == 240


def test_other_encodings_and_the_end_of_e8m0_are_refused() -> None:
    e5m2 = fp8kit.quantize(torch.ones(2, 32), dtype=torch.float8_e5m2)
    with pytest.raises(TypeError, match="float8_e5m2"):
        fp8kit.recode(e5m2, FN)
    with pytest.raises(TypeError, match="float8_e5m2"):
        fp8kit.recode(fp8kit.quantize(torch.ones(2, 32)), torch.float8_e5m2)
    top = fp8kit.QTensor(every_code(FN), torch.full((4, 2), 254, dtype=torch.uint8), fp8kit.MX)
    with pytest.raises(ValueError, match="doubled"):
        fp8kit.recode(top, FNUZ)


@pytest.mark.parametrize("scheme", fp8kit.SCHEMES)
def test_a_model_changes_its_codes_and_keeps_its_numbers(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256)).bfloat16()
    x = torch.randn(4, 256).bfloat16()
    fp8kit.convert(model, scheme, calibrate=lambda m: m(x))
    y, codes, before = model(x), model[0].codes.view(torch.uint8).clone(), model[0].scheme
    input_scale = model[0].input_scale
    assert fp8kit.recode(model, FNUZ) is model
    assert fp8kit.recode(model, FNUZ) is model  # again, which changes no scale
    assert {layer.codes.dtype for layer in (model[0], model[2])} == {FNUZ}
    assert (model(x) - y).float().norm() < 1e-2 * y.float().norm()
    with pytest.raises(fp8kit.CheckpointError, match=r"fp8kit.recode\(model, dtype\)"):
        fp8kit.save(model, tmp_path / "c")
    fp8kit.recode(model, FN)
    assert model[0].scheme == before
    assert model[0].input_scale == input_scale
    # negative zero alone is another byte, of the same value
    same = model[0].codes.view(torch.uint8) == codes
    assert (same | (codes == 0x80)).all()
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("load", ["load_state_dict", "load_weights", "keep"])
def test_rebased_codes_of_either_encoding_take_dense_weights(load: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False))
    other = nn.Sequential(nn.Linear(256, 64, bias=False))
    new, x = {n: t.clone() for n, t in other.state_dict().items()}, torch.randn(4, 256)
    fp8kit.convert(other, "MXFP8")
    fp8kit.convert(model, "MXFP8", weight_storage="keep" if load == "keep" else "discard")
    assert fp8kit.recode(model, FNUZ)[0].scheme.rebased
    if load == "keep":
        with torch.no_grad():
            model[0].original_weight.copy_(new["0.weight"])
    elif load == "load_weights":
        fp8kit.load_weights(model, new)
    else:
        model.load_state_dict(new)
    assert torch.equal(model(x), other(x))
    assert model[0].codes.dtype == FNUZ
    fp8kit.recode(model, FN)
    assert torch.equal(model(x), other(x))
    assert torch.equal(model[0].weight_exponents, other[0].weight_exponents)


def test_a_scheme_has_the_codes_of_its_device() -> None:
    dynamic = fp8kit.SCHEMES["FP8_DYNAMIC"]
    assert native_scheme(dynamic, torch.device("cpu")) is dynamic
