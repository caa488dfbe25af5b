"""The comparison of fused, shared and replayed calls with plain ones can fail; on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8kit.modules.shared_input import SharedInput
from zoo import of_transformers
from zoo.architecture import Architecture
from zoo.on_gpu import check


@pytest.fixture(scope="module")
def llama() -> Architecture:
    return next(a for a in of_transformers.architectures() if a.name.endswith("/LlamaForCausalLM"))


def checked(arch: Architecture) -> dict[str, Any]:
    return check(arch, "FP8_DYNAMIC", torch.bfloat16, "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("fuses_on_cpu")
def test_shared_and_fused_layers_compute_what_plain_ones_do(llama: Architecture) -> None:
    record = checked(llama)
    assert record.pop("status") == "passes"
    assert {"repeated", "another input", "inference mode", "loaded in place"} <= set(record)


@pytest.mark.slow
def test_stale_results_are_seen(llama: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, Tensor] = {}
    own = SharedInput.__call__

    def stale(group: SharedInput, member: Any, x: Tensor) -> Tensor:
        return kept.setdefault(id(member), own(group, member, x))

    monkeypatch.setattr(SharedInput, "__call__", stale)
    status = checked(llama)["status"]
    assert status.startswith("wrong: another input")
    assert "loaded in place" in status


def test_what_has_no_fp8_layer_is_dense() -> None:
    arch = Architecture("norm", lambda: nn.LayerNorm(8), lambda _: [{"": (torch.randn(2, 8),)}])
    assert checked(arch) == {"status": "dense"}
