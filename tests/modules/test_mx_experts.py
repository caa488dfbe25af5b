"""MXFP8 experts without MX tensor cores: rebased, reported, and saved as the original MXFP8."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.conversion.notes import mx_numbers
from fp8kit.formats import MX, MX_FORMS, SCHEMES, QTensor
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.mx_forms import form_on, set_forms
from fp8kit.moe import triton
from fp8kit.moe.activation import Activation
from fp8kit.moe.problem import ExpertsProblem
from numerics import assert_bits_equal
from tiny_experts import tiny

E, HIDDEN, INNER = 3, 128, 128
IDS = torch.arange(24).view(1, -1) * 7 % 160


def dense_weight(*shape: int) -> Tensor:
    """Return weights whose MX values all stay exact under one scale per row."""
    weight = torch.randn(shape) * 0.05
    return weight.masked_fill(weight.abs() < 1e-3, 0)


def experts(scheme: str, outliers: int = 0) -> fp8kit.Fp8Experts:
    torch.manual_seed(0)
    up, down = dense_weight(E, 2 * INNER, HIDDEN), dense_weight(E, HIDDEN, INNER)
    if outliers:
        up[1, :, ::outliers] *= 2.0**20
    return fp8kit.Fp8Experts.from_dense(up, down, scheme)


def routed(count: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.arange(count) % E, (torch.arange(count) + 1) % E], 1)
    return torch.randn(count, HIDDEN), ids, torch.full((count, 2), 0.5)


def experts_in(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, ExpertTensors)]


@pytest.mark.parametrize("form", ["MXFP8_ROW", "MXFP8_BLOCK"])
def test_rebased_stacks_keep_their_values_and_their_bits(form: str) -> None:
    plain, layer = experts("MXFP8"), experts(form)
    for name in layer.stacks.names:
        mx, held = plain.quantized(name), layer.quantized(name)
        stored = layer.stored(name)
        assert held.group != MX
        assert_bits_equal(stored.scale, mx.scale)
        if form == "MXFP8_ROW":
            assert_bits_equal(fp8kit.dequantize(held), fp8kit.dequantize(mx))
            assert_bits_equal(stored.data, mx.data)
    same = fp8kit.Fp8Experts.from_quantized(
        *(layer.quantized(name) for name in layer.stacks.names),
        "FP8_DYNAMIC" if form == "MXFP8_ROW" else "FP8_BLOCK",
        dtype=layer.compute_dtype,
    )
    given = routed(9)
    assert_bits_equal(layer(*given), same(*given))


def test_rebased_experts_move_copy_rearrange_and_reload() -> None:
    plain, layer, given = experts("MXFP8"), experts("MXFP8_ROW"), routed(5)
    state, y = {n: t.clone() for n, t in layer.state_dict().items()}, layer(*given)
    assert state["down_proj_exponents"].dtype == torch.uint8
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer).half().float()))
    assert_bits_equal(twin(*given), y)
    twin.load_state_dict(state)
    assert_bits_equal(twin(*given), y)
    twin.store("down_proj", 0, torch.zeros(HIDDEN, INNER))
    assert not fp8kit.dequantize(twin.stored("down_proj"))[0].any()
    twin.load_state_dict(plain.state_dict() | {n: t for n, t in state.items() if "expon" in n})
    assert_bits_equal(twin(*given), y)
    holder, brought = nn.ModuleDict({"experts": twin}), nn.ModuleDict({"experts": layer})
    twin.store("down_proj", 0, torch.zeros(HIDDEN, INNER))
    fp8kit.load_weights(holder, brought.state_dict().items())
    assert_bits_equal(twin(*given), y)
    twin.place(torch.tensor([2, 0, 1]))
    assert_bits_equal(twin(*given), y)
    assert_bits_equal(twin.stored("down_proj").scale[1], layer.stored("down_proj").scale[0])


@pytest.mark.parametrize(
    ("scheme", "other", "said"),
    [
        ("MXFP8_ROW", "FP8_DYNAMIC", "no gate_up_proj_exponents, and the layer is MXFP8_ROW"),
        ("FP8_DYNAMIC", "MXFP8_ROW", "gate_up_proj_exponents, and the layer is FP8_DYNAMIC"),
    ],
)
def test_codes_of_another_form_are_refused(scheme: str, other: str, said: str) -> None:
    """The exponents of the other form would be missing, or would belong to other codes."""
    layer, given = experts(scheme), routed(4)
    y = layer(*given)
    with pytest.raises(RuntimeError, match=said):
        layer.load_state_dict(experts(other).state_dict(), strict=False)
    assert_bits_equal(layer(*given), y)


def test_experts_that_would_lose_too_much_fall_back_by_name() -> None:
    fits, wild = experts("MXFP8"), experts("MXFP8", outliers=64)
    (told,) = set_forms({"a": fits, "b": wild})
    assert fits.scheme.name == "MXFP8_ROW"
    assert "rebased to one power of two per row" in fits.form_note
    assert told.startswith("b: one power of two per row would change")
    assert wild.scheme.name == "MXFP8_WEIGHT_ONLY"
    assert wild(*routed(4)).isfinite().all()


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_converted_experts_are_saved_as_mxfp8_and_come_back(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    dense = tiny(kind)
    model = copy.deepcopy(dense)
    report = fp8kit.convert(model, "MXFP8")
    assert {m.scheme.name for m in experts_in(model)} <= {"MXFP8_ROW", "MXFP8_BLOCK"}
    assert all("rebased" in record.reason for record in report.stacks)
    assert "rebased" in str(fp8kit.explain(model))
    kept = [m.stored(n) for m in experts_in(model) for n in m.stacks.names]
    with torch.no_grad():
        y = model(IDS).logits
    if kind == "GptOss":
        with pytest.warns(UserWarning, match="stacks of codes"):
            fp8kit.save(model, tmp_path / "a")
    else:
        fp8kit.save(model, tmp_path / "a", target="sglang")
    again = fp8kit.load(tmp_path / "a")
    assert [m.scheme for m in experts_in(again)] == [m.scheme for m in experts_in(model)]
    back = [m.stored(n) for m in experts_in(again) for n in m.stacks.names]
    for one, other in zip(kept, back, strict=True):
        assert_bits_equal(one.data, other.data)
        assert_bits_equal(one.scale, other.scale)
    with torch.no_grad():
        assert_bits_equal(again(IDS).logits, y)
    emulated = fp8kit.load(tmp_path / "a", scheme="MXFP8_EMULATED")
    assert {m.scheme.name for m in experts_in(emulated)} == {"MXFP8_EMULATED"}
    if kind != "GptOss":
        again.save_pretrained(tmp_path / "b")
        source, written = (open_checkpoint(tmp_path / d) for d in ("a", "b"))
        for name in source.layers:
            for own in (source.layers[name].weight, source.layers[name].scale):
                assert_bits_equal(source.read(own), written.read(own))


def test_a_round_trip_of_experts_gives_the_bytes_of_the_source(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny("Qwen3Moe")
    with torch.no_grad():  # values so small would lose bits
        for parameter in model.parameters():
            parameter.masked_fill_(parameter.abs() < 1e-3, 0)
    fp8kit.convert(model, "MXFP8_EMULATED")  # nothing is rebased before the first file
    fp8kit.save(model, tmp_path / "a", target="sglang")
    loaded = fp8kit.load(tmp_path / "a")
    assert {m.scheme.rebased for m in experts_in(loaded)} == {True}
    fp8kit.save(loaded, tmp_path / "b", target="sglang")
    source, written = (open_checkpoint(tmp_path / d) for d in ("a", "b"))
    assert source.tensors.keys() == written.tensors.keys()
    for name in source.tensors:
        assert_bits_equal(source.read(name), written.read(name))


def test_a_value_of_another_group_is_refused() -> None:
    layer = experts("MXFP8_ROW")
    row = fp8kit.quantize(torch.randn(HIDDEN, INNER), role="weight")
    with pytest.raises(ValueError, match="rebased"):
        layer.store("down_proj", 0, QTensor(row.data, row.scale, row.group))


@pytest.mark.parametrize(
    ("capability", "inputs"),
    [
        ((8, 0), "activations in 16 bit"),
        ((8, 9), "activations per token"),
        ((9, 0), "activations per token"),
        ((10, 0), "activations per token"),
        ((12, 0), "activations per token"),
    ],
)
@pytest.mark.parametrize("m", [1, 4096])
def test_kernels_compute_experts_on_every_device_and_the_plan_says_how(
    capability: tuple[int, int], inputs: str, m: int
) -> None:
    asked = SCHEMES["MXFP8"]
    *layers, said = mx_numbers("cuda", capability, asked, experts=True)
    assert len(layers) == (capability >= (10, 0))
    assert f"MXFP8 {'experts' if layers else 'layers'} compute as MXFP8_ROW" in said
    assert inputs in said
    by_hand = (asked, MX_FORMS["MXFP8_WEIGHT_ONLY"], MX_FORMS["MXFP8_EMULATED"])
    for form in (form_on(asked, capability, experts=True), *by_hand):
        kind = (form.activation, form.weight, torch.bfloat16, form.dtype, "up")
        rest = (False, False, False, False, "cuda", capability)
        problem = ExpertsProblem(m, 128, 8, 2048, 768, Activation(), *kind, *rest)
        assert triton.supports(problem) is None
    assert form_on(asked, capability, experts=True).rebased
