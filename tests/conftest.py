"""Fixtures of the whole suite: seeds, poisoned memory, devices, and the count of tests that ran."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import os
import random
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

import interpret_triton  # noqa: F401  # before those that import Triton
import recorded_calls
from cases import beyond_the_first
from disks import Disk
from fp8kit.dispatch import backends
from fp8kit.runtime import launch_recording, settings

HAS_FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

# cuBLAS keeps torch's promise of deterministic algorithms only with a fixed workspace
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# precompiled C++ headers do not pay off for the few kernels that the tests compile
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "fp8kit", deadline=None, derandomize=True, max_examples=40, database=None
)
hypothesis.settings.load_profile("fp8kit")


# `make test` runs some cases of these tests and `make quick` none; `make slow` writes both lists
SLOW = Path(__file__).with_name("slow.txt")
SLOW_SECONDS = 0.12
# `make test` runs no case of these either: even their quickest one takes too long
SLOWEST = SLOW.with_name("slowest.txt")
SLOWEST_SECONDS = 8.0
# fixtures that take long; the first test of a file that uses one pays for all
SLOW_FIXTURES = {"compiled"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-slow",
        action="store_true",
        help=f"write the tests that took long to {SLOW.name} and {SLOWEST.name}",
    )
    parser.addoption("--cases", type=int, help="run so many cases of each slow test, not all")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported objects from garbage collections, now and during the tests.

    Otherwise each one scans a million objects of libraries that stay alive anyway.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what is left at the end


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow, slowest = (set(path.read_text().split()) for path in (SLOW, SLOWEST))
    pays: defaultdict[tuple[Path, str], set[str]] = defaultdict(set)
    for item in items:
        name = item.nodeid.partition("[")[0]
        fixtures = SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        for fixture in fixtures:
            pays[item.path, fixture].add(name)
        if fixtures or name in slow:
            item.add_marker(pytest.mark.slow)
    # if the first test with a slow fixture is left out, the next one pays for it
    slowest |= {name for names in pays.values() if names & slowest for name in names}
    most = config.getoption("cases")
    if most is not None:
        left_out = beyond_the_first(items, most, slowest)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if HAS_FP8_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device with FP8 (sm89 or later)"))


def pytest_configure(config: pytest.Config) -> None:
    # deterministic mode is on to poison memory; ops that cannot be deterministic may say so
    for words in ("deterministic implementation", "non-deterministic algorithm"):
        config.addinivalue_line("filterwarnings", f"ignore:.*{words}:UserWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    run = sum(len(terminalreporter.stats.get(k, ())) for k in ("passed", "failed"))
    skipped = len(terminalreporter.stats.get("skipped", ()))
    terminalreporter.write_line(f"fp8kit: {run} tests run, {skipped} skipped")
    if terminalreporter.config.getoption("write_slow"):
        seconds: Counter[str] = Counter()
        for report in itertools.chain(*terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
        cases: defaultdict[str, list[float]] = defaultdict(list)
        for nodeid, took in seconds.items():
            cases[nodeid.partition("[")[0]].append(took)
        slow = {name for name, of in cases.items() if sum(of) > SLOW_SECONDS}
        slowest = {name for name in slow if min(cases[name]) > SLOWEST_SECONDS}
        for path, names in ((SLOW, slow), (SLOWEST, slowest)):
            path.write_text("".join(f"{name}\n" for name in sorted(names)))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU and, where there is one, on a GPU."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without GPUs torch.manual_seed keeps a traceback per call, to seed them later
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized tensors with NaN or the largest integer, so that missing writes show."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    allocators = launch_recording._EMPTY  # torch does not fill what these allocate for recordings
    for device in list(allocators):
        monkeypatch.setitem(allocators, device, functools.partial(_empty_strided, device))
    if torch.get_deterministic_debug_mode() != 1:  # to set it takes a millisecond, so it stays on
        torch.use_deterministic_algorithms(True, warn_only=True)


def _empty_strided(
    device: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


@pytest.fixture
def fuses_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the fused path on a CPU too, where the reference computes it."""
    recorded_calls.fuse_on_cpu(monkeypatch)


@pytest.fixture
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Keep tuned times and compiled kernels in a folder of this test; forget tables read before."""
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    backends.forget_tables()
    yield tmp_path
    backends.forget_tables()


@pytest.fixture
def faked_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes ``torch.cuda`` report GPUs that are not here."""

    def fake(count: int = 1, **others: object) -> None:
        told: Mapping[str, object] = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "current_device": lambda: 0,
            "device": lambda _: contextlib.nullcontext(),
            **others,
        }
        for name, value in told.items():
            monkeypatch.setattr(torch.cuda, name, value)

    return fake


@pytest.fixture
def outdate(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Return a function that makes a library report a release that is too old."""
    return lambda library: monkeypatch.setattr(library, "__version__", "0.1.0")


@pytest.fixture
def unpoisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop torch from filling new memory, and so from launching kernels for it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.fixture
def set_torch_product(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces torch's FP8 product, which needs a GPU."""
    return lambda product: monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)


@pytest.fixture
def triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton kernels look compiled instead of interpreted; the test must not run them."""
    monkeypatch.setattr("fp8kit.quantizers.triton_encode.INTERPRETED.value", False)


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a script as a user does, and returns what it prints."""

    def run(path: Path, *arguments: str, typed: str = "") -> str:
        given = {"argv": [path.name, *arguments], "stdin": io.StringIO(typed)}
        for name, value in given.items():
            monkeypatch.setattr(sys, name, value)
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a disk whose system calls fail as the test asks."""
    return Disk(monkeypatch)
