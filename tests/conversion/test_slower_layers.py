"""Layers that FP8 does not make faster at the given row counts stay dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backend_tables
import fp8kit
from fp8kit.conversion import slower_layers
from fp8kit.conversion.report import Record, Report
from fp8kit.conversion.siblings import joined_shapes
from fp8kit.dispatch.backends import forget_tables
from fp8kit.dispatch.timings import Case, Table, tuned_path
from fp8kit.formats import SCHEMES
from fp8kit.matmul import torch_native
from fp8kit.modules.joining import can_join, would_join

FIRST = "torch_native"
JOINED = ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int], str], None]:
    """Return a function that makes layers claim to be on a GPU, which need not exist."""

    def pretend(capability: tuple[int, int], name: str) -> None:
        real = slower_layers.linear_problem
        gpu = {"device_type": "cuda", "capability": capability, "device": name}
        monkeypatch.setattr(
            slower_layers,
            "linear_problem",
            lambda *a, **k: dataclasses.replace(real(*a, **k), **gpu),
        )

    return pretend


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, on_gpu: Callable[..., None]
) -> Callable[[dict[Case, tuple[float, float]]], None]:
    """Pretend that layers run on a GPU with a table of (FP8, bf16) times."""
    on_gpu((8, 9), "Toy GPU")
    backend_tables.install(monkeypatch, slower_layers={FIRST: torch_native.BACKEND})

    def pretend(times: dict[Case, tuple[float, float]]) -> None:
        rows = {c: {FIRST: fp8, "bf16": dense} for c, (fp8, dense) in times.items()}
        path = tuned_path("Toy GPU")
        path.unlink(missing_ok=True)
        Table("Toy GPU", 1e12, 1e15, rows).write(path)
        forget_tables()

    return pretend


def row(m: int, n: int, k: int) -> Case:
    return Case("row*row", "precise", m, n, k)


def two(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)).to(dtype)


MIXED = {
    row(1, 512, 1024): (1.0, 2.0),
    row(256, 512, 1024): (5.0, 4.0),
    row(1, 1024, 512): (1.0, 2.0),
    row(256, 1024, 512): (3.0, 4.0),
}


def converted(plan: fp8kit.Plan) -> list[str]:
    return [r.name for r in plan.report.converted]


@pytest.mark.parametrize(
    ("m", "names"),
    [(None, ["0", "1"]), (1, ["0", "1"]), (256, ["1"]), ([1, 200], ["1"]), ((1,), ["0", "1"])],
    ids=str,
)
def test_every_given_row_count_must_gain(
    m: int | Sequence[int] | None, names: list[str], measured: Callable[..., None]
) -> None:
    measured(MIXED)
    plan = fp8kit.plan(two(), m=m)
    assert converted(plan) == names
    assert not any("not measured" in note for note in plan.report.notes)
    (note,) = [n for n in plan.report.notes if "bf16 is faster" in n] or [""]
    assert note.startswith("At m=256 bf16 is faster than FP8 for 0.") == (m is None)


def test_times_of_a_power_of_two_say_so(measured: Callable[..., None]) -> None:
    measured(MIXED)
    (left,) = fp8kit.plan(two(), m=200).report.skipped
    assert left.reason == "bf16 is faster at m=200: 4.0 µs, FP8 5.0 µs (measured at m=256)"


def test_the_reason_names_row_count_and_times(measured: Callable[..., None]) -> None:
    measured(MIXED)
    report = fp8kit.convert(two(), m=[1, 256])
    record = report.skipped[0]
    assert record.name == "0"
    assert record.reason == (
        "bf16 is faster at m=256: 4.0 µs, FP8 5.0 µs (measured); FP8 is faster at m=1"
    )
    assert record.bytes_after == record.bytes_before
    assert not record.warning


def test_layers_known_by_name_are_judged_with_their_siblings(
    measured: Callable[..., None],
) -> None:
    parts = {row(1, 1024, 512): (3.0, 2.0), row(1, 256, 512): (3.0, 2.0)}
    measured({**parts, row(1, 1536, 512): (3.0, 4.0)})
    shapes = {"q_proj": (1024, 512), "k_proj": (256, 512), "v_proj": (256, 512)}
    names = {f"layers.0.attn.{name}": shape for name, shape in shapes.items()}
    names["layers.0.mlp.fc"] = (256, 512)
    report = Report("FP8_DYNAMIC")
    report.records = [Record(n, "Linear", shape, "convert") for n, shape in names.items()]
    slower_layers.leave_slower_by_name(report, SCHEMES["FP8_DYNAMIC"], (1,))
    assert [r.name for r in report.skipped] == ["layers.0.mlp.fc"]
    assert "bf16 is faster at m=1" in report.skipped[0].reason
    assert report.groups == []


def test_without_row_counts_a_layer_that_never_gains_is_left(
    measured: Callable[..., None],
) -> None:
    measured({**MIXED, row(1, 512, 1024): (3.0, 2.0)})
    model = two()
    assert converted(fp8kit.plan(model)) == ["1"]
    assert converted(fp8kit.plan(model, include=["0", "1"])) == ["0", "1"]
    assert converted(fp8kit.plan(model, include=["0", "1"], m=256)) == ["1"]


def test_what_a_checkpoint_becomes_does_not_depend_on_the_machine(
    measured: Callable[..., None],
) -> None:
    measured(dict.fromkeys(MIXED, (3.0, 2.0)))
    model = two().to("meta")
    plan = fp8kit.plan(model)
    assert converted(plan) == ["0", "1"]
    assert plan.report.notes == []
    assert converted(fp8kit.plan(model, m=1)) == []


def test_a_tie_goes_to_fp8(measured: Callable[..., None]) -> None:
    measured(dict.fromkeys(MIXED, (2.0, 2.0)))
    assert converted(fp8kit.plan(two(), m=[1, 256])) == ["0", "1"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(512, 1024), nn.Linear(512, 256)
        self.v_proj = nn.Linear(512, 256)


def test_siblings_are_judged_as_they_run(measured: Callable[..., None]) -> None:
    alone = {row(m, n, 512): (3.0, 2.0) for m in (16, 1024) for n in (256, 1024)}
    joined = row(16, 1536, 512)
    model = nn.Sequential(Attention()).bfloat16()
    measured({**alone, joined: (5.9, 9.0)})
    plan = fp8kit.plan(model, m=16)
    assert len(converted(plan)) == 3
    assert len(plan.report.groups) == 1
    measured({**alone, joined: (6.1, 9.0)})  # three dense layers take 3 * 2.0
    plan = fp8kit.plan(model, m=16)
    assert converted(plan) == []
    assert plan.report.groups == []
    measured({**alone, joined: (5.9, 9.0)})  # above 512 rows nothing is joined
    assert converted(fp8kit.plan(model, m=1024)) == []
    assert len(converted(fp8kit.plan(model, m=16, fuse="none"))) == 0


def test_siblings_that_cannot_be_joined_are_judged_alone(measured: Callable[..., None]) -> None:
    times = {row(16, n, 512): (3.0, 2.0) for n in (256, 1024)} | {row(16, 1536, 512): (0.1, 9.0)}
    attention = Attention()
    attention.k_proj.bias = None
    measured(times)
    assert converted(fp8kit.plan(nn.Sequential(attention).bfloat16(), m=16)) == []
    assert len(converted(fp8kit.plan(nn.Sequential(Attention()).bfloat16(), m=16))) == 3


@pytest.mark.parametrize("n", [(576, 192, 192), (512, 256, 192)])
def test_what_would_join_joins(n: tuple[int, ...]) -> None:
    for scheme in SCHEMES.values():
        dense = [nn.Linear(128, features, bias=False) for features in n]
        scale = torch.ones(1, 1) if scheme.static else None
        members = [fp8kit.Fp8Linear.from_linear(layer, scheme, scale) for layer in dense]
        assert would_join(scheme, dense) == can_join(members)
        blocks = n[0] % 128 == 0 or scheme.weight != fp8kit.BLOCK
        assert would_join(scheme, dense) == (blocks and scheme.name in JOINED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_was_not_measured_is_converted_and_said(
    dtype: torch.dtype, measured: Callable[..., None]
) -> None:
    measured(MIXED)
    plan = fp8kit.plan(two(dtype), m=256)
    assert converted(plan) == ["0", "1"]
    (note,) = [n for n in plan.report.notes if "was not measured for 0, 1" in n]
    assert ("model.bfloat16()" in note) == ("faster than float32" in note)
    assert ("model.bfloat16()" in note) == (dtype == torch.float32)
    assert ("fp8kit tune" in note) == (dtype == torch.float16)


def test_without_a_table_the_report_says_so() -> None:
    model = two()
    silent, asked = fp8kit.plan(model), fp8kit.plan(model, m=1)
    assert converted(silent) == converted(asked) == ["0", "1"]
    assert not any("not measured" in note for note in silent.report.notes)
    (note,) = (n for n in asked.report.notes if "not measured" in n)
    assert note.startswith("Whether FP8 is faster than bf16 on cpu was not measured for 0, 1")


@pytest.mark.parametrize(
    ("m", "kind"),
    [
        *((m, ValueError) for m in (0, -1, [], [4, 0])),
        *((m, TypeError) for m in ("16", 1.5, [1.5], [4, "x"])),
    ],
    ids=str,
)
def test_row_counts_are_positive_integers(m: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="Row counts are positive integers"):
        fp8kit.plan(two(), m=m)
    model = two()
    fp8kit.convert(model)
    with pytest.raises(kind, match="Row counts are positive integers"):
        fp8kit.warmup(model, m=m)


def test_the_h200_serves_a_llama_faster_in_fp8(on_gpu: Callable[..., None]) -> None:
    on_gpu((9, 0), "NVIDIA H200")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 28672, bias=False)).bfloat16()
    assert converted(fp8kit.plan(model, m=[1, 16, 64, 4096])) == ["0"]


def test_each_dtype_is_told_of_for_itself(measured: Callable[..., None]) -> None:
    measured({})
    model = two()
    model[1].float()
    notes = [n for n in fp8kit.plan(model, m=256).report.notes if "was not measured" in n]
    assert ["float32" in note for note in notes] == [False, True]
    assert ["for 0:" in note for note in notes] == [True, False]


@pytest.mark.parametrize(
    "names", [[""], ["a..b", "a"], ["l.0.type"], ["q_proj.adapter", "q_proj"], ["a", "a.b.c"]]
)
def test_layers_may_have_any_names(names: list[str], measured: Callable[..., None]) -> None:
    measured({row(1, 512, 1024): (3.0, 2.0)})
    shapes = dict.fromkeys(names, (512, 1024))
    assert joined_shapes(shapes, SCHEMES["FP8_DYNAMIC"]) == []
    report = Report("FP8_DYNAMIC")
    report.records = [Record(name, "Linear", (512, 1024), "convert") for name in names]
    slower_layers.leave_slower_by_name(report, SCHEMES["FP8_DYNAMIC"], (1,))
    assert [r.name for r in report.skipped] == names


def test_layers_on_meta_are_told_to_have_no_device_yet() -> None:
    with torch.device("meta"):
        model = two()
    (note,) = (n for n in fp8kit.plan(model, m=1).report.notes if "not measured" in n)
    assert "on a device yet to be chosen was not measured" in note
