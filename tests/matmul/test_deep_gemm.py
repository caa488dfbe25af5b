"""DeepGEMM: where it is found, what it is given, when it is chosen; the library itself on Hopper.

``Library`` stands for it. It multiplies in plain torch and refuses operands that the real one would
refuse or copy first, by the rules of its ``csrc/apis/gemm.hpp`` and ``csrc/utils/layout.hpp``.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import fp8kit
from fp8kit.dispatch.backends import Choice, choose
from fp8kit.dispatch.timings import DENSE, REJECTED, Table
from fp8kit.formats import BLOCK, GROUP128, SCHEMES, Scheme, min_scale
from fp8kit.matmul import deep_gemm
from fp8kit.matmul import problem as matmul
from fp8kit.matmul.problem import BACKENDS, MatmulOperands, MatmulProblem
from fp8kit.matmul.tma_operands import by_column
from fp8kit.perf import tune
from fp8kit.perf.operands import candidates
from fp8kit.quantizers import reference
from fp8kit.runtime.launch_recording import record
from numerics import assert_bits_equal, assert_matmul, assert_no_drift, exact_product

GROUPS = (GROUP128, BLOCK)
E4M3 = torch.float8_e4m3fn
NEW, OLD = deep_gemm._NAMES


class Library(ModuleType):
    """The package ``deep_gemm`` with one function, which remembers what it was given."""

    def __init__(self, name: str = NEW) -> None:
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


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType | None], None]]:
    """Return a function that puts a library, or nothing, in the place of ``deep_gemm``."""

    def clear() -> None:
        deep_gemm._product.cache_clear()
        choose.cache_clear()

    def put(library: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "deep_gemm", library)  # to import None says it is absent
        clear()

    installed = [n for n in sys.modules if n.partition(".")[0] == "vllm"]
    for name in installed:
        monkeypatch.delitem(sys.modules, name)
    put(None)
    yield put
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    clear()


@pytest.fixture
def library(install: Callable[[ModuleType | None], None]) -> Library:
    """Install the library."""
    made = Library()
    install(made)
    return made


def faked(scheme: str = "FP8_BLOCK", **changes: object) -> MatmulProblem:
    """Describe a product on an H200 that need not be here."""
    values = {
        "m": 4096,
        "n": 4096,
        "k": 7168,
        "x_group": SCHEMES[scheme].activation,
        "w_group": SCHEMES[scheme].weight,
        "x_dtype": torch.bfloat16 if SCHEMES[scheme].activation is None else E4M3,
        "w_dtype": E4M3,
        "out_dtype": torch.bfloat16,
        "bias": False,
        "accum": "precise",
        "batch_invariant": False,
        "device_type": "cuda",
        "capability": (9, 0),
    }
    return MatmulProblem(**{**values, **changes})  # type: ignore[arg-type]


def only(problem: MatmulProblem) -> Choice:
    return choose(BACKENDS, problem, "deep_gemm")


def operands(
    m: int, n: int, k: int, device: str = "cpu"
) -> tuple[fp8kit.QTensor, fp8kit.QTensor, MatmulProblem]:
    """Quantize normal operands whose rows differ in size, so that a swapped scale shows."""
    x = torch.randn(m, k, device=device) * torch.logspace(-1, 1, m, device=device)[:, None]
    w = torch.randn(n, k, device=device) * torch.logspace(-2, 0, n, device=device)[:, None]
    x_q, w_q = fp8kit.quantize(x, GROUP128), fp8kit.quantize(w, BLOCK, role="weight")
    problem = MatmulProblem.of(x_q.data, w_q.data, GROUPS, torch.bfloat16, None, "precise", False)
    return x_q, w_q, problem


@pytest.mark.parametrize("m", [1, 3, 4, 17, 130])
@pytest.mark.parametrize("name", [NEW, OLD])
def test_the_library_gets_the_layouts_that_it_wants(
    name: str, m: int, install: Callable[[ModuleType | None], None]
) -> None:
    install(made := Library(name))
    x_q, w_q, problem = operands(m, 192, 384)
    y = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert len(made.given) == 1
    assert y.is_contiguous()
    assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q))


def test_codes_and_scales_in_any_layout_are_brought_into_it(library: Library) -> None:
    x_q, w_q, problem = operands(9, 192, 256)
    plain = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    memory = torch.zeros(9 * 256 + 1, dtype=torch.uint8)
    unaligned = memory[1:].view(9, 256).copy_(x_q.data.view(torch.uint8)).view(E4M3)
    transposed = w_q.data.view(torch.uint8).t().contiguous().t().view(E4M3)
    by_column = w_q.scale.t().contiguous().t()
    sliced = torch.zeros(9, 5)
    sliced[:, 1:3] = x_q.scale
    again = deep_gemm.run(MatmulOperands(unaligned, sliced[:, 1:3], transposed, by_column), problem)
    assert_bits_equal(again, plain)


@pytest.mark.parametrize("m", [1, 6, 8])
def test_what_a_layer_quantizes_is_passed_on_without_a_copy(m: int, library: Library) -> None:
    triton = pytest.importorskip("fp8kit.quantizers.triton")
    if not triton.INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    x = torch.randn(m, 256)
    floor = min_scale(GROUP128, E4M3, "activation")
    codes, scale = triton.quantize(x, GROUP128, E4M3, floor, None, "exact", "column")
    _, w_q, problem = operands(1, 128, 256)
    deep_gemm.run(MatmulOperands(codes, scale, w_q.data, w_q.scale), problem)
    kept = [t.data_ptr() for t in (codes, scale, w_q.data, w_q.scale)]
    assert [t.data_ptr() for t in library.given[0]] == kept


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


def test_a_call_to_it_is_not_recorded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    x_q, w_q, problem = operands(4, 64, 128)
    scale = by_column(x_q.scale)
    noted: list[object] = []
    monkeypatch.setattr(deep_gemm, "record_launch", noted.append)

    def call() -> Tensor:
        return deep_gemm.run(MatmulOperands(x_q.data, scale, w_q.data, w_q.scale), problem)

    y, captured = record(call, [x_q.data], (scale, w_q.data, w_q.scale))
    assert captured is None
    assert noted == [None]
    assert_bits_equal(y, call())


def test_it_takes_what_engines_give_it(library: Library) -> None:
    for n, k in ((2112, 7168), (576, 7168), (24576, 1536), (7168, 16384), (64, 128)):
        for m in (1, 64, 4096):
            for accum in ("precise", "fast"):
                choice = only(faked(m=m, n=n, k=k, accum=accum, bias=True))
                assert choice.backend == "deep_gemm", choice.declined


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
    choice = only(faked(**changes))  # type: ignore[arg-type]
    assert choice.implementation is None
    assert word in dict(choice.declined)["deep_gemm"]
    assert library.given == []


def break_import(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let importing ``deep_gemm`` raise, as it does without a CUDA toolkit."""

    def find_spec(name: str, *_: object) -> None:
        if name == "deep_gemm":
            raise error

    monkeypatch.delitem(sys.modules, "deep_gemm")
    finder = SimpleNamespace(find_spec=find_spec)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])


def test_no_library_is_a_reason(install: Callable[[ModuleType | None], None]) -> None:
    assert only(faked()).declined == (("deep_gemm", "deep_gemm is not installed"),)


def test_a_library_without_the_product_is_a_reason(
    install: Callable[[ModuleType | None], None],
) -> None:
    install(Library("gemm_of_the_future"))
    (reason,) = dict(only(faked()).declined).values()
    assert reason == f"deep_gemm has neither {NEW} nor {OLD}; use another release"


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("cuda_home is not None"),
        ImportError("libcudart.so.13: cannot open shared object file"),
        ModuleNotFoundError("No module named 'einops'", name="einops"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_library_that_does_not_import_is_a_reason(
    error: Exception,
    install: Callable[[ModuleType | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_import(error, monkeypatch)
    (reason,) = dict(only(faked()).declined).values()
    assert f"deep_gemm does not import ({type(error).__name__}: {error})" in reason
    assert "CUDA_HOME" in reason


PRODUCT = f"def {NEW}(a, b, d):\n    d.fill_(7)\n"


def vendor(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    """Make a vLLM, with a copy of the library that holds ``body``, that can be imported."""
    package = folder / "vllm" / "third_party"
    package.mkdir(parents=True)
    for parent in (package, package.parent):
        (parent / "__init__.py").write_text("")
    if body is not None:
        (package / "deep_gemm").mkdir()
        (package / "deep_gemm" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("other", ["absent", "too old", "broken"])
def test_the_copy_of_vllm_serves_in_processes_that_import_vllm(
    other: str,
    install: Callable[[ModuleType | None], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if other == "too old":
        install(Library("gemm_of_the_past"))
    if other == "broken":
        break_import(ImportError("torn"), monkeypatch)
    vendor(tmp_path, monkeypatch, PRODUCT)
    assert only(faked()).implementation is None
    assert "vllm" not in sys.modules  # whose import changes settings of torch
    importlib.import_module("vllm")
    deep_gemm._product.cache_clear()
    choose.cache_clear()
    assert only(faked()).backend == "deep_gemm"
    x_q, w_q, problem = operands(2, 64, 128)
    y = deep_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert (y == 7).all()


@pytest.mark.parametrize(
    ("body", "said"),
    [(None, "not installed"), ("raise OSError('torn')", "OSError: torn"), ("", "neither")],
    ids=["absent", "broken", "too old"],
)
def test_a_vllm_without_a_copy_that_works_is_a_reason(
    body: str | None,
    said: str,
    install: Callable[[ModuleType | None], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    vendor(tmp_path, monkeypatch, body)
    importlib.import_module("vllm")
    (reason,) = dict(only(faked()).declined).values()
    assert said in reason


def test_only_a_problem_it_could_take_imports_it(
    install: Callable[[ModuleType | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_import(ImportError("imported"), monkeypatch)
    others = [faked(scheme) for scheme in SCHEMES if scheme != "FP8_BLOCK"]
    for problem in (*others, faked(n=96), faked(capability=(8, 9))):
        assert "imported" not in str(only(problem))
    assert "imported" in str(only(faked()))


@pytest.mark.parametrize("device", ["", "NVIDIA H200", "NVIDIA Unheard Of"])
@pytest.mark.parametrize("m", [1, 64, 512, 1024, 16384])
def test_without_a_measured_time_it_does_not_run(m: int, device: str, library: Library) -> None:
    choice = choose(BACKENDS, faked(m=m, device=device))
    assert choice.backend not in ("", "deep_gemm")
    assert "not measured" in dict(choice.declined)["deep_gemm"]


def test_every_own_kernel_stands_before_it() -> None:
    order = [name for name, *_ in BACKENDS]
    behind = order[order.index("deep_gemm") + 1 :]
    assert behind == ["dequantized", "reference"]


@pytest.mark.parametrize(("us", "chosen"), [(20.0, "deep_gemm"), (40.0, "torch_native")])
def test_a_table_decides_and_the_choice_says_so(
    us: float, chosen: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {DENSE: 60.0, "hopper_gemm": 55.0, "torch_native": 30.0, "triton_gemm": 50.0}
    times["deep_gemm"] = us
    problem = faked(device="Toy GPU")
    table = Table("Toy GPU", 4e12, 1e15, {problem.case(): times})
    monkeypatch.setattr(matmul, "table_for", lambda _: table)
    said = str(choose(BACKENDS, problem))
    assert (
        f"  {chosen:<13} chosen, {min(us, 30.0):.1f} µs, bf16 60.0 µs (measured at m={problem.m})"
        in said
    )
    if chosen != "deep_gemm":
        assert "  deep_gemm     declined: 40.0 µs, slower than torch_native" in said


def test_tuning_considers_it(library: Library) -> None:
    assert ("deep_gemm", "") in candidates(faked())
    assert ("deep_gemm", "") not in candidates(faked("FP8_DYNAMIC"))


@pytest.fixture
def here(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Let the library compute on the CPU, as on an H200, and nothing else."""
    table = (("deep_gemm", "fp8kit.matmul.deep_gemm", ()),)
    monkeypatch.setattr(matmul, "capability", lambda _: (9, 0))
    monkeypatch.setattr("fp8kit.ops.bodies.MATMUL_BACKENDS", table)
    monkeypatch.setattr("fp8kit.perf.operands.BACKENDS", table)
    return library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_runs_on_it(dtype: torch.dtype, here: Library) -> None:
    layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(256, 192).to(dtype), "FP8_BLOCK")
    x = torch.randn(2, 3, 256, dtype=dtype)
    if dtype == torch.float32:
        with pytest.raises(fp8kit.UnsupportedError, match="deep_gemm: writes bfloat16 only"):
            layer(x)
        return
    y = layer(x)
    assert len(here.given) == 1
    x_q = fp8kit.quantize(x.flatten(0, 1), GROUP128)
    w = fp8kit.dequantize(fp8kit.QTensor(layer.weight, layer.weight_scale, BLOCK))
    assert_matmul(y.flatten(0, 1), fp8kit.dequantize(x_q), w, layer.bias, "deep_gemm")


@pytest.mark.parametrize("right", [True, False])
def test_tuning_times_it_if_it_is_right(right: bool, here: Library) -> None:
    def biased(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
        here.product(a, b, d)
        d.mul_(0.98)

    if not right:
        setattr(here, NEW, biased)
        deep_gemm._product.cache_clear()
    wish = tune.Wish([(128, 256)], [5], [Scheme.of("FP8_BLOCK")])
    cpu = torch.device("cpu")
    outcome = tune.tune([wish], cpu, timer=lambda cases, *_: dict.fromkeys(cases, 1.0))
    assert here.given
    if right:
        assert outcome.faults == []
        assert [set(times) for times in outcome.table.rows.values()] == [{DENSE, "deep_gemm"}]
    else:
        assert "deep_gemm on" in outcome.faults[0]
        assert "relative error" in outcome.faults[0]
        assert [times["deep_gemm"] for times in outcome.table.rows.values()] == [REJECTED]


def real(m: int, n: int, k: int) -> tuple[fp8kit.QTensor, fp8kit.QTensor]:
    """Quantize on the GPU; skip with the reason where the library does not run."""
    x_q, w_q, problem = operands(m, n, k, "cuda")
    deep_gemm._product.cache_clear()
    choose.cache_clear()
    with warnings.catch_warnings():  # those of its import are not ours
        warnings.simplefilter("ignore")
        choice = only(problem)
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
