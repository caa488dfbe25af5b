"""Codes and scales change together: after an interrupt a layer has old, new or no values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.schema.decoding import cast_numbers
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.mx_forms import stored_weight
from fp8kit.modules.parameters import written_together
from interrupts import interrupted

N = 32
LOAD = nn.Module._load_from_state_dict


def layer(seed: int, scheme: str = "FP8_DYNAMIC") -> fp8kit.Fp8Linear:
    torch.manual_seed(seed)
    dense = nn.Linear(64, N, bias=False)
    return fp8kit.Fp8Linear.from_linear(dense, scheme)


def experts(seed: int) -> fp8kit.Fp8Experts:
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 2 * N, 64), (3, 64, N)
    return fp8kit.Fp8Experts.from_dense(*(torch.randn(s, generator=generator) for s in shapes))


def outcomes(
    make: Callable[[], Any],
    change: Callable[[Any], object],
    values: Callable[[Any], list[Tensor]],
    function: Any,
    visit: int = 1,
) -> set[str]:
    """Interrupt a change at every third instruction of a function; return what values became."""
    before, changed, found = values(make()), make(), set()
    change(changed)
    after, step, going = values(changed), 0, True
    while going:
        subject = make()
        with torch.enable_grad():  # an interrupt of no_grad() would leave it on
            going = interrupted(lambda: change(subject), function, step=step, visit=visit)  # noqa: B023
        for value, old, new in zip(values(subject), before, after, strict=True):
            whole = "old" * torch.equal(value, old) or "new" * torch.equal(value, new)
            found.add(whole or ("nan" if value.isnan().all() else "torn"))
        step += 3
    return found


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8", "MXFP8_ROW"])
def test_an_interrupted_load_state_dict_leaves_no_mixture(scheme: str, assign: bool) -> None:
    held, state = layer(0, scheme), layer(1, scheme).state_dict()
    given = {name: tensor.clone() for name, tensor in state.items()}

    def load(subject: nn.Module) -> None:
        subject.load_state_dict(state, assign=assign)

    def values(subject: Any) -> list[Tensor]:
        return [fp8kit.dequantize(q) for q in (subject.quantized_weight(), stored_weight(subject))]

    found = outcomes(lambda: copy.deepcopy(held), load, values, LOAD)
    assert found == {"old", "new", "nan"}
    assert all(torch.equal(state[n].view(torch.uint8), given[n].view(torch.uint8)) for n in given)


@pytest.mark.parametrize(("visit", "wanted"), [(1, {"old", "new"}), (2, {"nan", "new"})])
def test_an_interrupted_load_weights_leaves_no_mixture(visit: int, wanted: set[str]) -> None:
    """Codes are cast and written first, then scales."""
    held, state = layer(0), layer(1).state_dict()
    found = outcomes(
        lambda: copy.deepcopy(held),
        lambda subject: fp8kit.load_weights(subject, state),
        lambda subject: [fp8kit.dequantize(subject.quantized_weight())],
        cast_numbers,
        visit,
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("change", "function"),
    [
        (lambda subject, state: subject.load_state_dict(state), LOAD),
        (
            lambda subject, state: fp8kit.load_weights(subject, state),
            inspect.unwrap(ExpertTensors.store),
        ),
    ],
)
def test_interrupted_loads_of_experts_leave_no_mixture(change: Any, function: Any) -> None:
    held, state = experts(0), experts(1).state_dict()
    found = outcomes(
        lambda: copy.deepcopy(held),
        lambda subject: change(subject, state),
        lambda subject: [w for n in subject.stacks.names for w in decoded(subject, n)],
        function,
    )
    assert found == {"old", "new", "nan"}


def decoded(subject: ExpertTensors, name: str) -> list[Tensor]:
    return list(fp8kit.dequantize(subject.quantized(name)))


def test_an_interrupted_placement_of_experts_computes_nan() -> None:
    held, x = experts(0), torch.randn(2, 64)
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    found = outcomes(
        lambda: copy.deepcopy(held),
        lambda subject: subject.place(torch.tensor([2, 0, 1])),
        lambda subject: [subject(x, ids, weights)],
        inspect.unwrap(fp8kit.Fp8Experts.place),
    )
    assert found == {"old", "nan"}  # experts in another order compute the same


def test_an_error_before_anything_is_written_changes_nothing() -> None:
    held = layer(0)
    before = held.weight_scale.clone()
    with pytest.raises(ZeroDivisionError), written_together(held, ("weight",)):
        raise ZeroDivisionError
    assert torch.equal(held.weight_scale, before)


def half_written(held: fp8kit.Fp8Linear) -> None:
    with written_together(held, ("weight",)):
        held.codes.view(torch.uint8).zero_()
        raise ZeroDivisionError


def test_writes_that_torch_does_not_count_become_nan() -> None:
    with torch.inference_mode():
        held = layer(0)
        with pytest.raises(ZeroDivisionError):
            half_written(held)
        assert held.weight_scale.isnan().all()
