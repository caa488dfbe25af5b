"""Arguments that are no tensors raise a clear error, whichever function gets them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8kit import compat
from fp8kit.errors import InvalidType, InvalidValue

CODES, ONE = torch.ones(32, 32).to(torch.float8_e4m3fn), torch.ones(1)
BYTES = torch.full((32, 1), 127, dtype=torch.uint8)
X, BF16 = torch.ones(2, 32), torch.bfloat16
LAYERS = (compat.FP8Linear(torch.nn.Linear(32, 32)),) * 2
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "scaled_fp8_quant": (compat.scaled_fp8_quant, {"input": X}),
    "cutlass_scaled_mm": (
        compat.cutlass_scaled_mm,
        {"a": CODES, "b": CODES, "scale_a": ONE, "scale_b": ONE, "out_dtype": BF16},
    ),
    "torch_channelwise_w8a8_scaled_mm": (
        compat.torch_channelwise_w8a8_scaled_mm,
        {"qinput": CODES, "weight": CODES, "scale_a": ONE, "scale_b": ONE, "bias": None}
        | {"out_dtype": BF16, "output_shape": (32, 32)},
    ),
    "convert_to_channelwise": (
        compat.convert_to_channelwise,
        {"weight_scale": ONE, "logical_widths": [32]},
    ),
    "requantize_with_max_scale": (
        compat.requantize_with_max_scale,
        {"weight": CODES, "weight_scale": ONE, "logical_widths": [32]},
    ),
    "normalize_e4m3fn_to_e4m3fnuz": (
        compat.normalize_e4m3fn_to_e4m3fnuz,
        {"weight": CODES, "weight_scale": ONE},
    ),
    "per_tensor_dequantize": (compat.per_tensor_dequantize, {"tensor": CODES, "inv_scale": ONE}),
    "all_close_1d": (compat.all_close_1d, {"x": ONE}),
    "per_token_group_quant_fp8": (compat.per_token_group_quant_fp8, {"x": X, "group_size": 32}),
    "per_token_cast_to_fp8": (compat.per_token_cast_to_fp8, {"x": X}),
    "per_block_cast_to_fp8": (compat.per_block_cast_to_fp8, {"x": X}),
    "w8a8_block_fp8_matmul": (
        compat.w8a8_block_fp8_matmul,
        {"A": CODES, "B": CODES, "As": X.new_ones(32, 1), "Bs": X.new_ones(1, 1)}
        | {"block_size": (128, 128)},
    ),
    "mxfp8_e4m3_quantize": (compat.mxfp8_e4m3_quantize, {"x": X, "alignment": 32}),
    "mxfp8_e4m3_quantize_fake": (compat.mxfp8_e4m3_quantize_fake, {"x": X}),
    "dequant_mxfp8_to_bf16": (compat.dequant_mxfp8_to_bf16, {"x": CODES, "scales": BYTES}),
    "swizzle_mxfp8_scale": (compat.swizzle_mxfp8_scale, {"sf": BYTES, "M": 32, "K": 32}),
    "Mxfp8LinearOp": (
        compat.Mxfp8LinearOp("torch").apply,
        {"input": X, "weight": CODES, "weight_scale": BYTES, "out_dtype": BF16, "bias": None},
    ),
    "Fp8LinearOp": (
        compat.Fp8LinearOp().apply,
        {"input": X, "weight": CODES, "weight_scale": ONE, "input_scale": None, "bias": None},
    ),
    "apply_fp8_linear": (
        compat.apply_fp8_linear,
        {"input": X, "qweight": CODES, "weight_scale": ONE, "qbias": None},
    ),
    "Fp8Linear": (compat.Fp8Linear, {"weight": CODES, "bias": None, "weight_scale": ONE}),
    "get_linear": (
        compat.get_linear,
        {"weight": CODES, "bias": None, "quantize": "fp8", "weight_scale": ONE},
    ),
    "fp8_linear_forward_many": (compat.fp8_linear_forward_many, {"linears": LAYERS, "x": X}),
    "FP8Linear": (LAYERS[0].forward, {"x": X}),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_no_tensor_is_named(name: str) -> None:
    function, arguments = CALLS[name]
    function(**arguments)
    tensors = [n for n, value in arguments.items() if value is None or isinstance(value, Tensor)]
    for wrong, value in itertools.product(tensors, ("a", [["a"]], {}, None)):
        if value is not None or arguments[wrong] is not None:
            with pytest.raises((InvalidType, InvalidValue), match=r"of type|scale"):
                function(**{**arguments, wrong: value})


SCALES = [
    (name, word)
    for name, (_, arguments) in CALLS.items()
    for word, value in arguments.items()
    if word in ("weight_scale", "scale_a", "scale_b", "inv_scale", "As", "Bs")
    and value is not BYTES
] + [("scaled_fp8_quant", "scale"), ("Fp8LinearOp", "input_scale")]


@pytest.mark.parametrize(("name", "word"), SCALES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_integers_are_no_scales(name: str, word: str, dtype: torch.dtype) -> None:
    function, arguments = CALLS[name]
    scale = arguments.get(word)
    given = torch.full_like(ONE if scale is None else scale, 127, dtype=dtype)
    with pytest.raises(InvalidType, match=rf"a scale of dtype {dtype}.*View bytes of E8M0 as"):
        function(**{**arguments, word: given})


def test_bytes_of_e8m0_are_scales_as_such() -> None:
    function, arguments = CALLS["w8a8_block_fp8_matmul"]
    bytes_of = {
        word: torch.full_like(arguments[word], 128, dtype=torch.uint8) for word in ("As", "Bs")
    }
    found = function(**arguments | {w: b.view(torch.float8_e8m0fnu) for w, b in bytes_of.items()})
    assert torch.equal(found, function(**arguments) * 4)


OTHERS: list[tuple[str, str, Any]] = [
    ("per_token_group_quant_fp8", "use_ue8m0", X),
    ("per_token_cast_to_fp8", "use_ue8m0", X),
    ("scaled_fp8_quant", "output_dtype", X),
    ("scaled_fp8_quant", "num_token_padding", "no"),
    ("convert_to_channelwise", "logical_widths", None),
    ("requantize_with_max_scale", "logical_widths", 3),
    ("Fp8LinearOp", "use_per_token_if_dynamic", "no"),
    ("enable_fp8_gemm", "options", {"cast_inputs": True}),
]


@pytest.mark.parametrize(("name", "wrong", "value"), OTHERS)
def test_an_argument_of_another_kind_is_named(name: str, wrong: str, value: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    others = {"enable_fp8_gemm": (compat.enable_fp8_gemm, {"model": model})}
    function, arguments = (CALLS | others)[name]
    with pytest.raises(InvalidType, match=f"Got {wrong} of type .* takes .* Pass {wrong}= by name"):
        function(**{**arguments, wrong: value})


@pytest.mark.parametrize("group", [3, {1: -1}, (2, 2)])
def test_a_group_that_inputs_do_not_have_is_named(group: Any) -> None:
    with pytest.raises(InvalidValue, match="Got act_quant_group_shape"):
        compat.Fp8LinearOp(act_quant_group_shape=group)


def test_other_errors_of_a_call_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight_scale'"):
        compat.normalize_e4m3fn_to_e4m3fnuz(CODES)  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="must match the size"):
        compat.per_tensor_dequantize(CODES, torch.ones(3))
