"""Tables of measured times: their content, which layers they apply to, where they are stored."""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from fp8kit.dispatch import timings
from fp8kit.dispatch.timings import DENSE, REJECTED, Case, Table, table_for
from fp8kit.matmul.problem import MATMUL_BACKENDS

H200 = "NVIDIA H200"
SHIPPED = sorted(p.name for p in resources.files("fp8kit").joinpath("dispatch", "tables").iterdir())
CASE = Case("row*row", "precise", 16, 4096, 4096)


def shipped(name: str) -> Table:
    return Table.from_json(
        resources.files("fp8kit").joinpath("dispatch", "tables", name).read_text()
    )


def made(times: dict[Case, dict[str, float]], device: str = "toy") -> Table:
    return Table(device, 4e12, 1e15, times)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_names_its_device_and_versions(name: str) -> None:
    table = shipped(name)
    assert table_for(table.device) == table
    assert {"driver", "torch", "triton"} <= set(table.facts)
    known = {backend for backend, *_ in MATMUL_BACKENDS} | {DENSE}
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


def test_the_roofline_counts_bytes_and_operations() -> None:
    few, many = (dataclasses.replace(CASE, m=m, n=2048) for m in (1, 4096))
    table = made({})
    for candidate, of_weight in (("", 1), (DENSE, 2)):
        moved = of_weight * 2048 * 4096 + 2 * (2048 + 4096)
        assert table.roofline(few, candidate) == pytest.approx(moved / 4e6)
    operations = 2 * 4096 * 2048 * 4096
    assert table.roofline(many) == pytest.approx(operations / 1e9)
    assert table.roofline(many, DENSE) == pytest.approx(2 * operations / 1e9)


@pytest.mark.parametrize(("m", "found"), [(16, 16), (8, 16), (32, 16), (64, 128), (2, None)])
def test_times_hold_within_an_octave_of_rows(m: int, found: int | None) -> None:
    other = dataclasses.replace(CASE, m=128)
    table = made({CASE: {DENSE: 13.0}, other: {DENSE: 20.0}})
    measured = table.find(dataclasses.replace(CASE, m=m))
    assert (None if measured is None else measured.m) == found
    if measured is not None:
        assert measured.us == table.rows[dataclasses.replace(CASE, m=found)]


@pytest.mark.parametrize("shape", [(4096, 14336), (28672, 4096), (6144, 4096)])
@pytest.mark.parametrize("m", [2**i for i in range(16)])
def test_the_shipped_table_speaks_of_its_layers_at_any_row_count(
    m: int, shape: tuple[int, int]
) -> None:
    table = table_for(H200)
    assert table is not None
    for scales in ("row*row", "1x128*128x128"):
        assert table.find(Case(scales, "precise", m, *shape)) is not None


@pytest.mark.parametrize(
    "other",
    [
        Case("row*row", "precise", 16, 4096, 4112),
        Case("row*row", "precise", 16, 4104, 4096),
        Case("row*row", "precise", 64, 4096, 4096),
        Case("row*tensor", "precise", 16, 4096, 4096),
        Case("row*row", "fast", 16, 4096, 4096),
        Case("row*row", "precise", 0, 4096, 4096),
    ],
    ids=["wider", "longer", "more-rows", "other-scales", "other-sums", "empty"],
)
def test_a_table_says_nothing_of_other_layers(other: Case) -> None:
    assert made({CASE: {DENSE: 1.0}}).find(other) is None


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


def test_tuned_times_come_before_shipped_ones(cache_dir: Path) -> None:
    before = table_for(H200)
    assert before is not None
    own, other = before.rows[CASE], Case("row*row", "precise", 16, 12345, 4096)
    tuned = Table(H200, 1.0, 1.0, {CASE: {"torch_native": 1.0}, other: {DENSE: 2.0}})
    tuned.write(timings.tuned_path(H200))
    table_for.cache_clear()
    after = table_for(H200)
    assert after is not None
    assert after.rows[CASE] == {**own, "torch_native": 1.0}
    assert after.rows[other] == {DENSE: 2.0}
    assert after.bandwidth == before.bandwidth


def test_a_device_of_its_own_is_known_once_it_is_tuned(cache_dir: Path) -> None:
    assert table_for("NVIDIA L4") is None
    made({CASE: {DENSE: 13.0}}, "NVIDIA L4").write(timings.tuned_path("NVIDIA L4"))
    table_for.cache_clear()
    found = table_for("NVIDIA L4")
    assert found is not None
    assert found.rows == {CASE: {DENSE: 13.0}}
    assert table_for("") is None


def test_tuned_times_hold_for_one_driver_and_version(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {timings.tuned_path(H200), timings.tuned_path("NVIDIA L4")}
    for key in ("driver", "torch", "triton", "deep_gemm", "kernels"):
        changed = {**timings.fingerprint(), key: "another"}
        monkeypatch.setattr(timings, "fingerprint", lambda changed=changed: changed)
        paths.add(timings.tuned_path(H200))
    assert len(paths) == 7
    assert all(p.parent == cache_dir / "tables" for p in paths)


def test_the_digest_of_kernels_changes_with_every_source_at_any_depth(tmp_path: Path) -> None:
    sources = ("matmul/a.py", "matmul/hopper/gemm.cu", "matmul/hopper/ptx.cuh", "quantizers/b.cuh")
    for name in ("matmul/__pycache__/a.pyc", "ops.py", *sources):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    digests = [timings.kernel_digest(tmp_path)]
    for name in ("matmul/__pycache__/a.pyc", "ops.py"):  # no kernels
        (tmp_path / name).write_text("after")
        assert timings.kernel_digest(tmp_path) == digests[0]
    for name in sources:
        (tmp_path / name).write_text("after")
        digests.append(timings.kernel_digest(tmp_path))
    (tmp_path / "matmul/a.py").rename(tmp_path / "matmul/renamed.py")
    digests.append(timings.kernel_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_every_kernel_source_of_layers_is_in_the_digest(tmp_path: Path) -> None:
    root = Path(timings.__file__).parents[1]
    experts = root / "moe"  # no times of experts are kept
    found = {p for suffix in ("cu", "cuh") for p in root.rglob(f"*.{suffix}")}
    found = {p for p in found if experts not in p.parents}
    assert len(found) >= 3
    shutil.copytree(root, tmp_path / "fp8kit")
    digests = {timings.kernel_digest(tmp_path / "fp8kit")}
    for path in found:
        (tmp_path / "fp8kit" / path.relative_to(root)).write_text("changed")
        digests.add(timings.kernel_digest(tmp_path / "fp8kit"))
    assert len(digests) == 1 + len(found)


def test_a_damaged_cache_is_named_and_left_alone(cache_dir: Path) -> None:
    path = timings.tuned_path(H200)
    path.parent.mkdir()
    path.write_text("{}")
    with pytest.warns(UserWarning, match=path.name):
        table = table_for(H200)
    assert table is not None
    assert path.read_text() == "{}"


def test_what_was_rejected_stays_rejected_on_disk() -> None:
    table = made({CASE: {"a": REJECTED, "b": 7.0, DENSE: 13.0}})
    again = Table.from_json(table.to_json())
    assert again == table
    shipped = made({CASE: {"a": 1.0, DENSE: 13.0}})
    shipped.merge(again)
    assert shipped.rows[CASE]["a"] == REJECTED


def test_a_rejected_dense_layer_is_no_table() -> None:
    text = made({CASE: {"a": 1.0, DENSE: 13.0}}).to_json()
    with pytest.raises(ValueError, match="Not a table"):
        Table.from_json(text.replace("13.0", "null"))


def test_times_are_of_one_compiler() -> None:
    assert {"cuda_bindings", "nvrtc"} <= set(timings.fingerprint())


@pytest.mark.parametrize(
    "name", ["matmul/hopper/gemm.cu", "quantizers/encode.cuh", "fused/triton_norms.py"]
)
def test_the_fingerprint_is_of_every_kernel_source(name: str, tmp_path: Path) -> None:
    package = tmp_path / "fp8kit"
    shutil.copytree(str(resources.files("fp8kit")), package)
    assert timings.kernel_digest(package) == timings.fingerprint()["kernels"]
    with (package / name).open("a") as file:
        file.write(" ")
    assert timings.kernel_digest(package) != timings.fingerprint()["kernels"]
