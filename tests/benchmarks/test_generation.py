"""The benchmark of language models in every way that it times, on models for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import generation
import tables
from generation import Setup
from processes import Case
from tables import whole_model

PROMPT = 24


def setup(model: str, variant: str, *cases: Case) -> Setup:
    return Setup(model, variant, 2, cases, tiny=True)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
# of Transformers' own code, while experts are compiled
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("model", generation.MODELS)
def test_every_way_gives_the_numbers_of_bf16_but_for_fp8(model: str) -> None:
    every = generation.cases(generation.WAYS, [2], PROMPT)
    dense, fp8 = (generation.build(setup(model, v, *every)) for v in ("bf16", "fp8kit"))
    assert dense.about()["fp8_gb"] == 0
    assert 0.5 < fp8.about()["fp8_gb"] / fp8.about()["weights_gb"] < 1
    for case in every:
        exact, found = (torch.tensor(one.prepare(case).result) for one in (dense, fp8))
        error = float((found - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.1, case
        assert 0 < dense.measure(case) < 1e7


def test_a_captured_step_always_computes_the_same() -> None:
    case = Case("captured", 2)
    dense = generation.build(setup("llama", "bf16", case))
    first = dense.prepare(case).result
    dense.measure(case)
    assert dense.prepare(case).result == first


def test_a_step_continues_its_prompt() -> None:
    case = Case("step", 1)
    dense = generation.build(setup("llama", "bf16", case))
    prompt, token = dense.tokens(1, generation.PROMPT), dense.tokens(1, 1)
    with torch.no_grad():
        whole = dense.model(torch.cat([prompt, token], 1)).logits[0, -1]
    found = torch.tensor(dense.prepare(case).result)
    # another length of the cache, and so of the mask, changes the order of attention's sums
    torch.testing.assert_close(found, whole.float(), rtol=0.05, atol=0.02)


def test_decoding_that_is_not_compiled_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("compiled", 1)
    dense = generation.build(setup("llama", "bf16", case))
    dense.model.generation_config.disable_compile = True
    with pytest.raises(RuntimeError, match="did not compile"):
        dense.prepare(case)


def test_the_tokens_are_the_same_for_every_variant() -> None:
    steps = generation.Steps(torch.tensor([[[3], [1]], [[0], [2]]]))
    for wanted in ([3, 1], [0, 2]):
        scores = torch.randn(2, 5)
        chosen = steps(torch.empty(0), scores)
        assert chosen.argmax(1).tolist() == wanted
        assert steps.scores is scores
    assert len(steps.times) == 2


def test_steps_that_settle_are_not_counted() -> None:
    steps = generation.Steps(torch.empty(0))
    steps.times = [0.0] * generation.UNSTEADY + [1.0, 3.0, 5.0]
    assert steps.step_us() == 2e6


def test_each_process_compiles_one_model_at_most() -> None:
    every = generation.cases(generation.WAYS, [1, 16, 64], 4096)
    found = generation.plans("llama", 32, every, tiny=False)
    variants = ("fp8kit", "fp8kit attention", "torchao", "bf16")
    assert [plan.variant for plan in found] == [v for v in variants for _ in range(3)]
    for plan in found:
        assert sum(case.way == "compiled" for case in plan.cases) == 1
    covered = {case for plan in found if plan.variant == "fp8kit" for case in plan.cases}
    assert covered == set(every)
    assert Case("prefill", 1, 4096) in covered
    some = generation.plans("llama", 32, every, tiny=False, variants=["torchao"])
    assert [plan.variant for plan in some] == ["torchao"] * 3


def test_a_variant_that_the_model_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generation.main(["qwen", "out.json", "--variants", "torchao"])
    assert (
        "variants of qwen are fp8kit, fp8kit attention, bf16, bf16 batched_mm"
        in capsys.readouterr().err
    )


def test_a_part_of_the_layers_has_the_same_part_of_the_vocabulary() -> None:
    for name, model in generation.MODELS.items():
        whole = generation.configuration(Setup(name, "bf16", model.layers, ()))
        part = generation.configuration(Setup(name, "bf16", model.layers // 4, ()))
        assert whole.vocab_size == model.vocabulary
        assert whole.vocab_size <= 4 * part.vocab_size < whole.vocab_size + 4 * 64
        assert part.num_hidden_layers * 4 == whole.num_hidden_layers


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "--tiny --layers 1 --batches 1 --prompt 24 --rounds 1 --ways step compiled".split()
    generation.main(["llama", str(out), *words])
    found = json.loads(out.read_text())
    assert found["what"].startswith("Llama-8B shape, 1 of 32 layers")
    assert [row["way"] for row in found["rows"]] == ["step", "compiled"]
    for row in found["rows"]:
        assert set(row["us"]) == {"bf16", "fp8kit", "fp8kit attention"}
    assert "torchao" in found["rows"][1]["failed"]
    text = whole_model(found)
    assert "| way | sequences | tokens of each | bf16 | fp8kit | fp8kit attention |" in text
    assert "Did not run: torchao: DeclinedError: not asked for (TORCHAO)" in text


def test_rates_are_those_of_all_sequences() -> None:
    row = {"way": "step", "batch": 4, "tokens": 2, "us": {"bf16": 8e6, "fp8kit": 2e6}}
    assert tables.rate(row, "fp8kit") == "4 (4.00×)"
    del row["us"]["bf16"]
    assert tables.rate(row, "fp8kit") == "4"
