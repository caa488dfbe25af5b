from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8kit
from fp8kit.conversion import calibration
from fp8kit.errors import ConversionError
from fp8kit.formats import FP8_FORMATS, TENSOR
from numerics import assert_bits_equal


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def test_amax_is_the_largest_over_all_calls() -> None:
    model = mlp()
    batches = [torch.ones(2, 8), -3 * torch.ones(1, 8), 2 * torch.ones(4, 8)]
    found = calibration.observe_amax(model, ["0"], lambda m: [m(b) for b in batches])
    assert list(found) == ["0"]
    assert found["0"].item() == 3.0
    assert found["0"].dtype == torch.float32


def test_half_precision_inputs_give_fp32() -> None:
    found = calibration.observe_amax(
        mlp().bfloat16(), ["0", "1"], lambda m: m(torch.ones(2, 8).bfloat16())
    )
    assert {a.dtype for a in found.values()} == {torch.float32}


def test_all_calls_of_a_compiled_model_are_seen() -> None:
    model = torch.compile(mlp(), backend="eager")
    assert isinstance(model, nn.Module)
    large, small = torch.full((2, 8), 5.0), torch.ones(1, 8)
    with torch.no_grad():
        model(large)  # compiled for this shape, without hooks
    found = calibration.observe_amax(model, ["_orig_mod.0"], lambda m: (m(small), m(large)))
    assert found["_orig_mod.0"].item() == 5.0


def test_inputs_by_keyword_are_seen() -> None:
    found = calibration.observe_amax(mlp(), ["0"], lambda m: m[0](input=torch.full((2, 8), 5.0)))
    assert found["0"].item() == 5.0


def test_empty_inputs_do_not_count() -> None:
    def run(model: nn.Module) -> None:
        model(torch.empty(0, 8))
        model(torch.full((1, 8), 2.0))

    assert calibration.observe_amax(mlp(), ["0"], run)["0"].item() == 2.0
    with pytest.raises(ConversionError, match=r"never reached 0\."):
        calibration.observe_amax(mlp(), ["0"], lambda m: m(torch.empty(0, 8)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_inputs_are_named(bad: float) -> None:
    def run(model: nn.Module) -> None:
        model(torch.ones(1, 8))
        model[0](torch.full((1, 8), bad))
        model(torch.ones(1, 8))

    with pytest.raises(ConversionError, match=r"saw NaN or infinities in 0\."):
        calibration.observe_amax(mlp(), ["0", "1"], run)


def test_inputs_that_were_all_zero_are_named() -> None:
    def run(model: nn.Module) -> None:
        model[0](torch.zeros(1, 8))
        model[1](torch.zeros(1, 4))
        model[1](torch.full((1, 4), 1e-30))

    with pytest.raises(ConversionError, match=r"^Calibration saw only zeros in 0\."):
        calibration.observe_amax(mlp(), ["0", "1"], run)


def test_everything_wrong_is_named_at_once() -> None:
    def run(model: nn.Module) -> None:
        model[0](torch.full((1, 8), torch.nan))

    words = r"never reached 1 and saw NaN or infinities in 0\. A static"
    with pytest.raises(ConversionError, match=words):
        calibration.observe_amax(mlp(), ["0", "1"], run)


def test_of_many_layers_some_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
    with pytest.raises(ConversionError, match=r"never reached 0, 1, 2, 3, 4 and 2 more\."):
        calibration.observe_amax(model, list("0123456"), lambda _: None)


def test_hooks_are_removed_after_an_error_too() -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        calibration.observe_amax(model, ["0", "1"], lambda m: m(torch.ones(1, 3)))
    calibration.observe_amax(model, ["0"], lambda m: m(torch.ones(1, 8)))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_observation_builds_no_graph() -> None:
    seen: list[bool] = []
    calibration.observe_amax(
        mlp(), ["0"], lambda m: seen.append(m(torch.ones(1, 8, requires_grad=True)).requires_grad)
    )
    assert seen == [False]


@pytest.mark.parametrize("dtype", FP8_FORMATS, ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-12, 0.37, 3.0, 60000.0])
def test_input_scale_is_the_dynamic_tensor_scale(
    amax: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.tensor([[amax, 0.0]], device=device)
    scale = calibration.input_scale(x.abs().amax(), dtype)
    assert_bits_equal(scale, fp8kit.quantize(x, TENSOR, dtype=dtype).scale)
