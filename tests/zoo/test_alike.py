"""Streaming a checkpoint and converting the model make the same layers FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp8kit
from fp8kit.io.checkpoints import decide, high_precision
from zoo import of_transformers

ALIKE = (
    "AlbertForMaskedLM",
    "BertForMaskedLM",
    "DeiTForImageClassificationWithTeacher",
    "FalconForCausalLM",
    "Gemma3ForConditionalGeneration",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "ModernBertForMaskedLM",
    "OPTForCausalLM",
    "Qwen3ForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "XLNetLMHeadModel",
)
KNOWN = {a.name.split("/")[1]: a for a in of_transformers.architectures()}


@pytest.mark.parametrize("name", ALIKE)
def test_streaming_decides_as_plan_does(name: str, tmp_path: Path) -> None:
    model = KNOWN[name].model(torch.bfloat16)
    planned = sorted(r.shape for r in fp8kit.plan(model).report.converted)
    model.save_pretrained(tmp_path)
    report = decide(high_precision(tmp_path), fp8kit.Recipe(target="transformers")).report
    # names differ where Transformers saves under older ones
    assert sorted(r.shape for r in report.converted) == planned
    assert planned


def test_conv1d_converts_in_memory_and_no_checkpoint_holds_it(tmp_path: Path) -> None:
    model = KNOWN["GPT2LMHeadModel"].model(torch.bfloat16)
    dense = {n: t.clone() for n, t in model.state_dict().items()}
    layer = "transformer.h.0.attn.c_proj"
    assert dense[f"{layer}.weight"].shape[0] == dense[f"{layer}.weight"].shape[1]  # no shape tells
    model.save_pretrained(tmp_path / "dense")
    fp8kit.convert(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for load in (
        lambda: model.load_state_dict(dense, strict=False),
        lambda: fp8kit.load_weights(model, dense),
        lambda: fp8kit.load(tmp_path / "dense", model),
        lambda: fp8kit.load_weights(model, before),
    ):
        for parameter in model.parameters():
            parameter.detach().view(torch.uint8).zero_()
        load()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    with pytest.raises(fp8kit.CheckpointError, match=r"come from Conv1D of Transformers"):
        fp8kit.save(model, tmp_path / "fp8")
