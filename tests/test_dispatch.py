from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import fp8kit
from fp8kit import dispatch, settings
from fp8kit.dispatch import choose, require
from fp8kit.errors import UnsupportedError
from fp8kit.formats import SCHEMES
from fp8kit.matmul import problem as matmul
from fp8kit.quantizers import problem as quantizers
from fp8kit.quantizers.fused_problem import FUSED_BACKENDS

PATH = "fp8kit.matmul.reference"
GPU = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}

# What must run where. A backend that learns more is free to; one that loses a row fails here, so
# no bug can turn the suite green by declining everything.
MUST_RUN = {
    "swap_ab": {
        "sm80": (),
        "sm89": (),
        "sm90": ("FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK"),
        "sm100": (),
        "sm120": (),
        "cpu": (),
    },
    "torch_native": {
        "sm80": (),
        "sm89": ("FP8", "FP8_DYNAMIC", "FP8_TENSOR"),
        "sm90": ("FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK"),
        "sm100": ("FP8", "FP8_DYNAMIC", "FP8_TENSOR", "MXFP8"),
        "sm120": ("FP8", "MXFP8"),
        "cpu": (),
    },
    "triton_scaled": {**dict.fromkeys(GPU, tuple(SCHEMES)), "cpu": ()},
    "dequantized": dict.fromkeys((*GPU, "cpu"), tuple(SCHEMES)),
    "reference": dict.fromkeys((*GPU, "cpu"), tuple(SCHEMES)),
}
MUST_RUN_ROWS = [
    (backend, device, scheme)
    for backend, devices in MUST_RUN.items()
    for device, schemes in devices.items()
    for scheme in schemes
]
# what the hardware or the library cannot do, and the word that must be in the reason
MUST_DECLINE_ROWS = [
    ("torch_native", "sm80", "FP8_DYNAMIC", "sm89"),
    ("torch_native", "sm89", "FP8_BLOCK", "sm90 only"),
    ("torch_native", "sm100", "FP8_BLOCK", "sm90 only"),
    ("torch_native", "sm90", "MXFP8", "sm100"),
    ("torch_native", "sm120", "FP8_DYNAMIC", "row-wise"),
    ("torch_native", "sm90", "FP8_WEIGHT_ONLY", "16-bit"),
    ("torch_native", "cpu", "FP8_DYNAMIC", "not on cpu"),
    ("triton_scaled", "cpu", "FP8_DYNAMIC", "not on cpu"),
]


def faked(scheme: str, device: str, **changes: object) -> matmul.MatmulProblem:
    """Describe a layer on hardware that need not be here."""
    kind = "cpu" if device == "cpu" else "cuda"
    values = {
        "m": 16,
        "n": 4096,
        "k": 4096,
        "x_group": SCHEMES[scheme].activation,
        "w_group": SCHEMES[scheme].weight,
        "x_dtype": torch.bfloat16 if SCHEMES[scheme].activation is None else torch.float8_e4m3fn,
        "w_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
        "bias": False,
        "accum": "precise",
        "batch_invariant": False,
        "device_type": kind,
        "capability": GPU.get(device),
    }
    return matmul.MatmulProblem(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("backend", "device", "scheme"), MUST_RUN_ROWS)
def test_must_run(backend: str, device: str, scheme: str) -> None:
    choice = choose(matmul.BACKENDS, faked(scheme, device), backend)
    assert choice.backend == backend, choice.declined


@pytest.mark.parametrize(("backend", "device", "scheme", "word"), MUST_DECLINE_ROWS)
def test_must_decline_and_say_why(backend: str, device: str, scheme: str, word: str) -> None:
    choice = choose(matmul.BACKENDS, faked(scheme, device), backend)
    assert choice.module is None
    assert word in dict(choice.declined)[backend]


def test_the_must_run_table_notices_a_lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8kit.matmul.reference, "supports", lambda _: "out of order")
    choose.cache_clear()
    try:
        with pytest.raises(AssertionError, match="out of order"):
            test_must_run("reference", "cpu", "FP8")
    finally:
        choose.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_codes_run_without_torch_native(scheme: str, dtype: torch.dtype) -> None:
    x_dtype = torch.bfloat16 if SCHEMES[scheme].activation is None else dtype
    problem = faked(scheme, "sm90", w_dtype=dtype, x_dtype=x_dtype)
    assert choose(matmul.BACKENDS, problem, "torch_native").module is None
    assert choose(matmul.BACKENDS, problem, "reference").backend == "reference"
    assert choose(matmul.BACKENDS, problem).backend


@pytest.mark.parametrize("device", [*GPU, "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariance_is_served_everywhere_and_never_by_a_library(
    scheme: str, device: str
) -> None:
    problem = faked(scheme, device, batch_invariant=True)
    assert choose(matmul.BACKENDS, problem).backend not in ("", "torch_native", "dequantized")


@pytest.mark.parametrize(
    ("device", "scheme", "m", "backend"),
    [
        ("sm89", "FP8_BLOCK", 4096, "triton_scaled"),
        ("sm100", "FP8_BLOCK", 4096, "triton_scaled"),
        ("sm120", "FP8_DYNAMIC", 4096, "triton_scaled"),
        ("sm90", "MXFP8", 64, "triton_scaled"),
        ("sm90", "MXFP8", 128, "dequantized"),
        ("sm90", "FP8_WEIGHT_ONLY", 64, "triton_scaled"),
        ("sm90", "FP8_WEIGHT_ONLY", 128, "dequantized"),
        ("sm80", "FP8_DYNAMIC", 64, "triton_scaled"),
        ("sm80", "FP8_DYNAMIC", 128, "dequantized"),
    ],
)
def test_triton_serves_what_torch_lacks(device: str, scheme: str, m: int, backend: str) -> None:
    assert choose(matmul.BACKENDS, faked(scheme, device, m=m)).backend == backend


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("m", [1, 4096])
def test_batch_invariance_has_tensor_cores(device: str, m: int) -> None:
    for scheme in SCHEMES:
        problem = faked(scheme, device, m=m, batch_invariant=True)
        assert choose(matmul.BACKENDS, problem).backend == "triton_scaled"


def test_cpu_prefers_the_dense_matmul_to_the_definition() -> None:
    assert choose(matmul.BACKENDS, faked("FP8_DYNAMIC", "cpu")).backend == "dequantized"


@pytest.mark.parametrize("table", [matmul.BACKENDS, quantizers.BACKENDS], ids=["mm", "quantize"])
def test_every_table_ends_with_the_definition_and_has_unique_names(
    table: dispatch.BackendTable,
) -> None:
    names = [name for name, *_ in table]
    assert names[-1] == "reference"
    assert table[-1][2] == ()
    assert len(set(names)) == len(names)


@dataclass(frozen=True)
class Toy:
    device_type: str = "cpu"


def test_missing_dependency_is_a_reason() -> None:
    dispatch._load.cache_clear()
    import_error = dispatch._load("not_a_package_at_all.kernels")
    assert import_error == (None, "not_a_package_at_all is not installed")
    table = (("triton", "not_a_package_at_all", ()), ("reference", PATH, ()))
    choice = choose(table, Toy())
    assert choice.backend == "reference"
    assert choice.declined == (("triton", "not_a_package_at_all is not installed"),)


def test_a_missing_module_of_our_own_is_an_error() -> None:
    with pytest.raises(ImportError, match="fp8kit"):
        choose((("lost", "fp8kit.matmul.lost", ()),), Toy())


def test_device_types_are_checked_before_loading() -> None:
    choice = choose((("k", "fp8kit.matmul.lost", ("cuda", "xpu")),), Toy())
    assert choice.declined == (("k", "runs on cuda and xpu, not on cpu"),)


def test_only_considers_one_backend() -> None:
    problem = faked("FP8_DYNAMIC", "cpu")
    assert choose(matmul.BACKENDS, problem, "reference").backend == "reference"
    assert choose(matmul.BACKENDS, problem, "reference").declined == ()
    declined = choose(matmul.BACKENDS, problem, "torch_native").declined
    assert [name for name, _ in declined] == ["torch_native"]


def test_unsupported_lists_every_backend_with_its_reason() -> None:
    table = (
        ("first", PATH, ("cuda",)),
        ("second", "not_a_package_at_all", ()),
        ("third", "fp8kit.matmul.torch_native", ()),
    )
    problem = faked("FP8_DYNAMIC", "cpu")
    with pytest.raises(UnsupportedError) as caught:
        require(table, problem)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("No backend computes [M<=16, K=4096] per row @ [N=4096, K] per row")
    assert lines[1:4] == [
        "  first: runs on cuda, not on cpu",
        "  second: not_a_package_at_all is not installed",
        "  third: FP8 tensor cores start at sm89",
    ]


def test_disabled_backend_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DISABLED_BACKENDS", frozenset({"dequantized"}))
    choose.cache_clear()
    try:
        choice = choose(matmul.BACKENDS, faked("FP8_DYNAMIC", "cpu"))
    finally:
        choose.cache_clear()
    assert choice.backend == "reference"
    assert dict(choice.declined)["dequantized"] == "disabled by FP8KIT_DISABLE"


def test_disable_variable_is_read_at_import() -> None:
    code = (
        "import torch, fp8kit\n"
        "layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(64, 64))\n"
        "print(fp8kit.explain(layer).to_dict()[0]['backend'])"
    )
    environment = {**os.environ, "FP8KIT_DISABLE": " dequantized, torch_native ,"}
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["reference"]


def test_choice_prints_the_decision_and_the_reasons() -> None:
    text = str(choose(matmul.BACKENDS, faked("FP8_BLOCK", "cpu", bias=True)))
    lines = text.splitlines()
    assert lines[0] == (
        "[M<=16, K=4096] per 1x128 @ [N=4096, K] per 128x128 -> bfloat16 + bias, precise, on cpu"
    )
    assert lines[1] == "  dequantized   chosen"
    assert "  torch_native  declined: runs on cuda, not on cpu" in lines
    nothing = choose((("k", PATH, ("cuda",)),), Toy())
    assert "nothing fits" in str(nothing)


def test_problem_text_names_what_matters() -> None:
    problem = faked("FP8_WEIGHT_ONLY", "sm90", batch_invariant=True)
    assert str(problem) == (
        "[M<=16, K=4096] unquantized @ [N=4096, K] per row -> bfloat16, precise, batch invariant,"
        " on cuda sm90"
    )


@pytest.mark.parametrize(
    ("m", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (4097, 8192)]
)
def test_row_counts_fall_into_few_buckets(m: int, bucket: int) -> None:
    assert matmul.m_bucket(m) == bucket


def test_a_described_layer_is_the_problem_that_runs(device: torch.device) -> None:
    for scheme in SCHEMES.values():
        x_q = torch.zeros(5, 256, device=device).to(scheme.dtype)
        x = torch.zeros(5, 256, device=device) if scheme.activation is None else x_q
        w = torch.zeros(128, 256, device=device).to(scheme.dtype)
        groups = (scheme.activation, scheme.weight)
        ran = matmul.MatmulProblem.of(x, w, groups, torch.float32, None, "precise", False)
        described = matmul.linear_problem((128, 256), scheme, torch.float32, w.device, False, 5)
        assert ran == described


def test_every_backend_can_be_disabled_by_name() -> None:
    tables = (matmul.BACKENDS, quantizers.BACKENDS, FUSED_BACKENDS)
    assert {name for table in tables for name, *_ in table} == set(settings.BACKEND_NAMES)
