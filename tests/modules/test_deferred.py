"""``Deferred``: results of activations and norms that a layer, or any other code, may read."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8kit
from fp8kit.modules.deferred import DeferredActivation, DeferredNorm
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
        assert type(x) is DeferredActivation
        with RegisteredCalls() as seen:
            assert_bits_equal(layer(scheme=scheme)(x), expected)
        assert OPERATOR in seen.names
    alone = layer(192, scheme)
    with RegisteredCalls() as seen:
        assert_bits_equal(alone(activation(up)), alone(activated(up)))
    assert seen.names[0] == "activation_quantize"


# other readers of an activation, which get an ordinary tensor
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
    "a comparison": lambda a: (a == 0).float() + (a > 0) + abs(a) % 2,
    "rows": lambda a: torch.stack(list(a)) * len(a),
    "copies": lambda a: copy.deepcopy(a) + pickle.loads(pickle.dumps(a)),
}


@torch.no_grad()
@pytest.mark.parametrize("reader", READERS)
def test_whatever_else_reads_one_gets_a_tensor(reader: str) -> None:
    read = READERS[reader]
    assert_bits_equal(read(activation()), read(activation().tensor()))


@torch.no_grad()
def test_a_tensor_of_another_dtype_does_not_wait_beside_one() -> None:
    assert type(torch.cat([LEFT.half(), activation()], dim=2)) is Tensor  # type: ignore[list-item]


WRITES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda a: a.mul_(2),
    "a function": lambda a: torch.clamp_(a, max=0.1),
    "a view": lambda a: a[..., :5].zero_(),
    "an item": lambda a: operator.setitem(a, (..., 0), 3.0),
}


@torch.no_grad()
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_place_is_read(write: str) -> None:
    waiting: Any
    for waiting, tensor in ((activation(), activated()), (concatenated(), whole())):
        WRITES[write](waiting)
        WRITES[write](tensor)
        assert_bits_equal(layer(tensor.shape[-1])(waiting), layer(tensor.shape[-1])(tensor))
    waiting = activation()
    both = torch.cat([LEFT, waiting], dim=2)
    waiting.zero_()
    assert_bits_equal(both * 1, whole())
    assert_bits_equal(
        torch.cat([LEFT, waiting], dim=2), torch.cat([LEFT, torch.zeros_like(RIGHT)], dim=2)
    )


def concatenated() -> Any:
    return torch.cat([LEFT, activation()], dim=2)  # type: ignore[list-item]


def test_columns_that_were_written_are_not_read() -> None:
    left = LEFT.clone()
    waiting: Any = activation()
    x = torch.cat([left, waiting], dim=2)
    left.zero_()
    with pytest.raises(fp8kit.UnsupportedError, match="concatenated with, was written before"):
        layer()(x)


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
    with torch.no_grad():
        x = torch.cat([left, waiting], dim=2)
    assert not (x * 1).requires_grad
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


@torch.no_grad()
def test_autocast_of_the_layer_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        x: Any = activation()
        assert_bits_equal(layer(192)(x), layer(192)(activated()))


class Gated(nn.Module):
    """A user's own activation: SiLU of one half times the other, or a variant of that."""

    def __init__(self, bound: float | None = None, wide: bool = False, dim: int = -1) -> None:
        super().__init__()
        self.gate_fn = nn.SiLU()
        self.bound, self.wide, self.dim = bound, wide, dim

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x.float() if self.wide else x).chunk(2, self.dim)
        y: Tensor = self.gate_fn(gate.clamp(max=self.bound) if self.bound else gate) * up
        return y.to(x.dtype)


class Block(nn.Module):
    """Projection, activation, projection."""

    def __init__(self, act: nn.Module, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(128, 256), act, nn.Linear(128, 128)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.fc1(x))


def blocks(act: nn.Module, code: Callable[[Any, Tensor], Tensor]) -> tuple[Any, Any]:
    """Return a model whose activation is deferred, and one whose activation is not."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(act, code)]).bfloat16().requires_grad_(False)
    fused = copy.deepcopy(plain)
    fp8kit.convert(plain, fuse="none")
    fp8kit.convert(fused, fuse={"0": ["act -> fc2"]})
    assert type(fused[0].get_submodule("act")).__name__ == "FusedActivation"
    return fused[0], plain[0]


# ways in which code may call activation and layer
CODES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the name of an argument": lambda b, h: b.fc2(b.act(x=h)),
    "reentrant checkpoint": lambda b, h: b.fc2(checkpoint(b.act, h, use_reentrant=True)),
    "jagged": lambda b, h: b.fc2(b.act(jagged(h))).values(),
}


def jagged(h: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 5]))


@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize("code", CODES)
def test_blocks_compute_as_they_do_unfused(code: str) -> None:
    results = []
    for block in blocks(Gated(), CODES[code]):
        torch.manual_seed(1)
        x = torch.randn(5, 128, dtype=torch.bfloat16).requires_grad_("checkpoint" in code)
        y = block(x)
        if x.requires_grad:
            y.sum().backward()
        results.append((y, x if x.grad is None else x.grad))
    for found, expected in zip(*results, strict=True):
        assert_bits_equal(found, expected)


@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize("kind", [{"bound": 7.0}, {"wide": True}, {"dim": 1}], ids=str)
def test_gated_activations_that_compute_something_else_are_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(fp8kit.ConversionError, match="before an arrow"):
        blocks(Gated(**kind), lambda b, h: b.fc2(b.act(h)))


@torch.no_grad()
@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize("eager", ["act", "fc2"])
def test_a_part_outside_of_the_graph_is_no_write(eager: str) -> None:
    def code(block: Any, h: Tensor) -> Tensor:
        apart: Any = torch.compiler.disable(lambda module, x: module(x))
        h = apart(block.act, h) if eager == "act" else block.act(h)
        y: Tensor = apart(block.fc2, h) if eager == "fc2" else block.fc2(h)
        return y

    torch.compiler.reset()
    fused, plain = blocks(Gated(), code)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    x.add_(1)
    assert_bits_equal(torch.compile(fused, backend="eager")(x), plain(x))


@torch.no_grad()
@pytest.mark.usefixtures("fuses_on_cpu")
def test_another_gate_counts_in_graphs() -> None:
    torch.compiler.reset()
    fused, plain = blocks(Gated(), lambda b, h: b.fc2(b.act(h)))
    compiled, x = torch.compile(fused, backend="eager"), torch.randn(5, 128, dtype=torch.bfloat16)
    assert_bits_equal(compiled(x), plain(x))
    fused.act.gate_fn = plain.act.gate_fn = nn.GELU()
    assert_bits_equal(compiled(x), plain(x))


NORM_READERS: dict[str, Callable[[Any, Any], Tensor]] = {
    "layer": lambda layer, y: layer(y),
    "siblings": lambda layer, y: layer(y) + layer(y),
    "break": lambda layer, y: layer((torch._dynamo.graph_break(), y)[1]),
    "shape": lambda layer, y: layer(y).view(*y.shape[:-1], 2, -1),
    "function": lambda layer, y: torch.relu(y) + layer(y).mean(),
    "operator": lambda layer, y: y * 2 + layer(y).mean(),
    "write": lambda layer, y: layer(y.mul_(2)) + layer(y),
    "write, then layer": lambda layer, y: (y.add_(1), layer(y))[1],
    "other scheme": lambda _, y: WEIGHT_ONLY(y),
}
WEIGHT_ONLY = layer(192, "FP8_WEIGHT_ONLY")


@torch.no_grad()
@pytest.mark.parametrize("reader", NORM_READERS)
def test_a_norm_in_a_graph_is_read_as_codes_or_as_a_tensor(reader: str) -> None:
    torch.compiler.reset()
    read, alone = NORM_READERS[reader], layer(192)

    def function(x: Tensor, deferred: bool) -> Tensor:
        y: Any = x * 2
        if deferred:
            y = DeferredNorm(y, alone.quantize_input(y), alone.scheme)
        return read(alone, y)

    found = torch.compile(function, backend="eager")(RIGHT, True)
    assert_bits_equal(found, function(RIGHT, False))


@torch.no_grad()
def test_codes_of_a_norm_are_what_layers_multiply() -> None:
    torch.compiler.reset()
    alone = layer(192)
    function = torch.compile(
        lambda x: alone(DeferredNorm(x, alone.quantize_input(2 * x), alone.scheme)), backend="eager"
    )
    assert_bits_equal(function(RIGHT), alone(2 * RIGHT))  # codes of other numbers, on purpose
