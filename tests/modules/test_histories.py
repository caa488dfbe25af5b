"""Random sequences of conversions, casts, loads and edits of a model, compared with a shadow.

The shadow is plain torch: the values that each layer should hold, and the formulas of the schemes.
After every step the model holds these values, and computes their results on quantized inputs.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
from fp8kit import Fp8Linear, Scheme

D, H = 128, 256
NAMES = [f"{block}.{n}" for block in "01" for n in ("q", "k", "v", "o", "fc1", "fc2")]
SCHEMES = ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "FP8_WEIGHT_ONLY", "MXFP8", "FP8"]
PARTS = [["*"], ["0.*"], ["*.q", "*.k", "*.v"], ["*.fc1", "*.fc2"], ["1.o"]]
COPIES = ["deepcopy", "pickle", "save", "safetensors", "checkpoint", "meta"]
names, factors = st.sampled_from(NAMES), st.sampled_from([0.5, 2.0])

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.o = nn.Linear(D, D, bias=False)
        self.fc1, self.fc2 = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o(self.q(h) * torch.sigmoid(self.k(h)) + self.v(h))
        return x + self.fc2(F.gelu(self.fc1(x)))


def new_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).to(dtype)


def held(layer: Any) -> Tensor:
    """Return the dequantized values of a weight."""
    weight = layer._parameters["weight"].detach().float()
    if not isinstance(layer, Fp8Linear):
        return weight
    scale, (n, k) = layer.weight_scale.detach(), weight.shape
    rows, cols = layer.scheme.weight.rows, layer.scheme.weight.cols
    scale = scale.repeat_interleave(n if rows == -1 else rows, 0)[:n]
    return weight * scale.repeat_interleave(k if cols == -1 else cols, 1)[:, :k]


def rounded(x: Tensor, scheme: Scheme, static: Tensor | None) -> Tensor:
    """Quantize and dequantize an input."""
    if scheme.activation is None:
        return x
    cols = scheme.activation.cols
    groups = x.view(*x.shape[:-1], -1, x.shape[-1] if cols == -1 else cols)
    scale = static
    if scale is None:
        floor = 1 / (448 * 512) if cols == -1 else 1e-10 / 448
        scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp_min(floor)
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(x.shape)


def near(found: Tensor, wanted: Tensor, share: float) -> bool:
    return bool((found.float() - wanted).norm() <= share * wanted.norm())


class Histories(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 99),
        scheme=st.sampled_from(SCHEMES),
        fuse=st.sampled_from(["all", "none"]),
        storage=st.sampled_from(["discard", "keep"]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def begin(self, seed: int, scheme: str, fuse: str, storage: str, dtype: torch.dtype) -> None:
        self.model: Any = new_model(seed, dtype)
        x, options = torch.randn(8, D, dtype=dtype), {"fuse": fuse, "weight_storage": storage}
        fp8kit.convert(self.model, scheme, include=["0.*"], calibrate=lambda m: m(x), **options)
        self.model.float()  # except kept dense weights
        self.numbers = self.found()
        self.check()

    def found(self) -> dict[str, Tensor]:
        others = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        weights = {f"{n}.weight": held(self.layer(n)).clone() for n in NAMES}
        return {
            n: t for n, t in others.items() if "weight_" not in n and "input_" not in n
        } | weights

    def layer(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def close(self, x: Tensor) -> bool:
        """Return whether model and shadow compute about the same."""
        with torch.no_grad():
            return near(self.model(x), self.shadow(x), 1e-4)

    def shadow(self, x: Tensor) -> Tensor:
        own = self.numbers
        for block in "01":
            h = F.layer_norm(x, (D,), own[f"{block}.norm.weight"], own[f"{block}.norm.bias"])
            q, k, v = (self.product(f"{block}.{n}", h) for n in "qkv")
            x = x + self.product(f"{block}.o", q * torch.sigmoid(k) + v)
            x = x + self.product(f"{block}.fc2", F.gelu(self.product(f"{block}.fc1", x)))
        return x

    def product(self, name: str, x: Tensor) -> Tensor:
        layer = self.layer(name)
        if isinstance(layer, Fp8Linear):
            x = rounded(x, layer.scheme, layer.input_scale)
        return F.linear(x, self.numbers[f"{name}.weight"], self.numbers.get(f"{name}.bias"))

    def check(self, quantized: Sequence[str] = ()) -> None:
        found = self.found()
        assert found.keys() == self.numbers.keys()
        for name, tensor in found.items():
            assert near(tensor, self.numbers[name], 0.06 if name in quantized else 1e-6), name
        self.numbers = found
        assert {n for n, _ in self.model.named_parameters()} <= self.model.state_dict().keys()
        # the order of a sum decides the code of a value between two codes, so try several inputs
        assert any(self.close(torch.randn(3, D)) for _ in range(5))

    @rule(
        scheme=st.sampled_from(SCHEMES),
        include=st.sampled_from(PARTS),
        fuse=st.sampled_from(["all", "none"]),
        storage=st.sampled_from(["discard", "keep"]),
        apart=st.booleans(),
    )
    def convert(
        self, scheme: str, include: list[str], fuse: str, storage: str, apart: bool
    ) -> None:
        x, before = torch.randn(8, D), {n: type(self.layer(n)) for n in NAMES}
        options: dict[str, Any] = {"fuse": fuse, "weight_storage": storage, "copy": apart}
        report = fp8kit.convert(
            self.model, scheme, include=include, calibrate=lambda m: m(x), **options
        )
        if apart:
            self.check()
            self.model = report.model
        self.check([f"{n}.weight" for n in NAMES if type(self.layer(n)) is not before[n]])

    @rule(how=st.sampled_from(["inference", "gradient", "many", "none", "half", "eval"]))
    def call(self, how: str) -> None:
        x = torch.randn(600 if how == "many" else 0 if how == "none" else 2, D)
        if how == "half":
            assert self.model.half()(x.half()).dtype == torch.float16
            self.model.float()
            self.numbers |= {n: t for n, t in self.found().items() if t.dim() == 1}
            dense = [n for n in NAMES if not isinstance(self.layer(n), Fp8Linear)]
            self.numbers |= {f"{n}.weight": held(self.layer(n)).clone() for n in dense}
        elif how == "gradient":
            y = self.model(x.requires_grad_())
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.isfinite().all()
        else:
            with torch.inference_mode(how == "inference"):
                self.model.train(how != "eval")(x)
        self.check()

    @rule(how=st.sampled_from(COPIES))
    def copied(self, how: str) -> None:
        old, file = self.model, io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model")
            if how == "deepcopy":
                self.model = copy.deepcopy(old)
            elif how == "pickle":
                self.model = pickle.loads(pickle.dumps(old))
            elif how == "save":
                torch.save(old, file)
                self.model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            elif how == "safetensors":
                save_model(old, path)
                load_model(self.model, path)
            elif how == "meta":
                state = {n: t.clone() for n, t in old.state_dict().items()}
                old.to("meta").to_empty(device="cpu")
                old.load_state_dict(state)
            else:
                fp8kit.save(old, path)
                self.model = new_model(0)
                fp8kit.load(path, self.model)
        if how in ("deepcopy", "pickle", "save"):
            with torch.no_grad():
                for parameter in old.parameters():
                    parameter.zero_()
        self.check()

    @rule(
        seed=st.integers(0, 99),
        way=st.sampled_from(["load_state_dict", "assign", "load_weights", "partial"]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def load(self, seed: int, way: str, dtype: torch.dtype) -> None:
        state = new_model(100 + seed, dtype).state_dict()
        if way == "partial":
            state = {n: t for n, t in state.items() if n.startswith("0.")}
        if way == "load_weights":
            fp8kit.load_weights(self.model, state)
        else:
            self.model.load_state_dict(state, strict=way != "partial", assign=way == "assign")
            self.model.float()
        self.numbers |= {n: t.float() for n, t in state.items()}
        self.check([f"{n}.weight" for n in NAMES])

    @rule(name=names, factor=factors, how=st.sampled_from(["scale", "data", "bias", "norm"]))
    def edit(self, name: str, factor: float, how: str) -> None:
        layer = self.layer(name)
        if how in ("scale", "data") and (
            not isinstance(layer, Fp8Linear) or layer.original_weight is not None
        ):
            return
        key = {"bias": f"{name}.bias", "norm": f"{name[0]}.norm.weight"}.get(how, f"{name}.weight")
        if key not in self.numbers:
            return
        with torch.no_grad():
            if key == f"{name}.weight":
                scale = layer.weight_scale if how == "scale" else layer.weight_scale.data
                scale.mul_(factor)
            else:
                self.model.get_parameter(key).mul_(factor)
        self.numbers[key] = self.numbers[key] * factor
        self.check()

    @rule(name=names, factor=factors)
    @precondition(
        lambda self: any(
            getattr(m, "original_weight", None) is not None for m in self.model.modules()
        )
    )
    def edit_kept(self, name: str, factor: float) -> None:
        kept = getattr(self.layer(name), "original_weight", None)
        if kept is not None:
            kept.mul_(factor)
            self.model(torch.randn(2, D))
            self.numbers[f"{name}.weight"] = kept.float().clone()
        self.check([f"{name}.weight"])

    @rule(name=names, how=st.sampled_from(["new", "dense", "swap"]))
    def replace(self, name: str, how: str) -> None:
        layer, block = self.layer(name), self.model[int(name[0])]
        if how == "swap":
            block.q, block.k = block.k, block.q
            for kind in ("weight", "bias"):
                q, k = (f"{name[0]}.{n}.{kind}" for n in "qk")
                self.numbers[q], self.numbers[k] = self.numbers[k], self.numbers[q]
        else:
            shape = (layer.in_features, layer.out_features, layer.bias is not None)
            made = nn.Linear(*shape)
            if how == "dense" and isinstance(layer, Fp8Linear):
                made = layer.to_linear(torch.float32)
            setattr(block, name[2:], made)
            self.numbers |= {f"{name}.{n}": p.detach().clone() for n, p in made.named_parameters()}
        self.check()

    @rule(rate=st.sampled_from([0.01, 0.1]))
    def train(self, rate: float) -> None:
        fixed = {n: p.clone() for n, p in self.model.state_dict().items() if "scale" in n}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("bias" in name or "norm" in name)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.model(torch.randn(4, D)).pow(2).mean().backward()
        torch.optim.SGD(trained, lr=rate).step()
        self.model.zero_grad()
        for parameter in trained:
            parameter.requires_grad_(False)
        assert all(torch.equal(fixed[n], self.model.state_dict()[n]) for n in fixed)
        self.numbers |= {n: t for n, t in self.found().items() if t.dim() == 1}
        self.check()


def test_a_model_holds_and_gives_the_same_numbers_whatever_comes() -> None:
    size = settings(
        max_examples=80, stateful_step_count=14, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Histories, settings=size)
