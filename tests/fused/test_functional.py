"""The public fused functions: results, refusals, and how compilers see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import fp8kit
from fp8kit import fused
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, QTensor
from fp8kit.fused import reference
from fp8kit.fused.problem import FUSED_BACKENDS
from numerics import assert_bits_equal

K = 256
OPS = torch.ops.fp8kit


def operands(device: torch.device | str, m: int = 6) -> dict[str, Tensor]:
    names = ("x", "residual", "gate", "up")
    found = {n: torch.randn(2, m, K, device=device).bfloat16() for n in names}
    found |= {n: torch.randn(K, device=device).bfloat16() for n in ("weight", "bias")}
    return found | {n: torch.randn(2, K, device=device).bfloat16() for n in ("gain", "shift")}


Calls = dict[str, tuple[Callable[..., QTensor], Tensor]]


def calls(o: dict[str, Tensor]) -> Calls:
    """Pair every public function, taking options, with the unfused result that it quantizes."""
    r, modulation = reference, (o["gain"], o["shift"])
    return {
        "rms": (
            lambda **k: fused.rms_norm_quantize(o["x"], o["weight"], 1e-6, **k),
            r.rms_normed(o["x"], o["weight"], 1e-6, 0.0, "stepwise"),
        ),
        "gemma": (
            lambda **k: fused.rms_norm_quantize(
                o["x"], o["weight"], weight_offset=1.0, rounding="once", **k
            ),
            r.rms_normed(o["x"], o["weight"], 1e-6, 1.0, "once"),
        ),
        "add": (
            lambda **k: fused.add_rms_norm_quantize(o["x"], o["residual"], o["weight"], **k)[0],
            r.rms_normed(o["x"] + o["residual"], o["weight"], 1e-6, 0.0, "stepwise"),
        ),
        "layer": (
            lambda **k: fused.layer_norm_quantize(o["x"], o["weight"], o["bias"], **k),
            r.layer_normed(o["x"], o["weight"], o["bias"], None, 1e-5, "stepwise"),
        ),
        "adaptive": (
            lambda **k: fused.layer_norm_quantize(o["x"], modulation=modulation, **k),
            r.layer_normed(o["x"], None, None, modulation, 1e-5, "stepwise"),
        ),
        "silu": (
            lambda **k: fused.silu_mul_quantize(o["gate"], o["up"], **k),
            r.activated("silu", o["gate"], o["up"]),
        ),
        "gelu": (lambda **k: fused.gelu_quantize(o["x"], **k), r.activated("gelu", o["x"], None)),
        "gelu-tanh": (
            lambda **k: fused.gelu_quantize(o["x"], "tanh", **k),
            r.activated("gelu_tanh", o["x"], None),
        ),
        "gelu-mul": (
            lambda **k: fused.gelu_mul_quantize(o["gate"], o["up"], **k),
            r.activated("gelu_tanh", o["gate"], o["up"]),
        ),
    }


NAMES = tuple(calls(operands("cpu")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [ROW, GROUP128, MX, TENSOR], ids=str)
def test_equals_quantize_of_the_unfused_result(name: str, group: fp8kit.GroupShape) -> None:
    call, plain = calls(operands("cpu"))[name]
    options: dict[str, Any] = {"group": group}
    if group == TENSOR:
        options["scale"] = torch.full((1, 1), 0.02)
    q, expected = call(**options), fp8kit.quantize(plain, **options)
    assert q.group == group
    assert_bits_equal(q.data, expected.data)
    assert_bits_equal(q.scale, expected.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_runs_in_triton_on_a_gpu(name: str) -> None:
    call, plain = calls(operands("cuda"))[name]
    q = call()
    error = (fp8kit.dequantize(q) - plain.float()).norm() / plain.float().norm()
    assert 0.01 < error < 0.04


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float8_e5m2}, {"scale_rounding": "up"}, {"scale_ub": torch.tensor(0.5)}],
    ids=lambda o: next(iter(o)),
)
def test_options_are_those_of_quantize(options: dict[str, Any]) -> None:
    call, plain = calls(operands("cpu"))["silu"]
    q, expected = call(**options), fp8kit.quantize(plain, **options)
    assert_bits_equal(q.data, expected.data)
    assert_bits_equal(q.scale, expected.scale)


def test_halves_of_one_projection() -> None:
    gate, up = torch.randn(5, 2 * K).bfloat16().chunk(2, 1)
    q = fused.silu_mul_quantize(gate, up)
    expected = fused.silu_mul_quantize(gate.contiguous(), up.contiguous())
    assert_bits_equal(q.data, expected.data)


def test_the_new_residual_is_the_rounded_sum() -> None:
    o = operands("cpu")
    _, total = fused.add_rms_norm_quantize(o["x"], o["residual"].mT.contiguous().mT, o["weight"])
    assert_bits_equal(total, o["x"] + o["residual"])
    assert total.is_contiguous()


def test_a_static_scale_comes_back_itself() -> None:
    scale = torch.full((1, 1), 0.02)
    assert fused.gelu_quantize(torch.randn(3, 8), group=TENSOR, scale=scale).scale is scale


X, W = torch.randn(4, 8), torch.ones(8)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: fused.rms_norm_quantize(X.int(), W), TypeError, "Got x of dtype torch.int32"),
        (lambda: fused.rms_norm_quantize(X, W.int()), TypeError, "Got weight of dtype"),
        (lambda: fused.rms_norm_quantize(X, W.to(BF16)), TypeError, "rounding='once'"),
        (lambda: fused.rms_norm_quantize(X, W[:7]), ValueError, r"needs \(8,\)"),
        (lambda: fused.rms_norm_quantize(X, W.to("meta")), ValueError, "on meta"),
        (lambda: fused.rms_norm_quantize(X[0, 0], W), ValueError, "without dimensions"),
        (lambda: fused.rms_norm_quantize(X, W, rounding="twice"), ValueError, "'twice'"),
        (lambda: fused.rms_norm_quantize(X, W, group=BLOCK), ValueError, "128x128"),
        (lambda: fused.rms_norm_quantize(X, W, group=TENSOR), ValueError, "no static scale"),
        (lambda: fused.rms_norm_quantize(X, W, scale=W), ValueError, "a static scale"),
        (
            lambda: fused.rms_norm_quantize(X, W, group=TENSOR, scale=W),
            ValueError,
            r"need \(1, 1\)",
        ),
        (
            lambda: fused.gelu_quantize(X, group=TENSOR, scale=W[:1, None], scale_rounding="up"),
            ValueError,
            "Got a static scale with",
        ),
        (
            lambda: fused.gelu_quantize(X, group=TENSOR, scale=W[:1, None], scale_layout="column"),
            ValueError,
            "Got a static scale with",
        ),
        (lambda: fused.gelu_quantize(X, scale_layout="column"), ValueError, "Got scale_layout"),
        (lambda: fused.gelu_quantize(X, scale_rounding="floor"), ValueError, "scale_rounding"),
        (lambda: fused.gelu_quantize(X, scale_ub=W), ValueError, "Got scale_ub"),
        (lambda: fused.gelu_quantize(X, dtype=torch.int8), TypeError, "torch.int8"),
        (lambda: fused.gelu_quantize(X, colour=1), TypeError, "Got colour=, which is no option"),
        (lambda: fused.rms_norm_quantize(X, W, grup=fp8kit.ROW), TypeError, "mean 'group'"),
        (
            lambda: fused.rms_norm_quantize(X, W, None),
            TypeError,
            r"eps of type None(?s:.*)finfo",
        ),
        (
            lambda: fused.rms_norm_quantize(X, W, weight_offset=W),
            TypeError,
            "weight_offset of",
        ),
        (lambda: fused.layer_norm_quantize(X, eps=None), TypeError, "Got eps of type NoneType"),
        (lambda: fused.layer_norm_quantize(X, modulation=(X, None)), TypeError, "Tensor, NoneType"),
        (lambda: fused.layer_norm_quantize(X, modulation=(X, X, X)), TypeError, "is two tensors"),
        (lambda: fused.layer_norm_quantize(X, modulation=X), TypeError, "of Tensor"),
        (lambda: fused.gelu_mul_quantize(X, None), TypeError, "up"),
        (lambda: fused.gelu_quantize(X, "erf"), ValueError, "approximate='erf'"),
        (lambda: fused.gelu_mul_quantize(X, X[:3]), ValueError, "Got a up of shape"),
        (lambda: fused.silu_mul_quantize(X, X.to(BF16)), TypeError, "Got a up of dtype"),
        (lambda: fused.add_rms_norm_quantize(X, X[:1], W), ValueError, "Got a residual"),
        (lambda: fused.add_rms_norm_quantize(None, X, W), TypeError, "Got x of type NoneType"),
        (lambda: fused.layer_norm_quantize(X, W[:3]), ValueError, "Got a weight"),
        (lambda: fused.layer_norm_quantize(X, None, W[:3]), ValueError, "Got a bias"),
        (
            lambda: fused.layer_norm_quantize(X, modulation=(X, X[:2])),
            ValueError,
            "Got a shift of the modulation",
        ),
        (lambda: fused.layer_norm_quantize(X[0], modulation=(X, X)), ValueError, r"\[B, ..., K\]"),
        (lambda: fused.layer_norm_quantize(X, modulation=(X.to(BF16), X)), TypeError, "bfloat16"),
        (
            lambda: fused.layer_norm_quantize(X, rounding="no"),
            ValueError,
            "It must be one of stepwise, once",
        ),
    ],
)
def test_errors_teach(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_refused(name: str) -> None:
    o = {k: v.requires_grad_() for k, v in operands("cpu").items()}
    q = calls(o)[name][0]()
    with pytest.raises(RuntimeError, match="fused norm or activation"):
        q.scale.sum().backward()


def op_cases(device: torch.device, kind: str) -> list[tuple[Any, tuple[Any, ...]]]:
    static = kind == "static"
    o = operands(device)
    scale = torch.full((1, 1), 0.02, device=device) if static else None
    group = [-1, -1] if static else [1, 128]
    t = (scale, group, torch.float8_e4m3fn, 1e-12, None, "exact")
    t = (*t, "column") if kind == "column" else t
    x, w, up = o["x"], o["weight"], o["up"].transpose(0, 1).contiguous().transpose(0, 1)
    return [
        (OPS.rms_norm_quantize, (x, None, w, 1e-6, 0.0, "stepwise", *t)),
        (OPS.rms_norm_quantize, (x, o["residual"], w, 1e-6, 1.0, "once", *t)),
        (OPS.layer_norm_quantize, (x, w, o["bias"], None, None, 1e-6, "once", *t)),
        (OPS.layer_norm_quantize, (x, None, None, o["gain"], o["shift"], 1e-6, "stepwise", *t)),
        (OPS.activation_quantize, (o["gate"], up, "silu", *t)),
        (OPS.activation_quantize, (up, None, "gelu", *t)),
        (OPS.concatenated_activation_quantize, (up, o["gate"], None, "gelu", *t)),
        (OPS.concatenated_activation_quantize, (o["gate"], up, o["gate"], "silu", *t)),
    ]


@pytest.mark.parametrize("kind", ["dynamic", "column", "static"])
def test_opcheck(device: torch.device, kind: str) -> None:
    for op, arguments in op_cases(device, kind):
        torch.library.opcheck(op, arguments)


def test_fakes_tell_the_strides_of_column_major_scales(device: torch.device) -> None:
    for op, arguments in op_cases(device, "column"):
        real = op(*arguments)[1]
        with FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments])[1]
        assert real.stride() == fake.stride() == (6, 1, 12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [GROUP128, MX], ids=str)
def test_scales_by_column_are_the_same_scales(
    name: str, group: fp8kit.GroupShape, device: torch.device
) -> None:
    call = calls(operands(device))[name][0]
    q, expected = call(group=group, scale_layout="column"), call(group=group)
    assert_bits_equal(q.data, expected.data)
    assert_bits_equal(q.scale, expected.scale)
    assert expected.scale.is_contiguous()
    assert q.scale.stride() == (6, 1, 12)


@pytest.mark.parametrize("layout", ["row", "column"])
def test_one_graph_for_every_m(layout: str) -> None:
    weight, counter = torch.ones(K).bfloat16(), CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, total = fused.add_rms_norm_quantize(
            x, residual, weight, group=GROUP128, scale_layout=layout
        )
        return q.data, q.scale, total

    for m in (3, 5, 8, 17):
        x, residual = torch.randn(2, m, K).bfloat16()
        q, total = fused.add_rms_norm_quantize(
            x, residual, weight, group=GROUP128, scale_layout=layout
        )
        for found, expected in zip(layer(x, residual), (q.data, q.scale, total), strict=True):
            assert_bits_equal(found, expected)
            assert found.stride() == expected.stride()
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name: str) -> None:
    call = calls(operands("cpu"))[name][0]
    expected = call()
    with torch.autocast("cpu", torch.bfloat16):
        q = call()
    assert_bits_equal(q.data, expected.data)
    assert_bits_equal(q.scale, expected.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captures_in_a_graph(name: str) -> None:
    call = calls(operands("cuda"))[name][0]
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = call()
    graph.replay()
    assert_bits_equal(q.data, expected.data)


def test_the_backends_are_what_dispatch_reports() -> None:
    assert [name for name, *_ in FUSED_BACKENDS] == ["triton", "reference"]
