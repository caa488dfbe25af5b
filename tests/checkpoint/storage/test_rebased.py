"""MX weights that were saved rebased are read as MX again only if they are complete."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp8kit
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.checkpoint.storage.rebased import RestoredCodes, as_mx
from numerics import assert_bits_equal
from tiny_experts import tiny

WHOLE = {
    "a.weight": (torch.float8_e4m3fn, (128, 256)),
    "a.weight_scale": (torch.float32, (128, 1)),
    "a.weight_exponents": (torch.uint8, (128, 8)),
}


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({"a.weight_scale": (torch.float32, (1, 2))}, True),
        ({"a.weight_scale": (torch.float32, (128, 2))}, False),
        ({"a.weight_scale": (torch.bfloat16, (128, 1))}, False),
        ({"a.weight_exponents": (torch.uint8, (128, 4))}, False),
        ({"a.weight_exponents": (torch.float32, (128, 8))}, False),
        ({"a.weight": (torch.float8_e5m2, (128, 256))}, False),
        ({"a.weight_scale": None}, False),
    ],
)  # fmt: skip
def test_only_whole_weights_are_restored(changes: dict[str, object], whole: bool) -> None:
    kinds = {name: kind for name, kind in (WHOLE | changes).items() if kind}
    tensors = {n: TensorInfo(n, "model.safetensors", *kind, offset=0) for n, kind in kinds.items()}
    found = as_mx(tensors)
    assert isinstance(found["a.weight"], RestoredCodes) is whole
    assert ("a.weight_exponents" in found) is not whole
    if not whole:
        assert found == tensors


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss", "Llama4Text", "GraniteMoe", "NemotronH"])
def test_stacks_that_a_saver_wrote_rebased_are_mx_again(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny(kind)
    fp8kit.convert(model, "MXFP8")
    written = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("_proj_exponents") for name in written)
    save_file(written, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fp8kit.load(tmp_path, tiny(kind))
    assert found.state_dict().keys() == written.keys()
    for name, tensor in found.state_dict().items():
        assert_bits_equal(tensor, written[name])
