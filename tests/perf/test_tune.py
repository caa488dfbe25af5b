"""Tuning: only candidates with right results may win, and stored times are used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backend_tables
import fp8kit
from fp8kit.dispatch import timings
from fp8kit.dispatch.backends import choose, forget_tables
from fp8kit.dispatch.timings import DENSE, REJECTED, Table, table_for, tuned_path
from fp8kit.formats import SCHEMES, Scheme
from fp8kit.matmul import problem as matmul
from fp8kit.matmul import reference
from fp8kit.matmul.problem import MatmulBackend
from fp8kit.perf import operands as benched
from fp8kit.perf import tune
from fp8kit.perf.timing import QUICK, SUSTAINED, Case, Effort, copies_past_cache, time_cases
from fp8kit.perf.warmup import layer_requests, warmup

CPU = torch.device("cpu")
SHAPE = (96, 256)
Spoil = Callable[[Tensor], Tensor]


def timer_of(times: Mapping[str, float]) -> Callable[..., dict[str, float]]:
    """Return a timer that runs each case once and reports set times by the candidate's name."""

    def timer(
        cases: Mapping[str, Case], copies: int, effort: Effort, device: torch.device
    ) -> dict[str, float]:
        for case in cases.values():
            case(copies - 1)
        return {name: times.get(name.rpartition(" ")[2], 50.0) for name in cases}

    return timer


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Put a fast backend with spoiled results before the right one."""
    quick = MatmulBackend(run=reference.run)
    honest = MatmulBackend(run=reference.run)
    backend_tables.install(
        monkeypatch,
        matmul={"hopper_gemm": quick, "torch_native": honest},
        quantizers={"reference": fp8kit.quantizers.reference.BACKEND},
    )

    def install(spoil: Spoil) -> None:
        quick.configurations = lambda _: ("wide",)
        quick.run = lambda *a: spoil(reference.run(*a))
        choose.cache_clear()

    yield install
    choose.cache_clear()


def tuned(scheme: str = "FP8_DYNAMIC", accum: str = "precise", m: int = 70) -> tune.Outcome:
    request = tune.TuneRequest([SHAPE], [m], [Scheme.of(scheme)], accum)
    timer = timer_of({"hopper_gemm": 1.0, "hopper_gemm:wide": 2.0, "torch_native": 3.0, DENSE: 4.0})
    return tune.tune([request], CPU, timer=timer)


@pytest.mark.parametrize(("flops", "effort"), [(1e15, QUICK), (1e4, SUSTAINED)])
def test_long_layers_are_timed_until_power_limits_the_clock(
    flops: float,
    effort: Effort,
    backends: Callable[[Spoil], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends(lambda y: y)
    monkeypatch.setattr(tune, "_limits", lambda *_: (1e15, flops))
    asked: list[Effort] = []

    def timer(
        cases: Mapping[str, Case], copies: int, effort: Effort, device: torch.device
    ) -> dict[str, float]:
        asked.append(effort)
        return dict.fromkeys(cases, 1.0)

    tune.tune([tune.TuneRequest([SHAPE], [70], [Scheme.of("FP8_DYNAMIC")])], CPU, timer=timer)
    assert asked == [effort]


def one_row(y: Tensor) -> Tensor:
    y = y.clone()
    y[-1] *= 1.01
    return y


class Racing:
    """Right within every bound, but with different results at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        y = y.clone()
        y[0, self.calls % 2] = torch.nextafter(y[0, 0].float(), torch.tensor(9e9)).to(y.dtype)
        y.view(torch.int16)[0, self.calls % 7] ^= 1
        return y


def broken(y: Tensor) -> Tensor:
    raise RuntimeError("an illegal memory access")


def holed(y: Tensor) -> Tensor:
    y = y.clone()
    y[1, 1] = float("nan")
    return y


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_right_candidate_is_timed(scheme: str, backends: Callable[[Spoil], None]) -> None:
    backends(lambda y: y)
    outcome = tuned(scheme)
    assert outcome.faults == []
    ((case, times),) = outcome.table.rows.items()
    assert (case.m, case.n, case.k) == (128, *SHAPE)
    assert times == {"hopper_gemm": 1.0, "hopper_gemm:wide": 2.0, "torch_native": 3.0, DENSE: 4.0}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (one_row, "relative error"),
        (lambda y: y * 0.99, "relative error"),
        (lambda y: torch.where(y.mean() > 3, y * 0.98, y), "on data of one sign"),
        (Racing(), "two runs"),
        (broken, "illegal memory access"),
        (holed, "not finite"),
    ],
    ids=["one-row", "biased", "short-sums", "racing", "broken", "holed"],
)
def test_a_wrong_candidate_cannot_win(
    spoil: Spoil, said: str, backends: Callable[[Spoil], None]
) -> None:
    backends(spoil)
    outcome = tuned()
    assert len(outcome.faults) == 2  # in both of its configurations
    assert all(said in fault for fault in outcome.faults)
    (times,) = outcome.table.rows.values()
    rejected = {"hopper_gemm": REJECTED, "hopper_gemm:wide": REJECTED}
    assert times == {"torch_native": 3.0, DENSE: 4.0, **rejected}
    assert "rejected: hopper_gemm on" in str(outcome)
    assert "torch_native 3.0 µs, 1.33 x bf16" in str(outcome)


def test_fast_sums_may_be_biased_on_data_of_one_sign(backends: Callable[[Spoil], None]) -> None:
    backends(lambda y: torch.where(y.mean() > 3, y * 0.98, y))
    assert tuned(accum="fast").faults == []
    backends(lambda y: y * 0.98)
    assert len(tuned(accum="fast").faults) == 2


def test_decoding_backends_are_no_candidates_beside_others() -> None:
    dense = benched.dense_weights(SHAPE, CPU)
    problem = benched.operands(dense, 4, Scheme.of("FP8_DYNAMIC"), "precise").problem()
    assert benched.candidates(problem) == [("dequantized", "")]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_layer_that_is_timed_is_the_layer_that_runs(scheme: str) -> None:
    dense = benched.dense_weights(SHAPE, CPU)
    layer = benched.operands(dense, 5, Scheme.of(scheme), "precise")
    weight = layer.weights[1]
    wanted = fp8kit.linear(layer.x, weight, scheme=scheme, input_scale=layer.input_scale)
    backend = choose(matmul.MATMUL_BACKENDS, layer.problem()).backend
    assert torch.equal(layer.layer(backend)(1), wanted)


def test_tuning_stops_in_time_and_says_what_is_left(backends: Callable[[Spoil], None]) -> None:
    backends(lambda y: y)
    request = tune.TuneRequest([SHAPE, (32, 64)], [1], [Scheme.of("FP8_DYNAMIC")])
    outcome = tune.tune([request], CPU, timer=timer_of({}), seconds=-1.0)
    assert outcome.table.rows == {}
    assert "2 shapes were not reached" in str(outcome)


@pytest.mark.parametrize("empty", [([SHAPE], [0]), ([(0, 4)], [1])], ids=str)
def test_empty_layers_cannot_be_tuned(empty: tuple[list[tuple[int, int]], list[int]]) -> None:
    with pytest.raises(ValueError, match="positive"):
        tune.tune([tune.TuneRequest(*empty, [Scheme.of("FP8")])], CPU, timer=timer_of({}))


def test_what_is_kept_is_used(cache_dir: Path) -> None:
    case = timings.Case("row*row", "precise", 64, 96, 256)
    for us in (7.0, 5.0):
        tune.keep(Table("Toy GPU", 1e12, 1e15, {case: {"torch_native": us}}))
    other = timings.Case("row*row", "precise", 1, 96, 256)
    tune.keep(Table("Toy GPU", 1e12, 1e15, {other: {"torch_native": 1.0}}))
    found = table_for("Toy GPU")
    assert found is not None
    assert found.rows == {case: {"torch_native": 5.0}, other: {"torch_native": 1.0}}
    assert len(list((cache_dir / "tables").glob("*.json"))) == 1


def test_shipped_requests_cover_every_scheme_and_family() -> None:
    requests = tune.shipped_requests()
    seen = {s.name for w in requests for s in w.schemes}
    assert seen == {"FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "FP8", "FP8_WEIGHT_ONLY"}
    shapes = {s for w in requests for s in w.shapes}
    assert all(set(family) <= shapes for family in benched.MODEL_SHAPES.values())
    assert {w.accum for w in requests} == {"precise", "fast"}


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("4096x14336", [(4096, 14336)]),
        ("1x2, 3X4,1x2", [(1, 2), (3, 4)]),
        ("Wan 14B,7x8", [*benched.MODEL_SHAPES["Wan 14B"], (7, 8)]),
    ],
)
def test_shapes_are_read(text: str, shapes: list[tuple[int, int]]) -> None:
    assert benched.parse_shapes(text) == shapes


@pytest.mark.parametrize("text", ["", "4096", "axb", "0x4", "1x2x3", "Lama 8B"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Shapes are NxK, or one of Llama 8B"):
        benched.parse_shapes(text)


def test_limits_of_a_device_without_a_table_are_measured() -> None:
    table = tune.limits(CPU, timer_of({"copy": 10.0, "product": 100.0}))
    assert table.device == "cpu"
    assert table.bandwidth == pytest.approx(2 * 512 * 4096 * 2 / 10e-6)
    assert table.flops == pytest.approx(4 * 512**3 / 100e-6)


def test_the_clock_of_a_cpu_orders_cases() -> None:
    small, large = torch.randn(32, 32), torch.randn(512, 512)
    cases = {"small": lambda _: small @ small, "large": lambda _: large @ large}
    times = time_cases(cases, 2, Effort(0.5, 3), CPU)
    assert 0 < times["small"] < times["large"]


def test_every_copy_is_used() -> None:
    seen: set[int] = set()
    time_cases({"a": seen.add}, 5, Effort(0.01, 1), CPU)
    assert seen == set(range(5))
    assert copies_past_cache(1, CPU) == 64
    assert copies_past_cache(2**40, CPU) == 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(128, 256), nn.Linear(128, 128)
        self.v_proj, self.o_proj = nn.Linear(128, 128), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x)) + self.k_proj(x) + self.v_proj(x)


def test_warmup_runs_every_distinct_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Block(), Block())
    fp8kit.convert(model)
    ran: list[tuple[int, int, int]] = []
    dequantized = choose(matmul.MATMUL_BACKENDS, model[0].o_proj.problem(1)).implementation

    def run(operands: matmul.MatmulOperands, problem: matmul.MatmulProblem) -> Tensor:
        ran.append((operands.x.shape[0], operands.w.shape[0], operands.x.shape[1]))
        return dequantized.run(operands, problem)

    watched = dataclasses.replace(dequantized, run=run)
    backend_tables.install(monkeypatch, matmul={"dequantized": watched})
    assert warmup(model, m=[1, 600]) == 4
    joined = [(1, 512, 128)]
    separate = [(600, n, 128) for n in (256, 128, 128)]
    assert sorted(ran) == sorted([*joined, *separate, (1, 128, 256), (600, 128, 256)])
    before = list(ran)
    with torch.no_grad():  # biases want gradients, for which siblings compute alone
        model(torch.randn(1, 128))
    assert set(ran[len(before) :]) <= set(before)


def test_warmup_leaves_no_state_behind() -> None:
    model = nn.Sequential(Block())
    fp8kit.convert(model)
    x = torch.randn(3, 128)
    wanted = model(x)
    assert 2 * warmup(model, m=3) == warmup(model, m=[1, 3])
    assert torch.equal(model(x), wanted)


def test_warmup_tunes_the_shapes_that_run() -> None:
    model = nn.Sequential(Block())
    fp8kit.convert(model)
    layers = [m for m in model.modules() if isinstance(m, fp8kit.Fp8Linear)]
    alone, joined = layer_requests(layers, [1, 600])
    assert set(alone.shapes) == {(256, 128), (128, 128), (128, 256)}
    assert list(alone.rows) == [1, 600]
    assert (list(joined.shapes), list(joined.rows)) == ([(512, 128)], [1])


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (nn.Sequential(nn.Linear(64, 64)), {}, "holds 0 FP8 layers"),
        (fp8kit.Fp8Linear(64, 64, device="meta"), {}, "on meta"),
        (fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64)), {"m": 0}, "positive"),
        (fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64)), {"m": []}, "positive"),
        (fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64)), {"tune": True}, "Only CUDA devices"),
    ],
    ids=["dense", "meta", "zero", "none", "cpu"],
)
def test_warmup_refuses_what_cannot_run(
    model: nn.Module, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        warmup(model, **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("cache_dir")
def test_tuning_on_a_gpu_fills_a_table() -> None:
    schemes = [Scheme.of(n) for n in ("FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY")]
    request = tune.TuneRequest([(1024, 2048)], [1, 300], schemes)
    outcome = tune.tune([request], torch.device("cuda", 0))
    assert outcome.faults == []
    assert len(outcome.table.rows) == 6
    tune.keep(outcome.table)
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(2048, 1024).bfloat16().cuda())
    found = fp8kit.explain(layer, m=1).to_dict()[0]
    assert found["measured_m"] == 1
    assert found["us"] is not None
    assert json.dumps(found)
    assert warmup(nn.Sequential(layer), m=[1], tune=True) == 1


class OutOfResources(Exception):
    """Like Triton's error of this name, no ``RuntimeError``."""


def too_large(y: Tensor) -> Tensor:
    raise OutOfResources("shared memory")


def without_memory(y: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("24 GiB")


def test_a_compiler_that_gives_up_rejects_its_candidate_alone(
    backends: Callable[[Spoil], None],
) -> None:
    backends(too_large)
    assert all("OutOfResources: shared memory" in fault for fault in tuned().faults)


def test_a_full_gpu_is_no_fault_of_a_candidate(backends: Callable[[Spoil], None]) -> None:
    backends(without_memory)
    with pytest.raises(torch.OutOfMemoryError, match="24 GiB"):
        tuned()


def test_times_are_stored_shape_by_shape(backends: Callable[[Spoil], None]) -> None:
    backends(lambda y: y)
    request = tune.TuneRequest([SHAPE, (64, 64)], [1], [Scheme.of("FP8_DYNAMIC")])
    timer = timer_of({"hopper_gemm": 1.0, "hopper_gemm:wide": 2.0, "torch_native": 3.0, DENSE: 4.0})
    stored: list[int] = []
    outcome = tune.tune(
        [request], CPU, timer=timer, store=lambda table: stored.append(len(table.rows))
    )
    assert stored == [1, 2]
    assert len(outcome.table.rows) == 2


def test_what_was_rejected_is_not_dispatched(
    backends: Callable[[Spoil], None], cache_dir: Path
) -> None:
    """A rejected candidate runs neither as unmeasured nor by its time in the wheel's table."""
    backends(one_row)
    outcome = tuned()
    (case,) = outcome.table.rows
    shipped = Table("Toy", 1e12, 1e15, {case: {"hopper_gemm": 0.5, DENSE: 4.0}})
    shipped.merge(outcome.table)
    problem = benched.operands(
        benched.dense_weights(SHAPE, CPU), 70, Scheme.of("FP8_DYNAMIC"), "precise"
    ).problem()
    shipped.write(tuned_path("Toy"))
    forget_tables()
    problem = dataclasses.replace(problem, device="Toy")
    choice = choose(benched.MATMUL_BACKENDS, problem)
    assert choice.backend == "torch_native"
    assert "computed something else" in dict(choice.declined)["hopper_gemm"]
    # a new tuning still tries it
    assert ("hopper_gemm", "") in benched.candidates(problem)
