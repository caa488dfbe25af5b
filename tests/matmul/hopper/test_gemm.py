"""The Hopper GEMM's source and launch on any machine; the kernel itself on Hopper."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable
from importlib import resources
from types import SimpleNamespace

import pytest
import torch

import backend_tables
import fp8kit
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.hopper import heuristics
from fp8kit.matmul.hopper.device import H200, Device
from fp8kit.matmul.hopper.tile_config import TileConfig
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.runtime.weight_hazards import safe_to_prefetch
from numerics import assert_bits_equal, assert_matmul, assert_no_drift, exact_product
from tile_configs import CONFIGS, label, tile_config

gemm = pytest.importorskip("fp8kit.matmul.hopper.gemm", reason="cuda-bindings is not installed")
source = pytest.importorskip("fp8kit.matmul.hopper.source")
launches = pytest.importorskip("launches")

CODES = source.Variant(False, True, False, torch.bfloat16)
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)


def documented_macros() -> list[str]:
    """Return the macros that the table at the head of the source lists."""
    text = resources.files("fp8kit").joinpath("matmul/hopper/gemm.cu").read_text()
    table = text[text.index("//   macro ") : text.index("#if")]
    return re.findall(r"^//   ([A-Z]\w+)  ", table, re.MULTILINE)


def test_the_table_of_macros_lists_what_is_set_and_what_is_set_is_read() -> None:
    macros = source.macros(CONFIGS[0], CODES)
    assert sorted(documented_macros()) == sorted(macros)
    text = "\n".join(
        resources.files("fp8kit").joinpath(name).read_text() for name in source.SOURCES
    )
    code = re.sub(r"//.*", "", text)
    assert [name for name in macros if not re.search(rf"\b{name}\b", code)] == []


def test_every_field_of_a_configuration_reaches_the_source() -> None:
    config = tile_config(96, 2, steps=4, stages=(8, 8), inflight=5)
    before = source.macros(config, CODES)
    changes = {
        "layout": {"mma_n": 80, "warpgroups": 1, "swap_ab": False},
        "pipeline": {
            **{"weight_stages": 7, "token_stages": 7, "pipelined_steps": 2},
            **{"max_inflight": 4, "warmup_inflight": 1},
        },
        "epilogue": {"buffers": 2},
        "launch": {"split_k": 2, "blocks_per_sm": 2},
    }
    for part, fields in changes.items():
        for name, value in fields.items():
            changed = dataclasses.replace(getattr(config, part), **{name: value})
            macros = source.macros(dataclasses.replace(config, **{part: changed}), CODES)
            assert macros != before, f"{part}.{name}"
    launch = dataclasses.replace(config.launch, cluster_sync_every=4)
    paired, several = (
        dataclasses.replace(config, launch=launch),
        CODES._replace(one_token_tile=False),
    )
    assert source.macros(paired, several) != source.macros(config, several)
    # blocks that share no weights need not synchronize
    assert source.macros(paired, CODES) == source.macros(config, CODES)


def test_the_source_spells_out_the_registers() -> None:
    config = tile_config(16, 1, steps=4, stages=(4, 4), inflight=2, split_k=2)
    text = source.source(config, CODES._replace(block_scales=True))
    assert "m64n16k32" in text
    assert "%7}, %8, %9, add" in text
    assert '#define WGMMA_ADD "%10"' in text
    assert "#define BLOCK_SCALES 1" in text


def launched(
    m: int, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch, record: Device = H200
) -> bool:
    """Multiply with a faked launch; return whether the launch may start early."""
    early = launches.fake_gemm_launch(monkeypatch, record)
    x_q = fp8kit.quantize(torch.randn(m, w.shape[1]))
    groups, scale = (ROW, ROW), torch.ones(len(w), 1)
    problem = MatmulProblem.of(x_q.data, w, groups, torch.bfloat16, None, "precise", False)
    gemm.run(MatmulOperands(x_q.data, x_q.scale, w, scale), problem)
    return early[0]


def test_a_weight_is_read_early_once_a_call_has_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    w = codes.view(torch.float8_e4m3fn)
    assert [launched(4, w, monkeypatch) for _ in range(3)] == [False, True, True]
    codes.add_(1)
    assert [launched(4, w, monkeypatch) for _ in range(2)] == [False, True]
    assert not launched(4, copy.deepcopy(w), monkeypatch)
    assert not launched(4, w.detach(), monkeypatch)  # nothing is known of another tensor
    with torch.inference_mode():
        uncounted = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    assert [launched(4, uncounted, monkeypatch) for _ in range(3)] == [False, False, False]


def test_a_long_gemm_starts_when_the_previous_kernel_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    record = dataclasses.replace(H200, early_start_macs=4 * 64 * 128)
    assert not launched(4, w, monkeypatch, record)
    assert [launched(m, w, monkeypatch, record) for m in (3, 4, 5)] == [True, False, False]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_every_way_to_the_gemm_starts_early_once_it_has_waited(
    mode: Callable[[], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators pass on the caller's tensor object, on which the synchronization is noted."""
    early = launches.fake_layers(monkeypatch)
    w_q = fp8kit.quantize(torch.randn(64, 128), role="weight")
    with mode():
        x = torch.randn(4, 128)
        x_q = fp8kit.quantize(x)
        fp8kit.scaled_mm(x_q, w_q)
        fp8kit.scaled_mm(x_q, w_q)
        fp8kit.linear(x, w_q)
        w_q.data.copy_(torch.zeros_like(w_q.data))
        fp8kit.linear(x, w_q)
        fp8kit.scaled_mm(x_q, w_q)
    assert early == [False, True, True, False, True]


def test_a_launch_that_fails_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    launched(4, torch.zeros_like(w), monkeypatch)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA: no kernel image")

    with monkeypatch.context() as patch:
        x_q = fp8kit.quantize(torch.randn(4, 128))
        launches.fake_gemm_launch(patch, kernel=lambda *_: SimpleNamespace(launch=broken))
        groups = (ROW, ROW)
        problem = MatmulProblem.of(x_q.data, w, groups, torch.bfloat16, None, "precise", False)
        with pytest.raises(RuntimeError, match="no kernel image"):
            gemm.run(MatmulOperands(x_q.data, x_q.scale, w, torch.ones(64, 1)), problem)
    assert not launched(4, w, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"m": 16385}, "at most 16384 rows"),
        ({"accum": "fast"}, None),
        ({"x_group": TENSOR, "w_group": TENSOR}, None),
        ({"batch_invariant": True}, "another kernel"),
        ({"x_group": None}, "scales"),
        ({"x_group": GROUP128, "w_group": BLOCK}, None),
        ({"out_dtype": torch.float32}, None),
        ({"out_dtype": torch.float32, "x_group": GROUP128, "w_group": BLOCK}, None),
        ({"w_dtype": torch.float8_e5m2}, "e4m3fn codes only"),
        ({"k": 4104}, "multiples of 16, got 4104"),
        ({"capability": (10, 0)}, "sm90"),
    ],
    ids=str,
)
def test_the_hopper_gemm_declines_what_it_cannot_compute(
    changes: dict[str, object], reason: str | None
) -> None:
    e4m3, hopper = torch.float8_e4m3fn, ("cuda", (9, 0), "NVIDIA H200")
    problem = MatmulProblem(
        *(1024, 4096, 4096, ROW, ROW, e4m3, e4m3, torch.bfloat16, False, "precise", False), *hopper
    )
    said = gemm.supports(dataclasses.replace(problem, **changes))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (TENSOR, ROW), (ROW, TENSOR), (GROUP128, BLOCK)])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (130, 304), (1000, 4112), (257, 14336), (1, 16)])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 33, 64, 65, 100, 256, 300, 512, 1030, 4096])
def test_hopper_gemm_matches_the_exact_product(m: int, n: int, k: int, groups: tuple) -> None:
    x = torch.randn(m, k, device="cuda") * torch.logspace(-1, 1, m, device="cuda")[:, None]
    w = torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, n, device="cuda")[:, None]
    x_q, w_q = fp8kit.quantize(x, groups[0]), fp8kit.quantize(w, groups[1], role="weight")
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    x_exact, w_exact = fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = fp8kit.scaled_mm(x_q, w_q, bias, out_dtype=out_dtype, backend="hopper_gemm")
        assert_matmul(y, x_exact, w_exact, bias, "hopper_gemm")


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (GROUP128, BLOCK)])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_configuration_matches_the_exact_product(config: TileConfig, groups: tuple) -> None:
    for n, k in ((64, 128), (4096, 2048), (5000, 144), (1000, 4112), (257, 7168), (3, 16)):
        w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), groups[1], role="weight")
        some = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        # many rounds and bands of tiles, the last one ragged
        for m in (1, 65, 300, 1031, *((6500,) if n > 4000 else ())):
            x_q = fp8kit.quantize(torch.randn(m, k, device="cuda"), groups[0])
            x_exact, w_exact = fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)
            for bias, out in (
                (None, torch.bfloat16),
                (some, torch.bfloat16),
                (some, torch.float32),
            ):
                problem = matmul_problem(x_q, w_q, bias, out)
                operands = MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale, bias)
                y = gemm.run(operands, problem, config)
                assert_matmul(y, x_exact, w_exact, bias, "hopper_gemm")
                assert_bits_equal(gemm.run(operands, problem, config), y)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (GROUP128, BLOCK)])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_no_configuration_drifts(config: TileConfig, groups: tuple) -> None:
    w_q = fp8kit.quantize(torch.rand(520, 14336, device="cuda"), groups[1], role="weight")
    x_q = fp8kit.quantize(torch.rand(config.tokens + 1, 14336, device="cuda"), groups[0])
    problem = matmul_problem(x_q, w_q)
    y = gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem, config)
    assert_no_drift(y, exact_product(fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)))


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize(
    ("m", "k", "groups"),
    [
        (1, 14336, (ROW, ROW)),
        (4, 4096, (ROW, ROW)),
        (1, 7168, (GROUP128, BLOCK)),
        (4, 1024, (GROUP128, BLOCK)),
    ],
)
def test_sums_of_tokens_quantized_in_the_gemm_do_not_drift(m: int, k: int, groups: tuple) -> None:
    x = torch.rand(m, k, device="cuda", dtype=torch.bfloat16)
    w_q = fp8kit.quantize(torch.rand(4096, k, device="cuda"), groups[1], role="weight")
    x_q = fp8kit.quantize(x, groups[0])
    problem = matmul_problem(x_q, w_q)
    y = gemm.quantize_in_gemm(MatmulOperands(x, None, w_q.data, w_q.scale), problem, 1e-12)
    assert y is not None
    assert_no_drift(y, exact_product(fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)))


def matmul_problem(
    x: fp8kit.QTensor,
    w: fp8kit.QTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> MatmulProblem:
    groups = (x.group, w.group)
    return MatmulProblem.of(x.data, w.data, groups, out_dtype, bias, "precise", False)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 1024), (34816, 2560)])
def test_a_row_has_the_same_bits_at_every_m(n: int, k: int) -> None:
    x_q = fp8kit.quantize(torch.randn(64, k, device="cuda"))
    w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), role="weight")
    whole = fp8kit.scaled_mm(x_q, w_q, backend="hopper_gemm")
    for m in (1, 3, 8, 9, 17, 33):
        part = fp8kit.QTensor(x_q.data[:m], x_q.scale[:m], ROW)
        assert_bits_equal(fp8kit.scaled_mm(part, w_q, backend="hopper_gemm"), whole[:m])


@pytest.mark.gpu
@HOPPER
def test_a_weight_written_just_before_is_seen() -> None:
    layer = fp8kit.Fp8Linear.from_linear(
        torch.nn.Linear(4096, 4096, False, device="cuda", dtype=torch.bfloat16)
    )
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    others = [
        fp8kit.quantize(torch.randn(4096, 4096, device="cuda"), role="weight") for _ in range(4)
    ]
    expected = [fp8kit.linear(x, w) for w in others]
    for i in range(2000):
        w = others[i % 4]
        layer.weight_scale.data.copy_(w.scale)
        # this bypasses the counter of changes, so the layer does not know
        layer.weight.data.view(torch.uint8).copy_(w.data.view(torch.uint8))
        assert_bits_equal(layer(x), expected[i % 4])


@pytest.mark.gpu
@HOPPER
def test_a_weight_quantized_just_before_is_seen() -> None:
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    dense = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    expected = [fp8kit.linear(x, fp8kit.quantize(w, role="weight")) for w in dense]
    torch.cuda.synchronize()
    for i in range(500):
        # the allocator gives each the memory of the one before
        w_q = fp8kit.quantize(dense[i % 4], role="weight")
        assert_bits_equal(fp8kit.linear(x, w_q), expected[i % 4])
        assert_bits_equal(fp8kit.linear(x, w_q), expected[i % 4])


def launch_quantizing(x: torch.Tensor, w: torch.Tensor, x_group: GroupShape) -> torch.Tensor | None:
    groups = (x_group, ROW)
    problem = MatmulProblem.of(x, w, groups, x.dtype, None, "precise", False, w.dtype)
    return gemm.quantize_in_gemm(MatmulOperands(x, None, w, torch.ones(len(w), 1)), problem, 1e-12)


def test_dense_tokens_are_taken_as_they_lie_or_left_to_two_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = launches.fake_gemm_launch(monkeypatch)
    k, w = 256, torch.zeros(64, 256, dtype=torch.float8_e4m3fn)
    wide = torch.zeros(8, k + 8, dtype=torch.bfloat16)
    for x in (wide[:1, :k], wide[:4, :k], wide[:3, :k].half()):
        y = launch_quantizing(x, w, ROW)
        assert y is not None
        assert y.shape == (len(x), 64)
        assert y.dtype == x.dtype
    assert early == [False, True, True]
    left = {
        "too many": wide[:5, :k],
        "fp32": wide[:1, :k].float(),
        "off by two bytes": wide.view(-1)[1 : k + 1].view(1, k),
        "rows off by eight bytes": torch.zeros(2, k + 4, dtype=torch.bfloat16)[:, :k],
        "by columns": torch.zeros(k, 2, dtype=torch.bfloat16).t(),
    }
    for why, x in left.items():
        assert launch_quantizing(x, w, ROW) is None, why
    assert launch_quantizing(wide[:1, :k], w, TENSOR) is None
    assert len(early) == 3


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [(ROW, ROW), (ROW, TENSOR), (GROUP128, BLOCK)])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *((64, 128), (130, 304), (4096, 4096), (1000, 4112), (28672, 2048), (10240, 8192)),
        (34816, 2560),
    ],
)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_tokens_quantized_in_the_gemm_give_the_bits_of_two_kernels(
    m: int, n: int, k: int, groups: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(m, k + 16, device="cuda", dtype=dtype)[:, :k]
    x *= torch.logspace(-3, 1, m, device="cuda", dtype=dtype)[:, None]
    x[m // 2, 5:200] = 0
    w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), groups[1], role="weight")
    bias = torch.randn(n, device="cuda", dtype=dtype)
    inside: list[bool] = []
    quantize_in_gemm = gemm.BACKEND.quantize_in_gemm

    def watched(*arguments: object) -> torch.Tensor | None:
        y = quantize_in_gemm(*arguments)
        inside.append(y is not None)
        return y

    backend = dataclasses.replace(gemm.BACKEND, quantize_in_gemm=watched)
    backend_tables.install(monkeypatch, matmul={"hopper_gemm": backend})
    for row in (None, 0.0, float("nan"), float("inf"), 60000.0, 1e-30):
        if row is not None:
            x[0] = row
        x_q = fp8kit.quantize(x, groups[0])
        expected = fp8kit.scaled_mm(x_q, w_q, bias, out_dtype=dtype, backend="hopper_gemm")
        assert_bits_equal(fp8kit.linear(x, w_q, bias), expected)
    device = gemm.device_record(0)
    fits = heuristics.choose_quantizing(m, n, k, device, groups[1] == BLOCK) is not None
    assert set(inside) == {fits}
    assert 2 <= len(inside) < 6  # the others replay the recording
    assert fits or m * k > 4096


@pytest.mark.gpu
@HOPPER
def test_a_weight_written_right_before_its_gemm_is_seen() -> None:
    """No quantizer runs in between: torch's kernel writes the weight, the next kernel reads it."""
    x_q = fp8kit.quantize(torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16))
    others = [
        fp8kit.quantize(torch.randn(4096, 4096, device="cuda"), role="weight") for _ in range(4)
    ]
    expected = [fp8kit.scaled_mm(x_q, w) for w in others]
    w_q = fp8kit.QTensor(others[0].data.clone(), others[0].scale.clone(), ROW)
    codes, zero = w_q.data.view(torch.uint8), torch.zeros((), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for i in range(2000):
        w_q.scale.copy_(others[i % 4].scale)
        # a copy of memory is no kernel, and nothing starts early behind it
        torch.bitwise_xor(others[i % 4].data.view(torch.uint8), zero, out=codes)
        for early in (False, True):
            assert safe_to_prefetch(w_q.data) == early
            assert_bits_equal(fp8kit.scaled_mm(x_q, w_q), expected[i % 4])
