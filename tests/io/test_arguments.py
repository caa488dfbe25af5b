"""Invalid or absent devices and dtypes are refused before any file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8kit
from checkpoint_samples import NANO
from fp8kit.errors import InvalidType, InvalidValue

ABSENT = "cuda:99"


@pytest.mark.parametrize(
    "device", [ABSENT, "meta", "gpu", "hpu", "xpu:9", True, 99, [1], torch.device(ABSENT)]
)
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: Any) -> None:
    with pytest.raises(InvalidValue, match=r"Got device=.*a device of this machine that can hold"):
        fp8kit.load(tmp_path / "nowhere", device=device)
    model = nn.Sequential(nn.Linear(128, 128))
    with pytest.raises(InvalidValue, match="Got device="):
        fp8kit.load_weights(model, {}, scheme="FP8_DYNAMIC", device=device)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    "dtype", ["bfloat16", torch.int8, bool, 16, torch.float8_e4m3fn, torch.float64, [1]]
)
def test_a_dtype_that_is_no_high_precision_is_refused(tmp_path: Path, dtype: Any) -> None:
    kind = InvalidValue if isinstance(dtype, torch.dtype) else InvalidType
    with pytest.raises(kind, match=r"It must be the high precision of the model: bfloat16"):
        fp8kit.load(tmp_path / "nowhere", dtype=dtype)


@pytest.mark.parametrize("missing", ["a", 5, [5], None, {"a": 1}, lambda name: True, ["re:("]])
def test_missing_is_a_list_of_patterns(tmp_path: Path, missing: Any) -> None:
    with pytest.raises(ValueError, match=r"Got missing=|The missing pattern 're:\(' is not a reg"):
        fp8kit.load(tmp_path / "nowhere", nn.Sequential(nn.Linear(128, 128)), missing=missing)


def test_missing_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"Got missing=\['a'\] and no model"):
        fp8kit.load(tmp_path / "nowhere", missing=["a"])


@pytest.mark.parametrize(
    "widths",
    [
        "a",
        5,
        ["a"],
        {5: (1,)},
        {"a": 5},
        {"a": None},
        {"a": "bc"},
        {"a": (1.0,)},
        {"re:(": (1,)},
        "",
        [],
        0,
        torch.ones(2),
    ],
)
def test_widths_are_rows_by_patterns(tmp_path: Path, widths: Any) -> None:
    message = r"Got widths=.*Pass \{'\*.in_proj|The widths pattern 're:\(' is not a regular"
    with pytest.raises((TypeError, ValueError), match=message):
        fp8kit.load(tmp_path / "nowhere", widths=widths)


@pytest.mark.parametrize(
    "devices", ["cpu", torch.device("cpu"), [], True, [ABSENT], [None, "cpu"], b"cpu"]
)
def test_devices_of_workers_are_a_list(tmp_path: Path, devices: Any) -> None:
    with pytest.raises((InvalidType, InvalidValue), match=r"Got (no )?device"):
        fp8kit.quantize_checkpoint(NANO, tmp_path / "out", devices=devices)
    assert not list(tmp_path.iterdir())


def test_devices_beside_a_runner_are_refused(tmp_path: Path) -> None:
    def runner(*_: Any) -> None:
        raise AssertionError("it is not called")

    with pytest.raises(InvalidValue, match="Got devices beside a runner"):
        fp8kit.quantize_checkpoint(NANO, tmp_path / "out", devices=["cpu"], runner=runner)


@pytest.mark.parametrize("target", [None, 3, []])
def test_a_target_that_is_no_word_is_refused(tmp_path: Path, target: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    fp8kit.convert(model, exclude=[])
    with pytest.raises(InvalidValue, match="It must be one of vllm"):
        fp8kit.save(model, tmp_path / "out", target=target)


def test_what_is_evaluated_are_two_modules_and_batches() -> None:
    model: Any = nn.Linear(128, 128)
    with pytest.raises(InvalidType, match="Got a NoneType as reference"):
        fp8kit.evaluate(model, None, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="Got data of type NoneType"):
        fp8kit.evaluate(model, model, None)  # type: ignore[arg-type]
