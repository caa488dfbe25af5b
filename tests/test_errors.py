"""Every user-facing error says what arrived, what is required and what to do."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit import formats
from fp8kit.checkpoint.schema.targets import dialect_for
from fp8kit.conversion import calibration
from fp8kit.errors import (
    CheckpointError,
    ConversionError,
    InvalidType,
    InvalidValue,
    UnsupportedError,
    did_you_mean,
    teach,
)
from fp8kit.fused import silu_mul_quantize

X = torch.ones(4, 256)
W = fp8kit.quantize(torch.ones(128, 256), role="weight")
W_BLOCK = fp8kit.quantize(torch.ones(128, 256), fp8kit.BLOCK)
Q = fp8kit.quantize(X)
ONE = torch.ones(1, 1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def converted() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(256, 128))
    fp8kit.convert(model)
    return model


def meta_scale_q() -> formats.QTensor:
    return formats.QTensor(Q.data, Q.scale.to("meta"), fp8kit.ROW)


# (id, call, exception, arrived, required, remedy)
CASES: list[tuple[str, Callable[[], object], type[Exception], str, str, str]] = [
    *(
        (name, call, TypeError, f"Got None as {what}.", "a str or a pathlib.Path", "'model-fp8'")
        for name, call, what in (
            ("load-path", lambda: fp8kit.load(None), "a checkpoint"),
            ("save-path", lambda: fp8kit.save(converted(), None), "the destination"),
            ("inspect-path", lambda: fp8kit.inspect(None), "a checkpoint"),
            ("convert-path", lambda: fp8kit.convert_checkpoint(None, "dir"), "a checkpoint"),
            ("quantize-path", lambda: fp8kit.quantize_checkpoint(".", None), "the destination"),
        )
    ),
    *(
        (name, call, ValueError, f"Got an empty path as {what}.", "the path of", "or '.' for")
        for name, call, what in (
            ("empty-source", lambda: fp8kit.quantize_checkpoint("", "dir"), "a checkpoint"),
            ("empty-goal", lambda: fp8kit.quantize_checkpoint(".", ""), "the destination"),
        )
    ),
    (
        "warmup-path",
        lambda: fp8kit.warmup("dir"),
        TypeError,
        "Got a str as the model.",
        "a module with FP8 layers",
        "fp8kit.load(directory",
    ),
    (
        "scheme-of-other-codes",
        lambda: setattr(converted()[0], "scheme", "FP8_BLOCK"),
        ValueError,
        "Got scheme FP8_BLOCK for a layer that holds codes and scales of FP8_DYNAMIC.",
        "quantizes nothing",
        "Fp8Linear.from_linear(layer.to_linear(), scheme)",
    ),
    ("rebase-none", lambda: fp8kit.rebase(None), ValueError, "Got None.", "E8M0", "fp8kit.MX"),
    (
        "group-shape",
        lambda: fp8kit.GroupShape(0, 4),
        ValueError,
        "Got GroupShape(rows=0, cols=4).",
        "rows >= 1",
        "Use fp8kit.TENSOR",
    ),
    (
        "scale-shape-dims",
        lambda: fp8kit.scale_shape((5,), fp8kit.BLOCK),
        ValueError,
        "Got a tensor of 1 dimensions for 128x128 groups.",
        "need at least 2",
        "unsqueeze(0)",
    ),
    (
        "fp8-dtype",
        lambda: fp8kit.quantize(X, dtype=torch.int8),
        TypeError,
        "Got torch.int8 as the dtype of FP8 codes.",
        "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2",
        "Pass one of these",
    ),
    (
        "role",
        lambda: fp8kit.quantize(X, role="bias"),
        ValueError,
        "Got role='bias'.",
        "'activation' or as a 'weight'",
        "Pass one of these two words",
    ),
    (
        "static-role",
        lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=ONE, role="bias"),
        ValueError,
        "Got role='bias'.",
        "'activation' or as a 'weight'",
        "Pass one of these two words",
    ),
    (
        "static-scheme-of-rows",
        lambda: fp8kit.Scheme("x", fp8kit.ROW, fp8kit.ROW, static=True),
        ValueError,
        "Got a static scheme 'x' with row activations.",
        "one number per layer",
        "Use activation=TENSOR",
    ),
    (
        "unknown-scheme",
        lambda: fp8kit.Scheme.of("FP9"),
        ValueError,
        "Unknown scheme 'FP9'.",
        "FP8, FP8_DYNAMIC, FP8_TENSOR, FP8_BLOCK, MXFP8, FP8_WEIGHT_ONLY",
        "a fp8kit.Scheme of your own",
    ),
    (
        "scale-dtype",
        lambda: formats.QTensor(Q.data, Q.scale.half(), fp8kit.ROW),
        TypeError,
        "Got a scale of dtype torch.float16 for row groups.",
        "must be torch.float32",
        ".float()",
    ),
    (
        "mx-scale-dtype",
        lambda: formats.QTensor(Q.data, torch.ones(4, 8), fp8kit.MX),
        TypeError,
        "Got a scale of dtype torch.float32 for mx groups.",
        "torch.uint8 (E8M0 bytes)",
        "View float8_e8m0fnu as uint8",
    ),
    (
        "scale-size",
        lambda: formats.QTensor(Q.data, torch.ones(4), fp8kit.ROW),
        ValueError,
        "Got a scale of shape (4,).",
        "Codes of shape (4, 256) in row groups need (4, 1).",
        "Reshape the scale",
    ),
    (
        "scale-device",
        meta_scale_q,
        ValueError,
        "Got a scale on meta.",
        "The codes are on cpu.",
        "Move both to one device.",
    ),
    (
        "quantize-integers",
        lambda: fp8kit.quantize(torch.ones(4, 4, dtype=torch.int32)),
        TypeError,
        "Got x of dtype torch.int32 and shape (4, 4).",
        "bfloat16, float16 or float32",
        "convert numbers by .float()",
    ),
    (
        "linear-codes",
        lambda: fp8kit.linear(Q.data, W),
        TypeError,
        "Got x of dtype torch.float8_e4m3fn and shape (4, 256).",
        "bfloat16, float16 or float32",
        "Codes go to fp8kit.scaled_mm with their scales",
    ),
    (
        "linear-bias-list",
        lambda: fp8kit.linear(X, W, [1.0] * 128),
        TypeError,
        "Got a bias of type list.",
        "A bias is a float tensor of shape (128,), or None.",
        "Pass a torch.Tensor with one value per output feature.",
    ),
    (
        "layer-codes",
        lambda: converted()(Q.data),
        TypeError,
        "0 (Fp8Linear [128, 256]): Got x of dtype torch.float8_e4m3fn and shape (4, 256)",
        "bfloat16, float16 or float32, or a QTensor",
        "the layer's compute_dtype",
    ),
    (
        "layer-nested",
        lambda: converted()(torch.nested.nested_tensor([X, X], layout=torch.jagged)),
        TypeError,
        "0 (Fp8Linear [128, 256]): Got x as a nested tensor.",
        "one dense tensor",
        "x.values()",
    ),
    (
        "layer-shape",
        lambda: converted()(torch.ones(4, 128)),
        ValueError,
        "0 (Fp8Linear [128, 256]): Got x of shape (4, 128) and a weight of shape (128, 256).",
        "x [..., K]",
        "Check the orientation",
    ),
    (
        "quantize-scalar",
        lambda: fp8kit.quantize(torch.tensor(1.0)),
        ValueError,
        "Got x of shape () for row groups.",
        "a last dimension K",
        "reshape or unsqueeze",
    ),
    (
        "quantize-block-of-vector",
        lambda: fp8kit.quantize(torch.ones(5), fp8kit.BLOCK),
        ValueError,
        "Got x of shape (5,) for 128x128 groups.",
        "two dimensions for groups of several rows",
        "unsqueeze",
    ),
    (
        "static-with-bound",
        lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=ONE, scale_ub=torch.tensor(1.0)),
        ValueError,
        "Got a static scale with scale_ub, scale_rounding or scale_layout.",
        "scales that are taken from the data",
        "Leave them out",
    ),
    (
        "layout",
        lambda: fp8kit.quantize(X, scale_layout="column"),
        ValueError,
        "Got scale_layout='column' for row groups.",
        "'row', or 'column' for groups along a row",
        "Pass scale_layout='row'",
    ),
    (
        "unknown-layout",
        lambda: fp8kit.quantize(X, fp8kit.GROUP128, scale_layout="diagonal"),
        ValueError,
        "Got scale_layout='diagonal' for 1x128 groups.",
        "'row', or 'column' for groups along a row",
        "Pass scale_layout='row'",
    ),
    (
        "rounding",
        lambda: fp8kit.quantize(X, scale_rounding="floor"),
        ValueError,
        "Got scale_rounding='floor' for row groups.",
        "'exact' or 'up'",
        "leave it out",
    ),
    (
        "mx-rounding",
        lambda: fp8kit.quantize(X, fp8kit.MX, scale_rounding="exact"),
        ValueError,
        "Got scale_rounding='exact' for mx groups.",
        "'up' or 'floor'",
        "leave it out",
    ),
    (
        "bound-dtype",
        lambda: fp8kit.quantize(X, scale_ub=torch.tensor(1.0, dtype=torch.float64)),
        ValueError,
        "Got scale_ub torch.float64 () on cpu.",
        "one float32 number on cpu",
        "torch.tensor(bound, device=x.device)",
    ),
    (
        "bound-size",
        lambda: fp8kit.linear(X, W, scale_ub=torch.ones(2)),
        ValueError,
        "Got scale_ub torch.float32 (2,) on cpu.",
        "one float32 number",
        "torch.tensor(bound",
    ),
    (
        "bound-value",
        lambda: fp8kit.quantize(X, scale_ub=torch.tensor(-1.0)),
        ValueError,
        "Got scale_ub=-1.",
        "it is positive",
        "None for no bound",
    ),
    (
        "bound-nan",
        lambda: fp8kit.linear(X, W, scale_ub=torch.tensor(float("nan"))),
        ValueError,
        "Got scale_ub=nan.",
        "bounds amax",
        "largest magnitude",
    ),
    (
        "bound-without-effect",
        lambda: fp8kit.linear(X, W, scheme="FP8_WEIGHT_ONLY", scale_ub=torch.tensor(1.0)),
        ValueError,
        "Got scale_ub for activations that have no scale of their own.",
        "bounds scales that are taken from the data",
        "Leave scale_ub out",
    ),
    (
        "dequantize-dtype",
        lambda: fp8kit.dequantize(Q, torch.float64),
        TypeError,
        "Got torch.float64 as the dtype of the result.",
        "bfloat16, float16 or float32",
        "Pass one of these",
    ),
    (
        "mm-out-dtype",
        lambda: fp8kit.scaled_mm(Q, W, out_dtype=torch.int8),
        TypeError,
        "Got torch.int8 as the dtype of the result.",
        "bfloat16, float16 or float32",
        "Pass one of these",
    ),
    (
        "mm-shapes",
        lambda: fp8kit.linear(torch.ones(4, 128), W),
        ValueError,
        "Got x of shape (4, 128) and a weight of shape (128, 256).",
        "x [..., K] is multiplied by a weight [N, K]",
        "rows are output features",
    ),
    (
        "mm-stacked-blocks",
        lambda: fp8kit.scaled_mm(fp8kit.quantize(torch.ones(2, 4, 256), fp8kit.BLOCK), W_BLOCK),
        ValueError,
        "Got x of shape (2, 4, 256) in 128x128 groups.",
        "one matrix [M, K]",
        "Flatten x before it is quantized",
    ),
    (
        "mm-bias",
        lambda: fp8kit.linear(X, W, torch.ones(3)),
        ValueError,
        "Got a bias of shape (3,) and dtype torch.float32.",
        "needs a float bias of shape (128,)",
        "one value per output feature",
    ),
    (
        "mm-device",
        lambda: fp8kit.linear(X, W, torch.ones(128, device="meta")),
        ValueError,
        "Got x on cpu and a bias on meta.",
        "one device",
        "Move them to the same device.",
    ),
    (
        "mm-accum",
        lambda: fp8kit.linear(X, W, accum="exact"),
        ValueError,
        "Got accum='exact'.",
        "'precise' or 'fast'",
        "Pass one of these words.",
    ),
    (
        "mm-unknown-backend",
        lambda: fp8kit.scaled_mm(Q, W, backend="cublas"),
        ValueError,
        "Unknown backend 'cublas'.",
        "Known are ",
        "Pass one of these or None.",
    ),
    (
        "mm-declined",
        lambda: fp8kit.scaled_mm(Q, W, backend="torch_native"),
        UnsupportedError,
        "No backend computes [M<=4, K=256] per row @ [N=128, K] per row -> bfloat16",
        "torch_native: runs on cuda, not on cpu",
        "leave this layer in high precision",
    ),
    (
        "linear-no-scheme",
        lambda: fp8kit.linear(X, fp8kit.quantize(torch.ones(128, 256), fp8kit.GROUP128)),
        ValueError,
        "Got a weight in 1x128 groups and no scheme.",
        "Only row, tensor, 128x128, mx weights have a standard one.",
        "Pass scheme=fp8kit.Scheme(",
    ),
    (
        "linear-other-scheme",
        lambda: fp8kit.linear(X, W, scheme="FP8_BLOCK"),
        ValueError,
        "Got a weight in row groups for scheme FP8_BLOCK.",
        "FP8_BLOCK has 128x128 weights.",
        "name the scheme of the weight",
    ),
    (
        "linear-static-without-scale",
        lambda: fp8kit.linear(X, fp8kit.quantize(X, fp8kit.TENSOR), scheme="FP8"),
        ValueError,
        "Scheme FP8 got no input_scale.",
        "a calibrated scale",
        "Pass input_scale, or use FP8_TENSOR or FP8_DYNAMIC.",
    ),
    (
        "linear-dynamic-with-scale",
        lambda: fp8kit.linear(X, W, scheme="FP8_DYNAMIC", input_scale=ONE),
        ValueError,
        "Scheme FP8_DYNAMIC got an input_scale.",
        "by their own amax",
        "use the static scheme FP8",
    ),
    (
        "layer-from-other-codes",
        lambda: fp8kit.Fp8Linear.from_quantized(fp8kit.quantize(X, dtype=torch.float8_e5m2)),
        ValueError,
        "Got a weight of torch.float8_e5m2 codes for scheme FP8_DYNAMIC.",
        "It holds torch.float8_e4m3fn codes.",
        "Pass a scheme with that dtype",
    ),
    (
        "layer-from-vector",
        lambda: fp8kit.Fp8Linear.from_quantized(fp8kit.quantize(torch.ones(8))),
        ValueError,
        "a weight of shape (8,).",
        "a weight [N, K]",
        "rows are output features",
    ),
    (
        "plan-string",
        lambda: fp8kit.plan(mlp(), exclude="abc"),
        TypeError,
        "Got exclude='abc'.",
        "a list of patterns",
        "Pass exclude=['abc'].",
    ),
    (
        "plan-unmatched",
        lambda: fp8kit.plan(mlp(), include=["fc9"]),
        ConversionError,
        "The include pattern 'fc9' matches no linear layer.",
        "The model's linear layers are 0, 1.",
        "Correct the pattern or remove it",
    ),
    (
        "plan-strict",
        lambda: fp8kit.plan(nn.Sequential(nn.Linear(8, 8)), strict=True),
        ConversionError,
        "strict=True, and 1 layers cannot be converted:\n  0: too small to gain",
        "must be convertible",
        "Exclude these layers by name",
    ),
    (
        "storage",
        lambda: fp8kit.convert(mlp(), weight_storage="disk"),
        ValueError,
        "Got weight_storage='disk'.",
        "discard, cpu_offload, keep",
        "Pass one of these",
    ),
    (
        "convert-meta",
        lambda: fp8kit.convert(mlp().to("meta")),
        ConversionError,
        "The weights of 0, 1 are on the meta device.",
        "needs their values",
        "Load the weights first",
    ),
    (
        "convert-static",
        lambda: fp8kit.convert(mlp(), "FP8"),
        ConversionError,
        "Scheme FP8 got no calibration data.",
        "one static scale per layer",
        "Pass calibrate=lambda model: model(batch)",
    ),
    (
        "convert-root",
        lambda: fp8kit.convert(nn.Linear(128, 128)),
        ConversionError,
        "Got a bare Linear as the model.",
        "replaced inside the module that holds them",
        "Fp8Linear.from_linear",
    ),
    (
        "calibration-silent",
        lambda: calibration.observe_amax(mlp(), ["0"], lambda _: None),
        ConversionError,
        "Calibration never reached ['0'].",
        "finite inputs of every converted layer",
        "Feed data that exercises these layers",
    ),
    (
        "explain-dense",
        lambda: fp8kit.explain(mlp()),
        ValueError,
        "Sequential holds no Fp8Linear and no FP8 experts.",
        "only for FP8 layers",
        "Call fp8kit.convert(model) first.",
    ),
    (
        "explain-negative",
        lambda: fp8kit.explain(mlp(), m=-1),
        ValueError,
        "Got m=-1.",
        "not negative",
        "Pass the number of tokens.",
    ),
    (
        "group-by-name",
        lambda: fp8kit.quantize(X, "ROW"),
        TypeError,
        "Got 'ROW' as the granularity.",
        "fp8kit.TENSOR, ROW, GROUP128, BLOCK or MX.",
        "Pass fp8kit.ROW.",
    ),
    (
        "group-by-scheme",
        lambda: fp8kit.quantize(X, "FP8_BLOCK"),
        TypeError,
        "Got 'FP8_BLOCK' as the granularity.",
        "It is a GroupShape",
        "fp8kit.GroupShape(rows, cols)",
    ),
    (
        "group-of-a-fused-result",
        lambda: silu_mul_quantize(X, X, group="mx"),
        TypeError,
        "Got 'mx' as the granularity.",
        "It is a GroupShape",
        "Pass fp8kit.MX.",
    ),
    (
        "group-of-a-qtensor",
        lambda: formats.QTensor(Q.data, Q.scale, "row"),
        TypeError,
        "Got 'row' as the granularity.",
        "It is a GroupShape",
        "Pass fp8kit.ROW.",
    ),
    (
        "quantize-a-list",
        lambda: fp8kit.quantize([[1.0, 2.0]]),
        TypeError,
        "Got x of type list.",
        "bfloat16, float16 or float32 tensor",
        "Pass a torch.Tensor",
    ),
    (
        "scale-number",
        lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=0.1),
        TypeError,
        "Got a scale of type float.",
        "torch.float32 tensor of shape (1, 1)",
        "Pass torch.full((1, 1), number",
    ),
    (
        "scale-zero",
        lambda: fp8kit.quantize(X, fp8kit.TENSOR, scale=0 * ONE),
        ValueError,
        "Got a static scale of 0.",
        "which are positive",
        "amax / 448",
    ),
    (
        "scale-negative",
        lambda: silu_mul_quantize(X, X, group=fp8kit.TENSOR, scale=-ONE),
        ValueError,
        "Got a static scale of -1.",
        "which are positive",
        "amax / 448",
    ),
    (
        "bound-number",
        lambda: fp8kit.quantize(X, scale_ub=3.0),
        TypeError,
        "Got scale_ub=3.0.",
        "one float32 number on cpu, as a tensor",
        "Pass torch.tensor(3.0, device=x.device).",
    ),
    (
        "dequantize-codes",
        lambda: fp8kit.dequantize(Q.data),
        TypeError,
        "Got q of type Tensor.",
        "codes with the scales they belong to",
        "Make one with fp8kit.quantize",
    ),
    (
        "linear-quantized",
        lambda: fp8kit.linear(Q, W, input_scale=ONE),
        ValueError,
        "Got input_scale for an input that is quantized already.",
        "Its scales are those of the QTensor.",
        "pass the tensor itself",
    ),
    (
        "linear-scale-number",
        lambda: fp8kit.linear(X, W, input_scale=0.1),
        TypeError,
        "Got a scale of type float.",
        "torch.float32 tensor of shape (1, 1)",
        "Pass torch.full((1, 1), number",
    ),
    (
        "linear-scale-zero",
        lambda: fp8kit.linear(X, W, input_scale=0 * ONE),
        ValueError,
        "Got an input_scale of 0.",
        "positive and finite",
        "Calibrate with data that reach this layer",
    ),
    (
        "layer-scale-nan",
        lambda: fp8kit.Fp8Linear.from_linear(mlp()[0], "FP8", math.nan * ONE),
        ValueError,
        "Got an input_scale of nan.",
        "positive and finite",
        "Calibrate with data that reach this layer",
    ),
    (
        "layer-scale-zero",
        lambda: fp8kit.Fp8Linear.from_linear(mlp()[0], "FP8", 0 * ONE),
        ValueError,
        "Got an input_scale of 0.",
        "positive and finite",
        "Calibrate with data that reach this layer",
    ),
    (
        "calibration-zeros",
        lambda: fp8kit.convert(mlp(), "FP8", calibrate=lambda m: m[1](0 * m[0](X[:, :128]))),
        ConversionError,
        "Calibration saw only zeros in ['1'].",
        "not all zero",
        "or exclude them",
    ),
    (
        "calibrate-data",
        lambda: fp8kit.convert(mlp(), calibrate=X),
        TypeError,
        "Got calibrate of type Tensor.",
        "a function that runs the model",
        "Pass calibrate=lambda model: model(batch).",
    ),
    (
        "convert-path",
        lambda: fp8kit.convert("model-dir"),
        TypeError,
        "Got a model of type str.",
        "an nn.Module with linear layers",
        "fp8kit.load",
    ),
    (
        "fuse-none",
        lambda: fp8kit.convert(mlp(), fuse=None),
        ValueError,
        "Got fuse=None.",
        "none, inputs, all",
        "a mapping from blocks to rules",
    ),
    (
        "fuse-false",
        lambda: fp8kit.plan(mlp(), fuse=False),
        ValueError,
        "Got fuse=False.",
        "none, inputs, all",
        "a mapping from blocks to rules",
    ),
    (
        "fuse-list",
        lambda: fp8kit.plan(mlp(), fuse=["0 1"]),
        ValueError,
        "Got fuse=['0 1'].",
        "none, inputs, all",
        "a mapping from blocks to rules",
    ),
    (
        "explain-several",
        lambda: fp8kit.explain(mlp(), m=[1, 16]),
        TypeError,
        "Got m=[1, 16].",
        "one row count",
        "fp8kit.explain(model, m=16) once for each",
    ),
    (
        "load-scheme-as-model",
        lambda: fp8kit.load("dir", "FP8_DYNAMIC"),
        TypeError,
        "Got 'FP8_DYNAMIC' as the model.",
        "the module to fill",
        "Pass scheme='FP8_DYNAMIC'",
    ),
]


IN_PARTS = {ValueError: InvalidValue, TypeError: InvalidType}


@pytest.mark.parametrize("kind", [InvalidValue, InvalidType, CheckpointError, ConversionError])
def test_an_error_keeps_its_text(kind: type[Exception]) -> None:
    error = kind("A.", "B.", "C.")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "A. B. C."
    assert str(kind(f"layer: {error}")) == "layer: A. B. C."


@pytest.mark.parametrize(
    ("call", "kind", "parts"), [pytest.param(c[1], c[2], c[3:], id=c[0]) for c in CASES]
)
def test_error_text(
    call: Callable[[], object], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    places = [text.find(part) for part in parts]
    assert -1 not in places, f"{parts[places.index(-1)]!r} is not in {text!r}"
    assert places == sorted(places), "arrived, required and remedy come in this order"
    assert type(caught.value) in (kind, IN_PARTS.get(kind))


def test_weight_and_scale_gradients_are_refused_with_a_remedy() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    layer.weight_scale.requires_grad_(True)
    y = layer(torch.ones(2, 64, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"A gradient to an FP8 weight .* train an adapter"):
        y.backward()


def test_backward_through_quantize_is_refused_with_a_remedy() -> None:
    x = torch.ones(2, 64, requires_grad=True)
    value = fp8kit.dequantize(fp8kit.quantize(x))
    with pytest.raises(RuntimeError, match=r"A gradient through quantize.*torch\.no_grad"):
        value.sum().backward()


def test_load_errors_name_the_entry() -> None:
    model = nn.Sequential(fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64, bias=False)))
    state = model.state_dict()
    without = {"0.weight": state["0.weight"]}
    with pytest.raises(RuntimeError, match=r"0\.weight is .* and has no 0\.weight_scale\."):
        model.load_state_dict(without)
    dense = {"0.weight": torch.ones(64, 64), "0.weight_scale": state["0.weight_scale"]}
    with pytest.raises(RuntimeError, match=r"A dense weight has no scale\. Drop the scale"):
        model.load_state_dict(dense)
    other = {
        "0.weight": torch.ones(64, 64).to(torch.float8_e5m2),
        "0.weight_scale": state["0.weight_scale"],
    }
    with pytest.raises(RuntimeError, match=r"holds torch\.float8_e4m3fn codes\. Pass a scheme"):
        model.load_state_dict(other)
    wrong = {"0.weight": state["0.weight"], "0.weight_scale": torch.ones(64)}
    with pytest.raises(RuntimeError, match=r"need \(64, 1\)"):
        model.load_state_dict(wrong)


def test_exceptions_fit_the_builtin_hierarchy() -> None:
    assert issubclass(UnsupportedError, RuntimeError)
    assert issubclass(ConversionError, ValueError)
    assert issubclass(CheckpointError, ValueError)


def test_teach_joins_three_sentences() -> None:
    assert teach("A.", "B.", "C.") == "A. B. C."


def test_a_mistyped_name_is_answered_with_the_closest() -> None:
    assert did_you_mean("fp8_dynamc", ["FP8", "FP8_DYNAMIC"]) == " Did you mean 'FP8_DYNAMIC'?"
    assert did_you_mean("marlin", ["FP8", "FP8_DYNAMIC"]) == ""
    assert did_you_mean("x", []) == ""


@pytest.mark.parametrize(
    ("call", "closest"),
    [
        (lambda: fp8kit.Scheme.of("fp8-dynamic"), "FP8_DYNAMIC"),
        (lambda: dialect_for("transformer", fp8kit.Scheme.of("FP8_DYNAMIC")), "transformers"),
        (lambda: fp8kit.plan(siblings(), exclude=["*.q_prj"]), "q_proj"),
        (lambda: fp8kit.plan(siblings(), include=["a.k_porj"]), "a.k_proj"),
        (lambda: fp8kit.scaled_mm(Q, W, backend="dequantised"), "dequantized"),
    ],
    ids=["scheme", "target", "exclude", "include", "backend"],
)
def test_names_that_are_checked_are_suggested(call: Callable[[], object], closest: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean '{closest}'\?$"):
        call()


def siblings() -> nn.Module:
    model = nn.Module()
    model.a = nn.Module()
    model.a.q_proj, model.a.k_proj = nn.Linear(128, 128), nn.Linear(128, 128)
    return model
