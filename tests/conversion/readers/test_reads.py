"""Model code that reads a weight: each form leaves the layer dense, with the reason.

Reads that the source does not show raise at run time: ``tests/modules/test_guarded_weight.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.utils.checkpoint import checkpoint

import fp8kit
from fp8kit.conversion.readers.reads import Reader, weight_reads
from fp8kit.conversion.readers.source import node_of
from fp8kit.conversion.readers.values import Scope
from fp8kit.conversion.readers.walk import Walk
from numerics import relative_error

SIZE = 128
READS = "reads its weight instead of calling it"


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(SIZE, SIZE)
        self.other = nn.Linear(SIZE, SIZE)
        self.many = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(SIZE, SIZE)})
        self.bound = functools.partial(weighed_proj, self)
        self.kept = lambda x: F.linear(x, self.proj.weight.to(x.dtype))
        self.functions = [lambda x: weighed(self.proj, x)]
        self.processor = Processor()
        self.casts = False
        self.grown: list[nn.Linear] = []
        self.bilinear = nn.Bilinear(4, 4, 4)

    @property
    def transposed(self) -> Tensor:
        return self.proj.weight.t()

    def own(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight.to(x.dtype), layer.bias)

    def _through_itself(self, x: Tensor) -> Tensor:
        return weighed(self.proj, x)

    @functools.lru_cache  # noqa: B019  (as models do it)
    def _cached_weight(self) -> Tensor:
        return self.proj.weight.t()

    def pick(self) -> nn.Linear:
        return self.proj

    def each(self) -> Any:
        yield from (self.proj, self.other)


def weighed(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


def weighed_proj(holder: Holder, x: Tensor) -> Tensor:
    return weighed(holder.proj, x)


def multiplied(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ matrix.to(x.dtype).T


def first_rows(x: Tensor, matrix: Tensor) -> Tensor:
    return matrix.to(torch.float32)[: x.shape[0]]


def weighed_by(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class Processor:
    def __call__(self, holder: Any, x: Tensor) -> Tensor:
        return F.linear(x, holder.proj.weight.to(x.dtype))


def nested(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return F.linear(y, self.proj.weight.to(y.dtype))

    return inner(x)


def local(self: Any, x: Tensor) -> Tensor:
    w = self.proj.weight
    return x @ w.to(x.dtype).T


def by_layer(self: Any, x: Tensor) -> Tensor:
    layer = self.proj
    w, b = layer.weight, layer.bias
    return F.linear(x, w.to(x.dtype), b)


def copied(self: Any, x: Tensor) -> Tensor:
    dense = torch.empty(SIZE, SIZE)
    dense.copy_(self.proj.weight)
    return x @ dense.T


def loop(self: Any, x: Tensor) -> Tensor:
    for layer in self.many:
        x = F.linear(x, layer.weight.to(x.dtype))
    return x


def zipped(self: Any, x: Tensor) -> Tensor:
    for (_, layer), _unused in zip(enumerate(self.many), range(2), strict=False):
        x = F.linear(x, layer.weight.to(x.dtype))
    return x


def walked(self: Any, x: Tensor) -> Tensor:
    for name, module in self.named_modules():
        if name == "proj":
            x = F.linear(x, module.weight.to(x.dtype))
    return x


def collected(self: Any, x: Tensor) -> Tensor:
    weights = []
    for layer in self.many:
        weights.append(layer.weight)
    return x @ torch.stack(weights).to(x.dtype).sum(0).T


def orthogonal(self: Any, x: Tensor) -> Tensor:
    w = self.proj.weight
    return self.proj(x) + (w @ w.t() - torch.eye(SIZE)).norm()


def standardized(self: Any, x: Tensor) -> Tensor:
    w = self.proj.weight
    return F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True))


def recomputed(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return F.linear(y, self.proj.weight.to(y.dtype))

    result: Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


def walrus(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, (w := self.proj.weight).to(x.dtype)) * w.shape[0]


def unpacked(self: Any, x: Tensor) -> Tensor:
    return multiplied(*(x, self.proj.weight))


def after_unpacked(self: Any, x: Tensor) -> Tensor:
    return first_rows(*[x], self.proj.weight)


def keywords(self: Any, x: Tensor) -> Tensor:
    options = {"matrix": self.proj.weight}
    return multiplied(x, **options)


def matched(self: Any, x: Tensor) -> Tensor:
    match self.proj:
        case nn.Linear() as layer:
            return F.linear(x, layer.weight.to(x.dtype))
    return x


def stored(self: Any, x: Tensor) -> Tensor:
    self.at_run_time = [self.proj]
    return weighed(self.at_run_time[0], x)


def matched_attribute(self: Any, x: Tensor) -> Tensor:
    match self.proj:
        case nn.Linear(weight=w):
            return F.linear(x, w.to(x.dtype))
    return x


def matched_parts(self: Any, x: Tensor) -> Tensor:
    match (self.proj, self.other):
        case (layer, *_) if x.numel():
            return F.linear(x, layer.weight.to(x.dtype))
    return x


def turned(self: Any, x: Tensor) -> Tensor:
    turns = 0
    while turns < 2:
        x, turns = F.linear(x, self.proj.weight.to(x.dtype)), turns + 1
    return x


def applied(self: Any, x: Tensor) -> Tensor:
    weights: list[Tensor] = []
    self.proj.apply(lambda module: weights.append(module.weight))
    return F.linear(x, weights[0].to(x.dtype))


def applied_to_all(self: Any, x: Tensor) -> Tensor:
    def take(module: nn.Module) -> None:
        if module is self.proj:
            weights.append(module.weight)

    weights: list[Any] = []
    self.apply(take)
    return F.linear(x, weights[0].to(x.dtype))


def by_default(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor, w: Tensor = self.proj.weight) -> Tensor:
        return F.linear(y, w.to(y.dtype))

    return inner(x)


def sorted_by_norm(self: Any, x: Tensor) -> Tensor:
    result: Tensor = sorted(self.many, key=lambda layer: layer.weight.detach().norm())[0](x)
    return result


def got(self: Any, x: Tensor) -> Tensor:
    weight, bias = operator.attrgetter("weight", "bias")(self.proj)
    return F.linear(x, weight.to(x.dtype), bias)


def recursive(self: Any, x: Tensor) -> Tensor:
    def run(part: Any, y: Tensor) -> Tensor:  # analysing every recursive call would never end
        if not isinstance(part, nn.ModuleList):
            return weighed(part, y)
        if len(part) > 1:
            return run(part[1:], run(part[0], y))
        return run(part[0], y)

    return run(self.many, x)


def growing(self: Any, x: Tensor, *held: Any) -> Tensor:
    if len(held) == 7:  # with new arguments for each of its calls
        self.forward(x, [held], self.many)
        self.forward(x, [held, self.other], held[0])
        self.forward(x, [held, held[1]], held)
        self.forward(x, [[held], [held[1]]])
        self.forward(x, [[held], self.many], [held])
    return weighed(self.proj, x)


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.linear": lambda self, x: F.linear(x, self.proj.weight),
    "matmul": lambda self, x: x @ self.proj.weight.t(),
    "T": lambda self, x: x @ self.proj.weight.T.to(x.dtype),
    "einsum": lambda self, x: torch.einsum("bk,nk->bn", x, self.proj.weight),
    "addmm": lambda self, x: torch.addmm(self.proj.bias, x, self.proj.weight.t()),
    "mul": lambda self, x: x * torch.mul(self.proj.weight, 2.0)[0],
    "detach.to": lambda self, x: x @ self.proj.weight.detach().to(x.dtype).T,
    "data.to": lambda self, x: x @ self.proj.weight.data.to(x.dtype).T,
    "t.to": lambda self, x: x @ self.proj.weight.t().to(x.dtype),
    "to(x)": lambda self, x: x @ self.proj.weight.to(x).T,
    "type_as": lambda self, x: x @ self.proj.weight.type_as(x).T,
    "float": lambda self, x: x @ self.proj.weight.float().T,
    "type": lambda self, x: x @ self.proj.weight.type(x.dtype).T,
    "index": lambda self, x: x * self.proj.weight[0].to(x.dtype),
    "slice": lambda self, x: x[:, :8] @ self.proj.weight[:, :8].to(x.dtype).T,
    "stack": lambda self, x: x @ torch.stack([self.proj.weight]).to(x.dtype)[0],
    "cat": lambda self, x: x @ torch.cat([self.proj.weight, self.other.weight]).to(x.dtype).T,
    "chunk": lambda self, x: x @ self.proj.weight.chunk(2)[0].to(x.dtype).T,
    "view": lambda self, x: x @ self.proj.weight.view(SIZE, 1, SIZE)[:, 0].to(x.dtype).T,
    "reshape": lambda self, x: x @ self.proj.weight.reshape(-1, SIZE).to(x.dtype).T,
    "clone": lambda self, x: x @ self.proj.weight.clone().to(x.dtype).T,
    "sum": lambda self, x: self.proj(x) + self.proj.weight.sum(),
    "norm": lambda self, x: self.proj(x) / self.proj.weight.norm(),
    "abs.max": lambda self, x: self.proj(x) / self.proj.weight.abs().max(),
    "tolist": lambda self, x: x * torch.tensor(self.proj.weight.tolist())[0],
    "numpy": lambda self, x: x * torch.from_numpy(self.proj.weight.detach().numpy())[0],
    "item": lambda self, x: self.proj(x) * self.proj.weight[0, 0].item(),
    "embedding": lambda self, x: F.embedding(torch.arange(3), self.proj.weight).to(x.dtype),
    "dtype": lambda self, x: self.proj(x.to(self.proj.weight.dtype)),
    "getattr": lambda self, x: F.linear(x, getattr(self.proj, "weight").to(x.dtype)),  # noqa: B009
    "__getattr__": lambda self, x: self.proj.__getattr__("weight").to(x.dtype) @ x.T,
    "nn.Module.__getattr__": lambda self, x: F.linear(
        x, nn.Module.__getattr__(self.proj, "weight").to(x.dtype)
    ),
    "object.__getattribute__": lambda self, x: F.linear(
        x, object.__getattribute__(self.proj, "_parameters")["weight"].to(x.dtype)
    ),
    "__dict__": lambda self, x: F.linear(
        x, self.proj.__dict__["_parameters"]["weight"].to(x.dtype)
    ),
    "get_parameter": lambda self, x: F.linear(x, self.proj.get_parameter("weight").to(x.dtype)),
    "get_parameter of the holder": lambda self, x: F.linear(
        x, self.get_parameter("proj.weight").to(x.dtype)
    ),
    "attrgetter": lambda self, x: operator.attrgetter("weight")(self.proj).to(x.dtype) @ x.T,
    "attrgetter of a path": lambda self, x: F.linear(
        x, operator.attrgetter("proj.weight")(self).to(x.dtype)
    ),
    "map of an attrgetter": lambda self, x: F.linear(
        x, next(map(operator.attrgetter("weight"), [self.proj])).to(x.dtype)
    ),
    "partial of getattr": lambda self, x: F.linear(
        x, functools.partial(getattr, self.proj)("weight").to(x.dtype)
    ),
    "comprehension": lambda self, x: sum([layer.weight.float() @ x.T for layer in [self.proj]]),
    "getattr of the layer": lambda self, x: weighed(getattr(self, "proj"), x),  # noqa: B009
    "computed name": lambda self, x: weighed(getattr(self, "pr" + "oj"), x),
    "state_dict": lambda self, x: F.linear(x, self.proj.state_dict()["weight"].to(x.dtype)),
    "named_parameters": lambda self, x: F.linear(
        x, dict(self.proj.named_parameters())["weight"].to(x.dtype)
    ),
    "parameters": lambda self, x: F.linear(x, next(self.proj.parameters()).to(x.dtype)),
    "parameters of the holder": lambda self, x: F.linear(
        x, next(iter(self.parameters())).to(x.dtype)
    ),
    "_parameters": lambda self, x: F.linear(x, self.proj._parameters["weight"].to(x.dtype)),
    "index of a list": lambda self, x: weighed(self.many[1], x),
    "key of a dict": lambda self, x: weighed(self.named["a"], x),
    "values of a dict": lambda self, x: next(weighed(m, x) for m in {"a": self.proj}.values()),
    "pop": lambda self, x: weighed([self.other, self.proj].pop(), x),
    "functional_call": lambda self, x: functional_call(self.proj, {"weight": torch.eye(SIZE)}, x),
    "stack_module_state": lambda self, x: (
        stack_module_state([self.proj, self.other])[0]["weight"][0].to(x.dtype) @ x.T
    ),
    "list that grows": lambda self, x: [self.grown.append(self.proj), weighed(self.grown[-1], x)][
        1
    ],
    "children": lambda self, x: next(weighed(m, x) for m in self.children() if m is self.proj),
    "get_submodule": lambda self, x: weighed(self.get_submodule("many.0"), x),
    "helper": lambda self, x: weighed(self.proj, x),
    "helper that gets the weight": lambda self, x: multiplied(x, self.proj.weight),
    "method": lambda self, x: self.own(self.proj, x),
    "method that gives the layer": lambda self, x: F.linear(x, self.pick().weight.to(x.dtype)),
    "generator": lambda self, x: next(weighed(layer, x) for layer in self.each()),
    "property": lambda self, x: x @ self.transposed.to(x.dtype),
    "processor": lambda self, x: self.processor(self, x),
    "partial": lambda self, x: functools.partial(weighed, self.proj)(x),
    "partial of the weight": lambda self, x: functools.partial(
        F.linear, weight=self.proj.weight.float()
    )(x),
    "lambda": lambda self, x: (lambda layer: weighed(layer, x))(self.proj),
    "lambda of the holder": lambda self, x: self.kept(x),
    "default of a lambda": lambda self, x: (
        lambda y, w=self.proj.weight: F.linear(y, w.to(y.dtype))
    )(x),
    "lambda in a list": lambda self, x: self.functions[0](x),
    "method of the class": lambda self, x: type(self)._through_itself(self, x),
    "cached method": lambda self, x: F.linear(x, self._cached_weight().to(x.dtype)),
    "reduce": lambda self, x: functools.reduce(lambda y, m: weighed(m, y), self.many, x),
    "own dictionary": lambda self, x: F.linear(
        x, self.proj.__dict__.get("_parameters")["weight"].to(x.dtype)
    ),
    "map": lambda self, x: next(weighed(layer, x) for layer in [self.proj]),
    "condition": lambda self, x: weighed(self.proj if x.numel() else self.other, x),
    **{
        f.__name__: f
        for f in (
            *(nested, local, by_layer, copied, loop, zipped, walked, collected, orthogonal),
            *(standardized, recomputed, walrus, unpacked, after_unpacked, keywords),
            *(matched, matched_attribute, matched_parts, turned, applied, applied_to_all, got),
            *(by_default, sorted_by_norm, recursive, growing, stored),
        )
    },
}


def holder(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return type("Reading", (Holder,), {"forward": forward})()


@pytest.mark.filterwarnings("ignore:No layer becomes FP8")
@pytest.mark.parametrize("name", FORMS)
def test_layers_whose_weight_is_read_stay_dense(name: str) -> None:
    model, x = holder(FORMS[name]), torch.randn(3, SIZE)
    expected = model(x)
    report = fp8kit.convert(model, fuse="none")
    kept = {r.name: r.reason for r in report.skipped if READS in r.reason or "dtype of" in r.reason}
    assert kept, str(report)
    assert len(report.converted) + len(kept) == 5
    assert relative_error(model(x).detach(), expected.detach()) < 0.1


@pytest.mark.parametrize("name", FORMS)
def test_what_code_reads_is_known_without_running_it(name: str) -> None:
    model = holder(FORMS[name]).to("meta")
    assert weight_reads(model), name


def test_the_bound_helper_of_a_holder_keeps_its_dense_layer() -> None:
    model, x = holder(lambda self, x: self.bound(x)), torch.randn(3, SIZE)
    expected = model(x)
    fp8kit.convert(model)
    torch.testing.assert_close(model(x), expected)


class Others:
    """Parameters that are put into a module for a while, as a ``TensorDict`` does."""

    @contextlib.contextmanager
    def to_module(self, module: nn.Linear) -> Iterator[None]:
        own, module.weight = module.weight, nn.Parameter(torch.eye(SIZE))
        yield
        module.weight = own


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.called = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, others: Others) -> Any:
        with others.to_module(self.proj):
            return self.called(self.proj(x))


def test_a_layer_that_gets_other_parameters_stays_dense() -> None:
    model, x = Swapping(), torch.randn(3, SIZE)
    expected = model(x, Others())
    report = fp8kit.convert(model)
    assert [r.name for r in report.skipped] == ["proj"]
    assert 0.001 < relative_error(model(x, Others()), expected) < 0.1


def test_methods_of_tensordict_are_not_followed() -> None:
    model = holder(lambda self, x: self.proj(x))
    members = {"__module__": "tensordict.nn.params", "to": lambda self, x: weighed(self.proj, x)}
    model.params = type("TensorDictParams", (Holder,), members)()
    assert not weight_reads(model)


class Hook:
    def __call__(self, module: Any, args: Any, result: Tensor) -> Tensor:
        return F.linear(args[0], module.weight.to(args[0].dtype))

    def method(self, module: Any, args: Any, result: Tensor) -> Tensor:
        return self(module, args, result)


def before(module: Any, args: Any) -> Any:
    return (args[0] * module.weight.float().norm(),)


def applying(module: Any, args: Any) -> Any:
    weights: list[Tensor] = []
    module.proj.apply(lambda layer: weights.append(layer.weight))
    return (args[0] * weights[0].float().norm(),)


def after_the_holder(module: Any, args: Any, result: Tensor) -> Tensor:
    return result + module.proj.weight.float().norm()


HOOKS: dict[str, Callable[[Any], Any]] = {
    "before": lambda m: m.proj.register_forward_pre_hook(before),
    "object": lambda m: m.proj.register_forward_hook(Hook()),
    "method": lambda m: m.proj.register_forward_hook(Hook().method),
    "partial": lambda m: m.proj.register_forward_hook(functools.partial(Hook.__call__, Hook())),
    "lambda": lambda m: m.proj.register_forward_hook(lambda own, args, y: y * own.weight[0, 0]),
    "holder": lambda m: m.register_forward_hook(after_the_holder),
    "apply": lambda m: m.register_forward_pre_hook(applying),
    "closure": lambda m: m.other.register_forward_hook(lambda own, args, y: y + m.proj.weight),
    "backward": lambda m: m.proj.register_full_backward_hook(
        lambda own, given, grads: (grads[0] @ own.weight.float(),)
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_layers_whose_weight_hooks_read_stay_dense(name: str) -> None:
    model = holder(lambda self, x: self.other(self.proj(x)))
    HOOKS[name](model)
    report = fp8kit.convert(model)
    kept = {r.name: r.reason for r in report.skipped if r.name in ("proj", "other")}
    assert list(kept) == ["proj"]
    assert READS in kept["proj"]


def test_hooks_that_read_no_weight_leave_no_layer_dense() -> None:
    model = holder(lambda self, x: self.other(self.proj(x)))
    model.proj.register_forward_hook(lambda own, args, y: y * own.weight.shape[0])
    model.register_forward_pre_hook(lambda own, args: (args[0].to(own.proj.weight.device),))
    assert len(fp8kit.convert(model).converted) == 5


UNSEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "eval": lambda self, x: eval("self.proj.weight.to(x.dtype)"),
    "exec": lambda self, x: exec("self.proj.weight.to(x.dtype)"),
    "methodcaller": lambda self, x: operator.methodcaller("get_parameter", "weight")(self.proj).to(
        x.dtype
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_followed_raises_when_it_runs(name: str) -> None:
    model = holder(UNSEEN[name])
    fp8kit.convert(model)
    with pytest.raises(fp8kit.UnsupportedError, match="Call the layer instead"):
        model(torch.randn(3, SIZE))


HARMLESS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "call": lambda self, x: self.proj(x),
    "getattr": lambda self, x: nn.Module.__getattr__(self, "proj")(x),
    "attrgetter": lambda self, x: operator.attrgetter("proj")(self)(x),
    "apply": lambda self, x: (
        self.apply(lambda module: module.weight.shape).proj(x) if not x.numel() else self.proj(x)
    ),
    "device": lambda self, x: self.proj(x.to(self.proj.weight.device)),
    "shape": lambda self, x: self.proj(x) * self.proj.weight.shape[0],
    "size": lambda self, x: self.proj(x) * self.proj.weight.size(1) * self.proj.weight.ndim,
    "numel": lambda self, x: self.proj(x) * self.proj.weight.numel(),
    "requires_grad": lambda self, x: self.proj(x) * int(self.proj.weight.requires_grad),
    "none": lambda self, x: self.proj(x) if self.proj.weight is not None else x,
    "is_tensor": lambda self, x: self.proj(x) * int(torch.is_tensor(self.proj.weight)),
    "own dictionary": lambda self, x: (
        getattr(self.proj.__dict__.get("_hf_hook"), "hooks", None) or self.proj(x)
    ),
    "isinstance": lambda self, x: self.proj(x) * int(isinstance(self.proj.weight, Tensor)),
    "switched off": lambda self, x: weighed(self.proj, x) if self.casts else self.proj(x),
    "local": lambda self, x: (lambda w: self.proj(x.to(w.device)))(self.proj.weight),
    "device of a parameter": lambda self, x: self.proj(x.to(next(self.parameters()).device)),
    "checkpoint": lambda self, x: checkpoint(self.proj, x, use_reentrant=False),
    "count": lambda self, x: self.proj(x) * sum(p.numel() for p in self.parameters()),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_uses_leave_no_layer_dense(name: str) -> None:
    model, x = holder(HARMLESS[name]), torch.randn(3, SIZE)
    report = fp8kit.convert(model)
    assert len(report.converted) == 5, str(report)
    assert model(x).isfinite().all()


class Apart(Holder):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y

    def encode(self, x: Tensor) -> Tensor:
        return weighed(self.other, x)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.proj.weight)

    def _init_weights(self, module: nn.Module) -> None:
        self.proj.weight.data.normal_()

    def fuse_projections(self) -> None:
        self.proj.weight.copy_(self.other.weight)

    def clip_(self) -> None:
        self.proj.weight.clamp_(-1, 1)

    def muon_parameters(self) -> list[nn.Parameter]:
        return [self.proj.weight]

    def hyperparameters(self) -> list[nn.Parameter]:  # GPyTorch's name for them
        return [self.proj.weight]

    def configure_optimizers(self) -> list[nn.Parameter]:  # as Lightning and minGPT call it
        return [self.proj.weight]

    def get_optim_groups(self) -> list[nn.Parameter]:
        return [self.proj.weight]

    def make_parameter_groups(self) -> list[nn.Parameter]:  # of rtdl_revisiting_models
        return [self.proj.weight]

    def get_1x_lr_params(self) -> list[nn.Parameter]:  # of DeepLab
        return [self.proj.weight]

    def fp8_optimization(self) -> None:  # of Kohya's scripts, in place
        self.proj.weight.data = self.proj.weight.to(torch.float8_e4m3fn)

    def parallelize(self) -> None:  # as torchtitan splits a model over devices
        self.proj.weight = nn.Parameter(self.proj.weight.chunk(2)[0])

    def get_weight_dtype(self) -> torch.dtype:  # of open_clip's blocks, which ask the first one
        return self.proj.weight.dtype

    def get_last_layer(self) -> nn.Parameter:  # for the weight of a loss of a GAN
        return self.proj.weight

    def setup(self, stage: str) -> None:  # as Lightning calls it
        self.norm = float(self.proj.weight.norm())

    def plot_curve(self) -> Any:  # of FastKAN
        return self.proj.weight.sum(1)


def test_other_methods_count_unless_they_make_or_load_a_model() -> None:
    report = fp8kit.plan(Apart()).report
    assert {r.name: r.reason for r in report.skipped if "4" not in r.reason} == {
        "other": f"weighed {READS}"
    }


class Child(Holder):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Child() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) @ block.many[0].weight.to(x.dtype).T  # type: ignore[operator, union-attr, index]
        return x


class Penalized(Holder):
    def penalty(self) -> Any:  # apart from the forward pass, it would list them for an optimizer
        return sum(p.float().abs().sum() for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x) + self.penalty()
        return y


def test_code_behind_an_assertion_that_cannot_hold_leaves_no_layer_dense() -> None:
    class Crossing(Holder):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.proj(x)
            return y

        def cross(self, x: Tensor) -> Tensor:
            assert self.casts
            return weighed(self.other, x)

        def attend(self, x: Tensor) -> Tensor:
            assert not self.casts
            return weighed(self.proj, x)

    model = Crossing()
    assert list(weight_reads(model)) == [model.proj]


def test_what_the_forward_pass_calls_is_read_whatever_its_name() -> None:
    assert len(weight_reads(Penalized())) == 5


class Averaging(Penalized):
    """Has a method whose name is also one of lists and dicts."""

    def update(self) -> None:
        self.penalty()

    def forward(self, x: Tensor) -> Tensor:
        self.update()
        y: Tensor = self.proj(x)
        return y


class Rows(nn.Module):
    """Passes its layers to a long method that sorts them and reads no weight, as SmolVLA does."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])

    def rows(self, layers: nn.ModuleList, period: int) -> list[list[nn.Module | None]]:
        first: list[nn.Module | None] = []
        second: list[nn.Module | None] = []
        for i in range(len(layers) * period):
            if period > 1 and i > 0 and i % period != 0:
                layer = None
            else:
                layer = layers[i // period if period > 0 else i]
            first.append(layers[i % len(layers)])
            second.append(layer)
        return [first, second]

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.rows(self.many, 2)[1][0]
        y: Tensor = layer(x.to(layer.weight.dtype))
        return y


def spread(layers: nn.ModuleList, period: int) -> list[list[nn.Module]]:
    first: list[nn.Module] = []
    second: list[nn.Module] = []
    for i in range(len(layers) * period):
        if period > 1 and i > 0 and i % period != 0:
            second.append(layers[i // period])
        elif i > 0 and period == 1:
            second.append(layers[i % len(layers)])
        first.append(layers[i % len(layers)])
        second.append(layers[i // period if period > 0 else i])
    return [first, second]


class Spread(Rows):
    """Like ``Rows``, with a function whose first argument is the layers."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = spread(self.many, 2)[1][0]
        y: Tensor = layer(x.to(layer.weight.dtype))
        return y


@pytest.mark.parametrize("kind", [Rows, Spread])
def test_layers_are_followed_through_long_code_that_gets_them(kind: type[Rows]) -> None:
    assert set(weight_reads(model := kind())) == set(model.many)


def test_a_method_is_no_container_for_its_name() -> None:
    assert len(weight_reads(Averaging())) == 5


def test_holders_further_up_are_read_too() -> None:
    report = fp8kit.plan(Parent()).report
    kept = {r.name for r in report.skipped if "Parent.forward" in r.reason}
    assert kept == {"blocks.0.many.0", "blocks.1.many.0"}


class Inherits(Child):
    pass


class Base(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight.to(x.dtype))


class Extends(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.Linear.forward(self, input)  # does not run in FP8


class Unbound(Holder):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.Linear.forward(self.proj, x)  # as a fork of DeBERTa for LoRA bypasses adapters
        x = Scaled.forward(self.named["a"], x)  # type: ignore[arg-type]
        x = type(self.other).forward(self.other, x)  # the class after the conversion
        y: Tensor = self.scaled(x)
        return y


def test_a_layer_under_the_forward_of_a_class_stays_dense() -> None:
    model = Unbound()
    model.scaled = Scaled(SIZE, SIZE)
    x = torch.randn(4, SIZE)
    expected = model(x)
    report = fp8kit.convert(model)
    reason = "Unbound.forward runs the forward of a class on it"
    assert {r.name for r in report.skipped if r.reason == reason} == {"proj", "named.a"}
    assert {"other", "scaled"} <= {r.name for r in report.converted}
    assert 0.001 < relative_error(model(x), expected) < 0.1


def test_base_classes_are_read_too() -> None:
    for model in (type("Plain", (Base,), {})(), Extends()):
        assert list(weight_reads(model).values()) == [f"Base.forward {READS}"]
    assert not weight_reads(Inherits())


def test_code_without_source_is_judged_by_its_names() -> None:
    names: dict[str, Any] = {"nn": nn, "F": F, "Holder": Holder}
    code = (
        "class Typed(Holder):\n"
        "    def forward(self, x):\n"
        "        return F.linear(x, self.proj.weight.to(x.dtype)) + self.other(x)\n"
    )
    exec(code, names)
    model = names["Typed"]()
    reads = weight_reads(model)
    assert set(reads.values()) == {"Typed.forward names a weight, and its source is not at hand"}
    assert set(reads) == {model.proj, model.other}  # names cannot tell one from the other


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight, x.dtype), self.bias)


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype == dtype else weight.to(dtype)


class GivesModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, SIZE)
        self.key, self.value = Casting(SIZE, SIZE), Casting(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for known in (x.to(self.table.weight.dtype), self.table, self.value):
            x = self.key(known) if isinstance(known, Tensor) else x
        return self.value(F.linear(x, self.value.weight)) if self.training else self.value(x)


def test_the_own_forward_of_a_linear_layer_may_read_its_weight() -> None:
    model = GivesModules()
    read = weight_reads(model)
    assert read[model.value] == f"GivesModules.forward {READS}"
    assert model.key not in read


class OfAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.given = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.cast = Casting(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.cast(Casting.forward(self.plain, forward(self.given, x)))  # type: ignore[arg-type]


def forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def test_a_forward_of_something_else_that_gets_a_layer_reads_it() -> None:
    model = OfAnother()
    assert weight_reads(model).keys() == {model.plain, model.given}


def test_a_forward_on_the_instance_is_read() -> None:
    model = Child()
    model.forward = lambda x: weighed(model.proj, x)  # type: ignore[method-assign]
    assert list(weight_reads(model)) == [model.proj]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: weighed(self.proj, x) if self.casts else self.proj(x),
        lambda self, x: weighed(self.proj, x) if self.casts == 1 else self.proj(x),
        lambda self, x: weighed(self.proj, x) if 1 == self.casts else self.proj(x),
        lambda self, x: self.proj(x) if self.casts is False else weighed(self.proj, x),
    ],
    ids=["truth", "left", "right", "identity"],
)
def test_a_switch_that_methods_change_counts_as_either(forward: Any) -> None:
    class Switched(Holder):
        def enable(self) -> None:
            self.casts = True

    Switched.forward = forward  # type: ignore[attr-defined]
    assert len(weight_reads(Switched())) == 1


class Experts(nn.Module):
    """Two stacks, which are read by methods of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * SIZE, SIZE) / SIZE**0.5)
        self.down_proj = nn.Parameter(torch.randn(4, SIZE, SIZE) / SIZE**0.5)

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate, up = (x @ self.gate_up_proj[expert].T).chunk(2, -1)
        y: Tensor = (self.act_fn(gate) * up) @ self.down_proj[expert].T
        return y

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            token, slot = torch.where(ids == expert)
            total.index_add_(0, token, self.one(x[token], expert) * weights[token, slot, None])
        return total

    def with_shared(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.forward(x, ids, weights) + self.one(x, 0)

    def twice(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.forward(x, ids, weights) * 2


def calls(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = experts(x, ids, weights) + experts.twice(x, ids, weights)
    return y * experts.down_proj.shape[0]


def adds_one(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = experts(x, ids, weights)
    return y + x @ experts.down_proj[0]


def multiplies_all(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    up, down = experts.gate_up_proj, experts.down_proj
    y = torch.einsum("th,enh->ten", x, up).chunk(2, -1)[0]
    return torch.einsum("ten,ehn->teh", y, down).sum(1)


def shares(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return experts.with_shared(x, ids, weights)


@pytest.mark.parametrize("run", [calls, adds_one, multiplies_all, shares])
@pytest.mark.parametrize("names", [("alone", "experts"), ("experts", "alone")])
def test_stacks_that_are_read_beside_their_module_stay_dense(
    run: Any, names: tuple[str, str]
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, Experts())

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = run(self.experts, x, ids, weights)
            return y

    model = Block()
    x, ids, weights = torch.randn(8, SIZE), torch.randint(4, (8, 2)), torch.rand(8, 2)
    expected = model(x, ids, weights)
    converted = {r.name for r in fp8kit.convert(model).stacks}
    assert converted == ({*names} if run is calls else {"alone"})
    assert relative_error(model(x, ids, weights), expected) < (0.1 if run is calls else 1e-6)


def test_what_each_of_many_modules_stores_is_kept_once() -> None:
    reader, many = Reader(nn.Identity()), tuple(nn.Identity() for _ in range(50))
    for modules in (many[:20], many):
        reader.store(modules, "used", modules)
    assert len(set(map(id, reader.stored.values()))) == 1
    assert Walk(reader, Scope("", {}, None), 0).attribute(many, "used") == many


def test_no_code_of_the_standard_library_is_followed() -> None:
    class Logs(Holder):
        def forward(self, x: Tensor) -> Tensor:
            logging.getLogger(__name__).warning("%s: %s", self, self.proj)
            arguments = inspect.signature(self.proj.forward).parameters
            return self.proj(x, **{name: x for name in arguments if name in self.named})

    def asked() -> int:
        known = node_of.cache_info()
        return known.hits + known.misses

    before = asked()
    weight_reads(Logs())
    assert asked() - before < 50
