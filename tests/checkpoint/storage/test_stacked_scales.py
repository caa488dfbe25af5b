"""Stacked scales beside single experts are split among them, if they belong to them."""

from __future__ import annotations

import pytest
import torch

from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.checkpoint.storage.stacked_scales import sliced

E4M3, F32 = torch.float8_e4m3fn, torch.float32


def info(name: str, shape: tuple[int, ...], dtype: torch.dtype = F32) -> TensorInfo:
    return TensorInfo(name, "model.safetensors", dtype, shape, offset=64)


def experts(
    count: int = 2, parts: tuple[str, ...] = ("gate_proj", "up_proj")
) -> dict[str, TensorInfo]:
    names = [f"m.experts.{e}.{part}.weight" for e in range(count) for part in parts]
    return {n: info(n, (256, 128), E4M3) for n in names}


def with_scale(
    shape: tuple[int, ...], kind: str = "scale_inv", **options: object
) -> dict[str, TensorInfo]:
    name = f"m.experts.gate_up_proj_{kind}"
    return experts(**options) | {name: info(name, shape)}  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj"), ("w1", "w3")])
def test_each_expert_gets_the_rows_of_its_projection(parts: tuple[str, ...]) -> None:
    found = sliced(with_scale((2, 4, 3), parts=parts))
    assert "m.experts.gate_up_proj_scale_inv" not in found
    offsets = {}
    for expert in range(2):
        for part in parts:
            scale = found[f"m.experts.{expert}.{part}.weight_scale_inv"]
            assert scale.shape == (2, 3)
            assert scale.name == "m.experts.gate_up_proj_scale_inv"
            offsets[expert, part] = scale.offset
    assert list(offsets.values()) == [64, 64 + 24, 64 + 48, 64 + 72]


def test_an_input_scale_for_each_half_is_cut_as_a_scale_of_the_weight() -> None:
    found = sliced(with_scale((2, 2), "activation_scale"))
    places = [
        found[f"m.experts.{e}.{p}_proj.activation_scale"] for e in (0, 1) for p in ("gate", "up")
    ]
    assert [p.offset for p in places] == [64, 68, 72, 76]
    assert {p.shape for p in places} == {(1,)}


def test_one_scale_of_an_expert_is_that_of_both_halves() -> None:
    found = sliced(with_scale((2, 1, 1)))
    places = [
        found[f"m.experts.{e}.{p}_proj.weight_scale_inv"] for e in (0, 1) for p in ("gate", "up")
    ]
    assert [p.offset for p in places] == [64, 64, 68, 68]
    found = sliced(with_scale((2,), "activation_scale"))
    assert found["m.experts.1.up_proj.activation_scale"].offset == 68
    assert found["m.experts.1.up_proj.activation_scale"].shape == ()


@pytest.mark.parametrize("shape", [(3, 4, 1), (1,), (), (2, 3, 1)])
def test_what_does_not_fit_is_left_for_others_to_report(shape: tuple[int, ...]) -> None:
    tensors = with_scale(shape, count=2 if shape[:1] != (1,) else 0)
    assert sliced(tensors) == tensors


def test_a_stack_of_codes_keeps_its_stack_of_scales() -> None:
    tensors = with_scale((2, 4, 1))
    tensors["m.experts.gate_up_proj"] = info("m.experts.gate_up_proj", (2, 512, 128), E4M3)
    assert sliced(tensors) == tensors
