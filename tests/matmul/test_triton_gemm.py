"""The Triton GEMM: interpreted on a CPU, compiled on a GPU, and compiled ahead for any GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fp8kit
from ahead import compiled_by
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, QTensor
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulOperands, MatmulProblem
from grids import diagonal, pairwise
from numerics import assert_bits_equal, assert_matmul, assert_no_drift, exact_product
from shapes import REGIMES, Regime

triton_encode = pytest.importorskip("fp8kit.quantizers.triton_encode")

# numpy, which the interpreter computes with, warns of infinity times zero, and of how the
# interpreter of Triton 3.6 reads the bounds of a loop
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

E4M3, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = {
    "row-row": (ROW, ROW),
    "tensor-row": (TENSOR, ROW),
    "row-tensor": (ROW, TENSOR),
    "tensor-tensor": (TENSOR, TENSOR),
    "groups-block": (GROUP128, BLOCK),
    "groups-groups": (GROUP128, GROUP128),
    "row-block": (ROW, BLOCK),
    "mx-mx": (MX, MX),
    "mx-row": (MX, ROW),
    "odd-groups": (GroupShape(1, 64), GroupShape(4, 32)),
    "several-rows": (ROW, GroupShape(4, -1)),
    "16bit-row": (None, ROW),
    "16bit-tensor": (None, TENSOR),
    "16bit-block": (None, BLOCK),
    "16bit-mx": (None, MX),
}
COMPILED = (
    "row-row",
    "tensor-tensor",
    "groups-block",
    "row-block",
    "mx-mx",
    "16bit-row",
    "16bit-block",
)
H200 = triton_gemm.Device(132, 228 * 1024)
ADA = triton_gemm.Device(128, 100 * 1024)
CUT = triton_gemm.TritonTile(rows=16, cols=64, depth=128, splits=1, chunks=1, warps=4, stages=3)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """Leave the CPU out where kernels are compiled: only the interpreter runs there."""
    if device.type == "cpu" and not triton_encode.INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    return device


class Operands:
    """Quantized operands with their dequantized values."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        groups: tuple[GroupShape | None, GroupShape],
        device: torch.device,
        codes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
        dense: torch.dtype = torch.bfloat16,
    ) -> None:
        m, n, k = shape
        x = torch.randn(m, k) * torch.logspace(-1, 1, m)[:, None]
        w = torch.randn(n, k) * torch.logspace(-2, 0, n)[:, None]
        self.groups = groups
        w_q = fp8kit.quantize(w.to(device), groups[1], dtype=codes[1], role="weight")
        self.w, self.w_scale, self.w_value = w_q.data, w_q.scale, fp8kit.dequantize(w_q)
        self.x_scale: Tensor | None = None
        if groups[0] is None:
            self.x = x.to(device, dense)
            self.x_value = self.x.float()
        else:
            x_q = fp8kit.quantize(x.to(device), groups[0], dtype=codes[0])
            self.x, self.x_scale, self.x_value = x_q.data, x_q.scale, fp8kit.dequantize(x_q)

    def problem(
        self,
        out_dtype: torch.dtype = torch.bfloat16,
        bias: Tensor | None = None,
        accum: str = "precise",
        batch_invariant: bool = False,
    ) -> MatmulProblem:
        return MatmulProblem.of(
            self.x, self.w, self.groups, out_dtype, bias, accum, batch_invariant
        )

    def multiply(
        self,
        problem: MatmulProblem,
        bias: Tensor | None = None,
        tile: triton_gemm.TritonTile | None = None,
    ) -> Tensor:
        assert triton_gemm.supports(problem) is None
        operands = (self.x, self.x_scale, self.w, self.w_scale, bias)
        if tile is None:
            return triton_gemm.run(MatmulOperands(*operands), problem)
        return triton_gemm.run_tile(MatmulOperands(*operands), problem, tile)

    def check(self, y: Tensor, problem: MatmulProblem, bias: Tensor | None = None) -> None:
        """Compare with the exact product; the interpreter sums in fp32 like the reference."""
        backend = "reference" if triton_encode.INTERPRETED.value else "triton_gemm"
        assert y.dtype == problem.out_dtype
        assert_matmul(y, self.x_value, self.w_value, bias, backend)


SHORT = [r for r in REGIMES if not r.name.startswith(("empty", "long", "prefill"))]


@pytest.mark.parametrize(("pair", "regime"), diagonal(PAIRS, SHORT, turns=3), ids=str)
def test_every_pair_on_every_shape(pair: str, regime: Regime, device: torch.device) -> None:
    operands = Operands((regime.m, regime.n, regime.k), PAIRS[pair], device)
    problem = operands.problem()
    operands.check(operands.multiply(problem), problem)


BIASES = ((None, 1), (torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 1))


@pytest.mark.parametrize(
    ("pair", "out_dtype", "bias_of", "splits"),
    pairwise(["row-row", "groups-block", "mx-mx", "16bit-row"], FLOATS, BIASES, (False, True)),
    ids=str,
)
def test_results_and_biases_of_any_dtype(
    pair: str,
    out_dtype: torch.dtype,
    bias_of: tuple[torch.dtype | None, int],
    splits: bool,
    device: torch.device,
) -> None:
    operands = Operands((9, 72, 1200), PAIRS[pair], device)
    (bias_dtype, stride), bias = bias_of, None
    if bias_dtype is not None:
        bias = torch.randn(72 * stride, device=device).mul(4).to(bias_dtype)[::stride]
    problem = operands.problem(out_dtype, bias)
    assert triton_gemm.choose_tile(problem, H200).splits > 1
    tile = None if splits else CUT._replace(warps=2)
    operands.check(operands.multiply(problem, bias, tile), problem, bias)


@pytest.mark.parametrize(
    ("pair", "codes"),
    diagonal(["row-row", "groups-block", "mx-mx"], itertools.product((E4M3, E5M2, FNUZ), repeat=2)),
    ids=str,
)
def test_codes_of_any_format(
    pair: str, codes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    operands = Operands((7, 48, 208), PAIRS[pair], device, codes)
    problem = operands.problem()
    operands.check(operands.multiply(problem), problem)


@pytest.mark.parametrize(
    ("dense", "code"),
    pairwise([torch.bfloat16, torch.float16], [E4M3, E5M2, FNUZ]),
    ids=str,
)
def test_a_decoded_weight_has_the_bits_of_every_code(
    code: torch.dtype, dense: torch.dtype, device: torch.device
) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=device).view(code)
    finite = every.float().isfinite()
    w = torch.zeros(256, 64, dtype=torch.uint8, device=device)
    w[:, 5] = torch.arange(256, dtype=torch.uint8, device=device)
    w = w.view(code)
    x = torch.zeros(3, 64, dtype=dense, device=device)
    x[1, 5] = 1
    scale = torch.ones(256, 1, device=device)
    problem = MatmulProblem.of(x, w, (None, ROW), torch.float32, None, "precise", False)
    y = triton_gemm.run(MatmulOperands(x, None, w, scale), problem)
    # a sum that starts at +0 ends at +0
    assert_bits_equal(y[1][finite], every.float()[finite] + 0.0)
    assert not y[1][~finite].isfinite().any()
    assert (~finite).sum() == {E4M3: 2, E5M2: 8, FNUZ: 1}[code]


def test_mx_scales_are_powers_of_two(device: torch.device) -> None:
    w = torch.ones(256, 32, device=device).to(E4M3)
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1)
    x = torch.zeros(1, 32, dtype=torch.bfloat16, device=device)
    x[0, 7] = 1
    problem = MatmulProblem.of(x, w, (None, MX), torch.float32, None, "precise", False)
    y = triton_gemm.run(MatmulOperands(x, None, w, scale), problem)[0]
    expected = fp8kit.dequantize(QTensor(w, scale, MX))[:, 7]
    assert_bits_equal(y[1:255], expected[1:255])
    assert y[255].isnan()


@pytest.mark.parametrize("pair", ["row-row", "groups-block", "16bit-row", "mx-mx"])
def test_nan_stays_where_it_belongs(pair: str, device: torch.device) -> None:
    operands = Operands((5, 70, 256), PAIRS[pair], device)
    if operands.x_scale is None:
        operands.x[1, 3] = torch.nan
    else:
        operands.x.view(torch.uint8)[1, 3] = 0x7F
    operands.w.view(torch.uint8)[66, 255] = 0xFF
    y = operands.multiply(operands.problem())
    bad = torch.zeros(5, 70, dtype=torch.bool, device=device)
    bad[1], bad[:, 66] = True, True
    assert torch.equal(y.isnan(), bad)


STRIDED = {
    "K outermost": lambda t: t.t().contiguous().t(),
    "every third row": lambda t: torch.stack([t] * 3, 1).flatten(0, 1)[::3],
    "every second column": lambda t: torch.stack([t] * 2, 2).flatten(1, 2)[:, ::2],
    "off by a byte": lambda t: torch.cat([t[:, :1], t], 1)[:, 1:],
}


@pytest.mark.parametrize("k", [96, 131])
@pytest.mark.parametrize("layout", STRIDED)
def test_operands_in_any_strides(layout: str, k: int, device: torch.device) -> None:
    operands = Operands((12, 64, k), (ROW, ROW), device)
    problem = operands.problem()
    plain = operands.multiply(problem)
    for name in ("x", "w"):
        codes = getattr(operands, name)
        moved = STRIDED[layout](codes.view(torch.uint8)).view(E4M3)
        assert moved.stride() != codes.stride()
        assert_bits_equal(moved, codes)
        setattr(operands, name, moved)
    assert_bits_equal(operands.multiply(problem), plain)


def test_bands_of_tiles_cover_the_result(device: torch.device) -> None:
    operands = Operands((130, 70, 128), (ROW, ROW), device)
    problem = operands.problem()
    assert 130 > 8 * CUT.rows  # more than one band, the last one lower
    operands.check(operands.multiply(problem, tile=CUT), problem)
    operands.check(operands.multiply(problem, tile=CUT._replace(depth=32, splits=3)), problem)


def test_column_major_scales(device: torch.device) -> None:
    operands = Operands((12, 128, 512), (GROUP128, BLOCK), device)
    problem = operands.problem()
    plain = operands.multiply(problem)
    assert operands.x_scale is not None
    operands.x_scale = operands.x_scale.t().contiguous().t()
    operands.w_scale = operands.w_scale.t().contiguous().t()
    assert_bits_equal(operands.multiply(problem), plain)


@pytest.mark.parametrize("pair", ["row-row", "groups-block", "16bit-row", "mx-mx"])
def test_who_sums_the_chunks_changes_no_bit(pair: str, device: torch.device) -> None:
    operands = Operands((21, 130, 1000), PAIRS[pair], device)
    bias = torch.randn(130, device=device)
    problem = operands.problem(torch.float32, bias)
    warps = 2 if triton_gemm.decoded(problem) else 4
    tile = CUT._replace(warps=warps)
    split = operands.multiply(problem, bias, tile._replace(splits=4))
    assert_bits_equal(operands.multiply(problem, bias, tile._replace(chunks=4)), split)
    operands.check(split, problem, bias)
    if pair != "row-row" or device.type == "cpu":
        # the guard can fail: another number of chunks is another order; Hopper's partial sums have
        # so few bits that fp32 adds them exactly in any order
        other = operands.multiply(problem, bias, tile)
        assert not torch.equal(other, split)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(96, 1040), (2112, 7168)])
@pytest.mark.parametrize("pair", COMPILED)
def test_batch_invariant_bits_do_not_depend_on_m(pair: str, n: int, k: int) -> None:
    operands = Operands((300, n, k), PAIRS[pair], torch.device("cuda"))
    whole = operands.multiply(operands.problem(torch.float32, batch_invariant=True))
    x, x_scale = operands.x, operands.x_scale
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(5, 70), slice(0, 130)):
        operands.x = x[rows]
        whole_scale = x_scale is None or operands.groups[0] == TENSOR
        operands.x_scale = x_scale if whole_scale else x_scale[rows]
        problem = operands.problem(torch.float32, batch_invariant=True)
        assert_bits_equal(operands.multiply(problem), whole[rows])


def problems(capability: tuple[int, int] = (9, 0)) -> Iterator[MatmulProblem]:
    """Describe a product for every pair of granularities on the shapes of real layers."""
    shapes = ((4096, 4096), (28672, 4096), (4096, 14336), (64, 16), (3000, 3001), (2112, 7168))
    for pair, (n, k), m in itertools.product(PAIRS.values(), shapes, (0, 1, 16, 64, 128, 4096)):
        x_dtype = torch.bfloat16 if pair[0] is None else E4M3
        for invariant in (False, True):
            yield MatmulProblem(
                m, n, k, *pair, x_dtype, E4M3, torch.bfloat16, False, "precise", invariant,
                "cuda", capability,
            )  # fmt: skip


@pytest.mark.parametrize(("device_", "capability"), [(H200, (9, 0)), (ADA, (8, 9))], ids=str)
def test_cuts_fit_the_device_and_leave_no_part_empty(
    device_: triton_gemm.Device, capability: tuple[int, int]
) -> None:
    for problem in problems(capability):
        tile = triton_gemm.choose_tile(problem, device_)
        width = 2 if problem.x_group is None else 1
        ring = tile.stages * tile.depth * (tile.cols + tile.rows * width)
        assert ring <= device_.shared - 1024, (problem, tile)
        steps = -(-problem.k // tile.depth)
        assert tile.splits * tile.chunks <= steps
        assert tile.splits == 1 or steps // tile.splits >= 4
        assert tile.depth <= triton_gemm.most_step_columns(problem)
        assert problem.k % 16 == 0 or tile.stages == 2


def test_a_step_that_spans_two_scales_is_refused(device: torch.device) -> None:
    operands = Operands((3, 64, 512), PAIRS["odd-groups"], device)
    problem = operands.problem()
    assert triton_gemm.most_step_columns(problem) == 32
    with pytest.raises(AssertionError):
        operands.multiply(problem, tile=CUT._replace(depth=64))


@pytest.mark.parametrize(
    ("pair", "accum", "deepest"),
    [
        ("row-row", "precise", 128),
        ("row-row", "fast", 512),
        ("groups-block", "fast", 128),
        ("16bit-row", "precise", 512),
        ("mx-mx", "precise", 512),
    ],
)
def test_a_step_is_no_deeper_than_its_sums_allow(pair: str, accum: str, deepest: int) -> None:
    operands = Operands((3, 64, 2048), PAIRS[pair], torch.device("cpu"))
    problem = operands.problem(accum=accum)
    assert triton_gemm.most_step_columns(problem) == deepest
    triton_gemm.product_constants(problem, CUT._replace(depth=deepest))
    with pytest.raises(AssertionError):
        triton_gemm.product_constants(problem, CUT._replace(depth=2 * deepest))


def test_an_invariant_cut_of_k_depends_on_n_and_k_only() -> None:
    cuts: dict[object, set[tuple[int, int, bool]]] = {}
    for problem in problems():
        if problem.batch_invariant:
            tile = triton_gemm.choose_tile(problem, H200)
            key = (problem.n, problem.k, problem.x_group, problem.w_group)
            tensor_core = tile.warps % 4 == 0
            cuts.setdefault(key, set()).add((tile.depth, tile.splits * tile.chunks, tensor_core))
    assert all(len(found) == 1 for found in cuts.values())
    assert any(parts > 1 for found in cuts.values() for _, parts, _ in found)


def test_few_tiles_are_split_and_many_are_not() -> None:
    def splits(n: int, k: int, m: int = 16) -> bool:
        problem = MatmulProblem(
            m, n, k, ROW, ROW, E4M3, E4M3, torch.bfloat16, False, "precise", False, "cuda", (9, 0)
        )
        return triton_gemm.choose_tile(problem, H200).splits > 1

    assert splits(2112, 7168)
    assert not splits(4096, 4096, 4096)


DECLINED = [
    ({"x_dtype": torch.float32, "x_group": None}, "16-bit activations"),
    ({"x_dtype": torch.float16, "x_group": None, "w_group": MX}, "exceed float16"),
    ({"w_group": GroupShape(1, 16)}, "powers of two from 32"),
    ({"x_group": GroupShape(1, 48)}, "powers of two from 32"),
    ({"x_group": MX, "w_group": MX, "m": 128}, "over 64 rows"),
    ({"x_group": None, "x_dtype": torch.bfloat16, "m": 128}, "over 64 rows"),
    ({"capability": (8, 0), "m": 128}, "over 64 rows"),
]


@pytest.mark.parametrize(("changes", "word"), DECLINED)
def test_declines_with_a_reason(changes: dict[str, object], word: str) -> None:
    fields = {
        "m": 16, "n": 64, "k": 64, "x_group": ROW, "w_group": ROW, "x_dtype": E4M3,
        "w_dtype": E4M3, "out_dtype": torch.bfloat16, "bias": False, "accum": "precise",
        "batch_invariant": False, "device_type": "cuda", "capability": (9, 0),
    }  # fmt: skip
    reason = triton_gemm.supports(MatmulProblem(**{**fields, **changes}))  # type: ignore[arg-type]
    assert reason is not None
    assert word in reason
    assert triton_gemm.supports(MatmulProblem(**fields)) is None  # type: ignore[arg-type]


def test_a_cpu_is_declined_where_kernels_are_compiled(triton_compiles: None) -> None:
    described = next(problems((7, 5)))
    assert triton_gemm.supports(described) == "needs an NVIDIA GPU from sm80"


@pytest.mark.gpu
@pytest.mark.parametrize("pair", COMPILED)
@pytest.mark.parametrize(("n", "k"), [(130, 304), (1000, 4112), (4096, 4096)])
@pytest.mark.parametrize("m", [1, 33, 64, 200])
def test_compiled_products(m: int, n: int, k: int, pair: str) -> None:
    operands = Operands((m, n, k), PAIRS[pair], torch.device("cuda"))
    bias = torch.randn(n, device="cuda") if m == 33 else None
    for invariant in (False, True):
        problem = operands.problem(torch.float32, bias, batch_invariant=invariant)
        if triton_gemm.supports(problem) is None:
            operands.check(operands.multiply(problem, bias), problem, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["row-row", "groups-block", "mx-mx", "16bit-row", "16bit-block"])
@pytest.mark.parametrize("k", [4096, 14336, 28672])
def test_no_drift_on_the_gpu(k: int, pair: str) -> None:
    for m in (1, 64, 200):
        operands = Operands((m, 128, k), PAIRS[pair], torch.device("cuda"))
        if operands.groups[0] is None:
            operands.x = operands.x.abs()
        else:
            operands.x.view(torch.uint8).bitwise_and_(0x7F)
        operands.w.view(torch.uint8).bitwise_and_(0x7F)
        problem = operands.problem()
        if triton_gemm.supports(problem) is None:
            exact = exact_product(operands.x_value.abs(), operands.w_value.abs())
            assert_no_drift(operands.multiply(problem), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["row-row", "groups-block", "16bit-row"])
def test_more_elements_than_32_bits_count(pair: str) -> None:
    n, k = 70016, 32768
    w = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda").bitwise_and_(0xB7)
    assert w.numel() > 2**31
    operands = Operands((3, 256, k), PAIRS[pair], torch.device("cuda"))
    operands.w = w.view(E4M3)
    scale = torch.rand(fp8kit.scale_shape((n, k), operands.groups[1]), device="cuda")
    operands.w_scale = scale
    y = operands.multiply(operands.problem())[:, -256:]
    rows = scale[-2:] if operands.groups[1] == BLOCK else scale[-256:]
    tail = QTensor(w[-256:].view(E4M3), rows, operands.groups[1])
    assert_matmul(y, operands.x_value, fp8kit.dequantize(tail), backend="triton_gemm")


@pytest.mark.gpu
def test_weight_only_layers_stream_the_weight_for_few_rows() -> None:
    layer = torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    quantized = fp8kit.Fp8Linear.from_linear(layer, "FP8_WEIGHT_ONLY")
    for m, expected in ((1, "triton_gemm"), (64, "triton_gemm"), (65, "dequantized")):
        assert choose(MATMUL_BACKENDS, quantized.problem(m)).backend == expected
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        w = fp8kit.dequantize(quantized.quantized_weight())
        assert_matmul(quantized(x), x.float(), w, layer.bias, "triton_gemm")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Compile the kernels for several GPUs in a process without the interpreter."""
    script = Path(__file__).with_name("ahead_of_time.py")
    return compiled_by(script, tmp_path_factory.mktemp("triton"))


def test_compiled_kernels_keep_everything_in_registers(compiled: dict[str, dict[str, int]]) -> None:
    assert len(compiled) >= 12
    assert {name: c["stack"] for name, c in compiled.items() if c["stack"]} == {}


def test_compiled_kernels_use_the_tensor_cores_of_their_device(
    compiled: dict[str, dict[str, int]],
) -> None:
    expected = {"sm80": "mma_16bit", "sm89": "mma_fp8", "sm90": "wgmma_fp8", "sm100": "tcgen05"}
    for name, counts in compiled.items():
        if "16bit" in name or "mx" in name:
            assert counts["mma_16bit"] > 0, name
        else:
            assert counts[expected[name.split()[0]]] > 0, name


def test_compiled_kernels_copy_16_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    for name, counts in compiled.items():
        assert counts["copies_of_16"] > 0, name
        assert counts["copies_of_8"] == 0, name


def test_precise_sums_leave_the_tensor_core(compiled: dict[str, dict[str, int]]) -> None:
    sums = 64 * 16 // 128  # of a tile, in each of 128 threads
    for device_ in ("sm89", "sm90"):
        precise = compiled[f"{device_} row-row 16"]["additions"]
        assert precise == compiled[f"{device_} row-row 16 fast"]["additions"] + sums


def test_codes_are_converted_in_pairs(compiled: dict[str, dict[str, int]]) -> None:
    for device_ in ("sm89", "sm90", "sm100"):
        counts = compiled[f"{device_} 16bit-row 16"]
        assert counts["paired_decodes"] > 0
        assert counts["scalar_conversions"] == 0
