from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import fresh
from backend_tables import table_of
from fp8kit.dispatch import backends as dispatch
from fp8kit.dispatch import device as dispatch_device
from fp8kit.dispatch.backends import choose, require
from fp8kit.dispatch.timings import DENSE, REJECTED, Measured, table_for
from fp8kit.errors import UnsupportedError
from fp8kit.formats import BLOCK, ROW, SCHEMES, GroupShape
from fp8kit.fused.problem import FUSED_BACKENDS
from fp8kit.matmul import problem as matmul
from fp8kit.moe.problem import MOE_BACKENDS
from fp8kit.quantizers import problem as quantizers
from fp8kit.runtime import settings

PATH = "fp8kit.matmul.reference"
GPU = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}

# Problems that each backend must accept. A backend may learn more, but not lose a row: no bug can
# make the tests pass by declining everything.
MUST_RUN = {
    "hopper_gemm": {
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
    "triton_gemm": {**dict.fromkeys(GPU, tuple(SCHEMES)), "cpu": ()},
    "dequantized": dict.fromkeys((*GPU, "cpu"), tuple(SCHEMES)),
    "reference": dict.fromkeys((*GPU, "cpu"), tuple(SCHEMES)),
}
MUST_RUN_ROWS = [
    (backend, device, scheme)
    for backend, devices in MUST_RUN.items()
    for device, schemes in devices.items()
    for scheme in schemes
]
# problems that the hardware or library cannot compute, and a word that the reason must contain
MUST_DECLINE_ROWS = [
    ("torch_native", "sm80", "FP8_DYNAMIC", "sm89"),
    ("torch_native", "sm89", "FP8_BLOCK", "sm90 only"),
    ("torch_native", "sm100", "FP8_BLOCK", "sm90 only"),
    ("torch_native", "sm90", "MXFP8", "sm100"),
    ("torch_native", "sm120", "FP8_DYNAMIC", "row-wise"),
    ("torch_native", "sm90", "FP8_WEIGHT_ONLY", "16-bit"),
    ("torch_native", "cpu", "FP8_DYNAMIC", "not on cpu"),
    ("triton_gemm", "cpu", "FP8_DYNAMIC", "not on cpu"),
]


def faked(scheme: str, place: str, /, **changes: object) -> matmul.MatmulProblem:
    """Describe a layer on hardware that need not exist here."""
    kind = "cpu" if place == "cpu" else "cuda"
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
        "capability": GPU.get(place),
    }
    return matmul.MatmulProblem(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("backend", "device", "scheme"), MUST_RUN_ROWS)
def test_must_run(backend: str, device: str, scheme: str) -> None:
    choice = choose(matmul.MATMUL_BACKENDS, faked(scheme, device), backend)
    assert choice.backend == backend, choice.declined


@pytest.mark.parametrize(("backend", "device", "scheme", "word"), MUST_DECLINE_ROWS)
def test_must_decline_and_say_why(backend: str, device: str, scheme: str, word: str) -> None:
    choice = choose(matmul.MATMUL_BACKENDS, faked(scheme, device), backend)
    assert choice.implementation is None
    assert word in dict(choice.declined)[backend]


def test_the_must_run_table_notices_what_does_not_run() -> None:
    with pytest.raises(AssertionError, match="runs on cuda, not on cpu"):
        test_must_run("torch_native", "cpu", "FP8")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_codes_run_without_torch_native(scheme: str, dtype: torch.dtype) -> None:
    x_dtype = torch.bfloat16 if SCHEMES[scheme].activation is None else dtype
    problem = faked(scheme, "sm90", w_dtype=dtype, x_dtype=x_dtype)
    assert choose(matmul.MATMUL_BACKENDS, problem, "torch_native").implementation is None
    assert choose(matmul.MATMUL_BACKENDS, problem, "reference").backend == "reference"
    assert choose(matmul.MATMUL_BACKENDS, problem).backend


AMD = {
    "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
    "gfx1201": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("known", AMD)
@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_TENSOR"])
def test_amd_multiplies_its_own_codes_by_tensor_and_row(scheme: str, known: str) -> None:
    codes = {"x_dtype": AMD[known], "w_dtype": AMD[known]}
    problem = faked(scheme, "gpu", architecture=known, **codes)
    assert dispatch_device.native_codes(known) == AMD[known]
    assert choose(matmul.MATMUL_BACKENDS, problem).backend == "torch_native"
    assert known in str(problem)
    other = next(dtype for dtype in AMD.values() if dtype != AMD[known])
    problem = dataclasses.replace(problem, x_dtype=other, w_dtype=other)
    choice = choose(matmul.MATMUL_BACKENDS, problem)
    assert choice.backend == "dequantized"
    assert "fp8kit.recode" in dict(choice.declined)["torch_native"]


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8"])
def test_amd_has_no_blocks_and_older_ones_have_no_fp8(scheme: str) -> None:
    choice = choose(matmul.MATMUL_BACKENDS, faked(scheme, "gpu", architecture="gfx950"))
    assert choice.backend == "dequantized"
    assert "per tensor and per row" in dict(choice.declined)["torch_native"]
    older = choose(matmul.MATMUL_BACKENDS, faked("FP8_DYNAMIC", "gpu", architecture="gfx90a"))
    assert older.backend == "dequantized"
    assert "not of gfx90a" in dict(older.declined)["torch_native"]


@pytest.mark.parametrize("group", [ROW, BLOCK], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_ampere_decodes_weights_of_rows_and_blocks_in_registers(
    group: GroupShape, capability: tuple[int, int], out_dtype: torch.dtype
) -> None:
    kind = {"x_group": None, "w_group": group, "x_dtype": out_dtype, "out_dtype": out_dtype}
    for m in (1, 16, 64):
        problem = faked("FP8_WEIGHT_ONLY", "sm80", m=m, **(kind | {"capability": capability}))
        assert choose(matmul.MATMUL_BACKENDS, problem).backend == "triton_gemm"
    choice = choose(matmul.MATMUL_BACKENDS, dataclasses.replace(problem, m=128))
    assert choice.backend == "dequantized"
    assert "over 64 rows" in dict(choice.declined)["triton_gemm"]


@pytest.mark.parametrize("device", [*GPU, "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariance_is_served_everywhere_and_never_by_a_library(
    scheme: str, device: str
) -> None:
    problem = faked(scheme, device, batch_invariant=True)
    assert choose(matmul.MATMUL_BACKENDS, problem).backend not in (
        "",
        "torch_native",
        "dequantized",
    )


# backends whose order of sums does not depend on M; all others decline with a reason
INVARIANT = ("triton_gemm", "reference")


@pytest.mark.parametrize("place", [*GPU, "cpu"])
@pytest.mark.parametrize("backend", [name for name, *_ in matmul.MATMUL_BACKENDS])
def test_batch_invariance_is_promised_or_declined(backend: str, place: str) -> None:
    for scheme in SCHEMES:
        if choose(matmul.MATMUL_BACKENDS, faked(scheme, place), backend).implementation is None:
            continue
        for m in (1, 64, 4096):
            problem = faked(scheme, place, batch_invariant=True, m=m)
            choice = choose(matmul.MATMUL_BACKENDS, problem, backend)
            assert (choice.implementation is not None) == (backend in INVARIANT)
            assert backend in INVARIANT or len(dict(choice.declined)[backend]) > 10


@pytest.mark.parametrize("place", [*GPU, "cpu"])
def test_invariance_reaches_one_backend_at_every_row_count(place: str) -> None:
    """Two backends would sum in two different orders."""
    for scheme, device in itertools.product(SCHEMES, ("", "NVIDIA H200")):
        problems = [
            faked(scheme, place, batch_invariant=True, m=2**i, device=device) for i in range(15)
        ]
        assert len({choose(matmul.MATMUL_BACKENDS, p).backend for p in problems}) == 1


@pytest.mark.parametrize("place", [*GPU, "cpu"])
@pytest.mark.parametrize("backend", [name for name, *_ in matmul.MATMUL_BACKENDS])
def test_every_backend_that_runs_takes_both_kinds_of_sums(backend: str, place: str) -> None:
    for scheme, accum in itertools.product(SCHEMES, ("precise", "fast")):
        plain = choose(matmul.MATMUL_BACKENDS, faked(scheme, place), backend)
        asked = choose(matmul.MATMUL_BACKENDS, faked(scheme, place, accum=accum), backend)
        assert asked.backend == plain.backend
        assert asked.implementation is None or asked.problem.accum == accum


@pytest.mark.parametrize(
    ("device", "scheme", "m", "backend"),
    [
        ("sm89", "FP8_BLOCK", 4096, "triton_gemm"),
        ("sm100", "FP8_BLOCK", 4096, "triton_gemm"),
        ("sm120", "FP8_DYNAMIC", 4096, "triton_gemm"),
        ("sm90", "MXFP8", 64, "triton_gemm"),
        ("sm90", "MXFP8", 128, "dequantized"),
        ("sm90", "FP8_WEIGHT_ONLY", 64, "triton_gemm"),
        ("sm90", "FP8_WEIGHT_ONLY", 128, "dequantized"),
        ("sm80", "FP8_DYNAMIC", 64, "triton_gemm"),
        ("sm80", "FP8_DYNAMIC", 128, "dequantized"),
    ],
)
def test_triton_serves_what_torch_lacks(device: str, scheme: str, m: int, backend: str) -> None:
    assert choose(matmul.MATMUL_BACKENDS, faked(scheme, device, m=m)).backend == backend


@pytest.mark.parametrize(("m", "backend"), [(512, "triton_gemm"), (1024, "torch_native")])
def test_few_rows_are_no_reason_to_copy_a_weight(m: int, backend: str) -> None:
    for device in ("sm89", "sm90"):
        problem = faked("FP8_DYNAMIC", device, m=m, k=4104)
        assert choose(matmul.MATMUL_BACKENDS, problem).backend == backend


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("m", [1, 4096])
def test_batch_invariance_has_tensor_cores(device: str, m: int) -> None:
    for scheme in SCHEMES:
        problem = faked(scheme, device, m=m, batch_invariant=True)
        assert choose(matmul.MATMUL_BACKENDS, problem).backend == "triton_gemm"


def test_cpu_prefers_the_dense_matmul_to_the_definition() -> None:
    assert choose(matmul.MATMUL_BACKENDS, faked("FP8_DYNAMIC", "cpu")).backend == "dequantized"


@pytest.mark.parametrize(
    "table", [matmul.MATMUL_BACKENDS, quantizers.QUANTIZER_BACKENDS], ids=["mm", "quantize"]
)
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


@dataclass(frozen=True)
class Timed:
    """A problem that three backends support; two of them were timed."""

    us: tuple[tuple[str, float], ...]
    device_type: str = "cpu"
    configuration: str | None = None

    def measured(self) -> Measured:
        return Measured(16, dict(self.us))


TIMED = ("first", "second", "third")


@pytest.fixture
def timed_backends() -> dict[str, dispatch.Backend]:
    """Return backends that accept everything; the second can be cut in two ways."""
    backends = {name: dispatch.Backend() for name in TIMED}
    backends["second"].configurations = lambda _: ("narrow", "wide")
    return backends


@pytest.fixture
def timed_table(
    timed_backends: dict[str, dispatch.Backend], monkeypatch: pytest.MonkeyPatch
) -> dispatch.BackendTable:
    return table_of(monkeypatch, timed_backends)


@pytest.mark.parametrize(
    ("us", "chosen", "configuration", "expected"),
    [
        ({}, "first", "", None),
        ({"first": 2.0, "second": 1.0}, "second", "", 1.0),
        ({"first": 1.0, "second": 2.0}, "first", "", 1.0),
        ({"second": 1.0, "third": 2.0}, "first", "", None),  # a new backend waits for no table
        ({"first": 2.0, "second:wide": 1.0, "second": 1.5}, "second", "wide", 1.0),
        ({"first": 2.0, "second:gone": 1.0, "second": 1.5}, "second", "", 1.5),
        ({"first": 2.0, "second:gone": 1.0}, "first", "", 2.0),
        ({"first": 2.0, "unheard_of": 1.0, "bf16": 0.5}, "first", "", 2.0),
        ({"first": REJECTED, "second": 1.0}, "second", "", 1.0),
        ({"first": REJECTED}, "second", "", None),
        ({"first": 2.0, "second": REJECTED, "second:wide": 1.0}, "second", "wide", 1.0),
        ({"first": 2.0, "second": 1.0, "second:wide": REJECTED}, "second", "", 1.0),
    ],
    ids=str,
)
def test_the_fastest_measured_backend_runs(
    us: dict[str, float],
    chosen: str,
    configuration: str,
    expected: float | None,
    timed_table: dispatch.BackendTable,
) -> None:
    choice = choose.__wrapped__(timed_table, Timed(tuple(us.items())))
    assert (choice.backend, choice.configuration) == (chosen, configuration)
    assert choice.problem.configuration == configuration
    assert choice.us == expected
    assert choice.measured_m == (0 if expected is None else 16)
    assert {name for name, _ in choice.declined} == set(TIMED) - {chosen}


def test_a_table_never_selects_a_backend_that_declines(
    timed_table: dispatch.BackendTable, timed_backends: dict[str, dispatch.Backend]
) -> None:
    timed_backends["second"].supports = lambda _: "too odd"
    choice = choose.__wrapped__(timed_table, Timed((("first", 2.0), ("second", 1.0))))
    assert choice.backend == "first"
    assert dict(choice.declined)["second"] == "too odd"


def test_the_choice_tells_times_and_why_the_others_lost(timed_table: dispatch.BackendTable) -> None:
    times = (("first", 2.0), ("second:wide", 1.0), ("bf16", 3.0))
    choice = choose.__wrapped__(timed_table, Timed(times))
    assert str(choice).splitlines()[1:] == [
        "  second         chosen (wide), 1.0 µs, bf16 3.0 µs (measured at m=16)",
        "  first          declined: 2.0 µs, slower than second",
        "  third          declined: not measured, and after second in the order",
    ]


@pytest.mark.parametrize("wanted", ["narrow", "wide", ""])
def test_a_wanted_configuration_is_kept(wanted: str, timed_table: dispatch.BackendTable) -> None:
    times = (("first", 2.0), ("second:wide", 1.0), ("second:narrow", 3.0))
    problem = Timed(times, configuration=wanted)
    assert choose.__wrapped__(timed_table, problem, "second").problem.configuration == wanted


def test_what_was_rejected_runs_only_if_it_is_named(timed_table: dispatch.BackendTable) -> None:
    problem = Timed((("first", REJECTED), ("second", REJECTED), ("third", REJECTED)))
    choice = choose.__wrapped__(timed_table, problem)
    assert choice.implementation is None
    assert all("computed something else" in why for _, why in choice.declined)
    # the backend may have been fixed meanwhile, so it is measured again
    assert choose.__wrapped__(timed_table, problem, "second").backend == "second"


@pytest.mark.parametrize(
    ("us", "yields", "chosen"),
    [
        ({}, "", "first"),
        ({}, "second", "second"),
        ({}, "third", "second"),
        ({}, "gone", "first"),
        ({"second": 1.0, "third": 2.0}, "second", "second"),
        ({"first": 1.0, "second": 2.0}, "second", "first"),
        ({"second": REJECTED}, "second", "first"),
    ],
    ids=str,
)
def test_a_backend_that_yields_waits_for_its_times(
    us: dict[str, float],
    yields: str,
    chosen: str,
    timed_table: dispatch.BackendTable,
    timed_backends: dict[str, dispatch.Backend],
) -> None:
    timed_backends["first"].yields_to = lambda _: yields
    choice = choose.__wrapped__(timed_table, Timed(tuple(us.items())))
    assert choice.backend == chosen
    assert {name for name, _ in choice.declined} == set(TIMED) - {chosen}


def test_nobody_yields_to_what_would_copy_the_weight(
    timed_table: dispatch.BackendTable, timed_backends: dict[str, dispatch.Backend]
) -> None:
    timed_backends["first"].yields_to = lambda _: "second"
    timed_backends["second"].pads = lambda _: True
    choice = choose.__wrapped__(timed_table, Timed((("second", 1.0),)))
    assert choice.backend == "first"


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({"accum": "fast", "n": 8192}, "torch_native"),
        ({"accum": "fast", "n": 4100}, "hopper_gemm"),
        ({"accum": "fast", "out_dtype": torch.float16}, "hopper_gemm"),
        ({"accum": "fast", "m": 256}, "hopper_gemm"),
        ({"accum": "fast", "scheme": "FP8_BLOCK"}, "hopper_gemm"),
        ({"scheme": "FP8"}, "torch_native"),
        ({"scheme": "FP8", "m": 512}, "hopper_gemm"),
        ({}, "hopper_gemm"),
    ],
    ids=str,
)
def test_torch_comes_first_where_its_sums_take_less_time(
    changes: dict[str, object], backend: str
) -> None:
    changes = dict(changes)
    scheme = str(changes.pop("scheme", "FP8_DYNAMIC"))
    problem = faked(scheme, "sm90", **{"m": 4096, **changes})
    choice = choose.__wrapped__(matmul.MATMUL_BACKENDS, problem)
    assert choice.backend == backend
    other = {"hopper_gemm": "torch_native", "torch_native": "hopper_gemm"}[backend]
    why = "yields to" if backend == "torch_native" else "after hopper_gemm in the order"
    assert why in dict(choice.declined)[other]


@pytest.mark.parametrize(
    ("scheme", "accum"),
    [("FP8_DYNAMIC", "fast"), ("FP8", "fast"), ("FP8_BLOCK", "precise"), ("MXFP8", "precise")],
)
def test_groups_along_k_have_no_fast_sums_of_their_own(scheme: str, accum: str) -> None:
    assert faked(scheme, "sm90", accum="fast").case().accum == accum
    assert faked(scheme, "sm90").case().accum == "precise"


def test_measured_times_of_the_h200_choose_what_was_fastest() -> None:
    table = table_for("NVIDIA H200")
    assert table is not None
    order = [name for name, *_ in matmul.MATMUL_BACKENDS]
    for case in table.rows:
        scheme = {"row*row": "FP8_DYNAMIC", "1x128*128x128": "FP8_BLOCK"}.get(case.scales)
        if scheme is None:
            continue
        changes = {"m": case.m, "n": case.n, "k": case.k, "accum": case.accum}
        choice = choose(
            matmul.MATMUL_BACKENDS, faked(scheme, "sm90", device=table.device, **changes)
        )
        if choice.us is None:  # one that was not measured stands before all that were
            assert choice.backend == order[0] or choice.backend not in table.rows[case]
        else:
            assert choice.us == min(us for c, us in table.rows[case].items() if c != DENSE)


def test_tables_speak_of_16_bit_layers_alone() -> None:
    known = faked("FP8_DYNAMIC", "sm90", device="NVIDIA H200")
    found = known.measured()
    assert found is not None
    fp16 = faked("FP8_DYNAMIC", "sm90", device="NVIDIA H200", out_dtype=torch.float16).measured()
    assert fp16 is not None  # torch writes fp16 by way of fp32
    assert set(found.us) - set(fp16.us) == {c for c in found.us if c.startswith("torch_native")}
    assert all(found.us[c] == us for c, us in fp16.us.items())
    fp16 = {"device": "NVIDIA H200", "out_dtype": torch.float16}
    single = faked("FP8", "sm90", **fp16).measured()
    assert single is not None  # in one kernel of torch's as well
    assert "torch_native" in single.us
    wide = faked("FP8_WEIGHT_ONLY", "sm90", x_dtype=torch.float16, m=4096, **fp16).measured()
    assert wide is not None
    assert "dequantized" in wide.us
    for change in (
        {"out_dtype": torch.float32},
        {"w_dtype": torch.float8_e5m2},
        {"x_dtype": torch.float8_e5m2},
        {"device": ""},
        {"device": "NVIDIA Unheard Of"},
        {"batch_invariant": True},
    ):
        assert (
            faked("FP8_DYNAMIC", "sm90", **{"device": "NVIDIA H200", **change}).measured() is None
        )


@pytest.mark.parametrize(
    ("n", "k", "m"), [(18424, 1408, 4096), (50264, 2048, 256), (128264, 4096, 32)]
)
def test_a_layer_that_libraries_pad_runs_on_the_own_kernel(n: int, k: int, m: int) -> None:
    choice = choose(
        matmul.MATMUL_BACKENDS, faked("FP8_DYNAMIC", "sm90", device="NVIDIA H200", n=n, k=k, m=m)
    )
    assert choice.backend == "hopper_gemm"


def test_missing_dependency_is_a_reason() -> None:
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
    assert choose(matmul.MATMUL_BACKENDS, problem, "reference").backend == "reference"
    assert choose(matmul.MATMUL_BACKENDS, problem, "reference").declined == ()
    declined = choose(matmul.MATMUL_BACKENDS, problem, "torch_native").declined
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
        "  third: FP8 tensor cores of NVIDIA GPUs start at sm89",
    ]


def test_a_backend_that_is_disabled_when_imported_is_a_reason() -> None:
    code = (
        "import torch, fp8kit\n"
        "layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(64, 64))\n"
        "found = fp8kit.explain(layer).to_dict()[0]\n"
        "print(found['backend'], found['declined']['dequantized'], sep='\\n')"
    )
    out = fresh.run(code, variables={"FP8KIT_DISABLE": " dequantized, torch_native ,"})
    assert out.stdout.splitlines() == ["reference", "disabled by FP8KIT_DISABLE"]


def test_choice_prints_the_decision_and_the_reasons() -> None:
    text = str(choose(matmul.MATMUL_BACKENDS, faked("FP8_BLOCK", "cpu", bias=True)))
    lines = text.splitlines()
    assert lines[0] == (
        "[M<=16, K=4096] per 1x128 @ [N=4096, K] per 128x128 -> bfloat16 + bias, precise, on cpu"
    )
    assert lines[1] == "  dequantized    chosen"
    assert "  torch_native   declined: runs on cuda, not on cpu" in lines
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
    tables = (matmul.MATMUL_BACKENDS, quantizers.QUANTIZER_BACKENDS, FUSED_BACKENDS, MOE_BACKENDS)
    assert {name for table in tables for name, *_ in table} == set(settings.BACKEND_NAMES)


def test_a_gpu_of_amd_is_no_hopper(
    monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]
) -> None:
    gpu = torch.device("cuda", 99)  # facts about a GPU are cached
    faked_cuda(
        get_device_capability=lambda _: (9, 4), get_device_name=lambda _: "AMD Instinct MI300X"
    )
    assert dispatch_device.capability(gpu) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch_device.capability(gpu) is None
    for scheme in SCHEMES:
        problem = faked(scheme, "sm90", capability=dispatch_device.capability(gpu))
        chosen = choose(matmul.MATMUL_BACKENDS, problem).backend
        assert chosen in ("triton_gemm", "dequantized")  # the former in its interpreter alone
