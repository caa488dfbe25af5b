"""Layers that must stay dense because of the code around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fp8kit
from fp8kit.conversion.eligibility import Eligibility
from numerics import assert_bits_equal, relative_error

IDS = torch.arange(32).view(2, 16)
WO = "encoder.block.0.layer.1.DenseReluDense.wo"
DTYPE = "asks for the dtype of its weight"
READS = "reads its weight instead of calling it"


def t5(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=256, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}EncoderModel")(config).bfloat16().eval()


def hidden(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(IDS).last_hidden_state
    return y


def reasons(report: fp8kit.Report) -> dict[str, str]:
    return {r.name: r.reason for r in report.skipped}


def test_weights_of_another_kind_of_tensor_are_named() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    for layer in model[:2]:
        held = layer.weight.detach()
        layer.weight = nn.Parameter(TwoTensor(held, held))  # neither has an address of its own
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["2"]
    assert reasons(report) == dict.fromkeys("01", "its weight is a TwoTensor of torch")


class Scaled(nn.TransformerEncoderLayer):
    """Has its own ``forward``, without the fast path of its parent."""

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        src = src + 0.5 * self._sa_block(self.norm1(src), None, None)
        return src + self._ff_block(self.norm2(src))


class Doubled(nn.TransformerEncoderLayer):
    """Calls the ``forward`` of its parent."""

    @torch.no_grad()
    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(2 * src)


def test_the_fast_path_of_an_encoder_layer_counts_only_where_it_may_run() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(kind(128, 2, 256, batch_first=True) for kind in (Scaled, Doubled)).eval()
    x = torch.randn(2, 3, 128)
    with torch.no_grad():
        before = [layer(x) for layer in model]
        report = fp8kit.convert(model)
        after = [layer(x) for layer in model]
    assert [r.name for r in report.converted] == ["0.linear1", "0.linear2"]
    assert "fast path" in reasons(report)["1.linear1"]
    assert 1e-3 < relative_error(after[0], before[0]) < 0.05
    assert_bits_equal(after[1], before[1])


@pytest.mark.parametrize("kind", ["T5", "UMT5", "MT5", "LongT5"])
def test_models_that_cast_to_the_dtype_of_a_weight_still_run(kind: str) -> None:
    model = t5(kind)
    dense = hidden(model)
    report = fp8kit.convert(model)
    assert list(reasons(report)) == [WO]
    assert len(report.converted) >= 5
    assert 1e-3 < relative_error(hidden(model), dense) < 0.1


def test_what_a_model_keeps_in_float32_is_skipped_by_name() -> None:
    report = fp8kit.plan(t5("UMT5")).report
    assert reasons(report) == {WO: "the model keeps it in float32"}
    inside = fp8kit.plan(nn.ModuleDict({"text": t5("UMT5")})).report
    assert reasons(inside) == {f"text.{WO}": "the model keeps it in float32"}


@pytest.mark.parametrize("kept", ["out", ["out"]])
def test_one_name_of_what_is_kept_needs_no_list(kept: Any) -> None:
    model = nn.ModuleDict({"out": nn.Linear(256, 256), "o": nn.Linear(256, 256)})
    model._keep_in_fp32_modules = kept
    assert reasons(fp8kit.plan(model).report) == {"out": "the model keeps it in float32"}


def test_a_part_of_such_a_model_is_known_by_its_code() -> None:
    block = t5("UMT5").encoder.block[0]
    x = torch.randn(2, 16, 128).bfloat16()
    report = fp8kit.convert(block)
    assert reasons(report) == {
        "layer.1.DenseReluDense.wo": f"UMT5DenseGatedActDense.forward {DTYPE}"
    }
    with torch.no_grad():
        assert block.layer[1](x).isfinite().all()


def test_planning_loading_and_streaming_agree(tmp_path: Path) -> None:
    model = t5("LongT5")
    model.save_pretrained(tmp_path / "dense")
    loaded = fp8kit.load(tmp_path / "dense", scheme="FP8_DYNAMIC")
    fp8kit.quantize_checkpoint(tmp_path / "dense", tmp_path / "fp8", "FP8_DYNAMIC")
    streamed = fp8kit.load(tmp_path / "fp8")
    fp8kit.convert(model)
    for other in (loaded, streamed):
        assert type(other.get_submodule(WO)) is nn.Linear
        torch.testing.assert_close(hidden(other), hidden(model), rtol=0, atol=0)


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)
        self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x.to(self.out.weight.dtype))
        return y + x @ self.fc.weight.to(x.dtype).T


class Harmless(Casting):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.fc.weight.shape[0]
        y: Tensor = self.out(self.fc(x.to(self.fc.weight.device)))
        return y * rows


def test_code_of_ones_own_is_read_too() -> None:
    assert Eligibility(Casting()).of(["fc"]) == f"Casting.forward {READS}"
    assert Eligibility(nn.Sequential(Casting())).of(["0.out"]) == f"Casting.forward {DTYPE}"
    model, x = Casting(), torch.randn(3, 128)
    expected = model(x)
    with pytest.warns(UserWarning, match="No layer becomes FP8: Casting.forward "):
        fp8kit.convert(model)
    assert torch.equal(model(x), expected)


def test_other_uses_of_a_weight_are_no_obstacle() -> None:
    obstacles = Eligibility(Harmless())
    assert [obstacles.of([name]) for name in ("fc", "out")] == ["", ""]


def test_strict_names_them() -> None:
    with pytest.raises(fp8kit.ConversionError, match=rf"out: Casting\.forward {DTYPE}"):
        fp8kit.plan(Casting(), strict=True)


class Slots(nn.Linear):
    __slots__ = ("more",)


def test_a_class_with_slots_stays_dense() -> None:
    """Python cannot change the class of an instance with slots."""
    model = nn.Sequential(Slots(128, 128), nn.Linear(128, 128))
    report = fp8kit.convert(model, include=["0", "1"])
    assert [r.name for r in report.converted] == ["1"]
    assert "Slots is a subclass of nn.Linear with __slots__" in str(report)
