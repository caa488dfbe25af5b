"""A checkpoint quantized by a Ray cluster on this machine, file by file."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fresh
from checkpoint_samples import NANO, all_bytes
from fp8kit.checkpoint.streaming import journal
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint, ray_runner

ray = pytest.importorskip("ray")
RECIPE = Recipe("FP8_DYNAMIC", max_shard_bytes=500_000)
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join((str(tests.parent / "src"), str(tests)))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("wanted") / "out"
    quantize_checkpoint(NANO, path, RECIPE, progress=False)
    return all_bytes(path)


def test_a_cluster_writes_the_bytes_of_one_process(
    cluster: None, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    quantize_checkpoint(NANO, tmp_path / "out", RECIPE, runner=ray_runner(), progress=False)
    assert all_bytes(tmp_path / "out") == wanted
    assert os.listdir(tmp_path) == ["out"]
    assert ray.is_initialized()  # a cluster that was there stays


def test_a_cluster_that_does_not_run(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code = f"""
import ray
from fp8kit.io.checkpoints import quantize_checkpoint, ray_runner

def refused(**options):
    raise ConnectionError("specify the one to connect to by setting `--address`")

ray.init = refused
try:
    quantize_checkpoint({str(NANO)!r}, {out!r}, "FP8_DYNAMIC", runner=ray_runner("auto"))
except ValueError as error:
    print(error)
"""
    said = fresh.run(code).stdout
    assert "no Ray cluster at 'auto'" in said
    assert "ray start --head" in said


def test_lost_workers(cluster: None, wanted: dict[str, bytes], tmp_path: Path) -> None:
    """The first workers of some files are killed before the files are whole."""
    runner, deaths = ray_runner(), tmp_path / "deaths"
    deaths.mkdir()
    write = runner.write

    def dying(work, index, source, folder, device):  # type: ignore[no-untyped-def]
        from fp8kit.checkpoint.streaming import executor

        mark = deaths / str(index)
        if index % 4 == 0 and not mark.exists():
            mark.touch()
            executor.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        write(work, index, source, folder, device)

    runner.write = dying
    quantize_checkpoint(NANO, tmp_path / "out", RECIPE, runner=runner, progress=False)
    assert all_bytes(tmp_path / "out") == wanted
    assert len(list(deaths.iterdir())) == 3
    assert sorted(os.listdir(tmp_path)) == ["deaths", "out"]


def test_what_a_worker_raises_arrives(
    cluster: None, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    runner = ray_runner()
    write = runner.write

    def failing(work, index, source, folder, device):  # type: ignore[no-untyped-def]
        from fp8kit.errors import ConversionError

        if index == 3:
            raise ConversionError("the fourth file")
        write(work, index, source, folder, device)

    runner.write = failing
    with pytest.raises(ConversionError, match="the fourth file"):
        quantize_checkpoint(NANO, tmp_path / "out", RECIPE, runner=runner, progress=False)
    assert not (tmp_path / "out").exists()
    # this machine continues what the cluster left unfinished
    quantize_checkpoint(NANO, tmp_path / "out", RECIPE, progress=False)
    assert all_bytes(tmp_path / "out") == wanted


def test_a_machine_that_does_not_see_the_files(cluster: None, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(NANO, source)
    runner = ray_runner()
    write = runner.write

    def elsewhere(work, index, source, folder, device):  # type: ignore[no-untyped-def]
        write(work, index, "/nowhere/at/all", folder, device)

    runner.write = elsewhere
    with pytest.raises(CheckpointError, match="does not see /nowhere/at/all"):
        quantize_checkpoint(source, tmp_path / "out", RECIPE, runner=runner, progress=False)


def test_files_that_only_the_other_machine_has(cluster: None, tmp_path: Path) -> None:
    runner = ray_runner()
    runner.write = lambda *_: None
    with pytest.raises(CheckpointError, match="was written by another machine and is not in"):
        quantize_checkpoint(NANO, tmp_path / "out", RECIPE, runner=runner, progress=False)
    assert journal.UnfinishedConversion(tmp_path / "out").home.exists()


def test_a_runner_takes_an_address_and_a_kind_of_device() -> None:
    with pytest.raises(TypeError, match=r"Got address=3\..* a str.* Pass 'auto'"):
        ray_runner(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Got device='cuda:1'\..* cpu, cuda"):
        ray_runner(device="cuda:1")
