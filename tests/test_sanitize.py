"""The run under compute-sanitizer launches every kernel, and no failed run passes for clean."""

from __future__ import annotations

import ast
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import backend_tables
import fp8kit
from fp8kit.formats import scale_shape
from fp8kit.fused import triton as fused_triton
from grids import diagonal

sanitize = pytest.importorskip("sanitize", reason="triton or cuda-bindings is not installed")
from launches import fake_gemm_launch  # noqa: E402

triton_rows = pytest.importorskip("fp8kit.quantizers.triton_rows")
SOURCE = Path(fp8kit.__file__).parent

BROKEN = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at broken+0x30
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at hopper_gemm+0x1230
=========     and Read access at hopper_gemm+0x1280 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
CUT_SHORT = "========= COMPUTE-SANITIZER\n========= Error: process didn't terminate successfully\n"


def launched(tree: ast.Module) -> set[str]:
    """Return the names of the kernels that a module launches, with ``launch`` or a grid."""
    names = set()
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args):
        if isinstance(call.func, ast.Name) and call.func.id in ("launch", "Launch"):
            names.add(ast.unparse(call.args[0]))
        if isinstance(call.func, ast.Subscript):
            names.add(ast.unparse(call.func.value))
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "cuda_launch.Kernel":
            names.add(str(ast.literal_eval(call.args[1])))
    return {name for name in names if name.endswith("_kernel") or name in sanitize.OWN_KERNELS}


def test_every_kernel_of_the_package_is_on_the_list() -> None:
    found = set().union(*(launched(ast.parse(p.read_text())) for p in SOURCE.rglob("*.py")))
    assert found == set(sanitize.KERNELS)


def test_the_search_for_kernels_can_fail() -> None:
    code = (
        "launch(novel_kernel, 3, x)\nother_kernel[(1,)](x)\ncuda_launch.Kernel(text, 'hopper_gemm')"
    )
    assert launched(ast.parse(code)) == {"novel_kernel", "other_kernel", "hopper_gemm"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_triton_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sanitize.moe_triton.INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    # on a CPU dispatch would leave the fused kernels out
    backend_tables.install(monkeypatch, fused={"triton": fused_triton.BACKEND})
    compiles = ModuleType("fp8kit.compiles")  # a function that has the name of a kernel
    vars(compiles)["product_kernel"] = len
    monkeypatch.setitem(sys.modules, compiles.__name__, compiles)
    seen: set[str] = set()
    with sanitize.noted(seen):
        assert compiles.product_kernel is len
        for call in sanitize.triton_calls("cpu").values():
            call()
    assert seen == set(sanitize.TRITON_KERNELS)
    assert not isinstance(triton_rows._rows_kernel, sanitize.Watched)


def scripted(folder: Path, says: dict[tuple[str, str], tuple[str, int]]) -> str:
    """Write a program that replaces ``compute-sanitizer``, with outputs by (tool, program)."""
    path = folder / "compute-sanitizer"
    path.write_text(
        "#!/usr/bin/env python3\n"
        "import os, sys\n"
        "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        "tool = sys.argv[sys.argv.index('--tool') + 1]\n"
        "kernels = [a for a in sys.argv if a.startswith('kernel_substring=')]\n"
        "program = sys.argv[-1]\n"
        f"assert len(kernels) == ({len(sanitize.KERNELS)} if program == 'kernels' else 1)\n"
        f"text, status = {says!r}[tool, 'kernels' if program == 'kernels' else 'broken']\n"
        "print(text, end='')\n"
        "sys.exit(status)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


ANSWERS = (
    ((BROKEN, 7), ("clean", 0), ""),
    ((BROKEN, 7), (BROKEN, 7), "1 findings"),
    ((BROKEN, 7), (RACE, 7), "1 findings"),
    ((BROKEN, 7), (RACE, 0), "1 findings"),
    ((BROKEN, 7), ("clean", 1), "did not come to its end, status 1"),
    ((BROKEN, 7), (CUT_SHORT, 255), "did not come to its end"),
    ((BROKEN, 7), ("", 0), "did not come to its end"),
    (("clean", 0), ("clean", 0), "proves nothing"),
    (("clean", 7), ("clean", 0), "proves nothing"),
    ((BROKEN, 1), ("clean", 0), "proves nothing"),  # it failed before its kernel could
    ((CUT_SHORT, 255), ("clean", 0), "proves nothing"),
)
CLEAN_RUNS = (("memcheck", ANSWERS[0]), ("racecheck", ANSWERS[0]))


@pytest.mark.parametrize(
    ("tool", "answers"), [*CLEAN_RUNS, *diagonal(["racecheck", "memcheck"], ANSWERS[1:])]
)
def test_only_a_clean_run_of_a_tool_that_finds_faults_passes(
    tool: str,
    answers: tuple[tuple[str, int], tuple[str, int], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, kernels, said = answers

    def filled(answer: tuple[str, int]) -> tuple[str, int]:
        return (CLEAN[tool] if answer[0] == "clean" else answer[0]), answer[1]

    says = {(tool, "broken"): filled(broken), (tool, "kernels"): filled(kernels)}
    verdict = sanitize.check(scripted(tmp_path, says), tool)
    assert bool(verdict) == bool(said)
    assert said in verdict
    assert says[tool, "broken"][0].strip() in capsys.readouterr().out  # as it came


def undrawn(m: int, n: int, k: int, pair: Any, _: str) -> tuple[Any, ...]:
    """Return operands of these shapes whose values are never read."""
    x, w = (torch.empty(rows, k, dtype=sanitize.E4M3) for rows in (m, n))
    scales = [torch.empty(scale_shape(t.shape, g)) for t, g in zip((x, w), pair, strict=True)]
    return x, scales[0], w, scales[1]


def test_own_calls_cover_every_configuration_kind_and_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls of the Hopper GEMM run with everything below the launch faked."""
    variants: list[tuple[Any, ...]] = []
    launches: list[tuple[Any, ...]] = []

    def kernel(config: Any, variant: Any, _: int) -> SimpleNamespace:
        variants.append((config, variant))
        return SimpleNamespace(launch=lambda *a, **options: launches.append((*a, options)))

    fake_gemm_launch(monkeypatch, kernel=kernel)
    for call in sanitize.own_calls("cpu", undrawn).values():
        call()
    assert len(launches) == len(variants)
    assert all(options == {"overlap": True} for *_, options in launches)
    configs = {config for config, _ in variants}
    quantizing = [config for config in configs if config.quantize]
    assert {config.quantize.rows for config in quantizing} == {1, 4}
    assert {config.layout.warpgroups for config in quantizing} == {1, 2}
    assert {config.launch.split_k for config in quantizing} >= {1, 2, 3}
    n_at = 9  # among the arguments
    assert any(
        config.quantize and -(-arguments[n_at].value // config.weights) > grid
        for (config, _), (grid, arguments, _) in zip(variants, launches, strict=True)
    )
    assert {config for config in configs if not config.quantize} == set(sanitize.CONFIGS)
    for flag in ("block_scales", "one_token_tile", "tma_store"):
        assert {getattr(variant, flag) for _, variant in variants} == {False, True}
    for dtype in ("out_dtype", "bias_dtype"):
        assert {getattr(variant, dtype) for _, variant in variants} == set(sanitize.FLOATS)


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the test's folder the only place of programs and of NVIDIA's packages."""
    (tmp_path / "nvidia").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)


def test_the_sanitizer_is_found_on_the_path_and_in_packages(
    without_tools: None, tmp_path: Path
) -> None:
    assert sanitize.find_sanitizer() == ""
    packaged = tmp_path / "nvidia" / "cu13" / "compute-sanitizer"
    packaged.mkdir(parents=True)
    inside = scripted(packaged, {})
    assert sanitize.find_sanitizer() == inside
    assert sanitize.find_sanitizer() != scripted(tmp_path, {}) == sanitize.find_sanitizer()


@pytest.mark.parametrize(
    ("found", "said"), [("", "nothing found"), (RACE, "racecheck: 1 findings")]
)
def test_the_exit_status_tells(
    found: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = {(tool, "broken"): (BROKEN, 7) for tool in CLEAN}
    says |= {(tool, "kernels"): (text, 0) for tool, text in CLEAN.items()}
    if found:
        says["racecheck", "kernels"] = (found, 7)
    assert sanitize.main(["--sanitizer", scripted(tmp_path, says)]) == (1 if found else 0)
    assert said in capsys.readouterr().out


def test_no_sanitizer_is_no_clean_run(
    without_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sanitize.main([]) == 2
    assert "pip install nvidia-cuda-sanitizer-api" in capsys.readouterr().out
