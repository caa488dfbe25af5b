"""Activations that wait to be read: by a layer, also behind other columns, or anything else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.modules.deferred import DeferredActivation, DeferredConcat
from numerics import assert_bits_equal, relative_error
from registered_calls import RegisteredCalls

OPERATOR = "concatenated_activation_quantize"
LEFT, RIGHT = torch.randn(2, 3, 64), torch.randn(2, 3, 192)


def layer(k: int = 256, scheme: str = "FP8_DYNAMIC") -> fp8kit.Fp8Linear:
    torch.manual_seed(0)
    return fp8kit.Fp8Linear.from_linear(nn.Linear(k, 128), scheme)


def activation(up: Tensor | None = None) -> DeferredActivation:
    return DeferredActivation("gelu_tanh", RIGHT, up)


def activated(up: Tensor | None = None) -> Tensor:
    y = nn.functional.gelu(RIGHT, approximate="tanh")
    return y if up is None else y * up


def whole(up: Tensor | None = None) -> Tensor:
    return torch.cat((LEFT, activated(up)), 2)


@torch.no_grad()
@pytest.mark.parametrize("up", [None, torch.randn(2, 3, 192)], ids=["alone", "gated"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_a_layer_computes_what_it_reads(scheme: str, up: Tensor | None) -> None:
    expected = layer(scheme=scheme)(whole(up))
    for dim in (2, -1):
        x = torch.cat([LEFT, activation(up)], dim=dim)  # type: ignore[list-item]
        assert type(x) is DeferredConcat
        with RegisteredCalls() as seen:
            assert_bits_equal(layer(scheme=scheme)(x), expected)
        assert OPERATOR in seen.names
    alone = layer(192, scheme)
    with RegisteredCalls() as seen:
        assert_bits_equal(alone(activation(up)), alone(activated(up)))
    assert seen.names[0] == "activation_quantize"


# what else may read an activation, and gets a tensor
READERS: dict[str, Callable[[Any], Any]] = {
    "product": lambda a: a * 2 + 1,
    "product from the right": lambda a: RIGHT * a,
    "function": lambda a: torch.sigmoid(a),
    "keyword": lambda a: torch.add(RIGHT, other=a),
    "index": lambda a: a[:, :2],
    "method": lambda a: a.float().chunk(2, -1)[1],
    "shape": lambda a: torch.ones(a.shape) * a.ndim * len(a.size()),
    "another dimension": lambda a: torch.cat([RIGHT, a], dim=1),
    "the left": lambda a: torch.cat([a, LEFT], dim=2),
    "three parts": lambda a: torch.cat([LEFT, a, LEFT], dim=2),
    "another dtype": lambda a: torch.cat([LEFT.half(), a], dim=2),
    "stack": lambda a: torch.stack([a, RIGHT]),
    "itself": lambda a: a @ a.transpose(-1, -2),
    "a layer": lambda a: layer(192)(a),
    "a dense layer": lambda a: nn.functional.linear(a, RIGHT[0]),
    "half of the whole": lambda a: torch.cat([LEFT, a], dim=2)[..., 1:].sum(-1),
    "a narrower layer": lambda a: layer(128)(torch.cat([LEFT, a], dim=2)[..., :128]),
    "copies": lambda a: copy.deepcopy(a) + pickle.loads(pickle.dumps(a)),
}


@torch.no_grad()
@pytest.mark.parametrize("reader", READERS)
def test_whatever_else_reads_one_gets_a_tensor(reader: str) -> None:
    read = READERS[reader]
    assert_bits_equal(read(activation()), read(activation().tensor()))


def test_an_input_that_was_written_is_not_read() -> None:
    gate = RIGHT.clone()
    waiting = DeferredActivation("silu", gate)
    gate.zero_()
    for read in (lambda: waiting * 1, lambda: layer(192)(waiting)):
        with pytest.raises(fp8kit.UnsupportedError, match=r"was written before.*fuse='inputs'"):
            read()


def test_gradients_flow_as_through_the_tensor() -> None:
    left, gate = LEFT.clone().requires_grad_(), RIGHT.clone().requires_grad_()
    with torch.no_grad():
        waiting: Any = DeferredActivation("silu", gate)
    x = torch.cat([left, waiting], dim=2)
    layer()(x).sum().backward()
    assert left.grad is not None
    assert left.grad.abs().sum() > 0
    assert gate.grad is None
    biased = layer(192)
    assert biased.bias is not None
    biased.bias.requires_grad_()
    biased(waiting).sum().backward()
    assert biased.bias.grad is not None


def test_where_codes_may_not_be_the_layer_gets_a_tensor() -> None:
    x: Any = torch.cat([LEFT, activation()], dim=2)  # type: ignore[list-item]
    with torch.no_grad():
        bounded = layer()
        bounded.scale_ub = 0.5
        assert relative_error(bounded(x), layer()(whole())) > 0.1
        assert_bits_equal(layer(scheme="MXFP8")(x), layer(scheme="MXFP8")(whole()))
        with pytest.raises(ValueError, match="128"):
            layer(128)(x)
