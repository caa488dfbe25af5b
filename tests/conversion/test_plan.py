from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, prune

import backend_tables
import fp8kit
import fresh
from fp8kit.conversion import plan as conversion
from fp8kit.errors import ConversionError
from fp8kit.formats import SCHEMES
from fp8kit.matmul.problem import MatmulBackend
from fp8kit.matmul.reference import run as multiply
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal, assert_scheme_error, relative_error

D = 128
T = TypeVar("T")
DYNAMIC = [name for name, scheme in SCHEMES.items() if not scheme.static]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(D, D, bias=False)
        self.gate_proj = nn.Linear(D, 2 * D)
        self.up_proj = nn.Linear(D, 2 * D)
        self.down_proj = nn.Linear(2 * D, D)
        self.gate = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o_proj(x) * self.gate(x).sigmoid()
        y: Tensor = x + self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, D)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(D, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


def fp8_names(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, Fp8Linear)]


def snapshot(model: nn.Module) -> dict[str, tuple[int, int, type]]:
    """Return a description of a model that changes with every replacement or write."""
    modules = {n: (id(m), 0, type(m)) for n, m in model.named_modules()}
    tensors = {
        f"{n} ": (id(p), p._version, type(p))
        for n, p in (*model.named_parameters(), *model.named_buffers())
    }
    hooks = {f"{n} hooks": (len(m._forward_pre_hooks), 0, dict) for n, m in model.named_modules()}
    return {**modules, **tensors, **hooks}


def feed(model: nn.Module) -> None:
    model(torch.randn(32, D))


def reasons(report: fp8kit.Report) -> dict[str, str]:
    return {r.name: r.reason for r in report.skipped}


def unconverted(model: nn.Module) -> fp8kit.Report:
    """Convert a model in which no layer can become FP8."""
    with pytest.warns(UserWarning, match=r"^No layer becomes FP8: "):
        report = fp8kit.convert(model)
    assert not report.converted
    return report


def one(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc=layer, other=nn.Linear(D, D)))


def test_defaults_convert_projections_and_protect_the_rest() -> None:
    model = Model()
    report = fp8kit.convert(model)
    expected = [f"layers.{i}.{n}_proj" for i in (0, 1) for n in ("o", "gate", "up", "down")]
    assert fp8_names(model) == [r.name for r in report.converted] == expected
    assert reasons(report) == {
        "layers.0.gate": "MoE router: kept in high precision by default",
        "layers.1.gate": "MoE router: kept in high precision by default",
        "lm_head": "output head: kept in high precision by default",
    }
    assert {m.scheme.name for m in model.modules() if isinstance(m, Fp8Linear)} == {"FP8_DYNAMIC"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_converts_and_computes(scheme: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False)).to(device)
    nn.init.normal_(model[0].weight)
    x = torch.randn(64, 512, device=device)
    before = model(x).detach()
    report = fp8kit.convert(model, scheme, calibrate=lambda m: m(x))
    assert report.scheme == scheme
    assert_scheme_error(model(x), before, scheme)


def test_include_narrows_and_exclude_adds_to_the_defaults() -> None:
    report = fp8kit.plan(Model(), include=["layers.0.*"], exclude=["o_proj"]).report
    names = [r.name for r in report.converted]
    assert names == ["layers.0.gate_proj", "layers.0.up_proj", "layers.0.down_proj"]
    found = reasons(report)
    assert found["layers.0.o_proj"] == "excluded by 'o_proj'"
    assert found["layers.1.o_proj"] == "not in include"
    assert "MoE router" in found["layers.0.gate"]


def test_a_full_name_in_include_lifts_the_default_exclusion() -> None:
    report = fp8kit.plan(Model(), include=["lm_head"]).report
    assert [r.name for r in report.converted] == ["lm_head"]
    small = nn.Sequential(nn.Linear(32, 32), nn.Linear(D, D))
    x = torch.randn(64, 32)
    expected = small[0](x)
    assert [r.name for r in fp8kit.convert(small, include=["0"]).converted] == ["0"]
    assert_scheme_error(small[0](x), expected, "FP8_DYNAMIC")
    assert fp8kit.plan(nn.Sequential(nn.Linear(32, 32)), include=["*"]).report.converted == []


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR", "MXFP8", "FP8_BLOCK"])
def test_small_keys_and_values_go_with_a_large_query(scheme: str) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(D, D), "k_proj": nn.Linear(D, 32)})
    model["v_proj"] = nn.Linear(D, 32)
    apart = ["q_proj"] if scheme == "FP8_BLOCK" else ["q_proj", "k_proj", "v_proj"]
    assert [r.name for r in fp8kit.plan(model, scheme).report.converted] == apart
    report = fp8kit.plan(model, scheme, exclude=["q_proj"]).report
    assert report.converted == []
    assert "too small" in reasons(report)["k_proj"]


def test_an_empty_exclude_switches_the_defaults_off() -> None:
    report = fp8kit.plan(Model(), exclude=[]).report
    assert len(report.converted) == 11
    assert report.skipped == []


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_an_unmatched_pattern_is_an_error(argument: str) -> None:
    model = Model()
    before = snapshot(model)
    with pytest.raises(ConversionError, match=f"The {argument} pattern 'k_proj' matches no linear"):
        fp8kit.convert(model, **{argument: ["o_proj", "k_proj"]})
    assert snapshot(model) == before


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_string_for_a_list_is_an_error(argument: str) -> None:
    with pytest.raises(TypeError, match="would be read letter by letter"):
        fp8kit.plan(Model(), **{argument: "o_proj"})
    with pytest.raises(TypeError, match=rf"Got {argument}=0\. It must be a list of patterns"):
        fp8kit.plan(Model(), **{argument: 0})
    with pytest.raises(TypeError, match=rf"Got {argument}=<generator .*It must be a list"):
        fp8kit.plan(Model(), **{argument: (name for name in ["o_proj"])})
    with pytest.raises(
        TypeError, match=rf"{argument}=lambda name, layer: isinstance\(layer, Linear"
    ):
        fp8kit.plan(Model(), **{argument: nn.Linear})


def test_functions_choose_layers_beside_the_defaults() -> None:
    model = Model()
    model.head = nn.Linear(D, D)
    wide = fp8kit.plan(model, include=lambda name, layer: layer.out_features == 2 * D)
    assert {r.name.rpartition(".")[2] for r in wide.report.converted} == {"gate_proj", "up_proj"}
    everything = fp8kit.plan(model, include=lambda name, layer: True)
    assert {r.name for r in everything.report.converted} == {
        r.name for r in fp8kit.plan(model).report.converted
    }  # as a glob, it does not lift the defaults
    report = fp8kit.convert(model, exclude=lambda name, layer: name.startswith("layers.0"))
    assert {r.name.split(".")[1] for r in report.converted} == {"1"}
    assert "excluded by the function" in {r.reason for r in report.skipped}
    with pytest.raises(ConversionError, match=r"include function chooses no linear layer"):
        fp8kit.plan(Model(), include=lambda name, layer: False)


@pytest.mark.parametrize("storage", conversion.STORAGES)
def test_a_copy_is_converted_and_the_model_stays(storage: str) -> None:
    model = Model()
    model.layers[0].o_proj.register_forward_hook(lambda *_: None)
    before, x = snapshot(model), torch.randn(3, D)
    dense = model(x)
    report = fp8kit.convert(model, copy=True, weight_storage=storage)
    assert snapshot(model) == before
    assert_bits_equal(model(x).detach(), dense.detach())
    assert report.model is not None
    fp8kit.convert(model)
    assert_bits_equal(report.model(x).detach(), model(x).detach())
    assert fp8_names(report.model) == fp8_names(model)
    shared = {p.data_ptr() for p in model.parameters()}
    shared &= {p.data_ptr() for p in report.model.parameters()}
    assert not shared
    assert fp8kit.convert(Model()).model is None


def test_a_copy_does_not_copy_weights_that_it_discards() -> None:
    class Counted(nn.Parameter):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 8))
    model[0].weight = Counted(model[0].weight.detach())
    assert fp8kit.convert(model, copy=True).model is not None
    with pytest.raises(AssertionError, match="copied"):
        fp8kit.convert(model, copy=True, weight_storage="keep")


def test_plan_changes_nothing_and_apply_does() -> None:
    model = Model()
    before = snapshot(model)
    plan = fp8kit.plan(model, "FP8_BLOCK")
    assert snapshot(model) == before
    assert plan.scheme == SCHEMES["FP8_BLOCK"]
    assert str(plan) == str(plan.report)
    assert "layers.0.o_proj" in str(plan)
    assert len(plan.apply().converted) == len(fp8_names(model)) == 8


def test_planned_bytes_are_the_real_bytes() -> None:
    for scheme in SCHEMES:
        model = Model().bfloat16()
        report = fp8kit.convert(model, scheme, calibrate=lambda m: m(torch.randn(4, D).bfloat16()))
        real = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        assert report.model_bytes_after == real
        assert report.model_bytes_after < report.model_bytes_before


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Thin(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Tagged(nn.Linear):
    def merged(self) -> Tensor:
        return self.weight


class Sized:
    def size(self) -> int:
        return len(vars(self)["_parameters"])


class Mixed(nn.Linear, Sized):
    """Inherits a method from a class that comes after its parent."""


class Mark:
    """Has no attribute that other code could read."""


class Marked(Mark, Thin, Generic[T]):
    """Computes like its parent; its other base classes have no methods."""


def dispatched() -> nn.Linear:
    hooks = pytest.importorskip("accelerate.hooks")
    layer: nn.Linear = hooks.add_hook_to_module(nn.Linear(D, D), hooks.AlignDevicesHook("cpu"))
    return layer


def replaced_forward() -> nn.Linear:
    layer = nn.Linear(D, D)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def with_weight(value: Tensor) -> nn.Linear:
    layer = nn.Linear(D, D, bias=False)
    layer.weight = nn.Parameter(value, requires_grad=False)
    return layer


def bad_value(value: float) -> nn.Linear:
    layer = nn.Linear(D, D)
    with torch.no_grad():
        layer.weight[3, 4] = value
    return layer


def partitioned() -> nn.Module:
    layer = nn.Linear(D, D)
    whole, layer.weight = layer.weight, nn.Parameter(torch.empty(0))
    layer.weight.ds_tensor = whole.detach()  # type: ignore[attr-defined]
    return layer


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(D, D)


OBSTACLES = {
    "subclass": (lambda: Odd(D, D), "Odd is a subclass of nn.Linear that computes something else"),
    "more-than-linear": (lambda: Tagged(D, D), "Tagged is a subclass of nn.Linear and has more"),
    "mixed-in": (
        lambda: Mixed(D, D),
        "Mixed is a subclass of nn.Linear and has more than it: size;",
    ),
    "dispatched": (lambda: dispatched(), "accelerate dispatched the model"),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(D, D)),
        "its weight is parametrized",
    ),
    "integer": (
        lambda: with_weight(torch.ones(D, D, dtype=torch.int8)),
        "its weight is torch.int8",
    ),
    "complex": (
        lambda: with_weight(torch.ones(D, D, dtype=torch.complex64)),
        "its weight is torch.complex64",
    ),
    "double": (lambda: nn.Linear(D, D).double(), "its weight is torch.float64"),
    "partitioned": (
        partitioned,
        "DeepSpeed's ZeRO 3 has split its weight; convert the",
    ),
    "fake": (fake, "its weight is a FakeTensor, which has no values"),
    "narrow": (lambda: nn.Linear(D, 8), "too small to gain"),
    "small": (lambda: nn.Linear(64, 64), "too small to gain"),
    "nan": (lambda: bad_value(torch.nan), "its weight holds NaN or infinities"),
    "inf": (lambda: bad_value(torch.inf), "its weight holds NaN or infinities"),
    "hooked-forward": (replaced_forward, "its forward was replaced on the instance"),
    "fp8": (lambda: Fp8Linear.from_linear(nn.Linear(D, D)), "already FP8"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_obstacles_are_left_alone_by_name(kind: str) -> None:
    make, reason = OBSTACLES[kind]
    layer = make()
    model = one(layer)
    report = fp8kit.convert(model)
    assert model.fc is layer
    assert [r.name for r in report.converted] == ["other"]
    record = report.records[0]
    assert record.warning == (kind != "fp8")  # converting twice is no obstacle
    assert reason in record.reason
    if kind == "fp8":
        fp8kit.convert(one(make()), strict=True)
        return
    before = snapshot(model := one(make()))
    with pytest.raises(ConversionError, match="strict=True, and 1 layer cannot be converted") as e:
        fp8kit.convert(model, strict=True)
    assert f"  fc: {reason}" in str(e.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", [Thin, Marked])
@pytest.mark.parametrize("bias", [False, True])
def test_a_subclass_with_the_formula_of_its_parent_converts(
    kind: type[nn.Linear], bias: bool
) -> None:
    model, x = one(kind(D, D, bias)), torch.randn(5, D)
    y = model.fc(x)
    assert [r.name for r in fp8kit.convert(model).converted] == ["fc", "other"]
    assert_scheme_error(model.fc(x), y, "FP8_DYNAMIC")


class Following(nn.Linear):
    """Casts its weight to the dtype of its input, as the layers of Whisper do."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_subclass_that_follows_the_dtype_of_its_input_converts(
    bias: bool, dtype: torch.dtype
) -> None:
    model, x = one(Following(D, D, bias)), torch.randn(5, D).to(dtype)
    y = model.fc(x)
    assert [r.name for r in fp8kit.convert(model).converted] == ["fc", "other"]
    assert model.fc(x).dtype == dtype
    assert_scheme_error(model.fc(x), y, "FP8_DYNAMIC")


class Precise(nn.Linear):
    """Computes in another dtype if it is set, and initialises its weight itself."""

    def __init__(self, precision: torch.dtype | None) -> None:
        super().__init__(D, D)
        self.precision, self.initializer = precision, "default"
        self._init_params()
        self._zero_init()

    def _init_params(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def _zero_init(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.precision or x.dtype
        given = (x, self.weight, self.bias)
        return nn.functional.linear(*(t.to(dtype) for t in given)).to(x.dtype)


@pytest.mark.parametrize("precision", [None, torch.float32])
def test_plain_values_of_a_subclass_stay_on_its_layer(precision: torch.dtype | None) -> None:
    model, x = one(Precise(precision)), torch.randn(5, D)
    y = model.fc(x)
    assert [r.name for r in fp8kit.convert(model).converted] == ["fc", "other"]
    assert (model.fc.precision, model.fc.initializer) == (precision, "default")
    assert_scheme_error(model.fc(x), y, "FP8_DYNAMIC")


def test_other_attributes_of_a_subclass_keep_it_dense() -> None:
    layer = Precise(None)
    layer.observers = [torch.zeros(1)]  # type: ignore[assignment]
    report = fp8kit.convert(one(layer))
    assert "has more than it: observers;" in reasons(report)["fc"]


class Scaled(nn.Linear):
    """Multiplies by what its model sets before a call."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.scale, self.squared, self.rank = 1.0, False, 8

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        return y.square() if self.squared else y


def test_numbers_that_a_subclass_computes_with_keep_it_dense() -> None:
    assert "has more than it: scale, squared;" in reasons(fp8kit.convert(one(Scaled())))["fc"]
    assert [r.name for r in fp8kit.convert(one(Scaled()), include=["fc"]).converted] == ["fc"]


GATHERED: list[torch.Size] = []


class Gathered(nn.Linear):
    """Adds up the results of several processes if it is set to."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.gathers = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.gathers:
            dist.all_reduce(y)
            GATHERED.append(y.shape)
        return y


def test_no_trial_of_a_number_waits_for_other_processes(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        report = fp8kit.convert(one(Gathered()))
    finally:
        dist.destroy_process_group()
    assert "has more than it: gathers;" in reasons(report)["fc"]
    assert not GATHERED


def test_a_subclass_with_more_than_its_parent_converts_on_request() -> None:
    report = fp8kit.convert(one(Tagged(D, D)), include=["fc", "other"])
    assert [r.name for r in report.converted] == ["fc", "other"]
    with pytest.warns(UserWarning, match="computes something else"):
        fp8kit.convert(one(Odd(D, D)), include=["fc"])


def images(own: nn.Linear, x: Tensor) -> Tensor:
    """Expects the channels of images in their second dimension."""
    return dense(own, x) if x.dim() < 4 else dense(own, x.movedim(1, -1)).movedim(-1, 1)


def clearing(own: nn.Linear, x: Tensor) -> Tensor:
    """Clears its input."""
    y = dense(own, x)
    x.zero_()
    return y


def paying(own: nn.Linear, x: Tensor) -> Tensor:
    """Rounds its weight if that pays off."""
    weight = own.weight if own.in_features % 32 else own.weight * 64 // 1 / 64
    return nn.functional.linear(x, weight, own.bias)


def lone(own: nn.Linear, x: Tensor) -> Tensor:
    """Treats a single row as a step of a running generation."""
    return dense(own, x) * (2 if x.shape[:-1].numel() == 1 and x.dim() == 2 else 1)


dense = nn.Linear.forward
ODD: dict[str, Any] = {
    "differs in training": lambda own, x: dense(own, x) * (2 if own.training else 1),
    "differs with gradients": lambda own, x: dense(own, x) * (2 if torch.is_grad_enabled() else 1),
    "lets no gradient through": lambda own, x: dense(own, x.detach()),
    "widens": lambda own, x: dense(own, x).float(),
    "casts": lambda own, x: dense(own, x.to(own.weight.dtype)),
    "drops out": lambda own, x: dense(own, nn.functional.dropout(x, 0.1, own.training)),
    "bounds": lambda own, x: dense(own, x).clamp(-65504, 65504),
    "replaces what fp16 cannot hold": lambda own, x: dense(own, x).nan_to_num(),
    "masks rows of zeros": lambda own, x: dense(own, x) * (x != 0).any(-1, keepdim=True),
    "fills in for NaN": lambda own, x: dense(own, x.masked_fill(x.isnan(), 1.0)),
    "skips rows of a number": lambda own, x: dense(own, x) * (x != -100).any(-1, keepdim=True),
    "skips rows of its number": lambda own, x: dense(own, x) * (x != own.skip).any(-1, True),
    "takes a scale": lambda own, x, scale=1.0: dense(own, x) * scale,
    "truncates": lambda own, x: dense(own, x[:256]),
    **{forward.__name__: forward for forward in (images, clearing, paying, lone)},
}


@pytest.mark.parametrize("kind", ODD)
def test_the_trial_of_a_subclass_can_fail(kind: str) -> None:
    layer: Any = type("Subclass", (nn.Linear,), {"forward": ODD[kind]})(D, D)
    layer.skip = -7.5
    layer.weight.data.zero_()  # on which all of them agree
    report = fp8kit.plan(one(layer)).report
    assert "computes something else" in reasons(report)["fc"]


REPLACED = """
import sys

import torch
from torch import nn

dense, factor = nn.Linear.forward, float(sys.argv[1])
nn.Linear.forward = lambda self, x: dense(self, x) * factor

import fp8kit

print(*[r.reason for r in fp8kit.plan(nn.Sequential(nn.Linear(256, 256))).report.skipped])
"""


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1, ""), (2, "nn.Linear.forward was replaced by code that computes something else")],
)
def test_a_forward_that_replaces_that_of_all_layers_is_tried(factor: int, reason: str) -> None:
    assert fresh.run(REPLACED, factor).stdout.strip() == reason


class Folding(nn.Linear):
    """Accepts only tokens of sequences."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return super().forward(x.reshape(batch * tokens, -1)).view(batch, tokens, -1)


class Passing(nn.Linear):
    def forward(self, *args: Tensor, **options: Tensor) -> Tensor:
        return super().forward(*args, **options)


@pytest.mark.parametrize("kind", [Folding, Passing])
def test_a_subclass_may_take_its_input_in_a_form_of_its_own(kind: type[nn.Linear]) -> None:
    assert "fc" in {layer.name for layer in fp8kit.plan(one(kind(D, D))).report.converted}


def test_a_model_made_in_inference_mode_converts() -> None:
    with torch.inference_mode():
        model = one(nn.Linear(D, D))
    assert "fc" in {layer.name for layer in fp8kit.convert(model).converted}


def test_a_model_converted_in_inference_mode_is_as_useful_as_before() -> None:
    model = one(Passing(D, D))
    with torch.inference_mode():
        assert "fc" in {layer.name for layer in fp8kit.convert(model).converted}
    assert not any(p.is_inference() for p in model.parameters())
    model(torch.randn(3, D, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())


def test_attention_of_torch_is_left_alone_by_name() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(D, 2), "other": nn.Linear(D, D)})
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["other"]
    for name, said in reasons(report).items():
        assert name.startswith("attention."), name
        assert "nn.MultiheadAttention" in said
    assert model["attention"](*[torch.randn(3, 1, D)] * 3)[0].isfinite().all()


def test_no_converted_layer_is_a_warning_and_with_strict_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    plan = fp8kit.plan(model)
    assert plan.report.notes == [plan.report.nothing()]
    with pytest.warns(UserWarning, match="the model holds no linear layer") as seen:
        plan.apply()
    assert seen[0].filename == __file__
    unconverted(nn.Sequential(nn.Linear(D, 8)))
    with pytest.raises(ConversionError, match="No layer becomes FP8"):
        fp8kit.plan(model, strict=True)
    converted = one(nn.Linear(D, D))
    assert fp8kit.convert(converted).nothing() == ""
    assert fp8kit.convert(converted, strict=True).nothing() == ""  # they are FP8 already


def test_strict_accepts_deliberate_exclusions() -> None:
    assert len(fp8kit.convert(Model(), strict=True).converted) == 8


@pytest.mark.parametrize("how", ["parameter", "storage"])
def test_tied_weights_are_left_alone(how: str) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(256, D), "proj": nn.Linear(D, 256)})
    tied = model["emb"].weight
    model["proj"].weight = tied if how == "parameter" else nn.Parameter(tied.data)
    report = unconverted(model)
    assert reasons(report) == {"proj": "its weight is tied to another parameter"}
    assert type(model["proj"]) is nn.Linear


def test_one_module_in_two_places_stays_one_module() -> None:
    layer = nn.Linear(D, D)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    report = fp8kit.convert(model)
    assert isinstance(model[0], Fp8Linear)
    assert model[0] is model[2]
    assert [(r.name, r.aliases) for r in report.converted] == [("0", ("2",))]
    assert "also 2" in str(report)


def test_converting_twice_changes_nothing_more() -> None:
    model = Model()
    fp8kit.convert(model)
    before = snapshot(model)
    again = fp8kit.convert(model)
    assert again.converted == []
    assert snapshot(model) == before


def test_another_scheme_for_fp8_layers_is_a_warning() -> None:
    model = one(nn.Linear(D, D))
    fp8kit.convert(model)
    with pytest.warns(UserWarning, match=r"2 layers stay.* FP8_DYNAMIC\. FP8_BLOCK is made from"):
        assert fp8kit.convert(model, "FP8_BLOCK").converted == []
    assert {m.scheme.name for m in model if isinstance(m, Fp8Linear)} == {"FP8_DYNAMIC"}
    rebased = one(nn.Linear(D, D))
    fp8kit.convert(rebased, "MXFP8")
    fp8kit.convert(rebased, "MXFP8")  # warnings are errors here


def test_layers_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(D), nn.Linear(D, D))
    with pytest.raises(ConversionError, match=r"0\.weight, 0\.bias have no shape yet.*one batch"):
        fp8kit.convert(model)
    model(torch.randn(1, D))
    assert len(fp8kit.convert(model).converted) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled_torchscript_stays_as_it_is() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D)))
    with pytest.raises(ConversionError, match="TorchScript has compiled its code"):
        fp8kit.convert(scripted)
    model = nn.ModuleDict({"a": scripted, "b": nn.Linear(D, D)})
    assert [r.name for r in fp8kit.convert(model).converted] == ["b"]


def test_a_model_on_meta_can_be_planned_but_not_converted() -> None:
    model = Model().to("meta")
    before = snapshot(model)
    assert len(fp8kit.plan(model).report.converted) == 8
    with pytest.raises(ConversionError, match="are on the meta device"):
        fp8kit.convert(model)
    assert snapshot(model) == before


def test_a_bare_layer_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"Got a bare Linear .*from_linear"):
        fp8kit.convert(nn.Linear(D, D))


def test_unknown_scheme_and_storage_leave_the_model_alone() -> None:
    model = Model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"Unknown scheme \['FP8'\]"):
        fp8kit.convert(model, ["FP8"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown scheme 'FP7'"):
        fp8kit.convert(model, "FP7")
    with pytest.raises(ValueError, match="Got weight_storage='gpu'"):
        fp8kit.convert(model, weight_storage="gpu")
    assert snapshot(model) == before


def test_call_hooks_are_kept_with_their_options() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    calls: list[str] = []

    def pre(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(f"pre {len(args)} {sorted(kwargs)}")

    def post(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        calls.append(f"post {len(args)} {sorted(kwargs)}")
        return out * 2

    def back(_: nn.Module, grad_in: Any, grad_out: Any) -> None:
        calls.append("back")

    model[0].register_forward_pre_hook(pre, with_kwargs=True)
    handle = model[0].register_forward_hook(post, with_kwargs=True, always_call=True)
    model[0].register_full_backward_hook(back)
    fp8kit.convert(model)
    x = torch.randn(2, D, requires_grad=True)
    plain = copy.deepcopy(model[0])
    doubled = model[0](x)
    doubled.sum().backward()
    assert calls == ["pre 1 []", "post 1 []", "back"]
    handle.remove()
    assert_bits_equal(model[0](x).detach() * 2, doubled.detach())
    assert isinstance(plain, Fp8Linear)


def test_training_mode_and_bias_are_kept() -> None:
    model = Model().eval()
    bias = model.layers[0].up_proj.bias.detach().clone()
    fp8kit.convert(model)
    layer = model.layers[0].up_proj
    assert not layer.training
    assert_bits_equal(layer.bias.detach(), bias)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize("storage", ["discard", "keep", "cpu_offload"])
def test_weight_storage(storage: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(D, D)).to(device)
    weight = model[0].weight.detach().clone()
    fp8kit.convert(model, weight_storage=storage)
    layer = model[0]
    back = layer.to_linear().weight.detach()
    if storage == "discard":
        assert layer.original_weight is None
        assert 0.01 < relative_error(back, weight) < 0.05
    else:
        expected = "cpu" if storage == "cpu_offload" else device.type
        assert layer.original_weight.device.type == expected
        assert_bits_equal(back, weight)
        assert back.device.type == device.type
    assert "original_weight" not in layer.state_dict()


def test_static_scales_come_from_calibration() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    x = torch.randn(32, D)
    inner = model[1](model[0](x)).abs().max()
    fp8kit.convert(model, "FP8", calibrate=lambda m: m(x))
    assert_bits_equal(model[0].input_scale.detach(), (x.abs().max() / 448).reshape(1, 1))
    assert_bits_equal(model[2].input_scale.detach(), (inner / 448).reshape(1, 1).detach())


def test_static_scheme_without_calibration_leaves_the_model_alone() -> None:
    model = Model()
    before = snapshot(model)
    with pytest.raises(ConversionError, match="Scheme FP8 got no calibration data"):
        fp8kit.convert(model, "FP8")
    with pytest.raises(ConversionError, match=r"Calibration never reached layers\.1\."):
        fp8kit.convert(model, "FP8", calibrate=lambda m: m.layers[0](torch.randn(2, D)))
    with pytest.raises(ZeroDivisionError):
        fp8kit.convert(model, "FP8", calibrate=lambda _: 1 // 0)
    assert snapshot(model) == before


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_a_converted_model_round_trips_through_its_state_dict(scheme: str) -> None:
    model, twin = Model(), Model()
    fp8kit.convert(model, scheme)
    fp8kit.convert(twin, scheme)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(3, D)
    assert_bits_equal(model(x).detach(), twin(x).detach())


def test_matrices_outside_linear_layers_are_reported() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = nn.Parameter(torch.zeros(4, D, D))
            self.small = nn.Parameter(torch.zeros(4, 4))

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 197, D))

    class Linear(Experts):
        """A linear layer with the code of torch_geometric's."""

    held = {"experts": Experts(), "own": Linear(), "fc": nn.Linear(D, D), "rnn": nn.GRUCell(D, D)}
    report = fp8kit.plan(nn.ModuleDict({**held, "vit": Places()})).report
    stack = "which is not an nn.Linear; fp8kit.register_experts takes stacks of experts"
    assert reasons(report) == {
        "experts.w13": f"a parameter of Experts, {stack}",
        "own.w13": f"a parameter of {__name__}.Linear, {stack}",
        "rnn.weight_ih": "a parameter of GRUCell, which is not an nn.Linear",
        "rnn.weight_hh": "a parameter of GRUCell, which is not an nn.Linear",
        "vit.pos_embed": "a parameter of Places, which is not an nn.Linear",
    }


def test_the_report_says_that_a_cpu_gains_no_time() -> None:
    notes = fp8kit.plan(Model()).report.notes
    assert len(notes) == 1
    assert notes[0].startswith("On cpu FP8 saves memory, not time, for layers.0.o_proj")
    assert fp8kit.plan(Model().to("meta")).report.notes == []


def test_the_report_says_where_many_rows_gain_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """MX on Hopper: an FP8 GEMM for few rows, dequantized weights for many."""

    def backend(rows: range) -> MatmulBackend:
        return MatmulBackend(
            supports=lambda problem: None if problem.m in rows else "not so many rows", run=multiply
        )

    backends = {"triton_gemm": backend(range(65)), "dequantized": backend(range(65, 2**20))}
    backend_tables.install(monkeypatch, plan=backends)
    (_, note) = fp8kit.plan(Model(), "MXFP8_EMULATED").report.notes
    assert note.startswith("On cpu at m=4096 FP8 saves memory, not time, for ")
    several = fp8kit.plan(Model(), "MXFP8_EMULATED", m=[1, 65, 512]).report.notes
    assert any(note.startswith("On cpu at m=65, 512 FP8 saves memory") for note in several)
    assert not any("saves memory" in n for n in fp8kit.plan(Model(), "MXFP8", m=1).report.notes)


def test_converted_model_stays_close_to_the_dense_one() -> None:
    model = Model()
    x = torch.randn(16, D)
    dense = model(x).detach()
    fp8kit.convert(model)
    assert 1e-3 < relative_error(model(x).detach(), dense) < 5e-2


def test_conversion_never_sees_what_it_did_not_plan() -> None:
    model = Model()
    plan = conversion.plan(model, include=["layers.0.o_proj"])
    plan.apply()
    assert fp8_names(model) == ["layers.0.o_proj"]


@pytest.mark.parametrize("reparametrized", ["weight_norm", "weight", "bias"])
def test_weights_that_hooks_compute_are_left_alone(reparametrized: str) -> None:
    linear = nn.Linear(128, 128)
    if reparametrized in ("weight", "bias"):
        prune.l1_unstructured(linear, reparametrized, 0.5)
    else:
        with pytest.warns(FutureWarning):
            torch.nn.utils.weight_norm(linear)
    model = nn.Sequential(linear)
    report = unconverted(model)
    assert "computed by a hook" in report.skipped[0].reason
    assert model(torch.randn(2, 128)).isfinite().all()


def test_sparse_tensors_stay_and_are_counted() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    dense = fp8kit.plan(model).report.model_bytes_before
    links = torch.eye(256).to_sparse()
    model.register_buffer("links", links)  # of a graph, say
    model.register_parameter("table", nn.Parameter(links.clone()))
    model[1].weight = nn.Parameter(torch.eye(128).to_sparse())
    report = fp8kit.convert(model)
    assert fp8_names(model) == ["0"]
    reasons = {r.name: r.reason for r in report.skipped}
    assert "its weight is torch.sparse_coo" in reasons["1"]
    # one number, and a row and a column in int64
    held = 2 * 256 * (4 + 8 + 8) + 128 * (4 + 8 + 8) - 128 * 128 * 4
    assert report.model_bytes_before == dense + held


def test_encoder_layers_with_a_fast_path_keep_working() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True)).eval()
    report = unconverted(model)
    assert "fast path" in report.skipped[-1].reason
    with torch.no_grad():
        assert model(torch.randn(2, 3, 128)).isfinite().all()


def test_a_plan_is_applied_once() -> None:
    plan = fp8kit.plan(nn.Sequential(nn.Linear(128, 128)))
    plan.apply()
    with pytest.raises(fp8kit.ConversionError, match=r"changed since the plan was made"):
        plan.apply()


def test_an_empty_string_does_not_switch_the_defaults_off() -> None:
    with pytest.raises(TypeError, match="list of patterns"):
        fp8kit.plan(nn.Sequential(nn.Linear(128, 128)), exclude="")


def test_static_schemes_share_nothing() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(128, 256), nn.Linear(128, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate_proj(x) * self.up_proj(x)

    report = fp8kit.convert(Mlp(), "FP8", calibrate=lambda m: m(torch.randn(4, 128)))
    assert report.groups == []


def test_layers_of_a_compiled_model_convert() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
    assert len(fp8kit.plan(model).report.converted) == 2


def test_dense_modules_may_be_excluded_by_any_of_their_names() -> None:
    model = one(nn.Embedding(4, D))
    model.again = model.fc
    for name in ("fc", "again"):
        assert fp8kit.plan(model, exclude=[name]).report.linears
