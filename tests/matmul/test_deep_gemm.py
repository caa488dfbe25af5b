"""DeepGEMM as a backend: its operands, when it declines, how it is found; the library on Hopper.

Elsewhere ``Library`` replaces it: it multiplies in plain torch, and refuses operands that the real
one would refuse or copy, by the rules of ``csrc/apis/gemm.hpp`` and ``csrc/utils/layout.hpp``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import backend_tables
import fp8kit
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, GROUP128, SCHEMES
from fp8kit.matmul import deep_gemm
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulOperands, MatmulProblem
from fp8kit.matmul.tma_operands import by_column
from fp8kit.quantizers import reference
from fp8kit.runtime.launch_recording import record
from numerics import assert_bits_equal, assert_matmul, assert_no_drift, exact_product

GROUPS = (GROUP128, BLOCK)
E4M3 = torch.float8_e4m3fn
NAMES = ("fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt")  # in releases since 2.0, and in earlier ones


class Library(ModuleType):
    """A fake of the package ``deep_gemm`` with one function, which stores its operands."""

    def __init__(self, name: str = NAMES[0]) -> None:
        super().__init__("deep_gemm")
        self.given: list[tuple[Tensor, ...]] = []
        setattr(self, name, self.product)

    def product(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
        """Compute ``d = a @ b.T`` as ``fp8_gemm_nt`` does on sm90."""
        (x, x_scale), (w, w_scale) = a, b
        (m, k), (n, k_) = x.shape, w.shape
        assert k == k_
        assert x.dtype == w.dtype == E4M3
        assert d.shape == (m, n)
        assert d.dtype == torch.bfloat16
        for tensor in (x, w, d):
            assert tensor.is_contiguous(), "K-major operands, a row-major result, no gaps"
            assert tensor.stride(0) * tensor.element_size() % 16 == 0, "rows at 16-byte boundaries"
            assert tensor.data_ptr() % 16 == 0, "an address at a 16-byte boundary"
        assert x_scale.dtype == w_scale.dtype == torch.float32
        assert x_scale.shape == (m, math.ceil(k / 128))
        assert x_scale.stride() == (1, math.ceil(m / 4) * 4), "it would transpose these first"
        assert x_scale.data_ptr() % 16 == 0
        assert w_scale.shape == (math.ceil(n / 128), math.ceil(k / 128))
        assert w_scale.is_contiguous()
        self.given.append((x, x_scale, w, w_scale))
        left = reference.dequantize(x, x_scale, GROUP128, torch.float32)
        right = reference.dequantize(w, w_scale, BLOCK, torch.float32)
        d.copy_(left @ right.t())


def look_again() -> None:
    """Clear the result of looking for the library, which a process does once."""
    deep_gemm._product.cache_clear()
    choose.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces a package by a module, or makes it absent."""

    def put(module: ModuleType | None, name: str = "deep_gemm") -> None:
        monkeypatch.setitem(sys.modules, name, module)  # importing None raises as if it were absent
        look_again()

    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    put(None)
    return put


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    look_again()


@pytest.fixture
def library(install: Callable[..., None]) -> Library:
    install(made := Library())
    return made


def declined(scheme: str = "FP8_BLOCK", **changes: object) -> str | None:
    """Return why a product on an H200, which need not exist here, is declined."""
    x_group, w_group = SCHEMES[scheme].activation, SCHEMES[scheme].weight
    values = {
        "m": 4096, "n": 4096, "k": 7168, "x_group": x_group, "w_group": w_group, "x_dtype": E4M3,
        "w_dtype": E4M3, "out_dtype": torch.bfloat16, "bias": False, "accum": "precise",
        "batch_invariant": False, "device_type": "cuda", "capability": (9, 0),
    }  # fmt: skip
    problem = MatmulProblem(**{**values, **changes})  # type: ignore[arg-type]
    return dict(choose(MATMUL_BACKENDS, problem, "deep_gemm").declined).get("deep_gemm")


def operands(
    m: int, n: int, k: int, device: str = "cpu"
) -> tuple[fp8kit.QTensor, fp8kit.QTensor, MatmulProblem]:
    """Quantize normal operands whose rows differ in size, so that a swapped scale shows."""
    x = torch.randn(m, k, device=device) * torch.logspace(-1, 1, m, device=device)[:, None]
    w = torch.randn(n, k, device=device) * torch.logspace(-2, 0, n, device=device)[:, None]
    x_q, w_q = fp8kit.quantize(x, GROUP128), fp8kit.quantize(w, BLOCK, role="weight")
    problem = MatmulProblem.of(x_q.data, w_q.data, GROUPS, torch.bfloat16, None, "precise", False)
    return x_q, w_q, problem


@pytest.mark.parametrize(
    ("m", "name"), [(1, NAMES[0]), (3, NAMES[1]), (4, NAMES[0]), (130, NAMES[1])]
)
def test_the_library_gets_the_layouts_that_it_wants(
    m: int, name: str, install: Callable[..., None]
) -> None:
    install(made := Library(name))
    x_q, w_q, problem = operands(m, 192, 384)
    plain = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert_matmul(plain, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q))
    # operands in DeepGEMM's layouts are passed on without a copy, others are copied into them
    right = made.given[0]
    deep_gemm.run(MatmulOperands(*right), problem)
    assert [t.data_ptr() for t in made.given[1]] == [t.data_ptr() for t in right]
    memory = torch.zeros(m * 384 + 1, dtype=torch.uint8)
    unaligned = memory[1:].view(m, 384).copy_(x_q.data.view(torch.uint8)).view(E4M3)
    weight = w_q.data.view(torch.uint8).t().contiguous().t().view(E4M3)
    sliced = torch.zeros(m, 5)
    sliced[:, 1:4] = x_q.scale
    odd = MatmulOperands(unaligned, sliced[:, 1:4], weight, w_q.scale.t().contiguous().t())
    assert_bits_equal(deep_gemm.run(odd, problem), plain)


WRONG = {
    "it would transpose": lambda x, s, w, t: (x, s.contiguous(), w, t),
    "stride": lambda x, s, w, t: (x, s.t().contiguous().t(), w, t),  # 9 rows apart, not 12
    "contiguous": lambda x, s, w, t: (x, s, w, t.t().contiguous().t()),
    "shape": lambda x, s, w, t: (x, s, w, t[:1]),
    "float8": lambda x, s, w, t: (x.view(torch.uint8), s, w, t),
    "K-major": lambda x, s, w, t: (x, s, w.view(torch.uint8).t().contiguous().t().view(E4M3), t),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_layout_would_show(fault: str, library: Library) -> None:
    x_q, w_q, problem = operands(9, 256, 256)
    deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    right = library.given[0]
    y = torch.empty(9, 256, dtype=torch.bfloat16)
    library.product(right[:2], right[2:], y)
    wrong = WRONG[fault](*right)
    with pytest.raises(AssertionError):
        library.product(wrong[:2], wrong[2:], y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_bias_of_any_dtype_is_added(dtype: torch.dtype, library: Library) -> None:
    x_q, w_q, problem = operands(5, 64, 128)
    bias = torch.randn(64).mul(4).to(dtype)
    y = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale, bias), problem)
    assert y.dtype == torch.bfloat16
    bare = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert_bits_equal(y, (bare.float() + bias.float()).bfloat16())
    assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q), bias, "deep_gemm")


def test_a_layer_with_a_bias_runs_on_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dataclasses.replace(deep_gemm.BACKEND, supports=lambda _: None)
    backend_tables.install(monkeypatch, matmul={"deep_gemm": taken})
    layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(256, 192).bfloat16(), "FP8_BLOCK")
    layer.bias.data.mul_(100)
    x = torch.randn(2, 3, 256).bfloat16()
    y = layer(x)
    assert len(library.given) == 1
    x_q, w = fp8kit.quantize(x.flatten(0, 1), GROUP128), fp8kit.dequantize(layer.quantized_weight())
    assert_matmul(y.flatten(0, 1), fp8kit.dequantize(x_q), w, layer.bias, "deep_gemm")


def test_a_call_to_it_is_not_recorded(library: Library) -> None:
    x_q, w_q, problem = operands(4, 64, 128)
    scale = by_column(x_q.scale)

    def call() -> Tensor:
        return deep_gemm.run(MatmulOperands(x_q.data, scale, w_q.data, w_q.scale), problem)

    y, captured = record(call, [x_q.data], (scale, w_q.data, w_q.scale))
    assert captured is None
    assert_bits_equal(y, call())


def test_it_takes_what_engines_give_it_where_it_was_measured(library: Library) -> None:
    for n, k in ((2112, 7168), (576, 7168), (24576, 1536), (7168, 16384), (64, 128)):
        assert declined(m=64, n=n, k=k, accum="fast", bias=True) is None
    x_q, w_q, _ = operands(64, 128, 256)
    problem = MatmulProblem.of(x_q.data, w_q.data, GROUPS, torch.bfloat16, None, "precise", False)
    on_h200 = dataclasses.replace(problem, device_type="cuda", capability=(9, 0))
    assert "not measured" in dict(choose(MATMUL_BACKENDS, on_h200).declined)["deep_gemm"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"capability": (8, 0)}, "sm90"),
        ({"capability": (8, 9)}, "sm90"),
        ({"capability": (10, 0)}, "UE8M0"),
        ({"capability": (12, 0)}, "sm90"),
        ({"capability": None}, "sm90"),
        ({"out_dtype": torch.float32}, "bfloat16 only"),
        ({"out_dtype": torch.float16}, "bfloat16 only"),
        ({"batch_invariant": True}, "tiles by M"),
        ({"n": 96}, "N in multiples of 64, got 96"),
        ({"k": 192}, "K in multiples of 128, got 192"),
        ({"w_dtype": torch.float8_e5m2}, "e4m3fn"),
        ({"x_dtype": torch.float8_e4m3fnuz}, "e4m3fn"),
        ({"device_type": "cpu", "capability": None}, "not on cpu"),
        *(({"scheme": s}, "scales, only 1x128 by 128x128") for s in SCHEMES if s != "FP8_BLOCK"),
    ],
    ids=str,
)
def test_it_declines_and_says_why(changes: dict[str, object], word: str, library: Library) -> None:
    assert word in (declined(**changes) or "")  # type: ignore[arg-type]
    assert library.given == []


def test_what_is_missing_is_a_reason(install: Callable[..., None]) -> None:
    assert declined() == "deep_gemm is not installed"
    install(Library("gemm_of_the_future"))
    assert declined() == f"deep_gemm has neither {' nor '.join(NAMES)}; use another release"


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError('cuda_home')",
        "ImportError('libcudart.so.13')",
        "ModuleNotFoundError('einops')",
    ],
)
def test_a_library_that_does_not_import_is_a_reason(
    error: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deep_gemm.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm")
    assert "sm90" in (declined(capability=(8, 9)) or "")  # nor is it imported without need
    kind, _, text = error[:-2].partition("('")
    reason = declined() or ""
    assert f"deep_gemm does not import ({kind}: {text})" in reason
    assert "CUDA_HOME" in reason


def test_the_copy_of_vllm_serves_in_processes_that_import_vllm(
    install: Callable[..., None],
) -> None:
    for name in ("vllm", "vllm.third_party"):
        install(ModuleType(name), name)
    sys.modules["vllm"].third_party = sys.modules["vllm.third_party"]  # type: ignore[attr-defined]
    install(None, "vllm.third_party.deep_gemm")
    assert declined() == "deep_gemm is not installed"
    made = Library()
    sys.modules["vllm.third_party"].deep_gemm = made  # type: ignore[attr-defined]
    install(made, "vllm.third_party.deep_gemm")
    assert declined() is None
    x_q, w_q, problem = operands(2, 64, 128)
    deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert len(made.given) == 1


def real(m: int, n: int, k: int) -> tuple[fp8kit.QTensor, fp8kit.QTensor]:
    """Quantize on the GPU; skip with the reason if the library does not run."""
    x_q, w_q, problem = operands(m, n, k, "cuda")
    look_again()
    with warnings.catch_warnings():  # those of its import are not ours
        warnings.simplefilter("ignore")
        choice = choose(MATMUL_BACKENDS, problem, "deep_gemm")
    if choice.implementation is None:
        pytest.skip(dict(choice.declined)["deep_gemm"])
    return x_q, w_q


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(64, 128), (2112, 7168)])
@pytest.mark.parametrize("m", [1, 130, 4096])  # few: the library compiles for each
def test_the_real_library_matches_the_exact_product(m: int, n: int, k: int) -> None:
    x_q, w_q = real(m, n, k)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for b in (None, bias):
        y = fp8kit.scaled_mm(x_q, w_q, b, backend="deep_gemm")
        assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q), b, "deep_gemm")


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 14336, 28672])
def test_the_real_library_promotes_its_sums(k: int) -> None:
    real(4, 128, k)
    x_q = fp8kit.quantize(torch.rand(4, k, device="cuda"), GROUP128)
    w_q = fp8kit.quantize(torch.rand(128, k, device="cuda"), BLOCK, role="weight")
    y = fp8kit.scaled_mm(x_q, w_q, backend="deep_gemm")
    assert_no_drift(y, exact_product(fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)))


@pytest.mark.gpu
def test_the_real_library_runs_on_the_current_stream() -> None:
    x_q, w_q = real(256, 4096, 4096)
    expected = fp8kit.scaled_mm(x_q, w_q, backend="deep_gemm")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about ten milliseconds: what runs elsewhere is early
        late = fp8kit.QTensor(x_q.data.clone(), x_q.scale.clone(), GROUP128)
        y = fp8kit.scaled_mm(late, w_q, backend="deep_gemm")
    stream.synchronize()
    assert_bits_equal(y, expected)
