"""Capabilities are reported from kernels that actually ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8kit
import fresh
from fp8kit import compat

NAMES = {
    "cutlass_fp8_supported": "fp8",
    "cutlass_block_fp8_supported": "block_fp8",
    "cutlass_group_gemm_supported": "group_gemm",
    "sparse_cutlass_supported": "sparse",
}


@pytest.mark.parametrize("name", list(NAMES))
def test_functions_answer_for_the_current_device(name: str) -> None:
    assert getattr(compat, name)() is compat.supports(NAMES[name])


def test_a_cpu_supports_nothing_and_unknown_kinds_are_refused() -> None:
    assert not any(compat.supports(kind, "cpu") for kind in NAMES.values())
    with pytest.raises(ValueError, match="Did you mean 'block_fp8'"):
        compat.supports("blockfp8")


@pytest.mark.parametrize("device", ["nope", True, -1, [0]])
def test_what_names_no_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"Got device=.* It must be a device"):
        compat.supports("fp8", device)


def test_a_device_that_is_not_here_supports_nothing() -> None:
    assert not compat.supports("fp8", f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(
    "flag",
    ["CUTLASS_FP8_SUPPORTED", "CUTLASS_BLOCK_FP8_SUPPORTED", "USE_ROWWISE_TORCH_SCALED_MM"],
)
def test_flags_are_attributes(flag: str) -> None:
    assert isinstance(getattr(compat, flag), bool)
    with pytest.raises(AttributeError, match="no attribute 'CUTLASS_SUPPORTED'"):
        compat.CUTLASS_SUPPORTED  # noqa: B018


def test_importing_asks_no_device() -> None:
    code = "import torch, fp8kit; fp8kit.compat; print(torch.cuda.is_initialized())"
    assert fresh.run(code).stdout.strip() == "False"


def test_the_probe_of_products_can_fail() -> None:
    """A backend that runs here passes the same probe; one that needs tensor cores does not."""
    x, w = fp8kit.quantize(torch.eye(32, 64)), fp8kit.quantize(torch.eye(64, 64), role="weight")
    with pytest.raises(fp8kit.UnsupportedError):
        fp8kit.scaled_mm(x, w, backend="torch_native")
    assert not compat.supports("torch_rowwise", "cpu")


@pytest.mark.gpu
def test_a_gpu_supports_what_runs_on_it() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert compat.supports("fp8") == (major * 10 + minor >= 89)
    assert not compat.supports("sparse")
