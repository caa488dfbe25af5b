"""Every backend on every scheme and shape that it supports, compared with the exact product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import backend_tables
import fp8kit
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape
from fp8kit.matmul import torch_native
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulBackend, MatmulOperands, MatmulProblem
from grids import COMPILED, pairwise
from numerics import (
    assert_bits_equal,
    assert_matmul,
    assert_no_drift,
    assert_scheme_error,
    exact_product,
)
from shapes import REGIMES, ROW_COUNTS, Regime

# without a GPU the others decline every problem, which the tests of dispatch check
BACKEND_NAMES = [name for name, _, devices in MATMUL_BACKENDS if COMPILED or not devices]
QUANTIZED = {name: (s.activation, s.weight) for name, s in SCHEMES.items() if s.activation}
PAIRS = {
    **QUANTIZED,
    "row-tensor": (ROW, TENSOR),
    "tensor-row": (TENSOR, ROW),
    "groups-groups": (GROUP128, GROUP128),
    "row-block": (ROW, BLOCK),
    "mx-row": (MX, ROW),
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EMPTY = [r for r in REGIMES if not r.m * r.n * r.k]


def operands(
    m: int, n: int, k: int, groups: tuple[GroupShape, GroupShape], device: torch.device
) -> tuple[fp8kit.QTensor, fp8kit.QTensor]:
    """Quantize normal operands whose rows differ in size, so that a swapped scale shows."""
    x = torch.randn(m, k) * torch.logspace(-1, 1, m)[:, None]
    w = torch.randn(n, k) * torch.logspace(-2, 0, n)[:, None]
    return (
        fp8kit.quantize(x.to(device), groups[0]),
        fp8kit.quantize(w.to(device), groups[1], role="weight"),
    )


def skip_if_declined(
    backend: str,
    x_q: fp8kit.QTensor,
    w_q: fp8kit.QTensor,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> None:
    """Skip with the backend's own reason; the tests of dispatch pin which must not be skipped."""
    groups = (x_q.group, w_q.group)
    problem = MatmulProblem.of(
        x_q.data, w_q.data, groups, out_dtype, None, "precise", batch_invariant
    )
    choice = choose(MATMUL_BACKENDS, problem, backend)
    if choice.implementation is None:
        pytest.skip(f"{backend}: {choice.declined[0][1]}")


def dequantized(q: fp8kit.QTensor) -> Tensor:
    return fp8kit.dequantize(q)


@pytest.mark.parametrize(
    ("backend", "pair", "regime"), pairwise(BACKEND_NAMES, PAIRS, REGIMES), ids=str
)
def test_scaled_mm_matches_the_exact_product(
    backend: str, pair: str, regime: Regime, device: torch.device
) -> None:
    x_q, w_q = operands(regime.m, regime.n, regime.k, PAIRS[pair], device)
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    y = fp8kit.scaled_mm(x_q, w_q, backend=backend)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    assert_matmul(y, dequantized(x_q), dequantized(w_q), backend=backend)


@pytest.mark.parametrize(("backend", "pair", "m"), pairwise(BACKEND_NAMES, QUANTIZED, ROW_COUNTS))
def test_scaled_mm_takes_any_row_count(
    backend: str, pair: str, m: int, device: torch.device
) -> None:
    x_q, w_q = operands(m, 144, 272, PAIRS[pair], device)
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    y = fp8kit.scaled_mm(x_q, w_q, backend=backend)
    assert_matmul(y, dequantized(x_q), dequantized(w_q), backend=backend)


@pytest.mark.parametrize(
    ("backend", "pair", "out_dtype", "bias_dtype"),
    pairwise(BACKEND_NAMES, QUANTIZED, FLOATS, [None, *FLOATS]),
    ids=str,
)
def test_scaled_mm_writes_any_dtype_with_any_bias(
    backend: str,
    pair: str,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    x_q, w_q = operands(9, 72, 200, PAIRS[pair], device)
    skip_if_declined(backend, x_q, w_q, out_dtype)
    bias = None if bias_dtype is None else torch.randn(72, device=device).mul(4).to(bias_dtype)
    y = fp8kit.scaled_mm(x_q, w_q, bias, out_dtype=out_dtype, backend=backend)
    assert y.dtype == out_dtype
    assert_matmul(y, dequantized(x_q), dequantized(w_q), bias, backend)


@pytest.mark.parametrize(
    ("backend", "pair", "k"), pairwise(BACKEND_NAMES, QUANTIZED, [4096, 14336, 28672])
)
def test_scaled_mm_does_not_drift_on_same_sign_data(
    backend: str, pair: str, k: int, device: torch.device
) -> None:
    x_group, w_group = PAIRS[pair]
    x_q = fp8kit.quantize(torch.rand(4, k, device=device), x_group)
    w_q = fp8kit.quantize(torch.rand(128, k, device=device), w_group, role="weight")
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    y = fp8kit.scaled_mm(x_q, w_q, backend=backend)
    assert_no_drift(y, exact_product(dequantized(x_q), dequantized(w_q)))


@pytest.mark.parametrize("pair", QUANTIZED)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_scaled_mm_is_as_wrong_as_fp8(backend: str, pair: str, device: torch.device) -> None:
    x, w = torch.randn(64, 1024, device=device), torch.randn(256, 1024, device=device)
    x_q = fp8kit.quantize(x, PAIRS[pair][0])
    w_q = fp8kit.quantize(w, PAIRS[pair][1], role="weight")
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    assert_scheme_error(fp8kit.scaled_mm(x_q, w_q, backend=backend), exact_product(x, w), pair)


@pytest.mark.parametrize("bad_row", [0, 5])
@pytest.mark.parametrize("pair", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_nan_stays_in_its_row(backend: str, pair: str, bad_row: int, device: torch.device) -> None:
    x = torch.randn(8, 256, device=device)
    x[bad_row, 3] = torch.nan
    x_q = fp8kit.quantize(x, PAIRS[pair][0])
    w_q = fp8kit.quantize(torch.randn(128, 256, device=device), PAIRS[pair][1], role="weight")
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    y = fp8kit.scaled_mm(x_q, w_q, backend=backend)
    others = [i for i in range(8) if i != bad_row]
    assert y[bad_row].isnan().all()
    assert y[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("pair", QUANTIZED)
def test_other_codes_multiply(pair: str, dtype: torch.dtype, device: torch.device) -> None:
    x_group, w_group = PAIRS[pair]
    x_q = fp8kit.quantize(torch.randn(7, 200, device=device), x_group, dtype=dtype)
    w_q = fp8kit.quantize(torch.randn(48, 200, device=device), w_group, dtype=dtype)
    y = fp8kit.scaled_mm(x_q, w_q)
    assert_matmul(y, dequantized(x_q), dequantized(w_q))


@pytest.mark.parametrize(
    ("backend", "pair", "out_dtype"), pairwise(BACKEND_NAMES, QUANTIZED, FLOATS), ids=str
)
def test_batch_invariant_bits_of_a_row_do_not_depend_on_m(
    backend: str, pair: str, out_dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(70, 200, device=device)
    x_group = PAIRS[pair][0]
    static = {"scale": torch.ones(1, 1, device=device)} if x_group == TENSOR else {}
    w_q = fp8kit.quantize(torch.randn(96, 200, device=device), PAIRS[pair][1], role="weight")
    whole_q = fp8kit.quantize(x, x_group, **static)
    skip_if_declined(backend, whole_q, w_q, out_dtype, batch_invariant=True)

    def run(rows: slice) -> Tensor:
        q = fp8kit.quantize(x[rows], x_group, **static)
        options = {"out_dtype": out_dtype, "batch_invariant": True, "backend": backend}
        return fp8kit.scaled_mm(q, w_q, **options)

    whole = run(slice(None))
    assert_matmul(whole, dequantized(whole_q), dequantized(w_q), backend=backend)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(16, 33), slice(5, 70)):
        assert_bits_equal(run(rows), whole[rows])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("k", [31, 64])
@pytest.mark.parametrize("n", [3, 5, 9])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_WEIGHT_ONLY"])
def test_batch_invariant_bits_do_not_depend_on_the_place_of_a_row(
    scheme: str, n: int, k: int, strided: bool, device: torch.device
) -> None:
    x = torch.randn(k, 16, device=device).t() if strided else torch.randn(16, k, device=device)
    w_q = fp8kit.quantize(torch.randn(n, k, device=device), role="weight")
    run = functools.partial(fp8kit.linear, w_q=w_q, scheme=scheme, batch_invariant=True)
    whole = run(x)
    for i in range(16):
        assert_bits_equal(run(x[i : i + 1]), whole[i : i + 1])


@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("pair", QUANTIZED)
def test_an_empty_sum_is_the_bias(pair: str, m: int, device: torch.device) -> None:
    x_q, w_q = operands(m, 5, 0, PAIRS[pair], device)
    bias = torch.arange(5.0, device=device)
    y = fp8kit.scaled_mm(x_q, w_q, bias)
    assert_bits_equal(y, bias.bfloat16().expand(m, 5))
    assert_bits_equal(fp8kit.scaled_mm(x_q, w_q), torch.zeros(m, 5).bfloat16().to(device))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("regime", EMPTY, ids=str)
def test_no_backend_gets_empty_operands(
    regime: Regime,
    scheme: str,
    bias: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions compute results of empty operands themselves, without a backend."""

    def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        raise AssertionError(f"a backend got {problem}")

    backend_tables.install(monkeypatch, matmul={"hopper_gemm": MatmulBackend(run=run)})
    m, n, k = regime.m, regime.n, regime.k
    b = torch.arange(float(n), device=device) if bias else None
    expected = torch.zeros(m, n, device=device) if b is None else b.expand(m, n)
    x_group, w_group = SCHEMES[scheme].activation, SCHEMES[scheme].weight
    w_q = fp8kit.quantize(torch.randn(n, k, device=device), w_group, role="weight")
    x = torch.randn(m, k, device=device)
    given: dict[str, Any] = {"scheme": scheme}
    if SCHEMES[scheme].static:
        given["input_scale"] = torch.ones(1, 1, device=device)
    assert_bits_equal(fp8kit.linear(x, w_q, b, **given), expected)
    layer = fp8kit.Fp8Linear.from_quantized(w_q, b, dtype=torch.float32, **given)
    assert_bits_equal(layer(x), expected)
    if x_group is not None:
        x_q = fp8kit.quantize(x, x_group)
        assert_bits_equal(fp8kit.scaled_mm(x_q, w_q, b, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_operands_with_strides(backend: str, device: torch.device) -> None:
    x_q, w_q = operands(12, 64, 96, (ROW, ROW), device)
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    plain = fp8kit.scaled_mm(x_q, w_q, backend=backend)
    x_t = fp8kit.QTensor(x_q.data.t().contiguous().t(), x_q.scale, ROW)
    w_t = fp8kit.QTensor(w_q.data.t().contiguous().t(), w_q.scale, ROW)
    assert not x_t.data.is_contiguous()
    y = fp8kit.scaled_mm(x_t, w_t, backend=backend)
    assert_matmul(y, dequantized(x_q), dequantized(w_q), backend=backend)
    assert torch.allclose(y.float(), plain.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("m", "k"), [(7, 208), (100, 256)])
@pytest.mark.parametrize("pair", ["FP8_DYNAMIC", "FP8_BLOCK", "FP8"])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_rows_of_codes_may_have_gaps(
    backend: str, pair: str, m: int, k: int, device: torch.device
) -> None:
    x_q, w_q = operands(m, 128, k, PAIRS[pair], device)
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    apart = [dataclasses.replace(q, data=with_gaps(q.data)) for q in (x_q, w_q)]
    y = fp8kit.scaled_mm(*apart, backend=backend)
    assert_matmul(y, dequantized(x_q), dequantized(w_q), backend=backend)


def with_gaps(codes: Tensor) -> Tensor:
    """Move rows 320 bytes apart, with NaN between them."""
    memory = torch.full((len(codes), 320), 0x7F, dtype=torch.uint8, device=codes.device)
    apart = memory.view(codes.dtype)[:, : codes.shape[1]]
    return apart.copy_(codes)


def test_fast_accumulation_is_an_option_and_changes_nothing_on_a_cpu() -> None:
    x_q, w_q = operands(4, 32, 256, (ROW, ROW), torch.device("cpu"))
    assert_bits_equal(
        fp8kit.scaled_mm(x_q, w_q, accum="fast"), fp8kit.scaled_mm(x_q, w_q, accum="precise")
    )


def test_every_regime_has_a_reason_and_one_name() -> None:
    assert len({r.name for r in REGIMES}) == len(REGIMES)
    assert all(r.why for r in REGIMES)


@pytest.mark.gpu
def test_torch_native_runs_the_common_schemes_on_this_gpu() -> None:
    device = torch.device("cuda")
    for pair in ("FP8", "FP8_DYNAMIC", "FP8_TENSOR"):
        x_q, w_q = operands(16, 256, 512, PAIRS[pair], device)
        y = fp8kit.scaled_mm(x_q, w_q, backend="torch_native")
        assert_matmul(y, dequantized(x_q), dequantized(w_q), backend="torch_native")


@pytest.mark.parametrize("accum", ["precise", "fast"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pair", ["FP8_DYNAMIC", "FP8", "row-tensor", "FP8_BLOCK"])
def test_torch_is_asked_for_the_wanted_sums(
    pair: str, out_dtype: torch.dtype, accum: str, set_torch_product: Callable[..., None]
) -> None:
    """With every recipe, cuBLAS may use its short accumulator only for fast sums."""
    asked: list[dict[str, object]] = []

    def scaled_mm(x: Tensor, w: Tensor, *_: object, **options: object) -> Tensor:
        asked.append(options)
        return torch.zeros(x.shape[0], w.shape[1], dtype=options["output_dtype"])  # type: ignore[arg-type]

    set_torch_product(scaled_mm)
    x_q, w_q = operands(16, 128, 512, PAIRS[pair], torch.device("cpu"))
    groups = PAIRS[pair]
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, out_dtype, None, accum, False)
    y = torch_native.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert y.dtype == out_dtype
    (options,) = asked
    # cuBLAS always promotes its block recipe every 128
    fast = accum == "fast" and pair != "FP8_BLOCK"
    assert options.get("use_fast_accum", False) is fast


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pair", ["FP8_DYNAMIC", "row-tensor", "tensor-row"])
def test_torch_may_scale_after_the_product(
    pair: str, bias: bool, set_torch_product: Callable[..., None]
) -> None:
    """The configuration asks cuBLAS for the unscaled product, and is as precise as the other."""
    asked: list[tuple[object, ...]] = []

    def scaled_mm(x: Tensor, w: Tensor, *scales: object, **options: object) -> Tensor:
        asked.append(scales)
        assert options["output_dtype"] == torch.float32
        return x.float() @ w.float()

    set_torch_product(scaled_mm)
    groups = PAIRS[pair]
    x_q, w_q = operands(17, 70, 200, groups, torch.device("cpu"))
    b = torch.randn(70) if bias else None
    problem = dataclasses.replace(
        MatmulProblem.of(x_q.data, w_q.data, groups, torch.bfloat16, b, "precise", False),
        configuration=torch_native.SCALED_AFTER,
    )
    assert torch_native.configurations(problem) == (torch_native.SCALED_AFTER,)
    y = torch_native.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale, b), problem)
    assert_matmul(y, dequantized(x_q), dequantized(w_q), b, "torch_native")
    ((one, *_),) = asked
    assert isinstance(one, Tensor)
    assert one.item() == 1.0


@pytest.mark.parametrize(
    ("pair", "m", "out_dtype"),
    [
        ("FP8", 16, torch.bfloat16),
        ("FP8_BLOCK", 16, torch.bfloat16),
        ("FP8_DYNAMIC", 513, torch.bfloat16),
        ("FP8_DYNAMIC", 16, torch.float16),
    ],
    ids=str,
)
def test_torch_offers_no_other_way_elsewhere(pair: str, m: int, out_dtype: torch.dtype) -> None:
    x_q, w_q = operands(m, 16, 128, PAIRS[pair], torch.device("cpu"))
    groups = PAIRS[pair]
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, out_dtype, None, "precise", False)
    assert torch_native.configurations(problem) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("regime", [r for r in REGIMES if r not in EMPTY], ids=str)
@pytest.mark.parametrize("pair", QUANTIZED)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_every_configuration_matches_the_exact_product(
    backend: str, pair: str, regime: Regime
) -> None:
    x_q, w_q = operands(regime.m, regime.n, regime.k, PAIRS[pair], torch.device("cuda"))
    skip_if_declined(backend, x_q, w_q, torch.bfloat16)
    groups = PAIRS[pair]
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, torch.bfloat16, None, "precise", False)
    module = choose(MATMUL_BACKENDS, problem, backend).implementation
    for name in ("", *module.configurations(problem)):
        cut = dataclasses.replace(problem, configuration=name)
        y = module.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), cut)
        assert_matmul(y, dequantized(x_q), dequantized(w_q), backend=backend)


@pytest.mark.parametrize("place", [(203, 0), (200, 5), (200, 8)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_codes_are_padded_wherever_they_lie(rows: int, place: tuple[int, int]) -> None:
    """Copying eight codes at a time needs memory and rows that start at multiples of eight."""
    pitch, offset = place
    memory = torch.randint(0, 120, (offset + 4 * pitch,), dtype=torch.uint8)
    codes = memory[offset:].view(4, pitch)[:rows, :200].view(torch.float8_e4m3fn)
    padded = torch_native._padded(codes, 16, 16).view(torch.uint8)
    assert padded.shape == (16, 208)
    assert torch.equal(padded[:rows, :200], codes.view(torch.uint8))
    assert not padded[rows:].any()
    assert not padded[:, 200:].any()


@pytest.mark.parametrize(
    ("n", "k", "pair", "padded"),
    [
        (64, 128, "FP8_DYNAMIC", False),
        (70, 128, "FP8_DYNAMIC", True),
        (64, 200, "FP8_DYNAMIC", True),  # copied by eight codes
        (64, 129, "FP8_DYNAMIC", True),  # and by one
        (128, 256, "FP8_BLOCK", False),
        (144, 256, "FP8_BLOCK", True),
        (128, 144, "FP8_BLOCK", True),
    ],
)
def test_torch_gets_whole_tiles_and_tells_whose_weight_is_padded(
    n: int, k: int, pair: str, padded: bool, set_torch_product: Callable[..., None]
) -> None:
    asked: list[tuple[Tensor, Tensor]] = []

    def scaled_mm(x: Tensor, w: Tensor, *_: object, **options: object) -> Tensor:
        asked.append((x, w.t()))
        return torch.zeros(x.shape[0], w.shape[1], dtype=options["output_dtype"])  # type: ignore[arg-type]

    set_torch_product(scaled_mm)
    groups = PAIRS[pair]
    x_q, w_q = operands(17, n, k, groups, torch.device("cpu"))
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, torch.bfloat16, None, "precise", False)
    assert torch_native.pads(problem) == padded
    y = torch_native.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert y.shape == (17, n)
    ((x, w),) = asked
    multiple = 128 if pair == "FP8_BLOCK" else 16
    assert w.shape == (-(-n // multiple) * multiple, -(-k // multiple) * multiple)
    for got, codes in ((x, x_q.data), (w, w_q.data)):
        rows, cols = codes.shape
        assert torch.equal(got.view(torch.uint8)[:rows, :cols], codes.view(torch.uint8))
        assert not got.view(torch.uint8)[rows:].any()
        assert not got.view(torch.uint8)[:, cols:].any()
