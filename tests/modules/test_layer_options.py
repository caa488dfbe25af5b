"""Options of a layer, inputs that are already quantized, and settings of the process."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
import fresh
from fp8kit import Fp8Linear
from fp8kit.formats import ROW, SCHEMES, TENSOR
from fp8kit.modules.consumers import can_multiply
from fp8kit.modules.shared_input import SharedInput
from numerics import assert_bits_equal, assert_matmul

N, K = 96, 256
DYNAMIC = [n for n, s in SCHEMES.items() if s.activation is not None and not s.static]


def layer_of(scheme: str = "FP8_DYNAMIC", dtype: torch.dtype = torch.bfloat16) -> Fp8Linear:
    torch.manual_seed(1)
    scale = torch.full((1, 1), 0.01) if SCHEMES[scheme].static else None
    return Fp8Linear.from_linear(nn.Linear(K, N, dtype=dtype), scheme, scale)


def row(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, K, dtype=dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_out_dtype_rounds_the_sums_once(scheme: str) -> None:
    layer, x = layer_of(scheme), row(5)
    usual = layer(x)
    layer.out_dtype = torch.float32
    y = layer(x)
    assert y.dtype == torch.float32
    w = layer.quantized_weight()
    q = x.float()
    if layer.scheme.activation is not None:
        q = fp8kit.dequantize(fp8kit.quantize(x, layer.scheme.activation, scale=layer.input_scale))
    assert_matmul(y.detach(), q, fp8kit.dequantize(w), layer.bias, torch.float32)
    assert not torch.equal(y, usual.float())  # not a bf16 result that was cast
    scheme_of = {"scheme": scheme, "input_scale": layer.input_scale}
    same = fp8kit.linear(x, w, layer.bias, out_dtype=torch.float32, **scheme_of)
    assert_bits_equal(same.detach(), y.detach())


def test_out_dtype_keeps_the_gradient_and_the_empty_input() -> None:
    layer, x = layer_of(dtype=torch.float32), row(3, dtype=torch.float32).requires_grad_()
    layer(x).sum().backward()
    wanted, x.grad = x.grad, None
    layer.out_dtype = torch.bfloat16
    layer(x).float().sum().backward()
    assert wanted is not None
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert (x.grad - wanted).norm() < torch.finfo(torch.bfloat16).eps * wanted.norm()
    assert layer(x[:0]).dtype == torch.bfloat16
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert compiled(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", [n for n, s in SCHEMES.items() if s.activation is not None])
def test_an_input_that_is_quantized_already_is_multiplied_as_it_is(scheme: str) -> None:
    layer, x = layer_of(scheme), row(2, 3)
    assert layer.scheme.activation is not None
    flat = x if layer.scheme.activation == ROW else x.flatten(0, 1)
    q = fp8kit.quantize(flat, layer.scheme.activation, scale=layer.input_scale)
    assert_bits_equal(layer(q).detach(), layer(flat).detach())
    w, bias = layer.quantized_weight(), layer.bias
    assert_bits_equal(fp8kit.linear(q, w, bias).detach(), layer(flat).detach())
    layer.out_dtype = torch.float16
    assert layer(q).dtype == torch.float16
    SharedInput([layer, layer_of(scheme)])
    assert_bits_equal(layer(q).detach(), layer(flat).detach())


def test_codes_that_do_not_fit_are_refused() -> None:
    layer, q = layer_of(), fp8kit.quantize(row(3), TENSOR)
    with pytest.raises(ValueError, match="tensor scales for a layer of scheme FP8_DYNAMIC"):
        layer(q)
    said = r"It multiplies 16-bit activations\. Pass the tensor itself\.$"
    with pytest.raises(ValueError, match=said):
        layer_of("FP8_WEIGHT_ONLY")(q)
    with pytest.raises(ValueError, match="e5m2"):
        layer(fp8kit.quantize(row(3), ROW, dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match="same K"):
        layer(fp8kit.quantize(row(3)[:, :32], ROW))
    w = layer.quantized_weight()
    with pytest.raises(ValueError, match="scale_ub for an input that is quantized already"):
        fp8kit.linear(q, w, scale_ub=torch.tensor(1.0))
    with pytest.raises(ValueError, match="row activations"):
        fp8kit.linear(q, w, scheme="FP8_DYNAMIC")
    with pytest.raises(TypeError, match="dtype of the result"):
        fp8kit.linear(row(3), w, out_dtype=torch.float64)


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_a_bound_clips_each_amax(scheme: str) -> None:
    layer, x = layer_of(scheme), row(4) * 4
    free = layer(x)
    layer.scale_ub = 2.0
    bound = torch.tensor(2.0)
    wanted = fp8kit.linear(x, layer.quantized_weight(), layer.bias, scale_ub=bound)
    assert_bits_equal(layer(x).detach(), wanted.detach())
    assert not torch.equal(free, wanted)
    assert "scale_ub=2.0" in repr(layer)
    pickled, buffer = pickle.loads(pickle.dumps(layer)), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), pickled, torch.load(buffer, weights_only=False)):
        assert_bits_equal(twin(x).detach(), wanted.detach())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_bits_equal(compiled(x).detach(), wanted.detach())
    layer.half()
    assert_bits_equal(layer.bfloat16()(x).detach(), wanted.detach())
    assert layer.to("meta")(x.to("meta")).is_meta
    layer = layer_of(scheme)
    layer.scale_ub = 2.0
    layer.scale_ub = None
    assert_bits_equal(layer(x).detach(), free.detach())


def test_siblings_share_an_input_of_one_bound_only() -> None:
    first, second = layer_of(), layer_of()
    alone = [copy.deepcopy(first), copy.deepcopy(second)]
    SharedInput([first, second])
    x = row(4) * 4
    for bounds in ((2.0, 2.0), (2.0, None), (None, 0.5), (1.0, 0.5)):
        for layer, lone, bound in zip((first, second), alone, bounds, strict=True):
            layer.scale_ub = lone.scale_ub = bound
        for _ in range(2):
            assert_bits_equal(first(x).detach(), alone[0](x).detach())
            assert_bits_equal(second(x).detach(), alone[1](x).detach())


def test_codes_of_a_producer_without_the_bound_are_not_taken() -> None:
    layer = layer_of()
    assert can_multiply(layer)
    layer.scale_ub = 2.0
    assert not can_multiply(layer)


@pytest.mark.parametrize(
    "value", [0.0, -1.0, math.nan, math.inf, True, "x", (1.0,), torch.empty((), device="meta")]
)
def test_a_bound_is_positive_and_of_dynamic_activations(value: Any) -> None:
    with pytest.raises(ValueError, match="positive"):
        layer_of().scale_ub = value
    for scheme in ("FP8", "FP8_WEIGHT_ONLY"):
        with pytest.raises(ValueError, match="no scale of their own"):
            layer_of(scheme).scale_ub = 1.0
    with pytest.raises(TypeError, match="dtype of the result"):
        layer_of().out_dtype = torch.int8


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="batch_invariant='yes'"):
        layer_of().batch_invariant = "yes"


def test_an_unknown_way_to_sum_is_refused_when_it_is_set() -> None:
    with pytest.raises(ValueError, match=r"accum='quick'.*precise, fast"):
        layer_of().accum = "quick"


@pytest.mark.parametrize("what", [nn.Conv2d(3, 3, 1), nn.Sequential(), torch.ones(3, 3), "linear"])
def test_what_is_no_linear_layer_is_refused_in_words(what: Any) -> None:
    with pytest.raises(TypeError, match=r"One layer that becomes FP8 is an nn.Linear"):
        Fp8Linear.from_linear(what)


SAID = """
import fp8kit, inspect
layer = fp8kit.Fp8Linear(32, 16)
default = inspect.signature(fp8kit.linear).parameters
print(layer.accum, layer.batch_invariant, default["accum"].default,
      default["batch_invariant"].default, layer.options()[3:5])
"""


def test_the_process_chooses_sums_and_invariance() -> None:
    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return fresh.run(SAID, variables=variables, check=False)

    found = run(FP8KIT_ACCUM="fast", FP8KIT_BATCH_INVARIANT="1").stdout
    assert found.strip() == "fast True fast True ('fast', True)"
    assert run().stdout.strip() == "precise False precise False ('precise', False)"
    assert "FP8KIT_ACCUM is 'quick'" in run(FP8KIT_ACCUM="quick").stderr
    assert (
        "FP8KIT_CACHE_DIR is '~of-nobody/x'. It must" in run(FP8KIT_CACHE_DIR="~of-nobody/x").stderr
    )


def test_a_misspelt_variable_is_a_warning() -> None:
    def said(**variables: str) -> str:
        return fresh.run("import fp8kit", variables=variables).stderr

    assert "FP8KIT_ACUM is set, and nothing reads it" in said(FP8KIT_ACUM="fast")
    assert "Did you mean 'DISABLE'?" in said(FP8KIT_DISABLED="reference")
    assert not said(FP8KIT_KILLS="3", FP8KIT_FUZZ_CASES="3", FP8KIT_SWEEP="3")


def test_a_scheme_of_other_codes_is_refused() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(256, 128))
    other = fp8kit.Scheme("E5M2", fp8kit.ROW, fp8kit.ROW, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="Got scheme E5M2 for a layer that holds codes"):
        layer.scheme = other


def test_a_scheme_that_reads_the_same_weight_may_be_set() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(256, 128))
    x = torch.randn(3, 256)
    layer.scheme = "FP8_WEIGHT_ONLY"
    assert layer.scheme is fp8kit.SCHEMES["FP8_WEIGHT_ONLY"]
    wanted = fp8kit.Fp8Linear.from_quantized(
        layer.quantized_weight(), layer.bias, scheme="FP8_WEIGHT_ONLY"
    )
    assert torch.equal(layer(x), wanted(x))


def test_the_scheme_of_experts_is_resolved_and_checked() -> None:
    layer = fp8kit.Fp8Experts.from_dense(torch.randn(2, 128, 64), torch.randn(2, 64, 64))
    call = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    layer.scheme = "FP8_WEIGHT_ONLY"
    assert layer.scheme is fp8kit.SCHEMES["FP8_WEIGHT_ONLY"]
    assert layer(*call).shape == (3, 64)
    for other in ("FP8_BLOCK", "FP8", "MXFP8"):
        with pytest.raises(ValueError, match=f"Got scheme {other} for a layer that holds codes"):
            layer.scheme = other
    with pytest.raises(ValueError, match=r"Unknown scheme 'FP8_BLOK'.*Did you mean"):
        layer.scheme = "FP8_BLOK"
    assert layer.scheme is fp8kit.SCHEMES["FP8_WEIGHT_ONLY"]


def test_an_input_scale_is_that_of_a_static_scheme() -> None:
    dense, fixed = nn.Linear(256, 128), nn.Parameter(torch.ones(1, 1), requires_grad=False)
    layer = fp8kit.Fp8Linear.from_linear(dense)
    with pytest.raises(ValueError, match=r"(?s)Got input_scale=Parameter.*scheme FP8_DYNAMIC"):
        layer.input_scale = fixed
    layer.input_scale = None
    static = fp8kit.Fp8Linear.from_linear(dense, "FP8", fixed)
    with pytest.raises(ValueError, match=r"Got input_scale=None.*scheme FP8"):
        static.input_scale = None
    static.input_scale = nn.Parameter(2 * fixed, requires_grad=False)
    x = torch.randn(3, 256)
    assert torch.equal(static(x), fp8kit.Fp8Linear.from_linear(dense, "FP8", 2 * fixed)(x))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor([[-1.0]]), "Got an input_scale of -1"),
        (torch.tensor([[math.nan]]), "Got an input_scale of nan"),
        (torch.ones(3), "Got a scale of shape"),
        (torch.ones(1, 1).half(), "Got a scale of dtype torch.float16"),
        (torch.ones(1, 1, device="meta"), "Got a scale on meta"),
    ],
)
def test_a_layer_computes_with_no_input_scale_that_is_none(value: Tensor, said: str) -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(256, 128), "FP8", torch.ones(1, 1))
    layer.input_scale = nn.Parameter(value, requires_grad=False)
    with pytest.raises((TypeError, ValueError), match=said):
        layer(torch.randn(3, 256))
