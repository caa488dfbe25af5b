"""Tables of measured times: what is in them, what is estimated from them, where they are kept."""

from __future__ import annotations

import dataclasses
import json
import statistics
from importlib import resources
from pathlib import Path

import pytest

from fp8kit import measurements, settings
from fp8kit.dispatch import choose
from fp8kit.matmul.problem import BACKENDS
from fp8kit.measurements import DENSE, REJECTED, Case, Table, table_for

H200 = "NVIDIA H200"
SHIPPED = sorted(p.name for p in resources.files("fp8kit").joinpath("tables").iterdir())
CASE = Case("row*row", "precise", 16, 4096, 4096)


def shipped(name: str) -> Table:
    return Table.from_json(resources.files("fp8kit").joinpath("tables", name).read_text())


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep tuned tables in a folder of this test, and forget what other tests read."""
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    table_for.cache_clear()
    yield tmp_path
    table_for.cache_clear()
    choose.cache_clear()


def made(times: dict[Case, dict[str, float]], device: str = "toy") -> Table:
    return Table(device, 4e12, 1e15, times)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_names_its_device_and_versions(name: str) -> None:
    table = shipped(name)
    assert name == f"{measurements._slug(table.device)}.json"
    assert {"driver", "torch", "triton"} <= set(table.facts)
    known = {backend for backend, *_ in BACKENDS} | {DENSE}
    for case, times in table.rows.items():
        assert {c.partition(":")[0] for c in times} <= known, case
        assert DENSE in times, case
        assert len(times) > 1, case


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_time_beats_the_roofline(name: str) -> None:
    table = shipped(name)
    for case, times in table.rows.items():
        for candidate, us in times.items():
            # the roofline's clocks are sustained ones; the data sheet's are 1979 TFLOPS for 1400
            assert us > 0.7 * table.roofline(case, candidate), (case, candidate)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shape_that_was_not_measured_is_estimated_within_a_sixth(name: str) -> None:
    """Leave every (N, K) out in turn: its times must follow from the other shapes'."""
    table = shipped(name)
    errors = []
    for n, k in {(c.n, c.k) for c in table.rows}:
        others = {c: t for c, t in table.rows.items() if (c.n, c.k) != (n, k)}
        left = Table(table.device, table.bandwidth, table.flops, others)
        for case in (c for c in table.rows if (c.n, c.k) == (n, k)):
            estimate = left.estimate(case)
            if estimate is not None:
                times = table.rows[case]
                errors += [
                    abs(estimate.us[c] / us - 1) for c, us in times.items() if c in estimate.us
                ]
    errors.sort()
    assert len(errors) > 100
    assert statistics.median(errors) < 0.05
    assert errors[int(0.9 * len(errors))] < 1 / 6


def test_a_measured_case_is_given_as_it_is() -> None:
    table = made({CASE: {DENSE: 13.0, "hopper_gemm": 8.0}})
    estimate = table.estimate(CASE)
    assert estimate is not None
    assert estimate.us == {DENSE: 13.0, "hopper_gemm": 8.0}
    assert estimate.basis == "measured"


def test_a_near_case_scales_with_the_roofline() -> None:
    table = made({CASE: {DENSE: 20.0, "hopper_gemm": 10.0}})
    twice = Case("row*row", "precise", 16, 8192, 4096)
    estimate = table.estimate(twice)
    assert estimate is not None
    for name, us in table.rows[CASE].items():
        grown = (table.roofline(twice, name) + 4) / (table.roofline(CASE, name) + 4)
        assert estimate.us[name] == pytest.approx(us * grown)
    assert estimate.basis == "estimated; nearest measured is 4096x4096 at m=16"


@pytest.mark.parametrize(
    ("scales", "n", "k", "known"),
    [
        ("row*row", 4112, 4160, True),
        ("row*row", 4104, 4096, False),
        ("row*row", 4097, 4096, False),
        ("row*row", 4096, 4100, False),
        ("row*row", 4096, 4112, False),
        ("1x128*128x128", 4224, 3968, True),
        ("1x128*128x128", 4160, 4096, False),
        ("1x128*128x128", 4096, 4160, False),
    ],
)
def test_layers_that_are_padded_tell_nothing_of_others(
    scales: str, n: int, k: int, known: bool
) -> None:
    even, ragged = Case(scales, "precise", 16, 4096, 4096), Case(scales, "precise", 16, n, k)
    for measured, asked in ((even, ragged), (ragged, even)):
        assert (made({measured: {"hopper_gemm": 5.0}}).estimate(asked) is not None) == known


def test_an_odd_n_and_a_multiple_of_eight_tell_nothing_of_each_other() -> None:
    odd, eights = (
        Case("row*row", "precise", 16, 4097, 4096),
        Case("row*row", "precise", 16, 4104, 4096),
    )
    assert made({odd: {"hopper_gemm": 5.0}}).estimate(eights) is None
    fours, sixteens = (Case("row*row", "precise", 16, 4096, k) for k in (4100, 4112))
    assert made({sixteens: {"hopper_gemm": 5.0}}).estimate(fours) is None


def test_nearer_neighbours_weigh_more() -> None:
    near, far = (
        Case("row*row", "precise", 16, 4096, 8192),
        Case("row*row", "precise", 16, 4096, 1024),
    )
    table = made({near: {"hopper_gemm": 100.0}, far: {"hopper_gemm": 1.0}})
    ratios = {c: table.rows[c]["hopper_gemm"] / (table.roofline(c) + 4) for c in (near, far)}
    estimate = table.estimate(CASE)
    assert estimate is not None
    found = estimate.us["hopper_gemm"] / (table.roofline(CASE) + 4)
    assert found == pytest.approx((ratios[near] ** 4 * ratios[far]) ** 0.2)


def test_candidates_are_those_of_the_nearest_case() -> None:
    near, far = (
        Case("row*row", "precise", 16, 4096, 8192),
        Case("row*row", "precise", 16, 4096, 1024),
    )
    table = made({near: {DENSE: 20.0, "torch": 10.0}, far: {DENSE: 20.0, "torch": 9.0, "own": 1.0}})
    estimate = table.estimate(CASE)
    assert estimate is not None
    assert estimate.us.keys() == {DENSE, "torch"}


@pytest.mark.parametrize("m", [2**i for i in range(16)])
def test_the_shipped_table_leaves_out_no_row_count(m: int) -> None:
    """Layers that are not in it, but near: what runs between two measured counts is no guess."""
    table = table_for("NVIDIA H200")
    assert table is not None
    for shape in ((4608, 4096), (11008, 4096), (10752, 5120), (8192, 3584)):
        for scales in ("row*row", "1x128*128x128"):
            assert table.estimate(Case(scales, "precise", m, *shape)) is not None


@pytest.mark.parametrize(
    "far",
    [
        Case("row*row", "precise", 16, 4096, 4096 * 5),
        Case("row*row", "precise", 64, 4096, 2048),
        Case("row*tensor", "precise", 16, 4096, 4096),
        Case("row*row", "fast", 16, 4096, 4096),
        Case("row*row", "precise", 0, 4096, 4096),
    ],
    ids=["long", "more-rows", "other-scales", "other-sums", "empty"],
)
def test_nothing_is_claimed_of_what_is_far_or_different(far: Case) -> None:
    assert made({CASE: {DENSE: 1.0}}).estimate(far) is None


def test_a_table_survives_writing(tmp_path: Path) -> None:
    table = made({CASE: {DENSE: 13.25, "hopper_gemm:wide": 8.5}})
    table.facts = {"driver": "1.2", "commit": "abc"}
    table.write(tmp_path / "a" / "t.json")
    assert Table.from_json((tmp_path / "a" / "t.json").read_text()) == table
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"columns": ["m"]},
        {"bandwidth": "wide"},
        {"rows": [["row*row", "precise", 1, 2, 3, {"bf16": -1.0}]]},
        {"rows": [["row*row", "precise", 0, 2, 3, {"bf16": 1.0}]]},
        {"rows": [["row*row", 1]]},
        {"rows": 7},
    ],
    ids=str,
)
def test_a_damaged_table_is_refused(change: dict[str, object]) -> None:
    data = json.loads(made({CASE: {DENSE: 13.0}}).to_json())
    assert Table.from_json(json.dumps(data)).rows
    with pytest.raises(ValueError, match="fp8kit tune"):
        Table.from_json(json.dumps({**data, **change}))


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="Not a table of measured times"):
        Table.from_json("{")


def test_tuned_times_come_before_shipped_ones(cache: Path) -> None:
    before = table_for(H200)
    assert before is not None
    own, other = before.rows[CASE], Case("row*row", "precise", 16, 12345, 4096)
    tuned = Table(H200, 1.0, 1.0, {CASE: {"torch_native": 1.0}, other: {DENSE: 2.0}})
    tuned.write(measurements.tuned_path(H200))
    table_for.cache_clear()
    after = table_for(H200)
    assert after is not None
    assert after.rows[CASE] == {**own, "torch_native": 1.0}
    assert after.rows[other] == {DENSE: 2.0}
    assert after.bandwidth == before.bandwidth


def test_a_device_of_its_own_is_known_once_it_is_tuned(cache: Path) -> None:
    assert table_for("NVIDIA L4") is None
    made({CASE: {DENSE: 13.0}}, "NVIDIA L4").write(measurements.tuned_path("NVIDIA L4"))
    table_for.cache_clear()
    found = table_for("NVIDIA L4")
    assert found is not None
    assert found.rows == {CASE: {DENSE: 13.0}}
    assert table_for("") is None


def test_tuned_times_hold_for_one_driver_and_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {measurements.tuned_path(H200), measurements.tuned_path("NVIDIA L4")}
    for key in ("driver", "torch", "triton", "deep_gemm", "kernels"):
        changed = {**measurements.fingerprint(), key: "another"}
        monkeypatch.setattr(measurements, "fingerprint", lambda changed=changed: changed)
        paths.add(measurements.tuned_path(H200))
    assert len(paths) == 7
    assert all(p.parent == cache / "tables" for p in paths)


def test_the_digest_of_kernels_changes_with_every_source_at_any_depth(tmp_path: Path) -> None:
    sources = ("matmul/a.py", "matmul/hopper/gemm.cu", "matmul/hopper/ptx.cuh", "quantizers/b.cuh")
    for name in ("matmul/__pycache__/a.pyc", "ops.py", *sources):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    digests = [measurements.kernel_digest(tmp_path)]
    for name in ("matmul/__pycache__/a.pyc", "ops.py"):  # no kernels
        (tmp_path / name).write_text("after")
        assert measurements.kernel_digest(tmp_path) == digests[0]
    for name in sources:
        (tmp_path / name).write_text("after")
        digests.append(measurements.kernel_digest(tmp_path))
    (tmp_path / "matmul/a.py").rename(tmp_path / "matmul/renamed.py")
    digests.append(measurements.kernel_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_every_kernel_source_of_the_package_is_in_the_digest() -> None:
    root = Path(measurements.__file__).parent
    found = {p for suffix in ("cu", "cuh") for p in root.rglob(f"*.{suffix}")}
    assert len(found) >= 3
    folders = {root / name for name in measurements._KERNEL_FOLDERS}
    assert all(folders & set(path.parents) for path in found)


def test_the_first_package_that_is_installed_has_the_version() -> None:
    assert measurements._version("not-a-package", "torch") == measurements._version("torch")
    assert measurements._version("torch", "pytest").startswith("2.")
    assert measurements._version("not-a-package") == "none"


def test_a_damaged_cache_is_named_and_left_alone(cache: Path) -> None:
    path = measurements.tuned_path(H200)
    path.parent.mkdir()
    path.write_text("{}")
    with pytest.warns(UserWarning, match=path.name):
        table = table_for(H200)
    assert table is not None
    assert path.read_text() == "{}"


def test_what_was_rejected_stays_rejected_on_disk_and_near_by() -> None:
    table = made({CASE: {"a": REJECTED, "b": 7.0, DENSE: 13.0}})
    again = Table.from_json(table.to_json())
    assert again == table
    near = again.estimate(dataclasses.replace(CASE, n=2 * CASE.n))
    assert near is not None
    assert near.us["a"] == REJECTED
    assert 0 < near.us["b"] < REJECTED
    shipped = made({CASE: {"a": 1.0, DENSE: 13.0}})
    shipped.merge(again)
    assert shipped.rows[CASE]["a"] == REJECTED


def test_a_rejected_dense_layer_is_no_table() -> None:
    text = made({CASE: {"a": 1.0, DENSE: 13.0}}).to_json()
    with pytest.raises(ValueError, match="Not a table"):
        Table.from_json(text.replace("13.0", "null"))


def test_times_are_of_one_compiler() -> None:
    assert {"cuda_bindings", "nvrtc"} <= set(measurements.fingerprint())
