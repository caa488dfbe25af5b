"""Code that takes the dtype of a module's first Parameter for the dtype that it computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.modules.linear import Fp8Linear
from numerics import relative_error

D = 128


class Encoder(nn.Module):
    """Has a property ``dtype``, as models of Transformers and diffusers do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=bias)
        self.second = nn.Linear(D, D, bias=bias)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Casts(nn.Module):
    """Casts its input to the ``dtype`` of its submodule."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.encoder = Encoder(bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x.to(self.encoder.dtype))
        return y


class Parts(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(D, D, bias=bias), nn.Linear(D, D, bias=bias))


class Asks(Parts):
    """Takes ``finfo`` of the dtype of a submodule's first Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parts.parameters()).dtype
        y: Tensor = self.parts(x.clamp_min(torch.finfo(dtype).min).to(dtype))
        return y


class Helped(Parts):
    """Casts its input by a helper function that knows nothing of layers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts(x.to(dtype_of(self)))
        return y


class Stores(Parts):
    """Casts its input by a part that a later method stores."""

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.used[0].weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.store()
        y: Tensor = self.parts(self.cast(x))
        return y

    def store(self) -> None:
        self.used = [self.parts[0]]


class Caches(Parts):
    """Keeps its results in a cache, which takes the dtype of a weight."""

    def init_cache(self, size: int) -> None:
        self.cache = torch.zeros(size, D, dtype=self.parts[0].weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[: len(x)] = self.parts[0](x)
        y: Tensor = self.parts[1](self.cache[: len(x)].to(x.dtype))
        return y


def dtype_of(module: nn.Module) -> torch.dtype | None:
    for p in module.parameters():
        return p.dtype
    return None


def run(model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        y: Tensor = model(1e3 * torch.randn(5, D))
    return y


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Casts, Asks, Helped])
def test_inputs_are_cast_to_a_dtype_of_numbers(kind: Any, bias: bool) -> None:
    torch.manual_seed(1)
    model = kind(bias).bfloat16()
    dense = run(model)
    report = fp8kit.convert(model)
    assert 1e-3 < relative_error(run(model), dense) < 0.1
    reasons = [r.reason for r in report.skipped]
    assert len(report.converted) == (2 if bias else 1)  # a bias is shown before codes
    assert all("asks for the dtype" in reason for reason in reasons)


def test_a_dtype_is_asked_of_what_a_method_stores() -> None:
    model = Stores(True)
    report = fp8kit.convert(model)
    assert [r.name for r in report.skipped] == ["parts.0"]
    assert "Stores.cast asks for the dtype" in report.skipped[0].reason
    assert run(model).isfinite().all()


def test_a_cache_does_not_take_the_dtype_of_codes() -> None:
    model = Caches(True)
    report = fp8kit.convert(model)
    assert [r.name for r in report.skipped] == ["parts.0"]
    assert "Caches.init_cache asks for the dtype" in report.skipped[0].reason
    model.init_cache(5)
    assert run(model).isfinite().all()


def test_the_dtype_of_a_converted_model_is_that_of_its_numbers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": D, "intermediate_size": D, "num_hidden_layers": 1}
    bert = transformers.BertModel(transformers.BertConfig(num_attention_heads=2, **sizes))
    for part in (bert, bert.encoder, Encoder(True), Encoder(False)):
        part.half()
        fp8kit.convert(part)
        assert next(part.parameters()).dtype == torch.float16
        assert getattr(part, "dtype", torch.float16) == torch.float16


def test_a_layer_shows_its_bias_first() -> None:
    layer = Fp8Linear.from_linear(nn.Linear(D, D).bfloat16())
    assert [n for n, _ in layer.named_parameters()] == ["bias", "weight", "weight_scale"]
    assert list(Fp8Linear(D, D, False).state_dict()) == ["weight", "weight_scale"]
