"""``evaluate``: errors of layers alone and together, next tokens, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8kit
from fp8kit.cli.main import main
from fp8kit.errors import CheckpointError
from fp8kit.io import models
from numerics import sqnr_bounds

NANO = Path(__file__).parents[2] / "examples" / "nano"


class Stack(nn.Module):
    """Three layers in a row; the second one gets outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        spiked = torch.cat([h[..., :1] * self.scale, h[..., 1:]], -1)
        return self.c(self.b(spiked))


def converted(dense: nn.Module) -> nn.Module:
    model = copy.deepcopy(dense)
    fp8kit.convert(model, exclude=[])
    return model


def test_layers_and_output_agree_with_a_plain_computation() -> None:
    dense = Stack()
    model = converted(dense)
    x = torch.randn(64, 128)
    found = fp8kit.evaluate(model, dense, [x])
    assert {layer.name for layer in found.layers} == {"a", "b", "c"}

    def db(expected: torch.Tensor, got: torch.Tensor) -> float:
        ratio = expected.double().square().sum() / (got - expected).double().square().sum()
        return 10 * math.log10(ratio.item())

    with torch.no_grad():
        middle = dense.b(dense.a(x))
        by_name = {layer.name: layer for layer in found.layers}
        assert by_name["c"].sqnr == pytest.approx(db(dense.c(middle), model.c(middle)))
        assert by_name["c"].drift == pytest.approx(db(dense(x), model(x)))
        assert found.output_sqnr == pytest.approx(db(dense(x), model(x)))
    assert by_name["a"].drift == pytest.approx(by_name["a"].sqnr)  # nothing comes before it
    assert by_name["c"].drift < by_name["c"].sqnr  # all before it adds
    low, high = sqnr_bounds("FP8_DYNAMIC")
    assert all(low < layer.sqnr < high for layer in found.layers)
    assert found.kl is found.perplexity is None


def test_the_layer_that_hurts_comes_first_and_is_excluded() -> None:
    dense = Stack()
    dense.scale = 1e6  # the other codes of a token become zero
    with torch.no_grad():
        dense.b.weight[:, 0] = 0  # what is large does not matter
    model = converted(dense)
    found = fp8kit.evaluate(model, dense, [torch.randn(32, 128)])
    assert found.layers[0].name == "b"
    low, _ = sqnr_bounds("FP8_DYNAMIC")
    assert found.exclusions(low) == ["b"]
    assert found.exclusions(-1000) is None  # an empty list would switch the defaults off
    better = copy.deepcopy(dense)
    fp8kit.convert(better, exclude=found.exclusions(low))
    again = fp8kit.evaluate(better, dense, [torch.randn(32, 128)])
    assert again.output_sqnr > found.output_sqnr + 10


def test_tokens_of_a_trained_model() -> None:
    dense = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.bfloat16)
    model = fp8kit.load(NANO, scheme="FP8_DYNAMIC")
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    ids = torch.tensor(tokenizer((NANO.parent / "eval.txt").read_text())["input_ids"][:128])[None]
    mask = torch.ones_like(ids)
    mask[:, 100:] = 0
    found = fp8kit.evaluate(model, dense, [{"input_ids": ids, "attention_mask": mask}])
    with torch.no_grad():
        p, q = (
            m(input_ids=ids, attention_mask=mask).logits.float()[:, :100] for m in (dense, model)
        )
    losses = [F.cross_entropy(z[0, :-1], ids[0, 1:100]).item() for z in (p, q)]
    assert found.reference_perplexity == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(losses[1]), rel=1e-4)
    kl = F.kl_div(
        q[0].log_softmax(-1), p[0].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found.kl == pytest.approx(kl.item(), rel=1e-3)
    assert found.kl > 1e-5, "the FP8 model computes in high precision"
    assert found.agreement is not None
    assert 0.8 < found.agreement < 1
    assert len(found.layers) == 28
    assert not any(name in str(found) for name in ("nan", "None"))
    assert found.to_dict()["kl"] == found.kl


def test_modes_and_hooks_are_as_before() -> None:
    dense = Stack().train()
    model = converted(dense)
    fp8kit.evaluate(model, dense, [torch.randn(2, 128)])
    assert dense.training
    assert dense.a.training
    assert not any(m._forward_hooks for root in (model, dense) for m in root.modules())


def test_calls_that_differ_have_no_drift() -> None:
    class Twice(Stack):
        times = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.a(x)
            return self.b(x)

    dense = Twice()
    model = converted(dense)
    dense.times = 2
    found = {e.name: e for e in fp8kit.evaluate(model, dense, [torch.randn(2, 128)]).layers}
    assert found["a"].drift is None
    assert found["b"].drift is not None


class Headed(nn.Module):
    """A model with a head, whose logits a test may change."""

    def __init__(self, classes: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(128, 128), nn.Linear(128, classes)
        self.change = change

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        h = torch.sin(torch.arange(128) * (1.0 + input_ids[..., None]))
        return SimpleNamespace(logits=self.change(self.head(self.body(h))))


def evaluated(classes: int, change: Callable[[torch.Tensor], torch.Tensor]) -> fp8kit.Evaluation:
    dense = Headed(classes, change)
    return fp8kit.evaluate(converted(dense), dense, [{"input_ids": torch.arange(40).view(2, 20)}])


def test_classes_of_tokens_are_no_tokens() -> None:
    found = evaluated(16, lambda logits: logits)
    assert found.kl is not None
    assert found.perplexity is None
    assert evaluated(64, lambda logits: logits).perplexity is not None


def test_logits_that_a_mask_made_infinite() -> None:
    shut = torch.arange(64) % 3 == 0
    found = evaluated(64, lambda logits: logits.masked_fill(shut, -torch.inf))
    low, high = sqnr_bounds("FP8_DYNAMIC")
    assert low - 6 < found.output_sqnr < high
    assert found.kl is not None
    assert 0 < found.kl < 0.1


def test_a_model_that_is_sure_of_wrong_tokens_has_infinite_perplexity() -> None:
    found = evaluated(64, lambda logits: logits * 1e4)
    assert found.perplexity == found.reference_perplexity == math.inf
    assert "perplexity: inf -> inf" in str(found)


def test_outputs_of_a_length_that_is_computed() -> None:
    lengths = iter((3, 2))
    found = evaluated(64, lambda logits: logits[:, : next(lengths)])
    assert math.isnan(found.output_sqnr)
    assert found.kl is None
    assert [layer.name for layer in found.layers] == ["body"]
    assert "output: SQNR nan dB" in str(found)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d, m: fp8kit.evaluate(d, d, [torch.ones(1, 128)]), "holds no Fp8Linear"),
        (lambda d, m: fp8kit.evaluate(m, m, [torch.ones(1, 128)]), "no dense layer for 3 FP8"),
        (lambda d, m: fp8kit.evaluate(m, nn.Sequential(d), [torch.ones(1, 128)]), "a, b, c"),
        (lambda d, m: fp8kit.evaluate(m, d, []), "No FP8 layer of Stack ran"),
    ],
    ids=["dense", "itself", "names", "no-data"],
)
def test_refusals(call: Callable[[nn.Module, nn.Module], object], words: str) -> None:
    dense = Stack()
    with pytest.raises(ValueError, match=words):
        call(dense, converted(dense))


@pytest.mark.parametrize("data", [torch.ones(1, 128), {"x": torch.ones(1, 128)}, "text"])
def test_one_batch_is_no_list(data: object) -> None:
    dense = Stack()
    with pytest.raises(TypeError, match=r"Pass \[batch\]"):
        fp8kit.evaluate(converted(dense), dense, data)  # type: ignore[arg-type]


def test_what_is_no_model_is_named() -> None:
    for pair in ((converted(Stack()), None), ("dir", Stack())):
        with pytest.raises(TypeError, match=r"Got a (NoneType as reference|str as model)"):
            fp8kit.evaluate(*pair, [torch.ones(1, 128)])  # type: ignore[arg-type]


def test_the_command_prints_what_the_function_measures(tmp_path: Path) -> None:
    fp8kit.quantize_checkpoint(NANO, tmp_path / "fp8")
    text = tmp_path / "text"
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    arguments = ["eval", NANO, tmp_path / "fp8", "--text", text, "--tokens", 64, "--length", 32]
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["layers"]) == 28
    assert 0 < found["kl"] < 1
    config = tmp_path / "fp8/config.json"  # texts are judged first: this model cannot be built
    config.write_text(config.read_text().replace("LlamaForCausalLM", "NoModel"))
    text.write_text("")
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 1
    assert "holds 0 tokens" in result.output
    text.write_bytes(b"caf\xe9")
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 1
    assert "no UTF-8: unexpected end of data at byte 3. The text is" in result.output


def test_a_directory_without_a_tokenizer_is_told_from_an_empty_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("words")
    language = models.integration("transformers_evaluation")
    with pytest.raises(CheckpointError, match=r"experts makes no tokens of .*text.*beside the"):
        language.text_batches(NANO.parent / "experts", text, 64, 32, "cpu")
